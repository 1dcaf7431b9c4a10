"""A bug report about one call: a script that runs it with torch alone, and a page that says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ulpscope.model.errors import DumpError
from ulpscope.model.names import GENERATOR, call_text
from ulpscope.model.records import CallRecord, Manifest, Role, Value
from ulpscope.report.replay import replay_lines
from ulpscope.report.repro_script import CALL, HEAD, REST
from ulpscope.store.ledger_file import Row

_SPACES = {"Functional": "torch.nn.functional", "Torch": "torch", "Tensor": "torch.Tensor", "VF": "torch._VF"}
_OPERATORS = {"Aten": "aten", "NPU": "npu"}
_PARTS = ("torch.layout", "torch.memory_format")
_SUBMODULES = ("linalg", "special", "fft")


def script(call: CallRecord, outputs: Sequence[int]) -> str:
    """The text of repro.py; `outputs` are the places in what the call returns that are compared."""
    inputs = [value for value in call.values if value.slot.role is Role.INPUT]
    tensors = [value for value in inputs if value.is_tensor]
    strides = {slot_name(value): value.stride for value in tensors if value.stride and _is_dense(value)}
    first = [slot_name(value) for value in tensors if value.slot.path[0] == tensors[0].slot.path[0]]
    title = f"{call_text(call.id)}, as it was recorded."
    return (
        HEAD.format(title=title)
        + CALL.format(expression=_expression(call, inputs), outputs=list(outputs))
        + f"STRIDES = {strides!r}\nFIRST = {first!r}  # what the call writes, where it returns nothing\n"
        + REST
    )


def slot_name(value: Value) -> str:
    """The name of an input in the file of tensors."""
    return ".".join(["input", *map(str, value.slot.path)])


def _is_dense(value: Value) -> bool:
    """Whether the strides are those of a permuted tensor without gaps: only then they are worth repeating."""
    room = 1
    pairs = zip(value.stride or (), value.shape or (), strict=False)
    for step, length in sorted(pair for pair in pairs if pair[1] > 1):
        if step != room:
            return False
        room *= length
    return True


def _expression(call: CallRecord, inputs: Sequence[Value]) -> str:
    tree: dict[Any, Any] = {}
    for value in inputs:
        place = tree
        *above, last = value.slot.path
        for step in above:
            place = place.setdefault(step, {})
        place[last] = _literal(value)
    args = [_nested(tree[key]) for key in sorted(key for key in tree if isinstance(key, int))]
    for key in (key for key in tree if isinstance(key, str)):
        if not key.isidentifier():
            raise DumpError(f"{call_text(call.id)} has an argument {key!r}, which is no name; the dump is damaged")
        args.append(f"{key}={_nested(tree[key])}")
    if call.id.name in ("__getitem__", "__setitem__") and args[1].startswith("["):
        args[1] = f"({args[1][1:-1]},)"
    return f"{_function(call)}({', '.join(args)})"


def _function(call: CallRecord) -> str:
    kind, name = call.id.kind, call.id.name
    if kind not in _SPACES:
        return f"torch.ops.{_OPERATORS.get(kind, kind)}.{name}"
    for each in _SUBMODULES:
        if kind == "Torch" and name.startswith(f"{each}_"):
            return f"torch.{each}.{name.removeprefix(f'{each}_')}"
    return f"{_SPACES[kind]}.{name}"


def _nested(item: Any) -> str:
    if isinstance(item, dict):
        return "[" + ", ".join(_nested(item[place]) for place in sorted(item)) + "]"
    return str(item)


def _literal(value: Value) -> str:
    if value.is_tensor:
        return f"t[{slot_name(value)!r}]"
    if value.type == "torch.dtype":
        return f"real({value.scalar})"
    if value.type in _PARTS:
        return str(value.scalar)
    if value.type == "torch.device":
        return "torch.device(device)"
    if value.type == "float":
        number = float(value.scalar)
        return repr(number) if number - number == 0 else f'float("{number}")'
    if value.type == "slice":
        return f"slice({', '.join(map(repr, value.scalar))})"
    if value.type == GENERATOR:
        return "None"
    return "..." if value.type == "ellipsis" else repr(value.scalar)


def page(call: CallRecord, manifest: Manifest, rows: Mapping[str, Row], *, same: bool) -> str:
    """README.md: what is wrong, how to see it, versions and shapes."""
    name = call_text(call.id)
    recorded = next(iter(rows.values()))
    environment = manifest.environment
    lines = [f"# {recorded.op}: {name}", "", "```", *replay_lines(name, rows, same=same), "```", ""]
    lines += ["The error is that of the call alone: it was run again in float64 on the inputs it was given.", ""]
    lines += ["## To see it", "", "    python repro.py", "", "It needs torch and nothing else.", ""]
    lines += ["## Arguments", "", "| slot | dtype | shape | stride | device |", "|---|---|---|---|---|"]
    for value in call.values:
        slot = ".".join([value.slot.role.value, *map(str, value.slot.path)])
        if value.is_tensor:
            lines.append(f"| {slot} | {value.dtype} | {value.shape} | {value.stride} | {value.device} |")
        else:
            lines.append(f"| {slot} | {value.type} | `{value.scalar!r}` | | |")
    lines += ["", "## The recorded run", ""]
    for word in ("versions", "devices", "host", "flags", "variables"):
        if environment.get(word):
            lines.append(f"- {word}: `{environment[word]}`")
    return "\n".join(lines) + "\n"
