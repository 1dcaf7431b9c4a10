"""What to do about a finding: in words for people, with the next command; and in the words of the older tools.

The older tools' advisor looks at the rows of their table, from the top, and takes the first that is not accurate.
`advise` looks at a finding, which is where a difference begins.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from ulpscope.compare.comparison import Code, Comparison, Evidence, Level
from ulpscope.findings.exchange import KIND, is_group
from ulpscope.findings.model import Finding, Status
from ulpscope.model.names import MODULE, call_text
from ulpscope.model.records import CallId, Phase, Role, Value


class Cause(enum.Enum):
    """What kind of thing a finding is."""

    NONE = "nothing differs"
    ALONE = "only one run has the call"
    LOST = "computed in another way"
    ARGUMENT = "an argument differs"
    PARAMETER = "a weight differs"
    OUTSIDE = "a value from outside differs"
    COMMUNICATION = "communication"
    NOT_FINITE = "nan or inf"
    MODULE = "inside of a module"
    FORWARD = "forward"
    BACKWARD = "backward"
    UNRECORDED = "an argument was not recorded"


@dataclass(frozen=True, slots=True)
class Advice:
    """What it is, what to think of it, and what to run next."""

    cause: Cause
    text: str
    commands: tuple[str, ...] = ()


_TEXTS = {
    Cause.NONE: "Nothing differs by more than rounding explains. If the runs still come apart, the difference begins "
    "in a step or a call that was not recorded.",
    Cause.ALONE: "{call} is in one run only, so the runs did not do the same. Look for another version, another option or "
    "a branch that depends on the data; nothing after it can be compared fairly.",
    Cause.LOST: "{call} reads what the reference has, and what it gives is nowhere in the reference, nor is anything computed from it. "
    "The two runs compute this part by different calls: compare them line by line, and what each was asked for.",
    Cause.ARGUMENT: "The two programs asked for different things: {why}. No kernel is to blame; make the argument the "
    "same and compare again.",
    Cause.PARAMETER: "The runs began with different weights: {why}. Load the same checkpoint, or use the same seed "
    "before the model is built, and compare again.",
    Cause.OUTSIDE: "The difference was there before {call}: {why}. Check that both runs read the same batch, in the same "
    "order, with the same masks and random numbers; if they do, a call that was not recorded made it.",
    Cause.COMMUNICATION: "Communication is where it begins: {why}. Check the group, the reduction and the library "
    "version, and whether another stream writes the buffer while it is sent.",
    Cause.NOT_FINITE: "{call} makes nan or inf where the reference has numbers, from inputs that agree. Look for a division "
    "by zero, a logarithm or root of a negative number, or a value beyond the range of its dtype.",
    Cause.FORWARD: "{call} got what the reference got and gave something else. The fault is in this call: its kernel, its "
    "precision settings, or an algorithm that is not deterministic.",
    Cause.MODULE: "{call} got what the reference got and gave something else, and no recorded call inside it explains that. Look at what "
    "was not recorded there: another level (mix) records the calls inside; its own code and settings do the rest.",
    Cause.BACKWARD: "The forward pass agrees; the backward of {call} got the same gradients and gave others. The fault is "
    "in the backward kernel, or it adds in an order that changes from run to run.",
    Cause.UNRECORDED: "The tensors that {call} got agree, what it gave does not; but {why}. See whether both programs gave it the same "
    "there, or record what is inside it.",
}


def advise(
    first: Finding | None, *, reference: str, target: str, several: bool = False, alone: tuple[str, str] | None = None
) -> Advice:
    """Advice on where a difference begins; `alone` is a run, or a dump, and its first call that the other lacks, for when nothing else is.

    `reference` and `target` are the runs as they are written in a command; `several`: they hold more than one dump.
    """
    if first is None:
        cause = Cause.ALONE if alone else Cause.NONE
        shown = (f"ulpscope show {' '.join(alone)}",) if alone else ()
        return Advice(cause, _TEXTS[cause].format(call=alone[1] if alone else ""), shown)
    cause = cause_of(first)
    name = call_text(first.call)
    place = f" --step {first.step} --rank {first.rank}" if several else ""
    commands = [f"ulpscope show {reference if first.comparison.match.target is None else target}{place} {name}"]
    other = first.comparison.match.reference
    if cause is Cause.ALONE:
        return Advice(cause, _TEXTS[cause].format(call=name), tuple(commands))
    if cause in (Cause.ARGUMENT, Cause.PARAMETER, Cause.OUTSIDE, Cause.LOST) and other is not None:
        commands.append(f"ulpscope show {reference}{place} {call_text(other.id)}")
    elif not any(each.evidence is Evidence.ELEMENTS for each in first.comparison.values):
        # Statistics say that a tensor differs, elements say where.
        inside = first.call.kind == MODULE  # by its path, with the calls inside it
        name_only = first.call.name.rpartition(".")[0] if inside else first.call.name
        only = (" --level mix" if inside else "") + (
            f" --only {name_only}" if name_only else ""
        )  # the root has no name
        commands.append(f"ulpscope capture -o NEW --tensors --steps {first.step}{only} -- COMMAND")
    return Advice(cause, _TEXTS[cause].format(call=name, why=first.text), tuple(commands))


def cause_of(finding: Finding) -> Cause:
    """What kind of thing a finding is."""
    values = finding.comparison.values
    ins = [each for each in values if each.slot.role is not Role.OUTPUT]
    outs = [each for each in values if each.slot.role is Role.OUTPUT]
    if finding.status is Status.UNMATCHED:
        return Cause.ALONE
    if finding.status is Status.LOST:
        return Cause.LOST
    if finding.status is Status.SOURCE:
        if any({Code.ARGUMENT, Code.TYPE} & set(each.verdict.codes) and not is_group(each) for each in ins):
            return Cause.ARGUMENT
        differing = [each for each in ins if each.verdict.level is Level.FAIL]
        if finding.call.kind == KIND and not differing:
            return Cause.COMMUNICATION
        return Cause.PARAMETER if differing and _is_parameter(finding.call, differing[0]) else Cause.OUTSIDE
    if finding.status is Status.UNSURE:
        return Cause.UNRECORDED
    if finding.call.kind == KIND:
        return Cause.COMMUNICATION
    if any(_turned_wild(each) for each in outs) and not any(_is_wild(each.target) for each in ins):
        return Cause.NOT_FINITE
    if finding.call.phase is Phase.BACKWARD:
        return Cause.BACKWARD
    return Cause.MODULE if finding.call.kind == MODULE else Cause.FORWARD


def _is_parameter(call: CallId, each: Comparison) -> bool:
    """A weight: listed as one, or an input that wants a gradient, which no recorded call wrote. Those of a module are listed."""
    wants_grad = each.target is not None and each.target.requires_grad is True
    return each.slot.role is Role.PARAMETERS or (wants_grad and call.kind != MODULE)


def _turned_wild(each: Comparison) -> bool:
    return _is_wild(each.target) and not _is_wild(each.reference)


def _is_wild(value: Value | None) -> bool:
    stats = value.stats if value is not None else None
    if stats is None:
        return False
    numbers = (stats.max, stats.min, stats.mean)
    return any(number is not None and not math.isfinite(number) for number in numbers)


# --- the older tools ----------------------------------------------------------------------------------------------

NOT_ACCURATE = frozenset({"No", "Warning", "Different"})
ACCURATE = frozenset({"Yes", "Pass", ""})
_NONE = "NA"
_ALL_WELL = "All data in comparison result meets the accuracy requirements."
_NOT_ALL = (
    "All data that could be judged meets the accuracy requirements. {unknown} of {rows} rows could not be judged and are not "
    "known to be accurate, see Err_message."
)
_NOTHING = (
    "Nothing was compared: no row has numbers of both sides. Check that both dumps are of the same program, that they "
    "are whole, and that their calls have the same names."
)
_FORWARD_INPUT = (
    "1. Analyze the model to view the input source.\n"
    "2. Check whether an inplace API causes the output result to overwrite the input result. That is, the fault is "
    "actually caused by a computation error.\n"
    "3. The fault may be caused by memory corruption and further analysis is required."
)
_FORWARD_OUTPUT = "This is a forward API computation error. Check the computation implementation."
_BACKWARD_INPUT = "Check whether the forward computation result is affected."
_BACKWARD_OUTPUT = "This is a backward API computation error. Check the computation implementation."
_BATCH_NORM = (
    "Torch API batch_norm input not fixed, the following suggestions may fix it:\n"
    "1. If use torch.nn.functional.batch_norm, you can set parameter training=False.\n"
    "2. If use torch.nn.BatchNormXXX, you can set parameter affine=False.\n"
    "3. Use seed_all(mode=True) to enable deterministic computing."
)
_NOT_DETERMINISTIC = (
    "This torch api may be uncertainty in the calculation, can seed_all(mode=True) to enable deterministic computing."
)
_NOT_DETERMINISTIC_APIS = ("conv2d", "conv3d", "matmul", "nll_loss", "layer_norm", "lstm")


@dataclass(frozen=True, slots=True)
class Suspect:
    """The three facts of an older tool's advisor file."""

    line: str
    node: str
    text: str

    @property
    def content(self) -> str:
        """The file."""
        return f"Line: {self.line}\nSuspect Nodes: {self.node}\nExpert Advice: {self.text}\n"


def first_suspect(rows: Iterable[tuple[str, str | None]]) -> Suspect:
    """The first row that is not accurate, of (name of the value, verdict of the table) from the top; None has nothing to judge.

    `line` is the line of the sheet as a user sees it, headed by the columns: the row + 2. ptdbg wrote the same; msprobe
    8.2.1 writes the row counted from 0, which is two too few. That all is well needs rows that were compared.
    """
    accurate = unknown = number = 0
    for number, (name, verdict) in enumerate(rows, 1):
        if verdict in NOT_ACCURATE:
            return Suspect(str(number + 1), name, _expert(name))
        accurate += verdict in ACCURATE
        unknown += verdict is not None and verdict not in ACCURATE
    text = _ALL_WELL if accurate and not unknown else _NOT_ALL if accurate else _NOTHING
    return Suspect(_NONE, _NONE, text.format(unknown=unknown, rows=number))


def _expert(name: str) -> str:
    parts = name.split(".")
    forward = Phase.FORWARD.value in parts
    output = Role.OUTPUT.value in parts or Phase.PARAMETERS_GRAD.value in parts
    if forward and not output and "batch_norm" in parts and parts[-2:] == [Role.INPUT.value, "1"]:
        return _BATCH_NORM
    if output and any(api in name for api in _NOT_DETERMINISTIC_APIS):
        return _NOT_DETERMINISTIC
    if forward:
        return _FORWARD_OUTPUT if output else _FORWARD_INPUT
    return _BACKWARD_OUTPUT if output else _BACKWARD_INPUT
