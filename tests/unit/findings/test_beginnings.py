"""Where a difference begins that no call introduced, on comparisons made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ulpscope.compare.comparison import CallComparison, Comparison
from ulpscope.compare.verdict import rounding_of, tensor_verdict
from ulpscope.findings.advice import Cause, advise
from ulpscope.findings.divergence import diverge
from ulpscope.findings.model import Divergence, Status
from ulpscope.naming import call_text
from unit.analyze.made import call, tensor

# More than float32 rounds, less than bfloat16 does.
COARSE = 2e-3


def in_bfloat16(each: Comparison) -> Comparison:
    """The same, of which the target's is in bfloat16."""
    assert each.reference is not None and each.target is not None
    target = replace(each.target, dtype="torch.bfloat16")
    verdict = tensor_verdict(each.reference, target, each.evidence, each.error)
    return replace(each, target=target, verdict=verdict, rounding=rounding_of(each.reference, target))


def from_the_reference(each: Comparison, measure: int) -> Comparison:
    """The same, of which the reference's is another value."""
    assert each.reference is not None
    return replace(each, reference=replace(each.reference, measure=measure))


def findings(found: Divergence) -> list[tuple[str, Status, str]]:
    return [(call_text(each.call), each.status, each.text) for each in found.findings]


def passing_on(seq: int, measure: int, error: float = COARSE) -> CallComparison:
    """A call that takes a value that differs and gives another."""
    return call("add", seq, tensor("input", error=error, measure=measure), tensor("output", error=error, measure=90))


AUTOCAST = (
    call("linear", 0, tensor("input"), in_bfloat16(tensor("output", error=COARSE, measure=1))),
    call("float", 1, in_bfloat16(tensor("input", error=COARSE, measure=1)), tensor("output", error=COARSE, measure=2)),
)


def test_where_calls_inherit_what_another_dtype_rounds_the_first_call_in_it_is_named() -> None:
    found = diverge([call("sin", -1, tensor("input"), tensor("output")), *AUTOCAST, passing_on(2, 2)])
    text = "output.0 is torch.bfloat16 in the target, torch.float32 in the reference"
    assert findings(found) == [("Torch.linear.0.forward", Status.DTYPE, text)]
    assert not found.agrees
    advice = advise(found.first, reference="a", target="b")
    assert advice.cause is Cause.DTYPE
    assert advice.commands == ("ulpscope show b Torch.linear.0.forward", "ulpscope show a Torch.linear.0.forward")


def test_another_dtype_alone_is_no_difference() -> None:
    found = diverge(AUTOCAST[:1])
    assert found.agrees
    assert found.findings == []


def test_a_run_that_is_in_another_dtype_from_the_first_float_on_is_meant_to_be() -> None:
    first = call("embedding", -1, in_bfloat16(tensor("input", measure=40)), in_bfloat16(tensor("output", measure=41)))
    bare = [in_bfloat16(tensor("input")), in_bfloat16(tensor("output", error=COARSE, measure=1))]
    assert diverge([first, call("linear", 0, *bare), AUTOCAST[1], passing_on(2, 2)]).findings == []


def test_a_call_that_introduces_more_than_its_dtype_rounds_is_named_before_the_dtype() -> None:
    wrong = call("mul", 2, tensor("input", measure=50), tensor("output", error=0.25, measure=51))
    found = diverge([*AUTOCAST, passing_on(3, 2), wrong])
    assert [status for _, status, _ in findings(found)] == [Status.INTRODUCED]


@pytest.mark.parametrize("module_first", [True, False])
def test_of_a_module_and_a_call_inside_it_in_another_dtype_the_call_is_named(module_first: bool) -> None:
    module = call("mlp.MLP", 0, tensor("input"), in_bfloat16(tensor("output", error=COARSE, measure=1)), kind="Module")
    inside = call("linear", 1, tensor("input"), in_bfloat16(tensor("output", error=COARSE, measure=1)), parent=0)
    calls = [module, inside] if module_first else [inside, module]
    found = diverge([*calls, AUTOCAST[1], passing_on(3, 2)])
    assert [name for name, _, _ in findings(found)] == ["Torch.linear.0.forward"]


def test_a_call_that_only_the_target_has_is_named_where_another_takes_what_it_gives() -> None:
    idle = call("abs", 0, tensor("output", measure=4), only="target")
    extra = call("div", 1, tensor("output", measure=5), only="target")
    found = diverge([idle, extra, passing_on(2, 5, error=0.5)])
    text = "only the target has it, and Torch.add.0.forward takes what it gives as input.0"
    assert findings(found) == [("Torch.div.0.forward", Status.UNMATCHED, text)]
    assert advise(found.first, reference="a", target="b").commands == ("ulpscope show b Torch.div.0.forward",)


def test_a_call_that_only_the_reference_has_is_named_where_the_other_lacks_what_it_gives() -> None:
    before = call("sin", 0, tensor("input"), tensor("output", measure=1))
    missing = call("mul", 1, tensor("output", measure=7), only="reference")
    taken = from_the_reference(tensor("input", error=0.5, measure=1), 7)
    found = diverge([before, missing, call("relu", 2, taken, tensor("output", error=0.5, measure=2))])
    text = "only the reference has it, and Torch.relu.0.forward takes what it gives as input.0"
    assert findings(found) == [("Torch.mul.0.forward", Status.UNMATCHED, text)]
    assert advise(found.first, reference="a", target="b").commands == ("ulpscope show a Torch.mul.0.forward",)


def test_calls_that_are_alone_and_change_nothing_are_no_beginning() -> None:
    extra = call("div", 1, tensor("output", measure=5), only="target")
    found = diverge([extra, call("add", 2, tensor("input", measure=5), tensor("output"))])
    assert found.findings == []
    assert found.only_target == 1


def module(name: str, seq: int, *values: Comparison) -> CallComparison:
    return call(f"{name}.Linear", seq, *values, kind="Module")


def test_between_modules_another_dtype_is_passed_on_by_calls_that_are_not_recorded() -> None:
    weight = in_bfloat16(tensor("parameters", "weight", error=0.0))
    found = diverge(
        [
            module("down", 0, tensor("input"), weight, in_bfloat16(tensor("output", error=COARSE, measure=1))),
            module("up", 1, tensor("input", error=COARSE, measure=2), tensor("output", error=COARSE, measure=3)),
        ]
    )
    assert [(name, status) for name, status, _ in findings(found)] == [("Module.down.Linear.forward.0", Status.DTYPE)]


def test_what_comes_into_a_first_module_different_is_no_weight() -> None:
    came = tensor("input", error=0.5, measure=2, requires_grad=True)
    found = diverge([module("up", 1, came, tensor("output", error=0.5, measure=3))])
    assert [(name, status) for name, status, _ in findings(found)] == [("Module.up.Linear.forward.0", Status.SOURCE)]
    assert advise(found.first, reference="a", target="b").cause is Cause.OUTSIDE


def outer(error: float = 0.5) -> CallComparison:
    """A model whose inputs agree and whose output does not, around whatever has it as its parent."""
    return call("Net", 0, tensor("input"), tensor("output", error=error, measure=9), kind="Module")


DROPPED = [
    outer(),
    call("linear", 1, tensor("input"), tensor("output", measure=1), parent=0),
    call("mul", 2, tensor("output", measure=7), parent=0, only="reference"),
]


def test_a_module_in_which_one_run_lacks_a_call_is_not_accused_but_the_call_is() -> None:
    taken = from_the_reference(tensor("input", error=0.5, measure=1), 7)
    found = diverge([*DROPPED, call("relu", 3, taken, tensor("output", error=0.5, measure=2), parent=0)])
    text = "only the reference has it, and Torch.relu.0.forward takes what it gives as input.0"
    assert findings(found) == [("Torch.mul.0.forward", Status.UNMATCHED, text)]
    assert found.statuses[Status.INTRODUCED] == 0


@pytest.mark.parametrize("only", ["reference", "target"])
def test_so_it_is_where_nobody_is_seen_to_take_what_the_call_gives(only: str) -> None:
    alone = call("mul", 2, tensor("output", measure=7), parent=0, only=only)
    found = diverge([*DROPPED[:2], alone])
    assert findings(found) == [("Torch.mul.0.forward", Status.UNMATCHED, f"only in the {only}")]


def test_a_call_that_is_alone_outside_of_the_accused_module_does_not_excuse_it() -> None:
    found = diverge([*DROPPED[:2], call("mul", 2, tensor("output", measure=7), only="reference")])
    assert [(name, status) for name, status, _ in findings(found)] == [("Module.Net.forward.0", Status.INTRODUCED)]
    advice = advise(found.first, reference="a", target="b")
    assert advice.cause is Cause.MODULE
    assert "kernel" not in advice.text


def test_the_call_that_is_alone_comes_before_those_that_are_accused_behind_it() -> None:
    taken = from_the_reference(tensor("input", error=0.5, measure=1), 7)
    behind = [
        call("relu", 3, taken, tensor("output", error=0.5, measure=2)),
        call("matmul", 4, tensor("input"), tensor("output", error=0.5, measure=3)),
    ]
    found = diverge([DROPPED[1], call("mul", 2, tensor("output", measure=7), only="reference"), *behind])
    assert [name for name, _, _ in findings(found)] == ["Torch.mul.0.forward"]
    before = call("matmul", 0, tensor("input"), tensor("output", error=0.5, measure=3))
    found = diverge([before, DROPPED[1], call("mul", 2, tensor("output", measure=7), only="reference"), behind[0]])
    assert [name for name, _, _ in findings(found)] == ["Torch.matmul.0.forward"]


def test_a_weight_that_differs_behind_a_call_that_is_alone_is_told_too() -> None:
    taken = from_the_reference(tensor("input", error=0.5, measure=1), 7)
    behind = [
        call("relu", 3, taken, tensor("output", error=0.5, measure=2)),
        call("linear", 4, tensor("input", 1, error=0.5, measure=40), tensor("output", error=0.5, measure=3)),
    ]
    found = diverge([DROPPED[1], call("mul", 2, tensor("output", measure=7), only="reference"), *behind])
    assert [(name, status) for name, status, _ in findings(found)] == [
        ("Torch.mul.0.forward", Status.UNMATCHED),
        ("Torch.linear.0.forward", Status.SOURCE),
    ]
