"""A JSON object in a file that grows. Whatever has the file's name is whole at every moment, and the next state costs what is new.

JSON ends with a brace: a file that is added to in place is none for a moment, and stays none after a kill in that moment; a new
copy for each state costs all that there is. So two files take turns. What is new goes into the one that nobody sees, behind what
it has missed, and then it takes the name in one rename; the other waits beside it. Where a file system has no links, a copy does.
Who has a file open since two states ago sees its end change; entries stay where they are.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20
_Mark = tuple[int, int, int]


class GrowingJson:
    """`head`, entries, and an end. Before the first entry comes `first`, before all others `between`.

    Whoever is interrupted while it works has to begin with a new one."""

    def __init__(self, head: str, first: str = "", between: str = ", ") -> None:
        self._head = head
        self._before, self._between = first, between
        self._end = 0  # of the last entry
        self._tail = ""
        self._mark: _Mark | None = None
        self._spare: tuple[_Mark | None, int] = (None, 0)  # its state, and the end of its last entry

    def create(self, path: Path, entries: Iterable[str], tail: str) -> None:
        """Writes a new file."""
        with _new(path) as file:
            file.write(self._head.encode())
            self._put(file, entries, tail)
        self._mark = _mark_of(path)

    def is_at(self, path: Path) -> bool:
        """Whether the file there is the one that was written last, wherever that was."""
        return self._mark is not None and _mark_of(path) == self._mark

    def add(self, path: Path, spare: Path, entries: Iterable[str], tail: str) -> None:
        """Adds entries to the file there. `spare` is where the other file waits, in the same file system."""
        mark, have = self._spare
        if mark is None or _mark_of(spare, links=1) != mark:  # who has a link to it wants it as it is
            spare.unlink(missing_ok=True)
            have = 0
        with _new(spare) if not have else _known(spare) as file:
            with path.open("rb") as seen:
                _copy(seen, file, have, self._end)
            end = self._end
            self._put(file, entries, tail)
            file.truncate()
        waiting = spare.with_name(f"{spare.name}.old")
        try:
            os.link(path, waiting)
        except OSError:
            os.replace(spare, path)
            self._spare = None, 0
        else:
            os.replace(spare, path)
            os.replace(waiting, spare)
            self._spare = self._mark, end
        self._mark = _mark_of(path)

    def says(self, tail: str) -> bool:
        """Whether the file ends like that."""
        return tail == self._tail

    def _put(self, file: BinaryIO, entries: Iterable[str], tail: str) -> None:
        for entry in entries:
            file.write(f"{self._before}{entry}".encode())
            self._before = self._between
        self._end, self._tail = file.tell(), tail
        file.write(tail.encode())


def drop_spare(spare: Path) -> None:
    """Removes what waits there."""
    for path in (spare, spare.with_name(f"{spare.name}.old")):
        path.unlink(missing_ok=True)


def _new(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o640)
    os.fchmod(descriptor, 0o640)
    return os.fdopen(descriptor, "wb")


def _known(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)), "r+b")


def _mark_of(path: Path, links: int = 0) -> _Mark | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    plain = stat.S_ISREG(found.st_mode) and found.st_nlink == (links or found.st_nlink)
    return (found.st_dev, found.st_ino, found.st_size) if plain else None


def _copy(source: BinaryIO, target: BinaryIO, start: int, end: int) -> None:
    source.seek(start)
    target.seek(start)
    while start < end:
        part = source.read(min(_CHUNK, end - start))
        if not part:
            raise OSError(f"{source.name} ends at byte {start}, before {end}")
        target.write(part)
        start += len(part)
