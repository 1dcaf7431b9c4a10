"""A judgement as text for a person and as JSON for a program. Only reads; the schema is in docs/judge.md."""

from __future__ import annotations

import linecache
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ulpscope.analyze.attribution import Attribution
from ulpscope.analyze.ledger import Finding, Judgement, Verdict
from ulpscope.analyze.pattern import pattern
from ulpscope.report.attribution import attribution_json, attribution_lines
from ulpscope.store.ledger import Measure, Row

SCHEMA = 1
_MOST = 10
_KINDS = {"aten": "Aten", "npu": "NPU"}
_ORDER = [verdict.value for verdict in Verdict]


def blame_json(
    judgement: Judgement,
    *,
    runs: Sequence[str],
    next_commands: Sequence[str],
    attribution: Attribution | None = None,
) -> dict[str, Any]:
    """One small document: the same ledgers give the same bytes."""
    first = judgement.first
    return {
        "schema": SCHEMA,
        "verdict": "nothing is wrong" if first is None else first.verdict.value,
        "first": None if first is None else _finding_json(first),
        "suspects": [_finding_json(finding) for finding in judgement.findings[:_MOST]],
        "suspect_count": len(judgement.findings),
        "counts": judgement.counts,
        "not_judged": judgement.unknown,
        "compared": judgement.compared,
        "attribution": None if attribution is None else attribution_json(attribution),
        "runs": list(runs),
        "next": list(next_commands),
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    row = finding.row
    return {
        "verdict": finding.verdict.value,
        "why": finding.why,
        "excess": finding.excess if math.isfinite(finding.excess) else None,
        "op": row.op,
        "index": row.index,
        "api": row.api or None,
        "module": row.module,
        "param": row.param,
        "phase": row.phase,
        "step": row.step,
        "rank": row.rank,
        "source": None if row.source is None else {"file": row.source[0], "line": row.source[1], "in": row.source[2]},
        "evidence": None if finding.measure is None else _measure_json(finding),
    }


def _measure_json(finding: Finding) -> dict[str, Any]:
    measure = finding.measure
    assert measure is not None
    shape = pattern(measure)
    return {
        "output": measure.place,
        "dtype": measure.dtype,
        "shape": list(measure.shape),
        "terms": measure.terms,
        "rms": measure.rms,
        "worst": measure.worst,
        "toward": measure.toward,
        "up": measure.up,
        "wrong": measure.wrong,
        "lost": measure.lost,
        "limit": None if finding.limit is None else {"rms": finding.limit.rms, "worst": finding.limit.worst},
        "pattern": {"kind": shape.kind, "text": shape.text, "ranges": [list(each) for each in shape.ranges]},
    }


def blame_lines(
    judgement: Judgement,
    *,
    runs: Sequence[str],
    rows: Sequence[Row],
    next_commands: Sequence[str],
    attribution: Attribution | None = None,
) -> list[str]:
    """About thirty lines: the answer, the argument, the counts, the next command."""
    steps, ranks = len({row.step for row in rows}), len({row.rank for row in rows})
    how = "beside the reference and its own replay" if judgement.compared else "beside its own replay in float64"
    lines = [
        f"{' -> '.join(runs)}",
        f"{len(rows)} kernel calls, {_counted(steps, 'step')}, {_counted(ranks, 'rank')}, each {how}",
        "",
    ]
    first = judgement.first
    if first is None:
        lines += ["nothing is wrong: rounding explains every call"]
    else:
        lines += _panel(first)
        lines += _others(judgement, first)
    if attribution is not None:
        lines += ["", *attribution_lines(attribution)]
    lines += [
        "",
        "calls       " + ", ".join(f"{judgement.counts[name]} {name}" for name in _ORDER if judgement.counts.get(name)),
    ]
    for why, count in sorted(judgement.unknown.items(), key=lambda item: -item[1])[:3]:
        lines.append(f"not judged  {count}x {why}")
    lines += [f"next        {command}" for command in next_commands]
    return lines


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s'[: count != 1]}"


def _panel(first: Finding) -> list[str]:
    row = first.row
    place = row.module or row.param or "(outside of any module)"
    head = "told differently at" if first.verdict is Verdict.TOLD else "introduced by"
    lines = [
        f"{head} {place}" + (f", {row.api}" if row.api else ""),
        f"  kernel    {row.op} number {row.index} with {row.dtypes or 'no floats'}",
        f"  when      {row.phase}, step {row.step}, rank {row.rank}"
        + (f", parameter {row.param}" if row.param else ""),
        f"  why       {first.why}",
    ]
    if first.verdict is Verdict.INTRODUCED:
        lines.append("            its inputs are taken as they were: this is not inherited")
    if first.measure is not None:
        lines += _evidence(first.measure, first)
    if row.source is not None:
        file, number, function = row.source
        lines.append(f"  source    {file}:{number} in {function}")
        text = linecache.getline(file, number).strip()
        if text:
            lines.append(f"            {text[:100]}")
    return lines


def _evidence(measure: Measure, finding: Finding) -> list[str]:
    shape = pattern(measure)
    size = "x".join(map(str, measure.shape)) or "a number"
    lines = [
        f"  result    output {measure.place}, {measure.dtype} {size}"
        + (f", {measure.terms} terms each" if measure.terms > 1 else "")
    ]
    if finding.limit is not None:
        lines.append(
            f"  error     rms {measure.rms:.2g} (limit {finding.limit.rms:.2g}), worst {measure.worst:.2g} "
            f"(limit {finding.limit.worst:.2g}), leans {measure.toward:+.2g}; units of rounding"
        )
    return [*lines, f"  pattern   {shape.kind}: {shape.text}"]


def _others(judgement: Judgement, first: Finding) -> list[str]:
    others = [finding for finding in judgement.findings if finding is not first]
    if not others:
        return ["", "no other call is above its limit: what differs after it is inherited"]
    lines = ["", f"{_counted(len(others), 'other call')} above the limit"]
    for finding in others[: _MOST - 1]:
        row = finding.row
        lines.append(f"  {row.module or row.param or '-'}  {row.op} #{row.index} {row.phase}  {finding.why}")
    return lines


def next_commands(judgement: Judgement, target: Path | None) -> list[str]:
    """What to do now."""
    first = judgement.first
    if first is None or target is None:
        return []
    if first.verdict is Verdict.TOLD:
        return ["make both runs agree in what they are told, then run blame again"]
    row = first.row
    where = f" --step {row.step}" + (f" --rank {row.rank}" if row.rank else "")
    if row.call:
        return [
            f"ulpscope replay {target} {row.call}{where}    # this call again",
            f"ulpscope repro {target} {row.call}{where} -o repro    # a script for a bug report",
        ]
    if row.api and row.phase == "forward":
        return [
            f"ulpscope capture --tensors --only {row.api.rpartition('.')[0]} -o runs/call -- CMD    # keep its tensors",
            f"ulpscope replay runs/call {row.api}{where}    # this call again; repro: a script for a bug report",
        ]
    space, _, kernel = row.op.partition(".")
    name = f"{_KINDS.get(space, space)}.{kernel}"
    return [
        f"ulpscope capture --level kernel --tensors --only {name} -o runs/call -- CMD    # keep its tensors",
        "ulpscope blame runs/call    # the name of the call for `ulpscope replay`",
    ]
