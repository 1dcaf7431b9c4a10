"""Shares of a loss gap, on a loss one can differentiate by hand: L = y^2 / 2, so that dL/dy = y."""

from __future__ import annotations

import numpy as np
import pytest

from ulpscope.analyze.attribution import Attribution, Part, Share, attribution, share_of
from ulpscope.report.attribution import attribution_json, attribution_lines


def part(error: list[float], gradient: list[float]) -> Part:
    return Part(np.array(error), np.array(gradient))


def test_a_share_is_the_error_times_the_mean_gradient() -> None:
    # The exact y is 3; the reference has 3, the target 3.5: L goes from 4.5 to 6.125.
    share = share_of("f", "m", "introduced", [(part([0.0], [3.0]), part([0.5], [3.5]))])
    assert share == Share("f", "m", "introduced", 0.5 * 3.25, 0.5 * 0.5)
    assert share.amount == 6.125 - 4.5


def test_an_error_that_both_runs_make_explains_nothing() -> None:
    share = share_of("f", "", "introduced", [(part([0.1, 0.2], [1, 2]), part([0.1, 0.2], [1, 2]))])
    assert share is not None
    assert share.amount == 0


def test_all_results_of_a_call_add_up() -> None:
    one = (part([0.0, 0.0], [1.0, 2.0]), part([1.0, 1.0], [1.0, 2.0]))
    share = share_of("f", "", "introduced", [one, one])
    assert share is not None
    assert share.amount == 6


def test_other_shapes_cannot_be_paired() -> None:
    assert share_of("f", "", "introduced", [(part([0.0], [1.0]), part([0.0, 1.0], [1.0, 1.0]))]) is None


def found(*amounts: float, gap: float, bend: float = 0.0) -> Attribution:
    shares = [Share(f"f.{at}", "", "introduced", amount, bend) for at, amount in enumerate(amounts)]
    return attribution(shares, step=0, rank=0, reference=1.0, target=1.0 + gap)


def test_the_largest_share_comes_first_and_the_sum_is_the_check() -> None:
    result = found(0.25, -0.5, 0.0, 0.75, gap=0.5)
    assert [share.call for share in result.shares] == ["f.3", "f.1", "f.0"]
    assert (result.explained, result.share, result.doubt) == (0.5, 1.0, "")


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (found(0.1, gap=0.5), "the sum is not the gap"),
        (found(0.5, gap=0.5, bend=0.3), "not first order"),
        (found(1e-8, gap=2.0**-24), "a rounding of the loss itself"),
        (found(float("nan"), gap=0.5), "not finite"),
    ],
)
def test_what_is_not_to_be_relied_on_says_why(result: Attribution, why: str) -> None:
    assert why in result.doubt
    assert attribution_json(result)["first_order"] is False
    assert "do not rely on it" in attribution_lines(result)[-1]


def test_weights_that_differ_are_told_apart() -> None:
    shares = [Share("f", "m", "weights", 0.25, 0.0), Share("g", "", "introduced", 0.25, 0.0)]
    result = attribution(shares, step=3, rank=0, reference=1.0, target=1.5)
    assert result.of_weights == 0.25
    assert attribution_lines(result)[1:] == [
        "     50.0%  weights that differed before this step, all together",
        "     50.0%  f in m, its weights differ",
        "     50.0%  g",
    ]
