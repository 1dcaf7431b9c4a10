"""One call against its reference: what a ledger row says about each of its results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import replay_reference as references
from ulpscope.frameworks.torch.replay_choice import choice_scores
from ulpscope.frameworks.torch.replay_reference import Expected, Plan
from ulpscope.frameworks.torch.replay_score import UNIT, can_score, exact_score, rounded_score
from ulpscope.frameworks.torch.replay_values import results, tensors

Measures = list[dict[str, Any]]
# Kernels that treat every row by itself if their dimension is the last one, and where that argument stands.
_ROWWISE = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2}
CHUNK = 1 << 18  # elements that are replayed at a time, where rows can be replayed one by one
BLOCK = 1 << 16  # elements that are scored at a time


def measures(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Any]) -> Measures:
    """Scores of what a call made (`found`, in the order of `references.outputs`) from its arguments as they were before.

    Raises where there is no reference.
    """
    if plan.kind == "unwritten" or not any(isinstance(item, Tensor) for item in found):
        return []
    if plan.kind == "choice":
        return [{**_about(at, item), **score} for at, item, score in choice_scores(plan, args, kwargs, tuple(found))]
    if len(found) == 1 and isinstance(found[0], Tensor) and found[0].numel() > 2 * _chunk(plan):
        pieces = _pieces(plan, args, found[0])
        if pieces is not None:
            return [_merged([(at, measures(plan, piece, kwargs, [part])[0]) for at, piece, part in pieces], found[0])]
    want = references.expected(plan, args, kwargs, found)
    scores = [_measure(plan, args, kwargs, want, at, item) for at, item in enumerate(found)]
    return [score for score in scores if score is not None]


def _pieces(plan: Plan, args: tuple[Any, ...], found: Tensor) -> list[tuple[int, tuple[Any, ...], Tensor]] | None:
    """A call on large tensors as calls on some of its rows each: exact, and without large copies."""
    rows = found.shape[0] if found.dim() > 1 else 0
    height = max(1, _chunk(plan) * rows // max(1, found.numel()))
    if rows < 2 or height >= rows:
        return None
    if plan.name in ("mm", "bmm", "addmm"):
        shared = 1 if plan.name == "mm" else -1 if plan.name == "bmm" else 2
        cut = [place for place, value in enumerate(args) if place != shared and _has_rows(value, rows, 2)]
    elif plan.kind == "map" and not plan.written:
        if any(isinstance(value, Tensor) and value.dim() == found.dim() and not _fits(value, found) for value in args):
            return None
        if any(isinstance(value, list | tuple) for value in args):
            return None
        cut = [place for place, value in enumerate(args) if _has_rows(value, rows, found.dim())]
    elif plan.name in _ROWWISE and args[_ROWWISE[plan.name]] in (-1, found.dim() - 1):
        cut = [place for place, value in enumerate(args) if _has_rows(value, rows, found.dim())]
    else:
        return None
    pieces = []
    for start in range(0, rows, height):
        part = tuple(value[start : start + height] if place in cut else value for place, value in enumerate(args))
        pieces.append((start, part, found[start : start + height]))
    return pieces


def _chunk(plan: Plan) -> int:
    """Elements at a time. The other operand of a product is widened anew for each piece: few and large ones."""
    return CHUNK << 2 if plan.kind == "contraction" else CHUNK


def _has_rows(value: Any, rows: int, dims: int) -> bool:
    return isinstance(value, Tensor) and value.dim() >= dims and value.shape[0] == rows


def _fits(value: Tensor, found: Tensor) -> bool:
    return value.shape[0] in (1, found.shape[0])


def _merged(parts: list[tuple[int, dict[str, Any]]], found: Tensor) -> dict[str, Any]:
    """One measure from those of the pieces."""
    scores = [score for _, score in parts]
    counts = [math.prod(score["shape"]) for score in scores]
    total = sum(counts)

    whole = {**scores[0], "shape": tuple(found.shape)}
    squares = sum(score["rms"] ** 2 * count for score, count in zip(scores, counts, strict=True))
    whole |= {"rms": math.sqrt(squares / total), "worst": max(score["worst"] for score in scores)}
    whole |= {name: sum(score.get(name, 0) for score in scores) for name in ("wrong", "lost", "overflowed", "total")}
    whole["size"] = math.hypot(*(score.get("size", 0.0) for score in scores))
    whole["misrounded"] = (
        sum(score.get("misrounded", 0.0) * count for score, count in zip(scores, counts, strict=True)) / total
    )
    whole |= _leaning([(count, score) for count, score in zip(counts, scores, strict=True) if "spread" in score])
    whole.pop("profile", None)
    shapes = [(start, score["profile"]) for start, score in parts if score.get("profile")]
    if shapes:
        whole["profile"] = _joined(shapes, found.shape[0], len(parts))
    return whole


def _leaning(parts: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    total = sum(count for count, _ in parts)
    if not total:
        return {}
    found = {name: sum(count * score[name] for count, score in parts) / total for name in ("toward", "up")}
    return {**found, "spread": math.hypot(*(count * score["spread"] for count, score in parts)) / total}


def _joined(shapes: list[tuple[int, dict[str, Any]]], rows: int, count: int) -> dict[str, Any]:
    """The profile of all pieces: that of the worst, its first dimension over all rows."""
    worst = max(shapes, key=lambda item: max((max(dim["bins"]) for dim in item[1]["dims"]), default=0.0))
    start, profile = worst
    ends = [(at + dims[0]["first"], at + dims[0]["last"]) for at, each in shapes if (dims := each["dims"])[0]["bad"]]
    first = {
        **profile["dims"][0],
        "length": rows,
        "bad": sum(each["dims"][0]["bad"] for _, each in shapes),
        "first": min((low for low, _ in ends), default=None),
        "last": max((high for _, high in ends), default=None),
    }
    place = [profile["worst_at"][0] + start, *profile["worst_at"][1:]]
    share = sum(each["share"] for _, each in shapes) / count
    return {**profile, "dims": [first, *profile["dims"][1:]], "share": share, "worst_at": place}


def exact_measures(found: list[Any], expected: list[Any]) -> Measures:
    scores = [_exact(at, item, want) for at, (item, want) in enumerate(zip(found, expected, strict=True))]
    return [score for score in scores if score is not None]


def view_measures(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Measures:
    """A view must look at the same memory in the same way."""
    wrong: Measures = []
    again = results(plan.func(*args, **kwargs))
    for at, (item, want) in enumerate(zip(results(result), again, strict=True)):
        if not isinstance(item, Tensor) or (
            item.data_ptr() == want.data_ptr() and item.shape == want.shape and item.stride() == want.stride()
        ):
            continue
        score = exact_score(item, want)
        if score.get("wrong"):
            wrong.append({**_about(at, item), **score})
    return wrong


def _measure(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], want: Expected, at: int, item: Any
) -> dict[str, Any] | None:
    value = want.values[at]
    if not isinstance(item, Tensor) or not isinstance(value, Tensor) or not item.numel():
        return None
    if want.exact or not can_score(item):
        return _exact(at, item, value)
    scale = want.scales[at]
    value = value.double()
    if value.shape != item.shape and value.numel() == item.numel():
        value = value.reshape(item.shape)
    if scale is not None:
        scale = scale.reshape(item.shape) if scale.numel() == item.numel() else scale.expand(item.shape)
    dtype = _coarsest(args, kwargs, item.dtype) if plan.kind == "other" else item.dtype
    score = _scored(item, value.to(item.device), scale, dtype, want.working[at])
    if (score.get("overflowed") or score.get("lost")) and not _finite(args, kwargs):
        score["overflowed"] = 0
        if plan.kind in ("contraction", "other"):  # inf - inf in another order
            score["lost"] = 0
    return {**_about(at, item), "dtype": str(dtype)[6:], "terms": want.terms[at], **score}


def _scored(item: Tensor, value: Tensor, scale: Tensor | None, dtype: torch.dtype, working: bool) -> dict[str, Any]:
    """The score of a large result, some rows at a time: what fits into a cache is several times as quick."""
    rows = item.shape[0] if item.dim() > 1 and item.shape == value.shape else 0
    height = max(1, BLOCK * rows // max(1, item.numel()))
    if rows < 2 or height >= rows:
        return rounded_score(item, value, scale, dtype=dtype, working=working)
    parts = []
    every = max(1, item.numel() // (4 * BLOCK))
    for number, start in enumerate(range(0, rows, height)):
        cut = slice(start, start + height)
        part = rounded_score(
            item[cut],
            value[cut],
            None if scale is None else scale[cut],
            dtype=dtype,
            working=working,
            leans=number % every == 0,
        )
        parts.append((start, {**part, "shape": tuple(item[cut].shape)}))
    merged = _merged(parts, item)
    del merged["shape"]
    return merged


def _about(at: int, item: Tensor) -> dict[str, Any]:
    return {"place": at, "dtype": str(item.dtype)[6:], "shape": tuple(item.shape), "terms": 1}


def _exact(at: int, item: Any, want: Any) -> dict[str, Any] | None:
    if not isinstance(item, Tensor) or not isinstance(want, Tensor) or not item.numel():
        return None
    return {**_about(at, item), **exact_score(item, want)}


def _coarsest(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """A fused kernel may keep what it computes inside in the precision of its inputs."""
    found = [leaf.dtype for leaf in tensors(args, kwargs) if leaf.dtype in UNIT]
    return max([dtype, *found], key=UNIT.__getitem__)


def _finite(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all inputs are numbers: then what is not, was made here."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in tensors(args, kwargs) if leaf.dtype in UNIT)
