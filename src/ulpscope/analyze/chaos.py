"""Bug or chaos: is a run further from the reference than the reference from itself after a nudge of one unit in the last place?

Some runs are nudged and drift apart by themselves. A distance is measured in units of that drift at the same step, a run's
score is its worst distance over all steps, and the observed run is placed among the nudged ones, each of which is scored
against the others. Nothing is assumed about how drift grows.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ulpscope.store.loss_curve import Point, Track

FEWEST = 3
_BEYOND = 3.0
_UNIT = 2.0**-24
Key = tuple[int, int, str]  # step, rank, loss or output
Distances = dict[Key, float]


class Origin(enum.Enum):
    """Where a gap may come from."""

    CHAOS = "chaos explains it"
    UNSURE = "not sure"
    BUG = "not chaos"


@dataclass(frozen=True, slots=True)
class Drift:
    """One quantity at one step: how far the nudged runs are off, sorted, and the observed one."""

    step: int
    rank: int
    what: str
    nudged: tuple[float, ...]
    floor: float
    observed: float | None = None

    @property
    def quantile(self) -> float | None:
        """The share of nudged runs that are less far off than the observed one."""
        if self.observed is None:
            return None
        return sum(each < self.observed for each in self.nudged) / len(self.nudged)

    @property
    def times(self) -> float:
        """The observed distance as a multiple of the largest drift."""
        return 0.0 if self.observed is None else _ratio(self.observed, max(*self.nudged, self.floor))


@dataclass(frozen=True, slots=True)
class Placement:
    """The observed run among the nudged: scores are worst distances in units of drift."""

    drifts: tuple[Drift, ...]
    scores: tuple[float, ...]
    observed: float | None = None

    @property
    def quantile(self) -> float | None:
        if self.observed is None:
            return None
        return sum(score < self.observed for score in self.scores) / len(self.scores)

    @property
    def origin(self) -> Origin | None:
        if self.observed is None:
            return None
        if self.observed <= max(self.scores):
            return Origin.CHAOS
        return Origin.BUG if self.observed > _BEYOND * max(self.scores) else Origin.UNSURE

    @property
    def first_beyond(self) -> Drift | None:
        """Where the observed run first leaves what drift explains."""
        return next((drift for drift in self.drifts if drift.times > _BEYOND), None)


def place(reference: Track, nudged: Sequence[Track], observed: Track | None = None) -> Placement:
    """Places a run among nudged ones. At least three of those are needed; raises ValueError with fewer."""
    if len(nudged) < FEWEST:
        raise ValueError(f"{len(nudged)} nudged runs say nothing about drift; at least {FEWEST} are needed")
    far = [_distances(reference, each) for each in nudged]
    seen = {} if observed is None else _distances(reference, observed)
    keys = sorted(set.intersection(*(set(each) for each in far)))
    if observed is not None:
        keys = [key for key in keys if key in seen]
    floors = {key: _floor(reference[key[:2]], key[2]) for key in keys}
    drifts = tuple(Drift(*key, tuple(sorted(each[key] for each in far)), floors[key], seen.get(key)) for key in keys)
    scores = [_score(each, [other for other in far if other is not each], floors) for each in far]
    own = None if observed is None else _score(seen, far, floors)
    return Placement(drifts, tuple(sorted(scores)), own)


def _score(run: Distances, others: Sequence[Distances], floors: Mapping[Key, float]) -> float:
    """The worst distance of a run, in units of how far the others are off at the same step."""
    return max(
        (_ratio(run[key], _spread([each[key] for each in others], floor)) for key, floor in floors.items()), default=0.0
    )


def _ratio(distance: float, unit: float) -> float:
    return 1.0 if math.isinf(unit) else distance / unit


def _spread(distances: Sequence[float], floor: float) -> float:
    """The root mean square, at least one rounding."""
    return max(math.sqrt(math.fsum(each * each for each in distances) / len(distances)), floor)


def _floor(point: Point, what: str) -> float:
    """One rounding in float32: a loss is not printed more exactly."""
    return _UNIT * max(abs(point.loss or 0.0), 2.0**-100) if what == "loss" else _UNIT


def _distances(reference: Track, target: Track) -> Distances:
    found: Distances = {}
    for (step, rank), point in target.items():
        other = reference.get((step, rank))
        if other is None:
            continue
        if point.loss is not None and other.loss is not None:
            found[step, rank, "loss"] = _number(point.loss - other.loss)
        if point.output and len(point.output) == len(other.output):
            size = math.hypot(*other.output) or 1.0
            found[step, rank, "output"] = _number(math.dist(point.output, other.output) / size)
    return found


def _number(distance: float) -> float:
    return abs(distance) if not math.isnan(distance) else math.inf
