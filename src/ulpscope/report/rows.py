"""Comparisons as rows of our own table: one function a column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from ulpscope.compare.comparison import CallComparison, Comparison, Level
from ulpscope.compare.metrics import METRICS
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Value
from ulpscope.report.table import Cell, Colour, Row

_COLOURS = {Level.FAIL: Colour.RED, Level.UNMATCHED: Colour.YELLOW, Level.UNKNOWN: Colour.YELLOW}


def rows_of(calls: Iterable[CallComparison]) -> Iterator[Row]:
    """A row for each value, coloured by its verdict."""
    for call in calls:
        for each in call.values:
            yield [column(each) for column in COLUMNS.values()], _COLOURS.get(each.verdict.level)


def _name(each: Comparison, side: str) -> str:
    call = getattr(each.match, side)
    return "" if call is None else call_text(call.id)


def _shape(value: Value | None) -> str:
    if value is None:
        return ""
    return str(list(value.shape)) if value.shape is not None else repr(value.scalar)


def _dtype(value: Value | None) -> str:
    return "" if value is None else (value.dtype or value.type).removeprefix("torch.")


def _ratio(each: Comparison) -> float | None:
    return each.error / each.rounding if each.error is not None and each.rounding else None


def _metric(name: str) -> Callable[[Comparison], Cell]:
    measure = METRICS[name]

    def column(each: Comparison) -> Cell:
        if each.contrast is None:
            return None
        found = measure(each.contrast)
        return None if math.isnan(found) else found

    return column


COLUMNS: dict[str, Callable[[Comparison], Cell]] = {
    "order": lambda each: each.match.call.seq,
    "call": lambda each: call_text(each.match.call.id),
    "value": lambda each: slot_text(each.slot),
    "module": lambda each: each.match.call.module,
    "verdict": lambda each: each.verdict.level.value,
    "why": lambda each: ", ".join(
        [code.value for code in each.verdict.codes] + [each.verdict.text] * bool(each.verdict.text)
    ),
    "error": lambda each: each.error,
    "error / round-off": _ratio,
    "evidence": lambda each: each.evidence.value,
    **{name.replace("_", " "): _metric(name) for name in METRICS},
    "reference dtype": lambda each: _dtype(each.reference),
    "target dtype": lambda each: _dtype(each.target),
    "reference shape": lambda each: _shape(each.reference),
    "target shape": lambda each: _shape(each.target),
    "reference call": lambda each: _name(each, "reference"),
    "matched by": lambda each: each.match.how.value,
}
