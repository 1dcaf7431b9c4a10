"""One answer over all ranks: which finding came first, and by which communication calls its difference went on.

Ranks share no clock. What orders them is communication: whatever a rank did before an exchange precedes whatever any
member does after it. Every rank is walked along its exchanges; each exchange gives its members a common epoch and tells
them whose findings lie behind them. Findings that no other precedes are all first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ulpscope.compare.comparison import Code
from ulpscope.findings.exchange import KIND, Direction, Passing, Side
from ulpscope.findings.model import Divergence, Finding, Status
from ulpscope.model.names import call_text
from ulpscope.model.records import CallId

# How much more relative error than the values of a step those may have that go on to the next.
_GAIN = 16.0


@dataclass(frozen=True, slots=True)
class Hop:
    """A communication call by which the difference of `sources` reached ranks that had none."""

    call: CallId
    sources: tuple[int, ...]
    reached: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{ranks_text(self.sources)} -> {ranks_text(self.reached)} at {call_text(self.call)}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a difference begins, over all ranks of the earliest step that has one.

    `also` are the findings of other ranks that nothing precedes either. `findings` are all that stay findings once the
    ranks are seen together, in order. `ranks` are those that differ, `clean` those that do not.
    """

    first: Finding | None = None
    also: tuple[Finding, ...] = ()
    hops: tuple[Hop, ...] = ()
    findings: tuple[Finding, ...] = ()
    ranks: tuple[int, ...] = ()
    clean: tuple[int, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """How it went from rank to rank; nothing where there is but one rank."""
        if self.first is None or len(self.ranks) + len(self.clean) < 2:
            return ()
        told = []
        for name, ranks in _by_call(self.also):
            told.append(f"at the same time {ranks_text(ranks)}: {name}")
        told += [hop.text for hop in self.hops]
        known = {
            self.first.rank,
            *(each.rank for each in self.also),
            *(rank for hop in self.hops for rank in hop.reached),
        }
        unseen = [rank for rank in self.ranks if rank not in known]
        if unseen:
            told.append(f"{ranks_text(unseen)} too, by no recorded communication call")
        if self.clean:
            told.append(f"{ranks_text(self.clean)} {'agree' if len(self.clean) > 1 else 'agrees'} with the reference")
        return tuple(told)


def origin(divergences: Iterable[Divergence]) -> Origin:
    """The answer over all ranks of the earliest step in which something was found.

    Keeps the divergences of a step only while none before it has a finding.
    """
    steps: dict[int, dict[int, Divergence]] = {}
    earliest: int | None = None
    for each in divergences:
        if earliest is not None and each.step > earliest:
            continue
        steps.setdefault(each.step, {}).setdefault(each.rank, each)
        if each.findings:
            earliest = each.step
            steps = {step: ranks for step, ranks in steps.items() if step <= earliest}
    if earliest is not None:
        return _Walk(steps[earliest]).origin()
    # Without a finding nothing is to be ordered.
    ranks = {rank for step in steps.values() for rank in step}
    differ = {rank for step in steps.values() for rank, each in step.items() if each.is_touched}
    return Origin(ranks=tuple(sorted(differ)), clean=tuple(sorted(ranks - differ)))


def explain_later(divergences: Iterable[Divergence]) -> list[Divergence]:
    """The divergences by step and rank; what a step got from outside is not a finding where the step before differs already."""
    ordered = sorted(divergences, key=lambda each: (each.step, each.rank))
    before: dict[int, _Before] = {}
    for each in ordered:
        earlier = before.setdefault(each.rank, _Before())
        if earlier.decided:
            each.is_other_work()
        elif earlier.differs or earlier.unsteady:
            each.steadiness.earlier = earlier.unsteady
            passed_on = [found for found in each.findings if found.status is Status.SOURCE and earlier.explains(found)]
            kept = set(map(id, passed_on))
            each.findings = [found for found in each.findings if id(found) not in kept]
            others = (
                0 if any(found.status is Status.SOURCE for found in each.findings) else each.statuses[Status.SOURCE]
            )
            moved = max(len(passed_on), others)
            each.statuses[Status.INHERITED] += moved
            each.statuses[Status.SOURCE] -= moved
        earlier.differs |= not each.carries
        earlier.unsteady |= bool(each.steadiness.unsteady) or not each.agrees
        earlier.decided |= each.steadiness.choice is not None
        if each.worst is not None and each.worst.output_error is not None:
            earlier.largest = max(earlier.largest, each.worst.output_error)
    return ordered


@dataclass(slots=True)
class _Before:
    """What the steps before came to, of one rank. `largest` is the largest error they left."""

    differs: bool = False
    unsteady: bool = False
    decided: bool = False
    largest: float = 0.0

    def explains(self, finding: Finding) -> bool:
        """Whether what a step got from outside is what the step before left: where that was rounding, hardly more than it was."""
        if is_argument(finding):
            return False
        error = finding.input_error
        return self.differs or (error is not None and error <= _GAIN * self.largest)


def is_argument(finding: Finding) -> bool:
    """Whether a finding is an argument that is another one, not a tensor."""
    codes = {code for each in finding.comparison.values for code in each.verdict.codes}
    return finding.status is Status.SOURCE and bool(codes & {Code.ARGUMENT, Code.TYPE})


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 5`, `ranks 0, 4-7`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    many = len(spans) > 1 or (spans and spans[0][0] != spans[0][1])
    return f"rank{'s' if many else ''} {text}"


# --- the walk ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rank:
    """How far a rank was walked: its epoch, whose findings lie behind it (a bit each), whether it differs by now."""

    divergence: Divergence
    ahead: Iterator[Passing]
    own: deque[Finding]
    incoming: dict[int, Finding]
    epoch: int = 0
    behind: int = 0
    differs: bool = False


@dataclass(slots=True)
class _Open:
    """An exchange that some of its members have reached."""

    parts: dict[int, Passing] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    epoch: int = 0
    behind: int = 0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A finding with its place in the common order."""

    epoch: int
    late: bool
    finding: Finding
    preceded: bool

    @property
    def order(self) -> tuple[int, bool, int, int]:
        return self.epoch, self.late, self.finding.comparison.match.call.seq, self.finding.rank


class _Walk:
    """Walks the ranks of one step along their exchanges."""

    def __init__(self, divergences: dict[int, Divergence]) -> None:
        self._ranks = {rank: _walker(divergences[rank]) for rank in sorted(divergences)}
        self._bits = {rank: 1 << at for at, rank in enumerate(self._ranks)}
        self._takers: dict[tuple[object, ...], list[int]] = {}
        for each in divergences.values():
            for key, count in each.passings.counts.items():
                self._takers.setdefault(key, []).append(count)
        for counts in self._takers.values():
            counts.sort()
        self._open: dict[tuple[object, ...], _Open] = {}
        self._found: list[_Candidate] = []
        self._hops: list[Hop] = []

    def origin(self) -> Origin:
        """Walks all ranks to their ends."""
        ready, blocked = deque(self._ranks), dict[int, tuple[object, ...]]()
        while ready or blocked:
            if not ready:
                # Receives that were started before the sends they wait for: what comes is counted from when it comes.
                rank = min(blocked, key=lambda each: self._ranks[each].epoch)
                self._open[blocked.pop(rank)].waiting.remove(rank)
                ready.append(rank)
            rank = ready.popleft()
            for passing in self._ranks[rank].ahead:
                self._own_findings(rank, passing.seq)
                freed, key = self._arrive(rank, passing)
                for each in freed:
                    blocked.pop(each, None)
                ready.extend(freed)
                if key is not None:
                    blocked[rank] = key
                    break
            else:
                self._own_findings(rank, None)
        return self._answer()

    def _own_findings(self, rank: int, before: int | None) -> None:
        walker = self._ranks[rank]
        while walker.own and (before is None or walker.own[0].comparison.match.call.seq <= before):
            self._candidate(rank, walker.own.popleft(), late=True)

    def _candidate(self, rank: int, finding: Finding, *, late: bool, behind: int | None = None) -> None:
        walker = self._ranks[rank]
        preceded = walker.behind if behind is None else behind
        self._found.append(_Candidate(walker.epoch, late, finding, bool(preceded)))
        walker.behind |= self._bits[rank]
        walker.differs = True

    def _arrive(self, rank: int, passing: Passing) -> tuple[list[int], tuple[object, ...] | None]:
        """Brings a rank to an exchange. Who may go on because of it, and the exchange if the rank has to wait."""
        key = (passing.way.key, passing.nth)
        walker, opened = self._ranks[rank], self._open.setdefault(key, _Open())
        opened.parts[rank] = passing
        if passing.way.direction is not Direction.RECEIVE:
            opened.epoch = max(opened.epoch, walker.epoch)
            opened.behind |= walker.behind
        if len(opened.parts) == self._expected(passing):
            self._complete(opened)
            del self._open[key]
            return opened.waiting, None
        if passing.way.direction is Direction.SEND:
            return [], None
        opened.waiting.append(rank)
        return [], key

    def _expected(self, passing: Passing) -> int:
        """How many of the ranks that were compared take part."""
        takers = self._takers[passing.way.key]
        return len(takers) if passing.nth < takers[0] else sum(count > passing.nth for count in takers)

    def _complete(self, opened: _Open) -> None:
        behind = opened.behind
        before = {rank for rank in opened.parts if self._ranks[rank].differs}
        for rank, passing in opened.parts.items():
            walker = self._ranks[rank]
            if passing.way.direction is not Direction.SEND:
                walker.epoch = max(walker.epoch, opened.epoch + 1)
                walker.behind |= behind
            walker.differs |= passing.got is Side.DIFFERS
        sources = tuple(sorted(rank for rank, part in opened.parts.items() if part.gave is Side.DIFFERS))
        came = [rank for rank, part in opened.parts.items() if part.got is Side.DIFFERS and rank not in sources]
        if sources:
            reached = tuple(sorted(rank for rank in came if rank not in before))
            if reached:
                self._hops.append(Hop(opened.parts[sources[0]].call, sources, reached))
            return
        for rank in sorted(came):
            finding = self._ranks[rank].incoming.get(opened.parts[rank].seq)
            if finding is not None:
                self._candidate(rank, self._resolved(finding, opened), late=False, behind=behind)

    def _resolved(self, finding: Finding, opened: _Open) -> Finding:
        """A difference that came over communication to which no rank that was compared gave it."""
        unknown = [rank for rank, part in opened.parts.items() if part.gave is Side.UNKNOWN]
        if unknown:
            return replace(finding, text=f"it came from other ranks, and what {ranks_text(unknown)} gave is not known")
        way = opened.parts[finding.rank].way
        absent = [rank for rank in way.ranks if rank not in opened.parts]
        if absent:
            return replace(finding, text=f"it came from other ranks, and {ranks_text(absent)} cannot be compared")
        if len(opened.parts) < 2 and (not way.ranks or way.direction is Direction.RECEIVE):
            return replace(finding, text="it came from other ranks, and those were not compared")
        text = f"{ranks_text(opened.parts)} gave what the reference has and got something else"
        return replace(finding, status=Status.INTRODUCED, text=text)

    def _answer(self) -> Origin:
        found = sorted(self._found, key=lambda each: each.order)
        free = [each.finding for each in found if not each.preceded]
        differ = tuple(rank for rank, walker in self._ranks.items() if walker.differs or walker.divergence.is_touched)
        return Origin(
            free[0] if free else None,
            tuple(free[1:]),
            tuple(self._hops),
            tuple(each.finding for each in found),
            differ,
            tuple(rank for rank in self._ranks if rank not in differ),
        )


def _walker(divergence: Divergence) -> _Rank:
    incoming = {
        passing.seq
        for passing in divergence.passings
        if passing.got is Side.DIFFERS and passing.gave is not Side.DIFFERS
    }
    own, others = deque[Finding](), dict[int, Finding]()
    for finding in divergence.findings:
        seq = finding.comparison.match.call.seq
        if finding.call.kind == KIND and seq in incoming and finding.status is Status.SOURCE:
            others[seq] = finding
        else:
            own.append(finding)
    return _Rank(divergence, iter(divergence.passings), own, others)


def _by_call(findings: Iterable[Finding]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for each in findings:
        found.setdefault(call_text(each.call), []).append(each.rank)
    return list(found.items())
