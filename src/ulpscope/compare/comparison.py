"""The words of a comparison: two calls that belong together, two values, what was found. Plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ulpscope.compare.metrics import Contrast
from ulpscope.model.records import CallRecord, Slot, Value


# Enumerations that are counted for every value are texts as well: a text hashes in C, an enum in Python.
class How(str, enum.Enum):
    """By what two calls were put together."""

    NAME = "same name"
    VALUES = "same place, or the same values"
    FUZZY = "same name, other call number"
    MAPPING = "mapping file"
    ALONE = "alone"


class Evidence(str, enum.Enum):
    """What a comparison of two values rests on, best first."""

    ELEMENTS = "elements"
    SKETCH = "sketch"
    STATISTICS = "statistics"
    CHECKSUM = "checksum"
    SCALAR = "value"
    NOTHING = "nothing"


class Level(str, enum.Enum):
    """PASS: identical or rounding. WARN: the numbers agree, something about them does not. FAIL: they differ."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNMATCHED = "unmatched"
    UNKNOWN = "unknown"


class Code(str, enum.Enum):
    """Why a verdict is what it is."""

    IDENTICAL = "identical"
    AGREES = "no difference seen"
    ROUNDING = "within rounding"
    DIFFERENT = "different"
    NOT_FINITE = "nan or inf at other places"
    ARGUMENT = "other argument"
    SHAPE = "other shape"
    DTYPE = "other dtype"
    REQUIRES_GRAD = "other requires_grad"
    TYPE = "other type"
    DEVICE = "other device"
    NO_REFERENCE = "only in the target"
    NO_TARGET = "only in the reference"
    NOT_MEASURED = "not measured"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of two values, and why: codes, and a text where there is more to say."""

    level: Level
    codes: tuple[Code, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """Two calls that belong together, or one that is alone; `why` says why it is."""

    reference: CallRecord | None
    target: CallRecord | None
    how: How
    why: str = ""

    @property
    def call(self) -> CallRecord:
        """The target's call, or the reference's where the target has none."""
        found = self.target or self.reference
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row of every report: two values of a matched call, or one that is alone.

    `error` is the relative error as far as the evidence shows it: 0 for identical, inf for what cannot be scaled, None
    where it is not known. `rounding` is the unit round-off of the coarser of the two dtypes.
    """

    match: Match
    slot: Slot
    reference: Value | None
    target: Value | None
    evidence: Evidence
    verdict: Verdict
    error: float | None = None
    rounding: float = 0.0
    contrast: Contrast | None = None


@dataclass(frozen=True, slots=True)
class CallComparison:
    """A matched call with all its values."""

    match: Match
    values: tuple[Comparison, ...]
