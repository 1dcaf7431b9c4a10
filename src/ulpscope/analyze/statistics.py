"""What statistics alone can say of who is to blame: nothing is run again.

Two runs: the search that `compare` makes, inputs agree and the output does not. One run: who made the first NaN or Inf of
numbers. Everything else is unknown, and says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ulpscope.analyze.ledger import STATISTICS, Finding, Judgement, Seen, Verdict, judge
from ulpscope.compare.comparison import Comparison, Evidence
from ulpscope.findings import model as seen
from ulpscope.findings.model import Divergence, Status
from ulpscope.findings.ranks import Origin
from ulpscope.model.names import OPTIMIZER, call_text
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import CallId, CallRecord, Phase, Role, Value
from ulpscope.store.call_site import op_of, place_of
from ulpscope.store.dump import Dump
from ulpscope.store.ledger_file import Measure, Row

_VERDICTS = {
    Status.IDENTICAL: Verdict.IDENTICAL,
    Status.ROUNDING: Verdict.WITHIN,
    Status.INTRODUCED: Verdict.INTRODUCED,
    Status.SOURCE: Verdict.TOLD,
    Status.LOST: Verdict.INTRODUCED,
    Status.ELSEWHERE: Verdict.WITHIN,
    Status.INHERITED: Verdict.INHERITED,
    Status.UNMATCHED: Verdict.UNKNOWN,
    Status.UNSURE: Verdict.UNKNOWN,
    Status.UNKNOWN: Verdict.UNKNOWN,
}
_BEST = {evidence: place for place, evidence in enumerate(Evidence)}
_JUDGED = (Phase.FORWARD, Phase.BACKWARD)
_NOTHING_AGAIN = "statistics only: it cannot be run again"
_DOUBT = (
    "unknown: no call made NaN or Inf, and statistics of one run say no more; give a reference run, or record the kernels "
    "with their tensors"
)


# --- two runs -----------------------------------------------------------------------------------------------------


def judged_beside(
    origin: Origin, divergences: Iterable[Divergence], row: Callable[[seen.Finding], Row], doubt: str
) -> Judgement:
    """The judgement of what `compare` has found; `row` makes the row of a finding, `doubt` is said where none is named."""
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for each in divergences:
        for status, count in each.statuses.items():
            counts[_VERDICTS[status].value] += count
        unknown.update(why for _, why in each.unknown)
        unknown.update(why for _, why in each.alone)
    known = [each for each in origin.findings if each.status is not Status.UNSURE]
    unknown.update(f"{call_text(each.call)}: {each.text}" for each in origin.findings if each not in known)
    findings = tuple(_finding(each, row(each)) for each in known)
    first = next((mine for mine, each in zip(findings, known, strict=True) if each is origin.first), None)
    return Judgement(
        first,
        findings,
        {name: count for name, count in counts.items() if count},
        dict(unknown),
        compared=True,
        by=STATISTICS,
        doubt="" if first is not None else doubt,
    )


def _finding(each: seen.Finding, row: Row) -> Finding:
    found = Seen(_evidence(each.comparison.values), each.input_error, each.output_error, each.limit)
    if each.status is not Status.INTRODUCED:
        return Finding(row, Verdict.TOLD, each.text, each.weight, seen=found)
    clean = "the output differs more than" not in each.text
    why = "its inputs agree, its output does not" if clean else each.text
    if each.output_error is not None and math.isfinite(each.weight):
        why += f": {each.weight:.2g} times what rounding {'explains' if clean else 'and its inputs explain'}"
    return Finding(row, Verdict.INTRODUCED, why, each.weight, seen=found)


def _evidence(values: Sequence[Comparison]) -> str:
    """The weakest of what tells the tensors apart: that is what the finding rests on."""
    used = [each.evidence for each in values if each.evidence not in (Evidence.SCALAR, Evidence.NOTHING)]
    return max(used, key=_BEST.__getitem__, default=Evidence.NOTHING).value


def call_row(dump: Dump, call: CallRecord, **more: Any) -> Row:
    """The row of a recorded call that was not run again."""
    dtypes = ",".join(
        value.dtype.removeprefix("torch.")
        for value in call.values
        if value.slot.role is Role.INPUT and value.dtype is not None and "float" in value.dtype
    )
    about: dict[str, Any] = {"step": dump.manifest.step, "rank": dump.manifest.rank, **place_of(dump, call)}
    about |= {"op": op_of(call), "dtypes": dtypes, "index": call.id.index, "call": call_text(call.id)}
    return Row(seq=call.seq, kind=STATISTICS, **about, **more)


# --- one run ------------------------------------------------------------------------------------------------------


def judged_alone(dumps: Iterable[Dump]) -> tuple[Judgement, list[Row]]:
    """The producers of NaN and Inf, and nothing else."""
    rows = [row for dump in dumps for row in _rows(dump)]
    judgement = judge(rows)
    doubt = _DOUBT if judgement.first is None else ""
    return Judgement(
        judgement.first, judgement.findings, judgement.counts, judgement.unknown, by=STATISTICS, doubt=doubt
    ), rows


def _rows(dump: Dump) -> Iterator[Row]:
    wild: set[CallId] = set()
    around = {call.parent for call in dump.calls()}
    for call in dump.calls():
        if call.seq in around or call.id.kind == OPTIMIZER or call.id.phase not in _JUDGED:
            continue
        ins = [value for value in call.values if value.slot.role is not Role.OUTPUT]
        outs = [value for value in call.values if value.slot.role is Role.OUTPUT]
        forward = CallId(call.id.kind, call.id.name, call.id.index, Phase.FORWARD)
        given = forward in wild or any(map(_is_wild, ins))
        made = [_measure(place, value) for place, value in enumerate(outs) if _is_wild(value)]
        if given or made:
            wild.add(forward)
        if call.id.phase is Phase.FORWARD and Trait.POLE in traits(call.id.name):
            made = [measure for measure in made if measure.undefined]
        if given or not made:
            yield call_row(dump, call, unknown=_NOTHING_AGAIN)
        else:
            yield call_row(dump, call, measures=tuple(made))


def _is_wild(value: Value) -> bool:
    """Whether there is NaN or Inf in it; a scalar has it as text."""
    if not value.is_tensor:
        return value.type == "float" and not math.isfinite(float(value.scalar))
    stats = value.stats
    numbers = () if stats is None else (stats.max, stats.min, stats.mean)
    return any(number is not None and not math.isfinite(number) for number in numbers)


def _measure(place: int, value: Value) -> Measure:
    stats = value.stats
    assert stats is not None
    undefined = stats.nan_count or int(stats.max is not None and math.isnan(stats.max))
    infinite = 0 if undefined else max(1, stats.posinf_count + stats.neginf_count)
    dtype = (value.dtype or "").removeprefix("torch.")
    return Measure(place, dtype, value.shape or (), 1, 0.0, 0.0, undefined=undefined, infinite=infinite)
