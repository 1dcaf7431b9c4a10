"""Rows of ptdbg_ascend's files in words: the names of values as the tool spells them, and a call's statistics and stack."""

from __future__ import annotations

from collections.abc import Iterator

from ulpscope.model.names import call_text, value_text
from ulpscope.model.records import CallRecord, Role, Value
from ulpscope.store.dump import Dump
from ulpscope.store.formats.pkl_names import call_name, has_place, named_values


def older_names(dump: Dump, call: CallRecord) -> dict[str, str]:
    """For each value of a call, by its name here, the name that its line has or would have."""
    found = {}
    base = call_name(dump, call.id)
    for value, role, at in named_values(call):
        name = str(value.extra.get("name") or f"{base}_{role.value}{at}")
        found[value_text(call.id, value.slot)] = name
        if role is Role.INPUT and isinstance(value.slot.path[0], str):
            # With elements, a keyword argument has the name of msprobe's file in the tables.
            path = ".".join(map(str, value.slot.path))
            found[f"{call_text(call.id)}.kwargs.{path}"] = name
    return found


def call_lines(dump: Dump, prefix: str) -> Iterator[str]:
    """`Statistic Info:` and `Trace back(...)` of the calls whose names begin with a prefix; nothing if there are none."""
    for place, call in enumerate(dump.ids()):
        if not has_place(call) or not _begins(call_name(dump, call), prefix):
            continue
        record = dump.nth(place)
        names = older_names(dump, record)
        yield "Statistic Info:"
        for value, _, _ in named_values(record):
            yield f"  {_statistics(names[value_text(call, value.slot)], value)}"
        if record.stack is not None:
            yield f"Trace back({call_name(dump, call)}):"
            for frame in reversed(dump.stack(record)):
                yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
                yield f"    {frame.text}"


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip("_") + "_")


def _statistics(name: str, value: Value) -> str:
    if value.is_tensor:
        stats = value.stats
        dtype, shape = value.dtype, str(list(value.shape or ()))
        numbers = ["Nan"] * 3 if stats is None else [_word(n) for n in (stats.max, stats.min, stats.mean)]
    else:
        dtype, shape, numbers = f"<class '{value.type}'>", "[]", [str(value.scalar)] * 3
    largest, smallest, mean = numbers
    return f"[{name}][dtype: {dtype}][shape: {shape}][max: {largest}][min: {smallest}][mean: {mean}]"


def _word(number: float | int | None) -> str:
    return "Nan" if number is None else str(number)
