"""What statistics alone can say of who is to blame."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import DumpBuilder
from ulpscope.analyze.ledger import STATISTICS, Judgement, Verdict
from ulpscope.analyze.statistics import judged_alone, judged_beside
from ulpscope.compare.comparison import CallComparison, Evidence
from ulpscope.findings.divergence import diverge
from ulpscope.findings.ranks import origin
from ulpscope.model.records import Phase
from ulpscope.store.ledger_file import Row
from ulpscope.store.registry import open_run
from unit.analyze.made import call, tensor


def beside(*calls: CallComparison, doubt: str = "") -> Judgement:
    found = diverge(calls)

    def row(finding: Any) -> Row:
        seq = finding.comparison.match.call.seq
        return Row(seq, 0, 0, "forward", "Torch.x", "float32", 0, STATISTICS)

    return judged_beside(origin([found]), [found], row, doubt)


def test_inputs_agree_and_the_output_does_not() -> None:
    sketch = Evidence.SKETCH
    judgement = beside(
        call("linear", 0, tensor("input"), tensor("output", measure=1)),
        call("gelu", 1, tensor("input", measure=1), tensor("output", error=0.03, measure=2, evidence=sketch)),
        call("sum", 2, tensor("input", error=0.03, measure=2), tensor("output", error=0.03, measure=3)),
    )
    first = judgement.first
    assert first is not None
    assert first.seen is not None
    assert (first.row.seq, first.verdict, first.seen.by) == (1, Verdict.INTRODUCED, "sketch")
    assert (first.seen.input_error, first.seen.output_error) == (0.0, 0.03)
    assert first.why.startswith("its inputs agree, its output does not")
    assert judgement.counts == {"identical": 1, "introduced": 1, "inherited": 1}


def test_a_value_from_outside_is_told() -> None:
    judgement = beside(call("linear", 0, tensor("input", error=0.5), tensor("output", error=0.5)))
    assert judgement.first is not None
    assert judgement.first.verdict is Verdict.TOLD


def test_where_nobody_is_named_the_doubt_is_said() -> None:
    assert beside(call("linear", 0, tensor("input"), tensor("output")), doubt="cut short").doubt == "cut short"


def alone(run: Path, calls: Iterable[tuple[str, Any, Any, Phase]]) -> Judgement:
    builder = DumpBuilder(run)
    for name, given, made, phase in calls:
        values = {("input", 0): given} if given is not None else {}
        builder.call("Torch", name, phase=phase, values={**values, ("output", 0): made})
    builder.close()
    return judged_alone(open_run(run))[0]


ONES = np.ones(4, dtype=np.float32)
NAN = np.array([1, np.nan, np.nan, 2], dtype=np.float32)
INF = np.array([1, np.inf, 3, 2], dtype=np.float32)
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


@pytest.mark.parametrize(("made", "why"), [(NAN, "2 values are NaN"), (INF, "1 value is infinite")])
def test_the_producer_is_named_and_not_those_that_pass_it_on(tmp_path: Path, made: Any, why: str) -> None:
    judgement = alone(
        tmp_path,
        [
            ("a", ONES, ONES, FORWARD),
            ("b", ONES, made, FORWARD),
            ("c", made, made, FORWARD),
            ("b", ONES, NAN, BACKWARD),
        ],
    )
    assert [(finding.row.op, finding.row.phase) for finding in judgement.findings] == [("Torch.b", "forward")]
    assert judgement.findings[0].why.startswith(why)
    assert judgement.counts == {"introduced": 1, "unknown": 3}


def test_a_mask_that_was_told_to_be_infinite_and_a_pole_are_no_producers(tmp_path: Path) -> None:
    judgement = alone(tmp_path, [("full", float("-inf"), -INF, FORWARD), ("log", ONES, -INF, FORWARD)])
    assert judgement.first is None
    assert judgement.doubt.startswith("unknown")


def test_a_gradient_is_not_made_where_the_forward_was_not_finite(tmp_path: Path) -> None:
    judgement = alone(tmp_path, [("full", None, ONES, FORWARD), ("x", INF, ONES, FORWARD), ("x", ONES, NAN, BACKWARD)])
    assert judgement.first is None
