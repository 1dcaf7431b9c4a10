"""Which values two runs have in common, whatever their calls are named: by what was measured of them, never by all pairs.

A value of the target is an *anchor* if the reference has the same content within what rounding explains: by sketch (the same elements
in the same order), else by statistics, which do not see a transpose. What no single value shows may be made of several: one after the
other, or summed (`relations`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ulpscope.compare.relations import pooled
from ulpscope.compare.settings import coarse_settings
from ulpscope.compare.value_graph import BACKWARD, ValueGraph

NONE, SKETCH, STATISTICS = range(3)
# An anchor may have so many times the error that a fifth of all is below, gradients three times that, between these limits:
# where both runs are of float32 or finer, and where one of them computes in less anywhere.
_ROOM, _BACK, _SHARE = 12.0, 3.0, 0.2
_FINE, _COARSE = (2e-6, 1.6e-5), (0.01, 0.1)
_LOW = 1e-5
# Where products of float32 are rounded to less by a setting.
_SET = 2.0**-7
# By statistics alone values of low precision are alike too easily.
_ONLY_STATISTICS = 0.25
# The same elements in another order have sketches that differ by more; what differs by less is another value.
_ELSEWHERE = 0.3
# So many neighbours by norm are looked at on each side, and the sketches of so many of the best.
_NEIGHBOURS, _BEST = 12, 3


@dataclass(frozen=True, slots=True)
class Anchors:
    """For each value of the target: its error, by what it was found, and the values of the reference that make it up."""

    error: NDArray[np.float64]
    kind: NDArray[np.int8]
    partners: dict[int, tuple[int, ...]]
    limit: float

    def __contains__(self, node: int) -> bool:
        return bool(self.kind[node])


def find_anchors(reference: ValueGraph, target: ValueGraph, *, with_relations: bool = True) -> Anchors:
    """All values of the target that the reference has too; `with_relations`: also those that are made of several."""
    coarse = max(_coarsest(reference), _coarsest(target)) > _LOW
    least, most = _COARSE if coarse else _FINE
    if coarse_settings(reference.dump.manifest, target.dump.manifest):
        most = max(most, _SET)
    by_statistics = least * _ONLY_STATISTICS if coarse else most
    count = len(target)
    error, kind = np.full(count, np.inf), np.zeros(count, dtype=np.int8)
    partners: dict[int, tuple[int, ...]] = {}
    found = _single(reference, target, most, by_statistics)
    for node, other, apart, how in zip(*found, strict=True):
        error[node], kind[node], partners[node] = apart, how, (other,)
    forward = target.phase != BACKWARD
    taken = np.zeros(len(reference), dtype=bool)
    taken[found[1]] = True
    together = pooled(reference, target, kind > 0, taken, (most, by_statistics)) if with_relations else ()
    for mine, theirs, apart in together:
        for node in mine:
            if apart < error[node]:
                error[node], kind[node], partners[node] = apart, STATISTICS, theirs
    some = error[forward & (kind > 0) & (error > 0)]
    usual = float(np.quantile(some, _SHARE)) if len(some) else 0.0
    limit = min(max(_ROOM * usual, least), most)
    far = error > np.where(forward, limit, limit * _BACK)
    kind[far] = NONE
    for node in [node for node in partners if far[node]]:
        del partners[node]
    return Anchors(error, kind, partners, limit)


def _coarsest(graph: ValueGraph) -> float:
    return float(graph.unit[graph.is_known].max(initial=0.0))


def _single(
    reference: ValueGraph, target: ValueGraph, most: float, by_statistics: float
) -> tuple[list[int], list[int], list[float], list[int]]:
    """Target, reference, error and by what, of each value that one value of the reference is like."""
    left, right = np.flatnonzero(reference.is_telling), np.flatnonzero(target.is_telling)
    if not len(left) or not len(right):
        return [], [], [], []
    best = np.full((len(right), _BEST), np.inf)
    which = np.full((len(right), _BEST), -1, dtype=np.int64)
    for chosen in _neighbours(reference, target, left, right):
        fits = chosen >= 0
        apart = np.full(len(right), np.inf)
        apart[fits] = statistics_apart(
            reference.numbers[left[chosen[fits]]], target.numbers[right[fits]], target.numel[right[fits]]
        )
        apart[apart > most] = np.inf
        _keep(best, which, apart, chosen)
    return _decide(reference, target, left, right, best, which, most, by_statistics)


def _neighbours(
    reference: ValueGraph, target: ValueGraph, left: NDArray[np.int64], right: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """For each value of the target those of the reference with the nearest norms, of as many elements in the same pass; -1 for none."""
    both = [
        np.concatenate([getattr(reference, name)[left], getattr(target, name)[right]]) for name in ("phase", "numel")
    ]
    norm = np.concatenate([reference.numbers[left, 3], target.numbers[right, 3]])
    order = np.lexsort((norm, both[1], both[0]))
    is_left = order < len(left)
    rank = np.cumsum(is_left) - 1  # of the last value of the reference up to here
    sorted_left = order[is_left]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = rank
    at = place[len(left) :]
    found = []
    for step in range(-_NEIGHBOURS + 1, _NEIGHBOURS + 1):
        near = at + step
        inside = (near >= 0) & (near < len(sorted_left))
        chosen = np.where(inside, sorted_left[np.clip(near, 0, len(sorted_left) - 1)], -1)
        same = (
            inside
            & (reference.phase[left[chosen]] == target.phase[right])
            & (reference.numel[left[chosen]] == target.numel[right])
        )
        found.append(np.where(same, chosen, -1))
    return found


def statistics_apart(
    reference: NDArray[np.float64], target: NDArray[np.float64], numel: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The relative error that max, min, mean and norm show, row by row."""
    size = np.maximum(np.abs(reference[:, :2]).max(axis=1), 1e-30)
    norm = np.maximum(reference[:, 3], 1e-30)
    scale = np.stack([size, size, norm / np.sqrt(numel), norm], axis=1)
    found: NDArray[np.float64] = (np.abs(reference - target) / scale).max(axis=1)
    return found


def _keep(
    best: NDArray[np.float64], which: NDArray[np.int64], apart: NDArray[np.float64], chosen: NDArray[np.int64]
) -> None:
    """Puts a candidate of each row among the best that were seen, in order."""
    for at in range(best.shape[1]):
        nearer = apart < best[:, at]
        if not nearer.any():
            return
        apart, best[:, at] = np.where(nearer, best[:, at], apart), np.where(nearer, apart, best[:, at])
        chosen, which[:, at] = np.where(nearer, which[:, at], chosen), np.where(nearer, chosen, which[:, at])


def _decide(
    reference: ValueGraph,
    target: ValueGraph,
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    best: NDArray[np.float64],
    which: NDArray[np.int64],
    most: float,
    by_statistics: float,
) -> tuple[list[int], list[int], list[float], list[int]]:
    """Of the candidates the one whose sketch is nearest; where no sketch is near, the one whose statistics are."""
    rows = np.flatnonzero(np.isfinite(best[:, 0]))
    mine: list[int] = []
    theirs: list[int] = []
    errors: list[float] = []
    kinds: list[int] = []
    for row, apart, candidates in zip(rows.tolist(), best[rows].tolist(), which[rows].tolist(), strict=True):
        node = int(right[row])
        others = [(error, int(left[one])) for error, one in zip(apart, candidates, strict=True) if error < np.inf]
        found = _by_sketch(reference, target, node, others)
        if found is None or found[0] > most:
            error, other = others[0]
            if error > by_statistics or (found is not None and found[0] < _ELSEWHERE):
                continue
            found = error, other, STATISTICS
        errors.append(found[0])
        theirs.append(found[1])
        kinds.append(found[2])
        mine.append(node)
    return mine, theirs, errors, kinds


def _by_sketch(
    reference: ValueGraph, target: ValueGraph, node: int, others: list[tuple[float, int]]
) -> tuple[float, int, int] | None:
    """The nearest by sketch; None where there are none to compare."""
    own = target.sketch(node)
    if own is None or reference.dump.manifest.format != target.dump.manifest.format:
        return None
    found = None
    for told, other in others:
        if found is not None and told > found[0]:
            break
        apart = sketch_apart(reference.sketch(other), own)
        if apart is not None and (found is None or apart < found[0]):
            found = max(apart, told), other, SKETCH
    return found


def sketch_apart(reference: NDArray[np.float32] | None, target: NDArray[np.float32] | None) -> float | None:
    """The relative error that two sketches show; None where they cannot be compared."""
    if reference is None or target is None or reference.shape != target.shape:
        return None
    left = reference.astype(np.float64)
    return float(np.linalg.norm(target - left) / max(float(np.linalg.norm(left)), 1e-30))
