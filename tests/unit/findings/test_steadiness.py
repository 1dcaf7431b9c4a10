"""Operators that round otherwise each time, and decisions between values within rounding: neither is an error."""

from dataclasses import replace

import pytest

from ulpscope.compare.comparison import CallComparison, Comparison
from ulpscope.findings.divergence import diverge
from ulpscope.findings.model import Divergence, Status
from ulpscope.findings.ranks import explain_later, origin
from ulpscope.model.names import call_text
from ulpscope.model.records import Phase
from ulpscope.report.outcome import Answer, Outcome, UnitOutcome
from ulpscope.report.panel import verdict_line
from unit.analyze.made import FLOAT32, argument, call, tensor

LAST_BITS = 6 * FLOAT32  # more than two correctly rounded results differ, less than a long sum may
CARRIED = 60 * FLOAT32
ROOT = call("mm", 0, tensor("input"), tensor("output", error=LAST_BITS, measure=1))
CARRIES = call("add", 1, tensor("input", error=LAST_BITS, measure=1), tensor("output", error=CARRIED, measure=2))


def token(role: str = "output", error: float = 0.5, measure: int | None = 3) -> Comparison:
    return tensor(role, error=error, dtype="torch.int64", measure=measure)


def choice(
    seq: int = 2, *, into: float = CARRIED, name: str = "argmax", out: Comparison | None = None
) -> CallComparison:
    return call(name, seq, tensor("input", error=into, measure=2), out or token())


def outcome(*found: Divergence, surroundings: tuple[tuple[str, str, str], ...] = ()) -> Outcome:
    later = explain_later(found)
    units = tuple(UnitOutcome(each, surroundings=surroundings) for each in later)
    return Outcome("r", "t", units, origin=origin(later))


def test_what_rounding_has_grown_to_is_agreement_with_a_remark() -> None:
    found = outcome(diverge([ROOT, CARRIES]))
    assert found.answer is Answer.AGREES
    ((_, (name, told)),) = found.remarks
    assert name == "Torch.mm.0.forward"
    assert "`mm` adds in another order each time; torch.use_deterministic_algorithms(True) would stop that" in told


def test_a_backward_that_is_unsteady_is_told_as_that() -> None:
    back = call("embedding", 1, tensor("input"), tensor("output", 1, error=LAST_BITS), phase=Phase.BACKWARD)
    found = outcome(diverge([call("embedding", 0, tensor("input"), tensor("output")), back]))
    assert "`embedding`'s backward adds in another order" in found.remarks[0][1][1]


def test_rounding_that_is_carried_on_agrees_in_other_surroundings_too() -> None:
    """Two devices round otherwise everywhere: that is no order of adding, and no error."""
    found = outcome(diverge([ROOT, CARRIES]), surroundings=(("device", "cpu", "cuda"),))
    assert found.answer is Answer.AGREES
    assert not found.remarks


def test_an_error_is_found_among_what_is_unsteady() -> None:
    broken = call("gelu", 2, tensor("input", error=CARRIED, measure=2), tensor("output", error=0.1))
    found = outcome(diverge([ROOT, CARRIES, broken]))
    assert found.answer is Answer.DIFFERS
    assert found.first is not None and found.first.call.name == "gelu"


def test_weights_of_the_next_step_differ_by_what_the_last_one_left() -> None:
    weight = call("linear", 0, tensor("input", 1, error=CARRIED, measure=9), tensor("output", error=CARRIED))
    assert outcome(diverge([ROOT, CARRIES]), diverge([weight], step=1)).answer is Answer.AGREES
    changed = call("linear", 0, tensor("input", 1, error=0.01, measure=9), tensor("output", error=0.01))
    found = outcome(diverge([ROOT, CARRIES]), diverge([changed], step=1))
    assert found.answer is Answer.DIFFERS and found.first is not None
    assert found.first.status is Status.SOURCE


def test_another_token_is_a_tie_and_what_follows_is_other_work() -> None:
    after = [
        call("embedding", 3, token("input"), tensor("output", error=1.4, measure=4)),
        call("item", 4, token("input"), argument("x", 1, 2)),
        call("cat", 5, token("input"), token("output"), only="target"),
    ]
    found = outcome(diverge([ROOT, CARRIES, choice(), *after], step=33))
    assert found.answer is Answer.INCOMPLETE and found.first is None
    assert verdict_line(found) == "? Another choice from step 33 on: a tie within rounding (argmax)."
    assert found.statuses[Status.CHOICE] == 1 and found.statuses[Status.OTHER] == 2
    assert next(name for _, (name, _) in found.remarks) == "Torch.argmax.0.forward"


@pytest.mark.parametrize("name", ["__gt__", "topk", "sort"])
def test_whatever_makes_whole_numbers_of_floats_decides(name: str) -> None:
    assert outcome(diverge([ROOT, CARRIES, choice(name=name)])).choice is not None


def test_floats_that_step_decide_too_and_others_do_not() -> None:
    stepped = tensor("output", error=0.5)
    assert outcome(diverge([ROOT, CARRIES, choice(name="round", out=stepped)])).choice is not None
    assert outcome(diverge([ROOT, CARRIES, choice(name="exp", out=stepped)])).first is not None


def test_a_decision_about_the_same_values_is_an_error() -> None:
    found = outcome(diverge([choice(into=0.0)]))
    assert found.answer is Answer.DIFFERS and found.first is not None
    assert found.first.call.name == "argmax"


def test_a_decision_after_an_error_is_its_consequence() -> None:
    broken = call("mm", 0, tensor("input"), tensor("output", error=0.1, measure=2))
    found = outcome(diverge([broken, choice(1, into=0.1)]))
    assert found.choice is None and found.answer is Answer.DIFFERS
    assert [call_text(each.call) for each in found.suspects] == ["Torch.mm.0.forward"]


def test_an_error_after_a_decision_is_still_found() -> None:
    broken = call("gelu", 3, tensor("input"), tensor("output", error=0.1))
    found = outcome(diverge([ROOT, CARRIES, choice(), broken]))
    assert found.answer is Answer.DIFFERS and found.first is not None and found.first.call.name == "gelu"


def test_the_module_around_a_decision_is_not_accused() -> None:
    router = call("Router", 1, tensor("input", error=LAST_BITS), tensor("output", error=1.0), kind="Module")
    inside = call("topk", 2, tensor("input", error=LAST_BITS), token(), parent=1)
    found = outcome(diverge([ROOT, router, inside]))
    assert found.answer is Answer.INCOMPLETE and found.choice is not None
    assert found.choice.comparison.match.call.id.name == "topk"


def test_steps_after_a_decision_are_other_work() -> None:
    later = call("linear", 0, tensor("input", error=1.0, measure=8), tensor("output", error=1.0))
    alone = call("cat", 1, tensor("input"), only="reference")
    found = outcome(diverge([ROOT, CARRIES, choice()]), diverge([later, alone], step=1))
    assert found.answer is Answer.INCOMPLETE
    assert found.alone == (1, 0), "which is still told"
    only = replace(found, only_reference=("step 2 rank 0",))
    assert only.answer is Answer.INCOMPLETE


def test_a_tie_within_what_rounding_has_grown_to_says_how_much() -> None:
    grown = call(
        "exp", 1, tensor("input", error=LAST_BITS, measure=1), tensor("output", error=15 * LAST_BITS, measure=2)
    )
    more = call(
        "exp", 2, tensor("input", error=15 * LAST_BITS, measure=2), tensor("output", error=1e-4, measure=3), index=1
    )
    found = outcome(diverge([ROOT, grown, more, choice(3, into=1e-4)]))
    assert (
        verdict_line(found)
        == "? Another choice from step 0 on: a tie within what rounding had grown to (1.0e-04) (argmax)."
    )
