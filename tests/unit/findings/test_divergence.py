"""Where a difference begins in one dump, on comparisons made by hand."""

import math
from dataclasses import replace

import pytest

from ulpscope.compare.comparison import Evidence, Level
from ulpscope.findings.divergence import Search, diverge
from ulpscope.findings.model import Divergence, Status
from ulpscope.findings.ranks import explain_later
from ulpscope.model.names import call_text
from ulpscope.model.records import UNWRITTEN, Phase, Role, Slot
from unit.analyze.made import FLOAT32, argument, call, tensor, unmeasured

WRONG = 0.25


def status_of(*calls) -> Status:
    """What the last of the calls is."""
    search = Search()
    return [search.see(each) for each in calls][-1]


def findings(found: Divergence) -> list[tuple[str, Status]]:
    return [(call_text(each.call), each.status) for each in found.findings]


def faulty(name: str = "mul", seq: int = 0):
    """A call that introduces a difference; its output is measure 1."""
    return call(name, seq, tensor("input"), tensor("output", error=WRONG, measure=1))


def test_nothing_that_compares_is_an_agreement_without_findings() -> None:
    found = diverge([])
    assert found.agrees
    assert found.first is None


def test_a_call_with_equal_elements_is_identical() -> None:
    assert status_of(call("mul", 0, tensor("input"), tensor("output"))) is Status.IDENTICAL


def test_equal_statistics_are_no_proof_of_equal_elements() -> None:
    same = tensor("output", evidence=Evidence.STATISTICS)
    assert status_of(call("mul", 0, tensor("input"), same)) is Status.ROUNDING


@pytest.mark.parametrize("roundings", [1, 4, 7, 200])
def test_what_the_rounding_of_a_long_sum_explains_is_no_difference(roundings: int) -> None:
    output = tensor("output", error=roundings * FLOAT32)
    found = diverge([call("mm", 0, tensor("input"), output)])
    assert found.agrees
    assert +found.statuses == {Status.ROUNDING: 1}


def test_clean_inputs_and_another_output_introduce() -> None:
    found = diverge([faulty()])
    assert findings(found) == [("Torch.mul.0.forward", Status.INTRODUCED)]
    assert found.findings[0].text == "clean inputs, other output"
    assert found.findings[0].output_error == WRONG
    assert not found.agrees


def test_a_call_that_only_passes_a_difference_on_inherits_it() -> None:
    found = diverge([faulty(), call("relu", 1, tensor("input", error=WRONG, measure=1), tensor("output", error=WRONG))])
    assert findings(found) == [("Torch.mul.0.forward", Status.INTRODUCED)]
    assert found.statuses[Status.INHERITED] == 1


def test_a_call_that_adds_far_more_than_it_got_introduces_again() -> None:
    slight = call("mul", 0, tensor("input"), tensor("output", error=1e-4, measure=1))
    broken = call("mm", 1, tensor("input", error=1e-4, measure=1), tensor("output", error=1.0))
    assert status_of(slight, broken) is Status.INTRODUCED


def test_a_weight_that_no_call_wrote_is_the_source() -> None:
    weight = tensor("input", 1, error=1e-3, measure=7)
    found = diverge([call("linear", 0, tensor("input"), weight, tensor("output", error=1e-3))])
    assert findings(found) == [("Torch.linear.0.forward", Status.SOURCE)]
    assert found.findings[0].text == "input.1 differs, and no recorded call wrote it"


def test_what_came_in_different_and_shows_in_nothing_is_a_remark() -> None:
    mask = tensor("input", 1, error=1.0, measure=7)
    found = diverge([call("where", 0, tensor("input"), mask, tensor("output"))])
    assert found.findings == [] and found.agrees
    assert found.remarks == [("Torch.where.0.forward", "input.1 differs; what it gives agrees")]
    shown = diverge([call("where", 0, tensor("input"), mask, tensor("output", error=0.1))])
    assert findings(shown) == [("Torch.where.0.forward", Status.SOURCE)]


def test_another_argument_is_the_source() -> None:
    values = (tensor("input"), argument(1, 1.0, 1.01), tensor("output", error=0.01))
    found = diverge([call("mul", 0, *values)])
    assert findings(found) == [("Torch.mul.0.forward", Status.SOURCE)]
    assert found.findings[0].text == "input.1 is 1.0 in the reference, 1.01 in the target"


def test_another_device_is_not_another_argument() -> None:
    values = (tensor("input"), argument("device", "cpu", "cuda:0", "torch.device"), tensor("output"))
    assert status_of(call("to", 0, *values)) is Status.IDENTICAL


def test_a_small_difference_of_large_numbers_keeps_their_rounding() -> None:
    large, small = tensor("input", error=2 * FLOAT32, size=1e6), tensor("output", error=2e-2, size=1.0)
    assert status_of(call("sub", 0, large, tensor("input", 1, size=1e6), small)) is not Status.INTRODUCED


def test_a_small_product_has_no_such_excuse() -> None:
    large, small = tensor("input", size=1e6), tensor("output", error=2e-2, size=1.0)
    assert status_of(call("mul", 0, large, tensor("input", 1, size=1e-6), small)) is Status.INTRODUCED


def test_a_backward_call_inherits_from_the_values_of_its_forward() -> None:
    forward = call("mul", 1, tensor("input", error=WRONG, measure=1), tensor("output", error=WRONG))
    backward = call("mul", 2, tensor("input"), tensor("output", error=WRONG), phase=Phase.BACKWARD)
    assert status_of(faulty("exp"), forward, backward) is Status.INHERITED


def test_a_backward_call_with_a_clean_forward_introduces() -> None:
    forward = call("mul", 0, tensor("input"), tensor("output"))
    backward = call("mul", 1, tensor("input"), tensor("output", error=WRONG), phase=Phase.BACKWARD)
    assert status_of(forward, backward) is Status.INTRODUCED


def test_a_backward_call_whose_gradients_were_not_recorded_is_never_said_to_have_got_the_same() -> None:
    forward = call("mul", 0, tensor("input"), tensor("output"))
    backward = call("mul", 1, tensor("output", error=WRONG), phase=Phase.BACKWARD)
    found = diverge([forward, backward])
    assert (found.findings, found.statuses[Status.INHERITED], found.agrees) == ([], 1, False)


def test_a_gradient_that_differs_before_a_backward_call_is_no_source() -> None:
    """Gradients are summed between the calls."""
    backward = call(
        "mul", 0, tensor("input", error=WRONG, measure=9), tensor("output", error=WRONG), phase=Phase.BACKWARD
    )
    assert status_of(backward) is Status.INHERITED


def test_gradients_of_parameters_introduce_nothing() -> None:
    gradients = call("fc.Linear", 0, tensor("parameters", "weight", error=WRONG), phase=Phase.PARAMETERS_GRAD)
    found = diverge([gradients])
    assert found.findings == []
    assert +found.statuses == {Status.INHERITED: 1}
    assert not found.agrees


def test_a_module_is_left_out_where_the_difference_begins_inside_it() -> None:
    module = call("fc.Linear", 0, tensor("input"), tensor("output", error=WRONG), kind="Module")
    inside = call("linear", 1, tensor("input"), tensor("output", error=WRONG), kind="Functional", parent=0)
    found = diverge([module, inside])
    assert findings(found) == [("Functional.linear.0.forward", Status.INTRODUCED)]
    assert (found.statuses[Status.INTRODUCED], found.statuses[Status.INHERITED]) == (1, 1)


def test_a_weight_is_the_source_in_the_call_that_uses_it_and_not_in_its_module() -> None:
    output = tensor("output", error=WRONG)
    module = call("fc.Linear", 0, tensor("parameters", "weight", WRONG, measure=5), output, kind="Module")
    inside = call("linear", 1, tensor("input", 1, WRONG, measure=5), output, kind="Functional", parent=0)
    found = diverge([module, inside])
    assert findings(found) == [("Functional.linear.0.forward", Status.SOURCE)]
    assert +found.statuses == {Status.SOURCE: 1, Status.INHERITED: 1}


def test_a_module_without_recorded_calls_is_found_itself() -> None:
    module = call("fc.Linear", 0, tensor("input"), tensor("output", error=WRONG), kind="Module")
    assert findings(diverge([module])) == [("Module.fc.Linear.forward.0", Status.INTRODUCED)]


def test_nan_from_clean_inputs_introduces() -> None:
    found = diverge([call("log", 0, tensor("input"), tensor("output", error=math.inf, nan=3))])
    assert findings(found) == [("Torch.log.0.forward", Status.INTRODUCED)]
    assert found.findings[0].weight == math.inf


def test_checksums_tell_clean_from_different() -> None:
    """They cannot tell rounding from a fault: the first call whose inputs are the same is taken."""
    checksum = Evidence.CHECKSUM
    first = call(
        "mul", 0, tensor("input", evidence=checksum), tensor("output", error=None, evidence=checksum, measure=1)
    )
    second = call(
        "add",
        1,
        tensor("input", error=None, evidence=checksum, measure=1),
        tensor("output", error=None, evidence=checksum),
    )
    found = diverge([first, second])
    assert findings(found) == [("Torch.mul.0.forward", Status.INTRODUCED)]
    assert found.statuses[Status.INHERITED] == 1
    assert found.findings[0].output_error is None


def test_without_the_identity_of_values_their_numbers_stand_for_them() -> None:
    """As in the files of msprobe: what has the numbers of an output that was seen came from there."""
    told = Evidence.STATISTICS
    first = call(
        "mul", 0, tensor("input", evidence=told, size=1.0), tensor("output", error=WRONG, evidence=told, size=3.0)
    )
    second = call(
        "add",
        1,
        tensor("input", error=WRONG, evidence=told, size=3.0),
        tensor("output", error=WRONG, evidence=told, size=4.0),
    )
    assert findings(diverge([first, second])) == [("Torch.mul.0.forward", Status.INTRODUCED)]
    alone = call(
        "add", 0, tensor("input", error=WRONG, evidence=told, size=3.0), tensor("output", error=WRONG, evidence=told)
    )
    assert findings(diverge([alone])) == [("Torch.add.0.forward", Status.SOURCE)]


def test_a_call_of_one_run_is_unmatched_and_no_finding_by_itself() -> None:
    found = diverge([call("mul", 0, only="reference"), call("add", 1, only="target")])
    assert (found.only_reference, found.only_target) == (1, 1)
    assert found.alone == [
        ("Torch.mul.0.forward", "only in the reference"),
        ("Torch.add.0.forward", "only in the target"),
    ]
    assert found.findings == []


def test_an_output_that_was_not_measured_is_unknown() -> None:
    found = diverge([call("mul", 0, tensor("input"), unmeasured("output"))])
    assert found.unknown == [("Torch.mul.0.forward", "output.0: on a device that is gone")]
    assert found.unknown_count == 1


def test_an_input_that_was_not_measured_is_no_clean_input() -> None:
    assert status_of(call("mul", 0, unmeasured("input"), tensor("output", error=WRONG))) is Status.INHERITED


def test_memory_that_nothing_has_written_yet_is_no_result() -> None:
    fresh = call("empty", 0, tensor("output", error=1.0, measure=1))
    filled = call("zero_", 1, tensor("input", error=1.0, measure=1), tensor("output"))
    assert diverge([fresh, filled]).findings == []


def test_findings_are_few_whatever_comes() -> None:
    found = diverge(call("mul", seq, tensor("input"), tensor("output", error=WRONG), index=seq) for seq in range(1000))
    assert found.statuses[Status.INTRODUCED] == 1000
    assert len(found.findings) <= 40
    assert found.first is not None and found.first.call.index == 0


def test_the_buffer_of_a_receive_is_no_input() -> None:
    values = (tensor("input", error=1.0, measure=3), argument(1, 0, 0, "int"), tensor("output"))
    found = diverge([call("recv", 0, *values, kind="Distributed")], rank=1)
    assert found.findings == []


def test_a_group_may_have_another_name_in_each_run() -> None:
    groups = [{"group_ranks": [0, 1], "group_id": name} for name in ("a1", "b2")]
    values = (tensor("input"), argument("group", *groups, "torch.ProcessGroup"), tensor("output"))
    assert diverge([call("all_reduce", 0, *values, kind="Distributed")]).findings == []


def test_another_group_is_another_argument() -> None:
    groups = [{"group_ranks": ranks, "group_id": "a1"} for ranks in ([0, 1], [0, 2])]
    values = (tensor("input"), argument("group", *groups, "torch.ProcessGroup"), tensor("output"))
    assert status_of(call("all_reduce", 0, *values, kind="Distributed")) is Status.SOURCE


def test_what_torch_calls_inside_a_communication_call_is_part_of_it() -> None:
    """It has the buffers as inputs, before they are written."""
    outer = call("recv", 0, argument(1, 0, 0, "int"), tensor("output"), kind="Distributed")
    inner = call("recv", 1, tensor("input", error=1.0, measure=3), argument("src", 0, 0, "int"), parent=0)
    found = diverge([outer, inner], rank=1)
    assert found.findings == []
    assert diverge([outer, replace(inner, match=call("recv", 1).match)], rank=1).findings == []


def test_an_object_that_is_no_tensor_is_no_unknown_result() -> None:
    work = argument(0, None, None, "torch.distributed.Work")
    made = replace(work, slot=Slot(Role.OUTPUT, (0,)))
    assert work.verdict.level is Level.UNKNOWN
    assert diverge([call("start", 0, tensor("input"), made)]).unknown == []


def test_fresh_memory_is_no_unknown_result() -> None:
    assert diverge([call("empty", 0, unmeasured("output"))]).unknown == []


def test_a_division_of_inputs_that_differ_may_make_much_of_their_smallest_elements() -> None:
    slight = call("mul", 0, tensor("input"), tensor("output", error=1e-4, measure=1))
    ratio = call("addcdiv_", 1, tensor("input", error=1e-4, measure=1), tensor("output", error=1.0))
    assert status_of(slight, ratio) is Status.INHERITED


def test_a_division_of_clean_inputs_has_no_excuse() -> None:
    assert status_of(call("div", 0, tensor("input"), tensor("output", error=1.0))) is Status.INTRODUCED


def test_the_size_of_a_filled_mask_excuses_nothing() -> None:
    masked = call("softmax", 0, tensor("input", size=1e38), tensor("output", error=0.1))
    assert status_of(masked) is Status.INTRODUCED


def test_rounding_of_a_value_from_outside_is_no_source() -> None:
    first = call("mul", 0, tensor("input", error=100 * FLOAT32, measure=7), tensor("output"))
    assert status_of(first) is not Status.SOURCE


def test_a_number_that_two_dtypes_spell_differently_is_the_same_argument() -> None:
    values = (tensor("input", dtype="torch.bfloat16"), tensor("output", error=0.02, dtype="torch.bfloat16"))
    smallest = call("where", 0, argument(1, -3.4028e38, -3.3895e38), *values)
    other = call("where", 0, argument(1, 1e-5, 1e-6), *values)
    assert status_of(smallest) is Status.INHERITED
    assert status_of(other) is Status.SOURCE


def test_what_a_later_step_got_from_outside_began_in_the_step_before() -> None:
    def weights(step: int) -> Divergence:
        return diverge(
            [call("mm", 0, tensor("input", error=WRONG, measure=5), tensor("output", error=WRONG))], step=step
        )

    first, second = explain_later([weights(1), weights(0)])
    assert [len(first.findings), len(second.findings)] == [1, 0]
    assert (first.step, second.statuses[Status.INHERITED]) == (0, 1)


@pytest.mark.parametrize("name", ["uniform_.default", "zero_", "copy_.default"])
def test_what_is_overwritten_without_being_read_does_not_come_from_outside(name: str) -> None:
    filled = call(name, 0, tensor("input", error=1.0), tensor("output", error=1e-6, measure=1), kind="Aten")
    assert diverge([filled]).first is None
    read = call("add_.Tensor", 0, tensor("input", error=1.0), tensor("output", error=1e-6, measure=1), kind="Aten")
    assert diverge([read]).first is not None


def test_memory_that_nobody_wrote_and_that_is_filled_alike_is_agreement() -> None:
    found = diverge([call("__setitem__", 0, unmeasured("input", why=UNWRITTEN), tensor("output"))])
    assert found.agrees and not found.unknown_count
    assert +found.statuses == {Status.IDENTICAL: 1}


def test_memory_that_nobody_wrote_in_either_run_is_nothing_to_compare() -> None:
    found = diverge([call("view", 0, unmeasured("input", why=UNWRITTEN), unmeasured("output", why=UNWRITTEN))])
    assert found.agrees and not found.unknown_count


def test_memory_that_one_run_alone_wrote_is_unknown() -> None:
    output = unmeasured("output", why=UNWRITTEN)
    output = replace(output, reference=tensor("output").reference)
    assert status_of(call("view", 0, tensor("input"), output)) is Status.UNKNOWN


def test_a_call_that_read_memory_nobody_wrote_is_not_accused() -> None:
    given = unmeasured("input", why=UNWRITTEN)
    assert status_of(call("mul", 0, given, tensor("output", error=WRONG))) is Status.INHERITED


@pytest.mark.parametrize(("name", "at"), [("mm", "out"), ("copy_", 0), ("uniform_", 0)])
def test_what_a_call_overwrites_is_not_what_it_was_given(name: str, at: int | str) -> None:
    found = diverge([call(name, 0, tensor("input", at, error=math.inf), tensor("input", 1), tensor("output"))])
    assert found.agrees


# --- arguments that were not recorded ---------------------------------------------------------------------------


def unrecorded(at: object = 1):
    return argument(at, None, None, "package.Config")


def test_a_call_with_an_argument_that_was_not_recorded_is_not_said_to_have_introduced_anything() -> None:
    found = diverge([call("mul", 0, tensor("input"), unrecorded(), tensor("output", error=WRONG, measure=1))])
    assert findings(found) == [("Torch.mul.0.forward", Status.UNSURE)]
    assert found.differs and "input.1 was not recorded" in found.findings[0].text
    assert "clean" not in found.findings[0].text


def test_nor_is_one_with_an_argument_that_only_one_side_has() -> None:
    one, two = argument(1, 1.0, 1.0), None
    alone = replace(one, target=two, verdict=replace(one.verdict, level=Level.UNMATCHED, codes=()))
    assert status_of(call("mul", 0, tensor("input"), alone, tensor("output", error=WRONG))) is Status.UNSURE


def test_nor_is_the_backward_of_such_a_call() -> None:
    forward = call("mul", 0, tensor("input"), unrecorded(), tensor("output"))
    backward = call("mul", 1, tensor("input"), tensor("output", error=WRONG), phase=Phase.BACKWARD)
    assert status_of(forward, backward) is Status.UNSURE


def test_an_argument_that_was_not_recorded_changes_nothing_where_the_output_agrees_or_the_input_differs() -> None:
    assert status_of(call("mul", 0, tensor("input"), unrecorded(), tensor("output"))) is Status.IDENTICAL
    values = tensor("input", error=WRONG, measure=1), unrecorded(), tensor("output", error=WRONG, measure=2)
    assert status_of(faulty(), call("add", 1, *values)) is Status.INHERITED


def test_the_call_inside_a_module_whose_arguments_are_known_is_named_before_the_module() -> None:
    inside = call("mul", 1, tensor("input"), tensor("output", error=WRONG, measure=1), parent=0)
    around = call(
        "m.Block.forward", 0, tensor("input"), unrecorded(), tensor("output", error=WRONG, measure=1), kind="Module"
    )
    assert findings(diverge([inside, around])) == [("Torch.mul.0.forward", Status.INTRODUCED)]
