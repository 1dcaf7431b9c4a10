"""A call run again in float64: would its results fit into their dtype, or are they infinite because the function has a pole there?

Functions are found by `api_arguments`, which reaches torch operators alone; nothing else that a dump names is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.api_arguments import Bits, UnrunnableError, function_of
from ulpscope.frameworks.torch.replay_recorded import recorded_arguments
from ulpscope.model.errors import DumpError
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import CallRecord, Phase, Role

Function = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# How far beside a point is looked.
_FROM_ZERO, _RELATIVE = 1e-3, 1e-6
_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def recorded_call(call: CallRecord, bits: Bits) -> tuple[Function, Arguments]:
    """The function of a forward call and what it was given. Raises UnrunnableError."""
    if call.id.phase is not Phase.FORWARD:
        raise UnrunnableError("a backward call is not run again: a dump of it has not what the forward call was given")
    function = function_of(call.id.kind, call.id.name)
    try:
        return function, recorded_arguments((each for each in call.values if each.slot.role is Role.INPUT), bits)
    except DumpError as error:
        raise UnrunnableError(f"the dump does not hold its inputs: {error}") from None


def _run(function: Function, given: Arguments, change: Callable[[Any], Any]) -> list[Any]:
    """The results on changed arguments. Raises UnrunnableError."""
    try:
        args, kwargs = change(given)
        if not isinstance(function, internals.Overload):
            kwargs.pop("out", None)
        with torch.no_grad():
            result = function(*args, **kwargs)
    except Exception as error:  # the border: torch raises what it likes for arguments it does not take in float64
        raise UnrunnableError(f"{type(error).__name__}: {error}"[:200]) from None
    result = args[0] if result is None and args else result
    return list(result) if isinstance(result, list | tuple) else [result]


def result_dtypes(call: CallRecord) -> list[Any]:
    """The dtypes of what a call returned, in order; None where one has none."""
    return [
        getattr(torch, (each.dtype or "").removeprefix("torch."), None)
        for each in call.values
        if each.slot.role is Role.OUTPUT
    ]


def overflows_wide(function: Function, given: Arguments, dtypes: Sequence[Any]) -> bool:
    """Whether the results, computed in float64 and then put into the dtypes they had, are not finite either."""
    wide = _run(function, given, _wide)
    return any(not bool(found.to(dtype).isfinite().all()) for found, dtype in _floats(wide, dtypes))


def has_pole(function: Function, given: Arguments, dtypes: Sequence[Any]) -> bool:
    """Whether all that is infinite is so because the function is, in that point: in float64 too, and not right beside it.

    What is merely too large is so in its neighbourhood as well."""
    wide = _run(function, given, _wide)
    infinite = [(found.isinf(), found.to(dtype).isinf()) for found, dtype in _floats(wide, dtypes)]
    if not any(bool(inf.any()) for inf, _ in infinite):
        return False
    for whole_too in (False, True):  # 0 may be a divisor, or a dimension
        sides = [_run(function, given, _Moved(way, whole_too)) for way in (1, -1)]
        beside = [[found.isfinite() for found, _ in _floats(side, dtypes)] for side in sides]
        if all(
            not bool((beyond & ~(inf & (up | down))).any())
            for (inf, beyond), up, down in zip(infinite, *beside, strict=True)
        ):
            return True
    return False


def slope_has_pole(name: str, gradients: Iterable[Any]) -> bool:
    """Whether an infinite gradient of a call is one of a slope that is infinite in a point: where those that came in are too small to
    be made infinite by the steepest slope beside it."""
    if Trait.STEEP not in traits(name):
        return False
    for gradient in gradients:
        if isinstance(gradient, Tensor) and gradient.is_floating_point() and gradient.numel():
            about = torch.finfo(gradient.dtype)
            steepest = 0.5 / (about.smallest_normal * about.eps) ** 0.5
            if float(gradient.detach().abs().max()) * steepest > about.max:
                return False
    return True


def _floats(found: Sequence[Any], dtypes: Sequence[Any]) -> list[tuple[Tensor, torch.dtype]]:
    return [
        (each, dtype)
        for each, dtype in zip(found, dtypes, strict=False)
        if isinstance(each, Tensor) and isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ]


class _Moved:
    """Changes arguments as `_wide` does, and moves each number a little, up or down."""

    def __init__(self, way: int, whole_too: bool) -> None:
        self._way = way
        self._whole_too = whole_too

    def __call__(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            item = _wide(item)
            if self._whole_too and not item.is_complex() and item.dtype is not torch.bool:
                item = item.double()
            return item + self._way * _step(item.abs()) if item.is_floating_point() else item
        if isinstance(item, dict):
            return {key: self(part) for key, part in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(map(self, item))
        if type(item) is float or (self._whole_too and type(item) is int and not item):
            return item + self._way * float(_step(torch.tensor(abs(float(item)), dtype=torch.float64)))
        return _wide(item)


def _step(size: Tensor) -> Tensor:
    return torch.where(size == 0, _FROM_ZERO, _RELATIVE * size)


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
