"""One call run again, as text and as JSON: what was recorded beside the same call here and in better precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ulpscope.analyze.ledger import Finding, Judgement, Verdict, judge
from ulpscope.analyze.limits import limit
from ulpscope.analyze.pattern import pattern
from ulpscope.store.ledger_file import Measure, Row


def verdict_of(row: Row) -> str:
    """What the judge says about one row, by itself."""
    judgement = judge([row])
    if judgement.first is not None:
        return judgement.first.verdict.value
    return next(iter(judgement.counts), Verdict.UNKNOWN.value)


def replay_json(name: str, rows: Mapping[str, Row], *, same: bool) -> dict[str, Any]:
    """The verdict, and for each way its scores."""
    recorded = next(iter(rows.values()))
    judgement = judge([recorded])
    first = judgement.first
    return {
        "schema": 1,
        "call": name,
        "op": recorded.op,
        "api": recorded.api or None,
        "module": recorded.module or None,
        "step": recorded.step,
        "rank": recorded.rank,
        "verdict": verdict_of(recorded),
        "why": None if first is None else first.why,
        "pattern": None if first is None or first.measure is None else pattern(first.measure).kind,
        "same_bits": same,
        "conclusion": _conclusion(judgement, rows, same=same),
        "ways": [
            {
                "way": way,
                "verdict": Verdict.UNKNOWN.value if row.unknown else verdict_of(row),
                "why_not": row.unknown,
                "outputs": [_output(row, measure) for measure in row.measures],
            }
            for way, row in rows.items()
        ],
    }


def _output(row: Row, measure: Measure) -> dict[str, Any]:
    bound = limit(row, measure)
    return {
        "output": measure.place,
        "dtype": measure.dtype,
        "shape": list(measure.shape),
        "rms": measure.rms,
        "worst": measure.worst,
        "toward": measure.toward,
        "wrong": measure.wrong,
        "lost": measure.lost,
        "limit": {"rms": bound.rms, "worst": bound.worst},
    }


def replay_lines(name: str, rows: Mapping[str, Row], *, same: bool) -> list[str]:
    """A table of the ways for each output, then the verdict and what follows from it."""
    recorded = next(iter(rows.values()))
    judgement = judge([recorded])
    place = ", ".join(filter(None, [recorded.module, recorded.api if recorded.api != name else ""]))
    lines = [f"{name}  step {recorded.step}, rank {recorded.rank}" + (f"  in {place}" if place else "")]
    for measure in recorded.measures:
        lines += ["", *_table(recorded, measure, rows)]
    lines += [f"{way}: {row.unknown}" for way, row in rows.items() if row.unknown]
    lines += ["", f"verdict     {verdict_of(recorded)}" + _because(judgement.first)]
    if judgement.first is not None and judgement.first.measure is not None:
        shape = pattern(judgement.first.measure)
        lines.append(f"pattern     {shape.kind}: {shape.text}")
    lines.append(f"so          {_conclusion(judgement, rows, same=same)}")
    return lines


def _table(recorded: Row, measure: Measure, rows: Mapping[str, Row]) -> list[str]:
    size = "x".join(map(str, measure.shape)) or "a number"
    terms = f", {measure.terms} terms each" if measure.terms > 1 else ""
    lines = [f"output {measure.place}  {measure.dtype} {size}{terms}; units of {measure.dtype} rounding"]
    lines.append(f"  {'':<16}{'rms':>10}{'worst':>10}{'leans':>10}{'wrong':>10}{'lost':>8}")
    for way, row in rows.items():
        found = next((each for each in row.measures if each.place == measure.place), None)
        if found is not None:
            lines.append(
                f"  {way:<16}{found.rms:>10.3g}{found.worst:>10.3g}{found.toward:>+10.2g}{found.wrong:>10}{found.lost:>8}"
            )
    bound = limit(recorded, measure)
    return [*lines, f"  {'limit':<16}{bound.rms:>10.3g}{bound.worst:>10.3g}{bound.bias:>+10.2g}{'':>18}"]


def _because(first: Finding | None) -> str:
    if first is None:
        return ""
    times = f" ({first.excess:.3g} times the limit)" if math.isfinite(first.excess) else ""
    return f": {first.why}{times}"


def _conclusion(judgement: Judgement, rows: Mapping[str, Row], *, same: bool) -> str:
    again, row = list(rows.items())[1]
    if row.unknown:
        return f"it could not be run {again}: {row.unknown}"
    if judgement.first is None:
        return "the same bits here: the call can be repeated" if same else "other bits here, both within rounding"
    if same:
        return f"run {again} it makes the same bits: the fault is in this kernel, and can be repeated"
    if judge([row]).first is not None:
        return f"run {again} it is wrong as well, with other bits: `ulpscope repro` makes a script of it"
    return f"run {again} it is right: the fault is in the device, the build or the moment of the recorded run"
