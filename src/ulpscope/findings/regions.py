"""What became of the values that calls without a counterpart made: found again, or lost.

Intermediate values that one side alone has are no suspects while something computed from them is the reference's again: an
implementation went its own way and came back. A value is *lost* if the end of its pass (loss and outputs, gradients of parameters,
what an optimizer leaves) is reached from it and nothing known is. The first lost value whose inputs are not lost was made by the guilty
call; what the other side computes from the same values, and nobody finds again, is its counterpart.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ulpscope.compare.anchors import SKETCH, STATISTICS, sketch_apart
from ulpscope.compare.comparison import CallComparison, Code, Comparison, How, Level, Match
from ulpscope.compare.engine import compare_calls
from ulpscope.compare.value_graph import BACKWARD, FEW, FORWARD, STEP
from ulpscope.compare.values import Values, plain_module
from ulpscope.findings.agreement import Agreement, Pairs
from ulpscope.findings.beside import anchor_of, place_of, plain_name
from ulpscope.findings.exchange import KIND
from ulpscope.findings.model import Beside, Divergence, Finding, Status
from ulpscope.findings.view import argument_text, changed_argument, is_number, most, parted, slot_of
from ulpscope.model.names import OPTIMIZER, call_text, is_within, slot_text
from ulpscope.model.records import CallRecord, Role

_SHOWN = 6
# An error that rounding of float32 explains anywhere.
_LEAST = 1.6e-5
# So far may two implementations of an optimizer's step be apart.
_STEP = 0.05


def first_lost(values: Values, pairs: Pairs, found: Divergence) -> None:
    """Adds the call, or calls, where values were lost; takes away what came back."""
    if not found.findings and not found.statuses[Status.UNMATCHED] and not found.statuses[Status.INHERITED]:
        return
    values.is_apart |= bool(found.statuses[Status.UNMATCHED])
    lost = _Lost(values, pairs)
    kept, dropped = _parted(lost, found)
    region = lost.first()
    # What is found elsewhere, and leads here, is at the wrong place: swapped weights.
    swapped = None if region is None else next((each for each in dropped if lost.leads_to(each, region)), None)
    if region is None:
        found.unsure &= not lost.agrees()
    elif swapped is not None:
        dropped.remove(swapped)
        kept = sorted([*kept, swapped], key=lambda each: each.comparison.match.call.seq)
    elif not lost.is_sure(region):
        # Rows that were left out or put in: the gradients tell, where there are some.
        found.unsure = not lost.ends_agree(BACKWARD)
        region = None
    if region is not None:
        # A call that holds others is named by what is lost inside it.
        kept = [each for each in kept if each.call.kind == KIND or lost.is_leaf(each.comparison.match.call)]
    for each in dropped:
        found.statuses[each.status] -= 1
        found.statuses[Status.ELSEWHERE] += 1
    for each in dropped[: max(0, _SHOWN - len(found.remarks))]:
        found.remarks.append((call_text(each.call), f"{each.text}; what it gives is found again"))
    found.findings = kept
    if region is not None:
        lost.add(region, found)


def _parted(lost: _Lost, found: Divergence) -> tuple[list[Finding], list[Finding]]:
    """The findings that stay, and those of which what the call gives is found again."""
    kept, dropped, innocent = list[Finding](), list[Finding](), set[str]()
    for finding in found.findings:
        if lost.is_other_optimizer(finding) or lost.came_back(finding) or finding.text in innocent:
            if finding.status is Status.SOURCE:
                innocent.add(finding.text)  # the same argument elsewhere is no more to blame
            dropped.append(finding)
        else:
            kept.append(finding)
    return kept, dropped


class _Lost:
    """The lost values of the target."""

    def __init__(self, values: Values, pairs: Pairs) -> None:
        self._values, self._pairs = values, pairs
        self._target, self._reference = values.target, values.reference
        anchors = values.anchors
        graph = self._target
        self._said = np.zeros(len(graph), dtype=np.int8)
        for key, how in pairs.said.items():
            node = graph.number_of(key)
            if node is not None:
                self._said[node] = how
        # What is a whole number says little of what it was made of, and the same numbers in another order are other values.
        shuffled = (anchors.kind == STATISTICS) & (self._said >= Agreement.FOLLOWS)
        shuffled[list(graph.gradient_nodes)] = False  # a weight may be kept transposed
        for node in np.flatnonzero(shuffled).tolist():
            # What differs from its counterpart in place is known again by what is made of it, if at all.
            shuffled[node] = self._said[node] == Agreement.DIFFERS or self._has_order(node)
        self._anchored = ((anchors.kind > 0) & ~shuffled) | ((self._said == Agreement.AGREES) & (graph.unit > 0))
        self._judged = (graph.is_telling | (self._said != 0)) & (graph.unit > 0)
        taken = [node for partners in anchors.partners.values() for node in partners]
        self._taken = np.zeros(len(self._reference), dtype=bool)
        self._taken[taken] = True
        back = {theirs: mine for mine, theirs in pairs.partner.items()}
        self._theirs_matched = back
        self._good: dict[int, NDArray[np.bool_]] = {}
        self._follow()

    def _follow(self) -> None:
        """What a call gives that follows from what it read is known where that is: not from the same numbers in another order."""
        graph, kinds = self._target, self._values.anchors.kind
        nodes = np.flatnonzero((self._said == Agreement.FOLLOWS) & ~self._anchored & (graph.maker >= 0))
        for node in nodes[np.argsort(graph.maker[nodes], kind="stable")].tolist():
            before = [other for other in graph.before.of(node) if graph.unit[other] > 0]
            moved = any(kinds[other] == STATISTICS and self._has_sketches(other) for other in before)
            self._anchored[node] = bool(before) and not moved and all(self._anchored[other] for other in before)

    def good(self, phase: int) -> NDArray[np.bool_]:
        """The values of a pass that are known, and what these were computed from."""
        if phase not in self._good:
            graph = self._target
            within = graph.phase == phase
            # A single number, a loss, may be near whatever it was made of; a mean tells little of what it is the mean of.
            telling = np.flatnonzero(self._anchored & graph.is_telling & within).tolist()
            reached = graph.reach(graph.before, telling, within, graph.reductions)
            self._good[phase] = reached | (self._anchored & within)
        return self._good[phase]

    def is_other_optimizer(self, finding: Finding) -> bool:
        """Whether a call is part of a step that the reference takes by other calls: only the step as a whole can be compared."""
        call = finding.comparison.match.call
        position = self._target.position(call.seq)
        if position is None or self._target.phases[position] != STEP or call.id.kind == OPTIMIZER:
            return False
        return self._steps_differ

    @cached_property
    def _gradients(self) -> set[int]:
        return self._target.gradient_nodes

    @cached_property
    def _steps_differ(self) -> bool:
        graph = self._target
        return any(
            graph.phases[position] == STEP and graph.seqs[position] not in self._pairs.partner
            for position in range(len(graph.seqs))
        )

    def came_back(self, finding: Finding) -> bool:
        """Whether what a call gave is the reference's, or something computed from it is, though its own call says otherwise.

        That a call made something else of the very same is its own doing, whatever came of it."""
        match = finding.comparison.match
        if match.target is None or match.reference is None or match.call.id.kind == KIND:
            return False
        _, outs = parted(finding.comparison)
        nodes = [
            node for each in outs if each.target is not None and (node := self._target.node(each.target)) is not None
        ]
        if not nodes:
            return False
        kinds = self._values.anchors.kind
        number = any(map(is_number, parted(finding.comparison)[0]))
        if number and finding.status is Status.SOURCE and _is_near(finding):
            return False  # another eps, whose effect is small by its nature
        if finding.status is Status.SOURCE and not number and not any(self._target.unit[node] > 0 for node in nodes):
            return True  # whole numbers, a shape or places: what they are used for tells
        if any(self._target.is_telling[node] for node in nodes):
            near = self._anchored & (kinds > 0) & (self._values.anchors.error <= max(finding.limit, _LEAST))
            by_value = all(near[node] for node in nodes if self._target.is_telling[node])
            if by_value:
                return True
        if finding.status is Status.SOURCE and self._is_read_elsewhere(finding.comparison):
            return True
        if (finding.status is Status.INTRODUCED or number) and self.is_leaf(match.target):
            return False
        phase = int(self._target.phase[nodes[0]])
        return all(self.good(phase)[node] for node in nodes)

    def _is_read_elsewhere(self, comparison: CallComparison) -> bool:
        """Whether all tensors that differ from the counterpart's are values that the reference has elsewhere: then they are not
        counterparts. The same numbers in another order are that only where the shape is another one too."""
        differing = [
            each
            for each in parted(comparison)[0]
            if each.verdict.level is Level.FAIL and each.target is not None and each.target.is_tensor
        ]
        return bool(differing) and all(map(self._is_elsewhere, differing))

    def _is_elsewhere(self, each: Comparison) -> bool:
        node = None if each.target is None else self._target.node(each.target)
        if node is None:
            return False
        kind = self._values.anchors.kind[node]
        graph, kinds = self._target, self._values.anchors.kind
        proven = node in self._gradients or any(kinds[other] == SKETCH for other in graph.after.of(node))
        told = Code.SHAPE in each.verdict.codes or proven or not self._has_sketches(node)
        return bool(kind == SKETCH or (kind and told))

    def is_leaf(self, call: CallRecord) -> bool:
        """Whether no recorded call was made inside a call."""
        position = self._target.position(call.seq)
        return position is None or self._target.is_leaf(position)

    # --- where values were lost ---------------------------------------------------------------------------------

    def first(self) -> _Region | None:
        """Of the first pass that lost something."""
        for phase in (FORWARD, BACKWARD, STEP):
            region = self._first_of(phase)
            if region is not None:
                return region
        return None

    def _ends(self, phase: int, here: NDArray[np.bool_]) -> NDArray[np.int64]:
        graph = self._target
        chosen = {FORWARD: graph.roots, BACKWARD: graph.gradient_nodes}.get(phase, set())
        ends = np.zeros(len(graph), dtype=bool)
        ends[list(chosen)] = True
        ends &= here
        if (ends & graph.is_telling).any():
            ends &= graph.is_telling  # a loss of its own is told by its gradients
        if not ends.any():
            read = np.array(
                [any(here[other] for other in graph.after.of(node)) for node in range(len(graph))], dtype=bool
            )
            ends = here & (graph.maker >= 0) & ~read
        if phase == STEP:
            # Of another implementation's numbers nobody knows which are the result; those of which the reference has no other are none.
            free = self._reference.is_telling & ~self._taken & (self._reference.phase == STEP)
            free &= self._reference.maker >= 0
            ends &= np.isin(graph.numel, self._reference.numel[free])
        return np.flatnonzero(ends)

    def _first_of(self, phase: int) -> _Region | None:
        graph = self._target
        here = self._judged & (graph.phase == phase)
        if not here.any() or not (self._reference.phase == phase).any():
            return None
        here &= ~self._cancelled(here)
        good = self.good(phase)
        ends = self._ends(phase, here)
        lost_ends = [node for node in ends.tolist() if not good[node]]
        if phase == STEP:
            lost_ends = [node for node in lost_ends if not self._is_left(node)]
            if 2 * len(lost_ends) < len(ends):
                return None  # of gradients that are noise alone the steps are noise
        if not lost_ends:
            return None
        reached = graph.reach(graph.before, lost_ends, graph.phase == phase)
        lost = reached & here & ~good & (graph.maker >= 0)
        candidates = np.flatnonzero(lost).tolist()
        first = [node for node in candidates if not self._has_lost_before(node, lost)] or candidates
        if not first:
            return None
        node = min(first, key=lambda each: (graph.maker[each], each))
        return self._region(node, lost, len(candidates), int(here.sum()))

    def _is_left(self, node: int) -> bool:
        """Whether another implementation of the step leaves as much: of what is divided by its own size the signs of noise remain."""
        graph, other = self._target, self._reference
        fits = np.flatnonzero(other.is_telling & (other.phase == STEP) & (other.numel == graph.numel[node]))
        own, size = graph.sketch(node), graph.numbers[node, 3]
        for each in fits.tolist():
            apart = sketch_apart(other.sketch(each), own)
            if apart is None:
                apart = abs(other.numbers[each, 3] - size) / max(size, 1e-30)
            if apart < _STEP:
                return True
        return False

    def _has_lost_before(self, node: int, lost: NDArray[np.bool_]) -> bool:
        graph = self._target
        seen, todo = {node}, [node]
        while todo:
            for other in graph.before.of(todo.pop()):
                if lost[other]:
                    return True
                if other not in seen and not self._anchored[other]:
                    seen.add(other)
                    todo.append(other)
        return False

    def _cancelled(self, here: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Nothing but rounding is left of them: the bias before a norm, the bias of keys."""
        graph = self._target
        found = np.zeros(len(graph), dtype=bool)
        size = np.divide(graph.numbers[:, 3], np.sqrt(np.maximum(graph.numel, 1)))
        for node in np.flatnonzero(here & (graph.phase == BACKWARD) & ~self._anchored).tolist():
            unit = max(float(graph.unit[node]), 2.0**-24)
            for other in graph.before.of(node):
                if not graph.is_known[other]:
                    continue
                terms = max(1.0, graph.numel[other] / max(1, graph.numel[node]))
                if size[node] < 64 * unit * size[other] * np.sqrt(terms):
                    found[node] = True
        return found

    # --- what is said of them -----------------------------------------------------------------------------------

    def _region(self, node: int, lost: NDArray[np.bool_], count: int, total: int) -> _Region:
        graph = self._target
        position = int(graph.maker[node])
        position = self._moved(node, position)
        region = _Region(int(graph.phase[node]), node, position, count, total)
        region.direct, region.theirs = self._counterparts(position)
        return region

    def _moved(self, node: int, position: int) -> int:
        """Where what a call reads has the right elements in another order, who moved them."""
        graph, anchors = self._target, self._values.anchors
        seen = set()
        while position not in seen and int(graph.phases[position]) == FORWARD:
            seen.add(position)
            moved = [
                each
                for each in graph.inputs[position]
                if anchors.kind[each] == STATISTICS
                and self._said[each] != Agreement.AGREES
                and self._has_order(each)
                and graph.maker[each] >= 0
                and graph.is_leaf(int(graph.maker[each]))
                and any(anchors.kind[other] for other in graph.inputs[int(graph.maker[each])])
            ]
            if not moved:
                break
            position = int(graph.maker[moved[0]])
        return position

    def _has_order(self, node: int) -> bool:
        """Whether it is known that a value's numbers are the reference's in another order: in one value there, or in several."""
        several = len(self._values.anchors.partners.get(node, ())) > 1
        return self._has_sketches(node) or (several and self._target.sketch(node) is not None)

    def _has_sketches(self, node: int) -> bool:
        """Whether the reference's value with the same numbers could be told from one in another order."""
        partners = self._values.anchors.partners.get(node, ())
        if any(self._target.numel[node] != self._reference.numel[other] for other in partners):
            return False  # it is made of several
        return self._target.sketch(node) is not None and any(
            self._reference.sketch(other) is not None for other in partners
        )

    def _counterparts(self, position: int) -> tuple[list[int], list[int]]:
        """What the reference makes of the same values and the target has not."""
        graph, other = self._target, self._reference
        read = [each for node in graph.inputs[position] for each in self._values.anchors.partners.get(node, ())]
        seen, todo, found, direct = set(read), sorted(set(read)), list[int](), list[int]()
        while todo and len(found) < 4 * _SHOWN:
            node = todo.pop(0)
            for made in other.after.of(node):
                if made in seen or self._taken[made]:
                    continue
                seen.add(made)
                todo.append(made)
                maker = int(other.maker[made])
                if maker >= 0 and maker not in found:
                    found.append(maker)
                    direct += [maker] if node in read else []
        return sorted(direct), sorted(found)

    def leads_to(self, finding: Finding, region: _Region) -> bool:
        """Whether what a call gave reaches a region by values alone that are not what their counterparts are."""
        match, graph = finding.comparison.match, self._target
        if match.target is None or match.reference is None or not self.is_leaf(match.target):
            return False
        position = graph.position(match.target.seq)
        if position is None or position >= region.position or region.phase != graph.phases[position]:
            return False
        odd = (self._said >= Agreement.FOLLOWS) | ~self._anchored
        if any(Code.SHAPE in each.verdict.codes for each in finding.comparison.values):
            return False
        begin = [node for node in graph.outputs[position] if odd[node]]
        reached = graph.reach(graph.after, begin, odd)
        return any(reached[node] for node in graph.inputs[region.position])

    def is_sure(self, region: _Region) -> bool:
        """Whether the call read what the reference has."""
        graph, other = self._target, self._reference
        numbers = {row.tobytes() for row in other.numbers[other.unit == 0]}
        # Rows that one side alone has: then it has no values of the other's sizes.
        sized = bool(((other.phase == region.phase) & (other.numel == graph.numel[region.node])).any())
        good = self.good(region.phase)
        for node in graph.inputs[region.position]:
            if graph.unit[node] > 0:
                if graph.is_telling[node] and region.phase == FORWARD and not good[node]:
                    return False
            elif graph.numel[node] < FEW or (sized and graph.maker[node] >= 0):
                continue
            elif self._said[node] != Agreement.AGREES and graph.numbers[node].tobytes() not in numbers:
                return False
        return True

    def agrees(self) -> bool:
        """Whether all that the passes are for, of which there is something to compare, is found in the reference."""
        graph = self._target
        phases = [phase for phase in (FORWARD, BACKWARD) if (self._judged & (graph.phase == phase)).any()]
        return bool(phases) and all(map(self.ends_agree, phases))

    def ends_agree(self, phase: int) -> bool:
        """Whether all that a pass is for is found in the reference."""
        graph = self._target
        ends = self._ends(phase, self._judged & (graph.phase == phase) & ~self._cancelled(self._judged))
        good = self.good(phase)
        return bool(len(ends)) and all(good[node] for node in ends.tolist())

    def add(self, region: _Region, found: Divergence) -> None:
        """The finding of a region, before what came after it."""
        position = region.position
        call = self._target.dump.nth(position)
        known = [each for each in found.findings if each.comparison.match.target is not None]
        named = [each for each in known if each.comparison.match.call.seq == call.seq]
        if named:
            return
        earlier = [
            each for each in known if each.comparison.match.call.seq < call.seq and each.status is not Status.UNSURE
        ]
        if earlier:
            return
        finding = replace(self._finding(region, call, found), beside=self._beside(region))
        found.statuses[Status.LOST] += 1
        found.findings.insert(0, finding)

    def _beside(self, region: _Region) -> Beside:
        """Both sides' calls between the values that are known, and these."""
        graph, other, anchors = self._target, self._reference, self._values.anchors
        mine, after = self._lost_behind(region)
        theirs = [each for each in region.theirs if other.seqs[each] not in self._theirs_matched]
        begin = int(other.phases[theirs[0]]) if theirs else region.phase
        theirs = [each for each in theirs if int(other.phases[each]) == begin]
        known = [
            (node, anchors.partners[node][0]) for node in graph.inputs[region.position] if node in anchors.partners
        ]
        return Beside(
            tuple(place_of(other, each) for each in theirs[:_SHOWN]),
            tuple(place_of(graph, each) for each in mine[:_SHOWN]),
            tuple(anchor_of(self._values, node, partner) for node, partner in known[:_SHOWN]),
            tuple(
                anchor_of(self._values, node, anchors.partners[node][0])
                for node in after[:_SHOWN]
                if node in anchors.partners
            ),
            len(mine),
            len(theirs),
        )

    def _lost_behind(self, region: _Region) -> tuple[list[int], list[int]]:
        """The calls of the target from a region's first on whose results are lost, in its module, and the values known behind them."""
        graph, modules = self._target, self._modules_of_calls
        module = modules[region.position]
        found, after, seen = [region.position], list[int](), set[int]()
        todo = [node for node in graph.outputs[region.position]]
        while todo:
            for made in graph.after.of(todo.pop()):
                maker = int(graph.maker[made])
                if made in seen or maker < 0 or graph.phase[made] != region.phase:
                    continue
                seen.add(made)
                if self._anchored[made]:
                    after.append(made)
                elif modules[maker] == module and maker not in found:
                    found.append(maker)
                    todo.append(made)
        return sorted(found), sorted(after)

    @cached_property
    def _modules_of_calls(self) -> list[str]:
        return self._target.dump.modules()

    def _finding(self, region: _Region, call: CallRecord, found: Divergence) -> Finding:
        term = self._missing_term(region) if region.phase == BACKWARD else None
        if term is not None:
            mine = self._theirs_matched.get(term.seq)
            own = None if mine is None else self._target.dump.by_seq(mine)
            match = Match(term, own, How.ALONE if own is None else How.VALUES, "the target has no such call")
            text = f"a gradient that torch sums, which {call_text(call.id)} takes, has no such term in the target"
            comparison = compare_calls(self._reference.dump, self._target.dump, match)
            return self._of(found, Status.UNMATCHED if own is None else Status.LOST, comparison, None, None, text)
        partner = self._pairs.partner.get(call.seq)
        if partner is not None:
            match = Match(self._reference.dump.by_seq(partner), call, How.VALUES)
            comparison = compare_calls(self._reference.dump, self._target.dump, match)
            gone = self._left_out(comparison)
            if gone is not None:
                return self._of(found, Status.UNMATCHED, gone[0], None, None, gone[1])
            ins, outs = parted(comparison)
            changed = changed_argument(call.id, ins)
            if changed is not None:
                text = argument_text(changed)
                return self._of(found, Status.SOURCE, comparison, most(ins), most(outs), text)
            text = self._moved_text(ins) or "what it gives is not found in the reference, what it reads is"
            return self._of(found, Status.LOST, comparison, most(ins), most(outs), text)
        theirs = [self._reference.dump.nth(each) for each in region.theirs[:1]]
        module = self._module(region, call, theirs)
        taken = self._taken_by(region, theirs)
        if taken:
            alone = compare_calls(
                self._reference.dump, self._target.dump, Match(None, call, How.ALONE, "the reference has no such call")
            )
            text = f"only the target has it, and {taken}"
            return replace(self._of(found, Status.UNMATCHED, alone, None, None, text), module=module)
        match = Match(None, call, How.ALONE, "the reference has no such call")
        comparison = compare_calls(self._reference.dump, self._target.dump, match)
        text = "what it gives is not found in the reference, what it reads is"
        status = Status.LOST if theirs else Status.UNMATCHED
        return replace(self._of(found, status, comparison, None, None, text), module=module)

    def _moved_text(self, ins: list[Comparison]) -> str:
        """What a call read in another order than its counterpart."""
        for each in ins:
            node = None if each.target is None else self._target.node(each.target)
            moved = node is not None and self._values.anchors.kind[node] == STATISTICS and self._has_order(node)
            if each.verdict.level is Level.FAIL and moved:
                return f"{slot_of(each)} has the reference's numbers in another order"
        return ""

    def _taken_by(self, region: _Region, theirs: list[CallRecord]) -> str:
        """Who takes what a call gives that was put between two calls of the reference."""
        if not theirs or theirs[0].seq not in self._theirs_matched:
            return ""
        taker = self._target.dump.by_seq(self._theirs_matched[theirs[0].seq])
        made = set(self._target.outputs[region.position])
        for value in () if taker is None else taker.values:
            if value.slot.role is not Role.OUTPUT and self._target.node(value) in made:
                return f"{call_text(taker.id)} takes what it gives as {slot_text(value.slot)}"  # type: ignore[union-attr]
        return ""

    def _module(self, region: _Region, call: CallRecord, theirs: list[CallRecord]) -> str:
        """The module to look at: that of the call, unless the reference made all of a module around it in one call, or there is none."""
        dump = self._reference.dump
        if call.module:
            names = {theirs: mine for mine, theirs in self._values.modules.items()}
            around = names.get(plain_module(theirs[0].module), "") if len(region.direct) == 1 and theirs else ""
            recorded = plain_module(call.module) in names.values()
            return around if around and not recorded and is_within(call.module, around) else call.module
        if theirs and plain_name(theirs[0]) == plain_name(call):
            return theirs[0].module
        makers = [
            int(self._reference.maker[other])
            for node in self._target.inputs[region.position]
            for other in self._values.anchors.partners.get(node, ())
        ]
        known = [maker for maker in makers if maker >= 0]
        return dump.nth(max(known)).module if known else ""

    def _of(
        self,
        found: Divergence,
        status: Status,
        comparison: CallComparison,
        into: float | None,
        out: float | None,
        text: str,
    ) -> Finding:
        return Finding(status, found.step, found.rank, comparison, into, out, self._values.anchors.limit, text)

    def _missing_term(self, region: _Region) -> CallRecord | None:
        """Where a sum of gradients is lost whose terms in the target are known: the term that the reference alone has."""
        graph, other = self._target, self._reference
        partner = self._pairs.partner.get(graph.seqs[region.position])
        there = None if partner is None else other.position(partner)
        sums = [node for node in graph.inputs[region.position] if graph.maker[node] < 0 and not self._anchored[node]]
        if (
            there is None
            or not sums
            or not all(self._anchored[term] for node in sums for term in graph.before.of(node))
        ):
            return None
        terms = [term for node in other.inputs[there] if other.maker[node] < 0 for term in other.before.of(node)]
        lacking = [
            term for term in terms if not self._taken[term] and other.is_telling[term] and other.maker[term] >= 0
        ]
        if not lacking:
            return None
        return other.dump.nth(min(int(other.maker[term]) for term in lacking))

    def _left_out(self, comparison: CallComparison) -> tuple[CallComparison, str] | None:
        """The call of the reference whose result the counterpart takes, where the target takes what that call reads."""
        for each in parted(comparison)[0]:
            if each.verdict.level is not Level.FAIL or each.reference is None or each.target is None:
                continue
            mine, theirs = self._target.node(each.target), self._reference.node(each.reference)
            if mine is None or theirs is None or not self._anchored[mine]:
                continue
            maker = int(self._reference.maker[theirs])
            if maker < 0 or self._reference.seqs[maker] in self._theirs_matched:
                continue
            why = "the target has no such call"
            alone = compare_calls(
                self._reference.dump,
                self._target.dump,
                Match(self._reference.dump.nth(maker), None, How.ALONE, why),
            )
            taker = call_text(comparison.match.call.id)
            return alone, f"only the reference has it, and {taker} takes what it gives as {slot_of(each)}"
        return None


def _is_near(finding: Finding) -> bool:
    return finding.output_error is not None and finding.output_error <= finding.limit


@dataclass(slots=True)
class _Region:
    """Where values were lost: the first of them, the position of the call that made it, and the reference's calls there."""

    phase: int
    node: int
    position: int
    lost: int
    total: int
    direct: list[int] = field(default_factory=list)
    theirs: list[int] = field(default_factory=list)
