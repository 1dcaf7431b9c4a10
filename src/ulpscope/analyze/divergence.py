"""Where a difference begins: which calls had agreeing inputs and an output that does not agree.

Fed with the comparisons of one dump in execution order; keeps counts and a few findings, never the stream. This looks at two
runs from outside: it cannot run a call again, so a call that amplifies what it got is judged by how much. `limit` is
where it stops to be believable; the judge that replays calls needs no such limit.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ulpscope.analyze.exchange import KIND, Passings, Side, is_group, is_inside, parts_of
from ulpscope.compare.comparison import CallComparison, Code, Comparison, Evidence, Level
from ulpscope.naming import call_text, slot_text
from ulpscope.records import CallId, Phase, Role, Value

# A correct kernel may round its output and every partial result of a long sum; the sum itself is kept in float32 or better.
_OUTPUT_ROUNDINGS = 8.0
_SUM_ROUNDINGS = 256.0
_SUM_ROUND_OFF = 2.0**-24
# How much more relative error than its inputs a well-behaved call may have.
_GAIN = 16.0
_MOST = 10
# Calls whose output may be small because a factor is: nothing cancels there.
_SCALES = frozenset({"mul", "rmul", "imul", "div", "idiv", "truediv", "rtruediv", "itruediv", "multiply", "divide"})
# A mask is filled with the largest number there is: its size says nothing.
_FILLED = 1e30
# Calls that make much of the smallest elements, whose errors the length of a tensor does not show.
_UNEVEN = frozenset(
    [
        "addcdiv",
        "div",
        "idiv",
        "rdiv",
        "truediv",
        "rtruediv",
        "itruediv",
        "divide",
        "true_divide",
        "log",
        "log2",
        "log10",
        "sign",
        "sgn",
        "angle",
        "atan2",
        "normalize",
    ]
)
# Calls that make or overwrite memory without computing: what their output holds before that is not a result.
_MEMORY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "set_", "resize_"})
# Calls that write their first argument without reading it.
_FILLS = frozenset(
    {
        "zero_",
        "fill_",
        "copy_",
        "uniform_",
        "normal_",
        "random_",
        "bernoulli_",
        "exponential_",
        "log_normal_",
        "cauchy_",
    }
)


class Status(enum.Enum):
    """What a call has to do with the difference."""

    IDENTICAL = "identical"
    ROUNDING = "within rounding"
    INTRODUCED = "introduced"
    INHERITED = "inherited"
    SOURCE = "differs before any call"
    UNMATCHED = "unmatched"
    UNKNOWN = "unknown"


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
    passings: Passings = field(default_factory=Passings)
    worst: Finding | None = None

    @property
    def first(self) -> Finding | None:
        """The first call that introduced a difference, or the first value that came in different."""
        return self.findings[0] if self.findings else None

    @property
    def agrees(self) -> bool:
        """Nothing was introduced, nothing came in different, nothing is alone."""
        return not (self.findings or self.only_reference or self.only_target or self.statuses[Status.INHERITED])


def diverge(comparisons: Iterable[CallComparison], *, step: int = 0, rank: int = 0) -> Divergence:
    """Reads the comparisons of one dump to their end."""
    search = Search(step, rank)
    for comparison in comparisons:
        search.see(comparison)
    return search.result()


class Search:
    """Sees one comparison after the other, in execution order."""

    def __init__(self, step: int = 0, rank: int = 0) -> None:
        self.found = Divergence(step, rank)
        self._written: set[object] = set()
        self._dirty = False
        self._forward: dict[CallId, tuple[bool, float | None]] = {}
        self._communication_seq: int | None = None
        self._parent: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._forward_parent: dict[int, int] = {}
        self._begun: dict[int, Status] = {}

    def see(self, comparison: CallComparison) -> Status:
        """Counts a call and says what it is."""
        found = self.found
        ins, outs = _parted(comparison)
        found.calls += 1
        found.values += len(ins) + len(outs)
        for each in (*ins, *outs):
            found.levels[each.verdict.level] += 1
            found.evidence[each.evidence] += 1
        finding = self._status(comparison, ins, outs)
        found.statuses[finding.status] += 1
        self._note(comparison, finding)
        self._remember(comparison, outs)
        return finding.status

    def result(self) -> Divergence:
        """What was found. A module is left out where the difference begins in a call inside it."""
        found, outer = self.found, set[int]()
        for seq in self._begun:
            outer.update(self._above(seq))
        for seq in outer & self._begun.keys():
            found.statuses[self._begun.pop(seq)] -= 1
            found.statuses[Status.INHERITED] += 1
        inner = (each for each in found.findings if each.comparison.match.call.seq not in outer)
        found.findings = sorted(inner, key=lambda each: each.comparison.match.call.seq)
        return found

    def _above(self, seq: int) -> Iterator[int]:
        """The calls around a call: its modules, for a backward call the backward of the modules of its forward call."""
        backward = seq in self._forward_parent
        above = self._forward_parent.get(seq) if backward else self._parent.get(seq)
        while above is not None:
            around = self._backward.get(above) if backward else above
            if around is not None:
                yield around
            above = self._parent.get(above)

    def _remember(self, comparison: CallComparison, outs: Sequence[Comparison]) -> None:
        call = comparison.match.call
        if call.origin is not None:
            self._backward[call.origin] = call.seq
            if call.parent is not None:
                self._forward_parent[call.seq] = call.parent
        elif call.parent is not None:
            self._parent[call.seq] = call.parent
        for each in outs:
            if each.target is not None:
                self._written.update(_marks(each.target))
            self._dirty = self._dirty or each.verdict.level is Level.FAIL
        if call.id.phase is Phase.FORWARD:
            dirty = any(each.verdict.level is not Level.PASS and _is_tensor(each) for each in comparison.values)
            error = _most(comparison.values)
            if dirty or error:
                self._forward[call.id] = dirty, error

    # --- one call -----------------------------------------------------------------------------------------------

    def _status(self, comparison: CallComparison, ins: list[Comparison], outs: list[Comparison]) -> Finding:
        match = comparison.match
        call = match.call.id
        if call.kind == KIND and match.target is not None:
            return self._communication(comparison)
        if match.reference is None or match.target is None:
            return self._finding(Status.UNMATCHED, comparison, None, None, 0.0, match.why)
        if call.phase is Phase.PARAMETERS_GRAD or is_inside(match.target, self._communication_seq):
            return self._passed_on(comparison, outs)
        changed = _changed(ins)
        saved_dirty, saved = self._saved(call)
        into, out = _most(ins), _most(outs)
        into = None if into is None or saved is None else max(into, saved)
        limit = _limit(call, ins, outs, into)
        if changed is not None:
            text = f"{_slot(changed)} is {changed.verdict.text}"
            return self._finding(Status.SOURCE, comparison, into, out, limit, text)
        if any(each.verdict.level is Level.FAIL for each in outs):
            return self._different(comparison, ins, into, out, limit, saved_dirty)
        source = self._source(call, ins)
        if source is not None:
            text = f"{_slot(source)} differs, and no recorded call wrote it"
            return self._finding(Status.SOURCE, comparison, into, out, limit, text)
        unknown = _unknown(outs)
        if unknown is not None:
            return self._finding(Status.UNKNOWN, comparison, into, out, limit, unknown.verdict.text)
        seen = all(Code.IDENTICAL in each.verdict.codes for each in outs)
        return self._finding(Status.IDENTICAL if seen else Status.ROUNDING, comparison, into, out, limit, "")

    def _communication(self, comparison: CallComparison) -> Finding:
        """What came from other ranks comes from outside as far as this one can tell; `ranks` knows better."""
        match = comparison.match
        self._communication_seq = match.call.seq
        parts = parts_of(comparison, self.found.rank)
        given = [each for part in parts for each in part.given]
        taken = [each for part in parts for each in part.taken]
        into, out = _most(given), _most(taken)
        limit = _limit(match.call.id, given, taken, into)
        gave, got = _side(given), _side(taken)
        rounded = gave is Side.AGREES and out is not None and out <= limit
        if rounded and got is Side.DIFFERS:
            got = Side.AGREES
        for part in parts:
            sides = _side(part.given), Side.AGREES if rounded else _side(part.taken)
            if match.reference is None:
                sides = Side.UNKNOWN, Side.UNKNOWN
            self.found.passings.add(match.call.id, match.call.seq, way=part.way, gave=sides[0], got=sides[1])
        changed = _changed([each for each in comparison.values if each.slot.role is not Role.OUTPUT])
        source = self._source(match.call.id, given)
        if match.reference is None:
            status, text = Status.UNMATCHED, match.why
        elif changed is not None:
            status, text = Status.SOURCE, f"{_slot(changed)} is {changed.verdict.text}"
        elif source is not None:
            status, text = Status.SOURCE, f"{_slot(source)} differs, and no recorded call wrote it"
        elif got is Side.DIFFERS:
            status = Status.SOURCE if gave is Side.AGREES else Status.INHERITED
            text = "what came from the other ranks differs, what this rank gave does not"
        elif got is Side.UNKNOWN:
            unknown = _unknown(taken)
            status, text = Status.UNKNOWN, unknown.verdict.text if unknown is not None else ""
        else:
            seen = all(Code.IDENTICAL in each.verdict.codes for each in taken)
            status, text = Status.IDENTICAL if seen else Status.ROUNDING, ""
        return self._finding(status, comparison, into, out, limit, "" if status is Status.INHERITED else text)

    def _saved(self, call: CallId) -> tuple[bool, float | None]:
        """What a backward call also reads: the values of its forward call. Whether they differ, and by how much."""
        if call.phase is not Phase.BACKWARD:
            return False, 0.0
        return self._forward.get(CallId(call.kind, call.name, call.index, Phase.FORWARD), (False, 0.0))

    def _passed_on(self, comparison: CallComparison, outs: list[Comparison]) -> Finding:
        """What introduces nothing itself: gradients of parameters, which are sums of what recorded calls gave, and the
        inside of a communication call."""
        if any(each.verdict.level is Level.FAIL for each in outs):
            status = Status.INHERITED
        elif _unknown(outs) is not None:
            status = Status.UNKNOWN
        else:
            seen = all(Code.IDENTICAL in each.verdict.codes for each in outs)
            status = Status.IDENTICAL if seen else Status.ROUNDING
        return self._finding(status, comparison, None, _most(outs), 0.0, "")

    def _different(
        self,
        comparison: CallComparison,
        ins: list[Comparison],
        into: float | None,
        out: float | None,
        limit: float,
        saved_dirty: bool,
    ) -> Finding:
        source = self._source(comparison.match.call.id, ins)
        if source is not None:
            text = f"{_slot(source)} differs, and no recorded call wrote it"
            return self._finding(Status.SOURCE, comparison, into, out, limit, text)
        dirty = saved_dirty or any(each.verdict.level is Level.FAIL for each in ins)
        unsure = any(each.verdict.level in (Level.UNKNOWN, Level.UNMATCHED) and _is_tensor(each) for each in ins)
        if out is None:
            # Checksums tell that something differs, not how much.
            status = Status.INHERITED if dirty or unsure else Status.INTRODUCED
        elif out <= limit:
            status = Status.INHERITED if dirty else Status.ROUNDING
        else:
            explained = dirty and (into is None or comparison.match.call.id.name.strip("_") in _UNEVEN)
            status = Status.INHERITED if unsure or explained else Status.INTRODUCED
        text = "clean inputs, other output" if not dirty else "the output differs more than the inputs explain"
        return self._finding(status, comparison, into, out, limit, text if status is Status.INTRODUCED else "")

    def _source(self, call: CallId, ins: Sequence[Comparison]) -> Comparison | None:
        """An input that differs although no call of the target wrote it: a weight, a batch, a mask from outside.

        Gradients are summed by torch between the calls, so only a forward call can tell."""
        for each in ins if call.phase is Phase.FORWARD else ():
            if each.verdict.level is not Level.FAIL or each.target is None or not each.target.is_tensor:
                continue
            if _is_rounding(each):
                continue
            # Where values have no identity, a call that was not recorded may have passed a difference on.
            if self._written.isdisjoint(_marks(each.target)) and (each.target.measure is not None or not self._dirty):
                return each
        return None

    def _finding(
        self,
        status: Status,
        comparison: CallComparison,
        into: float | None,
        out: float | None,
        limit: float,
        text: str,
    ) -> Finding:
        return Finding(status, self.found.step, self.found.rank, comparison, into, out, limit, text)

    # --- what is kept -------------------------------------------------------------------------------------------

    def _note(self, comparison: CallComparison, finding: Finding) -> None:
        found, call = self.found, comparison.match.call
        if finding.status in (Status.INTRODUCED, Status.SOURCE):
            # The first ones are kept whatever comes; of the others the heaviest.
            self._begun[call.seq] = finding.status
            found.findings.append(finding)
            if len(found.findings) > 4 * _MOST:
                del found.findings[min(range(_MOST, len(found.findings)), key=lambda at: found.findings[at].weight)]
        elif finding.status is Status.UNMATCHED:
            found.only_reference += comparison.match.target is None
            found.only_target += comparison.match.reference is None
            if len(found.alone) < _MOST:
                found.alone.append((call_text(call.id), finding.text))
        elif finding.status is Status.UNKNOWN and len(found.unknown) < _MOST:
            found.unknown.append((call_text(call.id), finding.text))
        heavier = found.worst is None or (finding.output_error or 0.0) > (found.worst.output_error or 0.0)
        if finding.output_error and heavier:
            found.worst = finding


def _limit(call: CallId, ins: Sequence[Comparison], outs: Sequence[Comparison], into: float | None) -> float:
    rounding = max(_coarsest(ins), _coarsest(outs))
    kept = _cancelled(ins, outs)
    return (1.0 if call.name.strip("_") in _SCALES else kept) * _rounded(rounding) + kept * _GAIN * (into or 0.0)


def _is_rounding(each: Comparison) -> bool:
    """Whether one call of correct arithmetic may have made the difference."""
    return each.error is not None and each.error <= _rounded(each.rounding)


def _rounded(rounding: float) -> float:
    """What rounding alone may make of a value in one call."""
    return _OUTPUT_ROUNDINGS * rounding + _SUM_ROUNDINGS * min(rounding, _SUM_ROUND_OFF)


def _cancelled(ins: Sequence[Comparison], outs: Sequence[Comparison]) -> float:
    """How much smaller the output is than its inputs: a difference or sum of large numbers keeps their errors."""
    small = [size for each in outs if (size := _size(each.reference, 0))]
    if not small:
        return 1.0
    numel = min(math.prod(each.reference.shape or ()) for each in outs if each.reference is not None)
    large = [size for each in ins if (size := _size(each.reference, numel))]
    return max(1.0, max(large) / min(small)) if large else 1.0


def _size(value: Value | None, numel: int) -> float | None:
    """The root mean square of a tensor; where it is summed down to `numel` elements, that of such a sum."""
    stats = value.stats if value is not None else None
    norm = stats.norm if stats is not None else None
    if norm is None or not norm < _FILLED or value is None or not value.shape:
        return None
    count = math.prod(value.shape)
    return norm / math.sqrt(min(count, numel) or count) if count else None


def _most(values: Sequence[Comparison]) -> float | None:
    """The largest known error; None where one that differs has none."""
    most = 0.0
    for each in values:
        error = each.error
        if error is not None:
            most = max(most, error)
        elif each.verdict.level is Level.FAIL and _is_tensor(each):
            return None
    return most


def _parted(comparison: CallComparison) -> tuple[list[Comparison], list[Comparison]]:
    """What went into a call, and what came out; memory that nobody has written yet is neither."""
    call = comparison.match.call.id
    if call.phase is Phase.PARAMETERS_GRAD:
        return [], list(comparison.values)
    ins: list[Comparison] = []
    outs: list[Comparison] = []
    for each in comparison.values:
        (outs if each.slot.role is Role.OUTPUT else ins).append(each)
    name = call.name.partition(".")[0]  # of a kernel, without its overload
    if name in _FILLS:
        ins = [each for each in ins if each.slot.path != (0,)]
    return ins, [] if name in _MEMORY else outs


def _marks(value: Value) -> tuple[object, ...]:
    """What tells that a value is one that a call wrote: its measure, or its numbers where it was measured again."""
    stats = value.stats
    numbers = None if stats is None else (stats.max, stats.min, stats.mean, stats.norm, stats.zero_count)
    return (value.measure, (numbers, value.checksum)) if value.measure is not None else ((numbers, value.checksum),)


def _is_tensor(each: Comparison) -> bool:
    left, right = each.reference, each.target
    return (left is not None and left.shape is not None) or (right is not None and right.shape is not None)


def _side(values: Iterable[Comparison]) -> Side:
    tensors = [each for each in values if _is_tensor(each)]
    levels = {each.verdict.level for each in tensors}
    if any(each.verdict.level is Level.FAIL and not _is_rounding(each) for each in tensors):
        return Side.DIFFERS
    return Side.UNKNOWN if levels & {Level.UNKNOWN, Level.UNMATCHED} else Side.AGREES


def _changed(ins: Sequence[Comparison]) -> Comparison | None:
    """The first argument that is another one in the target."""
    for each in ins:
        codes = each.verdict.codes
        if (Code.TYPE in codes or (Code.ARGUMENT in codes and not _same_in(_coarsest(ins), each))) and not is_group(
            each
        ):
            return each
    return None


def _coarsest(values: Iterable[Comparison]) -> float:
    return max([each.rounding for each in values], default=0.0)


def _same_in(rounding: float, each: Comparison) -> bool:
    """Whether two numbers are one and the same in the coarsest dtype of the call, as the smallest number of a dtype is."""
    left, right = (value.scalar if value is not None else None for value in (each.reference, each.target))
    if not isinstance(left, float) or not isinstance(right, float):
        return False
    return abs(left - right) <= 2 * rounding * max(abs(left), abs(right))


def _unknown(outs: Iterable[Comparison]) -> Comparison | None:
    """The first result that was not measured. An object that is no tensor and holds none is no result."""
    for each in outs:
        failed = any(value is not None and value.error is not None for value in (each.reference, each.target))
        if each.verdict.level is Level.UNKNOWN and (failed or _is_tensor(each)):
            return each
    return None


def _slot(each: Comparison) -> str:
    return slot_text(each.slot)
