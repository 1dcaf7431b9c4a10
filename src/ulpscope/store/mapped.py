"""Files seen as memory, and letting their pages go."""

from __future__ import annotations

import mmap
from typing import NamedTuple

from ulpscope.model.dtypes import DType
from ulpscope.model.errors import DumpError
from ulpscope.native import measuring, pairs


class StoredBits(NamedTuple):
    """The elements of a tensor in row-major order, as they lie in a file.

    `crc` is the CRC-32 they must have, where nobody has looked yet, and `damaged` what to say if they have another.
    """

    dtype: DType
    raw: memoryview
    shape: tuple[int, ...]
    crc: int | None = None
    damaged: str = ""

    def check(self, found: int | None = None) -> None:
        """Raises DumpError where the bits have another CRC-32 than they must; `found` is what it is, if that is known."""
        if self.crc is not None and self.crc != (measuring.crc32(self.raw) if found is None else found):
            raise DumpError(self.damaged)


def forget(*views: memoryview) -> None:
    """Lets go of the pages that lie wholly within views of mapped files; other views do nothing.

    The bytes stay readable: they come from the file again."""
    mapped = [view for view in views if isinstance(view.obj, mmap.mmap)]
    if mapped:
        pairs.let_go(*mapped)
