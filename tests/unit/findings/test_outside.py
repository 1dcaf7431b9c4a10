"""Tensors made of numbers from outside (a clock, a counter): a remark while nothing of the model reads them."""

from dataclasses import replace

from ulpscope.compare.comparison import CallComparison, Comparison
from ulpscope.findings.divergence import diverge
from ulpscope.findings.model import Divergence, Status
from ulpscope.model.names import call_text
from ulpscope.model.records import Phase
from unit.analyze.made import argument, call, tensor

WRONG = 0.25
CLOCK = call("tensor", 0, argument((0, 0), 340.0, 353.0), tensor("output", error=WRONG, measure=1))


def clock(role: str = "input", at: int = 0) -> Comparison:
    return tensor(role, at, error=WRONG, measure=1)


def within(module: str, each: CallComparison) -> CallComparison:
    sides = (
        None if side is None else replace(side, module=module) for side in (each.match.reference, each.match.target)
    )
    return replace(each, match=replace(each.match, **dict(zip(("reference", "target"), sides, strict=True))))


def names(found: Divergence) -> list[str]:
    return [call_text(each.call) for each in found.findings]


def test_a_clock_that_is_only_looked_at_is_a_remark() -> None:
    found = diverge([CLOCK, call("median", 1, clock(), tensor("output", error=WRONG, measure=2))])
    assert found.agrees
    assert found.remarks == [
        (
            "Torch.tensor.0.forward",
            "input.0.0 is 340.0 in the reference, 353.0 in the target; nothing of the model reads it",
        )
    ]
    assert +found.statuses == {Status.OUTSIDE: 2}


def test_a_clock_that_is_computed_with_something_else_is_where_it_begins() -> None:
    found = diverge([CLOCK, call("mul", 1, clock(), tensor("input", 1), tensor("output", error=WRONG, measure=3))])
    assert names(found) == ["Torch.tensor.0.forward"] and not found.remarks
    assert found.statuses[Status.SOURCE] == 1 and not found.statuses[Status.OUTSIDE]


def test_a_number_that_a_module_reads_is_where_it_begins() -> None:
    assert names(diverge([CLOCK, within("net", call("exp", 1, clock(), tensor("output", error=WRONG)))])) == [
        "Torch.tensor.0.forward"
    ]
    read = call("Linear", 1, clock(), tensor("output", error=WRONG), kind="Module")
    assert names(diverge([CLOCK, read])) == ["Torch.tensor.0.forward"]


def test_what_was_made_of_it_is_followed() -> None:
    mean = call("mean", 1, clock(), tensor("output", error=WRONG, measure=2))
    used = call("add", 2, tensor("input", error=WRONG, measure=2), tensor("input", 1), tensor("output", error=WRONG))
    assert names(diverge([CLOCK, mean, used])) == ["Torch.tensor.0.forward"]


def test_of_two_that_are_put_together_both_are_read() -> None:
    other = call("tensor", 1, argument((0, 0), 1.0, 2.0), tensor("output", error=WRONG, measure=2), index=1)
    both = call(
        "stack", 2, clock(), tensor("input", 1, error=WRONG, measure=2), tensor("output", error=WRONG, measure=3)
    )
    used = call("add", 3, tensor("input", error=WRONG, measure=3), tensor("input", 1), tensor("output", error=WRONG))
    assert len(diverge([CLOCK, other, both]).remarks) == 2
    assert names(diverge([CLOCK, other, both, used])) == ["Torch.tensor.0.forward", "Torch.tensor.1.forward"]


def test_a_number_in_a_model_or_of_another_kind_is_none_from_outside() -> None:
    assert names(diverge([within("net", CLOCK)])) == ["Torch.tensor.0.forward"]
    text = call("tensor", 0, argument((0, 0), "a", "b", "str"), tensor("output", error=WRONG, measure=1))
    assert names(diverge([text])) == ["Torch.tensor.0.forward"]


def test_another_learning_rate_is_told_by_the_optimizer() -> None:
    step = call("SGD", 0, argument("lr", 0.1, 0.2), kind="Optimizer", phase=Phase.STEP)
    alpha = call("add_", 1, argument("alpha", -0.1, -0.2), tensor("output", error=WRONG), parent=0)
    found = diverge([step, alpha])
    assert names(found)[0] == "Optimizer.SGD.step.0"
    assert found.findings[0].text == "input.lr is 0.1 in the reference, 0.2 in the target"


def test_a_learning_rate_that_float32_does_not_tell_apart_is_the_same() -> None:
    assert diverge([call("SGD", 0, argument("lr", 0.1, 0.1 + 1e-9), kind="Optimizer", phase=Phase.STEP)]).agrees
