"""Two tensors element by element: the worst elements, how errors are distributed, and where in the tensor they sit.

For one pair that somebody looks at; `metrics` is the quick way to a verdict. Works in pieces, so that tensors of any size can
be looked at. d is |t - r|; an element that is not finite on one side only, or differently on both, is off by infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import DType
from ulpscope.native import pairs_fallback

Array = NDArray[Any]

BY = ("abs", "rel", "ulp")
ULP_EDGES = (0.0, 1.0, 2.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 2.0**14, 2.0**20)
RELATIVE_EDGES = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_MAP_ROWS, _MAP_COLUMNS = 16, 48


@dataclass(frozen=True, slots=True)
class Elements:
    """A stream of elements in row-major order, their type, and the shape they make."""

    raw: memoryview
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Element:
    """One place of two tensors. `index` has a number for each dimension; values are exact."""

    place: int
    index: tuple[int, ...]
    reference: Any
    target: Any
    error: float
    relative: float
    ulps: float


@dataclass(frozen=True, slots=True)
class Extent:
    """The indices of one dimension at which an element is off: how many of `length`, the first and the last."""

    length: int
    off: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What a look at every element found. An element is off when d > atol + rtol * |r|."""

    count: int
    off: int
    worst: tuple[Element, ...]
    first_off: tuple[Element, ...]
    ulps: tuple[int, ...]
    """How many elements lie up to each of ULP_EDGES, then how many above; the last of all are off by infinity."""
    relatives: tuple[int, ...]
    extents: tuple[Extent, ...]
    """Of each dimension; empty when nothing is off."""
    blocks: tuple[tuple[float, ...], ...]
    """The largest d in blocks of rows (all dimensions but the last) and columns (the last)."""


def survey(
    reference: Elements,
    target: Elements,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    worst: int = 10,
    by: str = "abs",
) -> Survey:
    """Looks at every element. ValueError when there are not equally many; the shape is the reference's."""
    shape = reference.shape
    count = math.prod(shape)
    found = _Sums(shape, atol, rtol, worst, BY.index(by))
    start = 0
    for r, t, error, ulps in pairs_fallback.differences(
        reference.raw, reference.dtype.code, target.raw, target.dtype.code
    ):
        found.add(start, r, t, error, ulps)
        start += len(error)
    return Survey(
        count=count,
        off=found.off,
        worst=tuple(elements_at(reference, target, found.worst())),
        first_off=tuple(elements_at(reference, target, found.first_off)),
        ulps=tuple(found.ulps.tolist()),
        relatives=tuple(found.relatives.tolist()),
        extents=found.extents(),
        blocks=tuple(map(tuple, found.blocks.tolist())),
    )


def elements_at(reference: Elements, target: Elements, places: Iterable[int]) -> list[Element]:
    """The elements at places of the row-major order."""
    return [_element(reference, target, place) for place in places]


def _element(reference: Elements, target: Elements, place: int) -> Element:
    sides = (reference, target)
    bits = [each.raw[place * each.dtype.itemsize : (place + 1) * each.dtype.itemsize] for each in sides]
    ((r, t, error, ulps),) = pairs_fallback.differences(bits[0], reference.dtype.code, bits[1], target.dtype.code)
    index = tuple(int(step) for step in np.unravel_index(place, reference.shape)) if reference.shape else ()
    relative = _relative(r, error)
    return Element(place, index, r[0], t[0], float(error[0]), float(relative[0]), float(ulps[0]))


def _relative(r: Array, error: Array) -> Array:
    """d / |r|: 0 where nothing differs, infinite where only r is 0."""
    with np.errstate(all="ignore"):
        found = np.where(error == 0, 0.0, error / _size(r))
    return np.where(np.isnan(found), np.inf, found)


def _size(r: Array) -> Array:
    size: Array = np.abs(r.astype(np.complex128 if r.dtype.kind == "c" else np.float64))
    return size


class _Sums:
    """What the pieces so far have shown."""

    def __init__(self, shape: tuple[int, ...], atol: float, rtol: float, worst: int, key: int) -> None:
        self.off = 0
        self.first_off: list[int] = []
        self.ulps = np.zeros(len(ULP_EDGES) + 2, dtype=np.int64)
        self.relatives = np.zeros(len(RELATIVE_EDGES) + 2, dtype=np.int64)
        self._shape, self._atol, self._rtol, self._wanted, self._key = shape, atol, rtol, worst, key
        self._worst: list[tuple[float, int]] = []
        self._seen = [np.zeros(size, dtype=bool) for size in shape]
        rows, self._columns = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        self._high = max(1, -(-rows // _MAP_ROWS))
        self._wide = max(1, -(-self._columns // _MAP_COLUMNS))
        self.blocks = np.zeros((-(-rows // self._high), -(-self._columns // self._wide)))

    def add(self, start: int, r: Array, t: Array, error: Array, ulps: Array) -> None:
        relative = _relative(r, error)
        self.ulps += _counted(ulps, ULP_EDGES)
        self.relatives += _counted(relative, RELATIVE_EDGES)
        differing = np.flatnonzero(error)
        if not len(differing):
            return
        self._rank(start, differing, (error, relative, ulps)[self._key][differing])
        limit = self._atol + self._rtol * _size(r[differing]) if self._rtol else self._atol
        # A limit that is nan or infinite excuses nothing that is off by infinity.
        off = differing[(error[differing] > limit) | np.isinf(error[differing])]
        self.off += len(off)
        self.first_off += (start + off[: max(0, self._wanted - len(self.first_off))]).tolist()
        indices = np.unravel_index(start + off, self._shape) if self._shape else ()
        for seen, index in zip(self._seen, indices, strict=True):
            seen[index] = True
        rows, columns = np.divmod(start + differing, self._columns)
        np.maximum.at(self.blocks, (rows // self._high, columns // self._wide), error[differing])

    def _rank(self, start: int, differing: Array, sizes: Array) -> None:
        wanted = min(self._wanted, len(sizes))
        if wanted:
            # Of equal ones the first: a stable order, and only what can still be among the worst is sorted.
            limit = np.partition(sizes, len(sizes) - wanted)[len(sizes) - wanted]
            chosen = np.flatnonzero(sizes >= limit)
            chosen = chosen[np.argsort(-sizes[chosen], kind="stable")][:wanted]
            self._worst += zip((-sizes[chosen]).tolist(), (start + differing[chosen]).tolist(), strict=True)
            self._worst = sorted(self._worst)[: self._wanted]

    def worst(self) -> list[int]:
        return [place for _, place in self._worst]

    def extents(self) -> tuple[Extent, ...]:
        if not self.off:
            return ()
        places = [np.flatnonzero(seen) for seen in self._seen]
        return tuple(
            Extent(len(seen), len(found), int(found[0]), int(found[-1]))
            for seen, found in zip(self._seen, places, strict=True)
        )


def _counted(sizes: Array, edges: Sequence[float]) -> Array:
    # The last edge is the largest finite number, so that infinity has a class of its own.
    found = np.searchsorted([*edges, np.finfo(np.float64).max], sizes, side="left")
    return np.bincount(found, minlength=len(edges) + 2)
