"""Reading a dump of torch_npu.hooks: one .pkl of JSON lines, the values in the lines themselves.

    ["0_Functional_linear_forward_input.0", [value, ..., max, min, mean], "torch.float32", [2, 2]]    sample=True
    ["0_Functional_linear_forward_input.0", [value, ...], "torch.float32", [2, 2]]                    sample=False

The number in front counts values through the whole file and is not part of a name: the calls of a name are counted here, in
the order they ran, forward and backward apart. A line with sample=True holds the first ten values at most, so that a small
tensor is there with all of its elements. The files of `wrap_checkoverflow_hook` have no counter, and stacks as texts.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from ulpscope.model.dtypes import DTYPES, Array, DType, dtype_named
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
from ulpscope.store.files.npy import as_bfloat16
from ulpscope.store.formats.pkl_lines import (
    PLACE,
    STACK,
    LineCalls,
    Lines,
    call_parts,
    manifest_of,
    phase_of,
    plain,
    shape_of,
    slot_of,
)
from ulpscope.store.mapped import StoredBits
from ulpscope.store.run_folder import DumpLocation

_NAME = re.compile(rf"(?:\d+_)?(?P<head>.+)_{PLACE}", re.DOTALL)
_FRAME = re.compile(
    r"FrameInfo\(.*filename='(.*?)', lineno=(\d{1,9}), function='(.*?)', code_context=(?:\['(.*?)'\]|None).*", re.DOTALL
)
_SAMPLED = 10
_STATISTICS = 3
# Every value passed through float32; of these types nothing was lost on the way.
_EXACT = frozenset({"float32", "float16", "bfloat16"})
_BACKWARD_NOTE = (
    "backward calls are numbered in the order they ran: torch_npu.hooks does not say which forward call they belong to"
)


class HooksDump:
    """One .pkl of torch_npu.hooks. Open it with `open_dump`."""

    format = "torch_npu.hooks"
    missing: frozenset[str] = frozenset()  # the elements are in the lines themselves

    def __init__(self, location: DumpLocation) -> None:
        self._file = Lines(location.folder)
        self._calls = LineCalls()
        self._frames: dict[int, list[int]] = {}
        self._sampled = False
        nbytes = self._read_rows()
        notes = (_BACKWARD_NOTE,) if any(call.phase is Phase.BACKWARD for call in self._calls.ids) else ()
        about = {"source": self.format, "tensors": nbytes > 0, "sample": self._sampled}
        self.manifest = manifest_of(location, self._file, self._calls, notes, nbytes, **about)

    def ids(self) -> list[CallId]:
        return self._calls.ids

    def modules(self) -> list[str]:
        return [""] * len(self._calls.ids)

    def parent(self, call: CallRecord) -> None:
        return None

    def spelled(self, call: CallRecord) -> str:
        return call_text(call.id)

    def record(self, position: int) -> CallRecord:
        return self._calls.record(position, self._value_of)

    def stack(self, call: CallRecord) -> list[Frame]:
        if call.stack is None:
            return []
        return [_frame(self._file.row(number)[1]) for number in self._frames[call.stack]]

    def sample(self, value: Value) -> Array | None:
        """The numbers of a line, max, min and mean at their end where it has them: what its own compare looks at."""
        return None if value.measure is None else self._vector(value.measure, self._file.row(value.measure))

    # --- rows into calls ----------------------------------------------------------------------------------------

    def _read_rows(self) -> int:
        """Finds the calls; returns how many bytes the whole tensors have as float32."""
        counts: dict[tuple[str, str, Phase], int] = {}
        current: tuple[str, str, Phase] | None = None
        order: tuple[Any, ...] = ()
        sizes: list[tuple[int, int]] = []
        unclear: list[bool] = []
        for number, row in self._file.scan():
            found = self._parts(number, row)
            name = (*call_parts(found["head"]), phase_of(found))
            path = slot_of(found, role=Role.INPUT).path
            place = (_ORDER[found["role"]], *((isinstance(step, str), step) for step in path))
            # The lines of a call follow each other: stack, inputs, outputs. A step back is the next call of that name.
            if name != current or place <= order:
                current = name
                counts[name] = counts.get(name, -1) + 1
                self._calls.begin(CallId(name[0], name[1], counts[name], name[2]))
            order = place
            if found["role"] == STACK:
                at = len(self._calls.ids) - 1
                self._calls.stacks[at] = at
                self._frames.setdefault(at, []).append(number)
                continue
            self._calls.rows[-1].append(number)
            if len(row) > 2:
                length, numel = len(self._vector(number, row)), math.prod(shape_of(self._file, number, row[3]))
                sizes.append((length, numel))
                if length == numel == _SAMPLED + _STATISTICS:
                    unclear.append(_ends_in_statistics(row[1]))
        self._sampled = _is_sampled(sizes, unclear)
        return sum(4 * numel for length, numel in sizes if length == numel + self._statistics_in(length, numel))

    def _parts(self, number: int, row: list[Any]) -> re.Match[str]:
        found = _NAME.fullmatch(row[0])
        if found is None:
            self._file.refuse(
                number, f"has the name {row[0][:80]!r}; a name looks like 0_Functional_linear_forward_input.0"
            )
        if len(row) not in (2, 4) or (len(row) == 4 and not isinstance(row[2], str)):
            self._file.refuse(number, "is not a value; it needs a name, values, a type and a shape")
        if found["role"] == STACK and (len(row) != 2 or not isinstance(row[1], str)):
            self._file.refuse(number, "is not a line of a stack")
        return found

    def _vector(self, number: int, row: list[Any]) -> Array:
        numbers = row[1]
        if not isinstance(numbers, list) or not all(type(item) in (int, float) for item in numbers):
            self._file.refuse(number, "has values that are no list of numbers")
        try:
            return np.array(numbers, dtype=np.float64)
        except OverflowError:
            self._file.refuse(number, "has a value that is larger than any float")

    def _statistics_in(self, length: int, numel: int) -> int:
        """How many numbers at the end of a line are max, min and mean: none or all three."""
        sampled = length == min(numel, _SAMPLED) + _STATISTICS and (length != numel or self._sampled)
        return _STATISTICS if sampled else 0

    # --- rows into values ---------------------------------------------------------------------------------------

    def _value_of(self, number: int) -> Value:
        row = self._file.row(number)
        slot = _slot(self._parts(number, row))
        extra: dict[str, Any] = {"name": row[0]}
        if len(row) == 2:
            return Value(slot, type(row[1]).__name__, scalar=plain(row[1]), extra=extra)
        shape, vector = shape_of(self._file, number, row[3]), self._vector(number, row)
        numel = math.prod(shape)
        last = len(vector) - self._statistics_in(len(vector), numel)
        stats: Summary | None = None
        payload = None
        if last == numel:
            stored = _stored(row[2])
            if stored.name != row[2].removeprefix("torch."):
                extra["stored_dtype"] = f"torch.{stored.name}"
            stats, payload = _measured(vector[:last]), Payload(number, numel * stored.itemsize)
        elif last < len(vector):
            largest, smallest, mean = vector[last:].tolist()
            stats = ToldStats(numel, largest, smallest, mean, None)
        return Value(
            slot=slot,
            type="torch.Tensor",
            dtype=row[2],
            shape=shape,
            stats=stats,
            payload=payload,
            measure=number,
            extra=extra,
        )

    # --- payloads -----------------------------------------------------------------------------------------------

    def stored(self, value: Value) -> StoredBits:
        if value.payload is None or value.shape is None:
            raise DumpError(
                "this value was recorded without all of its elements; torch_npu.hooks stores them with sample=False"
            )
        number = value.payload.offset
        numbers = self._vector(number, self._file.row(number))[: math.prod(value.shape)]
        dtype = dtype_named(str(value.extra.get("stored_dtype", value.dtype)))
        with np.errstate(over="ignore"):
            single = numbers.astype("<f4")
            narrow = single if dtype.exact is None else single.astype(dtype.exact)
        exact = np.array_equal(narrow, numbers, equal_nan=True)
        raw = as_bfloat16(narrow.tobytes()) if dtype.exact is None else memoryview(narrow.tobytes())
        if raw is None or not exact:
            self._file.refuse(number, f"has values that are no {dtype.name}")
        return StoredBits(dtype, raw, value.shape)


_ORDER = {STACK: 0, "input": 1, "output": 2}


def _slot(found: re.Match[str]) -> Slot:
    """Backward, what is an output there went into the call: torch gave its hooks the gradients in that order."""
    role = Role(found["role"])
    if found["phase"] == Phase.BACKWARD.value:
        role = Role.OUTPUT if role is Role.INPUT else Role.INPUT
    return slot_of(found, role=role)


def _stored(dtype: str) -> DType:
    name = dtype.removeprefix("torch.")
    return DTYPES[name if name in _EXACT else "float32"]


def _is_sampled(sizes: list[tuple[int, int]], unclear: list[bool]) -> bool:
    """Whether lines end in max, min and mean. For a tensor of 13 elements both forms are as long: the others tell."""
    sampled = any(length == min(numel, _SAMPLED) + _STATISTICS and length != numel for length, numel in sizes)
    whole = any(length == numel != _SAMPLED + _STATISTICS for length, numel in sizes)
    return sampled if sampled != whole else bool(unclear) and all(unclear)


def _ends_in_statistics(numbers: list[Any]) -> bool:
    *values, largest, smallest, mean = numbers
    return all(smallest <= value <= largest for value in [*values, mean])


def _measured(numbers: Array) -> Stats:
    finite = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore"):
        total, norm = finite.sum(), np.linalg.norm(finite)
    return Stats(
        numel=numbers.size,
        finite_max=float(finite.max()) if finite.size else 0.0,
        finite_min=float(finite.min()) if finite.size else 0.0,
        finite_sum=float(total),
        finite_norm=float(norm),
        nan_count=int(np.isnan(numbers).sum()),
        posinf_count=int(np.isposinf(numbers).sum()),
        neginf_count=int(np.isneginf(numbers).sum()),
        zero_count=int((numbers == 0).sum()),
    )


def _frame(text: str) -> Frame:
    found = _FRAME.fullmatch(text)
    if found is None:
        return Frame(text, 0, "", "", False)
    file, line, function, code = found.groups()
    library = any(part in file for part in ("site-packages", "dist-packages", "/lib/python", "<frozen"))
    return Frame(file, int(line), function, (code or "").removesuffix("\\n").strip(), library)
