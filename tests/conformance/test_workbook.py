"""What the manual says about the look of a result workbook, read by openpyxl."""

from __future__ import annotations

from pathlib import Path

import openpyxl

from ulpscope.report.table import Colour, Row, Sheet
from ulpscope.report.xlsx import write_xlsx


def test_003_070_marked_rows_are_filled_with_the_colours_of_the_peer(tmp_path: Path) -> None:
    rows: list[Row] = [(("a", 1.0), Colour.RED), (("b", None), Colour.YELLOW), (("c", 2.0), None)]
    write_xlsx(tmp_path / "a.xlsx", [Sheet("Sheet", ("NPU Name", "Cosine"), rows)])
    sheet = openpyxl.load_workbook(tmp_path / "a.xlsx")["Sheet"]
    fills = [[(cell.fill.patternType, cell.fill.fgColor.rgb) for cell in row] for row in sheet.iter_rows(min_row=2)]
    assert fills == [[("solid", "FFFF0000")] * 2, [("solid", "00FFFF00")] * 2, [(None, "00000000")] * 2]
