"""The elements of pairs of values, read on threads, some pairs at a time.

Threads share Python's lock: what needs it is done for several pairs at once, and the reading itself, which does not, comes after.
Knows dumps and contrasts, nothing of alignment or verdicts.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from struct import Struct

from ulpscope.compare.metrics import Contrast, contrast_bits
from ulpscope.errors import DumpError
from ulpscope.records import Value
from ulpscope.store.mapped import StoredBits, forget
from ulpscope.store.reader import Dump

# A batch is read when it has so many pairs, or its part of so many bytes: what Python does between two pairs it does slowly, after
# the elements have gone through the caches. Pages are let go when there are so many bytes of them.
_BATCH_PAIRS = 64
_BATCH_BYTES = 128 << 20
_KEPT_BYTES = 16 << 20
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
        # Backwards, so that a mapping ends with its pair.
        found.reverse()
        read = _Read()
        while found:
            pending, ours, theirs = found.pop()
            try:
                pending.contrast = _contrast(ours, theirs)
            except DumpError as error:
                pending.error = error
            read.add(ours, theirs)
        read.let_go()
        self._pairs.clear()

    def _sides(self, left: Value, right: Value) -> tuple[StoredBits, StoredBits]:
        ours, theirs = self._reference.stored(left), self._target.stored(right)
        if ours.shape != theirs.shape and math.prod(ours.shape) != math.prod(theirs.shape):
            raise DumpError(f"the stored elements have shapes {ours.shape} and {theirs.shape}")
        return ours, theirs


class _Read:
    """Views whose pages are still counted as memory of this process. A mapping of one tensor, which has a CRC-32, goes with it."""

    def __init__(self) -> None:
        self._ours: list[memoryview] = []
        self._theirs: list[memoryview] = []
        self._nbytes = 0

    def add(self, ours: StoredBits, theirs: StoredBits) -> None:
        for views, side in ((self._ours, ours), (self._theirs, theirs)):
            if side.crc is None:
                views.append(side.raw)
                self._nbytes += side.raw.nbytes
        if self._nbytes >= _KEPT_BYTES:
            self.let_go()

    def let_go(self) -> None:
        # Side by side as they lie in their files: few calls.
        forget(*self._ours, *self._theirs)
        self._ours.clear()
        self._theirs.clear()
        self._nbytes = 0


def _contrast(ours: StoredBits, theirs: StoredBits) -> Contrast:
    end = math.prod(ours.shape)

    def release(start: int, stop: int) -> None:
        if stop < end:
            forget(*(side.raw[start * side.dtype.itemsize : stop * side.dtype.itemsize] for side in (ours, theirs)))

    if ours.crc is None and theirs.crc is None:
        return contrast_bits(ours.raw, ours.dtype, theirs.raw, theirs.dtype, done=release)
    checksums = bytearray(_CHECKSUMS.size)
    found = contrast_bits(ours.raw, ours.dtype, theirs.raw, theirs.dtype, done=release, checksums=checksums)
    for side, checksum in zip((ours, theirs), _CHECKSUMS.unpack(checksums), strict=True):
        side.check(checksum)
    return found
