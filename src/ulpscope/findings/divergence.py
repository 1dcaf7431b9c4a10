"""Where a difference begins: which calls had agreeing inputs and an output that does not agree.

Fed with the comparisons of one dump in execution order; keeps counts and a few findings, never the stream. This looks at two
runs from outside: it cannot run a call again, so a call that amplifies what it got is judged by how much. `limit` is
where it stops to be believable; the judge that replays calls needs no such limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ulpscope.compare.comparison import CallComparison, Code, Comparison, Level
from ulpscope.findings.beginnings import Beginning, Beginnings, marks_of
from ulpscope.findings.exchange import KIND, Side, is_group, is_inside, parts_of
from ulpscope.findings.model import Divergence, Finding, Status
from ulpscope.findings.outside import Outside, Strand
from ulpscope.findings.rounding import coarsest, is_rounding, limit_of
from ulpscope.findings.steadiness import Choice, coarsest_of, is_choice, is_near
from ulpscope.naming import FILLS, INIT, MODULE, OPTIMIZER, call_text, slot_text
from ulpscope.records import UNWRITTEN, CallId, Phase, Role, Slot

_MOST = 10
# Numbers that an optimizer uses with its parameters, of which its call does not tell.
_OF_OPTIONS = 2.0**-24
# Calls that make much of the smallest elements, whose errors the length of a tensor does not show.
_UNEVEN = frozenset(
    ["addcdiv", "div", "idiv", "rdiv", "truediv", "rtruediv", "itruediv", "divide", "true_divide", "log", "log2", "log10", "sign", "sgn",
     "angle", "atan2", "normalize"]
)  # fmt: skip
# Calls that make or overwrite memory without computing: what their output holds before that is not a result.
_MEMORY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "set_", "resize_"})


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
        self._unrecorded: dict[CallId, str] = {}
        self._communication_seq: int | None = None
        self._parent: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._forward_parent: dict[int, int] = {}
        self._begun: dict[int, Status] = {}
        self._beginnings = Beginnings(self._above)
        # Of the reference's modules, the target's; of its calls, the module around each; and the first calls that are alone.
        self._matched: dict[int, int] = {}
        self._reference_parent: dict[int, int] = {}
        self._alone: list[CallComparison] = []
        self._outside = Outside()
        self._coarsest = 0.0
        self._choice: Choice | None = None
        self._decided: list[int] = []
        self._alone_at: int | None = None
        self._held: list[tuple[Strand, Finding]] = []

    def see(self, comparison: CallComparison) -> Status:
        """Counts a call and says what it is."""
        found = self.found
        ins, outs = _parted(comparison)
        found.calls += 1
        found.values += len(ins) + len(outs)
        for each in (*ins, *outs):
            found.levels[each.verdict.level] += 1
            found.evidence[each.evidence] += 1
            if _is_unknown(each):
                found.unknown_count += 1
                if len(found.unknown) < _MOST:
                    text = f"{_slot(each)}: {each.verdict.text}"
                    found.unknown.append((call_text(comparison.match.call.id), text))
        self._coarsest = coarsest_of(ins, self._coarsest)
        finding = self._steadied(self._status(comparison, ins, outs), ins, outs)
        strand = self._outside.see(comparison, ins, outs)
        if strand is None:
            found.statuses[finding.status] += 1
            self._note(finding)
        else:
            self._held.append((strand, finding))
        self._remember(comparison, ins, outs, is_outside=strand is not None)
        self._beginnings.see(comparison)
        return finding.status

    def _steadied(self, finding: Finding, ins: Sequence[Comparison], outs: Sequence[Comparison]) -> Finding:
        """The finding, or that the call decided otherwise; remembers who rounds otherwise each time."""
        found, comparison = self.found, finding.comparison
        into = finding.input_error
        if finding.status is Status.ROUNDING and into == 0.0 and finding.output_error:
            found.steadiness.see_unsteady(comparison)
        by_far = finding.status is Status.INTRODUCED
        if not (by_far or finding.status is Status.INHERITED) or not into:
            return finding
        if not is_choice(comparison, ins, outs, by_far=by_far):
            return finding
        self._decided.append(comparison.match.call.seq)
        if self._choice is None:
            near, before = is_near(into, self._coarsest), found.statuses[Status.INHERITED]
            self._choice = Choice(comparison, found.step, found.rank, into, near, found.calls, before)
        return replace(finding, status=Status.CHOICE, text="")

    def _choose(self) -> None:
        """The first decision, if nothing else began before it; what differs behind it is other work."""
        found = self.found
        first = self._choice
        begun = [each.comparison.match.call.seq for each in found.findings]
        alone = self._alone_at is not None and first is not None and self._alone_at < first.at
        if first is None or alone or (begun and min(begun) < first.comparison.match.call.seq):
            found.statuses[Status.INHERITED] += found.statuses.pop(Status.CHOICE, 0)
            return
        before = first.inherited
        found.steadiness.choice = first
        found.statuses[Status.INHERITED] -= before
        found.is_other_work()
        found.statuses[Status.INHERITED] += before
        found.statuses[Status.OTHER] -= 1
        found.statuses[Status.CHOICE] += 1

    def result(self) -> Divergence:
        """What was found. A module is left out where the difference begins in a call inside it."""
        found, outer = self.found, set[int]()
        for strand, finding in self._held:
            found.statuses[finding.status if strand.read else Status.OUTSIDE] += 1
            if strand.read:
                self._note(finding)
            elif finding.text and len(found.remarks) < _MOST:
                found.remarks.append((call_text(finding.call), f"{finding.text}; nothing of the model reads it"))
        for seq in (*self._begun, *self._decided):
            outer.update(self._above(seq))
        # An optimizer with another learning rate is told by that, not by what it made of it.
        outer -= {
            each.comparison.match.call.seq
            for each in found.findings
            if each.call.kind == OPTIMIZER and each.status is Status.SOURCE
        }
        for seq in outer & self._begun.keys():
            found.statuses[self._begun.pop(seq)] -= 1
            found.statuses[Status.INHERITED] += 1
        inner = (each for each in found.findings if each.comparison.match.call.seq not in outer)
        found.findings = sorted(inner, key=lambda each: each.comparison.match.call.seq)
        self._choose()
        if found.steadiness.choice is None:
            self._begin()
        return found

    def _begin(self) -> None:
        """Where no call introduced it, or only what comes later, it began with a call that is alone; or, where nothing is named but a
        module around, in another dtype."""
        found, begins = self.found, self._beginnings.first or self._inside_of_first()
        if begins is None or not found.differs:
            return
        match = begins.comparison.match
        around = set(self._around(begins.comparison))
        others = [
            each for each in found.findings if each.call.kind != MODULE or each.comparison.match.call.seq not in around
        ]
        late = [each for each in others if begins.alone and each.comparison.match.call.seq >= begins.seen]
        if len(late) < len(others):
            return
        kept = [each for each in late if each.status is Status.SOURCE]
        for each in found.findings:
            if each not in kept:
                found.statuses[each.status] -= 1
                found.statuses[Status.INHERITED] += 1
        ins, outs = _parted(begins.comparison)
        into, out = (None, None) if begins.alone else (_most(ins), _most(outs))
        limit = limit_of(match.call.id, ins, outs, into)
        status = Status.UNMATCHED if begins.alone else Status.DTYPE
        found.findings = [self._finding(status, begins.comparison, into, out, limit, begins.text), *kept]

    def _inside_of_first(self) -> Beginning | None:
        """A module whose output is another, and in which one run has a call that the other lacks, did not compute the same."""
        first = self.found.first
        if first is None or first.call.kind != MODULE or first.status is not Status.INTRODUCED:
            return None
        module = first.comparison.match.call.seq
        inside = next((each for each in self._alone if module in self._around(each)), None)
        return None if inside is None else Beginning(inside, inside.match.why, alone=True, seen=module)

    def _around(self, comparison: CallComparison) -> Iterator[int]:
        """The modules of the target around a call, also around one that only the reference has."""
        match = comparison.match
        if match.target is not None:
            yield from self._above(match.call.seq)
            return
        above = match.call.parent
        while above is not None:
            if above in self._matched:
                yield self._matched[above]
            above = self._reference_parent.get(above)

    def _above(self, seq: int) -> Iterator[int]:
        """The calls around a call: its modules, for a backward call the backward of the modules of its forward call."""
        backward = seq in self._forward_parent
        above = self._forward_parent.get(seq) if backward else self._parent.get(seq)
        while above is not None:
            around = self._backward.get(above) if backward else above
            if around is not None:
                yield around
            above = self._parent.get(above)

    def _remember(
        self,
        comparison: CallComparison,
        ins: Sequence[Comparison],
        outs: Sequence[Comparison],
        *,
        is_outside: bool,
    ) -> None:
        call, other = comparison.match.call, comparison.match.reference
        if other is not None and other.id.kind == MODULE:
            if comparison.match.target is not None:
                self._matched[other.seq] = call.seq
            if other.parent is not None:
                self._reference_parent[other.seq] = other.parent
        if call.origin is not None:
            self._backward[call.origin] = call.seq
            if call.parent is not None:
                self._forward_parent[call.seq] = call.parent
        elif call.parent is not None:
            self._parent[call.seq] = call.parent
        for each in outs:
            if each.target is not None:
                self._written.update(marks_of(each.target))
            self._dirty = self._dirty or (each.verdict.level is Level.FAIL and not is_outside)
        if call.id.phase is Phase.FORWARD:
            values = [*ins, *outs]
            dirty = any(each.verdict.level is not Level.PASS and _is_tensor(each) for each in values)
            error = _most(values)
            if dirty or error:
                self._forward[call.id] = dirty, error
            argument = _unrecorded(_parted(comparison)[0])
            if argument is not None:
                self._unrecorded[call.id] = _slot(argument)

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
        changed = _changed(ins, _OF_OPTIONS if call.kind == OPTIMIZER else 0.0)
        saved_dirty, saved = self._saved(call)
        into, out = _most(ins), _most(outs)
        into = None if into is None or saved is None else max(into, saved)
        limit = limit_of(call, ins, outs, into)
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
        limit = limit_of(match.call.id, given, taken, into)
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
        if comparison.match.call.id.phase is Phase.BACKWARD and not any(_is_tensor(each) for each in ins):
            # The gradients that it got were not recorded: nobody knows that they agree.
            return self._finding(Status.INHERITED, comparison, None, out, limit, "")
        dirty = saved_dirty or any(each.verdict.level is Level.FAIL for each in ins)
        unsure = any(
            each.verdict.level in (Level.UNKNOWN, Level.UNMATCHED)
            and _is_tensor(each)
            and not is_target(comparison.match.call.id, each.slot)
            for each in comparison.values
            if each.slot.role is not Role.OUTPUT
        )
        if out is None:
            # Checksums tell that something differs, not how much.
            status = Status.INHERITED if dirty or unsure else Status.INTRODUCED
            self.found.unsure |= unsure
        elif out <= limit:
            status = Status.INHERITED if dirty else Status.ROUNDING
        else:
            explained = dirty and (into is None or comparison.match.call.id.name.strip("_") in _UNEVEN)
            status = Status.INHERITED if unsure or explained else Status.INTRODUCED
            self.found.unsure |= unsure
        if status is not Status.INTRODUCED:
            return self._finding(status, comparison, into, out, limit, "")
        argument = self._not_recorded(comparison.match.call.id, ins)
        if argument:
            text = f"{argument} was not recorded on both sides, so nobody knows whether the call was asked for the same"
            return self._finding(Status.UNSURE, comparison, into, out, limit, text)
        text = "clean inputs, other output" if not dirty else "the output differs more than the inputs explain"
        return self._finding(status, comparison, into, out, limit, text)

    def _not_recorded(self, call: CallId, ins: Sequence[Comparison]) -> str:
        """An argument of a call, or of the forward of a backward call, that is unknown; empty where there is none."""
        own = _unrecorded(ins)
        if own is not None or call.phase is not Phase.BACKWARD:
            return "" if own is None else _slot(own)
        forward = self._unrecorded.get(CallId(call.kind, call.name, call.index, Phase.FORWARD))
        return f"{forward} of its forward" if forward else ""

    def _source(self, call: CallId, ins: Sequence[Comparison]) -> Comparison | None:
        """An input that differs although no call of the target wrote it: a weight, a batch, a mask from outside.

        Gradients are summed by torch between the calls, so only a forward call can tell."""
        for each in ins if call.phase is Phase.FORWARD else ():
            if each.verdict.level is not Level.FAIL or each.target is None or not each.target.is_tensor:
                continue
            if is_rounding(each):
                continue
            # Between modules, and where values have no identity, a call that was not recorded may have passed a difference on.
            between = call.kind == MODULE and each.slot.role is not Role.PARAMETERS
            sure = each.target.measure is not None and not between
            begun = self._dirty or (between and self._beginnings.first is not None)
            if self._written.isdisjoint(marks_of(each.target)) and (sure or not begun):
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

    def _note(self, finding: Finding) -> None:
        found, match = self.found, finding.comparison.match
        call = match.call
        if finding.status in (Status.INTRODUCED, Status.SOURCE, Status.UNSURE):
            # The first ones are kept whatever comes; of the others the heaviest.
            self._begun[call.seq] = finding.status
            found.findings.append(finding)
            if len(found.findings) > 4 * _MOST:
                del found.findings[min(range(_MOST, len(found.findings)), key=lambda at: found.findings[at].weight)]
        elif finding.status is Status.UNMATCHED:
            self._alone_at = found.calls if self._alone_at is None else self._alone_at
            found.only_reference += match.target is None
            found.only_target += match.reference is None
            if len(found.alone) < _MOST:
                found.alone.append((call_text(call.id), finding.text))
            if len(self._alone) < 4 * _MOST and call.id.kind != MODULE:
                self._alone.append(finding.comparison)
        heavier = found.worst is None or (finding.output_error or 0.0) > (found.worst.output_error or 0.0)
        if finding.output_error and heavier:
            found.worst = finding


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
        unwritten = [value is not None and value.error == UNWRITTEN for value in (each.reference, each.target)]
        if each.slot.role is Role.OUTPUT:
            if not all(unwritten):
                outs.append(each)
        elif not any(unwritten) and not is_target(call, each.slot):
            ins.append(each)
    return ins, [] if _plain(call) in _MEMORY else outs


def is_target(call: CallId, slot: Slot) -> bool:
    """Whether a call overwrites this input without reading it."""
    if call.phase is Phase.BACKWARD and call.kind != "Aten":
        return False
    if slot.path == (0,):
        return call.kind == INIT or _plain(call) in FILLS
    return slot.path[:1] == ("out",) or (call.kind == INIT and slot.path == ("tensor",))


def _plain(call: CallId) -> str:
    return call.name.partition(".")[0]  # of a kernel, without its overload


def _is_tensor(each: Comparison) -> bool:
    left, right = each.reference, each.target
    return (left is not None and left.shape is not None) or (right is not None and right.shape is not None)


def _side(values: Iterable[Comparison]) -> Side:
    tensors = [each for each in values if _is_tensor(each)]
    levels = {each.verdict.level for each in tensors}
    if any(each.verdict.level is Level.FAIL and not is_rounding(each) for each in tensors):
        return Side.DIFFERS
    return Side.UNKNOWN if levels & {Level.UNKNOWN, Level.UNMATCHED} else Side.AGREES


def _changed(ins: Sequence[Comparison], rounding: float = 0.0) -> Comparison | None:
    """The first argument that is another one in the target, by more than the rounding of what it is used with."""
    rounding = max(rounding, coarsest(ins))
    for each in ins:
        codes = each.verdict.codes
        if (Code.TYPE in codes or (Code.ARGUMENT in codes and not _same_in(rounding, each))) and not is_group(each):
            return each
    return None


def _unrecorded(ins: Iterable[Comparison]) -> Comparison | None:
    """The first argument, no tensor, of which it is not known whether it is the same on both sides."""
    kinds = (Level.UNKNOWN, Level.UNMATCHED)
    return next((each for each in ins if each.verdict.level in kinds and not _is_tensor(each)), None)


def _same_in(rounding: float, each: Comparison) -> bool:
    """Whether two numbers are one and the same in the coarsest dtype of the call, as the smallest number of a dtype is."""
    left, right = (value.scalar if value is not None else None for value in (each.reference, each.target))
    if not isinstance(left, float) or not isinstance(right, float):
        return False
    return abs(left - right) <= 2 * rounding * max(abs(left), abs(right))


def _unknown(outs: Iterable[Comparison]) -> Comparison | None:
    """The first result that was not measured."""
    return next((each for each in outs if _is_unknown(each)), None)


def _is_unknown(each: Comparison) -> bool:
    """Whether a value was not measured. Of an object that is no tensor and holds none there is nothing to measure."""
    failed = any(value is not None and value.error is not None for value in (each.reference, each.target))
    return each.verdict.level is Level.UNKNOWN and (failed or _is_tensor(each))


def _slot(each: Comparison) -> str:
    return slot_text(each.slot)
