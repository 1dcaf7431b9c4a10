"""Tables and panels drawn with lines, as the older tools show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest


def boxed_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with a heavy head, its title in the middle above it."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    bars = ["━" * (width + 2) for width in widths]
    ends = ["─" * (width + 2) for width in widths]
    lines = [
        "┏" + "┳".join(bars) + "┓",
        _line(columns, widths, "┃"),
        "┡" + "╇".join(bars) + "┩",
        *(_line(row, widths, "│") for row in rows),
        "└" + "┴".join(ends) + "┘",
    ]
    return [title.center(len(lines[0])), *lines]


def beside(left: Sequence[str], right: Sequence[str]) -> Iterator[str]:
    """Two blocks of lines, one next to the other."""
    width = max(map(len, left), default=0)
    for one, other in zip_longest(left, right, fillvalue=""):
        yield f"{one:<{width}} {other}".rstrip()


def panel(lines: Sequence[str]) -> list[str]:
    """Lines in a box with round corners."""
    width = max(map(len, lines), default=0)
    bar = "─" * (width + 2)
    return [f"╭{bar}╮", *(f"│ {line:<{width}} │" for line in lines), f"╰{bar}╯"]


def _line(cells: Sequence[str], widths: Sequence[int], mark: str) -> str:
    return mark + mark.join(f" {cell:<{width}} " for cell, width in zip(cells, widths, strict=True)) + mark
