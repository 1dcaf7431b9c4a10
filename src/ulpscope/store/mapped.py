"""Files seen as memory, and letting their pages go."""

from __future__ import annotations

import mmap

import numpy as np


def forget(view: memoryview, start: int, stop: int) -> None:
    """Lets go of the pages that lie wholly within these bytes of a view of a mapped file; other views do nothing.

    The bytes stay readable: they come from the file again."""
    mapping = view.obj
    if not isinstance(mapping, mmap.mmap) or not hasattr(mapping, "madvise") or stop <= start:
        return
    base = _address(memoryview(mapping))
    first = _address(view) - base + start
    begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (first + stop - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
