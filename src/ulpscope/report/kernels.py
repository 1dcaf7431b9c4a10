"""The table that CANN's kernel comparison writes: one row a tensor, numbers with six decimals, `NaN` for what is not known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ulpscope.compare.kernels import Measured, TensorPair
from ulpscope.compare.metrics import METRICS, Contrast
from ulpscope.report.table import Cell, Row
from ulpscope.store.tensor_folder import FoundTensor

COLUMNS = (
    "Index",
    "OpType",
    "NPUDump",
    "DataType",
    "Address",
    "GroundTruth",
    "DataType",
    "Address",
    "TensorIndex",
    "Shape",
    "CosineSimilarity",
    "MaxAbsoluteError",
    "AccumulatedRelativeError",
    "RelativeEuclideanDistance",
    "KullbackLeiblerDivergence",
    "StandardDeviation",
    "MeanAbsoluteError",
    "RootMeanSquareError",
    "MaxRelativeError",
    "MeanRelativeError",
    "CompareFailReason",
)
_UNKNOWN = "NaN"
_MEASURES = 10


def kernel_rows(pairs: Iterable[TensorPair]) -> Iterator[Row]:
    """The rows of the table, below COLUMNS."""
    for index, pair in enumerate(pairs):
        yield [index, *_cells(pair)], None


def _cells(pair: TensorPair) -> list[Cell]:
    name, slot = pair.key
    either = pair.target or pair.reference
    return [
        (either.op_type if either else "") or _UNKNOWN,
        *_side(name, pair.target, pair.dtypes[1]),
        *_side(name, pair.reference, pair.dtypes[0]),
        f"{name}:{slot.replace('.', ':')}" if slot else name,
        str(list(pair.shape)) if pair.shape is not None else _UNKNOWN,
        *(_measures(pair.measured) if pair.measured is not None else [_UNKNOWN] * _MEASURES),
        pair.reason or (_lost(pair.measured.contrast) if pair.measured is not None else ""),
    ]


def _side(name: str, found: FoundTensor | None, dtype: str) -> list[Cell]:
    if found is None:
        return [_UNKNOWN] * 3
    address = found.address
    return [name, dtype or _UNKNOWN, _UNKNOWN if address is None else address]


def _measures(measured: Measured) -> list[Cell]:
    c = measured.contrast
    reference, target = (f"({_three(mean)};{_three(deviation)})" for mean, deviation in measured.spread)
    accumulated = math.inf if c.max_relative == math.inf else c.relative_sum
    return [
        _six(METRICS["cosine"](c)),
        _six(METRICS["max_abs_error"](c)),
        _six(accumulated if c.finite else math.nan),
        _six(METRICS["relative_l2"](c)),
        _six(measured.divergence),
        f"{target},{reference}",
        _six(c.abs_sum / c.finite if c.finite else math.nan),
        _six(METRICS["rmse"](c)),
        _six(METRICS["max_relative_error"](c)),
        _six(METRICS["mape"](c)),
    ]


def _lost(c: Contrast) -> str:
    lost = c.count - c.finite
    if not lost:
        return ""
    where = "at the same places on both sides" if c.same_places else "not at the same places"
    return f"{lost} of {c.count} elements are not finite, {where}; they are left out"


def _six(number: float) -> str:
    return _UNKNOWN if math.isnan(number) else f"{number:.6f}"


def _three(number: float) -> str:
    # A zero has no sign here.
    return f"{round(number, 3) + 0.0:.3f}"
