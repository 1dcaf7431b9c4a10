"""A JSON file whose one large member is an object of many entries: they are found once and parsed one at a time.

A dump.json of a real training step has hundreds of megabytes; as Python objects it would take many times that.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from array import array
from pathlib import Path
from typing import Any

from ulpscope.model.errors import DumpError
from ulpscope.native.pairs import skip_json
from ulpscope.store.mapped import forget

_MOST_BYTES = 8 << 30
_RELEASE = 16 << 20
# What json.loads comes down to, without three calls on the way.
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_KEY = re.compile(rb'\s*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_OPEN = re.compile(rb"\s*\{")
_NEXT = re.compile(rb"\s*([,}])")
_EMPTY = re.compile(rb"\s*\}")


class JsonEntries:
    """The members of the object in a file; those of its member `large` by number."""

    def __init__(self, path: Path, large: str) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.has_entries = False
        self.names: list[str] = []
        self._spans = array("Q")
        self._read = 0
        self._mapping = _mapped(path)
        self._whole: list[Any] | None = None
        try:
            self._scan(large)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deep" if isinstance(error, RecursionError) else error
            raise DumpError(f"{path} cannot be read: {why}") from None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Any:
        """An entry. Raises DumpError where it is not JSON."""
        if self._whole is not None:
            return self._whole[number]
        start, stop = self._spans[2 * number], self._spans[2 * number + 1]
        try:
            text = self._text(start, stop)
            found, end = _scan(text, 0)
            if end != len(text):
                raise ValueError(f"something follows it at character {end}")
            return found
        except (ValueError, RecursionError, StopIteration) as error:
            why = "it is nested too deep" if isinstance(error, RecursionError) else error or "it is no JSON"
            raise DumpError(f"{self.path} cannot be read: {self.names[number][:200]}: {why}") from None

    def _text(self, start: int, stop: int) -> str:
        self._let_go(stop - start)
        return self._mapping[start:stop].decode("utf-8")

    def _let_go(self, reading: int) -> None:
        """Counts the bytes that are read, and lets go of all pages from time to time."""
        self._read += reading
        if self._read > _RELEASE:
            with memoryview(self._mapping) as view:
                forget(view)
            self._read = reading

    def _scan(self, large: str) -> None:
        begin = _OPEN.match(self._mapping)
        if begin is None:
            self._read_whole(large, bytes(self._mapping))
            return
        first = begin.end()
        del begin  # it holds the mapping
        with memoryview(self._mapping) as view:
            end = self._members(view, first, large)
        if self._mapping[end:].strip():
            raise ValueError("something follows the object")

    def _read_whole(self, large: str, raw: bytes) -> None:
        """Another encoding, or no object at all."""
        content = json.loads(raw)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        self.has_entries = large in content
        entries = content.pop(large, {})
        self.header = content
        if isinstance(entries, dict):
            self.names, self._whole = list(entries), list(entries.values())
        else:
            raise ValueError(f"{large} is not an object")

    def _members(self, view: memoryview, at: int, large: str) -> int:
        """Reads the members of the outer object; returns where it ends."""
        if (empty := _EMPTY.match(view, at)) is not None:
            return empty.end()
        while True:
            key, at = _key(view, at)
            if key == large:
                begin = _OPEN.match(view, at)
                if begin is None:
                    raise ValueError(f"{large} is not an object")
                self.has_entries = True
                at = self._entries(view, begin.end())
            else:
                end = skip_json(view, at)
                self.header[key] = json.loads(bytes(view[at:end]))
                at = end
            at, more = _next(view, at)
            if not more:
                return at

    def _entries(self, view: memoryview, at: int) -> int:
        released = 0
        if (empty := _EMPTY.match(view, at)) is not None:
            return empty.end()
        while True:
            if at - released > _RELEASE:
                forget(view[released:at])
                released = at
            key, start = _key(view, at)
            end = skip_json(view, start)
            self.names.append(key)
            self._spans.extend((start, end))
            at, more = _next(view, end)
            if not more:
                return at


def _key(view: memoryview, at: int) -> tuple[str, int]:
    found = _KEY.match(view, at)
    if found is None:
        raise ValueError(f"a name was expected at byte {at}")
    key = found[1]
    return json.loads(key) if b"\\" in key else key[1:-1].decode("utf-8"), found.end()


def _next(view: memoryview, at: int) -> tuple[int, bool]:
    found = _NEXT.match(view, at)
    if found is None:
        raise ValueError(f"a comma or a brace was expected at byte {at}")
    return found.end(), found[1] == b","


def _mapped(path: Path) -> mmap.mmap | bytes:
    if path.is_symlink():
        raise DumpError(f"{path} is a symbolic link; a dump holds plain files only")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MOST_BYTES:
                raise DumpError(f"{path} has {size} bytes; at most {_MOST_BYTES} are read")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
