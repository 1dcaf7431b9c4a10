"""Records as plain JSON: sorted, without times, so that the same dump gives the same bytes."""

from __future__ import annotations

import math
from typing import Any

from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import CallRecord, Summary, Value
from ulpscope.store.dump import Dump


def run_json(dumps: list[Dump]) -> dict[str, Any]:
    """A run: what each of its dumps holds."""
    return {
        "format": 1,
        "dumps": [
            {
                "folder": str(dump.folder),
                "step": dump.manifest.step,
                "rank": dump.manifest.rank,
                "level": dump.manifest.level,
                "calls": len(dump),
                "ending": dump.ending,
                "stretches": dump.manifest.stretches,
                "notes": list(dump.manifest.notes),
            }
            for dump in dumps
        ],
    }


def call_json(dump: Dump, call: CallRecord, *, stack: bool) -> dict[str, Any]:
    """One call with its values, and its stack if asked."""
    parent = dump.parent(call)
    found: dict[str, Any] = {
        "name": call_text(call.id),
        "seq": call.seq,
        "parent": None if parent is None else call_text(parent),
        "module": call.module,
        "thread": call.thread,
        "recomputed": call.recomputed,
        "error": call.error,
        "values": [value_json(value) for value in call.values],
    }
    if stack:
        found["stack"] = [
            {"file": frame.file, "line": frame.line, "function": frame.function, "text": frame.text}
            for frame in dump.stack(call)
        ]
    return found


def value_json(value: Value) -> dict[str, Any]:
    """One value; what is not known is not there."""
    found: dict[str, Any] = {"slot": slot_text(value.slot), "type": value.type}
    if value.is_tensor:
        found |= {
            "dtype": value.dtype,
            "shape": list(value.shape or ()),
            "device": value.device,
            "requires_grad": value.requires_grad,
        }
    elif value.error is None:
        found["value"] = value.scalar
    if value.stats is not None:
        found["stats"] = stats_json(value.stats)
    if value.checksum is not None:
        found["crc32"] = f"{value.checksum:08x}"
    if value.error is not None:
        found["error"] = value.error
    return found | value.extra


def stats_json(stats: Summary) -> dict[str, Any]:
    numbers = {name: getattr(stats, name) for name in ("max", "min", "mean", "norm")}
    counts = {
        "nan": stats.nan_count,
        "inf": stats.posinf_count,
        "-inf": stats.neginf_count,
        "zero": stats.zero_count,
        "elements": stats.numel,
    }
    return {name: _plain(number) for name, number in numbers.items()} | counts


def _plain(number: float | int | None) -> Any:
    """RFC 8259 has no NaN and no Infinity: they become texts."""
    return repr(number) if isinstance(number, float) and not math.isfinite(number) else number
