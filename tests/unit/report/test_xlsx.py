"""Tables on disk, read back by openpyxl and by the csv module of the standard library."""

from __future__ import annotations

import csv
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import openpyxl
import pytest
from openpyxl.worksheet.worksheet import Worksheet

from ulpscope.report.csv import write_csv
from ulpscope.report.table import Cell, Colour, Row, Sheet
from ulpscope.report.xlsx import MAX_TEXT, write_xlsx

COLUMNS = ("NPU Name", "Max diff", "Result")


def plain(*rows: tuple[Cell, ...]) -> list[Row]:
    return [(row, None) for row in rows]


def written(path: Path, rows: list[Row], columns: tuple[str, ...] = COLUMNS) -> Worksheet:
    write_xlsx(path, [Sheet("Sheet", columns, rows)])
    return openpyxl.load_workbook(path)["Sheet"]


def values(sheet: Worksheet) -> list[tuple[object, ...]]:
    return list(sheet.iter_rows(values_only=True))


def one_cell(path: Path, cell: Cell) -> object:
    return written(path, plain((cell,)), ("value",))["A2"].value


def csv_text(path: Path, rows: list[Row], columns: tuple[str, ...] = COLUMNS) -> str:
    write_csv(path, columns, rows)
    return path.read_bytes().decode()


def test_cells_come_back_with_their_values_and_types(tmp_path: Path) -> None:
    rows = plain(
        ("Functional.conv2d.0.forward.input.0", 0.1, "pass"), ("b", 3, None), ("c", True, "N/A"), ("d", "x", "")
    )
    assert values(written(tmp_path / "a.xlsx", rows)) == [
        COLUMNS,
        ("Functional.conv2d.0.forward.input.0", 0.1, "pass"),
        ("b", 3, None),
        ("c", True, "N/A"),
        ("d", "x", None),
    ]


@pytest.mark.parametrize("number", [0.1 + 0.2, 1e-300, -1.7976931348623157e308, 5e-324, -0.0, 2**53])
def test_a_number_keeps_every_digit(tmp_path: Path, number: float) -> None:
    assert repr(one_cell(tmp_path / "a.xlsx", number)).rstrip(".0") == repr(number).rstrip(".0")


def test_a_whole_number_that_a_spreadsheet_would_round_is_text(tmp_path: Path) -> None:
    assert one_cell(tmp_path / "a.xlsx", 2**53 + 1) == "9007199254740993"


def test_nan_and_inf_are_text(tmp_path: Path) -> None:
    rows = plain(*((number,) for number in (float("nan"), float("inf"), float("-inf"), 1.0)))
    assert [row[0] for row in values(written(tmp_path / "a.xlsx", rows, ("value",)))[1:]] == ["nan", "inf", "-inf", 1]


def test_a_column_of_large_numbers_whose_sum_overflows_keeps_them(tmp_path: Path) -> None:
    rows = plain((1.7e308,), (1.7e308,))
    assert values(written(tmp_path / "a.xlsx", rows, ("value",)))[1:] == [(1.7e308,), (1.7e308,)]


@pytest.mark.parametrize(
    "text",
    [
        "a & b",
        "<module>",
        "]]>",
        "trailing ",
        " leading",
        "two\nlines",
        "tab\there",
        "_xylophone",
        "中文 é",
        "𝕏",
    ],
)
def test_a_text_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    sheet = written(tmp_path / "a.xlsx", plain((text,), ("plain",)), (text,))
    assert values(sheet) == [(text,), (text,), ("plain",)]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", '=HYPERLINK("x")'])
def test_a_text_never_becomes_a_formula(tmp_path: Path, text: str) -> None:
    cell = written(tmp_path / "a.xlsx", plain((text,)), ("value",))["A2"]
    assert (cell.value, cell.data_type) != (text, "f")
    with zipfile.ZipFile(tmp_path / "a.xlsx") as archive:
        assert b"<f>" not in archive.read("xl/worksheets/sheet1.xml")


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a\x00b", b"a_x0000_b"),
        ("a\rb", b"a_x000D_b"),
        ("a\ud800b", b"a_xD800_b"),
        ("￿", b"_xFFFF_"),
        ("_x0041_", b"_x005F_x0041_"),
    ],
)
def test_what_xml_cannot_hold_or_would_unescape_is_escaped(tmp_path: Path, text: str, escaped: bytes) -> None:
    written(tmp_path / "a.xlsx", plain((text,)), ("value",))
    with zipfile.ZipFile(tmp_path / "a.xlsx") as archive:
        assert b"<t>" + escaped + b"</t>" in archive.read("xl/worksheets/sheet1.xml")


@pytest.mark.parametrize("text", ["x" * (MAX_TEXT + 1), "𝕏" * 20_000])
def test_a_text_that_no_cell_can_hold_is_cut_and_says_so(tmp_path: Path, text: str) -> None:
    found = one_cell(tmp_path / "a.xlsx", text)
    assert isinstance(found, str)
    assert len(found.encode("utf-16-le")) // 2 in (MAX_TEXT, MAX_TEXT - 1)
    assert found.endswith(f" ... (cut: {len(text)} characters)")


def test_the_longest_text_stays_whole(tmp_path: Path) -> None:
    assert one_cell(tmp_path / "a.xlsx", "x" * MAX_TEXT) == "x" * MAX_TEXT


def test_a_coloured_row_is_filled_from_its_first_cell_to_its_last_blank_ones_included(tmp_path: Path) -> None:
    rows: list[Row] = [(("a", 1.0, ""), None), (("b", 2.0, ""), Colour.RED), (("c", None, True), Colour.YELLOW)]
    sheet = written(tmp_path / "a.xlsx", rows)
    fills = [[cell.fill.fgColor.rgb if cell.fill.patternType else None for cell in row] for row in sheet.iter_rows()]
    assert fills[1:] == [[None] * 3, ["FFFF0000"] * 3, ["00FFFF00"] * 3]
    assert sheet["A3"].font.color.rgb == "FF000000"


def test_the_header_is_bold_stays_in_sight_and_filters(tmp_path: Path) -> None:
    sheet = written(tmp_path / "a.xlsx", plain(("a", 1.0, "x"), ("b", 2.0, "y")))
    assert [cell.font.b for cell in sheet[1]] == [True] * 3
    assert not sheet["A2"].font.b
    assert sheet.freeze_panes == "A2"
    assert sheet.auto_filter.ref == "A1:C3"


def test_columns_are_as_wide_as_what_they_hold_up_to_a_limit(tmp_path: Path) -> None:
    sheet = written(tmp_path / "a.xlsx", plain(("x" * 30, 1.0, "y" * 500)))
    assert [sheet.column_dimensions[letter].width for letter in "ABC"] == [31, 12, 60]


def test_a_table_without_rows_has_a_header(tmp_path: Path) -> None:
    assert values(written(tmp_path / "a.xlsx", [])) == [COLUMNS]


def test_rows_beyond_the_limit_go_on_in_another_sheet_and_that_is_said(tmp_path: Path) -> None:
    rows = plain(*((f"n{number}", number, "") for number in range(1300)))
    notes = write_xlsx(tmp_path / "a.xlsx", [Sheet("Sheet", COLUMNS, rows)], max_rows=601)
    book = openpyxl.load_workbook(tmp_path / "a.xlsx")
    assert book.sheetnames == ["Sheet", "Sheet (2)", "Sheet (3)"]
    assert [sheet.max_row for sheet in book] == [601, 601, 101]
    assert [sheet["A1"].value for sheet in book] == ["NPU Name"] * 3
    assert [row[0] for sheet in book for row in values(sheet)[1:]] == [f"n{number}" for number in range(1300)]
    assert len(notes) == 2
    assert "'Sheet (3)'" in notes[1]


def test_exactly_as_many_rows_as_fit_need_one_sheet(tmp_path: Path) -> None:
    assert write_xlsx(tmp_path / "a.xlsx", [Sheet("S", ("a",), plain(*((n,) for n in range(9))))], max_rows=10) == []
    assert openpyxl.load_workbook(tmp_path / "a.xlsx").sheetnames == ["S"]


def test_names_that_a_spreadsheet_refuses_are_made_fit_and_unique(tmp_path: Path) -> None:
    names = ["a/b", "A_B", "x" * 40, "x" * 40, "", 'q "&<']
    write_xlsx(tmp_path / "a.xlsx", [Sheet(name, ("v",), []) for name in names])
    found = openpyxl.load_workbook(tmp_path / "a.xlsx").sheetnames
    assert found == ["a_b", "A_B (2)", "x" * 31, "x" * 27 + " (2)", "Sheet", 'q "&<']


def test_the_same_table_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.xlsx", "b.xlsx"):
        written(tmp_path / name, plain(("a", 1.0, "x")))
    assert (tmp_path / "a.xlsx").read_bytes() == (tmp_path / "b.xlsx").read_bytes()


def broken_rows() -> Iterator[Row]:
    for number in range(1000):
        yield (f"n{number}", 1.0, "x"), None
    raise RuntimeError("the source broke")


def test_a_table_that_breaks_off_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a.xlsx", "a.csv"):
        (tmp_path / name).write_text("old")
    with pytest.raises(RuntimeError, match="the source broke"):
        write_xlsx(tmp_path / "a.xlsx", [Sheet("S", COLUMNS, broken_rows())])
    with pytest.raises(RuntimeError, match="the source broke"):
        write_csv(tmp_path / "a.csv", COLUMNS, broken_rows())
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "a.xlsx"]
    assert {(tmp_path / name).read_text() for name in ("a.xlsx", "a.csv")} == {"old"}


def test_a_file_of_the_same_name_is_replaced_and_missing_folders_are_made(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "a.xlsx"
    written(target, plain(("a", 1.0, "x")))
    assert values(written(target, plain(("b", 2.0, "y"))))[1] == ("b", 2, "y")


def test_a_row_of_another_length_than_the_header_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 cells of the header"):
        write_xlsx(tmp_path / "a.xlsx", [Sheet("S", COLUMNS, plain(("a", 1.0)))])
    with pytest.raises(ValueError, match="3 cells of the header"):
        write_csv(tmp_path / "a.csv", COLUMNS, plain(("a", 1.0)))


def test_a_cell_of_another_kind_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not list"):
        write_xlsx(tmp_path / "a.xlsx", [Sheet("S", ("a",), [(([1],), None)])])  # type: ignore[list-item]


def test_csv_quotes_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    rows = plain(("a", 0.1, "[8, 1]"), ('say "x"', 1e-07, "two\nlines"), ("c", None, True))
    assert csv_text(tmp_path / "a.csv", rows) == (
        'NPU Name,Max diff,Result\na,0.1,"[8, 1]"\n"say ""x""",1e-07,"two\nlines"\nc,,True\n'
    )


def test_csv_is_what_the_standard_library_would_write(tmp_path: Path) -> None:
    rows = plain(*((f"n,{n}" if n % 3 else f"n{n}", n / 7, n if n % 2 else "x") for n in range(700)))
    expected = io.StringIO(newline="")
    csv.writer(expected, lineterminator="\n").writerows([COLUMNS, *(cells for cells, _ in rows)])
    assert csv_text(tmp_path / "a.csv", rows) == expected.getvalue()


@pytest.mark.parametrize("text", ["=1+1", "+SUM(A1)", "-cmd|x", "@x", "\t=1"])
def test_csv_marks_a_text_that_a_spreadsheet_would_run(tmp_path: Path, text: str) -> None:
    assert csv_text(tmp_path / "a.csv", plain((text,), ("ordinary",)), ("v",)) == f"v\n'{text}\nordinary\n"


@pytest.mark.parametrize("text", ["-inf", "-1.5%", "+3", "-0.0", "nan", "inf\t"])
def test_csv_leaves_numbers_in_texts_alone(tmp_path: Path, text: str) -> None:
    assert csv_text(tmp_path / "a.csv", plain((text,)), ("v",)) == f"v\n{text}\n"


def test_csv_has_nan_and_inf_as_words(tmp_path: Path) -> None:
    rows = plain((float("nan"),), (float("-inf"),))
    assert csv_text(tmp_path / "a.csv", rows, ("v",)) == "v\nnan\n-inf\n"
