"""The elements of pairs of values, read on threads, some pairs at a time.

Threads share Python's lock: what needs it is done for several pairs at once, and the reading itself, which does not, comes after.
Knows dumps and contrasts, nothing of alignment or verdicts.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from struct import Struct

from ulpscope.compare.metrics import Contrast, Streams, contrast_bits, contrast_short
from ulpscope.model.errors import DumpError
from ulpscope.model.records import Value
from ulpscope.store.dump import Dump
from ulpscope.store.mapped import StoredBits, forget

# A batch is read when it has so many pairs, or its part of so many bytes: what Python does between two pairs it does slowly, after
# the elements have gone through the caches. So many bytes are read without Python's lock, and their pages let go.
_BATCH_PAIRS = 64
_BATCH_BYTES = 128 << 20
_GROUP_BYTES = 16 << 20
_CHECKSUMS = Struct("<2I")


class Pending:
    """Two values whose elements are read, or are going to be."""

    __slots__ = ("_batch", "contrast", "error")

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch
        self.contrast: Contrast | None = None
        self.error: DumpError | None = None

    def result(self) -> Contrast:
        """How the two differ. Raises DumpError where the elements of one cannot be read."""
        self._batch.wait()
        if self.error is not None:
            raise self.error
        assert self.contrast is not None
        return self.contrast


class Reading:
    """Reads the elements of the pairs it is given, on a pool or, without one, when they are asked for."""

    def __init__(self, reference: Dump, target: Dump, pool: ThreadPoolExecutor | None, *, jobs: int = 1) -> None:
        self._reference, self._target, self._pool = reference, target, pool
        self._most = _BATCH_BYTES // jobs
        self._batch = _Batch(reference, target, pool, self._most)

    def start(self, left: Value, right: Value) -> Pending:
        """Both values must have a payload."""
        assert left.payload is not None and right.payload is not None
        if self._batch.started:
            self._batch = _Batch(self._reference, self._target, self._pool, self._most)
        return self._batch.add(left, right, left.payload.nbytes + right.payload.nbytes)


class _Batch:
    def __init__(self, reference: Dump, target: Dump, pool: ThreadPoolExecutor | None, most: int) -> None:
        self._reference, self._target, self._pool = reference, target, pool
        self._most = most
        self._pairs: list[tuple[Pending, Value, Value]] = []
        self._nbytes = 0
        self._done: Future[None] | None = None

    @property
    def started(self) -> bool:
        return self._done is not None

    def add(self, left: Value, right: Value, nbytes: int) -> Pending:
        pending = Pending(self)
        self._pairs.append((pending, left, right))
        self._nbytes += nbytes
        if self._nbytes >= self._most or len(self._pairs) >= _BATCH_PAIRS:
            self._start()
        return pending

    def wait(self) -> None:
        if self._done is None:
            self._start()
        assert self._done is not None
        self._done.result()

    def _start(self) -> None:
        if self._pool is not None:
            self._done = self._pool.submit(self._read)
        else:
            self._done = Future()
            self._read()
            self._done.set_result(None)

    def _read(self) -> None:
        found: list[tuple[Pending, StoredBits, StoredBits]] = []
        for pending, left, right in self._pairs:
            try:
                found.append((pending, *self._sides(left, right)))
            except DumpError as error:
                pending.error = error
        # In groups, so that few pages are held at a time; backwards, so that a mapping ends with its group.
        found.reverse()
        while found:
            group, nbytes = [], 0
            while found and nbytes < _GROUP_BYTES:
                group.append(found.pop())
                nbytes += group[-1][1].raw.nbytes + group[-1][2].raw.nbytes
            _contrast(group)
        self._pairs.clear()

    def _sides(self, left: Value, right: Value) -> tuple[StoredBits, StoredBits]:
        ours, theirs = self._reference.stored(left), self._target.stored(right)
        if ours.shape != theirs.shape and math.prod(ours.shape) != math.prod(theirs.shape):
            raise DumpError(f"the stored elements have shapes {ours.shape} and {theirs.shape}")
        return ours, theirs


def _contrast(group: list[tuple[Pending, StoredBits, StoredBits]]) -> None:
    """How the pairs differ; tells each of them."""
    short: list[tuple[Pending, StoredBits, StoredBits, Streams]] = []
    long: list[tuple[Pending, StoredBits, StoredBits, Streams]] = []
    for pending, ours, theirs in group:
        checksums = None if ours.crc is None and theirs.crc is None else bytearray(_CHECKSUMS.size)
        streams = Streams(ours.raw, ours.dtype, theirs.raw, theirs.dtype, checksums)
        (short if streams.short else long).append((pending, ours, theirs, streams))
    for (pending, ours, theirs, streams), found in zip(short, contrast_short([each[3] for each in short]), strict=True):
        _tell(pending, ours, theirs, streams, found)
    for pending, ours, theirs, streams in long:
        _tell(pending, ours, theirs, streams, _contrast_long(ours, theirs, streams.checksums))
    # A mapped page counts as memory of this process until it is let go; a mapping of one tensor, which has a CRC-32, goes with it.
    ours_read = [ours.raw for _, ours, _ in group if ours.crc is None]
    theirs_read = [theirs.raw for _, _, theirs in group if theirs.crc is None]
    forget(*ours_read, *theirs_read)


def _contrast_long(ours: StoredBits, theirs: StoredBits, checksums: bytearray | None) -> Contrast:
    def release(start: int, stop: int) -> None:
        forget(*(side.raw[start * side.dtype.itemsize : stop * side.dtype.itemsize] for side in (ours, theirs)))

    return contrast_bits(ours.raw, ours.dtype, theirs.raw, theirs.dtype, done=release, checksums=checksums)


def _tell(pending: Pending, ours: StoredBits, theirs: StoredBits, streams: Streams, found: Contrast) -> None:
    try:
        if streams.checksums is not None:
            for side, checksum in zip((ours, theirs), _CHECKSUMS.unpack(streams.checksums), strict=True):
                side.check(checksum)
        pending.contrast = found
    except DumpError as error:
        pending.error = error
