"""One tensor, or two side by side, as text and as JSON: numbers, the worst elements, how errors are distributed, where they sit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.compare.elements import RELATIVE_EDGES, ULP_EDGES, Element, Extent, Survey
from ulpscope.compare.kernels import TensorPair
from ulpscope.compare.metrics import METRICS, Contrast
from ulpscope.model.errors import DumpError
from ulpscope.report.table import replacing
from ulpscope.report.text import number, table_line
from ulpscope.store.tensor_file import StoredTensor
from ulpscope.store.tensor_folder import TensorFolder

_SHOWN = ("cosine", "relative_l2", "max_abs_error", "max_relative_error", "max_ulp_error", "mean_ulp_error", "rmse")
_BAR = 40
_WHOLE = 128
_WORST = (18, 16, 16, 11, 11, 0)
_DIGITS = {"float16": "%.5g", "float32": "%.9g", "float64": "%.17g"}
_PIECE = 1 << 16
# How a block of the map is drawn: by its largest error, as a part of the largest of all.
_SHADES = ((0.1, "#"), (0.01, "+"), (0.001, ":"), (0.0, "."))


# --- one tensor -------------------------------------------------------------------------------------------------


def tensor_lines(tensor: StoredTensor) -> Iterator[str]:
    """Type, shape, statistics and the elements; of a large tensor the first and last of its rows."""
    stats = tensor.stats()
    yield tensor.source
    yield f"  {tensor.dtype.name} {_shape(tensor.shape)}, {_many(stats.numel, 'element')}"
    if not stats.numel:
        return
    parts = (("max", stats.max), ("min", stats.min), ("mean", stats.mean), ("norm", stats.norm))
    yield "  " + "   ".join(f"{name} {number(value)}" for name, value in parts)
    counts = ("nan", stats.nan_count), ("inf", stats.posinf_count), ("-inf", stats.neginf_count)
    odd = [f"{count} {name}" for name, count in (*counts, ("zero", stats.zero_count)) if count]
    if odd:
        yield "  " + ", ".join(odd)
    yield ""
    values = tensor.values()
    if values.ndim > 2 and values.size > _WHOLE:
        values = values.reshape(-1, values.shape[-1])
    yield np.array2string(values, threshold=_WHOLE, edgeitems=3, max_line_width=120)


def tensor_json(tensor: StoredTensor) -> dict[str, Any]:
    stats = tensor.stats()
    return {
        "source": tensor.source,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "max": _plain(stats.max),
        "min": _plain(stats.min),
        "mean": _plain(stats.mean),
        "norm": _plain(stats.norm),
        "nan": stats.nan_count,
        "inf": stats.posinf_count,
        "neginf": stats.neginf_count,
        "zero": stats.zero_count,
    }


def save_text(tensor: StoredTensor, path: Path) -> None:
    """The elements as text, a line for each row of the last dimension, with as many digits as tell them apart."""
    values = tensor.values()
    rows = values.reshape(-1, values.shape[-1]) if values.ndim and values.size else values.reshape(1, -1)
    form = _DIGITS.get(values.dtype.name, "%s" if values.dtype.kind == "c" else "%d")
    high = max(1, _PIECE // max(1, rows.shape[-1]))
    try:
        with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
            for start in range(0, len(rows), high):
                np.savetxt(file, rows[start : start + high], fmt=form)
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}") from error


# --- two tensors ------------------------------------------------------------------------------------------------


def pair_lines(
    reference: StoredTensor, target: StoredTensor, contrast: Contrast, found: Survey, *, by: str
) -> Iterator[str]:
    """Everything about a pair, about forty lines."""
    yield f"reference  {reference.source}  {reference.dtype.name} {_shape(reference.shape)}"
    yield f"target     {target.source}  {target.dtype.name} {_shape(target.shape)}"
    if reference.shape != target.shape:
        yield "note       the shapes differ; elements are paired in row-major order"
    yield ""
    yield verdict(contrast, found)
    if not contrast.differing:
        return
    yield ""
    yield from (f"  {name.replace('_', ' '):<20}{number(METRICS[name](contrast))}" for name in _SHOWN)
    yield from _not_finite(contrast)
    yield ""
    yield f"worst elements, by {_BY[by]}"
    yield "  " + table_line(("index", "reference", "target", "error", "relative", "ulps"), _WORST)
    yield from ("  " + table_line(_worst_cells(each), _WORST) for each in found.worst)
    yield ""
    yield from _histogram("error in units in the last place", found.ulps, ULP_EDGES)
    yield ""
    yield from _histogram("relative error", found.relatives, RELATIVE_EDGES)
    if found.extents:
        yield ""
        yield "where"
        yield from (f"  {line}" for line in extent_lines(found.extents))
    yield from _map(found, reference.shape)


_BY = {"abs": "absolute error", "rel": "relative error", "ulp": "units in the last place"}


def verdict(contrast: Contrast, found: Survey) -> str:
    """One sentence: how many elements differ, and how many by more than is tolerated."""
    if not contrast.count:
        return "there is no element to compare"
    if not contrast.differing:
        return f"all {_many(contrast.count, 'element')} are equal"
    beyond = "" if found.off == contrast.differing else f", {found.off} by more than is tolerated"
    return f"{contrast.differing} of {_many(contrast.count, 'element')} differ{beyond}"


def _not_finite(c: Contrast) -> Iterator[str]:
    counts = (
        (c.nan_in_reference, "nan in the reference only"),
        (c.nan_in_target, "nan in the target only"),
        (c.nan_in_both, "nan in both"),
        (c.inf_in_reference, "infinite in the reference only"),
        (c.inf_in_target, "infinite in the target only"),
        (c.inf_opposite, "infinite with opposite signs"),
        (c.inf_same, "infinite alike"),
    )
    yield from (f"  {count:<20}{what}" for count, what in counts if count)


def _worst_cells(each: Element) -> list[str]:
    numbers = [number(each.error), number(each.relative), number(each.ulps)]
    return [_shape(each.index), str(each.reference), str(each.target), *numbers]


def _histogram(title: str, counts: Sequence[int], edges: Sequence[float]) -> Iterator[str]:
    """A bar for every class from the first to the last that has elements."""
    labels = ["equal", *(f"to {edge:.10g}" for edge in edges[1:]), f"over {edges[-1]:.10g}", "not finite"]
    used = [place for place, count in enumerate(counts) if count]
    largest, total = max(counts), sum(counts)
    yield title
    for place in range(used[0], used[-1] + 1):
        count = counts[place]
        bar = "█" * round(_BAR * count / largest) or ("▏" if count else "")
        yield f"  {labels[place]:<16}{count:>12}  {100 * count / total:6.2f}%  {bar}".rstrip()


def extent_lines(extents: Sequence[Extent]) -> Iterator[str]:
    """For each dimension, which of its indices are off; one line when it is all of them in all dimensions."""
    if all(each.off == each.length for each in extents):
        yield "everywhere"
        return
    for place, each in enumerate(extents):
        if each.off == each.length:
            where = "everywhere"
        elif each.off == 1:
            where = f"only index {each.first}"
        else:
            solid = each.off == each.last - each.first + 1
            where = f"{each.first} to {each.last}" + ("" if solid else f", {each.off} of them")
        yield f"dimension {place} (of {each.length}): {where}"


def _map(found: Survey, shape: tuple[int, ...]) -> Iterator[str]:
    """The tensor as a matrix of blocks, each drawn by its largest error; left out where all look the same."""
    rows, columns = len(found.blocks), len(found.blocks[0]) if found.blocks else 0
    finite = [error for row in found.blocks for error in row if error < math.inf]
    largest = max(finite, default=0.0)
    drawn = ["".join(_shade(error, largest) for error in row) for row in found.blocks]
    if len(set("".join(drawn))) < 2:
        return
    high, wide = -(-math.prod(shape[:-1]) // rows), -(-shape[-1] // columns)
    yield ""
    yield f"map: largest error in blocks of {_many(high, 'row')} (all dimensions but the last) and {_many(wide, 'column')}"
    yield f"  # up to {number(largest)}, + a tenth, : a hundredth, . less, ! not finite"
    yield from (f"  |{row}|" for row in drawn)


def _shade(error: float, largest: float) -> str:
    if error == math.inf:
        return "!"
    if not error:
        return " "
    return next(shade for part, shade in _SHADES if error >= part * largest)


def pair_json(reference: StoredTensor, target: StoredTensor, contrast: Contrast, found: Survey) -> dict[str, Any]:
    return {
        "format": 1,
        "reference": tensor_json(reference),
        "target": tensor_json(target),
        "count": contrast.count,
        "differing": contrast.differing,
        "off": found.off,
        "metrics": {name: _plain(metric(contrast)) for name, metric in METRICS.items()},
        "worst": [
            {
                "index": list(each.index),
                "reference": _plain(each.reference.item()),
                "target": _plain(each.target.item()),
                "error": _plain(each.error),
                "relative": _plain(each.relative),
                "ulps": _plain(each.ulps),
            }
            for each in found.worst
        ],
        "ulps": {"edges": list(ULP_EDGES), "counts": list(found.ulps)},
        "relative": {"edges": list(RELATIVE_EDGES), "counts": list(found.relatives)},
        "extents": [{"length": e.length, "off": e.off, "first": e.first, "last": e.last} for e in found.extents],
        "blocks": [[_plain(error) for error in row] for row in found.blocks],
    }


# --- folders ----------------------------------------------------------------------------------------------------

_FOLDER = (40, 12, 10, 24, 0)
_PAIRS = (40, 10, 18, 9, 11, 11, 11, 0)


def folder_lines(folder: TensorFolder) -> Iterator[str]:
    """The tensors of a folder, a line each, and what could not be read."""
    yield table_line(("name", "slot", "type", "shape", "op"), _FOLDER)
    for (name, slot), found in folder.tensors.items():
        try:
            tensor = found.read()
            facts = [tensor.dtype.name, _shape(tensor.shape), found.op_type]
        except DumpError as error:
            facts = [f"unknown: {error}"]
        yield table_line((name, slot, *facts), _FOLDER)
    yield from (f"unknown: {problem}" for problem in folder.problems.values())


def pairs_lines(reference: str, target: str, pairs: Sequence[TensorPair]) -> Iterator[str]:
    """Two folders: the pairs that differ, those that could not be compared, and how many there are of each."""
    differing = [pair for pair in pairs if pair.measured is not None and pair.measured.contrast.differing]
    failed = [pair for pair in pairs if pair.measured is None]
    yield f"reference  {reference}"
    yield f"target     {target}"
    yield ""
    equal = len(pairs) - len(differing) - len(failed)
    yield f"{_many(len(pairs), 'tensor')}: {equal} equal, {len(differing)} differ, {len(failed)} not compared"
    if differing:
        yield ""
        columns = ("name", "slot", "shape", "cosine", "max abs", "relative L2", "max ulps", "differing")
        yield table_line(columns, _PAIRS)
    for pair in differing:
        assert pair.measured is not None
        c = pair.measured.contrast
        metrics = [number(METRICS[name](c)) for name in ("cosine", "max_abs_error", "relative_l2", "max_ulp_error")]
        yield table_line((*pair.key, _shape(pair.shape or ()), *metrics, f"{c.differing} of {c.count}"), _PAIRS)
    if failed:
        yield ""
    for pair in failed:
        yield f"not compared: {' '.join(filter(None, pair.key))}: {pair.reason}"


def _plain(value: Any) -> Any:
    """A number as JSON has it: what is not finite is a text, and so is what is not real."""
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
