"""What two records of one program may differ in that is nobody's error: operators that round otherwise each time (they add in no
fixed order), and decisions between values that lie closer than that.

A call whose inputs are the same and whose output differs within rounding is unsteady. A call that makes whole numbers, or steps, of
floats decides: where its inputs differ by no more than rounding that was carried on, and it decides otherwise, it was a tie; whatever
differs behind it is other work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ulpscope.compare.comparison import CallComparison, Comparison, Level
from ulpscope.model.names import MODULE
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import Phase

_WHOLE = ("torch.bool", "torch.int", "torch.uint")
# So many times the coarsest rounding that was seen is called rounding; above it, what rounding has grown to.
_NEAR = 64.0
_MOST = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """A call that decided otherwise. `at`: how many calls were seen before; `inherited`: how many of those inherit a difference."""

    comparison: CallComparison
    step: int
    rank: int
    into: float
    is_near: bool
    at: int
    inherited: int

    @property
    def text(self) -> str:
        if self.is_near:
            return "a tie within rounding"
        return f"a tie within what rounding had grown to ({self.into:.1e})"


@dataclass(slots=True)
class Steadiness:
    """What was seen of one dump. `unsteady`: by name and phase the first of such calls, `counts`: how many there are. `earlier`: there
    were some in a step before."""

    unsteady: dict[tuple[str, Phase], CallComparison] = field(default_factory=dict)
    counts: Counter[tuple[str, Phase]] = field(default_factory=Counter)
    choice: Choice | None = None
    earlier: bool = False

    def see_unsteady(self, comparison: CallComparison) -> None:
        key = comparison.match.call.id.name, comparison.match.call.id.phase
        self.unsteady.setdefault(key, comparison)
        self.counts[key] += 1

    @property
    def remarks(self) -> list[tuple[CallComparison, str]]:
        """The first calls that were unsteady, and what to do."""
        inner = [(key, first) for key, first in self.unsteady.items() if first.match.call.id.kind != MODULE]
        found = []
        for (name, phase), first in (inner or list(self.unsteady.items()))[:_MOST]:
            who = f"`{name.strip('_')}`'s backward" if phase is Phase.BACKWARD else f"`{name.strip('_')}`"
            count = self.counts[name, phase]
            often = f" ({count} times)" if count > 1 else ""
            found.append(
                (
                    first,
                    f"its inputs are the same, its output differs in the last bits{often}: if both runs are of one program, {who} adds in another "
                    "order each time; torch.use_deterministic_algorithms(True) would stop that",
                )
            )
        return found


def is_choice(
    comparison: CallComparison, ins: Sequence[Comparison], outs: Sequence[Comparison], *, by_far: bool
) -> bool:
    """Whether a call that got floats which differ decided otherwise. `by_far`: its output differs by more than they explain."""
    odd = [each for each in outs if each.verdict.level is Level.FAIL and each.target is not None]
    if not odd or comparison.match.call.id.phase is not Phase.FORWARD or not any(_differs(each) for each in ins):
        return False
    steps = by_far and Trait.STEPS in traits(comparison.match.call.id.name)
    return steps or all(_is_whole(each) for each in odd)


def is_near(into: float, rounding: float) -> bool:
    return into <= _NEAR * rounding


def coarsest_of(values: Iterable[Comparison], so_far: float) -> float:
    return max([so_far, *(each.rounding for each in values)])


def _differs(each: Comparison) -> bool:
    return bool(each.error) and bool(each.rounding)


def _is_whole(each: Comparison) -> bool:
    value = each.target
    assert value is not None
    if value.dtype is None:
        return value.type in ("int", "bool")
    return value.dtype.startswith(_WHOLE)
