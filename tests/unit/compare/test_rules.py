"""Every rule from numbers that one can check by hand."""

from __future__ import annotations

import math

import pytest

from ulpscope.compare.rules import (
    RULES,
    UNMARKED,
    Accuracy,
    Kind,
    Mark,
    Marked,
    Metric,
    Result,
    Unmeasured,
    accuracy,
    checksum_result,
    floored_error,
    marks,
    relative_error,
    statistics_result,
)

NAN, INF = math.nan, math.inf
FINE = Marked(1.0, -1.0, error=0.0, relative=0.0, floored=0.0, ratio=1.0, cosine=1.0)
(
    NOT_FINITE,
    HUGE,
    RATIO_COLLAPSES,
    LARGEST_IS_OFF,
    ERROR_GROWS,
    RATIO_FALLS,
    RELATIVE_APPEARS,
    COSINE_FALLS,
    GRADIENT,
) = (rule.reason for rule in RULES)


@pytest.mark.parametrize(
    ("cosine", "error", "verdict"),
    [
        (1.0, 0.0, Accuracy.YES),
        (0.99, 0.5, Accuracy.YES),  # the limits themselves are good
        (0.989, 0.001, Accuracy.YES),
        (0.989, 0.0011, Accuracy.NO),
        (0.9, 0.0, Accuracy.YES),
        (0.899, 0.0, Accuracy.NO),
        (1.0, 1.0, Accuracy.YES),
        (1.0, 1.0001, Accuracy.NO),
        (1.0, INF, Accuracy.NO),
        (NAN, 0.001, Accuracy.YES),
        (NAN, 0.002, Accuracy.NO),
        (1.0, NAN, Accuracy.NO),
        (Unmeasured.NOT_FINITE, Unmeasured.NOT_FINITE, Accuracy.NO),
        (Unmeasured.NO_ELEMENTS, 0.25, Accuracy.NONE),
        (Unmeasured.NO_ELEMENTS, Unmeasured.NO_ELEMENTS, Accuracy.NONE),
        (Unmeasured.SHAPE, Unmeasured.SHAPE, Accuracy.UNMATCHED),
    ],
)
def test_accuracy(cosine: Metric, error: Metric, verdict: Accuracy) -> None:
    assert accuracy(cosine, error) is verdict


@pytest.mark.parametrize(
    ("reference", "target", "error"),
    [
        (2.0, 3.0, 0.5),
        (-2.0, -3.0, 0.5),
        (-2.0, 2.0, 2.0),
        (4, 3, 0.25),
        (0.0, 0.0, 0.0),
        (0.0, 1e-30, INF),
        (INF, INF, 0.0),
        (INF, 1.0, INF),
        (1.0, INF, INF),
        (None, 1.0, None),
        (1.0, None, None),
    ],
)
def test_a_relative_error_is_relative_to_the_reference(
    reference: float | None, target: float | None, error: float | None
) -> None:
    assert relative_error(reference, target) == error


@pytest.mark.parametrize(("reference", "target"), [(NAN, 1.0), (1.0, NAN), (0.0, NAN), (INF, NAN), (NAN, NAN)])
def test_the_relative_error_of_nan_is_nan(reference: float, target: float) -> None:
    error = relative_error(reference, target)
    assert error is not None and math.isnan(error)


def test_statistics_warn_above_a_half_and_not_at_it() -> None:
    assert statistics_result([0.0, 0.5, 0.5, 0.0]) is Result.BLANK
    assert statistics_result([0.0, 0.0, 0.0, 0.501]) is Result.WARNING
    assert statistics_result([INF, 0.0, 0.0, 0.0]) is Result.WARNING
    assert statistics_result([None, NAN, None, NAN]) is Result.BLANK


def test_a_missing_checksum_equals_none() -> None:
    assert checksum_result("0a", "0a") is Result.PASS
    assert checksum_result("0a", "0b") is Result.DIFFERENT
    assert checksum_result(None, "0a") is Result.UNMATCHED
    assert checksum_result(None, None) is Result.UNMATCHED


@pytest.mark.parametrize(
    ("reference", "target", "error"),
    [(4.0, 2.0, 0.5), (-4.0, -2.0, 0.5), (0.001, 0.004, 0.3), (0.0, 0.005, 0.5), (None, 1.0, None)],
)
def test_the_floored_error_is_over_a_hundredth_at_least(
    reference: float | None, target: float | None, error: float | None
) -> None:
    assert floored_error(reference, target) == pytest.approx(error)


def test_the_floored_error_of_an_infinite_reference_is_not_a_number() -> None:
    error = floored_error(INF, 1.0)
    assert error is not None and math.isnan(error)


def mark_of(before: Marked, after: Marked, kind: Kind) -> tuple[Mark | None, tuple[str, ...]]:
    return marks([before], [after], kind)[1]


ELEMENTS, STATISTICS = Kind.ELEMENTS, Kind.STATISTICS


@pytest.mark.parametrize("kind", [ELEMENTS, STATISTICS])
@pytest.mark.parametrize(
    ("before", "after", "mark", "reason"),
    [
        (FINE, Marked(INF, 0.0), Mark.RED, NOT_FINITE),
        (FINE, Marked(0.0, -INF), Mark.RED, NOT_FINITE),
        (FINE, Marked(NAN, NAN), Mark.RED, NOT_FINITE),
        (FINE, Marked(error=1.1e10), Mark.RED, HUGE),
        (Marked(error=2.0), Marked(error=20.0), Mark.YELLOW, ERROR_GROWS),
        (Marked(relative=0.009), Marked(relative=0.11), Mark.YELLOW, RELATIVE_APPEARS),
        (FINE, Marked(same_gradient=False), Mark.YELLOW, GRADIENT),
    ],
)
def test_rules_for_elements_and_statistics(before: Marked, after: Marked, mark: Mark, reason: str, kind: Kind) -> None:
    assert mark_of(before, after, kind) == (mark, (reason,))


@pytest.mark.parametrize(
    ("before", "after", "kind", "mark", "reason"),
    [
        (Marked(ratio=0.91), Marked(ratio=0.59), ELEMENTS, Mark.RED, RATIO_COLLAPSES),
        (Marked(ratio=0.9), Marked(ratio=0.6), ELEMENTS, Mark.YELLOW, RATIO_FALLS),
        (Marked(cosine=0.9), Marked(cosine=0.79), ELEMENTS, Mark.YELLOW, COSINE_FALLS),
        (FINE, Marked(floored=0.51), STATISTICS, Mark.RED, LARGEST_IS_OFF),
    ],
)
def test_rules_for_one_kind_of_table(before: Marked, after: Marked, kind: Kind, mark: Mark, reason: str) -> None:
    assert mark_of(before, after, kind) == (mark, (reason,))
    other = STATISTICS if kind is ELEMENTS else ELEMENTS
    assert mark_of(before, after, other) == UNMARKED


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FINE, FINE),
        (FINE, Marked(error=1e10)),
        (Marked(ratio=0.7), Marked(ratio=0.6)),
        (Marked(error=1.0), Marked(error=100.0)),
        (Marked(error=2.0), Marked(error=19.0)),
        (Marked(relative=0.01), Marked(relative=0.2)),
        (Marked(relative=0.0), Marked(relative=0.1)),
        (Marked(cosine=1.0), Marked(cosine=0.9)),
        (Marked(), Marked(ratio=0.0, cosine=0.0, error=1e9, relative=9.0)),
        (FINE, Marked()),
    ],
)
def test_what_is_at_a_limit_or_unknown_is_not_marked(before: Marked, after: Marked) -> None:
    assert mark_of(before, after, ELEMENTS) == mark_of(before, after, STATISTICS) == UNMARKED


def test_inputs_are_marked_by_the_rules_about_one_value_only() -> None:
    bad = Marked(1.0, 0.0, error=2e10, floored=9.0, ratio=0.0, cosine=0.0, relative=9.0)
    of_input, of_output = marks([bad], [FINE], STATISTICS)
    assert of_input == (Mark.RED, (HUGE,))
    assert of_output == UNMARKED


def test_one_input_of_many_is_enough() -> None:
    inputs = [Marked(ratio=0.5), Marked(ratio=0.95), Marked(ratio=None), Marked(ratio=NAN)]
    assert marks(inputs, [Marked(ratio=0.5)], ELEMENTS)[-1] == (Mark.RED, (RATIO_COLLAPSES,))
    inputs = [Marked(error=0.5), Marked(error=300.0), Marked(error=3.0)]
    assert marks(inputs, [Marked(error=30.0)], STATISTICS)[-1] == (Mark.YELLOW, (ERROR_GROWS,))


def test_red_beats_yellow_and_says_its_own_reasons_only() -> None:
    after = Marked(1.0, 0.0, error=2e10, ratio=0.5, cosine=0.5, same_gradient=False)
    before = Marked(error=2.0, ratio=1.0, cosine=1.0)
    assert mark_of(before, after, ELEMENTS) == (Mark.RED, (HUGE, RATIO_COLLAPSES))


def test_an_error_that_is_infinite_because_the_target_is_is_not_said_twice() -> None:
    assert mark_of(FINE, Marked(INF, 0.0, error=INF), STATISTICS) == (Mark.RED, (NOT_FINITE,))


def test_a_table_of_checksums_has_no_marks() -> None:
    assert mark_of(FINE, Marked(NAN, NAN, same_gradient=False), Kind.CHECKSUMS) == UNMARKED
