"""One call of the target beside its counterpart, as the rules see it: frozen, made once, of what was compared and what is known so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ulpscope.compare.comparison import CallComparison, Code, Comparison, Level
from ulpscope.compare.value_graph import is_overwritten
from ulpscope.findings.exchange import Side, is_group
from ulpscope.findings.rounding import coarsest, is_rounding, rounded
from ulpscope.model.names import OPTIMIZER, slot_text
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import UNWRITTEN, CallId, Phase, Role

# Numbers that an optimizer uses with its parameters, of which its call does not tell.
_OF_OPTIONS = 2.0**-24
# A number that was read back from a tensor has its error; one that was written in a program differs by more.
_READ_BACK = 2048.0
# So much more relative error than its inputs has a call at most whose arguments are others, and mean the same.
_CHANGED = 4.0


@dataclass(frozen=True, slots=True)
class CallView:
    """`into` and `out` are the largest errors of what was read and written, None where one that differs has none; `limit` is what
    rounding and the inputs' own error explain of `out`.

    `changed`: an argument that is another one. `outside`: a tensor that differs and that no recorded call wrote. `dirty`: something
    that was read differs; `explained`: by no more than rounding that was carried on. `unsure`: something that was read is not known.
    `lacking`: an argument that was not recorded on both sides, in words. `passes_on`: it computes nothing of its own."""

    comparison: CallComparison
    ins: tuple[Comparison, ...]
    outs: tuple[Comparison, ...]
    into: float | None
    out: float | None
    limit: float
    changed: Comparison | None = None
    outside: Comparison | None = None
    dirty: bool = False
    explained: bool = True
    unsure: bool = False
    lacking: str = ""
    passes_on: bool = False

    @property
    def call(self) -> CallId:
        return self.comparison.match.call.id

    @property
    def is_alone(self) -> bool:
        return self.comparison.match.reference is None or self.comparison.match.target is None

    @property
    def differs(self) -> bool:
        """What came out is not the same, by more than one rounding."""
        return any(each.verdict.level is Level.FAIL for each in self.outs)

    @property
    def is_far(self) -> bool:
        """What came out is another result, not one that rounding explains; of a call that was asked for something else, not one that
        the error of what it read explains by itself."""
        if not self.differs or self.out is None:
            return self.differs
        own = rounded(coarsest((*self.ins, *self.outs))) + _CHANGED * (self.into or 0.0)
        return self.out > (self.limit if self.changed is None or self.into is None else min(self.limit, own))


def parted(comparison: CallComparison) -> tuple[list[Comparison], list[Comparison]]:
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
        elif not any(unwritten) and not is_overwritten(call, each.slot):
            ins.append(each)
    return ins, [] if Trait.UNINITIALISED in traits(call.name) else outs


def most(values: Sequence[Comparison]) -> float | None:
    """The largest known error; None where one that differs has none."""
    found = 0.0
    for each in values:
        error = each.error
        if error is not None:
            found = max(found, error)
        elif each.verdict.level is Level.FAIL and is_tensor(each):
            return None
    return found


def is_tensor(each: Comparison) -> bool:
    left, right = each.reference, each.target
    return (left is not None and left.shape is not None) or (right is not None and right.shape is not None)


def side_of(values: Iterable[Comparison]) -> Side:
    """Whether some tensors agree with the reference's."""
    tensors = [each for each in values if is_tensor(each)]
    levels = {each.verdict.level for each in tensors}
    if any(each.verdict.level is Level.FAIL and not is_rounding(each) for each in tensors):
        return Side.DIFFERS
    return Side.UNKNOWN if levels & {Level.UNKNOWN, Level.UNMATCHED} else Side.AGREES


def changed_argument(call: CallId, ins: Sequence[Comparison]) -> Comparison | None:
    """The first argument that is another one in the target, by more than the rounding of what it is used with; numbers first."""
    rounding = max(_OF_OPTIONS if call.kind == OPTIMIZER else 0.0, coarsest(ins))
    found = [
        each
        for each in ins
        if (
            Code.TYPE in each.verdict.codes
            or _is_lacking(each)
            or (Code.ARGUMENT in each.verdict.codes and not _same_in(rounding, each))
        )
        and not is_group(each)
    ]
    found.sort(key=lambda each: not is_number(each))
    return found[0] if found else None


def _is_lacking(each: Comparison) -> bool:
    """Whether one side alone was given a tensor: a bias, a mask."""
    return each.verdict.level is Level.UNMATCHED and is_tensor(each) and each.slot.role is not Role.OUTPUT


def is_number(each: Comparison) -> bool:
    """Whether an argument is a float on both sides that a program has otherwise, not one that it read back from a tensor."""
    left, right = (value.scalar if value is not None else None for value in (each.reference, each.target))
    if not isinstance(left, float) or not isinstance(right, float):
        return False
    return not math.isclose(left, right, rel_tol=_READ_BACK * _OF_OPTIONS)


def unrecorded_argument(ins: Iterable[Comparison]) -> Comparison | None:
    """The first argument, no tensor, of which it is not known whether it is the same on both sides."""
    kinds = (Level.UNKNOWN, Level.UNMATCHED)
    return next((each for each in ins if each.verdict.level in kinds and not is_tensor(each)), None)


def _same_in(rounding: float, each: Comparison) -> bool:
    """Whether two numbers are one and the same in the coarsest dtype of the call, as the smallest number of a dtype is."""
    left, right = (value.scalar if value is not None else None for value in (each.reference, each.target))
    if not isinstance(left, float) or not isinstance(right, float):
        return False
    return abs(left - right) <= 2 * rounding * max(abs(left), abs(right))


def unmeasured(outs: Iterable[Comparison]) -> Comparison | None:
    """The first result that was not measured."""
    return next((each for each in outs if is_unknown(each)), None)


def is_unknown(each: Comparison) -> bool:
    """Whether a value was not measured. Of an object that is no tensor and holds none there is nothing to measure."""
    failed = any(value is not None and value.error is not None for value in (each.reference, each.target))
    return each.verdict.level is Level.UNKNOWN and (failed or is_tensor(each))


def argument_text(each: Comparison) -> str:
    """What an argument is on both sides, in words."""
    if each.reference is None or each.target is None:
        return f"{slot_of(each)} is given in the {'target' if each.reference is None else 'reference'} alone"
    return f"{slot_of(each)} is {each.verdict.text}"


def slot_of(each: Comparison) -> str:
    return slot_text(each.slot)
