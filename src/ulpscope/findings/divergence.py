"""Where a difference begins: which calls had agreeing inputs and an output that does not agree, and which values were lost.

Fed with the comparisons of one dump in execution order; keeps counts and a few findings, never the stream. Each call becomes a view
(`view`) of which a list of rules (`rules`) says what it is. What has no counterpart is judged by the values around it (`regions`), where
those are given. This looks at two runs from outside: it cannot run a call again, so a call that amplifies what it got is judged by how
much. `limit` is where it stops to be believable; the judge that replays calls needs no such limit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from ulpscope.compare.comparison import CallComparison, Code, Comparison, Level
from ulpscope.compare.settings import SettingDifference
from ulpscope.compare.value_graph import FILLED, is_overwritten, key_of
from ulpscope.compare.values import Values
from ulpscope.findings.agreement import Agreement, Pairs
from ulpscope.findings.exchange import KIND, Side, is_inside, parts_of
from ulpscope.findings.model import Divergence, Finding, Status
from ulpscope.findings.outside import Outside, Strand, marks_of
from ulpscope.findings.regions import first_lost
from ulpscope.findings.rounding import coarsest, is_rounding, limit_of, rounded
from ulpscope.findings.rules import LOST, said_of
from ulpscope.findings.steadiness import Choice, coarsest_of, is_choice, is_near
from ulpscope.findings.view import (
    CallView,
    argument_text,
    changed_argument,
    is_tensor,
    is_unknown,
    most,
    parted,
    side_of,
    slot_of,
    unmeasured,
    unrecorded_argument,
)
from ulpscope.model.names import MODULE, OPTIMIZER, call_text
from ulpscope.model.operators import PRODUCT_KINDS, bare
from ulpscope.model.records import CallId, Phase, Role, Value

_MOST, _FEW = 10, 6
# A product's sum may be so many times smaller than what a setting rounds.
_ROOM = 4.0
_BEGUN = (Status.INTRODUCED, Status.SOURCE, Status.UNSURE)


def diverge(
    comparisons: Iterable[CallComparison], *, step: int = 0, rank: int = 0, values: Values | None = None
) -> Divergence:
    """Reads the comparisons of one dump to their end."""
    search = Search(step, rank, values)
    for comparison in comparisons:
        search.see(comparison)
    return search.result()


class Search:
    """Sees one comparison after the other, in execution order. `values`: of the dumps that are compared."""

    def __init__(self, step: int = 0, rank: int = 0, values: Values | None = None) -> None:
        self.found = Divergence(step, rank)
        self._values = values
        self._known = _Known([] if values is None else values.settings)
        self._tree = _Tree()
        self._pairs = Pairs()
        self._communication_seq: int | None = None
        self._begun: dict[int, Status] = {}
        self._outside = Outside()
        self._coarsest = 0.0
        self._choice: Choice | None = None
        self._decided: list[int] = []
        self._alone_at: int | None = None
        self._held: list[tuple[Strand, Finding]] = []
        self._is_other_dtype = False

    def see(self, comparison: CallComparison) -> Status:
        """Counts a call and says what it is."""
        ins, outs = parted(comparison)
        self._count(comparison, ins, outs)
        self._coarsest = coarsest_of(ins, self._coarsest)
        view, finding = self._finding(comparison, ins, outs)
        finding = self._steadied(finding, ins, outs)
        strand = self._outside.see(comparison, ins, outs)
        if strand is None:
            self.found.statuses[finding.status] += 1
            self._note(finding)
        else:
            self._held.append((strand, finding))
        self._tree.see(comparison)
        how = self._known.how(view, finding.status)
        self._known.see(view, how, is_outside=strand is not None)
        self._pairs.see(view, how)
        return finding.status

    def _count(self, comparison: CallComparison, ins: Sequence[Comparison], outs: Sequence[Comparison]) -> None:
        found = self.found
        found.calls += 1
        found.values += len(ins) + len(outs)
        for each in (*ins, *outs):
            found.levels[each.verdict.level] += 1
            found.evidence[each.evidence] += 1
            if is_unknown(each):
                found.unknown_count += 1
                if len(found.unknown) < _MOST:
                    found.unknown.append((call_text(comparison.match.call.id), f"{slot_of(each)}: {each.verdict.text}"))

    def _finding(
        self, comparison: CallComparison, ins: list[Comparison], outs: list[Comparison]
    ) -> tuple[CallView, Finding]:
        if comparison.match.call.id.kind == KIND and comparison.match.target is not None:
            return self._communication(comparison, ins, outs)
        view = self._known.view(comparison, ins, outs, self._communication_seq)
        status, text = said_of(view)
        if status is Status.INHERITED and view.is_far:
            self.found.unsure |= view.unsure or view.passes_on or not view.dirty
        if status in (Status.IDENTICAL, Status.ROUNDING):
            self._remark(view)
        return view, self._of(view, status, text)

    def _remark(self, view: CallView) -> None:
        """What was another thing that was asked for, or given, and showed in nothing."""
        found, each = self.found, view.changed or view.outside
        coarser = next((other for other in view.outs if Code.DTYPE in other.verdict.codes), None)
        if coarser is not None and not self._is_other_dtype and not view.changed:
            self._is_other_dtype = True
            left, right = (value.dtype for value in (coarser.reference, coarser.target) if value is not None)
            text = f"from here on the runs compute in other dtypes: {slot_of(coarser)} is {right} in the target, {left} in the reference"
            found.remarks.insert(0, (call_text(view.call), text))
        if each is None or len(found.remarks) >= _FEW:
            return
        text = argument_text(each) if each is view.changed else f"{slot_of(each)} differs"
        if all(not told.startswith(text) for _, told in found.remarks):
            found.remarks.append((call_text(view.call), f"{text}; what it gives agrees"))

    def _of(self, view: CallView, status: Status, text: str) -> Finding:
        step, rank = self.found.step, self.found.rank
        return Finding(status, step, rank, view.comparison, view.into, view.out, view.limit, text)

    def _communication(
        self, comparison: CallComparison, ins: list[Comparison], outs: list[Comparison]
    ) -> tuple[CallView, Finding]:
        """What came from other ranks comes from outside as far as this one can tell; `ranks` knows better."""
        match = comparison.match
        self._communication_seq = match.call.seq
        parts = parts_of(comparison, self.found.rank)
        given = [each for part in parts for each in part.given]
        taken = [each for part in parts for each in part.taken]
        view = replace(
            self._known.view(comparison, ins, outs, None),
            into=most(given),
            out=most(taken),
            limit=limit_of(match.call.id, given, taken, most(given)),
        )
        gave, got = side_of(given), side_of(taken)
        rounds = gave is Side.AGREES and view.out is not None and view.out <= view.limit
        if rounds and got is Side.DIFFERS:
            got = Side.AGREES
        for part in parts:
            sides = side_of(part.given), Side.AGREES if rounds else side_of(part.taken)
            if match.reference is None:
                sides = Side.UNKNOWN, Side.UNKNOWN
            self.found.passings.add(match.call.id, match.call.seq, way=part.way, gave=sides[0], got=sides[1])
        changed = changed_argument(
            match.call.id, [each for each in comparison.values if each.slot.role is not Role.OUTPUT]
        )
        source = self._known.outside(match.call.id, given)
        if match.reference is None:
            return view, self._of(view, Status.UNMATCHED, match.why)
        if changed is not None:
            return view, self._of(view, Status.SOURCE, argument_text(changed))
        if source is not None:
            return view, self._of(view, Status.SOURCE, f"{slot_of(source)} differs, and no recorded call wrote it")
        if got is Side.DIFFERS:
            if gave is not Side.AGREES:
                return view, self._of(view, Status.INHERITED, "")
            text = "what came from the other ranks differs, what this rank gave does not"
            return view, self._of(view, Status.SOURCE, text)
        if got is Side.UNKNOWN:
            unknown = unmeasured(taken)
            return view, self._of(view, Status.UNKNOWN, "" if unknown is None else unknown.verdict.text)
        seen = all(Code.IDENTICAL in each.verdict.codes for each in taken)
        return view, self._of(view, Status.IDENTICAL if seen else Status.ROUNDING, "")

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

    # --- what is kept -------------------------------------------------------------------------------------------

    def _note(self, finding: Finding) -> None:
        found, match = self.found, finding.comparison.match
        call = match.call
        if finding.status in _BEGUN:
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
        heavier = found.worst is None or (finding.output_error or 0.0) > (found.worst.output_error or 0.0)
        if finding.output_error and heavier:
            found.worst = finding

    # --- at the end ---------------------------------------------------------------------------------------------

    def result(self) -> Divergence:
        """What was found. A module is left out where the difference begins in a call inside it."""
        found = self.found
        for strand, finding in self._held:
            found.statuses[finding.status if strand.read else Status.OUTSIDE] += 1
            if strand.read:
                self._note(finding)
            elif finding.text and len(found.remarks) < _MOST:
                found.remarks.append((call_text(finding.call), f"{finding.text}; nothing of the model reads it"))
        for why, error in self._known.explained.items():
            found.settings[why] = max(error, found.settings.get(why, 0.0))
        self._drop_outer()
        found.findings.sort(key=lambda each: each.comparison.match.call.seq)
        self._choose()
        if found.steadiness.choice is None and self._values is not None:
            first_lost(self._values, self._pairs, found)
        if self._values is None:
            found.unsure |= bool(found.statuses[Status.UNMATCHED])  # nobody can say what these calls made
        elif self._values.is_apart:
            found.modules = {mine: theirs for mine, theirs in self._values.modules.items() if mine != theirs}
        return found

    def _drop_outer(self) -> None:
        found, outer = self.found, set[int]()
        for seq in (*self._begun, *self._decided):
            outer.update(self._tree.above(seq))
        # An optimizer with another learning rate is told by that, not by what it made of it.
        outer -= {
            each.comparison.match.call.seq
            for each in found.findings
            if each.call.kind == OPTIMIZER and each.status is Status.SOURCE
        }
        for seq in outer & self._begun.keys():
            found.statuses[self._begun.pop(seq)] -= 1
            found.statuses[Status.INHERITED] += 1
        found.findings = [each for each in found.findings if each.comparison.match.call.seq not in outer]

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


class _Tree:
    """The calls around each call: its modules, for a backward call the backward of the modules of its forward call."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._forward_parent: dict[int, int] = {}

    def see(self, comparison: CallComparison) -> None:
        call = comparison.match.call
        if call.origin is not None:
            self._backward[call.origin] = call.seq
            if call.parent is not None:
                self._forward_parent[call.seq] = call.parent
        elif call.parent is not None:
            self._parent[call.seq] = call.parent

    def above(self, seq: int) -> Iterator[int]:
        backward = seq in self._forward_parent
        above = self._forward_parent.get(seq) if backward else self._parent.get(seq)
        while above is not None:
            around = self._backward.get(above) if backward else above
            if around is not None:
                yield around
            above = self._parent.get(above)


class _Known:
    """What is known of the values so far: who wrote them, and whether what they differ by is rounding that was carried on."""

    def __init__(self, settings: Sequence[SettingDifference]) -> None:
        self._settings = settings
        # What a setting explains: the words for it, and the largest error.
        self.explained: dict[str, float] = {}
        self._written: set[object] = set()
        self._dirty = False
        # Of a forward call: whether its values differ, by how much, and whether that is explained.
        self._forward: dict[CallId, tuple[bool, float | None, bool]] = {}
        self._unrecorded: dict[CallId, str] = {}
        # Values that differ by what was carried on, and by how much; of those filled by a mask, what the rest differs by.
        self._carried: set[Hashable] = set()
        self._masked: dict[Hashable, tuple[float, float, bool]] = {}
        self._largest = 0.0

    def view(
        self, comparison: CallComparison, ins: list[Comparison], outs: list[Comparison], communication: int | None
    ) -> CallView:
        match = comparison.match
        call = match.call.id
        if match.reference is None or match.target is None:
            return CallView(comparison, tuple(ins), tuple(outs), None, None, 0.0)
        gradients = call.phase is Phase.PARAMETERS_GRAD
        passes_on = gradients or is_inside(match.target, communication)
        saved_dirty, saved, saved_explained = self._saved(call)
        into, out = most(ins), most(outs)
        hidden, rounding, same = self._hidden(ins)
        into = None if into is None or saved is None else max(into, saved, hidden)
        limit = limit_of(call, ins, outs, into)
        limit = self._set(call, limit, out)
        if rounding > coarsest(ins):
            limit = max(limit, rounded(rounding) + 16.0 * (into or 0.0))
        failing = [each for each in ins if each.verdict.level is Level.FAIL and is_tensor(each)]
        return CallView(
            comparison,
            tuple(ins),
            tuple(outs),
            None if passes_on else into,
            out,
            limit,
            changed=changed_argument(call, ins),
            outside=self.outside(call, ins),
            dirty=saved_dirty or bool(hidden) or any(each.verdict.level is Level.FAIL for each in ins),
            explained=saved_explained and same and all(map(self._is_carried, failing)),
            unsure=any(_is_doubtful(call, each) for each in comparison.values),
            lacking=self._lacking(call, ins),
            passes_on=passes_on,
        )

    def _set(self, call: CallId, limit: float, out: float | None) -> float:
        """The limit that the precision settings of the two runs give a product."""
        kind = PRODUCT_KINDS.get(bare(call.name), "")
        for setting in self._settings if kind else ():
            if kind in setting.operators and setting.error is not None:
                more = _ROOM * setting.error
                if out is not None and limit < out <= limit + more:
                    self.explained[setting.words] = max(out, self.explained.get(setting.words, 0.0))
                limit += more
        return limit

    def _hidden(self, ins: Sequence[Comparison]) -> tuple[float, float, bool]:
        """The error of what lies below the filling of a mask, its coarsest dtype, whether it is explained: the filling hides all."""
        found = [self._masked[key] for each in ins if (key := _key(each.target)) in self._masked]
        errors, units, same = zip(*found, strict=True) if found else ((0.0,), (0.0,), (True,))
        return max(errors), max(units), all(same)

    def _is_carried(self, each: Comparison) -> bool:
        return is_rounding(each) or _key(each.target) in self._carried

    def how(self, view: CallView, status: Status) -> Agreement:
        """Whether what came out of a call is the reference's, but for rounding that was carried on."""
        if view.is_alone or status is Status.UNKNOWN:
            return Agreement.UNKNOWN
        if not view.differs and (view.explained or not any(map(_is_filled, _targets(view.outs)))):
            return Agreement.AGREES
        if view.out is None or status in _BEGUN:
            return Agreement.DIFFERS
        if view.passes_on:
            return (
                Agreement.AGREES
                if view.out <= 16.0 * max(self._largest, rounded(coarsest(view.outs)))
                else Agreement.DIFFERS
            )
        if view.out > view.limit or (view.into is not None and view.into > LOST):
            return Agreement.DIFFERS
        return Agreement.AGREES if view.explained else Agreement.FOLLOWS

    def see(self, view: CallView, how: Agreement, *, is_outside: bool) -> None:
        """Remembers what a call wrote. A module's backward says nothing of what the calls inside it have said."""
        call = view.comparison.match.call.id
        late = call.kind == MODULE and call.phase is Phase.BACKWARD
        for each in view.outs:
            fails = each.verdict.level is Level.FAIL
            self._dirty = self._dirty or (fails and not is_outside)
            if each.target is None:
                continue
            self._written.update(marks_of(each.target))
            key = key_of(each.target)
            if how is Agreement.AGREES and fails and not late:
                self._carried.add(key)
                self._largest = max(self._largest, each.error or 0.0)
            elif how is not Agreement.AGREES and not late:
                self._carried.discard(key)
            if key is not None and _is_filled(each.target):
                hidden, rounding, same = self._hidden(view.ins)
                explained = same and view.explained and how is Agreement.AGREES
                self._masked[key] = max(view.into or 0.0, hidden), max(rounding, coarsest(view.ins)), explained
        if call.phase is Phase.FORWARD:
            values = [*view.ins, *view.outs]
            dirty = any(each.verdict.level is not Level.PASS and is_tensor(each) for each in values)
            error = most(values)
            if dirty or error:
                self._forward[call] = dirty, error, how is Agreement.AGREES
            argument = unrecorded_argument(view.ins)
            if argument is not None:
                self._unrecorded[call] = slot_of(argument)

    def _saved(self, call: CallId) -> tuple[bool, float | None, bool]:
        """What a backward call also reads: the values of its forward call."""
        if call.phase is not Phase.BACKWARD:
            return False, 0.0, True
        return self._forward.get(_forward_of(call), (False, 0.0, True))

    def _lacking(self, call: CallId, ins: Sequence[Comparison]) -> str:
        """An argument of a call, or of the forward of a backward call, that is unknown; empty where there is none."""
        own = unrecorded_argument(ins)
        if own is not None or call.phase is not Phase.BACKWARD:
            return "" if own is None else slot_of(own)
        forward = self._unrecorded.get(_forward_of(call))
        return f"{forward} of its forward" if forward else ""

    def outside(self, call: CallId, ins: Sequence[Comparison]) -> Comparison | None:
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
            if self._written.isdisjoint(marks_of(each.target)) and (sure or not self._dirty):
                return each
        return None


def _is_doubtful(call: CallId, each: Comparison) -> bool:
    """Whether a tensor that a call read is not known."""
    if each.slot.role is Role.OUTPUT or each.verdict.level not in (Level.UNKNOWN, Level.UNMATCHED):
        return False
    return is_tensor(each) and not is_overwritten(call, each.slot)


def _forward_of(call: CallId) -> CallId:
    return CallId(call.kind, call.name, call.index, Phase.FORWARD)


def _key(value: Value | None) -> Hashable | None:
    return None if value is None else key_of(value)


def _targets(values: Iterable[Comparison]) -> Iterator[Value]:
    yield from (each.target for each in values if each.target is not None)


def _is_filled(value: Value) -> bool:
    """Whether a mask was filled with the largest number there is."""
    stats = value.stats
    return stats is not None and stats.norm is not None and stats.norm >= FILLED
