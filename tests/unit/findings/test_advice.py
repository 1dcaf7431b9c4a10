"""What to do about a finding, in our words and in those of the older tools."""

import math
from pathlib import Path

import pytest

from ulpscope.compare.comparison import CallComparison, Evidence
from ulpscope.findings.advice import Cause, advise, first_suspect
from ulpscope.findings.divergence import diverge
from ulpscope.findings.model import Finding
from ulpscope.findings.ranks import origin
from ulpscope.model.records import Phase
from ulpscope.report.advisor import write_advisor
from unit.analyze.made import argument, call, tensor

WRONG = 0.25


def found(*calls: CallComparison) -> Finding:
    first = diverge(calls, step=2, rank=1).first
    assert first is not None
    return first


CASES: dict[Cause, CallComparison] = {
    Cause.FORWARD: call("mul", 0, tensor("input"), tensor("output", error=WRONG)),
    Cause.BACKWARD: call("mul", 0, tensor("input"), tensor("output", error=WRONG), phase=Phase.BACKWARD),
    Cause.ARGUMENT: call("mul", 0, argument(1, 1.0, 2.0), tensor("output", error=WRONG)),
    Cause.PARAMETER: call(
        "mm", 0, tensor("input", 1, WRONG, measure=1, requires_grad=True), tensor("output", error=WRONG)
    ),
    Cause.OUTSIDE: call("mm", 0, tensor("input", 1, WRONG, measure=1), tensor("output", error=WRONG)),
    Cause.UNRECORDED: call("mul", 0, argument(1, None, None, "package.Config"), tensor("output", error=WRONG)),
    Cause.NOT_FINITE: call("log", 0, tensor("input"), tensor("output", error=math.inf, nan=1)),
}


@pytest.mark.parametrize("cause", CASES)
def test_every_kind_of_finding_has_its_advice_and_a_command(cause: Cause) -> None:
    advice = advise(found(CASES[cause]), reference="runs/a", target="runs/b")
    assert advice.cause is cause
    assert "{" not in advice.text and advice.text.endswith(".")
    name = f"Torch.{CASES[cause].match.call.id.name}.0.{CASES[cause].match.call.id.phase.value}"
    assert advice.commands[0] == f"ulpscope show runs/b {name}"


def test_communication_has_its_own_advice() -> None:
    values = (tensor("input"), tensor("output", error=WRONG))
    ranks = [diverge([call("all_reduce", 0, *values, kind="Distributed")], rank=rank) for rank in range(2)]
    advice = advise(origin(ranks).first, reference="a", target="b")
    assert advice.cause is Cause.COMMUNICATION
    assert "ranks 0-1 gave what the reference has and got something else" in advice.text


def test_the_command_says_which_of_several_dumps() -> None:
    advice = advise(found(CASES[Cause.ARGUMENT]), reference="a", target="b", several=True)
    assert advice.commands == (
        "ulpscope show b --step 2 --rank 1 Torch.mul.0.forward",
        "ulpscope show a --step 2 --rank 1 Torch.mul.0.forward",
    )


def test_statistics_alone_ask_for_the_elements() -> None:
    told = Evidence.STATISTICS
    finding = found(call("mul", 0, tensor("input", evidence=told), tensor("output", error=WRONG, evidence=told)))
    assert advise(finding, reference="a", target="b").commands[1] == (
        "ulpscope capture -o NEW --tensors --steps 2 --only mul -- COMMAND"
    )


@pytest.mark.parametrize(
    ("name", "only"), [("layers.0.Block.forward", "--level mix --only layers.0.Block"), ("Model", "--level mix")]
)
def test_a_module_is_asked_for_by_its_path_and_a_root_by_none(name: str, only: str) -> None:
    told = Evidence.STATISTICS
    finding = found(
        call(name, 0, tensor("input", evidence=told), tensor("output", error=WRONG, evidence=told), kind="Module")
    )
    assert advise(finding, reference="a", target="b").commands[1] == (
        f"ulpscope capture -o NEW --tensors --steps 2 {only} -- COMMAND"
    )


def test_nothing_found_is_said_and_so_is_a_call_of_one_run() -> None:
    assert advise(None, reference="a", target="b").cause is Cause.NONE
    alone = advise(None, reference="a", target="b", alone=("b --step 1 --rank 0", "Torch.mul.3.forward"))
    assert alone.cause is Cause.ALONE
    assert alone.commands == ("ulpscope show b --step 1 --rank 0 Torch.mul.3.forward",)


# The texts and the first three names are those of files that msprobe 8.2.1 wrote.
EXPERT = [
    ("Tensor.__mul__.0.forward.output.0", "This is a forward API computation error. Check the computation implementation."),
    ("Functional.conv2d.0.backward.output.2", "This torch api may be uncertainty in the calculation, can seed_all(mode=True) to enable deterministic computing."),
    ("Module.stem.0.Conv2d.parameters_grad.bias", "This is a backward API computation error. Check the computation implementation."),
    ("Functional.gelu.0.backward.input.0", "Check whether the forward computation result is affected."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), EXPERT)
def test_the_older_tools_texts(name: str, text: str) -> None:
    assert first_suspect([(name, "No")]).text == text


def test_an_input_that_differs_has_three_hints_and_one_of_batch_norm_its_own() -> None:
    assert first_suspect([("Functional.linear.0.forward.input.1", "Different")]).text.count("\n") == 2
    assert first_suspect([("Functional.linear.0.forward.kwargs.bias", "No")]).text.startswith("1. Analyze the model")
    norm = first_suspect([("Functional.batch_norm.0.forward.input.1", "No")])
    assert norm.text.startswith("Torch API batch_norm input not fixed")


@pytest.mark.parametrize("verdict", ["No", "Warning", "Different"])
def test_the_line_is_the_one_a_user_sees_in_the_sheet(verdict: str) -> None:
    """The columns are line 1, the first row is line 2."""
    rows = [("a.0.forward.input.0", "Yes"), ("a.0.forward.output.0", verdict), ("b.0.forward.output.0", verdict)]
    suspect = first_suspect(rows)
    assert (suspect.line, suspect.node) == ("3", "a.0.forward.output.0")


def test_rows_behind_the_first_are_not_read() -> None:
    def rows():
        yield "a.0.forward.output.0", "No"
        raise AssertionError("read on")

    assert first_suspect(rows()).line == "2"


def test_the_file_has_three_keys_and_the_rank_in_its_name(tmp_path: Path) -> None:
    path, _ = write_advisor(tmp_path, [("a.0.forward.output.0", "Yes")], timestamp="20240102030405")
    assert path.name == "advisor_20240102030405.txt"
    assert path.read_text() == (
        "Line: NA\nSuspect Nodes: NA\nExpert Advice: All data in comparison result meets the accuracy requirements.\n"
    )
    path, suspect = write_advisor(tmp_path / "new", [("a.0.forward.output.0", "No")], timestamp="1", rank=0)
    assert path.name == "advisor_rank0_1.txt"
    assert path.read_text() == suspect.content
