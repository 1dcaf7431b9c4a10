"""A call on large tensors as several calls on parts of them: exact for those parts, and without large copies in float64.

What cannot be cut without changing what is computed is left whole. `merged` makes one measure from those of the parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_values import tensors
from ulpscope.model.operators import FACTORS_ROUNDED, FIRST_FACTOR, ROW_DIMENSION, Trait, traits

CHUNK = 1 << 18  # elements that are replayed at a time
_NO_REDUCTION = 0
_LEANING = 4
_SUMS = ("wrong", "lost", "overflowed", "undefined", "infinite", "total")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a call. `starts`: where its part of each result begins; `places`: which results these are.

    Without `leans` nothing is asked about a systematic error: some of the pieces are enough for that.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: list[Any]
    places: list[int]
    starts: list[int]
    leans: bool = True


@dataclass(frozen=True, slots=True)
class Cut:
    axis: int
    pieces: list[Piece]


def cut(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Any]) -> Cut | None:
    """The pieces of a call; None where it is small or has to be replayed whole."""
    if len(found) > 1 and any(_is_list(value) and len(value) > 1 for value in args):
        return _items(args, kwargs, found)
    if Trait.BY_HEADS in traits(plan.name):
        return _heads(plan, args, kwargs, found)
    if len(found) == 1 and isinstance(found[0], Tensor) and found[0].numel() > 2 * CHUNK:
        return _stretches(plan, args, kwargs, found[0])
    if plan.name == "nll_loss_forward" and args[0].dim() == 2 and args[0].numel() > 2 * CHUNK and args[2] is None:
        return Cut(0, [Piece(_picked(args), kwargs, found, [0, 1], [0, 0])])
    return None


def _stretches(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], found: Tensor) -> Cut | None:
    """Rows, or columns, of one result."""
    axis = 0
    places: Iterable[int]
    name = plan.name
    if name in ("mm", "addmm"):
        first = FIRST_FACTOR[name]
        axis = int(found.shape[1] > found.shape[0])
        places = [first + axis]
        if first and args[0].dim() + axis > 1 and args[0].shape[args[0].dim() - 2 + axis] == found.shape[axis]:
            places.append(0)
    elif name == "bmm":
        places = [0, 1]
    elif name == "embedding_dense_backward":
        axis, places = found.dim() - 1, [0]
    elif name == "nll_loss_backward" and found.dim() == 2:
        places = [1, 2, *([0] if args[4] == _NO_REDUCTION else [])]
    elif (plan.kind == "map" and _is_plain_map(plan, args, found)) or (
        name in ROW_DIMENSION and args[ROW_DIMENSION[name]] in (-1, found.dim() - 1)
    ):
        places = [place for place, value in enumerate(args) if _has_rows(value, found)]
    elif FACTORS_ROUNDED.get(name) == "conv" and "backward" not in name and args[0].shape[0] == found.shape[0]:
        places = [0]
    else:
        return None
    length = found.shape[axis] if found.dim() > 1 else 0
    height = max(1, _chunk(plan) * length // max(1, found.numel()))
    if length < 2 or height >= length:
        return None

    def part(place: int, value: Any, start: int) -> Any:
        if place not in chosen:
            return value
        dim = value.dim() - 1 if axis else 0
        return value.narrow(dim, start, min(height, length - start))

    chosen = frozenset(places)
    pieces = []
    every = max(1, math.ceil(length / height) // _LEANING)
    for number, start in enumerate(range(0, length, height)):
        given = tuple(part(place, value, start) for place, value in enumerate(args))
        mine = found.narrow(axis, start, min(height, length - start))
        pieces.append(Piece(given, kwargs, [mine], [0], [start], leans=number % every == 0))
    return Cut(axis, pieces)


def _chunk(plan: Plan) -> int:
    """Elements at a time. The other factor of a product is widened anew for each piece: few and large ones."""
    return CHUNK << 1 if plan.kind == "contraction" else CHUNK


def _is_plain_map(plan: Plan, args: tuple[Any, ...], found: Tensor) -> bool:
    if plan.written and [place for place, _ in plan.written] != [0]:
        return False
    return not any(
        isinstance(value, list | tuple)
        or (isinstance(value, Tensor) and value.dim() == found.dim() and value.shape[0] not in (1, found.shape[0]))
        for value in args
    )


def _has_rows(value: Any, found: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() >= found.dim() and value.shape[0] == found.shape[0]


def _picked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A loss reads one element of each row: the same call on these alone, as the only class."""
    x, target, _, reduction, ignored = args[:5]
    kept = target != ignored
    only = x.gather(1, torch.where(kept, target, 0).unsqueeze(1))
    return only, torch.where(kept, 0, -1), None, reduction, -1


def _heads(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Any]) -> Cut | None:
    """Attention, some samples at a time; of one sample, some heads. Queries may have several heads for one of the keys."""
    first = int("backward" in plan.name)
    q, k = args[first], args[first + 1]
    axis = 0 if q.shape[0] > 1 else 1
    shared = 1 if axis == 0 else q.shape[1] // max(1, k.shape[1])
    count = q.shape[axis] // max(1, shared)
    each = q.shape[-2] * max(k.shape[-2], q.shape[-1]) * math.prod(q.shape[:-2]) // max(1, count)
    height = max(1, CHUNK // max(1, each))
    if height >= count or count * shared != q.shape[axis] or k.shape[axis] != count:
        return None

    def part(value: Any, start: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 3:
            return value
        for length, times in ((q.shape[axis], shared), (count, 1)):
            if value.shape[axis] == length:
                return value.narrow(axis, start * times, min(height, count - start) * times)
        return value

    every = list(range(len(found)))
    pieces = []
    for start in range(0, count, height):
        given = tuple(part(value, start) for value in args)
        named = {key: part(value, start) for key, value in kwargs.items()}
        mine = [part(value, start) for value in found]
        starts = [
            start * shared if isinstance(value, Tensor) and value.shape[axis] == q.shape[axis] else start
            for value in found
        ]
        pieces.append(Piece(given, named, mine, every, starts))
    return Cut(axis, pieces)


def _items(args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Any]) -> Cut | None:
    """A kernel over lists (`_foreach_*`, fused optimizers): item by item, each with its own place among the results."""
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value)]
    count = len(lists[0])
    if any(len(value) != count for value in lists) or len(found) % count or count < 2:
        return None
    if sum(leaf.numel() for leaf in tensors(args, kwargs)) <= 2 * CHUNK:
        return None

    def part(value: Any, at: int) -> Any:
        return [value[at]] if _is_list(value) or (isinstance(value, list | tuple) and len(value) == count) else value

    pieces = []
    for at in range(count):
        places = list(range(at, len(found), count))
        given = tuple(part(value, at) for value in args)
        named = {key: part(value, at) for key, value in kwargs.items()}
        pieces.append(Piece(given, named, [found[place] for place in places], places, [0] * len(places)))
    return Cut(0, pieces)


def _is_list(value: Any) -> bool:
    """A list of tensors; one of plain values may be a shape or a mask of results."""
    return isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value)


# --- together again -----------------------------------------------------------------------------------------------

Scores = list[dict[str, Any]]


def measured(whole: Cut, found: list[Any], measure: Callable[[Piece], Scores]) -> Scores:
    """The measures of all pieces as those of the call."""
    parts: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for piece in whole.pieces:
        for score in measure(piece):
            number = score["place"]
            place = piece.places[number]
            parts.setdefault(place, []).append((piece.starts[number], {**score, "place": place}))
    return [
        scores[0][1] if len(scores) == 1 else merged(scores, found[place], whole.axis)
        for place, scores in sorted(parts.items())
    ]


def merged(parts: list[tuple[int, dict[str, Any]]], found: Tensor, axis: int = 0) -> dict[str, Any]:
    """One measure from those of the pieces."""
    scores = [score for _, score in parts]
    counts = [math.prod(score["shape"]) for score in scores]
    total = sum(counts)

    whole = {**scores[0], "shape": tuple(found.shape)}
    squares = sum(score["rms"] ** 2 * count for score, count in zip(scores, counts, strict=True))
    whole |= {"rms": math.sqrt(squares / total), "worst": max(score["worst"] for score in scores)}
    whole |= {name: sum(score.get(name, 0) for score in scores) for name in _SUMS}
    whole["size"] = math.hypot(*(score.get("size", 0.0) for score in scores))
    whole["misrounded"] = (
        sum(score.get("misrounded", 0.0) * count for score, count in zip(scores, counts, strict=True)) / total
    )
    whole |= _leaning([(count, score) for count, score in zip(counts, scores, strict=True) if "spread" in score])
    whole.pop("profile", None)
    shapes = [(start, score["profile"]) for start, score in parts if score.get("profile")]
    if shapes:
        whole["profile"] = _joined(shapes, found.shape[axis], len(parts), axis)
    return whole


def _leaning(parts: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    total = sum(count for count, _ in parts)
    if not total:
        return {}
    found = {name: sum(count * score[name] for count, score in parts) / total for name in ("toward", "up")}
    return {**found, "spread": math.hypot(*(count * score["spread"] for count, score in parts)) / total}


def _joined(shapes: list[tuple[int, dict[str, Any]]], length: int, count: int, axis: int) -> dict[str, Any]:
    """The profile of all pieces, those left out whose errors are small beside the worst: they are rounding."""
    sizes = [max((max(dim["bins"]) for dim in each["dims"]), default=0.0) for _, each in shapes]
    start, profile = shapes[sizes.index(max(sizes))]
    loud = [shape for shape, size in zip(shapes, sizes, strict=True) if size >= 0.01 * max(sizes)]
    dims = [
        _joined_dim([(at if place == axis else 0, each["dims"][place]) for at, each in loud], added=place == axis)
        for place in range(len(profile["dims"]))
    ]
    dims[axis]["length"] = length
    place = [index + start if at == axis else index for at, index in enumerate(profile["worst_at"])]
    share = sum(each["share"] for _, each in loud) / count
    top = max(each.get("top", 0.0) for _, each in loud)
    clipped = sum(each.get("clipped", 0) for _, each in loud if each.get("top") == top)
    return {"dims": dims, "share": share, "worst_at": place, "top": top, "clipped": clipped}


def _joined_dim(lines: list[tuple[int, dict[str, Any]]], *, added: bool) -> dict[str, Any]:
    """One dimension of several pieces; along the cut their indices are added, elsewhere they are the same ones."""
    ends = [(at + line["first"], at + line["last"]) for at, line in lines if line["bad"]]
    bad = [line["bad"] for _, line in lines]
    steps = [line["step"] for _, line in lines]
    return {
        **max((line for _, line in lines), key=lambda line: max(line["bins"])),
        "bad": sum(bad) if added else max(bad),
        "first": min((low for low, _ in ends), default=None),
        "last": max((high for _, high in ends), default=None),
        "step": math.gcd(*steps, *(high - low for (low, _), (high, _) in itertools.pairwise(ends))),
    }
