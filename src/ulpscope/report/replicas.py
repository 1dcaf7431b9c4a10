"""What data-parallel replicas disagree on, as text."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ulpscope.analyze.replicas import Agreement, Disagreement
from ulpscope.findings.ranks import ranks_text
from ulpscope.model.names import call_text, slot_text

_SHOWN_RANKS = 8


def replica_lines(answer: Agreement) -> list[str]:
    """The answer; the first disagreement with the numbers of every rank."""
    replicas = "; ".join(ranks_text(group) for group in answer.groups)
    compared = f"{answer.compared} values compared" + (f", replicas: {replicas}" if replicas else ", no replicas known")
    if not answer.found:
        return [f"replicas agree: {compared}"]
    first = answer.found[0]
    lines = [f"replicas disagree from step {first.step} on, at {call_text(first.call)}  {slot_text(first.slot)}"]
    if first.others:
        lines.append(f"  {ranks_text(first.odd)} from {ranks_text(first.others)}")
    if first.is_exchange:
        lines.append("  every member of the group should hold the same after it")
    lines += [f"  rank {rank}: {_numbers(value)}" for rank, value in list(first.values.items())[:_SHOWN_RANKS]]
    kinds = Counter("exchange" if each.is_exchange else "parameter" for each in answer.found)
    more = ", ".join(f"{count} {kind}{'s'[: count > 1]}" for kind, count in kinds.items())
    return [*lines, "", f"{more} disagree; {compared}"]


def replica_json(answer: Agreement) -> dict[str, Any]:
    return {
        "groups": answer.groups,
        "compared": answer.compared,
        "disagreements": [_one(each) for each in answer.found],
    }


def _one(each: Disagreement) -> dict[str, Any]:
    return {
        "step": each.step,
        "call": call_text(each.call),
        "slot": slot_text(each.slot),
        "ranks": sorted(each.values),
        "odd": each.odd,
    }


def _numbers(value: Any) -> str:
    stats = value.stats
    text = f"max {stats.max:.9g}, min {stats.min:.9g}, mean {stats.mean:.9g}, norm {stats.norm:.9g}"
    return text + (f", crc {value.checksum:08x}" if value.checksum is not None else "")
