"""Records as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import CallRecord, Role, Stretch, Value
from ulpscope.store.dump import Dump

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def run_lines(dumps: Sequence[Dump]) -> Iterator[str]:
    """A run in a table: a line for each step and rank."""
    names = ["step", "rank", "level", "calls", "values", "payload", "ending"]
    yield table_line([*names, "forwards"] if any(dump.manifest.stretches for dump in dumps) else names, _RUN)
    for dump in dumps:
        manifest = dump.manifest
        payload = _size(manifest.counts.get("payload_bytes", 0)) if manifest.config.get("tensors") else "-"
        columns = (manifest.step, manifest.rank, manifest.level, len(dump), dump.value_count, payload, dump.ending)
        kinds = dict.fromkeys([*(kind.value for kind in Stretch), *manifest.stretches])
        stretches = ", ".join(f"{kind} {manifest.stretches[kind]}" for kind in kinds if kind in manifest.stretches)
        yield table_line([*map(str, columns), stretches], _RUN)


def call_line(call: CallRecord) -> str:
    """One call in one line: order, name, module, what went in and what came out."""
    marks = ("recomputed " if call.recomputed else "") + (f"raised {call.error}" if call.error else "")
    ins = [short_value(value) for value in call.values if value.slot.role is not Role.OUTPUT and value.is_tensor]
    outs = [short_value(value) for value in call.values if value.slot.role is Role.OUTPUT and value.is_tensor]
    shown = f"{_join(ins)} -> {_join(outs)}"
    return f"{call.seq:>6}  {call_text(call.id):<46} {shown}  {marks}".rstrip()


def call_lines(dump: Dump, call: CallRecord) -> Iterator[str]:
    """One call in full: its values in a table, then its stack with the user's own frames first."""
    parent = dump.parent(call)
    yield call_text(call.id)
    yield (
        f"  order {call.seq}, thread {call.thread}"
        + (f", in {call_text(parent)}" if parent is not None else "")
        + (f", module {call.module}" if call.module else "")
        + (", recomputed" if call.recomputed else "")
    )
    if call.error is not None:
        yield f"  raised {call.error}"
    yield ""
    yield "  " + table_line(("", "type", "shape", "max", "min", "mean", "norm", ""), _VALUES)
    for value in call.values:
        yield "  " + value_line(value)
    frames = dump.stack(call)
    if frames:
        yield ""
        own = [frame for frame in frames if not frame.library]
        for frame in own:
            yield f"  {frame.file}:{frame.line} in {frame.function}"
            if frame.text:
                yield f"      {frame.text}"
        library = [frame for frame in frames if frame.library]
        if library:
            inner = library[0]
            yield f"  and {len(library)} frames in libraries, innermost {inner.file}:{inner.line} in {inner.function}"


def value_line(value: Value) -> str:
    """One value in a row: its slot, type, shape and statistics, and anything odd about it."""
    if not value.is_tensor:
        shown = "unknown: " + value.error if value.error else f"{value.scalar!r}"
        return table_line((slot_text(value.slot), value.type, shown), _VALUES)
    stats = value.stats
    numbers = ["-"] * 4 if stats is None else [number(item) for item in (stats.max, stats.min, stats.mean, stats.norm)]
    remarks = []
    if stats is not None:
        counts = (("nan", stats.nan_count), ("inf", stats.posinf_count), ("-inf", stats.neginf_count))
        remarks += [f"{count} {name}" for name, count in counts if count]
    if value.checksum is not None:
        remarks.append(f"crc {value.checksum:08x}")
    remarks += [f"{key} {item}" for key, item in value.extra.items()]
    if value.error is not None:
        remarks.append("unknown: " + value.error)
    return table_line((slot_text(value.slot), _dtype(value), _shape(value), *numbers, "  ".join(remarks)), _VALUES)


def short_value(value: Value) -> str:
    return f"{_dtype(value)}{_shape(value)}"


def number(value: float | int | None) -> str:
    """Four significant digits: enough to see a difference by eye, few enough for a column."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def table_line(columns: Sequence[str], widths: Sequence[int]) -> str:
    cells = [column.ljust(width) for column, width in zip(columns, widths, strict=False)]
    return "  ".join([*cells, *columns[len(cells) :]]).rstrip()


_RUN = (5, 5, 7, 8, 8, 9, 10)
_VALUES = (24, 9, 18, 11, 11, 11, 11, 0)


def _dtype(value: Value) -> str:
    name = (value.dtype or "?").removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _SHORT[letters] + name[len(letters) :] if letters in _SHORT else name


def _shape(value: Value) -> str:
    return "[" + ", ".join(str(size) for size in value.shape or ()) + "]"


def _join(items: list[str]) -> str:
    return " ".join(items[:3]) + (f" +{len(items) - 3}" if len(items) > 3 else "") if items else "()"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
