"""One call against its reference: what a ledger row says about each of its results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import replay_reference as references
from ulpscope.frameworks.torch.replay_choice import choice_scores
from ulpscope.frameworks.torch.replay_fulfils import Demand, demands
from ulpscope.frameworks.torch.replay_pieces import Piece, cut, measured, merged
from ulpscope.frameworks.torch.replay_reference import Expected, Plan
from ulpscope.frameworks.torch.replay_score import (
    FACTORS,
    INNER,
    UNIT,
    can_score,
    exact_score,
    rounded_score,
    subnormal,
)
from ulpscope.frameworks.torch.replay_values import results, tensors
from ulpscope.model.operators import FACTORS_ROUNDED, Trait, traits

Measures = list[dict[str, Any]]
BLOCK = 1 << 16  # elements that are scored at a time
_LEANS = 0.1  # a share of misrounded results, or units of leaning, that is worth a second look
_NOT_FINITE = ("lost", "overflowed", "undefined", "infinite")


def rounded_factors(plan: Plan, device: str, products: dict[str, str]) -> str | None:
    """What the factors of a product of float32 may be rounded to; `products` as in `settings.float32_products`."""
    kind = FACTORS_ROUNDED.get(plan.name)
    allowed = products.get(f"{device} {kind}") if kind is not None else None
    return allowed if allowed in FACTORS else None


def measures(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: list[Any],
    *,
    leans: bool = True,
    factors: str | None = None,
) -> Measures:
    """Scores of what a call made (`found`, in the order of `references.outputs`) from its arguments as they were before.

    Without `leans` nothing is said about a systematic error. `factors` is what `rounded_factors` says. Raises where there
    is no reference.
    """
    if plan.kind == "unwritten" or not any(isinstance(item, Tensor) for item in found):
        return []
    if plan.kind == "choice":
        return [{**_about(at, item), **score} for at, item, score in choice_scores(plan, args, kwargs, tuple(found))]
    wanted = demands(plan, args, kwargs, found)
    if wanted is not None:
        return _fulfilled(wanted, found)
    whole = cut(plan, args, kwargs, found)
    if whole is not None:

        def measure(piece: Piece) -> Measures:
            return measures(plan, piece.args, piece.kwargs, piece.found, leans=leans and piece.leans, factors=factors)

        return measured(whole, found, measure)
    return _nearest(plan, args, kwargs, found, leans, factors)


def _nearest(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: list[Any],
    leans: bool,
    factors: str | None,
) -> Measures:
    """The scores against the reference; where one is notable and there is another right way, against the nearer one."""
    ways = references.numbers_in(plan, found)
    ways = ways if references.has_numbers(args, kwargs) else ways[-1:]

    def scored(want: Expected) -> Measures:
        scores = [_measure(plan, args, kwargs, want, at, item, leans, factors) for at, item in enumerate(found)]
        return [score for score in scores if score is not None]

    best: Measures = []
    for numbers in ways:
        want = references.expected(plan, args, kwargs, found, numbers)
        best = _nearer(best, scored(want))
        if any(map(_is_notable, best)) and Trait.JUMPS in traits(plan.name) and not want.exact:
            references.beside_jumps(plan, args, kwargs, found, want)
            best = _nearer(best, scored(want))
        if not any(map(_is_notable, best)):
            break
    for score in best:
        if score.get("lost"):
            _excuse_range(score, references.out_of_range(plan, args, kwargs, found[score["place"]]), found)
    return best


def _excuse_range(score: dict[str, Any], beyond: Tensor | None, found: list[Any]) -> None:
    """What a kernel cannot hold on the way is no loss of this call, but a range that is too small."""
    if beyond is not None:
        explained = min(score["lost"], int((beyond & ~torch.isfinite(found[score["place"]])).sum()))
        score["lost"] -= explained
        score["overflowed"] = score.get("overflowed", 0) + explained


def _nearer(one: Measures, other: Measures) -> Measures:
    return [min(pair, key=_far) for pair in zip(one, other, strict=True)] if one else other


def _fulfilled(wanted: list[Demand], found: list[Any]) -> Measures:
    """Of each result the demand that it fulfils worst."""
    worst: dict[int, dict[str, Any]] = {}
    for place, got, want, scale in wanted:
        dtype = found[place].dtype
        score = _scored(got, want, scale, dtype, working=True, leans=False, factors=None)
        score = {**_about(place, got), "dtype": str(dtype)[6:], "terms": got.shape[-1], **score}
        if place not in worst or _far(score) > _far(worst[place]):
            worst[place] = score
    return [score for _, score in sorted(worst.items())]


def _is_notable(score: dict[str, Any]) -> bool:
    leaning = max(abs(score.get("toward", 0.0)), abs(score.get("up", 0.0)))
    return (
        _far(score) > (0, 0.6, 0.0) or score["worst"] > 1.2 or leaning > _LEANS or score.get("misrounded", 0.0) > _LEANS
    )


def _far(score: dict[str, Any]) -> tuple[int, float, float]:
    return sum(score.get(name, 0) for name in ("wrong", *_NOT_FINITE)), score["rms"], score["worst"]


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
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    want: Expected,
    at: int,
    item: Any,
    leans: bool,
    factors: str | None,
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
    # Fused kernels, and sums beside a map (gradients of a weight), may be worked out in the dtype of the inputs.
    inside = plan.kind == "other" or (at > 0 and Trait.SUMS_BESIDE in traits(plan.name))
    dtype = _coarsest(args, kwargs, item.dtype) if inside else item.dtype
    if plan.kind == "other" and scale is not None and dtype is torch.float16:
        scale = torch.hypot(scale, torch.full_like(scale, _underflow(args, kwargs)))
    factors = factors if dtype is torch.float32 else None
    fades = plan.kind in ("norm", "other") or (plan.kind == "map" and Trait.ROUNDED_ONCE not in traits(plan.name))
    score = _scored(item, value.to(item.device), scale, dtype, want.working[at], leans, factors, fades)
    if any(score.get(name) for name in _NOT_FINITE) and not _finite(args, kwargs):
        score["overflowed"] = score["undefined"] = score["infinite"] = 0
        if plan.kind in ("contraction", "other"):  # inf - inf in another order
            score["lost"] = 0
    if want.leans is not None:
        score["leans"] = want.leans[at] * INNER[dtype] / UNIT[dtype]
    return {
        **_about(at, item),
        "dtype": f"{factors} factors" if factors else str(dtype)[6:],
        "terms": want.terms[at],
        **score,
    }


def _scored(
    item: Tensor,
    value: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    working: bool,
    leans: bool,
    factors: str | None,
    fades: bool = False,
) -> dict[str, Any]:
    """The score of a large result, some rows at a time: what fits into a cache is several times as quick."""
    rows = item.shape[0] if item.dim() > 1 and item.shape == value.shape else 0
    height = max(1, BLOCK * rows // max(1, item.numel()))
    if rows < 2 or height >= rows:
        return rounded_score(
            item, value, scale, dtype=dtype, working=working, leans=leans, factors=factors, fades=fades
        )
    parts = []
    every = max(1, item.numel() // (2 * BLOCK))
    for number, start in enumerate(range(0, rows, height)):
        cut = slice(start, start + height)
        part = rounded_score(
            item[cut],
            value[cut],
            None if scale is None else scale[cut],
            dtype=dtype,
            working=working,
            leans=leans and number % every == 0,
            factors=factors,
            fades=fades,
        )
        parts.append((start, {**part, "shape": tuple(item[cut].shape)}))
    whole = merged(parts, item)
    del whole["shape"]
    return whole


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


def _underflow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The scale of what a fused kernel loses between its stages in float16, where gradients fall below the normal numbers:
    of each of up to four partial results half the distance of these, times an operand, summed over the longest dimension.
    """
    leaves = [leaf for leaf in tensors(args, kwargs) if leaf.dtype in UNIT and leaf.numel()]
    largest = max((float(leaf.abs().max()) for leaf in leaves), default=0.0)
    longest = max((max(leaf.shape, default=1) for leaf in leaves), default=1)
    gain = 4 * (1 + largest * math.sqrt(longest))
    return gain * subnormal(torch.float16) / UNIT[torch.float16] if math.isfinite(gain) else 0.0


def _finite(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all inputs are numbers: then what is not, was made here."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in tensors(args, kwargs) if leaf.dtype in UNIT)
