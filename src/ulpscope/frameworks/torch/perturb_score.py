"""How far two results of one call are apart: by the ratios of the seeds' free benchmark, and by what can be explained.

Ratio: the largest quotient of two elements, either way round, of those that are larger than a bound of their dtype. Explained:
what float64 says that the change of the input does, plus rounding as far as the call magnifies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.perturb import Arguments, float_tensors, widest
from ulpscope.frameworks.torch.replay_score import UNIT

FLIPPED = "symbol_flipping"
_THRESHOLDS = {torch.float16: 1.002, torch.bfloat16: 1.004, torch.float32: 1.0002}
_SMALL = {torch.bfloat16: 1e-4, torch.float16: 1e-6, torch.float32: 1e-8, torch.float64: 1e-16}
_SMALL_GRADIENT = 1e-3
_CPU_THRESHOLDS = {torch.float32: 2.0**-14, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_CPU_BALANCE = 1e-4
_CPU_SMALL = 1.0
# How many units of rounding a call may add, besides what it magnifies: kernels round a few times inside.
_UNITS = 8.0
# And of the largest result, or of what a function works with: it may cancel inside, where its input does not tell. Erf does
# in gelu; a loss of nearly 0 is the difference of large logits; a gradient of softmax is that of gradients.
_FLOOR = 2.0
_STEP = 2.0**-26
_SAMPLES = 3


def threshold(dtype: torch.dtype, mode: str) -> float:
    """The largest ratio that counts as consistent."""
    return 1.0 if mode == "no_change" else _THRESHOLDS.get(dtype, _THRESHOLDS[torch.float32])


def ratio(found: Tensor, again: Tensor, *, backward: bool = False) -> float | str:
    """The largest quotient of two elements, at least 1; inf where only one of them is finite; FLIPPED where a sign is."""
    kind = again.dtype if again.dtype in _SMALL else torch.float32
    bound = _SMALL_GRADIENT if backward else math.sqrt(_SMALL[kind]) if again.is_floating_point() else 1.0
    left, right = _pair(found, again)
    if not left.numel():
        return 1.0
    if not torch.equal(left.isfinite(), right.isfinite()):
        return math.inf
    same = left.isfinite()
    left, right = torch.where(same, left, 0.0), torch.where(same, right, 0.0)
    large = torch.maximum(left.abs(), right.abs()) > bound
    if bool(((left * right < 0) & (left.abs() > bound) & (right.abs() > bound)).any()):
        return FLIPPED
    above, below = left.abs().clamp_min(bound), right.abs().clamp_min(bound)
    quotients = torch.where(large, torch.maximum(above / below, below / above), 1.0)
    return float(quotients.max())


def agrees_with_cpu(found: Tensor, again: Tensor) -> bool:
    """Whether a result agrees with the CPU's: relative error of large elements, absolute of small ones, and no bias."""
    limit = _CPU_THRESHOLDS.get(found.dtype, _CPU_THRESHOLDS[torch.float32])
    left, right = found.detach().double(), again.detach().to(found.device).double()
    if not left.numel() or not torch.equal(left.isfinite(), right.isfinite()):
        return not left.numel()
    same = left.isfinite()
    left, right = left[same], right[same]
    error = (left - right).abs() / right.abs().clamp_min(_CPU_SMALL)
    balance = ((left - right) / right.abs().clamp_min(_CPU_SMALL)).mean().abs() if left.numel() else 0.0
    return not left.numel() or (float(error.max()) <= limit and float(balance) <= max(_CPU_BALANCE, limit))


@dataclass(frozen=True, slots=True)
class Excess:
    """The largest quotient of a difference and what explains it. Above 1 it is not explained; None where nobody knows."""

    value: float | None
    reason: str = ""

    @property
    def is_explained(self) -> bool:
        return self.value is None or self.value <= 1.0


def excesses(
    run: Callable[[Arguments], list[Any]],
    given: Arguments,
    changed: Arguments,
    found: list[Any],
    again: list[Any],
    *,
    inside: Any = (),
) -> list[Excess]:
    """For each result, how its change compares with what float64 and rounding explain.

    `run` computes the results from arguments; it is called with float64 ones, `found` and `again` are as they were. `inside`
    are tensors of the size that the call works with before it cancels.
    """
    plain = [_by_rounding(left, right) for left, right in zip(found, again, strict=True)]
    if all(each is not None for each in plain):
        return [each for each in plain if each is not None]
    try:
        with torch.no_grad():
            wide = widest(given)
            exact, moved = run(wide), run(widest(changed))
            answers = _answers(run, wide, exact)
    except Exception as error:  # the border: there are calls that torch cannot make in float64
        reason = f"{type(error).__name__}: {error}"[:200]
        return [Excess(None, reason) if each is None else each for each in plain]
    largest = max((_largest(leaf) for leaf in float_tensors(inside)), default=0.0)
    terms = sum(leaf.numel() for leaf in float_tensors(inside))
    unit = max((UNIT.get(leaf.dtype, 0.0) for leaf in float_tensors((given, found))), default=2.0**-24)
    return [
        each
        if each is not None
        else _excess(left, right, exact[at], moved[at], answers[at] * _in_sequence(terms, left), unit, largest)
        for at, (each, left, right) in enumerate(zip(plain, found, again, strict=True))
    ]


def _by_rounding(found: Any, again: Any) -> Excess | None:
    """An answer that needs no float64: nothing to compare, or results as near as rounding alone brings them."""
    if not _comparable(found, again):
        return Excess(None, "no floating point result")
    left, right = _pair(found, again)
    limit = _UNITS * UNIT.get(found.dtype, 2.0**-24) * torch.maximum(left.abs(), right.abs())
    near = ((left - right).abs() <= limit) & limit.isfinite()
    far = ~near & ~((left == right) | (left.isnan() & right.isnan()))
    return None if bool(far.any()) else Excess(0.0)


def _excess(found: Tensor, again: Tensor, exact: Any, moved: Any, answer: Any, unit: float, largest: float) -> Excess:
    if not _comparable(exact, moved) or exact.shape != found.shape:
        return Excess(None, "no float64 result to compare it with")
    left, right = _pair(found, again)
    device = left.device
    allowed = (moved - exact).abs().to(device)
    size = torch.maximum(left.abs(), right.abs())
    allowed = allowed + _UNITS * unit * (size + answer.to(device)) + _FLOOR * unit * max(largest, _largest(size))
    error = (left - right).abs()
    # Only the program's own result is not finite: nothing explains that.
    broken = ~left.isfinite() & (right.isfinite() & exact.isfinite().to(device) & moved.isfinite().to(device))
    if bool(broken.any()):
        return Excess(math.inf)
    unknown = (left == right) | (left.isnan() & right.isnan()) | ~allowed.isfinite()
    shares = torch.where(unknown, 0.0, error / allowed.clamp_min(torch.finfo(torch.float64).tiny))
    return Excess(float(shares.nan_to_num(math.inf, math.inf).max()) if shares.numel() else 0.0)


def _in_sequence(terms: int, result: Tensor) -> float:
    """By how much more a sum answers that is taken one term after the other: its partial sums are rounded too."""
    return max(1.0, math.sqrt(terms / max(1, result.numel())) / 4)


def _answers(run: Callable[[Arguments], list[Any]], wide: Arguments, exact: list[Any]) -> list[Any]:
    """How the results answer when every element of the input moves by a unit by chance, per unit."""
    generator = torch.Generator().manual_seed(0)

    def shake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype is not torch.float64:
            return leaf
        signs = torch.randint(0, 2, leaf.shape, generator=generator).mul_(2).sub_(1).to(leaf.device, torch.float64)
        return leaf * (1 + _STEP * signs)

    squares: list[Any] = [0.0] * len(exact)
    for _ in range(_SAMPLES):
        shaken: Arguments = internals.tree_map(shake, wide)
        for at, (new, old) in enumerate(zip(run(shaken), exact, strict=True)):
            if _comparable(new, old):
                squares[at] = squares[at] + ((new.double() - old.double()) / _STEP).square().nan_to_num(0.0, 0.0, 0.0)
    found = []
    for square in squares:
        if isinstance(square, Tensor) and square.numel():
            square = (square / _SAMPLES + 0.1 * square.mean() / _SAMPLES).sqrt()
        found.append(square if isinstance(square, Tensor) else torch.zeros((), dtype=torch.float64))
    return found


def _largest(value: Tensor) -> float:
    """The largest finite magnitude."""
    return float(value.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0


def _comparable(found: Any, again: Any) -> bool:
    return (
        isinstance(found, Tensor)
        and isinstance(again, Tensor)
        and found.is_floating_point()
        and again.is_floating_point()
        and found.shape == again.shape
    )


def _pair(found: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
    # Both in the dtype of the first: what was computed wider is rounded as the program would have it.
    narrow = again.to(found.dtype) if again.is_floating_point() and found.is_floating_point() else again
    return found.detach().double(), narrow.detach().to(found.device).double()
