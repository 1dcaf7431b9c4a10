"""Reading a native dump: numpy over its tables, JSON for its strings. Nothing in a dump is ever executed."""

from __future__ import annotations

import json
import math
import mmap
import stat
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import Array, DType, bits_from, dtype_named, values_from
from ulpscope.model.errors import DumpError, did_you_mean
from ulpscope.model.names import call_text, parse_call
from ulpscope.model.records import (
    CallId,
    CallRecord,
    Frame,
    Manifest,
    Payload,
    Role,
    Slot,
    Stats,
    Summary,
    ToldStats,
    Value,
)
from ulpscope.native import measuring
from ulpscope.store import layout
from ulpscope.store.mapped import StoredBits
from ulpscope.store.parts import parts_of, with_parts
from ulpscope.store.ring import left_in
from ulpscope.store.tables import (
    CALL,
    FRAME,
    FRAME_MAGIC,
    NONE32,
    NONE64,
    PENDING,
    PHASES,
    RAISED,
    RECOMPUTED,
    TOLD,
    VALUE,
)

_NOTHING: NDArray[Any] = np.zeros(0, dtype=CALL)
_STATS, _CRC, _SKETCH, _SIGNED, _UNSIGNED = 1, 2, 4, 8, 16
_LOOKS = 3
_UNANSWERED = "not measured: the process ended before its device had answered"


class Dump:
    """One step of one rank, as it lies on disk. Open it with `open_dump`."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        # The writer fills them first to last; read last to first, what a row points to is there even while it writes.
        tables = [_read_file(self.folder / name) for name in reversed(layout.TABLES)][::-1]
        self.recovered = _replay_journal(self.folder, tables)
        self._read = [0] * len(tables)
        self._lines: list[bytes] = []
        self._rest = [bytearray() for _ in tables[1:]]
        self._call_rows, self._value_rows, self._measure_rows = _Tuples(), _Tuples(), _Tuples()
        self._parsed: dict[int, Any] = {}
        self._metas: dict[int, _Meta] = {}
        self._slots: dict[int, Slot] = {}
        self._order = np.zeros(0, dtype=np.int64)
        self._is_settled = True
        self._take(tables)

    def _take(self, tables: list[bytearray]) -> None:
        """Adds to the tables what was read of them."""
        self._read = [at + len(new) for at, new in zip(self._read, tables, strict=True)]
        self._lines += bytes(tables[0]).split(b"\n")
        cut = self._lines.pop()
        if cut:
            self._lines.append(cut)
        self._is_settled = not cut and not bool((_rows(tables[1], measuring.ROW)["kind"] & PENDING).any())
        for rows in (self._call_rows, self._value_rows, self._measure_rows):
            rows.table = _NOTHING
        self._measures = self._values = self._calls = _NOTHING  # what is looked at cannot grow
        self._rest = [_joined(old, new) for old, new in zip(self._rest, tables[1:], strict=True)]
        measures, self._sketches, values, calls = self._rest
        self._measures = self._measure_rows.table = _rows(measures, measuring.ROW)
        self._values = self._value_rows.table = _rows(values, VALUE)
        self._calls = self._call_rows.table = _rows(calls, CALL)
        first = len(self._order)
        self._order = np.concatenate([self._order, first + np.argsort(self._calls["seq"][first:], kind="stable")])

    def follow(self) -> bool:
        """Reads what was added since, in the time that takes. Both times the writer must have flushed the dump. False where it
        is not only added: a call has ended that had begun before others, or a number was still to come; open it anew then."""
        manifest = _read_manifest(self.folder)
        names = zip(layout.TABLES, self._read, strict=True)
        tables = [_read_file(self.folder / name, at) for name, at in reversed(list(names))][::-1]
        begun = _rows(tables[-1], CALL)["seq"]
        first = len(self)
        if not self._is_settled or (first and len(begun) and begun.min() < self._calls["seq"][self._order[-1]]):
            return False
        self.manifest = manifest
        self._take(tables)
        if "_by_seq" in self.__dict__:
            self._by_seq.update((seq, row) for row, seq in enumerate(self._calls["seq"][first:].tolist(), first))
        for name in ("_by_id", "_payload_file", "_payload_tail"):
            self.__dict__.pop(name, None)
        return True

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        return f"Dump({str(self.folder)!r}, {len(self)} calls, {self.ending})"

    @property
    def ending(self) -> str:
        """How the dump ends: "complete", or why not."""
        if self.manifest.state == "complete":
            told = self.manifest.counts.get("calls", 0)
            cut = isinstance(told, int) and len(self) < told
            return f"{layout.CALLS} holds {len(self)} of {told} calls: the file is cut" if cut else "complete"
        if self.manifest.state == "open":
            last = (
                f"; the last finished call is {call_text(self._id(self._call_rows[len(self) - 1]))}"
                if len(self)
                else ""
            )
            return f"the process ended, or is still running, before the step was closed{last}"
        return self.manifest.notes[-1] if self.manifest.notes else self.manifest.state

    @property
    def missing(self) -> set[str]:
        """The files with elements that should be there and are missing or cut, of the values that were read so far."""
        told = (extra for *_, extra in self._metas.values() if "missing" in extra and "overwritten" not in extra)
        found = {str(extra["missing"]) for extra in told}
        size = self.manifest.counts.get("payload_bytes", 0)
        if self.manifest.state == "complete" and isinstance(size, int) and len(self._payload_file) < size:
            found.add(layout.PAYLOAD)
        return found

    def calls(self) -> Iterator[CallRecord]:
        """Every call in execution order."""
        for row in self._order:
            yield self._record(int(row))

    def ids(self) -> list[CallId]:
        """The names of all calls in execution order."""
        return [self._id(self._call_rows[row]) for row in self._order.tolist()]

    def modules(self) -> list[str]:
        """For each call in execution order the module it ran in; empty where that is not known."""
        return [self._module(number) for number in self._calls["module"][self._order].tolist()]

    def threads(self) -> list[int]:
        """For each call in execution order the number of the thread, or of a pool's task, that made it."""
        numbers: list[int] = self._calls["thread"][self._order].tolist()
        return numbers

    def nth(self, place: int) -> CallRecord:
        """The call at a place in execution order."""
        return self._record(int(self._order[place]))

    @property
    def value_count(self) -> int:
        """How many values all calls have together."""
        return len(self._values)

    def call(self, which: CallId | str) -> CallRecord:
        """One call by its name. Raises DumpError naming the nearest one when there is no such call."""
        name = which if isinstance(which, CallId) else _parsed_name(which)
        row = self._by_id.get(name)
        if row is None:
            raise DumpError(
                f"{self.folder} has no call {call_text(name)}.{did_you_mean(call_text(name), map(call_text, self._by_id))}"
            )
        return self._record(row)

    def by_seq(self, seq: int) -> CallRecord | None:
        """The call with this execution number, if it was recorded."""
        row = self._by_seq.get(seq)
        return None if row is None else self._record(row)

    def parent(self, call: CallRecord) -> CallId | None:
        """Who called it: for a backward call, the backward of the forward call's parent."""
        above = None if call.parent is None else self._by_seq.get(call.parent)
        if above is None:
            return None
        found = self._id(self._call_rows[above])
        return found if call.origin is None else CallId(found.kind, found.name, found.index, call.id.phase)

    def name_of(self, call: CallRecord) -> str:
        """The name of a call as its files spell it."""
        return call_text(call.id)

    def stack(self, call: CallRecord) -> list[Frame]:
        """The Python stack of a call, innermost frame first."""
        frames: list[Frame] = []
        number = call.stack
        while number is not None and len(frames) < 10_000:
            entry = self._string(number)
            try:
                frames += [Frame(*row) for row in entry["frames"]]
                parent = entry["parent"]
            except (TypeError, KeyError) as error:
                raise DumpError(f"{self.folder / layout.STRINGS}: entry {number} is not a stack") from error
            if parent is not None and parent >= number:
                raise DumpError(f"{self.folder / layout.STRINGS}: stack {number} points forward")
            number = parent
        return frames

    def load(self, value: Value) -> Array:
        """The elements of a recorded tensor; bfloat16 and float8 come exactly as float32."""
        dtype, raw, shape = self.raw(value)
        return values_from(raw, dtype, shape)

    def load_bits(self, value: Value) -> Array:
        """The exact bits of a recorded tensor."""
        dtype, raw, shape = self.raw(value)
        return bits_from(raw, dtype, shape)

    def sketch(self, value: Value) -> NDArray[np.float32] | None:
        """The sketch of a recorded tensor, for `measuring.sketch_relative_l2`; None when there is none. DumpError if it is gone."""
        if value.measure is None:
            return None
        row = self._measures[value.measure]
        start, size = int(row["sketch_offset"]), int(row["sketch_len"]) * 4
        if not size:
            return None
        if start + size > len(self._sketches):
            raise DumpError(f"{self.folder / layout.SKETCHES} ends before byte {start + size}: the file is cut")
        return np.frombuffer(memoryview(self._sketches).toreadonly(), dtype="<f4", count=size // 4, offset=start)

    def sample(self, value: Value) -> Array | None:
        """The numbers that stand for a tensor where its format keeps some elements of it; None in all others."""
        return None

    # --- rows into records --------------------------------------------------------------------------------------

    @cached_property
    def _by_id(self) -> dict[CallId, int]:
        return {self._id(self._call_rows[row]): row for row in reversed(self._order.tolist())}

    @cached_property
    def _by_seq(self) -> dict[int, int]:
        return {seq: row for row, seq in enumerate(self._calls["seq"].tolist())}

    def _id(self, row: tuple[Any, ...]) -> CallId:
        kind, name, index, again, phase = row[4], row[5], row[6], row[7], row[13]
        if phase >= len(PHASES):
            raise DumpError(f"{self.folder / layout.CALLS}: phase {phase} is unknown; the file is damaged")
        return CallId(str(self._string(kind)), str(self._string(name)), index, PHASES[phase], again)

    def _module(self, number: int) -> str:
        return "" if number == NONE32 else str(self._string(number))

    def _record(self, number: int) -> CallRecord:
        row = self._call_rows[number]
        seq, parent, origin, first, _, _, _, _, count, stack, note, module, thread, _, flags, _ = row
        if first + count > len(self._values):
            raise DumpError(f"{self.folder / layout.VALUES}: values of call {number} are missing; the file is cut")
        return CallRecord(
            id=self._id(row),
            seq=seq,
            parent=None if parent == NONE64 else parent,
            origin=None if origin == NONE64 else origin,
            module=self._module(module),
            values=tuple([self._value(self._value_rows[at]) for at in range(first, first + count)]),
            stack=None if stack == NONE32 else stack,
            thread=thread,
            recomputed=bool(flags & RECOMPUTED),
            error=str(self._string(note)) if flags & RAISED and note != NONE32 else None,
        )

    def _value(self, row: tuple[int, ...]) -> Value:
        slot, meta, measure, note = row
        try:
            place = self._slots.get(slot)
            if place is None:
                role, *path = self._string(slot)
                place = self._slots[slot] = Slot(Role(role), tuple(path))
            about = self._metas.get(meta)
            if about is None:
                about = self._metas[meta] = _meta(self._string(meta))
            type_, dtype, shape, stride, device, gradient, extra = about
            stats, checksum, payload = (None, None, None) if measure == NONE32 else self._measured(measure)
            if note == NONE32:
                scalar = error = None
                extra = extra.copy()
            else:
                text = self._string(note)
                scalar, error, extra = text.get("value"), text.get("error"), extra | text.get("extra", {})
            parts: tuple[tuple[str, Value], ...] = ()
            if extra:
                if note != NONE32 and "parts" in text:
                    parts = parts_of(text["parts"], place, self._measured)
                checksum = with_parts(checksum, parts, extra)
            number = None if measure == NONE32 else measure
            if number is not None and stats is None and self._measure_rows[number][10] & PENDING:
                number, error = None, _UNANSWERED
            return Value(
                place,
                type_,
                dtype,
                shape,
                stride,
                device,
                gradient,
                stats,
                checksum,
                scalar,
                payload,
                number,
                error,
                extra,
                parts,
            )
        except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise DumpError(f"{self.folder / layout.VALUES}: a value is damaged ({error})") from error

    def _measured(self, number: int) -> tuple[Summary | None, int | None, Payload | None]:
        if number >= len(self._measures):
            raise DumpError(f"{self.folder / layout.MEASURES}: measure {number} is missing; the file is cut")
        row = self._measure_rows[number]
        high, low, total, norm, numel, nan, posinf, neginf, zero, crc, kind, offset, nbytes = row[:13]
        stats: Summary | None = None
        if kind & TOLD:
            stats = _told(row)
        elif kind & _STATS:
            largest, smallest = _extreme(high, kind), _extreme(low, kind)
            stats = Stats(numel, largest, smallest, total, norm, nan, posinf, neginf, zero)
        payload = None if offset == NONE64 else Payload(offset, nbytes)
        return stats, crc if kind & _CRC else None, payload

    def _string(self, number: int) -> Any:
        found = self._parsed.get(number, self)
        if found is self:
            try:
                found = self._parsed[number] = json.loads(self._lines[number])
            except (IndexError, ValueError, RecursionError) as error:
                raise DumpError(f"{self.folder / layout.STRINGS}: entry {number} is missing or damaged") from error
        return found

    # --- payloads -----------------------------------------------------------------------------------------------

    def raw(self, value: Value) -> tuple[DType, memoryview, tuple[int, ...]]:
        """The element type, the row-major bits as they lie in the file, and the shape of a recorded tensor."""
        if value.payload is None or value.dtype is None or value.shape is None:
            raise DumpError("this value was recorded without its elements; capture with tensors=True (--tensors)")
        dtype = dtype_named(str(value.extra.get("stored_dtype", value.dtype)))
        shape = tuple(value.extra.get("stored_shape", value.shape))
        start, nbytes = value.payload.offset, value.payload.nbytes
        if any(size < 0 for size in shape) or nbytes != dtype.itemsize * math.prod(shape):
            raise DumpError(
                f"{self.folder / layout.PAYLOAD}: {nbytes} bytes do not make a {dtype.name} of shape {shape}"
            )
        data = self._payload_bytes(start, nbytes)
        return dtype, data, shape

    def stored(self, value: Value) -> StoredBits:
        """As `raw`; where a file has a checksum of the bits, finding it may be left to the one who reads them."""
        return StoredBits(*self.raw(value))

    def _payload_bytes(self, start: int, nbytes: int) -> memoryview:
        end = start + nbytes
        for _ in range(_LOOKS):
            stored = self._payload_file
            if end <= len(stored):
                return stored[start:end]
            base, tail = self._payload_tail
            if base <= len(stored) and end <= base + len(tail):
                head = bytes(stored[start : min(end, base)])
                return memoryview(head + tail[max(0, start - base) : end - base])
            # While the process is writing, bytes may have gone from the ring to the file between the two looks.
            self.__dict__.pop("_payload_file", None)
            self.__dict__.pop("_payload_tail", None)
        raise DumpError(f"{self.folder / layout.PAYLOAD} ends before byte {end}: the file is cut")

    @cached_property
    def _payload_file(self) -> memoryview:
        path = self.folder / layout.PAYLOAD
        if not _is_plain(path) or not path.stat().st_size:
            return memoryview(b"")
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @cached_property
    def _payload_tail(self) -> tuple[int, bytes]:
        path = self.folder / layout.PAYLOAD_JOURNAL
        return left_in(path) if _is_plain(path) else (0, b"")


_Meta = tuple[str, str | None, tuple[int, ...] | None, tuple[int, ...] | None, str | None, bool | None, dict[str, Any]]


def _meta(raw: dict[str, Any]) -> _Meta:
    extra = dict(raw)
    shape, stride = extra.pop("shape", None), extra.pop("stride", None)
    return (
        extra.pop("type"),
        extra.pop("dtype", None),
        None if shape is None else tuple(shape),
        None if stride is None else tuple(stride),
        extra.pop("device", None),
        extra.pop("requires_grad", None),
        extra,
    )


class _Tuples:
    """The rows of a table as plain tuples, made a block at a time: numpy's own scalars are slow to touch."""

    _BLOCK = 4096

    def __init__(self) -> None:
        self.table: NDArray[Any] = _NOTHING  # which may grow
        self._blocks: dict[int, list[tuple[Any, ...]]] = {}

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        block, at = divmod(number, self._BLOCK)
        rows = self._blocks.get(block)
        if rows is None:
            if len(self._blocks) >= 4:
                del self._blocks[next(iter(self._blocks))]
            rows = self._blocks[block] = []
        if at >= len(rows):
            rows += self.table[block * self._BLOCK + len(rows) : (block + 1) * self._BLOCK].tolist()
        return rows[at]


def _joined(old: bytearray, new: bytearray) -> bytearray:
    if not old:
        return new
    try:
        old += new
    except BufferError:  # somebody holds what was read of it
        old = old + new
    return old


def open_dump(path: str | Path, *, step: int | None = None, rank: int | None = None) -> Dump:
    """The dump at a path: a rank folder, a file in it, a step or a whole run (then the first step and rank, or the asked)."""
    places = [
        place for place in layout.find_dumps(Path(path)) if step in (None, place.step) and rank in (None, place.rank)
    ]
    if not places:
        asked = "".join(f", {word} {number}" for word, number in (("step", step), ("rank", rank)) if number is not None)
        raise DumpError(f"{path} holds no dump{asked}; a dump is a folder step0/rank0 with a {layout.MANIFEST}")
    return _opened(places[0].folder)


def open_run(path: str | Path) -> list[Dump]:
    """Every dump of a run, by step and rank."""
    return [_opened(place.folder) for place in layout.find_dumps(Path(path))]


def _opened(folder: Path) -> Dump:
    # Imported here because the other formats are read into subclasses of Dump.
    from ulpscope.store.formats.hooks_reader import HooksDump
    from ulpscope.store.formats.msprobe_reader import MsprobeDump
    from ulpscope.store.formats.pkl_lines import is_ptdbg
    from ulpscope.store.formats.ptdbg_reader import PtdbgDump

    if layout.is_lines(folder):
        return PtdbgDump(folder) if is_ptdbg(folder) else HooksDump(folder)
    return MsprobeDump(folder) if folder.is_file() or layout.is_msprobe(folder) else Dump(folder)


def _parsed_name(text: str) -> CallId:
    try:
        return parse_call(text)
    except ValueError as error:
        raise DumpError(str(error)) from None


def _extreme(bits: int, kind: int) -> float | int:
    if kind & _UNSIGNED:
        return bits
    raw = bits.to_bytes(8, "little")
    return int.from_bytes(raw, "little", signed=True) if kind & _SIGNED else float(struct.unpack("<d", raw)[0])


def _told(row: tuple[Any, ...]) -> ToldStats:
    """Four numbers of another tool: the row holds them as they were, `sum` the mean, `reserved` which are known."""
    high, low, mean, norm, numel, kind, known = *row[:5], row[10], row[15]
    numbers = (_extreme(high, kind), _extreme(low, kind), mean, norm)
    return ToldStats(numel, *(item if known >> bit & 1 else None for bit, item in enumerate(numbers)))


def _rows(data: bytearray, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)


def _is_plain(path: Path) -> bool:
    """Whether there is a file, and it is one to read: no link that leads elsewhere, no pipe that never ends."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISREG(mode):
        return True
    what = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
    raise DumpError(f"{path} is {what}; a dump holds plain files only")


def _read_file(path: Path, at: int = 0) -> bytearray:
    try:
        if not _is_plain(path):
            return bytearray()
        with path.open("rb") as file:
            file.seek(at)
            return bytearray(file.read())
    except FileNotFoundError:
        return bytearray()
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error


def _read_manifest(folder: Path) -> Manifest:
    path = folder / layout.MANIFEST
    try:
        _is_plain(path)
        raw = json.loads(path.read_text(encoding="utf-8"))
        found = Manifest(**{key: raw[key] for key in Manifest.__dataclass_fields__ if key in raw})
    except FileNotFoundError:
        raise DumpError(f"{folder} is not a dump: it has no {layout.MANIFEST}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DumpError(f"{path} cannot be read: {error}") from error
    if not isinstance(found.config, dict):
        raise DumpError(f"{path} cannot be read: its config is {found.config!r:.40}, not an object")
    if not isinstance(found.stretches, dict) or not all(isinstance(count, int) for count in found.stretches.values()):
        raise DumpError(f"{path} cannot be read: its stretches are {found.stretches!r:.40}, not counts")
    if not isinstance(found.format, int) or found.format > layout.FORMAT_VERSION:
        raise DumpError(
            f"{path} has format {found.format}, this ulpscope reads up to {layout.FORMAT_VERSION}; upgrade ulpscope to read it"
        )
    return found


def _replay_journal(folder: Path, tables: list[bytearray]) -> int:
    """Puts what a killed process left in its journal into the tables; returns how many frames that were."""
    path = folder / layout.JOURNAL
    if not _is_plain(path):
        return 0
    _, data = left_in(path)
    at = frames = 0
    while len(data) - at >= FRAME.size:
        magic, length, *rest = FRAME.unpack_from(data, at)
        cut, end = at + FRAME.size, at + FRAME.size + length
        if magic != FRAME_MAGIC or end > len(data) or sum(rest[5:]) != length:
            break
        for table, start, size in zip(tables, rest[:5], rest[5:], strict=True):
            if start > len(table):
                return frames
            table[start : start + size] = data[cut : cut + size]
            cut += size
        frames += 1
        at = end
    return frames
