"""How far a result is from its reference, in units of round-off of its dtype. Numbers out, no tensor kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Unit round-off: half the distance of 1 to the next number.
UNIT: dict[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
# What kernels with results of this dtype compute in: float32; in low precision by quick functions, good to 20 bits.
INNER = {dtype: unit if unit <= 2.0**-24 else 2.0**-20 for dtype, unit in UNIT.items()}
# What a quick function may lose at the end of the range of float32, times a factor: an exponential that overflows is a reciprocal of 0.
FADES = 2.0**-116
# Factors of products of float32 are rounded to these where a program allows it.
FACTORS = {"tf32": 2.0**-11, "bf16": 2.0**-8}
_MANY = 64  # fewer elements say nothing about a systematic error
# Leaning less than this is below every limit: in low precision, and else.
_NOTABLE, _NOTABLE_WIDE = 0.03, 0.25
_FLOAT32 = 2.0**-24
_CHANCE = 6.0  # standard errors that a mean may be off by chance, as in analyze.ledger
_ANY = 1e300
_CANCELLED = 1 / 16  # of its terms, an element that is smaller has cancelled
_PLENTY = 1 << 15
_BINS = 64


def can_score(found: Any) -> bool:
    return isinstance(found, Tensor) and found.dtype in UNIT


def exact_score(found: Tensor, expected: Tensor) -> dict[str, Any]:
    """Every element must be there to the bit (a NaN for a NaN)."""
    if found.shape != expected.shape:
        return {"rms": 0.0, "worst": 0.0, "wrong": max(found.numel(), 1)}
    if expected.dtype is not found.dtype:
        expected = expected.to(found.dtype)
    if torch.equal(found, expected):
        return {"rms": 0.0, "worst": 0.0}
    differs = found != expected
    if found.is_floating_point() or found.is_complex():
        differs &= ~(found.isnan() & expected.isnan())
    wrong = int(differs.sum())
    if not wrong:
        return {"rms": 0.0, "worst": 0.0}
    lost = int((~torch.isfinite(found) & torch.isfinite(expected)).sum()) if found.dtype in UNIT else 0
    error = differs.double()
    if found.dtype in UNIT:
        error = _units(found.double(), expected.double(), None, UNIT[found.dtype], 0.0, subnormal(found.dtype), True)
        error = torch.where(differs, error.nan_to_num(0.0, 0.0, 0.0), torch.zeros_like(error))
    rms, worst = float(error.norm()) / math.sqrt(error.numel()), float(error.abs().max())
    return {"rms": rms, "worst": worst, "wrong": wrong, "lost": lost, "profile": profile(error)}


def rounded_score(
    found: Tensor,
    expected: Tensor,
    scale: Tensor | None,
    *,
    dtype: torch.dtype,
    working: bool,
    leans: bool = True,
    factors: str | None = None,
    fades: bool = False,
) -> dict[str, Any]:
    """Score of a result that may be rounded, in units of `dtype`, or of what the factors of products are rounded to.

    `scale` is the condition of the operation at each element. With `working`, partial results may have been rounded to
    the dtype of the result; without, only the result itself, and what happened inside is of the inner precision. Without
    `leans` nothing is said about a systematic error: some parts of a large result are enough for that. `fades`: the smallest
    numbers may be lost.
    """
    if found.shape != expected.shape:
        return {"rms": 0.0, "worst": 0.0, "wrong": max(found.numel(), 1)}
    unit, inner = FACTORS[factors] if factors else UNIT[dtype], INNER[dtype]
    y = found.double()
    least = max(subnormal(dtype), FADES if fades and dtype is not torch.float64 else 0.0)
    answer: dict[str, Any] = {}
    error = _units(y, expected, scale, unit, inner, least, working)
    rms, worst, size, total = _numbers(error, y)
    finite: Tensor | None = None
    if not math.isfinite(rms + size):
        finite, answer = _non_finite(y, expected, found.dtype)
        y, expected = y[finite], expected[finite]
        # Where a term is no number, any error may be rounding.
        scale = None if scale is None else scale.expand(finite.shape)[finite].nan_to_num(_ANY, _ANY, _ANY)
        if not y.numel():
            return {"rms": 0.0, "worst": 0.0, **answer}
        error = _units(y, expected, scale, unit, inner, least, working)
        rms, worst, size, total = _numbers(error, y)
    count = y.numel()
    answer |= {"rms": rms / math.sqrt(count), "worst": worst, "total": total, "size": size}
    if unit > inner and not working and found.dtype is dtype:
        answer["misrounded"] = _misrounded(y, expected, scale, dtype, inner)
    if leans and count >= _MANY and rms:
        terms = None if scale is None else scale.expand(y.shape) * (_CANCELLED * (1.0 if working else inner / unit))
        answer |= _bias(*_thinned(y, expected, terms), unit, torch.finfo(dtype).tiny)
    if answer["rms"] > 1.5 or worst > 6.0 or answer.get("lost"):
        answer["profile"] = profile(error if finite is None else _spread_out(error, finite))
        largest = y.abs()
        top = largest.max()
        # At the end of the range, and not where they should be: a common factor leaves large elements alone there.
        clipped = (largest == top) & (expected.abs() > largest * (1 + 8 * unit))
        answer["profile"] |= {"top": float(top), "clipped": int(clipped.sum())}
    return answer


def _misrounded(y: Tensor, expected: Tensor, scale: Tensor | None, dtype: torch.dtype, inner: float) -> float:
    """The share of results that are not the nearest number, though what happened inside would let them be."""
    nearest = expected.to(dtype).double()
    room = (nearest - expected).abs_().add_(expected.abs() if scale is None else scale, alpha=inner)
    return int(((y != nearest) & ((y - expected).abs() > room)).sum()) / y.numel()


def _numbers(error: Tensor, y: Tensor) -> list[float]:
    """Norm and largest of the errors, norm and sum of the values."""
    low, high = torch.aminmax(error)
    norm = torch.linalg.vector_norm
    found: list[float] = torch.stack([norm(error), torch.maximum(-low, high), norm(y), y.sum()]).tolist()
    return found


def _units(
    y: Tensor, expected: Tensor, scale: Tensor | None, unit: float, inner: float, least: float, working: bool
) -> Tensor:
    size = expected.abs()
    if scale is None:
        allowed = size.mul_(unit)
    elif working:
        allowed = size.square_().addcmul_(scale, scale).sqrt_().mul_(unit)
    else:
        allowed = size.mul_(unit).add_(scale, alpha=inner)
    return (y - expected).div_(allowed.add_(least))


def subnormal(dtype: torch.dtype) -> float:
    """Half the distance between the smallest numbers."""
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps / 2, 1e-300)


def _non_finite(y: Tensor, expected: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """Where both sides are numbers, and how many are not: lost, beyond what the dtype can hold, or on both sides."""
    largest = torch.finfo(dtype).max
    known = torch.isfinite(expected)
    beyond = known & (expected.abs() > largest * (1 - UNIT[dtype]))
    there = torch.isfinite(y)
    lost = int((known & ~beyond & ~there).sum()) + int((expected.isnan() & there).sum())
    kept = known & there
    both = expected[~known & ~there]
    undefined = int(both.isnan().sum())
    answer = {"lost": lost, "overflowed": int((beyond & ~there).sum())}
    return kept, answer | {"undefined": undefined, "infinite": both.numel() - undefined}


def _thinned(y: Tensor, expected: Tensor, terms: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows enough for a mean: every so-manieth of the first dimension."""
    step = y.numel() // _PLENTY
    if step < 2 or (y.shape[0] < 2 * step and y.dim() > 1):
        return y, expected, terms
    return y[::step], expected[::step], None if terms is None else terms[::step]


def _bias(y: Tensor, expected: Tensor, terms: Tensor | None, unit: float, tiny: float) -> dict[str, Any]:
    """The mean of the relative error over the larger elements, toward the value and upward, with its standard error.

    `terms`: of an element below it the terms have cancelled, and what is left of them leans anywhere."""
    # Below the normal numbers the distance to the next number no longer shrinks: a relative error means nothing there.
    limit = max(0.5 * float(expected.norm()) / math.sqrt(expected.numel()), 16 * tiny)
    large = expected.abs() > limit
    if terms is not None:
        large &= expected.abs() > terms
    count = int(large.sum())
    if count < _MANY:
        return {}
    error = y - expected
    q = (error / expected).masked_fill_(~large, 0.0)
    up = q * expected.sign()
    toward, lift, squares = torch.stack([q.sum(), up.sum(), q.square().sum()]).tolist()
    toward, lift, deviation = toward / count / unit, lift / count / unit, math.sqrt(squares / count) / unit
    spread = deviation / math.sqrt(count)
    size = max(abs(toward), abs(lift))
    if size > (_NOTABLE if unit > _FLOAT32 else _NOTABLE_WIDE):
        for other in _clustered(q if abs(toward) > abs(lift) else up, (error, y), large):
            if spread > size / _CHANCE:
                break  # chance explains it: whatever else may is not asked
            spread = max(spread, float(other) / count / unit)
    return {"toward": toward, "up": lift, "spread": spread}


def _clustered(q: Tensor, others: tuple[Tensor, Tensor], large: Tensor) -> Iterator[Tensor]:
    """How far sums of errors are by chance where these are not independent: rows and columns that share one, or equal ones.

    `others`: the errors as they are, and the results."""
    flat = q[large]
    every = list(range(q.dim()))
    for dims in ([-1], *([other for other in every if other != place] for place in every)) if q.dim() > 1 else ():
        weights = large.sum(dims).flatten()
        sums = q.sum(dims).flatten()
        known = weights > 0
        if int(known.sum()) < 2:
            continue
        # Weighted means of clusters, and how far they are from the mean of all.
        yield (sums[known] - weights[known] * flat.mean()).norm()
    # Equal elements have equal errors, and so have sums of one number and multiples of the last digit: that is one draw.
    # Where all results are a few neighbouring numbers, they are off as those happen to lie.
    for same in (flat, *(other[large].float() for other in others)):
        values, which = torch.unique(same, return_inverse=True)
        yield torch.zeros(len(values), dtype=flat.dtype, device=flat.device).index_add_(0, which, flat).norm()


def _spread_out(error: Tensor, finite: Tensor) -> Tensor:
    whole = torch.full(finite.shape, math.inf, dtype=torch.float64, device=error.device)
    whole[finite] = error
    return whole


def profile(error: Tensor) -> dict[str, Any]:
    """The shape of an error, small: for each dimension the largest error in up to 64 bins, and where it is worst."""
    size = error.abs().nan_to_num(math.inf)
    limited = size.clamp_max(1e30)
    off = max(4.0, 0.01 * float(limited.max()))
    dims = []
    for place, length in enumerate(size.shape):
        others = [other for other in range(size.dim()) if other != place]
        line = limited.amax(others) if others else limited
        bins = min(length, _BINS)
        edges = [at * length // bins for at in range(bins + 1)]
        heights = [round(float(line[low:high].max()), 3) for low, high in itertools.pairwise(edges)]
        bad = torch.nonzero(line > off).flatten()
        dims.append(
            {
                "length": length,
                "bins": heights,
                "bad": int(bad.numel()),
                "first": int(bad[0]) if bad.numel() else None,
                "last": int(bad[-1]) if bad.numel() else None,
                "step": math.gcd(*bad.diff().tolist()) if bad.numel() > 1 else 0,
            }
        )
    flat = limited.flatten()
    rest = int(flat.argmax())
    worst_at: list[int] = []
    for length in reversed(size.shape):
        rest, index = divmod(rest, length)
        worst_at.insert(0, index)
    return {"dims": dims, "share": float((flat > off).double().mean()), "worst_at": worst_at}
