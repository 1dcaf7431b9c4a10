"""A judgement as text for a person and as JSON for a program. Only reads; the schema is in docs/judge.md."""

from __future__ import annotations

import linecache
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ulpscope.analyze.attribution import Attribution
from ulpscope.analyze.ledger import REPLAY, STATISTICS, Finding, Judgement, Seen, Verdict
from ulpscope.analyze.pattern import pattern
from ulpscope.report.attribution import attribution_json, attribution_lines
from ulpscope.report.outcome_json import plain
from ulpscope.store.ledger_file import Measure

SCHEMA = 1
_MOST = 10
_KINDS = {"aten": "Aten", "npu": "NPU"}
_HEADS = {Verdict.TOLD: "told differently at", Verdict.PURPOSE: "no number by definition at"}
_MOST_REMARKS = 4
_ORDER = [verdict.value for verdict in Verdict]
_HOW = {
    (REPLAY, False): "each beside its own replay in float64",
    (REPLAY, True): "each beside the reference and its own replay",
    (STATISTICS, False): "by their statistics: nothing was run again",
    (STATISTICS, True): "by their statistics beside the reference's: nothing was run again",
}


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
        "verdict": first.verdict.value if first is not None else judgement.doubt or judgement.answer.partition(":")[0],
        "by": judgement.by,
        "first": None if first is None else _finding_json(first),
        "suspects": [_finding_json(finding) for finding in judgement.findings[:_MOST]],
        "suspect_count": len(judgement.findings),
        "remarks": [_finding_json(finding) for finding in judgement.remarks[:_MOST]],
        "remark_count": len(judgement.remarks),
        "counts": judgement.counts,
        "not_judged": judgement.unknown,
        "not_seen": judgement.unseen,
        "before": judgement.before,
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
        "evidence": _evidence_json(finding),
    }


def _evidence_json(finding: Finding) -> dict[str, Any] | None:
    if finding.seen is not None:
        return {name: plain(value) for name, value in asdict(finding.seen).items()}
    return None if finding.measure is None else _measure_json(finding)


def _measure_json(finding: Finding) -> dict[str, Any]:
    measure = finding.measure
    assert measure is not None
    shape = pattern(measure)
    return {
        "by": REPLAY,
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
    size: str,
    next_commands: Sequence[str],
    attribution: Attribution | None = None,
) -> list[str]:
    """About thirty lines: the answer, the argument, the counts, the next command."""
    lines = [f"{' -> '.join(runs)}", f"{size}, {_HOW[judgement.by, judgement.compared]}", ""]
    first = judgement.first
    if first is None:
        lines += textwrap.wrap(judgement.answer, 120)
    else:
        lines += _panel(first)
        lines += _others(judgement, first)
    if attribution is not None:
        lines += ["", *attribution_lines(attribution)]
    lines += [
        "",
        "calls       " + ", ".join(f"{judgement.counts[name]} {name}" for name in _ORDER if judgement.counts.get(name)),
    ]
    lines += _remarks(judgement)
    for why, count in sorted(judgement.unknown.items(), key=lambda item: -item[1])[:3]:
        lines.append(f"not judged  {count}x {why}")
    if judgement.before:
        lines.append(
            f"before      {counted(judgement.before, 'call')} before the first forward of a model: not judged without --from-start"
        )
    for why, count in sorted(judgement.unseen.items(), key=lambda item: -item[1])[:3]:
        lines.append(f"not seen    {count}x {why}")
    lines += [f"next        {command}" for command in next_commands]
    return lines


def _remarks(judgement: Judgement) -> list[str]:
    """What is worth a word and no fault, one line for each kernel that does it."""
    found: dict[tuple[Verdict, str], list[Finding]] = {}
    for finding in judgement.remarks:
        found.setdefault((finding.verdict, finding.row.op), []).append(finding)
    lines = []
    for (verdict, op), each in list(found.items())[:_MOST_REMARKS]:
        row = each[0].row
        place = " ".join(part for part in (row.module or row.param or "", row.api or op) if part)
        more = f" ({len(each)} calls of {op})" if len(each) > 1 else ""
        lines.append(f"{verdict.value:<11} {place}: {each[0].why}{more}")
    if len(found) > _MOST_REMARKS:
        lines.append(f"            and remarks on {counted(len(found) - _MOST_REMARKS, 'other kernel')}")
    return lines


def counted(count: int, word: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {word}{'s'[: count != 1]}"


def _panel(first: Finding) -> list[str]:
    row = first.row
    place = row.module or row.param or "(outside of any module)"
    head = _HEADS.get(first.verdict, "introduced by")
    lines = [
        f"{head} {place}" + (f", {row.api}" if row.api else ""),
        f"  {'call      ' if row.op == row.api.rsplit('.', 2)[0] else 'kernel    '}{row.op} number {row.index} with {row.dtypes or 'no floats'}",
        f"  when      {row.phase}, step {row.step}, rank {row.rank}"
        + (f", parameter {row.param}" if row.param else ""),
        f"  why       {first.why}",
    ]
    if first.verdict is Verdict.INTRODUCED and row.kind != STATISTICS:
        lines.append("            its inputs are taken as they were: this is not inherited")
    if first.seen is not None:
        lines += _sides(first.seen)
    if first.measure is not None and first.verdict is not Verdict.PURPOSE:
        lines += _evidence(first.measure, first)
    if row.source is not None:
        file, number, function = row.source
        lines.append(f"  source    {file}:{number} in {function}")
        text = linecache.getline(file, number).strip()
        if text:
            lines.append(f"            {text[:100]}")
    return lines


def _sides(seen: Seen) -> list[str]:
    """What went in and came out, against the reference."""
    into, out = ("unknown" if error is None else f"{error:.2g}" for error in (seen.input_error, seen.output_error))
    return [
        f"  inputs    relative error {into}, by {seen.by}",
        f"  output    relative error {out}, at most {seen.expected:.2g} to be expected",
    ]


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
    lines = ["", f"{counted(len(others), 'other call')} above the limit"]
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
    if judgement.by == STATISTICS:
        only = row.call.rsplit(".", 2)[0]
        return [
            "ulpscope blame -- CMD    # every kernel run again while it runs: what statistics cannot tell",
            f"ulpscope capture --tensors --only {only} -o runs/call -- CMD    # then: ulpscope replay runs/call {row.call}",
        ]
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
