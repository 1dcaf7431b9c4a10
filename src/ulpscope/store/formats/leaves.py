"""The short way through a dump.json of msprobe: what is usual, read without a Python object for every piece of text.

The functions come from the C extension where it could be built; without it they read nothing. Either way all that they do
not read is for `json_entries` and `msprobe_values`, which say what is right: they read everything, and refuse with words.

    entries(buffer, start, enough, names) -> (spans, at)

finds the entries of an object from the name at `start` on, up to about `enough` bytes further. Their names are added to
`names`; `spans` holds where each value starts and stops, as pairs of native uint64; the next name is at `at`. It ends early
before a name with an escape, a value that is neither object nor list, and the last entry.

    Leaves(Value, Slot, ToldStats, Stats of nothing, sections).read(buffer, start, stop, backward) -> values or None

are the values of the entry in these bytes, as `MsprobeValues.of` has them; None for an entry that is unusual in any way.
"""

from __future__ import annotations

from mmap import mmap
from typing import Any

try:
    from ulpscope.store.formats._leaves import Leaves, entries

    HAVE_EXTENSION = True
except ImportError:
    HAVE_EXTENSION = False

    class Leaves:  # type: ignore[no-redef]
        """Reads nothing."""

        def __init__(self, *classes: Any) -> None: ...

        def read(self, *place: Any) -> None:
            return None

    def entries(
        buffer: bytes | bytearray | memoryview | mmap, start: int, enough: int, names: list[str], /
    ) -> tuple[bytes, int]:
        return b"", start


__all__ = ["HAVE_EXTENSION", "Leaves", "entries"]
