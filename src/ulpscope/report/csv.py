"""A table as csv: UTF-8, `\\n` at the end of a line, quotes only where needed, numbers with all their digits, None as nothing.

A spreadsheet takes a text that begins with = + - @ or a tab for a formula. Such a text gets a ' before it, unless it is a
number or a percentage (`-inf`, `-1.5%`): what the tools themselves write never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from ulpscope.report.table import Cell, Row, replacing

_BATCH = 256
_FORMULA = frozenset("=+-@\t\r")
_QUOTED = (",", '"', "\n", "\r")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Writes the table; colours have no place in it. Raises ValueError for a row of another length, OSError as open does."""
    remaining = iter(rows)
    with replacing(path) as draft, draft.open("wb") as file:
        file.write(_lines([columns]))
        while batch := list(islice(remaining, _BATCH)):
            cells = [cells for cells, _ in batch]
            if {*map(len, cells)} != {len(columns)}:
                raise ValueError(f"{path}: a row has not the {len(columns)} cells of the header")
            file.write(_lines(cells))


def _lines(rows: Sequence[Sequence[Cell]]) -> bytes:
    columns = [_column(column) for column in zip(*rows, strict=True)]
    # A name may hold half of a surrogate pair, which UTF-8 cannot: better a ? than no table.
    return "".join(line + "\n" for line in map(",".join, zip(*columns, strict=True))).encode("utf-8", "replace")


def _column(column: Sequence[Cell]) -> Iterable[str]:
    kinds = set(map(type, column))
    if kinds == {float}:
        return map(repr, column)
    if kinds == {str}:
        texts: Sequence[str] = column  # type: ignore[assignment]
        different = set(texts)
        joined = "|".join(different)
        if _FORMULA.isdisjoint([text[:1] for text in different]) and not any(special in joined for special in _QUOTED):
            return texts
        known = {text: _text(text) for text in different}
        return [known[text] for text in texts]
    return list(map(_cell, column))


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return _text(cell)
    return "" if cell is None else str(cell)


def _text(text: str) -> str:
    if text[:1] in _FORMULA and not _is_number(text.removesuffix("%")):
        text = "'" + text
    return '"' + text.replace('"', '""') + '"' if any(special in text for special in _QUOTED) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
