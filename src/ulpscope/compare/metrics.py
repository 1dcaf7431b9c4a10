"""How two tensors differ: everything that takes a look at their elements, gathered in one pass, and the metrics made of it.

Knows elements and their types, nothing of dumps or names.  An element that is not finite on either side is counted, and
left out of every sum and maximum; whether the rest may be judged alone is for the caller to say (`Contrast.same_places`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import DType, dtype_named
from ulpscope.native import pairs, pairs_fallback, parts

Array = NDArray[Any]

# A multiple of the block of the extension, so that no block is cut.
_CHUNK = 1 << 22
# Below this a sum of squares has lost digits to the denormals.
_LEAST_SQUARE = 2.0**-900
_MAY_LEAVE_RANGE = frozenset({"float64", "complex128"})


@dataclass(frozen=True, slots=True)
class Contrast:
    """How a target differs from a reference, element by element.

    Absolute and relative differences are |t - r| and |t - r| / |r|, the latter 0 for 0 / 0 and infinite for x / 0.  Units
    in the last place are those of the coarser float type at r, and 1 for integers.
    """

    count: int
    """All elements."""
    finite: int
    """Elements that are finite on both sides."""
    differing: int
    """Elements whose values differ; NaN does not differ from NaN, nor an infinity from itself."""
    reference_norm: float
    target_norm: float
    difference_norm: float
    alignment: float
    """The dot product of the two, each scaled to length one; nan if either has no length."""
    abs_sum: float
    max_abs: float
    max_abs_index: int
    """The first place, in row-major order, that differs by `max_abs`; -1 if none differs."""
    relative_sum: float
    """Over the elements where the relative difference is finite."""
    max_relative: float
    below_thousandth: int
    """Elements with a relative difference below 0.001, and those that are finite on neither side."""
    below_five_thousandths: int
    ulp_sum: float
    max_ulp: float
    nan_in_reference: int
    """Elements that are NaN in the reference only; and so on."""
    nan_in_target: int
    nan_in_both: int
    inf_in_reference: int
    inf_in_target: int
    inf_same: int
    inf_opposite: int

    @property
    def same_places(self) -> bool:
        """Whether NaN meets NaN and every infinity meets itself."""
        alone = self.nan_in_reference + self.nan_in_target + self.inf_in_reference + self.inf_in_target
        return alone + self.inf_opposite == 0

    @property
    def reference_square(self) -> float:
        return self.reference_norm * self.reference_norm


def contrast(reference: Array, target: Array) -> Contrast:
    """How two arrays of equally many elements differ.  DumpError for a type that no dump has."""
    streams = []
    for array in (reference, target):
        dtype = dtype_named(array.dtype.name)
        raw = np.ascontiguousarray(array, dtype.bits).reshape(-1).view(np.uint8)
        streams.append((raw.data, dtype))
    (left, left_dtype), (right, right_dtype) = streams
    return contrast_bits(left, left_dtype, right, right_dtype)


def contrast_bits(
    reference: memoryview,
    reference_dtype: DType,
    target: memoryview,
    target_dtype: DType,
    *,
    done: Callable[[int, int], None] | None = None,
    checksums: bytearray | None = None,
) -> Contrast:
    """How two streams of elements in row-major order differ.  ValueError if they are not equally long.

    `done(start, stop)` is told each range of elements that has been read, so that mapped pages can be let go. `checksums`, of
    eight bytes, gets the CRC-32 of both streams, which costs less here than on its own.
    """
    left, right = reference_dtype, target_dtype
    ours, theirs = reference.cast("B"), target.cast("B")
    count = len(ours) // left.itemsize
    if (len(ours), len(theirs)) != (count * left.itemsize, count * right.itemsize):
        raise ValueError(
            f"{len(ours)} bytes of {left.name} and {len(theirs)} of {right.name} are not equally many elements; "
            "compare tensors of one shape"
        )
    either_complex = left.name.startswith("complex") or right.name.startswith("complex")
    parts.say_missing("comparing")
    add = pairs_fallback.contrast if either_complex else pairs.contrast
    state = bytearray(pairs.STATE.itemsize)
    more = () if checksums is None else (checksums,)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        ours_chunk = ours[start * left.itemsize : stop * left.itemsize]
        theirs_chunk = theirs[start * right.itemsize : stop * right.itemsize]
        add(ours_chunk, left.code, theirs_chunk, right.code, state, *more)
        if done is not None:
            done(start, stop)
    return _concluded(ours, left, theirs, right, state)


@dataclass(frozen=True, slots=True)
class Streams:
    """Two streams that contrast_bits would take. `checksums` as there."""

    reference: memoryview
    reference_dtype: DType
    target: memoryview
    target_dtype: DType
    checksums: bytearray | None = None

    @property
    def short(self) -> bool:
        """Whether contrast_short takes them."""
        left, right = self.reference_dtype, self.target_dtype
        count = self.reference.nbytes // left.itemsize
        even = (count * left.itemsize, count * right.itemsize) == (self.reference.nbytes, self.target.nbytes)
        return even and count <= _CHUNK and not left.name.startswith("complex") and not right.name.startswith("complex")


def contrast_short(streams: Sequence[Streams]) -> list[Contrast]:
    """How each of several short pairs of streams differs, read in one go without Python's lock."""
    parts.say_missing("comparing")
    states = [bytearray(pairs.STATE.itemsize) for _ in streams]
    pairs.contrast_all(
        [
            (each.reference, each.reference_dtype.code, each.target, each.target_dtype.code, state)
            + (() if each.checksums is None else (each.checksums,))
            for each, state in zip(streams, states, strict=True)
        ]
    )
    return [
        _concluded(each.reference, each.reference_dtype, each.target, each.target_dtype, state)
        for each, state in zip(streams, states, strict=True)
    ]


def _concluded(ours: memoryview, left: DType, theirs: memoryview, right: DType, state: bytearray) -> Contrast:
    found = pairs.totals(state)
    if {left.name, right.name} & _MAY_LEAVE_RANGE and not _in_range(found):
        pieces = partial(pairs_fallback.finite_pieces, ours, left.code, theirs, right.code)
        lengths = _scaled_lengths(pieces, found.max_absolute)
    else:
        lengths = _Lengths.from_sums(found.reference, found.target, found.difference, dot=found.dot)
    return _contrast_of(found, lengths)


def _in_range(found: pairs.Totals) -> bool:
    squares = [found.reference, found.target, *([found.difference] if found.max_absolute > 0.0 else [])]
    return all(_LEAST_SQUARE <= square < math.inf for square in squares)


@dataclass(frozen=True, slots=True)
class _Lengths:
    reference: float
    target: float
    difference: float
    alignment: float

    @staticmethod
    def from_sums(
        reference: float, target: float, difference: float, *, dot: float, units: tuple[float, float, float] = (1, 1, 1)
    ) -> _Lengths:
        """From sums of squares of numbers that were divided by `units`."""
        if reference == 0.0 or target == 0.0:
            alignment = math.nan
        elif reference == target:
            # Exactly 1 for equal tensors.
            alignment = dot / reference
        else:
            alignment = dot / math.sqrt(reference) / math.sqrt(target)
        norms = [math.sqrt(square) * unit for square, unit in zip((reference, target, difference), units, strict=True)]
        return _Lengths(norms[0], norms[1], norms[2], alignment)


def _scaled_lengths(pieces: Callable[[], Iterator[tuple[Array, Array]]], max_abs: float) -> _Lengths:
    """The lengths of tensors whose squares leave the range of float64: two more passes, in units of the largest element."""
    largest = [0.0, 0.0, max_abs]
    for piece in pieces():
        for side, values in enumerate(piece):
            largest[side] = max(largest[side], float(np.abs(_parts(values)).max()))
    # Powers of two: nothing is rounded.
    units = [
        math.ldexp(1.0, max(min(math.frexp(size)[1], 1023), -1022)) if 0 < size < math.inf else 1.0 for size in largest
    ]
    sums = np.zeros(4)
    for r, t in pieces():
        with np.errstate(over="ignore"):
            d = _parts(t - r) / units[2]
        r, t = _parts(r) / units[0], _parts(t) / units[1]
        sums += [r @ r, t @ t, d @ d, r @ t]
    reference, target, difference, dot = sums.tolist()
    difference = difference if max_abs < math.inf else math.inf
    return _Lengths.from_sums(reference, target, difference, dot=dot, units=(units[0], units[1], units[2]))


def _parts(values: Array) -> Array:
    """Real and imaginary parts as elements of their own."""
    return np.ascontiguousarray(values).view(np.float64)


def _contrast_of(found: pairs.Totals, lengths: _Lengths) -> Contrast:
    # In the order of the fields.
    return Contrast(
        found.count,
        found.count - found.either,
        found.differing,
        lengths.reference,
        lengths.target,
        lengths.difference,
        lengths.alignment,
        found.absolute,
        found.max_absolute,
        found.place - 1,
        found.relative,
        found.max_relative,
        found.below_thousandth,
        found.below_five_thousandths,
        found.ulp,
        found.max_ulp,
        found.nan_reference,
        found.nan_target,
        found.nan_both,
        found.inf_reference,
        found.inf_target,
        found.inf_same,
        found.inf_opposite,
    )


def cosine(c: Contrast) -> float:
    """Cosine of the angle between the two; 1 if both are all zero, nan if one is or there is no element."""
    if not c.count:
        return math.nan
    if c.reference_norm == c.target_norm == 0.0:
        return 1.0
    # min and max would turn nan into a limit.
    return c.alignment if math.isnan(c.alignment) else max(-1.0, min(1.0, c.alignment))


def euclidean_distance(c: Contrast) -> float:
    """The length of the difference."""
    return c.difference_norm if c.count else math.nan


def max_abs_error(c: Contrast) -> float:
    """The largest |t - r|."""
    return c.max_abs if c.count else math.nan


def max_relative_error(c: Contrast) -> float:
    """The largest |t - r| / |r|; inf where only the reference is 0."""
    return c.max_relative if c.count else math.nan


def one_thousandth_ratio(c: Contrast) -> float:
    """The share of elements with a relative error below 0.001."""
    return c.below_thousandth / c.count if c.count else math.nan


def five_thousandths_ratio(c: Contrast) -> float:
    """The share of elements with a relative error below 0.005."""
    return c.below_five_thousandths / c.count if c.count else math.nan


def rmse(c: Contrast) -> float:
    """The root of the mean of (t - r)**2 over the elements that are finite on both sides; nan without any."""
    return c.difference_norm / math.sqrt(c.finite) if c.finite else math.nan


def mape(c: Contrast) -> float:
    """The mean of |t - r| / |r| over the elements that are finite on both sides; inf where only the reference is 0."""
    if not c.finite:
        return math.nan
    return math.inf if c.max_relative == math.inf else c.relative_sum / c.finite


def relative_l2(c: Contrast) -> float:
    """The length of the difference over that of the reference; 0 if nothing differs, inf if only the reference is all zero."""
    if not c.count:
        return math.nan
    if c.reference_norm == 0.0:
        return 0.0 if c.difference_norm == 0.0 else math.inf
    return c.difference_norm / c.reference_norm


def max_ulp_error(c: Contrast) -> float:
    """The largest |t - r| in units in the last place of r."""
    return c.max_ulp if c.count else math.nan


def mean_ulp_error(c: Contrast) -> float:
    """The mean of |t - r| in units in the last place of r over the elements that are finite on both sides."""
    return c.ulp_sum / c.finite if c.finite else math.nan


METRICS: dict[str, Callable[[Contrast], float]] = {
    "cosine": cosine,
    "euclidean_distance": euclidean_distance,
    "max_abs_error": max_abs_error,
    "max_relative_error": max_relative_error,
    "one_thousandth_ratio": one_thousandth_ratio,
    "five_thousandths_ratio": five_thousandths_ratio,
    "rmse": rmse,
    "mape": mape,
    "relative_l2": relative_l2,
    "max_ulp_error": max_ulp_error,
    "mean_ulp_error": mean_ulp_error,
}
