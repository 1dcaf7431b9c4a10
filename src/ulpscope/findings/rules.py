"""What a call has to do with the difference, as a list: the first rule that applies says it, the last always does.

A rule is given one view and nothing else. An argument matters through its result: another device, `None` for a mask or another
spelling of a shape is no finding where what the call gives agrees.
"""

from __future__ import annotations

from collections.abc import Callable

from ulpscope.compare.comparison import Code
from ulpscope.findings.model import Status
from ulpscope.findings.view import CallView, argument_text, is_number, is_tensor, slot_of, unmeasured
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import Phase

Said = tuple[Status, str]
# Above this error two values have nothing in common, and how much more a call makes of it says nothing.
LOST = 0.25


def alone(view: CallView) -> Said | None:
    """One run has no such call."""
    return (Status.UNMATCHED, view.comparison.match.why) if view.is_alone else None


def argument(view: CallView) -> Said | None:
    """Another eps: the programs asked for different things, and it shows in the result."""
    changed = view.changed
    if changed is None or view.passes_on or not ((view.differs and is_number(changed)) or view.is_far or not view.outs):
        return None
    if not view.outs and not (is_number(changed) and view.ins):
        return None
    return Status.SOURCE, argument_text(changed)


def agrees(view: CallView) -> Said | None:
    """What came out is the same, or nothing is known of it."""
    if view.differs:
        return None
    unknown = unmeasured(view.outs)
    if unknown is not None:
        return Status.UNKNOWN, unknown.verdict.text
    seen = all(Code.IDENTICAL in each.verdict.codes for each in view.outs)
    return Status.IDENTICAL if seen else Status.ROUNDING, ""


def passed_on(view: CallView) -> Said | None:
    """Gradients of parameters are sums of what recorded calls gave; the inside of a communication call hands values on."""
    return (Status.INHERITED, "") if view.passes_on else None


def from_outside(view: CallView) -> Said | None:
    """A weight, a batch, a mask that differs although no recorded call wrote it."""
    each = view.outside
    return None if each is None else (Status.SOURCE, f"{slot_of(each)} differs, and no recorded call wrote it")


def without_gradients(view: CallView) -> Said | None:
    """The gradients that it got were not recorded: nobody knows that they agree."""
    without = view.call.phase is Phase.BACKWARD and not any(map(is_tensor, view.ins))
    return (Status.INHERITED, "") if without else None


def within_limit(view: CallView) -> Said | None:
    """No more error came out than went in, than rounding makes, and than cancellation leaves."""
    if view.out is None or view.out > view.limit:
        return None
    return Status.INHERITED if view.dirty else Status.ROUNDING, ""


def explained(view: CallView) -> Said | None:
    """What it read is not known, or differs in a way that it enlarges or that says nothing any more."""
    if view.out is None:
        given = view.dirty or view.unsure
    else:
        enlarged = view.into is None or view.into > LOST or Trait.UNEVEN in traits(view.call.name)
        given = view.unsure or (view.dirty and enlarged)
    return (Status.INHERITED, "") if given else None


def not_recorded(view: CallView) -> Said | None:
    """An argument that nobody saw may explain everything: no call is blamed."""
    if not view.lacking:
        return None
    return (
        Status.UNSURE,
        f"{view.lacking} was not recorded on both sides, so nobody knows whether the call was asked for the same",
    )


def introduced(view: CallView) -> Said | None:
    """More error came out than went in, than rounding makes, and than this call enlarges."""
    return (
        Status.INTRODUCED,
        "the output differs more than the inputs explain" if view.dirty else "clean inputs, other output",
    )


RULES: tuple[Callable[[CallView], Said | None], ...] = (
    alone,
    argument,
    agrees,
    passed_on,
    from_outside,
    without_gradients,
    within_limit,
    explained,
    not_recorded,
    introduced,
)


def said_of(view: CallView) -> Said:
    """What the first rule that applies says."""
    return next(said for rule in RULES if (said := rule(view)) is not None)
