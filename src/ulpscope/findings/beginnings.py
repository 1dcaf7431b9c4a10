"""Where a difference may begin that no call introduced: at a call that one run alone has, or at a dtype that one run alone has.

Fed like `divergence`, which asks where it has no call to name and yet values differ. Keeps what calls wrote that are alone, and
the first candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ulpscope.compare.comparison import CallComparison, Code, Comparison, Level
from ulpscope.naming import MODULE, call_text, slot_text
from ulpscope.records import Role, Value


@dataclass(frozen=True, slots=True)
class Beginning:
    """A call, and why it may be the one; `alone`: one run has no such call. `seen` is the call that shows it."""

    comparison: CallComparison
    text: str
    alone: bool
    seen: int


class Beginnings:
    """Sees one comparison after the other, in execution order. `above` tells the calls around a call."""

    def __init__(self, above: Callable[[int], Iterable[int]]) -> None:
        self.first: Beginning | None = None
        self._above = above
        # Whether both runs began with floats of one dtype; a run that is in another from the first on is meant to be.
        self._is_shared: bool | None = None
        self._reference: dict[object, CallComparison] = {}
        self._target: dict[object, CallComparison] = {}

    def see(self, comparison: CallComparison) -> None:
        """Remembers a call that is alone; of others looks whether something begins there."""
        match = comparison.match
        if match.reference is None or match.target is None:
            for each in comparison.values:
                if each.slot.role is Role.OUTPUT:
                    _remember(self._reference, each.reference, comparison)
                    _remember(self._target, each.target, comparison)
        elif self.first is None or self._is_inside(comparison):
            if self._is_shared is None:
                self._is_shared = _is_shared(comparison.values)
            odd = (each for each in comparison.values if each.verdict.level is not Level.PASS)
            found = (self._begins(comparison, each) for each in odd)
            self.first = next(filter(None, found), self.first)

    def _is_inside(self, comparison: CallComparison) -> bool:
        """Of a module and a call inside it, the call is named."""
        assert self.first is not None
        call = self.first.comparison.match.call
        return call.id.kind == MODULE and call.seq in self._above(comparison.match.call.seq)

    def _begins(self, comparison: CallComparison, each: Comparison) -> Beginning | None:
        other_dtype = Code.DTYPE in each.verdict.codes
        if each.slot.role is not Role.OUTPUT and (other_dtype or each.verdict.level is Level.FAIL):
            taker = call_text(comparison.match.call.id)
            for run, written, value in (
                ("target", self._target, each.target),
                ("reference", self._reference, each.reference),
            ):
                found = None if value is None else written.get(marks_of(value)[0])
                if found is not None:
                    text = f"only the {run} has it, and {taker} takes what it gives as {slot_text(each.slot)}"
                    return Beginning(found, text, alone=True, seen=comparison.match.call.seq)
        if not other_dtype or not self._is_shared:
            return None
        left, right = (_dtype(value) for value in (each.reference, each.target))
        text = f"{slot_text(each.slot)} is {right} in the target, {left} in the reference"
        return Beginning(comparison, text, alone=False, seen=comparison.match.call.seq)


def marks_of(value: Value) -> tuple[object, ...]:
    """What tells that a value is one that a call wrote: its measure, or its numbers where it was measured again."""
    stats = value.stats
    numbers = None if stats is None else (stats.max, stats.min, stats.mean, stats.norm, stats.zero_count)
    return (value.measure, (numbers, value.checksum)) if value.measure is not None else ((numbers, value.checksum),)


def _is_shared(values: Iterable[Comparison]) -> bool | None:
    """Whether the first float that goes into a call, or comes out of it, has one dtype in both runs; None where there is none."""
    floats = sorted((each for each in values if each.rounding), key=lambda each: each.slot.role is Role.OUTPUT)
    return Code.DTYPE not in floats[0].verdict.codes if floats else None


def _remember(written: dict[object, CallComparison], value: Value | None, by: CallComparison) -> None:
    if value is not None and value.is_tensor:
        written.setdefault(marks_of(value)[0], by)


def _dtype(value: Value | None) -> object:
    return None if value is None else value.dtype if value.is_tensor else value.scalar
