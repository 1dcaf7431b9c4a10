"""Reading a dump of ptdbg_ascend: `{mode_}dump.pkl`, a file of JSON lines, and the folder of .npy files beside it.

    ["Functional_conv2d_0_forward_input.0", 0, [], "torch.float32", [8, 1, 8, 8], [max, min, mean, norm]]
    ["Functional_conv2d_0_forward_stack_info", [["net.py", "58", "forward", "return conv(x)"], ...]]

Versions 1 to 3, dumps of overflows included; the first ones give no norm. Calls are in the order of the file. In the files
as here, the input of a backward call is the gradient that came in.
"""

from __future__ import annotations

import logging
import math
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from ulpscope.model.dtypes import DTYPES
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text
from ulpscope.model.records import (
    CallId,
    CallRecord,
    Frame,
    Payload,
    Phase,
    Role,
    Slot,
    Stats,
    Summary,
    ToldStats,
    Value,
)
from ulpscope.store.files.npy import narrowed, read_npy
from ulpscope.store.formats.pkl_lines import (
    PLACE,
    STACK,
    LineCalls,
    Lines,
    call_parts,
    itemsize_of,
    manifest_of,
    phase_of,
    plain,
    shape_of,
    slot_of,
)
from ulpscope.store.mapped import StoredBits
from ulpscope.store.run_folder import DumpLocation

_log = logging.getLogger(__name__)
_NAME = re.compile(rf"(?P<head>.+)_(?P<index>\d{{1,9}})_{PLACE}", re.DOTALL)
_CLASS = re.compile(r"<class '(.*)'>")
_NOT_KNOWN = ("Nan", "nan")
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen")


class PtdbgDump:
    """One .pkl of ptdbg_ascend. Open it with `open_dump`.

    `arrays` is the folder of the .npy files where it is not the one beside the file."""

    format = "ptdbg_ascend"

    def __init__(self, location: DumpLocation, *, arrays: Path | None = None) -> None:
        self.folder = location.folder
        self.missing: set[str] = set()
        self._file = Lines(self.folder)
        self._calls = LineCalls()
        self._last: dict[str, int] = {}  # the row that wrote each file last
        self._read_rows()
        self._data_folder = self._find_data() if arrays is None else arrays
        self._tensors, nbytes = self._list_tensors()
        mode = self.folder.stem.removesuffix("dump").rstrip("_")
        about = {"source": self.format, "mode": mode or "all", "tensors": bool(self._tensors)}
        self.manifest = manifest_of(location, self._file, self._calls, (), nbytes, **about)

    def ids(self) -> list[CallId]:
        return self._calls.ids

    def modules(self) -> list[str]:
        return [""] * len(self._calls.ids)

    def parent(self, call: CallRecord) -> None:
        return None

    def spelled(self, call: CallRecord) -> str:
        return call_text(call.id)

    def record(self, position: int) -> CallRecord:
        return self._calls.record(position, self._value_of, self._origin(self._calls.ids[position]))

    def stack(self, call: CallRecord) -> list[Frame]:
        if call.stack is None:
            return []
        frames = self._file.row(call.stack)[1]
        return [_frame(frame) for frame in frames if frame]

    # --- rows into calls ----------------------------------------------------------------------------------------

    def _read_rows(self) -> None:
        open_calls: dict[CallId, int] = {}
        slots: dict[CallId, set[Slot]] = {}
        no_stacks = 0
        for number, row in self._file.scan():
            call, slot = self._parts(number, row)
            at = open_calls.get(call)
            # A slot or a stack that comes again belongs to a repeat: a second backward through the same graph.
            taken = at is not None and (self._calls.stacks[at] is not None if slot is None else slot in slots[call])
            if at is None or taken:
                again = 0 if at is None else self._calls.ids[at].again + 1
                at = open_calls[call] = self._calls.begin(CallId(call.kind, call.name, call.index, call.phase, again))
                slots[call] = set()
            if slot is None:
                whole = _is_stack(row)
                no_stacks += not whole
                self._calls.stacks[at] = number if whole else None
            else:
                slots[call].add(slot)
                self._calls.rows[at].append(number)
                self._last[row[0]] = number
        if no_stacks:
            # Stacks only help to read the values.
            _log.warning("%s: %d lines are no stacks; they are left out", self.folder, no_stacks)

    def _parts(self, number: int, row: list[Any]) -> tuple[CallId, Slot | None]:
        """The call of a row and the slot; None for the stack."""
        found = _NAME.fullmatch(row[0])
        if found is None:
            self._file.refuse(
                number, f"has the name {row[0][:80]!r}; a name looks like Functional_conv2d_0_forward_input.0"
            )
        call = CallId(*call_parts(found["head"]), int(found["index"]), phase_of(found))
        if found["role"] == STACK:
            return call, None
        if len(row) < 6 or not isinstance(row[3], str):
            self._file.refuse(number, "is not a value; it needs a name, a step, [], a type, a shape and statistics")
        return call, slot_of(found, role=Role(found["role"]))

    @cached_property
    def _by_id(self) -> dict[CallId, int]:
        return {call: number for number, call in reversed(list(enumerate(self._calls.ids)))}

    def _origin(self, call: CallId) -> int | None:
        if call.phase is not Phase.BACKWARD:
            return None
        return self._by_id.get(CallId(call.kind, call.name, call.index, Phase.FORWARD))

    # --- rows into values ---------------------------------------------------------------------------------------

    def _value_of(self, number: int) -> Value:
        row = self._file.row(number)
        name, step, _, dtype, sizes, numbers = row[:6]
        _, slot = self._parts(number, row)
        assert slot is not None
        if not isinstance(numbers, list) or len(numbers) not in (3, 4):
            self._file.refuse(number, "has statistics that are no list of three or four")
        extra: dict[str, Any] = {"name": name}
        if type(step) is int and step:
            extra["dump_step"] = step
        scalar = _CLASS.fullmatch(dtype)
        if scalar is not None:
            return Value(slot, scalar[1], scalar=plain(numbers[0]), extra=extra)
        shape = shape_of(self._file, number, [] if sizes == "[]" else sizes)
        return Value(
            slot=slot,
            type="torch.Tensor",
            dtype=dtype,
            shape=shape,
            stats=self._stats(number, shape, numbers),
            payload=self._payload(number, name, itemsize_of(dtype) * math.prod(shape), extra),
            extra=extra,
        )

    def _stats(self, number: int, shape: tuple[int, ...], numbers: list[Any]) -> Summary | None:
        numel = math.prod(shape)
        if not numel:
            return Stats(0, 0, 0, 0.0, 0.0)
        told = [self._number(number, item) for item in numbers]
        largest, smallest, mean, norm = told if len(told) == 4 else [*told, None]
        if largest is smallest is mean is norm is None:
            return None
        return ToldStats(numel, largest, smallest, mean, norm)

    def _number(self, number: int, item: Any) -> float | None:
        """A statistic; the empty list and the text Nan stand for one that was not taken. All of them passed float32."""
        if item is None or item == [] or item in _NOT_KNOWN:
            return None
        if not isinstance(item, int | float):
            self._file.refuse(number, "has a statistic that is no number")
        try:
            return float(item)
        except OverflowError:
            return math.inf if item > 0 else -math.inf

    # --- payloads -----------------------------------------------------------------------------------------------

    def _find_data(self) -> Path | None:
        """The folder of the .npy files: named as the file, in the first version with a time behind."""
        named = self.folder.with_suffix("")
        if named.is_dir():
            return named
        timed = re.compile(re.escape(named.name) + r"_\d+")
        found = [path for path in self.folder.parent.iterdir() if timed.fullmatch(path.name) and path.is_dir()]
        return found[0] if len(found) == 1 else None

    def _list_tensors(self) -> tuple[dict[str, bool], int]:
        """The .npy files, whether each is a plain file, and their size together."""
        if self._data_folder is None:
            return {}, 0
        if self._data_folder.is_symlink():
            raise DumpError(f"{self._data_folder} is a symbolic link; a dump holds plain folders only")
        found: dict[str, bool] = {}
        total = 0
        with os.scandir(self._data_folder) as entries:
            for entry in entries:
                found[entry.name] = entry.is_file(follow_symlinks=False)
                total += entry.stat(follow_symlinks=False).st_size
        return found, total

    def _payload(self, number: int, name: str, nbytes: int, extra: dict[str, Any]) -> Payload | None:
        if self._data_folder is None:
            return None
        if f"{name}.npy" not in self._tensors:
            extra["missing"] = f"{name}.npy"
            self.missing.add(extra["missing"])
        elif self._last[name] != number:
            extra["missing"] = f"{name}.npy: a later call of the same name wrote over it"
            extra["overwritten"] = True  # by the tool itself: nothing was lost since
        else:
            return Payload(number, nbytes)
        return None

    def stored(self, value: Value) -> StoredBits:
        if value.payload is None or self._data_folder is None:
            raise DumpError(
                "this value was recorded without its elements; ptdbg_ascend stores them with summary_only=False"
            )
        name = self._file.row(value.payload.offset)[0]
        path = self._data_folder / f"{name}.npy"
        dtype, shape, raw = read_npy(path)
        told = DTYPES.get(str(value.dtype).removeprefix("torch."))
        wider = "complex64" if told is not None and told.name == "complex32" else "float32"
        if told is not None and told.exact is None and dtype.name == wider:
            narrow = narrowed(raw, told)
            if narrow is not None:
                dtype, raw = told, narrow
        if dtype is not told or shape != value.shape:
            raise DumpError(
                f"{path} holds a {dtype.name} of shape {shape}; its dump says {value.dtype} of shape {value.shape}"
            )
        return StoredBits(dtype, raw, shape)


def _is_stack(row: list[Any]) -> bool:
    return len(row) == 2 and isinstance(row[1], list) and all(map(_is_frame, row[1]))


def _is_frame(frame: Any) -> bool:
    """File, line, function and code, texts all; the code may be null, and a stack that failed ends in an empty text."""
    if frame == "":
        return True
    if not isinstance(frame, list) or len(frame) != 4:
        return False
    return all(isinstance(part, str) for part in frame[:3]) and (frame[3] is None or isinstance(frame[3], str))


def _frame(frame: list[Any]) -> Frame:
    file, line, function, code = frame
    number = int(line) if line.isdecimal() and len(line) < 10 else 0
    return Frame(file, number, function, code or "", any(part in file for part in _LIBRARIES))
