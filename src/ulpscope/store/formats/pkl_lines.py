"""A .pkl of JSON lines, as ptdbg_ascend and torch_npu.hooks write it, and what their dumps have in common.

Such a file is no pickle, and a pickle is never loaded. Lines are parsed once to find the calls and again when a call is
looked at, so that a file larger than memory can be read. A last line that is cut is dropped, and `ending` says so.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ulpscope.model.dtypes import DTYPES
from ulpscope.model.errors import DumpError
from ulpscope.model.names import KINDS, MODULE
from ulpscope.model.records import CallId, CallRecord, Manifest, Phase, Role, Slot, Value
from ulpscope.native.schema import FORMAT_VERSION
from ulpscope.store.files.plain_file import mapped
from ulpscope.store.run_folder import DumpLocation

STACK = "stack_info"
PLACE = (
    r"(?P<phase>forward|backward)_(?P<role>input|output|stack_info)(?P<path>(?:\.(?:\d{1,9}|[^\W\d]\w{0,63})){0,64})"
)
_KINDS = KINDS | {MODULE}
_MAX_DIMS = 64


class Lines:
    """The rows of a file: each a list that begins with a name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = False
        self._data = mapped(path)
        if not len(self._data):
            raise DumpError(f"{path} is empty: nothing was recorded")
        if self._data[:1] != b"[":
            what = "a Python pickle, which is never loaded" if self._data[:1] == b"\x80" else "something else"
            raise DumpError(
                f"{path} is not a dump: a .pkl of ptdbg_ascend or torch_npu.hooks holds JSON lines, and this is {what}"
            )
        self._spans = array("Q")  # begin and end of each row
        self._numbers = array("Q")  # its line in the file

    def scan(self) -> Iterator[tuple[int, list[Any]]]:
        """Every row with its number; afterwards each can be had by `row`."""
        at, line = 0, 0
        while at < len(self._data):
            line += 1
            end = self._data.find(b"\n", at)
            last = end < 0
            if last:
                end = len(self._data)
            if self._data[at:end].strip():
                self._spans.extend((at, end))
                self._numbers.append(line)
                number = len(self._numbers) - 1
                try:
                    row = self.row(number)
                except DumpError:
                    if not last:
                        raise
                    self.cut = True
                    del self._spans[-2:], self._numbers[-1:]
                    return
                yield number, row
            at = end + 1

    def row(self, number: int) -> list[Any]:
        try:
            found = json.loads(self._data[self._spans[2 * number] : self._spans[2 * number + 1]])
        except (ValueError, RecursionError) as error:
            why = "nested too deep" if isinstance(error, RecursionError) else str(error)
            self.refuse(number, f"is not JSON: {why}")
        if not isinstance(found, list) or len(found) < 2 or not isinstance(found[0], str):
            self.refuse(number, "is not a row; a row is a list that begins with a name")
        return found

    def refuse(self, number: int, why: str) -> NoReturn:
        raise DumpError(f"{self.path}, line {self._numbers[number]} {why}")


def is_ptdbg(path: Path) -> bool:
    """Whether the file is one of ptdbg_ascend; otherwise it is one of torch_npu.hooks."""
    _, row = next(Lines(path).scan(), (0, None))
    if row is None:
        raise DumpError(f"{path} holds no whole line: the process ended while it wrote the first one")
    return len(row) > 4 or (len(row) == 2 and row[0].endswith(STACK) and isinstance(row[1], list))


class LineCalls:
    """Calls whose values are lines of one file: their names, and which lines each has."""

    def __init__(self) -> None:
        self.ids: list[CallId] = []
        self.rows: list[list[int]] = []
        self.stacks: list[int | None] = []

    def begin(self, call: CallId) -> int:
        self.ids.append(call)
        self.rows.append([])
        self.stacks.append(None)
        return len(self.ids) - 1

    def record(self, position: int, value_of: Callable[[int], Value], origin: int | None = None) -> CallRecord:
        return CallRecord(
            id=self.ids[position],
            seq=position,
            parent=None,
            origin=origin,
            module="",
            values=tuple(map(value_of, self.rows[position])),
            stack=self.stacks[position],
            thread=0,
        )


def manifest_of(
    location: DumpLocation, file: Lines, calls: LineCalls, notes: tuple[str, ...], payload_bytes: int, **config: Any
) -> Manifest:
    if file.cut:
        notes += ("the last line is cut: the process ended while it was written",)
    return Manifest(
        format=FORMAT_VERSION,
        framework="pytorch",
        level="op",
        step=location.step,
        rank=location.rank,
        world_size=1,
        state="incomplete" if file.cut else "complete",
        config=config,
        environment={},
        notes=notes,
        counts={"calls": len(calls.ids), "values": sum(map(len, calls.rows)), "payload_bytes": payload_bytes},
    )


def shape_of(file: Lines, number: int, sizes: Any) -> tuple[int, ...]:
    """The shape in a row. Refuses the row where it has none."""
    plain = isinstance(sizes, list) and len(sizes) <= _MAX_DIMS
    if not plain or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        file.refuse(number, "has a shape that is no list of sizes")
    if math.prod(sizes) >> 58:
        file.refuse(number, f"has a shape with more elements than can be: {sizes}")
    return tuple(sizes)


def call_parts(head: str) -> tuple[str, str]:
    """Kind and name of `Torch_batch_norm` or `Tensor___add__`; anything else was named by a user, and is a module."""
    kind, _, name = head.partition("_")
    return (kind, name) if kind in _KINDS and name else (MODULE, head)


def slot_of(found: re.Match[str], *, role: Role) -> Slot:
    """The slot behind a name. A value that is not in a list has no position there, and the first one here."""
    steps = found["path"].split(".")[1:]
    return Slot(role, tuple(int(step) if step.isdecimal() else step for step in steps) or (0,))


def phase_of(found: re.Match[str]) -> Phase:
    return Phase(found["phase"])


def itemsize_of(dtype: str) -> int:
    """Bytes of an element; 0 when the type is not known."""
    element = DTYPES.get(dtype.removeprefix("torch."))
    return 0 if element is None else element.itemsize


def plain(item: Any) -> Any:
    """A value as native dumps hold it: floats that JSON lacks are texts, and what is no plain value is not held."""
    if isinstance(item, float) and not math.isfinite(item):
        return repr(item)
    return item if item is None or isinstance(item, bool | int | float | str) else None
