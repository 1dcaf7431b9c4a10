"""Says which seed features have a conformance test and which have none.

The features are the rows of `tests/conformance/rows.tsv`. A test names the rows it serves: `test_000_069_words` serves 000-069,
`test_000_040_041_words` serves 000-040 and 000-041. Every three-digit group that follows the first one is a row of the same
generation, so the words must not begin with three digits. The tests are read, never imported or run.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONFORMANCE = Path(__file__).resolve().parent.parent / "tests" / "conformance"
TEST_NAME = re.compile(r"test_(?P<generation>\d{3})(?P<numbers>(?:_\d{3})+)(?:_|$)")


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    title: str
    stage: str


def read_rows(path: Path) -> list[Row]:
    """The rows of the table, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def row_ids(test_name: str) -> list[str]:
    """The rows that a test of this name serves; none if the name has another form."""
    found = TEST_NAME.match(test_name)
    if not found:
        return []
    return [f"{found['generation']}-{number}" for number in found["numbers"].strip("_").split("_")]


def tests_in(source: str) -> list[str]:
    """The names of the test functions and methods in one module, in the order of the text."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [node.name for node in sorted(functions, key=lambda node: node.lineno) if node.name.startswith("test_")]


def tests_by_row(paths: Iterable[Path]) -> dict[str, list[str]]:
    """For every row id that a test names, `file::test` of each such test."""
    served: dict[str, list[str]] = {}
    for path in paths:
        for name in tests_in(path.read_text(encoding="utf-8")):
            for row_id in row_ids(name):
                served.setdefault(row_id, []).append(f"{path.name}::{name}")
    return served


def render(rows: Sequence[Row], served: Mapping[str, Sequence[str]], *, missing_only: bool = False) -> list[str]:
    """The report: per stage its counts and its rows, then the total."""
    lines: list[str] = []
    for stage in dict.fromkeys(row.stage for row in rows):
        members = [row for row in rows if row.stage == stage]
        tested = sum(row.id in served for row in members)
        lines.append(f"{stage}: {tested} of {len(members)} rows have a test, {len(members) - tested} have none")
        for row in members:
            if row.id not in served:
                lines.append(f"  - {row.id}  {row.title}")
            elif not missing_only:
                lines.append(f"  + {row.id}  {row.title}  [{', '.join(served[row.id])}]")
    tested = sum(row.id in served for row in rows)
    lines.append(f"total: {tested} of {len(rows)} rows have a test, {len(rows) - tested} have none")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Say which seed features have a conformance test and which have none.")
    parser.add_argument("--missing", action="store_true", help="list only the rows that have no test")
    options = parser.parse_args(arguments)
    rows = read_rows(CONFORMANCE / "rows.tsv")
    served = tests_by_row(sorted(CONFORMANCE.glob("test_*.py")))
    print("\n".join(render(rows, served, missing_only=options.missing)))
    for row_id in sorted(served.keys() - {row.id for row in rows}):
        print(f"rows.tsv has no row {row_id}, named by {', '.join(served[row_id])}; correct the name", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
