"""Tensors that a program makes of numbers from outside (a clock, a counter of memory, the number of a process) and only looks at.

Such a value differs from run to run and says nothing of the model, as long as nothing but calls on it alone reads it. The first
call that reads it together with anything else, or belongs to the model, makes it a difference like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ulpscope.compare.comparison import CallComparison, Code, Comparison, Level
from ulpscope.model.names import MODULE, OPTIMIZER
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import Phase, Value


@dataclass(slots=True)
class Strand:
    """A value from outside; `read` once more than calls on it alone had it. `beside`: those that were put together with it."""

    read: bool = False
    beside: list[Strand] = field(default_factory=list)


class Outside:
    """Sees one comparison after the other, in execution order."""

    def __init__(self) -> None:
        self._of: dict[object, Strand] = {}

    def see(self, comparison: CallComparison, ins: Sequence[Comparison], outs: Sequence[Comparison]) -> Strand | None:
        """The strand that a call begins or goes on with; None of every other call."""
        found = self._begun(comparison, ins, outs) or self._gone_on(comparison, ins)
        if found is None:
            for each in ins:
                strand = self._strand(each)
                if strand is not None and each.verdict.level is not Level.PASS:
                    _read(strand)
            return None
        for each in outs:
            if each.target is not None and each.target.is_tensor and each.verdict.level is not Level.PASS:
                self._of.update(dict.fromkeys(marks_of(each.target), found))
        return found

    def _begun(
        self, comparison: CallComparison, ins: Sequence[Comparison], outs: Sequence[Comparison]
    ) -> Strand | None:
        call = comparison.match.call
        made = Trait.MAKES_NUMBERS in traits(call.id.name) and not call.module and call.id.phase is Phase.FORWARD
        odd = [each for each in ins if each.verdict.level is not Level.PASS]
        if not made or not odd or not all(map(_is_number, odd)) or not all(map(_is_alike, outs)):
            return None
        if any(each.target is None or each.target.is_tensor for each in ins):
            return None
        return Strand()

    def _gone_on(self, comparison: CallComparison, ins: Sequence[Comparison]) -> Strand | None:
        """Of a call whose tensors all come from outside."""
        match = comparison.match
        call = match.call
        if None in (match.reference, match.target) or call.module or call.id.kind in (MODULE, OPTIMIZER):
            return None
        tensors = [each for each in ins if each.target is not None and each.target.is_tensor]
        strands = [self._strand(each) for each in tensors]
        known = [strand for strand in strands if strand is not None and not strand.read]
        rest = (each for each in ins if each not in tensors)
        if not known or len(known) < len(tensors) or any(each.verdict.level is not Level.PASS for each in rest):
            return None
        first = known[0]
        for each in known[1:]:
            if each is not first:
                first.beside.append(each)
                each.beside.append(first)
        return first

    def _strand(self, each: Comparison) -> Strand | None:
        if each.target is None or not each.target.is_tensor or not self._of:
            return None
        return next((self._of[mark] for mark in marks_of(each.target) if mark in self._of), None)


def _read(strand: Strand) -> None:
    if not strand.read:
        strand.read = True
        for each in strand.beside:
            _read(each)


def _is_number(each: Comparison) -> bool:
    return Code.ARGUMENT in each.verdict.codes and all(
        value is not None and value.type in ("int", "float") for value in (each.reference, each.target)
    )


def _is_alike(each: Comparison) -> bool:
    """In everything but its elements."""
    return not {Code.SHAPE, Code.DTYPE, Code.TYPE} & set(each.verdict.codes)


def marks_of(value: Value) -> tuple[object, ...]:
    """What tells that a value is one that a call wrote: its measure, or its numbers where it was measured again."""
    stats = value.stats
    numbers = None if stats is None else (stats.max, stats.min, stats.mean, stats.norm, stats.zero_count)
    return (value.measure, (numbers, value.checksum)) if value.measure is not None else ((numbers, value.checksum),)
