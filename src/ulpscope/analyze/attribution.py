"""Loss-gap attribution: how much of the difference of two losses each call explains, to first order.

A call that is off by e moves the loss by <dL/dy, e>, with y its result. Between two runs it is the difference of their errors
that counts, and the gradient is the mean of both runs' own, so that the first term left out is the third. Weights that differ
count in the same way, by their own gradients. The sum is a check of itself: where the errors are small, it is the gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ulpscope.model.dtypes import Array

_EXPLAINED = (0.8, 1.25)
_BENT = 0.5
_UNIT = 2.0**-24


@dataclass(frozen=True, slots=True)
class Part:
    """One result (or weight) of a call in one run: how far it is off (or its value), and the gradient of the loss there."""

    error: Array
    gradient: Array


@dataclass(frozen=True, slots=True)
class Share:
    """What one call does to the gap. `what` is "introduced", or "weights" for those that differ before any arithmetic.

    `bend` is how much the amount would change from one run's gradients to the other's: small where first order holds.
    """

    call: str
    module: str
    what: str
    amount: float
    bend: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """The gap of one step and its shares, the largest first. `without` calls have no gradient, or cannot be run again."""

    step: int
    rank: int
    reference: float
    target: float
    shares: tuple[Share, ...]
    without: int = 0

    @property
    def gap(self) -> float:
        return self.target - self.reference

    @property
    def explained(self) -> float:
        """The sum of all amounts."""
        return math.fsum(share.amount for share in self.shares)

    @property
    def share(self) -> float:
        return self.explained / self.gap if self.gap else math.nan

    @property
    def of_weights(self) -> float:
        """The part of the sum that came in with weights: the cause is in an earlier step, or in what the runs were told."""
        return math.fsum(share.amount for share in self.shares if share.what == "weights")

    @property
    def doubt(self) -> str:
        """Why the shares should not be believed; empty where the sum is the gap."""
        if not (math.isfinite(self.gap) and math.isfinite(self.explained)):
            return "the loss or an error is not finite"
        if abs(self.gap) <= 2 * _UNIT * max(abs(self.reference), abs(self.target)):
            return "the gap is a rounding of the loss itself"
        bend = math.fsum(abs(share.bend) for share in self.shares)
        if bend > _BENT * abs(self.gap):
            return "the gradients of the runs differ too much: the errors are not small, this is not first order"
        if not _EXPLAINED[0] <= self.share <= _EXPLAINED[1]:
            return (
                "the sum is not the gap: a large or discrete error, an input that differs, or a call without gradient"
            )
        return ""


def share_of(call: str, module: str, what: str, pairs: Iterable[tuple[Part, Part]]) -> Share | None:
    """The share of a call from its parts in reference and target; None where they cannot be paired."""
    amount = bend = 0.0
    for reference, target in pairs:
        shapes = {array.shape for part in (reference, target) for array in (part.error, part.gradient)}
        if len(shapes) != 1:
            return None
        moved = (target.error - reference.error).ravel()
        low, high = (float(np.dot(part.gradient.ravel(), moved)) for part in (reference, target))
        amount += (low + high) / 2
        bend += high - low
    return Share(call, module, what, amount, bend)


def attribution(
    shares: Iterable[Share], *, step: int, rank: int, reference: float, target: float, without: int = 0
) -> Attribution:
    """Shares in the order of their size, those that do nothing left out."""
    known = sorted((share for share in shares if share.amount), key=lambda share: -abs(share.amount))
    return Attribution(step, rank, reference, target, tuple(known), without)
