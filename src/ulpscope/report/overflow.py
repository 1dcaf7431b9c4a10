"""Overflows as text: who made the first value that is not finite, from what, and where it stands in the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import CallRecord, Frame, Value

if TYPE_CHECKING:
    from ulpscope.replay.overflow import Overflow

_MEANING = {
    "pole": "a pole: the exact result is infinite at these inputs, and finite beside them",
    "normal": "normal: computed in float64, the result does not fit into its dtype either",
    "abnormal": "abnormal: computed in float64, the result fits into its dtype; the kernel overflows on its way",
}


def overflow_lines(found: Overflow, *, ranks: int) -> list[str]:
    """One overflow in a few lines."""
    call, nature = found.call, found.nature.value
    where = f"step {found.step}" + (f", rank {found.rank}" if ranks > 1 else "")
    lines = [f"{call_text(call.id)}  {'has a pole' if nature == 'pole' else 'overflows'}  ({where})"]
    lines += call_lines(call, found.source)
    lines.append("  " + _MEANING.get(nature, f"normal or abnormal is not known: {found.reason}"))
    return lines


def call_lines(call: CallRecord, source: Frame | None) -> list[str]:
    """The tensors of a call, and where it stands in the program."""
    lines = [f"  {slot_text(value.slot)}  {_shown(value)}" for value in call.values if value.is_tensor]
    if call.module:
        lines.append(f"  in module {call.module}")
    if source is not None:
        lines.append(f"  at {source.file}:{source.line} in {source.function}: {source.text}")
    return lines


def overflow_json(found: Overflow) -> dict[str, Any]:
    """One overflow as plain JSON; numbers that are not finite as text."""
    told = {"nature": found.nature.value, "reason": found.reason}
    return {**call_json(found.call, found.source, step=found.step, rank=found.rank), **told}


def call_json(call: CallRecord, source: Frame | None, *, step: int, rank: int) -> dict[str, Any]:
    """A call, its tensors and its place as plain JSON; numbers that are not finite as text."""
    return {
        "call": call_text(call.id),
        "step": step,
        "rank": rank,
        "module": call.module,
        "source": None if source is None else {"file": source.file, "line": source.line, "text": source.text},
        "values": [
            {"slot": slot_text(value.slot), "dtype": value.dtype, "shape": value.shape, **_counts(value)}
            for value in call.values
            if value.is_tensor
        ],
    }


def summary_line(count: int, notes: Sequence[str]) -> str:
    """The answer in one line."""
    head = f"{count} call{'s'[: count > 1]} overflowed" if count else "no call overflowed"
    return "; ".join([head, *notes])


def _shown(value: Value) -> str:
    shape = "x".join(map(str, value.shape or ())) or "scalar"
    head = f"{(value.dtype or '').removeprefix('torch.')} {shape}"
    if value.stats is None:
        return f"{head}  {value.error or 'not measured'}"
    counts = ", ".join(f"{count} {name}" for name, count in _counts(value).items() if count)
    size = f"min {value.stats.finite_min:.6g}, max {value.stats.finite_max:.6g}"
    return f"{head}  {f'{counts}; finite: ' if counts else ''}{size}"


def _counts(value: Value) -> dict[str, int]:
    stats = value.stats
    if stats is None:
        return {}
    return {"nan": stats.nan_count, "inf": stats.posinf_count, "-inf": stats.neginf_count}
