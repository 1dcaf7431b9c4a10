"""The xlsx reader, on workbooks made by openpyxl, by ourselves and by hand."""

from __future__ import annotations

import zipfile
from pathlib import Path

import openpyxl
import pytest

from ulpscope.model.errors import DumpError
from ulpscope.report.csv import write_csv
from ulpscope.report.table import Sheet
from ulpscope.report.xlsx import write_xlsx
from ulpscope.store.formats.table_reader import read_table
from ulpscope.store.formats.xlsx_reader import Cell, read_sheet, sheet_names

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
LINKS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
WORKBOOK = (
    f'<workbook xmlns="{MAIN}" xmlns:r="{LINKS}"><sheets><sheet name="S" sheetId="1" r:id="rId1"/></sheets></workbook>'
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    f'<Relationship Id="rId1" Type="{LINKS}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>'
)


def by_hand(path: Path, rows: str, **parts: str) -> Path:
    """A workbook whose sheet has these rows; `parts` replaces or adds whole parts."""
    content = {
        "xl/workbook.xml": WORKBOOK,
        "xl/_rels/workbook.xml.rels": RELATIONS,
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{MAIN}"><sheetData>{rows}</sheetData></worksheet>',
        **parts,
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return path


def table(path: Path, name: str | None = None) -> list[tuple[Cell, ...]]:
    columns, rows = read_sheet(path, name)
    return [tuple(columns), *rows]


def of_openpyxl(path: Path, *rows: tuple[object, ...]) -> Path:
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    book.save(path)
    return path


def test_a_workbook_of_openpyxl(tmp_path: Path) -> None:
    rows = (("name", "n"), ("x & <y>", 0.1), ("x & <y>", 7), (None, True), (" é ", "N/A"))
    assert table(of_openpyxl(tmp_path / "a.xlsx", *rows)) == list(rows)


def test_shared_strings_are_looked_up(tmp_path: Path) -> None:
    strings = (
        f'<sst xmlns="{MAIN}"><si><t>name</t></si><si><r><t>a </t></r><r><t>_x000D_b</t></r></si><si><t/></si></sst>'
    )
    rows = "".join(f'<row><c t="s"><v>{at}</v></c></row>' for at in (0, 1, 2, 1))
    path = by_hand(tmp_path / "a.xlsx", rows, **{"xl/sharedStrings.xml": strings})
    assert table(path) == [("name",), ("a \rb",), (None,), ("a \rb",)]


def test_a_workbook_of_openpyxl_written_row_by_row(tmp_path: Path) -> None:
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("only")
    sheet.append(["a", "b"])
    sheet.append(["text", -1e-300])
    book.save(tmp_path / "a.xlsx")
    assert table(tmp_path / "a.xlsx") == [("a", "b"), ("text", -1e-300)]


@pytest.mark.parametrize("text", ["_x0041_", "a\x00b", "a\rb", "tail ", "two\nlines", "a\ttab", "=1+1", "<&>", "𝕏"])
def test_what_we_write_is_what_we_read(tmp_path: Path, text: str) -> None:
    cells = (text, 0.1 + 0.2, 3, True, None, "nan")
    write_xlsx(tmp_path / "a.xlsx", [Sheet("S", list("abcdef"), [(cells, None)])])
    assert table(tmp_path / "a.xlsx")[1] == cells


def test_sheets_are_named_in_order_and_chosen_by_name(tmp_path: Path) -> None:
    write_xlsx(tmp_path / "a.xlsx", [Sheet(name, ("v",), [((name,), None)]) for name in ("Max diff", "b & c")])
    assert sheet_names(tmp_path / "a.xlsx") == ["Max diff", "b & c"]
    assert table(tmp_path / "a.xlsx", "b & c") == [("v",), ("b & c",)]
    with pytest.raises(DumpError, match="no sheet 'x'; it has 'Max diff', 'b & c'"):
        read_sheet(tmp_path / "a.xlsx", "x")


def test_cells_stand_where_their_references_say(tmp_path: Path) -> None:
    rows = '<row r="1"><c r="A1"><v>1</v></c><c r="C1"><v>3</v></c></row><row r="9"><c r="B9"><v>2.5</v></c></row>'
    assert table(by_hand(tmp_path / "a.xlsx", rows)) == [("1", "", "3"), (None, 2.5, None)]


def test_runs_of_a_rich_text_are_one_text_without_its_reading_aid(tmp_path: Path) -> None:
    rows = (
        '<row><c t="inlineStr"><is><t>h</t></is></c></row>'
        '<row><c t="inlineStr"><is><r><t>东</t></r><r><t>京</t></r><rPh sb="0" eb="1"><t>x</t></rPh></is></c></row>'
    )
    assert table(by_hand(tmp_path / "a.xlsx", rows)) == [("h",), ("东京",)]


def test_a_formula_is_what_it_last_came_to(tmp_path: Path) -> None:
    rows = "<row><c><v>0</v></c></row><row><c><f>SUM(1,2)</f><v>3</v></c></row>"
    assert table(by_hand(tmp_path / "a.xlsx", rows))[1:] == [(3,)]


def test_namespaces_with_a_prefix_are_understood(tmp_path: Path) -> None:
    sheet = (
        f'<x:worksheet xmlns:x="{MAIN}"><x:sheetData><x:row><x:c><x:v>5</x:v></x:c></x:row></x:sheetData></x:worksheet>'
    )
    assert table(by_hand(tmp_path / "a.xlsx", "", **{"xl/worksheets/sheet1.xml": sheet})) == [("5",)]


def test_an_absolute_link_to_a_sheet_is_understood(tmp_path: Path) -> None:
    links = RELATIONS.replace("worksheets/sheet1.xml", "/xl/worksheets/sheet1.xml")
    path = by_hand(tmp_path / "a.xlsx", "<row><c><v>5</v></c></row>", **{"xl/_rels/workbook.xml.rels": links})
    assert table(path) == [("5",)]


ENTITY = '<!DOCTYPE x [<!ENTITY a "aaaa">]>'
BAD_SHEETS = {
    "document type": (ENTITY + f'<worksheet xmlns="{MAIN}"/>', "declares a document type"),
    "cut": (f'<worksheet xmlns="{MAIN}"><sheetData><row>', "not well-formed"),
    "number": (f'<worksheet xmlns="{MAIN}"><row><c><v>x</v></c></row></worksheet>', "type 'n' with 'x'"),
    "string": (f'<worksheet xmlns="{MAIN}"><row><c t="s"><v>5</v></c></row></worksheet>', "type 's' with '5'"),
    "far column": (f'<worksheet xmlns="{MAIN}"><row><c r="ZZZZ1"/></row></worksheet>', "column 'ZZZZ'"),
    "backwards": (f'<worksheet xmlns="{MAIN}"><row><c r="B1"/><c r="A1"/></row></worksheet>', "backwards"),
    "wide": (f'<worksheet xmlns="{MAIN}"><row>{"<c/>" * 16385}</row></worksheet>', "more than 16384 cells"),
    "long": (
        f'<worksheet xmlns="{MAIN}"><row><c><v>{"1" * 2_000_000}</v></c></row></worksheet>',
        "a text of more than",
    ),
}


@pytest.mark.parametrize(("sheet", "message"), BAD_SHEETS.values(), ids=list(BAD_SHEETS))
def test_a_bad_sheet_is_one_clear_error(tmp_path: Path, sheet: str, message: str) -> None:
    path = by_hand(tmp_path / "a.xlsx", "", **{"xl/worksheets/sheet1.xml": sheet})
    with pytest.raises(DumpError, match=message):
        table(path)


def test_a_sheet_that_would_grow_out_of_proportion_is_not_read(tmp_path: Path) -> None:
    blank = f'<worksheet xmlns="{MAIN}"><sheetData>{" " * (65 << 20)}</sheetData></worksheet>'
    path = by_hand(tmp_path / "a.xlsx", "", **{"xl/worksheets/sheet1.xml": blank})
    with pytest.raises(DumpError, match="times what is stored"):
        table(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up.xml", "xl\\..\\up.xml"])
def test_a_part_with_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    path = by_hand(tmp_path / "a.xlsx", "<row/>", **{name: "x"})
    with pytest.raises(DumpError, match="a part named"):
        table(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a zip at all"])
def test_what_is_no_workbook_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.xlsx").write_bytes(content)
    with pytest.raises(DumpError, match="is not a whole xlsx workbook"):
        table(tmp_path / "a.xlsx")


def test_a_zip_without_a_workbook_says_what_is_missing(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as archive:
        archive.writestr("readme.txt", "x")
    with pytest.raises(DumpError, match=r"no part xl/workbook\.xml"):
        table(tmp_path / "a.xlsx")


def test_damage_in_the_middle_is_one_clear_error(tmp_path: Path) -> None:
    rows = [((f"n{number}", number / 7), None) for number in range(5000)]
    write_xlsx(tmp_path / "a.xlsx", [Sheet("S", ("a", "b"), rows)])
    content = bytearray((tmp_path / "a.xlsx").read_bytes())
    content[2000:2100] = bytes(100)
    (tmp_path / "a.xlsx").write_bytes(content)
    with pytest.raises(DumpError, match=r"a\.xlsx"):
        table(tmp_path / "a.xlsx")


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    for name in ("a.xlsx", "a.csv"):
        with pytest.raises(DumpError, match="No such file"):
            list(read_table(tmp_path / name)[1])


def test_a_table_goes_on_in_the_sheets_that_continue_it(tmp_path: Path) -> None:
    rows = [((number,), None) for number in range(25)]
    write_xlsx(tmp_path / "a.xlsx", [Sheet("S", ("n",), rows), Sheet("other", ("n",), rows)], max_rows=11)
    columns, found = read_table(tmp_path / "a.xlsx")
    assert (columns, [row[0] for row in found]) == (["n"], list(range(25)))


def test_a_csv_table_has_numbers_booleans_and_texts(tmp_path: Path) -> None:
    cells = ("Distributed.all_reduce.0", 1e-07, -3, True, None, "N/A", "12.5%", "[0, 1]", "nan")
    write_csv(tmp_path / "a.csv", list("abcdefghi"), [(cells, None)])
    columns, rows = read_table(tmp_path / "a.csv")
    assert (columns, list(rows)) == (list("abcdefghi"), [cells])
