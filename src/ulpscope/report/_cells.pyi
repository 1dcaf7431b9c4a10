from collections.abc import Callable

from ulpscope.report.table import Cell, Colour, Row

def sheet_rows(
    rows: list[Row], first: int, width: int, styles: dict[Colour, str], other: Callable[[Cell], str], /
) -> bytes | None: ...
def csv_rows(rows: list[Row], width: int, other: Callable[[Cell], str], /) -> bytes | None: ...
