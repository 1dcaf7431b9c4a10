"""Tables as an xlsx workbook, on the standard library alone.

The XML of a few hundred rows is made column by column, as the cells of a column are mostly of one kind,
and goes straight into the zip: a row costs microseconds, and memory does not grow with the rows. Texts are inline strings, which are never formulas.
Cells carry no reference (`r` is optional): they stand in order, and it saves a third of the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from ulpscope.report.table import Cell, Colour, Row, Sheet, replacing
from ulpscope.report.workbook import HEADER, MAIN, STYLES, XML, frame, free_name

MAX_ROWS = 1_048_576  # the header included
MAX_COLUMNS = 16_384
MAX_TEXT = 32_767
_MAX_PART = 1_900_000_000  # from 2 GiB on, a part needs a zip64 header, which not every reader takes
_EXACT = 2**53  # from here on, a spreadsheet rounds a whole number
_BATCH = 256
_WIDEST, _NARROWEST, _FILTER_ARROW = 60, 9, 3

_TEXT, _TEXT_END = '<c t="inlineStr"><is><t>', "</t></is></c>"
_SPACED_TEXT = '<c t="inlineStr"><is><t xml:space="preserve">'
_NUMBER, _NUMBER_END = "<c><v>", "</v></c>"
_BLANK = "<c/>"
_STYLED = {colour: f' s="{style}"' for colour, style in STYLES.items()}
# What XML cannot hold, a carriage return (XML reads it as \n), and a text that reads like such an escape.
_ESCAPED = re.compile("[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]|_(?=x[0-9A-Fa-f]{4}_)")


def write_xlsx(path: Path, sheets: Iterable[Sheet], *, max_rows: int = MAX_ROWS) -> list[str]:
    """Writes the sheets in order and returns what a user should be told: the sheets that had to be continued on another.

    Raises ValueError for a row of another length than the header, and for no sheet at all; OSError as open does.
    """
    notes: list[str] = []
    names: list[str] = []
    with replacing(path) as draft, ZipFile(draft, "w", ZIP_DEFLATED, compresslevel=1) as archive:
        for sheet in sheets:
            _, *more = _write_parts(archive, sheet, names, max_rows)
            notes += [f"{sheet.name!r} has more rows than a sheet can hold; it goes on in {name!r}" for name in more]
        if not names:
            raise ValueError(f"{path}: a workbook needs a sheet")
        for part, text in frame(names).items():
            with archive.open(part, "w") as file:
                file.write(text.encode())
    return notes


def _write_parts(archive: ZipFile, sheet: Sheet, names: list[str], max_rows: int) -> Iterator[str]:
    """The names of the sheets that this one became, as they are written; they are added to `names`."""
    if len(sheet.columns) > MAX_COLUMNS:
        raise ValueError(f"{sheet.name!r} has {len(sheet.columns)} columns, a sheet holds {MAX_COLUMNS}")
    rows = iter(sheet.rows)
    batch = list(islice(rows, min(_BATCH, max_rows - 1)))
    head = _head(sheet.columns, batch)
    while True:
        names.append(free_name(sheet.name, names))
        with archive.open(f"xl/worksheets/sheet{len(names)}.xml", "w") as file:
            size, last = file.write(head), 1
            while batch and last < max_rows and size < _MAX_PART:
                size += file.write(_rows_xml(batch, last + 1, sheet))
                last += len(batch)
                batch = list(islice(rows, min(_BATCH, max_rows - last) or min(_BATCH, max_rows - 1)))
            file.write(_foot(len(sheet.columns), last))
        yield names[-1]
        if not batch:
            return


def _rows_xml(batch: Sequence[Row], first: int, sheet: Sheet) -> bytes:
    cells, colours = zip(*batch, strict=True)
    if {*map(len, cells)} != {len(sheet.columns)}:
        raise ValueError(f"{sheet.name!r}: a row has not the {len(sheet.columns)} cells of the header")
    # The markup around a value is the same in the whole column: rows are put together from columns, not from cells.
    pieces: list[Iterable[str]] = [repeat('<row r="'), map(str, range(first, first + len(batch)))]
    after = '">'
    for column in zip(*cells, strict=True):
        before, values, following = _column_xml(column)
        pieces += (repeat(after + before), values)
        after = following
    # The numbers of the rows end the zip, repeat never does.
    rows = map("".join, zip(*pieces, repeat(after + "</row>"), strict=False))
    return "".join(rows if {*colours} == {None} else map(_coloured, rows, colours)).encode()


def _coloured(row: str, colour: Colour | None) -> str:
    # Only a cell begins with "<c": in texts "<" is escaped.
    return row if colour is None else row.replace("<c", f"<c{_STYLED[colour]}")


def _column_xml(column: Sequence[Cell]) -> tuple[str, Iterable[str], str]:
    """The values of a column as texts, and the markup before and after each of them."""
    kinds = set(map(type, column))
    if kinds == {str}:
        texts: Sequence[str] = column  # type: ignore[assignment]
        different = set(texts)
        if _is_plain(different):
            return _TEXT, texts, _TEXT_END
        known = {text: _text_xml(text) for text in different}
        return "", [known[text] for text in texts], ""
    if kinds == {float} and math.isfinite(sum(column)):  # type: ignore[arg-type]
        return _NUMBER, map(repr, column), _NUMBER_END
    return "", list(map(_cell_xml, column)), ""


def _is_plain(texts: Collection[str]) -> bool:
    """Whether nothing in these texts needs care; false in doubt."""
    joined = "|".join(("", *texts, ""))
    return (
        joined.isascii()
        and joined.isprintable()
        and (len(joined) <= MAX_TEXT or max(map(len, texts)) <= MAX_TEXT)
        and not any(special in joined for special in ("&", "<", ">", "_x", "| ", " |", "||"))
    )


def _cell_xml(cell: Cell) -> str:
    maker = _CELLS.get(type(cell))
    if maker is not None:
        return maker(cell)
    for kind, maker in _CELLS.items():
        if isinstance(cell, kind):
            return maker(kind(cell))
    raise TypeError(f"a cell holds text, a number, a boolean or nothing, not {type(cell).__name__}")


def _text_xml(text: str) -> str:
    if not text:
        return _BLANK
    text = _fitting(text)
    before = _SPACED_TEXT if text[0].isspace() or text[-1].isspace() or "\n" in text else _TEXT
    text = _ESCAPED.sub(lambda found: f"_x{ord(found[0]):04X}_", text)
    return before + text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") + _TEXT_END


def _fitting(text: str) -> str:
    """The text as far as a cell can hold it, which counts in UTF-16, with a mark where it was cut."""
    if len(text) <= MAX_TEXT // 2:
        return text
    units = text.encode("utf-16-le", "surrogatepass")
    if len(units) <= 2 * MAX_TEXT:
        return text
    mark = f" ... (cut: {len(text)} characters)"
    return units[: 2 * (MAX_TEXT - len(mark))].decode("utf-16-le", "ignore") + mark


def _float_xml(number: float) -> str:
    return f"{_NUMBER}{number!r}{_NUMBER_END}" if math.isfinite(number) else f"{_TEXT}{number!r}{_TEXT_END}"


def _int_xml(number: int) -> str:
    return f"{_NUMBER}{number}{_NUMBER_END}" if abs(number) <= _EXACT else f"{_TEXT}{number}{_TEXT_END}"


def _bool_xml(value: bool) -> str:
    return f'<c t="b"><v>{value:d}{_NUMBER_END}'


_CELLS: dict[type, Callable[..., str]] = {
    str: _text_xml,
    float: _float_xml,
    bool: _bool_xml,
    int: _int_xml,
    type(None): lambda _: _BLANK,
}


def _head(columns: Sequence[str], batch: Sequence[Row]) -> bytes:
    """The sheet up to its rows: widths from the header and the first rows, and the header, which stays in sight."""
    widths = [len(column) + _FILTER_ARROW for column in columns]
    for cells, _ in batch:
        widths = [max(width, len(str(cell))) for width, cell in zip(widths, cells, strict=False)]
    shown = "".join(
        f'<col min="{at}" max="{at}" width="{max(_NARROWEST, min(width + 1, _WIDEST))}" customWidth="1"/>'
        for at, width in enumerate(widths, 1)
    )
    cells_xml = "".join(map(_text_xml, columns)).replace("<c", f'<c s="{HEADER}"')
    return (
        f'{XML}<worksheet xmlns="{MAIN}"><sheetViews><sheetView workbookViewId="0"><pane ySplit="1" topLeftCell="A2"'
        ' activePane="bottomLeft" state="frozen"/></sheetView></sheetViews><sheetFormatPr defaultRowHeight="15"/>'
        + (f"<cols>{shown}</cols>" if shown else "")
        + f'<sheetData><row r="1">{cells_xml}</row>'
    ).encode()


def _foot(columns: int, last_row: int) -> bytes:
    filtered = f'<autoFilter ref="A1:{_letters(columns)}{last_row}"/>' if columns else ""
    return f"</sheetData>{filtered}</worksheet>".encode()


def _letters(column: int) -> str:
    letters = ""
    while column:
        column, digit = divmod(column - 1, 26)
        letters = chr(ord("A") + digit) + letters
    return letters
