"""Reading a native dump: numpy over its tables, JSON for its strings. Nothing in a dump is ever executed."""

from __future__ import annotations

import json
import math
import mmap
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import dtype_named
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text
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
from ulpscope.native.schema import (
    CALL,
    CRC,
    FORMAT_VERSION,
    FRAME,
    FRAME_MAGIC,
    KIND_SIGNED,
    KIND_UNSIGNED,
    MEASURE,
    NONE32,
    NONE64,
    PENDING,
    PHASES,
    RAISED,
    RECOMPUTED,
    STATS,
    TABLES,
    TOLD,
    VALUE,
)
from ulpscope.store import run_folder
from ulpscope.store.dump import Unmasked
from ulpscope.store.mapped import StoredBits
from ulpscope.store.parts import parts_of, with_parts
from ulpscope.store.registry import Format
from ulpscope.store.ring import left_in

_NOTHING: NDArray[Any] = np.zeros(0, dtype=CALL.dtype)
# What is read of a row that is a tuple.
_ID = CALL.pick("kind", "name", "index", "again", "phase")
_REST = CALL.pick("seq", "parent", "origin", "first_value", "values", "stack", "note", "module", "thread", "flags")
_KIND = MEASURE.pick("kind")
_NUMBERS = MEASURE.pick("numel", "max_bits", "min_bits", "sum", "norm")
_COUNTS = MEASURE.pick("nan", "posinf", "neginf", "zero")
_CRC, _KNOWN, _PAYLOAD = MEASURE.pick("crc"), MEASURE.pick("known"), MEASURE.pick("payload_offset", "payload_nbytes")
_LOOKS = 3
_UNANSWERED = "not measured: the process ended before its device had answered"


class NativeDump:
    """The tables of one step of one rank. Open it with `open_dump`."""

    format = "native"

    def __init__(self, location: run_folder.DumpLocation) -> None:
        self.folder = location.folder
        self._manifest = _read_manifest(self.folder)
        # The writer fills them first to last; read last to first, what a row points to is there even while it writes.
        tables = [_read_file(self.folder / name) for name in reversed(run_folder.TABLES)][::-1]
        self.recovered = _replay_journal(self.folder, tables)
        self._read = [0] * len(tables)
        self._lines: list[bytes] = []
        self._rest = [bytearray() for _ in tables[1:]]
        self._call_rows, self._value_rows, self._measure_rows = _Tuples(), _Tuples(), _Tuples()
        self._parsed: dict[int, Any] = {}
        self._metas: dict[int, _Meta] = {}
        self._slots: dict[int, Slot] = {}
        self._order = np.zeros(0, dtype=np.int64)
        self._seqs = np.zeros(0, dtype=np.uint64)
        self._is_settled = True
        self._take(tables)

    def _take(self, tables: list[bytearray]) -> None:
        """Adds to the tables what was read of them."""
        self._read = [at + len(new) for at, new in zip(self._read, tables, strict=True)]
        self._lines += bytes(tables[0]).split(b"\n")
        cut = self._lines.pop()
        if cut:
            self._lines.append(cut)
        self._is_settled = not cut and not bool((_rows(tables[1], MEASURE.dtype)["kind"] & PENDING).any())
        for rows in (self._call_rows, self._value_rows, self._measure_rows):
            rows.table = _NOTHING
        self._measures = self._values = self._calls = _NOTHING  # what is looked at cannot grow
        self._rest = [_joined(old, new) for old, new in zip(self._rest, tables[1:], strict=True)]
        measures, self._sketches, values, calls = self._rest
        self._measures = self._measure_rows.table = _rows(measures, MEASURE.dtype)
        self._values = self._value_rows.table = _rows(values, VALUE.dtype)
        self._calls = self._call_rows.table = _rows(calls, CALL.dtype)
        first = len(self._order)
        self._order = np.concatenate([self._order, first + np.argsort(self._calls["seq"][first:], kind="stable")])
        self._seqs = self._calls["seq"][self._order]
        # Of an open dump nobody else has counted them.
        self.manifest = replace(self._manifest, counts={**self._manifest.counts, "values": len(self._values)})

    def follow(self) -> bool:
        """Reads what was added since, in the time that takes. Both times the writer must have flushed the dump. False where it
        is not only added: a call has ended that had begun before others, or a number was still to come; open it anew then."""
        manifest = _read_manifest(self.folder)
        names = zip(run_folder.TABLES, self._read, strict=True)
        tables = [_read_file(self.folder / name, at) for name, at in reversed(list(names))][::-1]
        begun = _rows(tables[-1], CALL.dtype)["seq"]
        if not self._is_settled or (len(self._seqs) and len(begun) and begun.min() < self._seqs[-1]):
            return False
        self._manifest = manifest
        self._take(tables)
        for name in ("_payload_file", "_payload_tail"):
            self.__dict__.pop(name, None)
        return True

    @property
    def ending(self) -> str:
        """How the dump ends: "complete", or why not."""
        if self.manifest.state == "complete":
            told, count = self.manifest.counts.get("calls", 0), len(self._calls)
            cut = isinstance(told, int) and count < told
            return f"{run_folder.CALLS} holds {count} of {told} calls: the file is cut" if cut else "complete"
        if self.manifest.state == "open":
            finished = call_text(self._id(self._call_rows[len(self._calls) - 1])) if len(self._calls) else ""
            last = f"; the last finished call is {finished}" if finished else ""
            return f"the process ended, or is still running, before the step was closed{last}"
        return self.manifest.notes[-1] if self.manifest.notes else self.manifest.state

    @property
    def missing(self) -> set[str]:
        """The files with elements that should be there and are missing or cut, of the values that were read so far."""
        told = (extra for *_, extra in self._metas.values() if "missing" in extra and "overwritten" not in extra)
        found = {str(extra["missing"]) for extra in told}
        size = self.manifest.counts.get("payload_bytes", 0)
        path = self.folder / run_folder.PAYLOAD
        stored = path.stat().st_size if _is_plain(path) else 0
        if self.manifest.state == "complete" and isinstance(size, int) and stored < size:
            found.add(run_folder.PAYLOAD)
        return found

    def ids(self) -> Sequence[CallId]:
        return _Ids(self._order, self._call_rows, self._id)

    def modules(self) -> list[str]:
        return [self._module(number) for number in self._calls["module"][self._order].tolist()]

    def threads(self) -> list[int]:
        numbers: list[int] = self._calls["thread"][self._order].tolist()
        return numbers

    def position(self, seq: int) -> int | None:
        """Where the call with this execution number is in execution order; None where it was not recorded."""
        at = int(np.searchsorted(self._seqs, np.uint64(seq))) if 0 <= seq < NONE64 else len(self._seqs)
        return at if at < len(self._seqs) and self._seqs[at] == seq else None

    def parent(self, call: CallRecord) -> CallId | None:
        above = None if call.parent is None else self.position(call.parent)
        if above is None:
            return None
        found = self._id(self._call_rows[int(self._order[above])])
        return found if call.origin is None else CallId(found.kind, found.name, found.index, call.id.phase)

    def spelled(self, call: CallRecord) -> str:
        return call_text(call.id)

    def stack(self, call: CallRecord) -> list[Frame]:
        frames: list[Frame] = []
        number = call.stack
        while number is not None and len(frames) < 10_000:
            entry = self._string(number)
            try:
                frames += [Frame(*row) for row in entry["frames"]]
                parent = entry["parent"]
            except (TypeError, KeyError) as error:
                raise DumpError(f"{self.folder / run_folder.STRINGS}: entry {number} is not a stack") from error
            if parent is not None and parent >= number:
                raise DumpError(f"{self.folder / run_folder.STRINGS}: stack {number} points forward")
            number = parent
        return frames

    def sketch(self, value: Value) -> NDArray[np.float32] | None:
        if value.measure is None:
            return None
        row = self._measures[value.measure]
        return self._floats(int(row["sketch_offset"]), int(row["sketch_len"]))

    def _floats(self, start: int, count: int) -> NDArray[np.float32] | None:
        if not count:
            return None
        if start + 4 * count > len(self._sketches):
            raise DumpError(
                f"{self.folder / run_folder.SKETCHES} ends before byte {start + 4 * count}: the file is cut"
            )
        return np.frombuffer(memoryview(self._sketches).toreadonly(), dtype="<f4", count=count, offset=start)

    def _follows(self, value: Value) -> tuple[int, int, bool, int]:
        """What follows the sketch of a measured value: from which byte on, the sketch's length, whether there are statistics of what
        is unmasked, and how many rows."""
        row = self._measures[value.measure]
        follows = 0 if row["kind"] & TOLD else int(row["known"])
        length = int(row["sketch_len"])
        return int(row["sketch_offset"]) + 4 * length, length, bool(follows & 1), follows >> 1

    def unmasked(self, value: Value) -> Unmasked | None:
        stats = value.stats
        if value.measure is None or not isinstance(stats, Stats):
            return None
        start, length, is_there, _ = self._follows(value)
        limit = measuring.mask_limit(value.extra.get("stored_dtype", value.dtype))
        if not is_there:
            reaches = max(stats.finite_max, -stats.finite_min) >= limit
            return None if reaches else Unmasked(stats, self.sketch(value))
        found = self._floats(start, measuring.UNMASKED.itemsize // 4)
        assert found is not None
        numel, zero, high, low, total, norm = found.view(measuring.UNMASKED)[0].tolist()
        return Unmasked(
            Stats(numel, high, low, total, norm, zero_count=zero),
            self._floats(start + measuring.UNMASKED.itemsize, length),
        )

    def rows(self, value: Value) -> NDArray[np.float32] | None:
        if value.measure is None:
            return None
        start, length, is_there, count = self._follows(value)
        start += (measuring.UNMASKED.itemsize + 4 * length) * is_there
        found = self._floats(start, 2 * count)
        return None if found is None else found.reshape(count, 2)

    # --- rows into records --------------------------------------------------------------------------------------

    def _id(self, row: tuple[Any, ...]) -> CallId:
        kind, name, index, again, phase = _ID(row)
        if phase >= len(PHASES):
            raise DumpError(f"{self.folder / run_folder.CALLS}: phase {phase} is unknown; the file is damaged")
        return CallId(str(self._string(kind)), str(self._string(name)), index, PHASES[phase], again)

    def _module(self, number: int) -> str:
        return "" if number == NONE32 else str(self._string(number))

    def record(self, position: int) -> CallRecord:
        number = int(self._order[position])
        row = self._call_rows[number]
        seq, parent, origin, first, count, stack, note, module, thread, flags = _REST(row)
        if first + count > len(self._values):
            raise DumpError(f"{self.folder / run_folder.VALUES}: values of call {number} are missing; the file is cut")
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
            if number is not None and stats is None and _KIND(self._measure_rows[number]) & PENDING:
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
            raise DumpError(f"{self.folder / run_folder.VALUES}: a value is damaged ({error})") from error

    def _measured(self, number: int) -> tuple[Summary | None, int | None, Payload | None]:
        if number >= len(self._measures):
            raise DumpError(f"{self.folder / run_folder.MEASURES}: measure {number} is missing; the file is cut")
        row = self._measure_rows[number]
        kind = _KIND(row)
        numel, high, low, total, norm = _NUMBERS(row)
        stats: Summary | None = None
        if kind & TOLD:
            numbers, known = (_extreme(high, kind), _extreme(low, kind), total, norm), _KNOWN(row)
            stats = ToldStats(numel, *(item if known >> bit & 1 else None for bit, item in enumerate(numbers)))
        elif kind & STATS:
            stats = Stats(numel, _extreme(high, kind), _extreme(low, kind), total, norm, *_COUNTS(row))
        payload = Payload(*_PAYLOAD(row))
        return stats, _CRC(row) if kind & CRC else None, None if payload.offset == NONE64 else payload

    def _string(self, number: int) -> Any:
        found = self._parsed.get(number, self)
        if found is self:
            try:
                found = self._parsed[number] = json.loads(self._lines[number])
            except (IndexError, ValueError, RecursionError) as error:
                raise DumpError(f"{self.folder / run_folder.STRINGS}: entry {number} is missing or damaged") from error
        return found

    # --- payloads -----------------------------------------------------------------------------------------------

    def stored(self, value: Value) -> StoredBits:
        if value.payload is None or value.dtype is None or value.shape is None:
            raise DumpError("this value was recorded without its elements; capture with tensors=True (--tensors)")
        dtype = dtype_named(str(value.extra.get("stored_dtype", value.dtype)))
        shape = tuple(value.extra.get("stored_shape", value.shape))
        start, nbytes = value.payload.offset, value.payload.nbytes
        if any(size < 0 for size in shape) or nbytes != dtype.itemsize * math.prod(shape):
            raise DumpError(
                f"{self.folder / run_folder.PAYLOAD}: {nbytes} bytes do not make a {dtype.name} of shape {shape}"
            )
        return StoredBits(dtype, self._payload_bytes(start, nbytes), shape)

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
        raise DumpError(f"{self.folder / run_folder.PAYLOAD} ends before byte {end}: the file is cut")

    @cached_property
    def _payload_file(self) -> memoryview:
        path = self.folder / run_folder.PAYLOAD
        if not _is_plain(path) or not path.stat().st_size:
            return memoryview(b"")
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @cached_property
    def _payload_tail(self) -> tuple[int, bytes]:
        path = self.folder / run_folder.PAYLOAD_JOURNAL
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


class _Ids(Sequence[CallId]):
    """The names of calls, each made when it is asked for."""

    def __init__(self, order: NDArray[Any], rows: _Tuples, name: Callable[[tuple[Any, ...]], CallId]) -> None:
        self._order, self._rows, self._name = order, rows, name

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: Any) -> Any:
        return self._name(self._rows[int(self._order[position])])

    def __iter__(self) -> Iterator[CallId]:
        return (self._name(self._rows[row]) for row in self._order.tolist())


def _joined(old: bytearray, new: bytearray) -> bytearray:
    if not old:
        return new
    try:
        old += new
    except BufferError:  # somebody holds what was read of it
        old = old + new
    return old


def _extreme(bits: int, kind: int) -> float | int:
    if kind & KIND_UNSIGNED:
        return bits
    raw = bits.to_bytes(8, "little")
    return int.from_bytes(raw, "little", signed=True) if kind & KIND_SIGNED else float(struct.unpack("<d", raw)[0])


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
    path = folder / run_folder.MANIFEST
    try:
        _is_plain(path)
        raw = json.loads(path.read_text(encoding="utf-8"))
        found = Manifest(**{key: raw[key] for key in Manifest.__dataclass_fields__ if key in raw})
    except FileNotFoundError:
        raise DumpError(f"{folder} is not a dump: it has no {run_folder.MANIFEST}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DumpError(f"{path} cannot be read: {error}") from error
    if not isinstance(found.config, dict):
        raise DumpError(f"{path} cannot be read: its config is {found.config!r:.40}, not an object")
    if not isinstance(found.stretches, dict) or not all(isinstance(count, int) for count in found.stretches.values()):
        raise DumpError(f"{path} cannot be read: its stretches are {found.stretches!r:.40}, not counts")
    if not isinstance(found.format, int) or found.format > FORMAT_VERSION:
        raise DumpError(
            f"{path} has format {found.format}, this ulpscope reads up to {FORMAT_VERSION}; upgrade ulpscope to read it"
        )
    return found


def _replay_journal(folder: Path, tables: list[bytearray]) -> int:
    """Puts what a killed process left in its journal into the tables; returns how many frames that were."""
    path = folder / run_folder.JOURNAL
    if not _is_plain(path):
        return 0
    _, data = left_in(path)
    at = frames = 0
    while len(data) - at >= FRAME.size:
        magic, length, *rest, _ = FRAME.struct.unpack_from(data, at)
        places, sizes = rest[: len(TABLES)], rest[len(TABLES) :]
        cut, end = at + FRAME.size, at + FRAME.size + length
        if magic != FRAME_MAGIC or end > len(data) or sum(sizes) != length:
            break
        for table, start, size in zip(tables, places, sizes, strict=True):
            if start > len(table):
                return frames
            table[start : start + size] = data[cut : cut + size]
            cut += size
        frames += 1
        at = end
    return frames


FORMAT = Format(NativeDump.format, run_folder.find_own, NativeDump)
