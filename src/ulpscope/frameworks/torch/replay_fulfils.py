"""Results that are not unique: judged by what they must fulfil, not by what another computation happens to choose.

Singular vectors and eigenvectors have a free sign, or turn freely where values are equal; rows may be exchanged in another
order where two pivots are alike. What any right answer fulfils is put beside what it must be, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_score import UNIT

# Place among the results, what was found, what must be, and the scale of its error.
Demand = tuple[int, Tensor, Tensor, Tensor]
Demands = Callable[[dict[str, Any], list[Tensor]], Iterator[Demand]]


def demands(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Any]) -> list[Demand] | None:
    """What the results of such a kernel must fulfil; None for any other kernel, and where nothing is real."""
    rule = FULFILS.get(plan.name)
    if (
        rule is None
        or not isinstance(args[0], Tensor)
        or args[0].dtype not in UNIT
        or not bool(args[0].isfinite().all())
    ):
        return None
    told = {**plan.defaults, **dict(zip(plan.schema, args, strict=False)), **kwargs, "matrix": args[0].double()}
    wide = [item.double() if isinstance(item, Tensor) and item.dtype in UNIT else item for item in found]
    return [each for each in rule(told, wide) if each[1].numel()]


def _orthogonal(place: int, columns: Tensor) -> Demand:
    """Columns of length one that stand upright on each other."""
    got = columns.mT @ columns
    want = torch.eye(got.shape[-1], dtype=got.dtype, device=got.device).expand_as(got)
    return place, got, want, torch.ones_like(got)


def _same(place: int, got: Tensor, matrix: Tensor) -> Demand:
    """A product that must give the matrix, with an error that is small beside its largest values."""
    return place, got, matrix, torch.linalg.matrix_norm(matrix)[..., None, None].expand_as(matrix)


def _svd(told: dict[str, Any], found: list[Tensor]) -> Iterator[Demand]:
    u, values, vh = found
    matrix = told["matrix"]
    right = torch.linalg.svdvals(matrix)
    yield 1, values, right, right.amax(-1, True).expand_as(right) if right.numel() else right
    if told["compute_uv"] and values.numel():
        count = values.shape[-1]
        yield _orthogonal(0, u)
        yield _orthogonal(2, vh.mT)
        yield _same(2, (u[..., :count] * values.unsqueeze(-2)) @ vh[..., :count, :], matrix)


def _eigh(told: dict[str, Any], found: list[Tensor]) -> Iterator[Demand]:
    values, vectors = found
    given = told["matrix"]
    lower = str(told["UPLO"]).upper() == "L"
    half = given.tril(-1) if lower else given.triu(1)
    matrix = half + half.mT + torch.diag_embed(given.diagonal(dim1=-2, dim2=-1))
    right = torch.linalg.eigvalsh(matrix)
    yield 0, values, right, right.abs().amax(-1, True).expand_as(right) if right.numel() else right
    if told["compute_v"] and values.numel():
        yield _orthogonal(1, vectors)
        yield _same(1, (vectors * values.unsqueeze(-2)) @ vectors.mT, matrix)


def _qr(told: dict[str, Any], found: list[Tensor]) -> Iterator[Demand]:
    q, r = found
    matrix = told["matrix"]
    yield 1, r.tril(-1), torch.zeros_like(r), torch.ones_like(r)
    if told["mode"] == "r":
        yield _same(1, r.mT @ r, matrix.mT @ matrix)
    elif matrix.numel():
        yield _orthogonal(0, q)
        yield _same(1, q @ r, matrix)


def _factors(place: int, permutation: Tensor, lower: Tensor, upper: Tensor, matrix: Tensor) -> Demand:
    got = permutation @ lower @ upper
    return place, got, matrix, permutation @ lower.abs() @ upper.abs() + matrix.abs()


def _lu(told: dict[str, Any], found: list[Tensor]) -> Iterator[Demand]:
    permutation, lower, upper = found
    if told["matrix"].numel() and permutation.numel():
        yield _factors(2, permutation, lower, upper, told["matrix"])


def _lu_factor(told: dict[str, Any], found: list[Tensor]) -> Iterator[Demand]:
    if told["matrix"].numel():
        permutation, lower, upper = torch.lu_unpack(found[0], found[1])
        yield _factors(0, permutation, lower, upper, told["matrix"])


FULFILS: dict[str, Demands] = {
    "_linalg_svd": _svd,
    "_linalg_eigh": _eigh,
    "linalg_qr": _qr,
    "linalg_lu": _lu,
    "linalg_lu_factor_ex": _lu_factor,
}
