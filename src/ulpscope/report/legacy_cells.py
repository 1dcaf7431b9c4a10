"""The cells of one row of an older tool's table, by what the table rests on: elements, statistics or checksums.

A row is two sides and what was found between them. Nothing here is kept from row to row but the texts of shapes: a table
has millions of rows.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ulpscope.compare import metrics
from ulpscope.compare.comparison import Code, Comparison
from ulpscope.compare.metrics import Contrast
from ulpscope.compare.rules import (
    Kind,
    Marked,
    Metric,
    Number,
    Result,
    Statistics,
    Unmeasured,
    accuracy,
    checksum_result,
    floored_error,
    nan_on_one_side,
    relative_error,
    statistics_result,
)
from ulpscope.model.records import CallId, Phase, Role, Slot, Value
from ulpscope.report.table import Cell

NOT_THERE, NOT_A_NUMBER, NO_FILE = "N/A", "Nan", "-1"

NEED_CHECK = "Need double check api accuracy."
FUZZY = "Fuzzy matching data, the comparison accuracy may be affected."
UNREADABLE = "Dump file: {} not found or read failed."
NO_BENCH = "No bench data matched."
NO_NPU_FILE = "NPU does not have data file."
NO_BENCH_FILE = "Bench does not have data file."
UNMATCHED = "Bench api/module unmatched."
EMPTY = "This is empty data, can not compare."
SHAPES = "Shape of NPU and bench Tensor do not match. Skipped."
POSITIONS = "The Position of inf or nan in NPU and bench Tensor do not match."
ZERO_D = (
    "This is type of 0-d tensor, can not calculate 'Cosine', 'EucDist', 'One Thousandth Err Ratio' and "
    "'Five Thousandths Err Ratio'."
)
DTYPES = "Dtype of NPU and bench Tensor do not match."
GRADIENTS = "Requires_grad inconsistent."
# These are the tool's own; the manual does not list them.
ONE_ELEMENT = "This is a 1-d tensor of length 1."
ALL_ZERO_NPU = "Cannot compare by Cosine Similarity, All the data is Zero in npu dump data."
ALL_ZERO_BENCH = "Cannot compare by Cosine Similarity, All the data is Zero in Bench dump data."
NOT_FINITE = (
    "Cannot compare by MaxAbsError, the data contains nan/inf/-inf in dump data.",
    "Cannot compare by MaxRelativeError, the data contains nan/inf/-inf in dump data.",
)

_UNKNOWN: Statistics = (None, None, None, None)
_MISSING = (NOT_THERE,) * 4
_WORDS: dict[object, str] = {True: "True", False: "False", None: NOT_THERE}
_SCALARS = {name: f"<class '{name}'>" for name in ("int", "float", "bool", "str", "NoneType")}
_LARGEST_INT = 1 << 64


class Side(NamedTuple):
    """What a row shows of one value. `numbers` are its four statistics where they are numbers, `shown` their cells."""

    name: str
    dtype: str
    shape: str
    gradient: str
    numbers: Statistics
    shown: tuple[Cell, ...]
    finite: bool
    stored: bool
    checksum: str | None
    value: Value

    @property
    def data_name(self) -> str:
        """The name of the file with its elements."""
        return f"{self.name}.pt" if self.stored else NO_FILE


class Cells(NamedTuple):
    """A row without its stack, and what the rules for marks look at."""

    before_stack: tuple[Cell, ...]
    after_stack: tuple[Cell, ...]
    ours: Side
    theirs: Side | None
    same_gradient: bool
    measured: tuple[Metric, ...] = ()

    def row(self, stack: str) -> tuple[Cell, ...]:
        """All cells of the row."""
        return self.before_stack + (stack,) + self.after_stack  # noqa: RUF005 - twice as quick as unpacking


# --- one side ---------------------------------------------------------------------------------------------------


def is_shown(value: Value) -> bool:
    """Whether a value has a row: an empty list and an unknown object have none."""
    return value.shape is not None or value.scalar is not None or value.type not in ("list", "object")


def side_of(call_name: str, call: CallId, value: Value, kind: Kind, like: Side | None = None) -> Side:
    """One side of a row. `like` is the other side where it has the same slot of a call of the same name: texts are shared."""
    stored = kind is Kind.ELEMENTS and (value.payload is not None or "missing" in value.extra)
    if like is not None and like.stored == stored:
        name = like.name
    else:
        name = _name(call_name, call, value.slot, stored=stored)
    shown: tuple[Cell, ...]
    if value.shape is None:
        dtype, shape, content = _scalar(value)
        numbers = _UNKNOWN if _is_no_number(content) else (content,) * 4
        checksum = None
        if kind is Kind.CHECKSUMS:
            checksum = NOT_THERE if dtype == "None" else _text_checksum(value, content)
        shown = (_cell(content),) * 4
        return Side(name, dtype, shape, NOT_THERE, numbers, shown, False, stored, checksum, value)
    stats = value.stats
    numbers = _UNKNOWN if stats is None else (stats.max, stats.min, stats.mean, stats.norm)
    dtype = value.dtype or NOT_THERE
    finite = False
    shown = numbers
    if dtype == "torch.bool":
        # The mean and norm of truth values are not said.
        shown = (*("None" if number is None else str(bool(number)) for number in numbers[:2]), "None", "None")
        numbers = _UNKNOWN
    elif None in numbers or not (finite := -math.inf < sum(numbers) < math.inf):  # type: ignore[arg-type]
        shown = tuple(map(_cell, numbers))
    checksum = None if value.checksum is None else f"{value.checksum:08x}"
    shape = like.shape if like is not None and like.value.shape == value.shape else _shape(value.shape)
    gradient = _WORDS[value.requires_grad]
    return Side(name, dtype, shape, gradient, numbers, shown, finite, stored, checksum, value)


@functools.lru_cache(1 << 12)
def _shape(shape: tuple[int, ...]) -> str:
    return str([*shape])


_ROLES = {role: role.value for role in Role}


def _name(call_name: str, call: CallId, slot: Slot, *, stored: bool) -> str:
    """The name of a value; a keyword argument with elements has that of its file, `kwargs.other`."""
    role, path = slot.role, slot.path
    if call.phase is Phase.DEBUG or call.phase is Phase.PARAMETERS_GRAD:
        # A value saved alone has the name it was saved under.
        alone = call.phase is Phase.DEBUG and path == (0,)
        return call_name if alone else ".".join([call_name, *map(str, path)])
    spelt = "kwargs" if stored and role is Role.INPUT and path and type(path[0]) is str else _ROLES[role]
    return f"{call_name}.{spelt}.{path[0] if len(path) == 1 else '.'.join(map(str, path))}"


def _scalar(value: Value) -> tuple[str, str, Any]:
    """How a value that is no tensor is shown: type, shape, and what stands for its statistics."""
    content = value.scalar
    if value.type == "NoneType":
        return "None", "None", None
    if value.type == "float" and isinstance(content, str):
        content = float(content)
    if value.type in _SCALARS:
        return _SCALARS[value.type], "[]", content
    if value.type == "slice" and isinstance(content, list):
        return "slice", f"({len(content)},)", None
    if value.type == "torch.Size" and isinstance(content, list):
        return "torch.Size", str(content), None
    if isinstance(content, dict):
        ranks = content.get("group_ranks")
        return (_SCALARS["NoneType"], "[]", None) if ranks is None else (value.type, "[]", str(ranks))
    if isinstance(content, list):
        content = str(content)
    return f"<class '{type(content).__name__}'>", "[]", content


def _text_checksum(value: Value, content: Any) -> str:
    """Checksums of values that are no tensors are those of their texts; a group of ranks is shown as it is."""
    if isinstance(value.scalar, dict) and content is not None:
        return str(content)
    hashed = "" if isinstance(value.scalar, dict) else value.scalar if isinstance(value.scalar, list) else content
    return f"{zlib.crc32(str(hashed).encode()):08x}"


def _is_no_number(content: Any) -> bool:
    return type(content) not in (int, float) or (type(content) is int and abs(content) >= _LARGEST_INT)


def _cell(content: Any) -> Cell:
    if content is None or isinstance(content, bool):
        return str(content)
    if isinstance(content, float) and content != content:
        return NOT_A_NUMBER
    return content if isinstance(content, str | int | float) else str(content)


# --- two sides --------------------------------------------------------------------------------------------------


def _common(ours: Side, theirs: Side | None) -> tuple[Cell, ...]:
    if theirs is None:
        other = NOT_THERE
        return (ours.name, other, ours.dtype, other, ours.shape, other, ours.gradient, other)
    return (
        ours.name,
        theirs.name,
        ours.dtype,
        theirs.dtype,
        ours.shape,
        theirs.shape,
        ours.gradient,
        theirs.gradient,
    )


def _same_gradient(ours: Side, theirs: Side | None) -> bool:
    return ours.gradient == (NOT_THERE if theirs is None else theirs.gradient)


def statistic_cells(comparison: Comparison, ours: Side, theirs: Side | None) -> Cells:
    """A row that rests on the four statistics."""
    same = _same_gradient(ours, theirs)
    said = "" if same else GRADIENTS
    if theirs is None:
        cells = (*_common(ours, None), *_MISSING, *_MISSING, *ours.shown, *_MISSING)
        message = f"{NO_BENCH} {said}" if said else NO_BENCH
        return Cells((*cells, _WORDS[same], _UNMATCHED, message), (), ours, None, same)
    if ours.finite and theirs.finite and 0 not in theirs.numbers:
        found, result = _of_finite(theirs.numbers, ours.numbers)  # type: ignore[arg-type]
    else:
        found, result = _of_any(theirs.numbers, ours.numbers)
    if result is Result.WARNING:
        said = f"{NEED_CHECK} {said}" if said else NEED_CHECK
    cells = _common(ours, theirs) + found + ours.shown + theirs.shown + (_WORDS[same], _RESULTS[result], said)
    return Cells(cells, (), ours, theirs, same)


def usual_statistic_row(
    names: tuple[str, str], calls: tuple[CallId, CallId], values: tuple[Value, Value], stack: str
) -> tuple[Cell, ...] | None:
    """The row that `statistic_cells` would make, at once, of two tensors of one shape with finite numbers that can be
    divided by; None for all others. Nearly all rows are such; target and reference, in this order."""
    ours, theirs = values
    shape, target, reference = ours.shape, ours.stats, theirs.stats
    if shape is None or shape != theirs.shape or target is None or reference is None:
        return None
    if ours.dtype == "torch.bool" or theirs.dtype == "torch.bool":
        return None
    t0, t1, t2, t3 = target.max, target.min, target.mean, target.norm
    r0, r1, r2, r3 = reference.max, reference.min, reference.mean, reference.norm
    try:
        if not (-math.inf < t0 + t1 + t2 + t3 < math.inf and -math.inf < r0 + r1 + r2 + r3 < math.inf):  # type: ignore[operator]
            return None
        d0, d1, d2, d3 = t0 - r0, t1 - r1, t2 - r2, t3 - r3  # type: ignore[operator]
        e0, e1, e2, e3 = abs(d0 / r0), abs(d1 / r1), abs(d2 / r2), abs(d3 / r3)  # type: ignore[operator]
    except (TypeError, ZeroDivisionError):
        return None
    result = statistics_result((e0, e1, e2, e3))
    same = ours.requires_grad is theirs.requires_grad
    said = "" if same else GRADIENTS
    if result is Result.WARNING:
        said = f"{NEED_CHECK} {said}" if said else NEED_CHECK
    name = _name(names[0], calls[0], ours.slot, stored=False)
    other = name
    if names[0] != names[1] or ours.slot is not theirs.slot:
        other = _name(names[1], calls[1], theirs.slot, stored=False)
    text = _shape(shape)
    return (
        name,
        other,
        ours.dtype or NOT_THERE,
        theirs.dtype or NOT_THERE,
        text,
        text,
        _WORDS[ours.requires_grad],
        _WORDS[theirs.requires_grad],
        d0,
        d1,
        d2,
        d3,
        f"{e0 * 100}%",
        f"{e1 * 100}%",
        f"{e2 * 100}%",
        f"{e3 * 100}%",
        t0,
        t1,
        t2,
        t3,
        r0,
        r1,
        r2,
        r3,
        _WORDS[same],
        _RESULTS[result],
        said,
        stack,
    )


def _of_finite(reference: tuple[Number, ...], target: tuple[Number, ...]) -> tuple[tuple[Cell, ...], Result]:
    """Differences and relative errors in percent where all numbers are finite and can be divided by: nearly all rows."""
    r0, r1, r2, r3 = reference
    t0, t1, t2, t3 = target
    d0, d1, d2, d3 = t0 - r0, t1 - r1, t2 - r2, t3 - r3
    e0, e1, e2, e3 = errors = (abs(d0 / r0), abs(d1 / r1), abs(d2 / r2), abs(d3 / r3))
    texts = (f"{e0 * 100}%", f"{e1 * 100}%", f"{e2 * 100}%", f"{e3 * 100}%")
    return (d0, d1, d2, d3) + texts, statistics_result(errors)  # noqa: RUF005


def _of_any(reference: Statistics, target: Statistics) -> tuple[tuple[Cell, ...], Result]:
    differences: list[Cell] = []
    percents: list[Cell] = []
    errors = list(map(relative_error, reference, target))
    for r, t, error in zip(reference, target, errors, strict=True):
        if r is None or t is None or error is None:
            differences.append(NOT_THERE)
            percents.append(NOT_THERE)
            continue
        difference = t - r
        differences.append(difference if difference == difference else NOT_A_NUMBER)
        percents.append(_percent(r, difference, error))
    result = Result.WARNING if nan_on_one_side(reference, target) else statistics_result(errors)
    return (*differences, *percents), result


def _percent(reference: Number, difference: Number, error: float) -> str:
    """A relative error as the tables write it: there is none for a reference of 0, and none for infinite numbers."""
    if difference != difference or reference in _INFINITE:
        return NOT_A_NUMBER
    return f"{error * 100}%" if reference else NOT_THERE


_RESULTS = {result: result.value for result in Result}
_UNMATCHED = _RESULTS[Result.UNMATCHED]
_INFINITE = (math.inf, -math.inf)


def checksum_cells(comparison: Comparison, ours: Side, theirs: Side | None) -> Cells:
    """A row that rests on checksums."""
    same = _same_gradient(ours, theirs)
    other = None if theirs is None else theirs.checksum
    result = checksum_result(other, ours.checksum)
    cells = (ours.checksum or NOT_THERE, other or NOT_THERE, _WORDS[same], _RESULTS[result])
    return Cells((*_common(ours, theirs), *cells), (), ours, theirs, same)


def element_cells(comparison: Comparison, ours: Side, theirs: Side | None) -> Cells:
    """A row that rests on all elements."""
    same = _same_gradient(ours, theirs)
    messages = [] if same else [GRADIENTS]
    data_name = str([ours.data_name, NOT_THERE if theirs is None else theirs.data_name])
    measured, why = _measured(comparison, ours, theirs, data_name)
    if theirs is None and not ours.stored:
        messages.insert(0, NO_BENCH)
    messages += why
    if theirs is not None and theirs.name != ours.name:
        messages.append(FUZZY)
    verdict = accuracy(measured[0], measured[2])
    cells = (
        *_common(ours, theirs),
        *map(_metric_cell, measured[:6]),
        *ours.shown,
        *(_MISSING if theirs is None else theirs.shown),
        _WORDS[same],
        verdict.value,
        " ".join(messages),
    )
    return Cells(cells, (data_name, *map(_metric_cell, measured[6:])), ours, theirs, same, measured)


_ALL_METRICS: tuple[Callable[[Contrast], float], ...] = (
    metrics.cosine,
    metrics.euclidean_distance,
    metrics.max_abs_error,
    metrics.max_relative_error,
    metrics.one_thousandth_ratio,
    metrics.five_thousandths_ratio,
    metrics.rmse,
    metrics.mape,
)
_EXACT = (metrics.euclidean_distance,)
_DECIMALS = 12


def _measured(
    comparison: Comparison, ours: Side, theirs: Side | None, data_name: str
) -> tuple[tuple[Metric, ...], list[str]]:
    """The metrics, or why there are none, and what to say of it."""
    reason = _why_not(comparison, ours, theirs, data_name)
    if reason is not None:
        kind, text = reason
        return (kind,) * len(_ALL_METRICS), [text]
    assert theirs is not None and comparison.contrast is not None
    contrast = comparison.contrast
    said = [] if ours.dtype == theirs.dtype else [DTYPES]
    if ours.value.shape == ():
        if not contrast.same_places:
            none, odd = Unmeasured.NO_ELEMENTS, Unmeasured.NOT_FINITE
            return (none, none, odd, odd, none, none, none, none), [ZERO_D, POSITIONS, *said]
        return _of_one_number(contrast), [ZERO_D, *(() if contrast.finite else NOT_FINITE), *said]
    if not contrast.same_places:
        return (Unmeasured.NOT_FINITE,) * len(_ALL_METRICS), [POSITIONS, *said]
    found: list[Metric] = []
    for metric in _ALL_METRICS:
        number = metric(contrast)
        found.append(number if metric in _EXACT or not math.isfinite(number) else round(number, _DECIMALS))
    if contrast.count == 1:
        found[0] = Unmeasured.NO_ELEMENTS
        said.append(ONE_ELEMENT)
    elif math.isnan(contrast.alignment) and found[0] != 1.0:
        said.append(ALL_ZERO_NPU if contrast.target_norm == 0.0 else ALL_ZERO_BENCH)
    elif isinstance(found[0], float) and found[0] > 0.9999:
        found[0] = round(found[0], 6)
    return tuple(found), said


def _why_not(comparison: Comparison, ours: Side, theirs: Side | None, data_name: str) -> tuple[Unmeasured, str] | None:
    if not ours.stored:
        return Unmeasured.NO_ELEMENTS, NO_NPU_FILE
    if theirs is None:
        return Unmeasured.NO_ELEMENTS, UNMATCHED
    if not theirs.stored:
        return Unmeasured.NO_ELEMENTS, NO_BENCH_FILE
    missing = any("missing" in side.value.extra for side in (ours, theirs))
    if missing or Code.UNREADABLE in comparison.verdict.codes:
        return Unmeasured.NO_ELEMENTS, UNREADABLE.format(data_name)
    if ours.value.shape != theirs.value.shape:
        return Unmeasured.SHAPE, SHAPES
    if 0 in (ours.value.shape or ()):
        return Unmeasured.NO_ELEMENTS, EMPTY
    return None if comparison.contrast is not None else (Unmeasured.NO_ELEMENTS, UNREADABLE.format(data_name))


def _of_one_number(contrast: Contrast) -> tuple[Metric, ...]:
    """A 0-d tensor has errors, and neither a direction nor shares."""
    errors = (metrics.max_abs_error(contrast), metrics.max_relative_error(contrast))
    absolute, relative = (
        round(error, _DECIMALS) if contrast.finite and math.isfinite(error) else error if contrast.finite else math.nan
        for error in errors
    )
    none = Unmeasured.NO_ELEMENTS
    return (none, none, absolute, relative, none, none, none, none)


def _metric_cell(metric: Metric) -> Cell:
    if isinstance(metric, Unmeasured):
        return metric.value
    return metric if metric == metric else NOT_A_NUMBER


# --- marks ------------------------------------------------------------------------------------------------------


def marked_by(comparison: Comparison, cells: Cells) -> Marked:
    """What the rules for marks look at in a row."""
    ours, theirs = cells.ours.numbers, _UNKNOWN if cells.theirs is None else cells.theirs.numbers
    largest, reference = ours[0], theirs[0]
    numbers = [metric if not isinstance(metric, Unmeasured) else None for metric in cells.measured]
    if cells.measured:
        error, cosine, ratio = numbers[2], numbers[0], numbers[4]
    else:
        error = None if largest is None or reference is None else abs(largest - reference)
        cosine = ratio = None
    return Marked(
        largest=largest,
        smallest=ours[1],
        error=error,
        # The table has no relative error where the reference is 0.
        relative=None if reference == 0 else relative_error(reference, largest),
        floored=floored_error(reference, largest),
        ratio=ratio,
        cosine=cosine,
        same_gradient=cells.same_gradient,
    )
