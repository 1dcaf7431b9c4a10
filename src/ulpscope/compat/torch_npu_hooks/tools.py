"""torch_npu.hooks.tools: compare. Two files in, a csv table out. Imports no framework.

    Cosine    sum(a b) / (|a| |b|), where the manual's formula lacks a square; nan if one side is all zero
    RMSE      sqrt(mean((a - b)^2))
    MAPE      mean(|a - b| / |b|), a plain number; inf where only b is 0

a is the first file, b the second. Sampled lines are compared as they stand, max, min and mean among the numbers.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ulpscope.compare import metrics
from ulpscope.compare.runs import warn_of_one
from ulpscope.compare.sequence import paired_in_order
from ulpscope.compat.first_wrong import NOTHING_COMPARED
from ulpscope.compat.torch_npu_hooks.steps import ArgumentError, step_schedule
from ulpscope.model.dtypes import Array
from ulpscope.model.records import CallRecord, Value
from ulpscope.report.csv import write_csv
from ulpscope.report.table import Cell, Row
from ulpscope.store.dump import Dump
from ulpscope.store.formats.hooks_writer import is_held, numbers_of
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)
COLUMNS = (
    "Name",
    "Npu Tensor Dtype",
    "Bench Tensor Dtype",
    "Npu Tensor Shape",
    "Bench Tensor Shape",
    "Cosine",
    "RMSE",
    "MAPE",
)
_NO_NUMBERS = ("cannot be calculated",) * 3


def compare(pkl_path1: str, pkl_path2: str, output_path: str, shape_flag: bool = False) -> None:
    """Compares two dumps call by call and writes a csv file; a call that the other side has not is left out.

    Calls are the same if their names are, with `shape_flag` if their sizes are too. ArgumentError for a file that is not
    there; DumpError for one that cannot be read.
    """
    step_schedule.settle()
    for path in (pkl_path1, pkl_path2):
        if not Path(path).exists():
            raise ArgumentError(f"{path} does not exist; give a file that set_dump_path named")
    target, reference = open_dump(pkl_path1), open_dump(pkl_path2)
    warn_of_one(reference.folder, target.folder)
    rows = Counter[str]()
    write_csv(Path(output_path), COLUMNS, _counted(_rows(reference, target, sizes=bool(shape_flag)), rows))
    _log.info("The comparison result is saved in: %s", output_path)
    if not rows["with numbers"]:
        _log.error("%s: %s", output_path, NOTHING_COMPARED)


def _counted(found: Iterator[Row], rows: Counter[str]) -> Iterator[Row]:
    for row in found:
        rows["with numbers"] += row[0][-1] != _NO_NUMBERS[-1]
        yield row


def _rows(reference: Dump, target: Dump, *, sizes: bool) -> Iterator[Row]:
    for theirs, ours in paired_in_order(reference, target, sizes=sizes):
        found = {value.slot: value for value in _held(reference.nth(theirs))}
        for value in _held(target.nth(ours)):
            other = found.get(value.slot)
            if other is not None:
                yield _row(reference, target, other, value), None


def _held(call: CallRecord) -> list[Value]:
    return [value for value in call.values if value.is_tensor]


def _row(reference: Dump, target: Dump, theirs: Value, ours: Value) -> tuple[Cell, ...]:
    shapes = [str(list(value.shape or ())) for value in (ours, theirs)]
    return (
        str(ours.extra.get("name", "")),
        ours.dtype,
        theirs.dtype,
        *shapes,
        *_metrics(reference, target, theirs, ours),
    )


def _metrics(reference: Dump, target: Dump, theirs: Value, ours: Value) -> tuple[Cell, ...]:
    a, b = _vector(target, ours), _vector(reference, theirs)
    if ours.shape != theirs.shape or a is None or b is None or len(a) != len(b):
        return _NO_NUMBERS
    found = metrics.contrast(b, a)
    if not found.same_places:
        return (math.nan,) * 3
    return metrics.cosine(found), metrics.rmse(found), metrics.mape(found)


def _vector(dump: Dump, value: Value) -> Array | None:
    """The numbers of a line; of another tool's dump those that a line would have, and None where it cannot have any."""
    line = dump.sample(value)
    if line is not None or not is_held(value):
        return line
    return numbers_of(dump, value, sample=True)
