"""A recorded call run again: its function found by name, its arguments put together from the dump.

Only functions of torch are found, by the names that a dump gives them; nothing in a dump is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional
from torch import Tensor

from ulpscope.records import CallRecord, Phase, Role, Value

Bits = Callable[[Value], Any]
_PARTS = ("torch.dtype", "torch.layout", "torch.memory_format")
_SPACES: dict[str, Any] = {"Functional": torch.nn.functional, "Torch": torch, "Tensor": Tensor, "VF": torch._VF}
_OPERATORS = {"Aten": "aten", "NPU": "npu"}
_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


class Unrepeatable(ValueError):
    """The call cannot be run again; the message says why."""


def function_of(kind: str, name: str) -> Callable[..., Any] | None:
    """The function that a dump calls so; None where there is none, as for modules."""
    space = _SPACES.get(kind)
    if space is None:
        operators = getattr(torch.ops, _OPERATORS.get(kind, kind), None)
        packet, _, overload = name.rpartition(".")
        space, name = (getattr(operators, packet, None), overload) if packet else (operators, name)
    walk: Any = space
    for step in name.split("."):
        walk = getattr(walk, step, None)
    return walk if callable(walk) and not isinstance(walk, type) else None


def arguments(call: CallRecord, bits: Bits) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the call was given. Raises Unrepeatable where the dump does not hold it."""
    tree: dict[Any, Any] = {}
    for value in call.values:
        if value.slot.role is not Role.INPUT:
            continue
        place = tree
        *above, last = value.slot.path
        for step in above:
            place = place.setdefault(step, {})
        place[last] = _argument(value, bits)
    args = tuple(_listed(tree[place]) for place in sorted(key for key in tree if isinstance(key, int)))
    return args, {key: _listed(item) for key, item in tree.items() if isinstance(key, str)}


def run_wide(call: CallRecord, bits: Bits) -> list[Any]:
    """The results of the call in float64 on the values it was given. Raises Unrepeatable."""
    function = function_of(call.id.kind, call.id.name)
    if call.id.phase is not Phase.FORWARD:
        raise Unrepeatable("a backward call is not run again: a dump of it has not what the forward call was given")
    if function is None:
        raise Unrepeatable(f"{call.id.kind} calls are not run again; look at level op")
    args, kwargs = _wide(arguments(call, bits))
    kwargs.pop("out", None)
    try:
        with torch.no_grad():
            result = function(*args, **kwargs)
    except Exception as error:  # the border: torch raises what it likes for arguments it does not take in float64
        raise Unrepeatable(f"{type(error).__name__}: {error}"[:200]) from None
    result = args[0] if result is None and args else result
    return list(result) if isinstance(result, list | tuple) else [result]


def overflows_wide(call: CallRecord, bits: Bits) -> bool:
    """Whether the results, computed in float64 and then put into the dtype they had, are not finite either."""
    kinds = [
        getattr(torch, (value.dtype or "").removeprefix("torch."), None)
        for value in call.values
        if value.slot.role is Role.OUTPUT
    ]
    for found, dtype in zip(run_wide(call, bits), kinds, strict=False):
        floats = isinstance(found, Tensor) and isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if floats and not bool(found.to(dtype).isfinite().all()):
            return True
    return False


def _wide(item: Any) -> Any:
    if isinstance(item, Tensor):
        if item.is_floating_point():
            return item.to(torch.float64)
        return item.to(_WIDE.get(item.dtype, item.dtype))
    if isinstance(item, torch.dtype):
        return torch.float64 if item.is_floating_point else item
    if isinstance(item, dict):
        return {key: _wide(part) for key, part in item.items()}
    return type(item)(map(_wide, item)) if isinstance(item, list | tuple) else item


def _listed(item: Any) -> Any:
    return [_listed(item[place]) for place in sorted(item)] if isinstance(item, dict) else item


def _argument(value: Value, bits: Bits) -> Any:
    if value.is_tensor:
        if value.payload is None:
            raise Unrepeatable(f"the dump does not hold its inputs: {value.error or 'statistics only'}")
        return _tensor(value, bits)
    if value.type in _PARTS:
        return getattr(torch, str(value.scalar).removeprefix("torch."))
    if value.type == "torch.device":
        return torch.device("cpu")
    if value.type == "float" and isinstance(value.scalar, str):
        return float(value.scalar)
    if value.type == "slice":
        return slice(*value.scalar)
    if value.type == "ellipsis":
        return ...
    return value.scalar


def _tensor(value: Value, bits: Bits) -> Tensor:
    dtype = getattr(torch, (value.dtype or "").removeprefix("torch."))
    raw = np.ascontiguousarray(bits(value))
    if not raw.size:
        return torch.empty(value.shape or (), dtype=dtype)
    return torch.from_numpy(raw.reshape(-1).view(np.uint8).copy()).view(dtype).reshape(value.shape or ())
