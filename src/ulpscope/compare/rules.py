"""The verdicts and marks of the older tools' tables: accuracy, statistics, checksums, red and yellow rows.

Numbers in, verdict out; knows no table and no dump. The texts are those of the seed. Relative errors are relative to the
reference; what could not be measured is an `Unmeasured`, never a number.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Number = float | int
Statistics = tuple[Number | None, Number | None, Number | None, Number | None]
"""Largest, smallest, mean, L2 norm; None where one is not known."""


class Unmeasured(enum.Enum):
    """Why two tensors have no number."""

    NOT_FINITE = "N/A"
    NO_ELEMENTS = "unsupported"
    SHAPE = "shape unmatched"


Metric = Number | Unmeasured


# --- accuracy ---------------------------------------------------------------------------------------------------


class Accuracy(enum.Enum):
    """Whether two tensors are near enough, by all their elements."""

    YES = "Yes"
    NO = "No"
    NONE = "None"
    UNMATCHED = "Unmatched"


_LEAST_COSINE, _LEAST_COSINE_AT_ALL = 0.99, 0.9
_LARGEST_ERROR, _LARGEST_ERROR_AT_ALL = 0.001, 1.0
_UNMEASURED_ACCURACY = {
    Unmeasured.SHAPE: Accuracy.UNMATCHED,
    Unmeasured.NO_ELEMENTS: Accuracy.NONE,
}


def accuracy(cosine: Metric, max_abs_error: Metric) -> Accuracy:
    """The verdict on two tensors. A cosine that is nan, as one side is all zero, is no good one: the error decides.

    Of a tensor without dimensions the cosine is not known; where only one side is finite, that is an error all the same."""
    if Unmeasured.NOT_FINITE in (cosine, max_abs_error):
        return Accuracy.NO
    for metric in (cosine, max_abs_error):
        if isinstance(metric, Unmeasured):
            return _UNMEASURED_ACCURACY[metric]
    assert not isinstance(cosine, Unmeasured) and not isinstance(max_abs_error, Unmeasured)
    bad = (
        not cosine >= _LEAST_COSINE and not max_abs_error <= _LARGEST_ERROR,
        cosine < _LEAST_COSINE_AT_ALL,
        not max_abs_error <= _LARGEST_ERROR_AT_ALL,
    )
    return Accuracy.NO if any(bad) else Accuracy.YES


# --- statistics and checksums -----------------------------------------------------------------------------------


class Result(enum.Enum):
    """What statistics or checksums say; blank is no reason to look."""

    WARNING = "Warning"
    BLANK = ""
    PASS = "Pass"
    DIFFERENT = "Different"
    UNMATCHED = "N/A"


_LARGEST_RELATIVE = 0.5


def relative_error(reference: Number | None, target: Number | None) -> float | None:
    """|t - r| / |r|: 0 for equal numbers, inf where the reference is 0 or infinite, nan for nan; None if one is unknown."""
    if reference is None or target is None:
        return None
    if reference == target:
        return 0.0
    if reference and -math.inf < reference < math.inf:
        return abs((target - reference) / reference)
    return math.inf if reference == reference and target == target else math.nan


def nan_on_one_side(reference: Statistics, target: Statistics) -> bool:
    """Whether one of the numbers is nan on one side alone: no relative error says how wrong that is."""
    pairs = zip(reference, target, strict=True)
    return any(r is not None and t is not None and (r != r) is not (t != t) for r, t in pairs)


def statistics_result(errors: Iterable[float | None]) -> Result:
    """WARNING where one of the relative errors is above a half; one that is not known gives no warning."""
    for error in errors:
        if error is not None and error > _LARGEST_RELATIVE:
            return Result.WARNING
    return Result.BLANK


def checksum_result(reference: str | None, target: str | None) -> Result:
    """PASS for equal checksums; a checksum that is missing equals none."""
    if reference is None or target is None:
        return Result.UNMATCHED
    return Result.PASS if reference == target else Result.DIFFERENT


# --- marks ------------------------------------------------------------------------------------------------------


class Mark(enum.Enum):
    """The colour of a row."""

    RED = "red"
    YELLOW = "yellow"


class Kind(enum.Enum):
    """On what a table rests."""

    ELEMENTS = "elements"
    STATISTICS = "statistics"
    CHECKSUMS = "checksums"


@dataclass(frozen=True, slots=True)
class Marked:
    """What the rules look at in one value; None where a number is not known.

    `error` is the largest absolute error of the elements, or the difference of the largest elements where there are only
    statistics; `relative` the relative error of the largest element, `floored` the same over 0.01 at least.
    """

    largest: Number | None = None
    smallest: Number | None = None
    error: float | None = None
    relative: float | None = None
    floored: float | None = None
    ratio: float | None = None
    cosine: float | None = None
    same_gradient: bool = True


_FLOOR = 0.01


def floored_error(reference: Number | None, target: Number | None) -> float | None:
    """|t - r| over |r| or 0.01, whichever is more; nan for a nan or where both are infinite; None if one is unknown."""
    if reference is None or target is None:
        return None
    if math.isinf(reference):
        return math.nan
    return abs(target - reference) / max(_FLOOR, abs(reference))


def not_finite(value: Marked) -> bool:
    """Red 1: the target's largest or smallest element is nan or infinite."""
    return any(end is not None and not math.isfinite(end) for end in (value.largest, value.smallest))


def huge_error(value: Marked) -> bool:
    """Red 2: an error above 1e10; one that is infinite because of red 1 is not said twice."""
    return value.error is not None and value.error > 1e10 and not not_finite(value)


def ratio_collapses(before: Marked, after: Marked) -> bool:
    """Red 3: more than 0.9 of an input is within a thousandth, and less than 0.6 of the output."""
    return before.ratio is not None and after.ratio is not None and before.ratio > 0.9 and after.ratio < 0.6


def largest_is_off(value: Marked) -> bool:
    """Red 4: the output's largest element is off by more than a half of the reference's, or of 0.01."""
    return value.floored is not None and value.floored > 0.5


def error_grows(before: Marked, after: Marked) -> bool:
    """Yellow 1: both errors above 1, and the output's ten times an input's or more."""
    return (
        before.error is not None and after.error is not None and before.error > 1 and after.error >= 10 * before.error
    )


def ratio_falls(before: Marked, after: Marked) -> bool:
    """Yellow 2: the share within a thousandth falls by more than 0.1."""
    return before.ratio is not None and after.ratio is not None and before.ratio - after.ratio > 0.1


def relative_error_appears(before: Marked, after: Marked) -> bool:
    """Yellow 3: the largest element of an input is within 0.01, that of the output is not within 0.1."""
    return (
        before.relative is not None and after.relative is not None and before.relative < 0.01 and after.relative > 0.1
    )


def cosine_falls(before: Marked, after: Marked) -> bool:
    """Yellow 4: the cosine falls by more than 0.1."""
    return before.cosine is not None and after.cosine is not None and before.cosine - after.cosine > 0.1


def gradient_differs(value: Marked) -> bool:
    """Yellow 5: requires_grad differs."""
    return not value.same_gradient


_BOTH = frozenset({Kind.ELEMENTS, Kind.STATISTICS})


@dataclass(frozen=True, slots=True)
class AloneRule:
    """A rule about one value."""

    mark: Mark
    reason: str
    holds: Callable[[Marked], bool]
    kinds: frozenset[Kind] = _BOTH
    outputs_only: bool = False


@dataclass(frozen=True, slots=True)
class PairRule:
    """A rule about an input and an output of a call; it marks the output."""

    mark: Mark
    reason: str
    holds: Callable[[Marked, Marked], bool]
    kinds: frozenset[Kind] = _BOTH


RULES: tuple[AloneRule | PairRule, ...] = (
    AloneRule(Mark.RED, "maximum or minimum is nan, -inf, or inf", not_finite),
    AloneRule(Mark.RED, "maximum absolute error exceeds 1e+10", huge_error),
    PairRule(
        Mark.RED,
        "The input/parameter's one thousandth err ratio exceeds 0.9, while the output's is below 0.6",
        ratio_collapses,
        frozenset({Kind.ELEMENTS}),
    ),
    AloneRule(
        Mark.RED,
        "maximum relative error exceeds 0.5",
        largest_is_off,
        frozenset({Kind.STATISTICS}),
        outputs_only=True,
    ),
    PairRule(
        Mark.YELLOW,
        "maximum absolute error of both input/parameters and output exceed 1, with the output larger by an order of magnitude",
        error_grows,
    ),
    PairRule(
        Mark.YELLOW,
        "The output's one thousandth err ratio decreases by more than 0.1 compared to the input/parameter's",
        ratio_falls,
        frozenset({Kind.ELEMENTS}),
    ),
    PairRule(
        Mark.YELLOW,
        "The output's maximum relative error exceeds 0.1, while the input/parameter's is below 0.01",
        relative_error_appears,
    ),
    PairRule(
        Mark.YELLOW,
        "The output's cosine decreases by more than 0.1 compared to the input/parameter's",
        cosine_falls,
        frozenset({Kind.ELEMENTS}),
    ),
    AloneRule(Mark.YELLOW, "requires_grad is inconsistent", gradient_differs),
)


Judged = tuple[Mark | None, tuple[str, ...]]
UNMARKED: Judged = (None, ())


def marks(inputs: Sequence[Marked], outputs: Sequence[Marked], kind: Kind) -> list[Judged]:
    """The mark of each input, then of each output of a call, with its reasons. Red beats yellow, and its reasons too."""
    best = _best(inputs) if inputs and outputs else None
    found = [_judged(value, None, kind) for value in inputs]
    return found + [_judged(value, best, kind, output=True) for value in outputs]


def _judged(value: Marked, best: Marked | None, kind: Kind, *, output: bool = False) -> Judged:
    mark, reasons = None, []
    for rule in RULES:
        if kind not in rule.kinds:
            continue
        if isinstance(rule, PairRule):
            holds = best is not None and rule.holds(best, value)
        else:
            holds = (output or not rule.outputs_only) and rule.holds(value)
        # Red rules come first.
        if holds and mark in (None, rule.mark):
            mark = rule.mark
            reasons.append(rule.reason)
    return (mark, tuple(reasons)) if mark else UNMARKED


def _best(inputs: Sequence[Marked]) -> Marked:
    """An input that meets a rule about pairs wherever one of the inputs does; so the cost is not their product."""
    return Marked(
        error=_extreme(min, [each.error for each in inputs if each.error is not None and each.error > 1]),
        relative=_extreme(min, [each.relative for each in inputs]),
        ratio=_extreme(max, [each.ratio for each in inputs]),
        cosine=_extreme(max, [each.cosine for each in inputs]),
    )


def _extreme(choose: Callable[[list[float]], float], numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None and not math.isnan(number)]
    return choose(known) if known else None
