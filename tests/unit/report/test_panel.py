"""The page that `compare` prints, on findings made by hand."""

from __future__ import annotations

from ulpscope.compare.comparison import CallComparison
from ulpscope.findings.advice import advise
from ulpscope.findings.divergence import diverge
from ulpscope.findings.ranks import origin
from ulpscope.model.records import Frame
from ulpscope.report.outcome import Outcome, UnitOutcome
from ulpscope.report.panel import page_of
from unit.analyze.made import call, tensor

OWN = Frame("/home/me/train.py", 3, "main", "loss = model(x)", False)
MODEL = Frame("/lib/site-packages/transformers/modeling_llama.py", 164, "LlamaMLP.forward", "self.down(x)", True)
LAYER = Frame("/lib/site-packages/torch/nn/modules/linear.py", 134, "Linear.forward", "F.linear(x)", True)
FAULTY = call("linear", 7, tensor("input"), tensor("output", error=0.25))


def page(*calls: CallComparison, stack: tuple[Frame, ...] = (), steps: int = 1) -> list[str]:
    found = [diverge(calls, step=step) for step in range(steps)]
    units = tuple(UnitOutcome(each, {7: stack}) for each in found)
    outcome = Outcome("a", "b", units, origin=origin(found))
    return list(page_of(outcome, advise(outcome.first, reference="a", target="b")).lines())


def test_the_line_of_a_model_from_a_library_stands_below_the_programs_own() -> None:
    lines = page(FAULTY, stack=(LAYER, MODEL, OWN))
    at = lines.index("/home/me/train.py:3 in main")
    assert lines[at + 1].strip() == "loss = model(x)"
    assert lines[at + 2].strip() == "inside modeling_llama.py:164 LlamaMLP.forward: self.down(x)"


def test_layers_of_torch_are_no_place_to_look() -> None:
    assert not any("inside" in line for line in page(FAULTY, stack=(LAYER, OWN)))


def test_calls_that_are_alone_are_told_with_their_step_and_how_many_more_there_are() -> None:
    alone = [call("div", seq, tensor("output", measure=seq), only="target") for seq in range(5)]
    told = [line for line in page(*alone, call("mul", 9, tensor("output")), steps=2) if line.startswith("unmatched")]
    assert told == [
        "unmatched  Torch.div.0.forward (step 0, rank 0): only in the target",
        "unmatched  Torch.div.0.forward (step 0, rank 0): only in the target",
        "unmatched  Torch.div.0.forward (step 0, rank 0): only in the target",
        "unmatched  7 more",
    ]
