"""Kernels that choose: judged by the elements they chose, so that equal elements may be taken in either order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_score import exact_score
from ulpscope.model.operators import Trait, traits

Score = tuple[int, Tensor, dict[str, Any]]


def choice_scores(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Score]:
    """The values that came out, and the values at the places that came out, against those of a second run."""
    found = result if isinstance(result, tuple) else (result,)
    again = plan.func(*args, **kwargs)
    want = again if isinstance(again, tuple) else (again,)
    places, expected = found[-1], want[-1]
    scores: list[Score] = []
    if len(found) > 1:
        scores.append((0, found[0], exact_score(found[0], want[0])))
    if places.shape != expected.shape or not bool((places == expected).all()):
        picked, right = _at(plan, args, kwargs, places), _at(plan, args, kwargs, expected)
        scores.append((len(found) - 1, picked, exact_score(picked, right)))
    return scores


def _at(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], places: Tensor) -> Tensor:
    """The elements of the input at the chosen places."""
    x: Tensor = args[0]
    if Trait.POOLS in traits(plan.name):
        flat = x.flatten(-2) if "2d" in plan.name else x.flatten(-3)
        return flat.gather(-1, places.flatten(2 - flat.dim() + x.dim() - 1).reshape(*flat.shape[:-1], -1))
    known = dict(zip(plan.schema, args, strict=False)) | kwargs
    dim = known.get("dim", -1)
    if dim is None:
        return x.flatten()[places]
    if plan.name.startswith("arg") and plan.name != "argsort" and not known.get("keepdim", False):
        return x.gather(dim, places.unsqueeze(dim))
    if places.dim() < x.dim():
        return x.gather(dim, places.unsqueeze(dim))
    return x.gather(dim, places)
