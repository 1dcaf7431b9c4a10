"""What a judgement says: verdicts, findings and remarks. No rules."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ulpscope.analyze.limits import Limit
from ulpscope.store.ledger_file import Measure, Row

_SURE = 4.0  # so many limits above are not a matter of where the limit is
REPLAY, STATISTICS = "replay", "statistics"  # what a judgement rests on


class Verdict(enum.Enum):
    """What one call did."""

    IDENTICAL = "identical"
    WITHIN = "within rounding"
    HABIT = "habit"
    PURPOSE = "on purpose"
    INTRODUCED = "introduced"
    TOLD = "told differently"
    INHERITED = "inherited"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Seen:
    """Two runs of a call from outside: relative errors of what went in and came out, and what is believable; None: unknown.

    `by` is what tells them: elements, sketch, statistics or checksum."""

    by: str
    input_error: float | None
    output_error: float | None
    expected: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A call that is not explained by rounding. `excess` is how many times it is above its limit.

    A replayed call has a measure, one that was only compared has what was seen of it."""

    row: Row
    verdict: Verdict
    why: str
    excess: float
    measure: Measure | None = None
    limit: Limit | None = None
    seen: Seen | None = None

    @property
    def is_remark(self) -> bool:
        """Whether this is worth a word and no fault: what a kernel does at every call, what is so on purpose and did no harm."""
        return self.verdict is Verdict.HABIT or (self.verdict is Verdict.PURPOSE and not self.excess)

    @property
    def sure(self) -> bool:
        return self.excess >= _SURE


@dataclass(frozen=True, slots=True)
class Judgement:
    """All findings in the order of execution, the one to look at, and how many rows got which verdict.

    `doubt` is what can be said where no call is named and "nothing is wrong" would be too much; `unseen` what ran and was not
    seen, with how often; `before` how many calls were made before the first forward of a model, which are not judged. `remarks`
    are no faults: what a kernel does at every call, and values that are infinite or no number by definition."""

    first: Finding | None
    findings: tuple[Finding, ...]
    counts: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    compared: bool = False
    by: str = REPLAY
    doubt: str = ""
    unseen: dict[str, int] = field(default_factory=dict)
    before: int = 0
    remarks: tuple[Finding, ...] = ()

    @property
    def answer(self) -> str:
        """What is to be said where no call is named."""
        if self.doubt:
            return self.doubt
        judged = sum(self.counts.values()) - self.counts.get(Verdict.UNKNOWN.value, 0)
        if self.by != REPLAY or not self.counts.get(Verdict.UNKNOWN.value):
            return "nothing is wrong: rounding explains every call"
        return f"nothing is wrong in what was judged: rounding explains {judged} of {sum(self.counts.values())} calls"
