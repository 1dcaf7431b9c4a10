"""A .pkl of JSON lines, as ptdbg_ascend and torch_npu.hooks write it, and what their dumps have in common.

Such a file is no pickle, and a pickle is never loaded. Lines are parsed once to find the calls and again when a call is
looked at, so that a file larger than memory can be read. A last line that is cut is dropped, and `ending` says so.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import DTYPES
from ulpscope.model.errors import DumpError
from ulpscope.model.names import KINDS, MODULE
from ulpscope.model.records import CallId, CallRecord, Manifest, Phase, Role, Slot, Value
from ulpscope.store import layout
from ulpscope.store.files.plain_file import mapped
from ulpscope.store.reader import Dump

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


class LinesDump(Dump):
    """Calls whose values are lines of one file. Subclasses fill `_ids`, `_rows` and say what a row is."""

    def __init__(self, path: Path) -> None:
        self.folder = Path(path)
        self.recovered = 0
        self._missing: set[str] = set()
        self._file = Lines(self.folder)
        self._ids: list[CallId] = []
        self._rows: list[list[int]] = []  # of each call
        self._stacks: list[int | None] = []

    def __len__(self) -> int:
        return len(self._ids)

    def calls(self) -> Iterator[CallRecord]:
        for number in range(len(self)):
            yield self._record(number)

    def ids(self) -> list[CallId]:
        return list(self._ids)

    def modules(self) -> list[str]:
        """Empty texts: the older tools do not say where a call ran."""
        return [""] * len(self)

    def threads(self) -> list[int]:
        return [0] * len(self)

    def nth(self, place: int) -> CallRecord:
        return self._record(range(len(self))[place])

    @property
    def missing(self) -> set[str]:
        return self._missing

    @property
    def value_count(self) -> int:
        return sum(map(len, self._rows))

    def sketch(self, value: Value) -> NDArray[np.float32] | None:
        """None: the older tools have no sketches."""
        return None

    @cached_property
    def _by_id(self) -> dict[CallId, int]:
        return {call: number for number, call in reversed(list(enumerate(self._ids)))}

    @cached_property
    def _by_seq(self) -> dict[int, int]:
        return {number: number for number in range(len(self))}

    def _begin(self, call: CallId) -> int:
        self._ids.append(call)
        self._rows.append([])
        self._stacks.append(None)
        return len(self._ids) - 1

    def _record(self, number: int) -> CallRecord:
        call = self._ids[number]
        return CallRecord(
            id=call,
            seq=number,
            parent=None,
            origin=self._origin(call),
            module="",
            values=tuple(self._value_of(row) for row in self._rows[number]),
            stack=self._stacks[number],
            thread=0,
        )

    def _origin(self, call: CallId) -> int | None:
        return None

    def _value_of(self, number: int) -> Value:
        raise NotImplementedError

    def _manifest_of(self, source: str, payload_bytes: int, notes: tuple[str, ...], **config: Any) -> Manifest:
        place = layout.find_dumps(self.folder)[0]
        if self._file.cut:
            notes += ("the last line is cut: the process ended while it was written",)
        return Manifest(
            format=layout.FORMAT_VERSION,
            framework="pytorch",
            level="op",
            step=place.step,
            rank=place.rank,
            world_size=1,
            state="incomplete" if self._file.cut else "complete",
            config={"source": source, **config},
            environment={},
            notes=notes,
            counts={"calls": len(self), "payload_bytes": payload_bytes},
        )

    def _shape(self, number: int, sizes: Any) -> tuple[int, ...]:
        plain = isinstance(sizes, list) and len(sizes) <= _MAX_DIMS
        if not plain or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
            self._file.refuse(number, "has a shape that is no list of sizes")
        if math.prod(sizes) >> 58:
            self._file.refuse(number, f"has a shape with more elements than can be: {sizes}")
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
