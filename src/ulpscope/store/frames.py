"""Frames of the journal: what has come since the last one, with the place of each part in its table.

`Frames` and `file_frames` come from the C extension where it could be built; `PlainFrames` and `plain_file_frames` do the same in
Python. The caller sees to it that one thread at a time is inside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.native import taps
from ulpscope.native.schema import CALL, FRAME, FRAME_MAGIC, MEASURE, RING, RING_DATA, TABLES, VALUE

_FIRST = CALL.offset("first_value")
_HEAD, _TAKEN = (slice(RING.offset(name), RING.offset(name) + 8) for name in ("head", "taken"))


class PlainFrames:
    """`put` takes a frame that does not fit into the ring right now and says whether it did; `wake` is called for each
    sixteenth of the ring that is filled."""

    def __init__(self, put: Callable[[bytes], bool], wake: Callable[[], None]) -> None:
        self.failed = False
        self._put = put
        self._wake = wake
        self.attach(None)

    def attach(self, view: memoryview | None) -> None:
        """Begins with the memory of a ring; None lets go of it."""
        self._view = view
        self._sizes = [0] * len(TABLES)
        self._strings: list[bytes] = []
        self._measures: list[bytes] = []
        self._sketches: list[bytes] = []
        self._string_count = 0
        self.measures = 0
        self.sketch_size = 0
        self.calls = 0
        self._woken = 0

    @property
    def pending(self) -> int:
        return len(self._measures)

    @property
    def pending_strings(self) -> int:
        return len(self._strings)

    def add_string(self, json_text: str) -> int:
        """Stores one JSON text and returns its number. The caller interns: the same text twice is two entries."""
        self._strings.append(json_text.encode("utf-8", "backslashreplace") + b"\n")
        self._string_count += 1
        return self._string_count - 1

    def add_measured(self, row: bytes) -> int:
        """Stores a row and the sketch behind it; returns its number."""
        if len(row) > MEASURE.size:
            self._sketches.append(row[MEASURE.size :])
            self.sketch_size += len(row) - MEASURE.size
            row = row[: MEASURE.size]
        self._measures.append(row)
        self.measures += 1
        return self.measures - 1

    def commit(self, row: bytes, values: bytes) -> None:
        """Puts a frame of what has come since the last one and of a call, if there is one; its first value is filled in."""
        if row:
            first = self._sizes[3] // VALUE.size
            row = row[:_FIRST] + first.to_bytes(8, "little") + row[_FIRST + 8 :]
        parts = (_taken(self._strings), _taken(self._measures), _taken(self._sketches), values, row)
        if self._place(self._sizes, parts):
            self._sizes = [size + len(part) for size, part in zip(self._sizes, parts, strict=True)]
            self.calls += bool(row)

    def patch(self, numbers: NDArray[np.uint32], rows: NDArray[np.void], sketches: bytes | memoryview) -> None:
        """Puts rows of measures that are there already, by their numbers, and their sketches, which follow the last ones; places of
        sketches are counted from the first of them."""
        if self._view is None or self.failed or not len(numbers):
            return
        rows["sketch_offset"] += np.uint64(self.sketch_size)
        runs = np.flatnonzero(np.diff(numbers) != 1) + 1
        for first, part in zip(np.split(numbers, runs), np.split(rows, runs), strict=True):
            sizes = self._sizes
            place = int(first[0]) * MEASURE.size
            if self._place([sizes[0], place, *sizes[2:]], (b"", part.tobytes(), bytes(sketches), b"", b"")):
                sizes[2] += len(sketches)
                self.sketch_size += len(sketches)
            sketches = b""

    def _place(self, places: list[int], parts: tuple[bytes, ...]) -> bool:
        view = self._view
        if view is None or self.failed:
            return False
        lengths = [len(part) for part in parts]
        frame = b"".join((FRAME.struct.pack(FRAME_MAGIC, sum(lengths), *places, *lengths, 0), *parts))
        capacity = len(view) - RING_DATA
        head, taken = int.from_bytes(view[_HEAD], "little"), int.from_bytes(view[_TAKEN], "little")
        if len(frame) > capacity - (head - taken):
            return self._put(frame)
        at = head % capacity
        first = min(len(frame), capacity - at)
        view[RING_DATA + at : RING_DATA + at + first] = frame[:first]
        view[RING_DATA : RING_DATA + len(frame) - first] = frame[first:]
        head += len(frame)
        view[_HEAD] = head.to_bytes(8, "little")
        if head - max(taken, self._woken) > capacity // 16:
            self._woken = head
            self._wake()
        return True


def _taken(parts: list[bytes]) -> bytes:
    whole = b"".join(parts)
    parts.clear()
    return whole


# How far it went, and where the measures now end.
Filed = tuple[int, int]


def plain_file_frames(data: bytes | memoryview, descriptors: tuple[int, ...], filed: int) -> Filed:
    """Writes all whole frames into the files of their tables; `filed` bytes of measures are there already. Raises OSError."""
    tables: list[list[bytes]] = [[] for _ in TABLES]
    patches: list[tuple[int, bytes]] = []
    starts: list[int] = []
    at, end = 0, filed
    while at + FRAME.size <= len(data):
        _, length, *numbers, _ = FRAME.struct.unpack_from(data, at)
        places, sizes = numbers[: len(TABLES)], numbers[len(TABLES) :]
        cut = at + FRAME.size
        if cut + length > len(data):
            break
        starts = starts or places
        for number, size in enumerate(sizes):
            part = bytes(data[cut : cut + size])
            cut += size
            if number == 1 and size and places[1] != end:
                patches.append((places[1], part))
            elif size:
                tables[number].append(part)
                end += size if number == 1 else 0
        at += FRAME.size + length
    starts[1:2] = [filed]
    for descriptor, start, parts in zip(descriptors, starts, tables, strict=False):
        write_all(descriptor, b"".join(parts), start)
    for start, part in patches:
        write_all(descriptors[1], part, start)
    return at, end


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(descriptor, rest, offset)
        offset += done
        rest = rest[done:]


Frames: Any = PlainFrames if taps.C is None else taps.C.Frames
file_frames: Callable[[bytes | memoryview, tuple[int, ...], int], Filed]
file_frames = getattr(taps.C, "file_frames", plain_file_frames)
