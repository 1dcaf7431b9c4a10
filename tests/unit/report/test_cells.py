"""Rows written by the extension are, byte for byte, those that Python writes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ulpscope.report.csv import _cell, _lines
from ulpscope.report.table import Cell, Colour, Row, Sheet
from ulpscope.report.xlsx import _STYLED, _cell_xml, _rows_xml

cells = pytest.importorskip("ulpscope.report._cells", reason="the C extension was not built")

WIDTH = 3
SHEET = Sheet("Sheet", ("a", "b", "c"), ())
_texts = st.one_of(
    st.text(max_size=6),
    st.text("a_x0+-=@,\"'&<> \n\t\r\x00\x7f", max_size=6),
    st.sampled_from(["_x0041_", "\ud800", "x" * 40_000, "-1.5%", "naïve"]),
)
_cells = st.one_of(_texts, st.floats(), st.integers(), st.booleans(), st.none())
_rows: st.SearchStrategy[list[Row]] = st.lists(
    st.tuples(st.tuples(*[_cells] * WIDTH), st.sampled_from([None, Colour.RED, Colour.YELLOW])), min_size=1, max_size=4
)


@given(_rows, st.integers(1, 1 << 40))
def test_rows_of_a_sheet_are_those_of_python(rows: list[Row], first: int) -> None:
    assert cells.sheet_rows(rows, first, WIDTH, _STYLED, _cell_xml) == _rows_xml(rows, first, SHEET)


@given(_rows)
def test_lines_of_csv_are_those_of_python(rows: list[Row]) -> None:
    assert cells.csv_rows(rows, WIDTH, _cell) == _lines([row for row, _ in rows])


def number_text(number: float) -> str:
    line: bytes = cells.csv_rows([((number,), None)], 1, _cell)
    return line.decode().removesuffix("\n")


@given(st.floats())
@example(-0.0)
@example(5e-324)
@example(2.0**-1022)
@example(1e16)
@example(1e23)
@example(0.0001)
@example(0.00001)
@example(9007199254740993.0)
def test_a_number_has_the_digits_of_repr(number: float) -> None:
    assert number_text(number) == repr(number)


@given(st.integers(0, (1 << 64) - 1))
def test_any_bits_of_a_number_have_the_digits_of_repr(bits: int) -> None:
    (number,) = struct.unpack("<d", bits.to_bytes(8, "little"))
    assert number_text(number) == repr(number)


def test_powers_of_two_and_of_ten_have_the_digits_of_repr() -> None:
    numbers = [2.0**power for power in range(-1074, 1024)] + [10.0**power for power in range(-323, 309)]
    assert [number_text(number) for number in numbers] == list(map(repr, numbers))


@pytest.mark.parametrize("row", [(), ("a",), ("a", "b", "c", "d"), ["a", "b", "c"]])
def test_rows_of_another_width_or_kind_are_left_to_python(row: list[Cell]) -> None:
    rows = [(("a", 1.0, None), None), (row, None)]
    assert cells.sheet_rows(rows, 1, WIDTH, _STYLED, _cell_xml) is None
    assert cells.csv_rows(rows, WIDTH, _cell) is None


def test_what_is_no_cell_is_an_error() -> None:
    with pytest.raises(TypeError, match="a cell holds"):
        cells.sheet_rows([((1j, "", ""), None)], 1, WIDTH, _STYLED, _cell_xml)
