"""Text forms of calls and slots, as the seeds spell them, and back.

    Functional.conv2d.1.forward      kind.name.index.phase         (APIs, kernels)
    Module.layer1.0.Conv2d.forward.0 kind.name.phase.index         (modules)
    Optimizer.SGD.step.0             kind.name.phase.index         (optimizer steps)
    x.0.debug                        name.index.debug              (single saved values)
    input.0, input.mask, output.0.1, parameters.weight             (slots)
    Functional.conv2d.1.forward.input.0                            (values: call and slot)
    Module.fc.Linear.parameters_grad.0.weight, x.0.debug           (values of calls that have but one role: without it)

A repeated backward of the same call carries `~1`, `~2` behind its name.
"""

from __future__ import annotations

from ulpscope.model import operators
from ulpscope.model.records import CallId, Phase, Role, Slot

MODULE = "Module"
# The type of a generator of random numbers; its state is told as a text.
GENERATOR = "torch._C.Generator"
OPTIMIZER = "Optimizer"
SAVED = "Saved"
# Of calls of functions and kernels.
KINDS = operators.KINDS
INIT = "Init"  # of torch.nn.init, whose functions fill a tensor
_INDEX_LAST = frozenset({MODULE, OPTIMIZER})
_ROLES = frozenset({role.value for role in Role} | {"kwargs"})
_ROLELESS = frozenset({Phase.PARAMETERS_GRAD.value, Phase.DEBUG.value})
_PHASES = {phase.value: phase for phase in Phase}
_DEBUG = Phase.DEBUG.value


def call_text(call: CallId) -> str:
    """The full name of a call."""
    again = f"~{call.again}" if call.again else ""
    if call.kind in _INDEX_LAST:
        return f"{call.kind}.{call.name}.{call.phase.value}.{call.index}{again}"
    if call.kind == SAVED:
        return f"{call.name}.{call.index}.{call.phase.value}{again}"
    return f"{call.kind}.{call.name}.{call.index}.{call.phase.value}{again}"


def parse_call(text: str) -> CallId:
    """The call a full name stands for. Raises ValueError when the text is not a full name."""
    body, tilde, repeat = text.partition("~")
    parts = body.split(".")
    again = int(repeat) if tilde else 0
    if len(parts) == 4 and parts[3] in _PHASES and parts[2].isdigit() and parts[0] not in _INDEX_LAST:
        # Most calls are of this form.
        kind, name, index, phase = parts
        if phase != _DEBUG:
            return CallId(kind, name, int(index), _PHASES[phase], again)
    if len(parts) >= 4 and parts[0] in _INDEX_LAST and parts[-1].isdigit() and parts[-2] in _PHASES:
        return CallId(parts[0], ".".join(parts[1:-2]), int(parts[-1]), _PHASES[parts[-2]], again)
    if len(parts) >= 3 and parts[-1] == _DEBUG and parts[-2].isdigit():
        return CallId(SAVED, ".".join(parts[:-2]), int(parts[-2]), Phase.DEBUG, again)
    if len(parts) >= 4 and parts[-1] in _PHASES and parts[-2].isdigit():
        return CallId(parts[0], ".".join(parts[1:-2]), int(parts[-2]), _PHASES[parts[-1]], again)
    raise ValueError(f"{text!r} is not the name of a call; a name looks like Functional.conv2d.0.forward")


def is_asked(asked: str, call: CallId) -> bool:
    """Whether a full name stands for a call: with its phase for this phase alone, without for both."""
    text = call_text(call)
    return asked == text or (call.kind not in _INDEX_LAST and text in (f"{asked}.forward", f"{asked}.backward"))


def is_within(module: str, path: str) -> bool:
    """Whether the path of a module is another, or below it."""
    return module == path or module.startswith(f"{path}.")


def slot_text(slot: Slot) -> str:
    """`input.0`, `output.0.1`, `parameters.weight`."""
    return ".".join([slot.role.value, *(str(step) for step in slot.path)])


def value_text(call: CallId, slot: Slot) -> str:
    """The full name of a value."""
    if call.phase is Phase.PARAMETERS_GRAD:
        return ".".join([call_text(call), *map(str, slot.path)])
    if call.phase is Phase.DEBUG:
        # A single saved tensor is output 0 and has the name it was saved under.
        return ".".join([call_text(call), *map(str, slot.path)]) if slot.path != (0,) else call_text(call)
    return f"{call_text(call)}.{slot_text(slot)}"


def call_of_value(text: str) -> CallId:
    """The call in the full name of a value. Raises ValueError when there is none."""
    parts = text.split(".")
    for end in range(len(parts), 0, -1):
        if end == len(parts) or parts[end] in _ROLES or parts[end - 1] in _ROLELESS or parts[end - 2] in _ROLELESS:
            try:
                return parse_call(".".join(parts[:end]))
            except ValueError:
                continue
    raise ValueError(f"{text!r} is not the name of a value; a name looks like Functional.conv2d.0.forward.input.0")


def slot_from(role: str, path: list[str | int]) -> Slot:
    """A slot from its stored parts."""
    return Slot(Role(role), tuple(path))
