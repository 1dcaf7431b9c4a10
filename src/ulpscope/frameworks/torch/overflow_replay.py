"""A recorded call run again in float64: would its results fit into their dtype?

Functions are found by `api_arguments`, which reaches torch operators alone; nothing else that a dump names is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ulpscope.errors import DumpError
from ulpscope.frameworks.torch.api_arguments import Bits, UnrunnableError, function_of
from ulpscope.frameworks.torch.replay_recorded import recorded_arguments
from ulpscope.records import CallRecord, Phase, Role

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def run_wide(call: CallRecord, bits: Bits) -> list[Any]:
    """The results of the call in float64 on the values it was given. Raises UnrunnableError."""
    if call.id.phase is not Phase.FORWARD:
        raise UnrunnableError("a backward call is not run again: a dump of it has not what the forward call was given")
    function = function_of(call.id.kind, call.id.name)
    try:
        given = recorded_arguments((value for value in call.values if value.slot.role is Role.INPUT), bits)
    except DumpError as error:
        raise UnrunnableError(f"the dump does not hold its inputs: {error}") from None
    args, kwargs = _wide(given)
    kwargs.pop("out", None)
    try:
        with torch.no_grad():
            result = function(*args, **kwargs)
    except Exception as error:  # the border: torch raises what it likes for arguments it does not take in float64
        raise UnrunnableError(f"{type(error).__name__}: {error}"[:200]) from None
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
    if isinstance(item, torch.device):
        return torch.device("cpu")
    if isinstance(item, torch.dtype):
        return torch.float64 if item.is_floating_point else item
    if isinstance(item, dict):
        return {key: _wide(part) for key, part in item.items()}
    return type(item)(map(_wide, item)) if isinstance(item, list | tuple) else item
