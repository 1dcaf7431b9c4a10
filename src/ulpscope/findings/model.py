"""What a call has to do with a difference, and what the comparison of one dump came to."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ulpscope.compare.comparison import CallComparison, Evidence, Level
from ulpscope.findings.exchange import Passings
from ulpscope.findings.steadiness import Steadiness
from ulpscope.model.records import CallId


class Status(enum.Enum):
    """What a call has to do with the difference."""

    IDENTICAL = "identical"
    ROUNDING = "within rounding"
    INTRODUCED = "introduced"
    INHERITED = "inherited"
    SOURCE = "differs before any call"
    CHOICE = "decided otherwise within rounding"
    OTHER = "other work after that"
    OUTSIDE = "from outside, read by nothing of the model"
    LOST = "lost"
    ELSEWHERE = "another way to the same values"
    UNMATCHED = "unmatched"
    UNSURE = "differs, and an argument was not recorded"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CallPlace:
    """A call, the module that it ran in, and where it is written."""

    call: str
    module: str
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Anchor:
    """A value that both runs have: which calls made it, how many elements it has, how far the two are apart."""

    reference: str
    target: str
    numel: int
    error: float


@dataclass(frozen=True, slots=True)
class Beside:
    """The calls of both sides between values that both have: the first of each, and how many there are."""

    reference: tuple[CallPlace, ...]
    target: tuple[CallPlace, ...]
    before: tuple[Anchor, ...]
    after: tuple[Anchor, ...]
    of_target: int
    of_reference: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A call to look at: what went in and came out, and how much of it was to be expected."""

    status: Status
    step: int
    rank: int
    comparison: CallComparison
    input_error: float | None
    output_error: float | None
    limit: float
    text: str
    # Where to look, if that is not the module that the call ran in.
    module: str = ""
    beside: Beside | None = None

    @property
    def where(self) -> str:
        """The module to look at."""
        return self.module or self.comparison.match.call.module

    @property
    def call(self) -> CallId:
        return self.comparison.match.call.id

    @property
    def weight(self) -> float:
        """How many times more error than can be believed."""
        if self.output_error is None:
            return 1.0
        return self.output_error / self.limit if self.limit else math.inf


@dataclass(slots=True)
class Divergence:
    """What one dump's comparison came to."""

    step: int
    rank: int
    calls: int = 0
    values: int = 0
    statuses: Counter[Status] = field(default_factory=Counter)
    levels: Counter[Level] = field(default_factory=Counter)
    evidence: Counter[Evidence] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    alone: list[tuple[str, str]] = field(default_factory=list)
    only_reference: int = 0
    only_target: int = 0
    unknown: list[tuple[str, str]] = field(default_factory=list)
    unknown_count: int = 0
    # Calls of which one should know, though nothing follows from them, and why.
    remarks: list[tuple[str, str]] = field(default_factory=list)
    # What a precision setting explains: in words, and the largest error of it.
    settings: dict[str, float] = field(default_factory=dict)
    # Modules that are called otherwise in the reference, by their name in the target.
    modules: dict[str, str] = field(default_factory=dict)
    steadiness: Steadiness = field(default_factory=Steadiness)
    passings: Passings = field(default_factory=Passings)
    worst: Finding | None = None
    # Whether what a call gave differs by more than anything that is known explains.
    unsure: bool = False

    @property
    def first(self) -> Finding | None:
        """The first call that introduced a difference, or the first value that came in different."""
        return self.findings[0] if self.findings else None

    @property
    def differs(self) -> bool:
        """Something was introduced, was lost, or came in different."""
        return bool(self.findings)

    @property
    def is_touched(self) -> bool:
        """Something differs by more than one rounding, wherever it began."""
        return self.differs or bool(self.statuses[Status.INHERITED])

    @property
    def agrees(self) -> bool:
        """Nothing was introduced, nothing was lost, nothing came in different, and what differs is known to be rounding."""
        return not (self.differs or self.unsure)

    @property
    def carries(self) -> bool:
        """All that differs began as rounding: nobody introduced it, and no call read anything that is not known."""
        return self.agrees

    def is_other_work(self) -> None:
        """After a decision in an earlier step: only what a call makes of the same inputs counts."""
        for status in (Status.INHERITED, Status.SOURCE, Status.UNMATCHED, Status.CHOICE):
            self.statuses[Status.OTHER] += self.statuses.pop(status, 0)
        self._drop([each for each in self.findings if not is_own(each)])

    def _drop(self, findings: Sequence[Finding]) -> None:
        gone = set(map(id, findings))
        for each in findings:
            if each.status is Status.INTRODUCED:
                self.statuses[Status.INTRODUCED] -= 1
                self.statuses[Status.OTHER] += 1
        self.findings = [each for each in self.findings if id(each) not in gone]


def is_own(finding: Finding) -> bool:
    """Whether a call made another output of the very same inputs."""
    return finding.status is Status.INTRODUCED and finding.input_error == 0.0
