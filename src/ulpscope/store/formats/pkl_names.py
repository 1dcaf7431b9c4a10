"""How ptdbg_ascend and torch_npu.hooks spell calls and values; the way back is in pkl_lines.py.

    Functional_conv2d_0_forward_input.0      Tensor___add___3_backward_output.1      MyModule_0_forward_output

Neither tool records keyword arguments; here they are there under their names, `Torch_mul_0_forward_input.other`, because a
tensor that nobody recorded cannot be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ulpscope.model.names import MODULE, OPTIMIZER, SAVED
from ulpscope.model.records import CallId, CallRecord, PathStep, Phase, Role, Value
from ulpscope.store.dump import Dump

_PHASES = frozenset({Phase.FORWARD, Phase.BACKWARD})
_KINDS_WITHOUT_PLACE = frozenset({OPTIMIZER, SAVED})
_LONGEST_KEY = 60


def has_place(call: CallId) -> bool:
    """Whether these formats have a place for a call; optimizer steps, gradients of parameters and saved values have none."""
    return call.phase in _PHASES and call.kind not in _KINDS_WITHOUT_PLACE


def api_name(dump: Dump, call: CallId) -> str:
    """`Functional_conv2d`; the user's own name for a module of `module_dump`."""
    if is_named_by_user(dump, call):
        # A native dump adds the class behind the name.
        return (call.name.rpartition(".")[0] if dump.recorded_by == "native" else "") or call.name
    return f"{call.kind}_{call.name}"


def is_named_by_user(dump: Dump, call: CallId) -> bool:
    """Whether a call is a module of `module_dump`: the only modules in a dump of APIs."""
    return call.kind == MODULE and dump.manifest.level == "op"


def call_name(dump: Dump, call: CallId) -> str:
    """`Functional_conv2d_0_forward`."""
    return f"{api_name(dump, call)}_{call.index}_{call.phase.value}"


def named_values(call: CallRecord) -> Iterator[tuple[Value, Role, str]]:
    """The inputs and outputs of a call, each with the text for its place: `.0`, `.1.0`, `.other`.

    A forward call that returns one value alone has no place for it: `output`, not `output.0`.
    """
    outputs = [value.slot.path for value in call.values if value.slot.role is Role.OUTPUT]
    alone = call.id.phase is Phase.FORWARD and outputs == [(0,)]
    taken: set[tuple[Role, str]] = set()
    for value in call.values:
        role = value.slot.role
        if role is Role.PARAMETERS:
            continue
        text = "" if alone and role is Role.OUTPUT else "".join(map(_step, value.slot.path))
        while (role, text) in taken:
            text += "_"
        taken.add((role, text))
        yield value, role, text


def _step(step: PathStep) -> str:
    if not isinstance(step, str):
        return f".{step}"
    key = re.sub(r"\W", "_", step)[:_LONGEST_KEY]
    return f"._{key}" if not key or key[0].isdigit() else f".{key}"
