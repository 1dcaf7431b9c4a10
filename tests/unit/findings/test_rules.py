"""Each rule with a view made by hand: what applies, and what leaves it to the next."""

from __future__ import annotations

from typing import Any

from ulpscope.findings import rules
from ulpscope.findings.model import Status
from ulpscope.findings.view import CallView
from unit.analyze.made import argument, call, tensor

OFF = 0.1


def view(*values: Any, **facts: Any) -> CallView:
    made = call("mul", 0, *values)
    ins = tuple(each for each in values if each.slot.role.value != "output")
    outs = tuple(each for each in values if each.slot.role.value == "output")
    errors = {"into": max((each.error or 0.0 for each in ins), default=0.0), "out": outs[0].error if outs else 0.0}
    return CallView(made, ins, outs, **{**errors, "limit": 1e-5, **facts})


def test_a_number_that_is_another_one_and_shows_is_the_finding() -> None:
    eps = argument(1, 1e-5, 1e-6)
    assert rules.said_of(view(tensor("input"), eps, tensor("output", error=1e-6), changed=eps))[0] is Status.SOURCE
    assert rules.said_of(view(tensor("input"), eps, tensor("output"), changed=eps))[0] is Status.IDENTICAL


def test_another_device_or_spelling_is_none_unless_the_result_is_another_one() -> None:
    device = argument(1, "cpu", "npu", "str")
    near, far = tensor("output", error=1e-6), tensor("output", error=OFF)
    assert rules.said_of(view(tensor("input"), device, near, changed=device))[0] is Status.ROUNDING
    assert rules.said_of(view(tensor("input"), device, far, changed=device))[0] is Status.SOURCE


def test_what_agrees_is_no_finding_whatever_was_read() -> None:
    assert rules.agrees(view(tensor("input", error=OFF), tensor("output"), dirty=True)) == (Status.IDENTICAL, "")


def test_what_is_within_its_limit_is_inherited_or_rounding() -> None:
    near = tensor("input", error=1e-6), tensor("output", error=1e-6)
    assert rules.within_limit(view(*near, dirty=True)) == (Status.INHERITED, "")
    assert rules.within_limit(view(*near)) == (Status.ROUNDING, "")
    assert rules.within_limit(view(tensor("input"), tensor("output", error=OFF))) is None


def test_of_inputs_that_have_nothing_in_common_nothing_follows() -> None:
    lost = tensor("input", error=1.0), tensor("output", error=9.0)
    assert rules.explained(view(*lost, dirty=True)) == (Status.INHERITED, "")
    assert rules.explained(view(tensor("input", error=1e-6), tensor("output", error=9.0), dirty=True)) is None


def test_an_argument_that_nobody_saw_leaves_it_open() -> None:
    found = rules.not_recorded(view(tensor("input"), tensor("output", error=OFF), lacking="input.1"))
    assert found is not None and found[0] is Status.UNSURE


def test_the_last_rule_always_applies() -> None:
    assert rules.RULES[-1] is rules.introduced
    assert rules.said_of(view(tensor("input"), tensor("output", error=OFF)))[0] is Status.INTRODUCED
