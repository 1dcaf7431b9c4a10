"""Reads the tables of an xlsx workbook, row by row. Knows our own files and those of openpyxl and spreadsheets.

A workbook may come from anyone: nothing is unpacked to disk, no part is larger than it may be, a document type (and with it
every entity) is refused. Formulas, dates and styles are not looked at: a formula's cell is what it last came to.
"""

from __future__ import annotations

import posixpath
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from xml.parsers import expat

from ulpscope.model.errors import DumpError

Cell = str | int | float | bool | None
Table = tuple[list[str], Iterator[tuple[Cell, ...]]]

_MAX_PARTS = 10_000
_MAX_SMALL_PART = 16 << 20  # the list of the sheets, and the links to them
_MAX_STRINGS = 512 << 20  # the shared strings, which have to be held
_MAX_SHEET = 8 << 30
_MAX_RATIO, _ANY_RATIO = 500, 64 << 20  # deflate can reach 1032; a small part may have any ratio
_MAX_COLUMNS = 16_384
_MAX_TEXT = 1 << 20
_MAX_TOKEN = 16 << 20
_CHUNK = 1 << 16
_ESCAPE = re.compile("_x([0-9A-Fa-f]{4})_")


def sheet_names(path: Path) -> list[str]:
    """The sheets of a workbook, in its order. Raises DumpError if it cannot be read."""
    with _opened(path) as archive:
        return list(_sheets(archive, path))


def read_sheet(path: Path, name: str | None = None) -> Table:
    """The header and the rows of a sheet (the first if none is named), each row as long as the header.

    Raises DumpError if the workbook cannot be read or has no such sheet; the rows raise it where the sheet breaks off.
    """
    rows = _all_rows(path, name)
    header = next(rows, ())
    columns = ["" if cell is None else str(cell) for cell in header]
    while columns and not columns[-1]:
        columns.pop()
    return columns, _fitted(rows, len(columns))


def _fitted(rows: Iterator[tuple[Cell, ...]], width: int) -> Iterator[tuple[Cell, ...]]:
    blanks = (None,) * width
    for row in rows:
        yield row if len(row) == width else (row + blanks)[:width]


def _all_rows(path: Path, name: str | None) -> Iterator[tuple[Cell, ...]]:
    with _opened(path) as archive:
        sheets = _sheets(archive, path)
        chosen = next(iter(sheets), None) if name is None else name
        if chosen is None or chosen not in sheets:
            raise DumpError(f"{path} has no sheet {name!r}; it has {', '.join(map(repr, sheets)) or 'none'}")
        strings = _shared_strings(archive, path)
        with _part(archive, path, sheets[chosen], _MAX_SHEET) as file:
            yield from _rows(file, f"{path}, sheet {chosen!r}", strings)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            odd = [name for name in names if name.startswith("/") or "\\" in name or ".." in name.split("/")]
            if len(names) > _MAX_PARTS or odd:
                what = f"a part named {odd[0]!r}" if odd else f"{len(names)} parts"
                raise DumpError(f"{path} has {what}, which no workbook has; it is not read")
            yield archive
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DumpError(f"{path} is not a whole xlsx workbook: {error}") from error


@contextmanager
def _part(archive: zipfile.ZipFile, path: Path, name: str, limit: int) -> Iterator[IO[bytes]]:
    try:
        part = archive.getinfo(name)
    except KeyError:
        raise DumpError(f"{path} is not an xlsx workbook: it has no part {name}") from None
    ratio = part.file_size / max(part.compress_size, 1)
    if part.file_size > limit or (part.file_size > _ANY_RATIO and ratio > _MAX_RATIO):
        raise DumpError(
            f"{path}: {name} would be {part.file_size} bytes, {ratio:.0f} times what is stored; it is not read"
        )
    if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or part.flag_bits & 1:
        raise DumpError(f"{path}: {name} is encrypted or packed in a way that workbooks are not; save it anew")
    with archive.open(part) as file:
        yield file


def _sheets(archive: zipfile.ZipFile, path: Path) -> dict[str, str]:
    """Name of each sheet -> its part, in the workbook's order."""
    listed: list[Mapping[str, str]] = []
    links: dict[str, str] = {}

    def on_sheet(attributes: Mapping[str, str]) -> None:
        listed.append(attributes)

    def on_link(attributes: Mapping[str, str]) -> None:
        if attributes.get("Type", "").endswith("/worksheet") and attributes.get("TargetMode") != "External":
            links[attributes.get("Id", "")] = posixpath.normpath(posixpath.join("/xl", attributes.get("Target", "")))

    for name, element, found in (
        ("xl/workbook.xml", "sheet", on_sheet),
        ("xl/_rels/workbook.xml.rels", "Relationship", on_link),
    ):
        with _part(archive, path, name, _MAX_SMALL_PART) as file:
            _read_elements(file, f"{path}: {name}", element, found)
    relation = ("id", "r:id")
    parts = [next((each[key] for key in each if key.rpartition(" ")[2] in relation), "") for each in listed]
    return {
        each.get("name", ""): links[link].lstrip("/") for each, link in zip(listed, parts, strict=True) if link in links
    }


def _read_elements(file: IO[bytes], where: str, element: str, found: Callable[[Mapping[str, str]], None]) -> None:
    parser = _parser(where)

    def start(name: str, attributes: Mapping[str, str]) -> None:
        if _local(name) == element:
            found(attributes)

    parser.StartElementHandler = start
    for _ in _fed(parser, file, where):
        pass


def _shared_strings(archive: zipfile.ZipFile, path: Path) -> list[str]:
    name = "xl/sharedStrings.xml"
    if name not in archive.namelist():
        return []
    strings: list[str] = []
    text = _Text(f"{path}: {name}")

    def end(name: str) -> None:
        text.end(_local(name))
        if _local(name) == "si":
            strings.append(text.taken())

    parser = _parser(text.where)
    parser.StartElementHandler = lambda name, _: text.start(_local(name))
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text.more
    with _part(archive, path, name, _MAX_STRINGS) as file:
        for _ in _fed(parser, file, text.where):
            pass
    return strings


class _Text:
    """Collects what stands in <t> and <v>, of all runs, without the reading aids of <rPh>."""

    __slots__ = ("_aside", "_open", "_parts", "_size", "where")

    def __init__(self, where: str) -> None:
        self.where = where
        self._parts: list[str] = []
        self._size = 0
        self._open = False
        self._aside = False

    def start(self, element: str) -> None:
        if element == "t" or element == "v":
            self._open = not self._aside
        elif element == "rPh":
            self._aside = True

    def end(self, element: str) -> None:
        self._open = False
        if element == "rPh":
            self._aside = False

    def more(self, text: str) -> None:
        if self._open:
            self._size += len(text)
            if self._size > _MAX_TEXT:
                raise DumpError(f"{self.where} has a text of more than {_MAX_TEXT} characters; it is not read")
            self._parts.append(text)

    def taken(self) -> str:
        parts = self._parts
        if not parts:
            return ""
        text = parts[0] if len(parts) == 1 else "".join(parts)
        parts.clear()
        self._size = 0
        return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text) if "_x" in text else text


def _rows(file: IO[bytes], where: str, strings: Sequence[str]) -> Iterator[tuple[Cell, ...]]:
    """The rows of a sheet; cells without a reference stand after the one before. Millions of events: hence the closures."""
    ready: list[tuple[Cell, ...]] = []
    row: list[Cell] = []
    text = _Text(where)
    at, kind = 0, "n"
    local_name = _LocalNames()
    columns = _Columns(where)

    def start(name: str, attributes: Mapping[str, str]) -> None:
        nonlocal at, kind, row
        local = local_name[name]
        if local == "c":
            kind = attributes.get("t", "n")
            if "r" in attributes:
                at = columns[attributes["r"].rstrip("0123456789")]
        elif local == "row":
            row, at = [], 0
        elif local != "is":
            text.start(local)

    def end(name: str) -> None:
        nonlocal at
        local = local_name[name]
        if local == "c":
            if at != len(row):
                _make_room(row, at, where)
            row.append(_value(kind, text.taken(), strings, where))
            at += 1
            if at > _MAX_COLUMNS:
                raise DumpError(f"{where} has a row of more than {_MAX_COLUMNS} cells; it is not read")
        elif local == "row":
            ready.append(tuple(row))
        elif local != "is":
            text.end(local)

    parser = _parser(where)
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text.more
    for _ in _fed(parser, file, where):
        yield from ready
        ready.clear()


class _LocalNames(dict[str, str]):
    """Names without their namespace."""

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, _local(name))


class _Columns(dict[str, int]):
    """Letters of a column -> its place, from 0."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __missing__(self, letters: str) -> int:
        found = 0
        for letter in letters[:4]:
            found = found * 26 + ord(letter) - ord("A") + 1
        if not 0 < found <= _MAX_COLUMNS:
            raise DumpError(f"{self._where} has a cell in column {letters[:20]!r}; it is not read")
        return self.setdefault(letters, found - 1)


def _make_room(row: list[Cell], at: int, where: str) -> None:
    if at < len(row):
        raise DumpError(f"{where} has a row with cells that go backwards; it is not read")
    row += [None] * (at - len(row))


def _value(kind: str, text: str, strings: Sequence[str], where: str) -> Cell:
    if not text:
        return None
    try:
        if kind == "n":
            return int(text) if len(text) < 20 and text.lstrip("-").isdecimal() else float(text)
        if kind == "s":
            return strings[int(text)] or None
        return bool(int(text)) if kind == "b" else text
    except (ValueError, IndexError):
        raise DumpError(f"{where} has a cell of type {kind!r} with {text[:40]!r}; it is not read") from None


def _parser(where: str) -> expat.XMLParserType:
    def refuse(*_: object) -> None:
        raise DumpError(f"{where} declares a document type, which no workbook does; it is not read")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.buffer_size = _CHUNK
    parser.StartDoctypeDeclHandler = refuse
    return parser


def _fed(parser: expat.XMLParserType, file: IO[bytes], where: str) -> Iterator[None]:
    """Feeds the part to its parser; the caller looks at what was found after every piece."""
    fed = 0
    try:
        while chunk := file.read(_CHUNK):
            parser.Parse(chunk, False)
            fed += len(chunk)
            if fed - max(parser.CurrentByteIndex, 0) > _MAX_TOKEN:
                raise DumpError(f"{where} has a name or an attribute of more than {_MAX_TOKEN} bytes; it is not read")
            yield
        parser.Parse(b"", True)
        yield
    except expat.ExpatError as error:
        raise DumpError(f"{where} is not well-formed: {error}") from error


def _local(name: str) -> str:
    return name.rpartition(" ")[2]
