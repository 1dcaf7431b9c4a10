"""Reads one table from an xlsx workbook or a csv file, whoever wrote it; the sheets that continue the first belong to it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from ulpscope.model.errors import DumpError
from ulpscope.store.formats.xlsx_reader import Cell, Table, read_sheet, sheet_names


def read_table(path: Path) -> Table:
    """The header and the rows. Raises DumpError, as do the rows where the file breaks off."""
    return _csv_table(path) if path.suffix.lower() == ".csv" else _xlsx_table(path)


def _xlsx_table(path: Path) -> Table:
    names = sheet_names(path)
    if not names:
        raise DumpError(f"{path} has no sheet")
    columns, rows = read_sheet(path, names[0])

    def all_rows() -> Iterator[tuple[Cell, ...]]:
        yield from rows
        for number in count(2):
            name = f"{names[0]} ({number})"
            if name not in names:
                return
            yield from read_sheet(path, name)[1]

    return columns, all_rows()


def _csv_table(path: Path) -> Table:
    lines = _csv_lines(path)
    columns = next(lines, [])
    blanks = [""] * len(columns)
    return columns, (tuple(map(_cell, (line + blanks)[: len(columns)])) for line in lines if line)


def _csv_lines(path: Path) -> Iterator[list[str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from csv.reader(file, strict=True)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise DumpError(f"{path} is not a csv table: {error}") from error


def _cell(text: str) -> Cell:
    """A csv has no types: what reads like a finite number or a boolean is one."""
    if text in ("True", "False"):
        return text == "True"
    if not text[-1:].isdecimal() and text[-1:] != ".":
        return text or None
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text
