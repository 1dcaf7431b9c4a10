"""The arguments of a recorded call, put together again: real elements where the dump has them, else made from its statistics.

A dump may come from anywhere, so a name in it reaches only functions that compute: nothing that loads, saves or compiles.
"""

from __future__ import annotations

import functools
import math
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.fused_references import FUSED, fused_on_cpu
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import PathStep, Value

Bits = Callable[[Value], Any]
Path = tuple[PathStep, ...]
_CONSTANTS = ("torch.dtype", "torch.layout", "torch.memory_format")
_PLAIN = frozenset({"bool", "int", "str", "NoneType"})
_REFUSED = Trait.ASKS | Trait.KEEPS_BOOKS | Trait.SHARES_MEMORY | Trait.REACHES_OUT
_TAKES_AN_INDEX = frozenset({"__getitem__", "__setitem__"})


class UnrunnableError(Exception):
    """A call that cannot be run again, and why."""


# --- names ------------------------------------------------------------------------------------------------------


def function_of(kind: str, name: str) -> Callable[..., Any]:
    """The torch function a recorded name stands for. Raises UnrunnableError for what torch lacks or must not be called."""
    if traits(name) & _REFUSED:
        raise UnrunnableError(
            f"{kind}.{name} is not run again: it computes nothing, or reaches outside of its arguments"
        )
    found = _FINDERS[kind](name) if kind in _FINDERS else None
    if found is None:
        raise UnrunnableError(f"this torch has no {kind}.{name}")
    return found


def _functional(name: str) -> Callable[..., Any] | None:
    found = getattr(torch.nn.functional, name, None)
    return found if found in _overridable() or type(found).__name__ == "builtin_function_or_method" else None


def _torch(name: str) -> Callable[..., Any] | None:
    if name in dir(internals.variable_functions):
        # torch.norm and some others are Python over the function of the same name.
        written: Callable[..., Any] = getattr(torch, name, None) or getattr(internals.variable_functions, name)
        return written
    for space, short in (
        (torch, name),
        (torch.linalg, name.removeprefix("linalg_")),
        (torch.special, name.removeprefix("special_")),
        (torch.fft, name.removeprefix("fft_")),
    ):
        found = getattr(space, short, None)
        if callable(found) and (found in _overridable() or type(found).__name__ == "builtin_function_or_method"):
            return found if found in _overridable() or space is not torch else None
    return None


def _tensor_method(name: str) -> Callable[..., Any] | None:
    found = getattr(Tensor, name, None)
    if type(found).__name__ in ("getset_descriptor", "property"):
        return functools.partial(_attribute, name)
    known = found in _overridable() or type(found).__name__ in ("method_descriptor", "wrapper_descriptor")
    return found if known else None


def _attribute(name: str, tensor: Tensor) -> Any:
    return getattr(tensor, name)


def _aten(name: str) -> Callable[..., Any] | None:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload, None) if found is not None and overload else found


def _npu(name: str) -> Callable[..., Any] | None:
    vendor, plain = sys.modules.get("torch_npu"), name.partition(".")[0]
    found: Callable[..., Any] | None = (
        getattr(vendor, plain, None) if plain.startswith("npu_") or plain in FUSED else None
    )
    return found or getattr(torch.ops.npu, plain, None) or (fused_on_cpu(plain) if plain in FUSED else None)


def reference_of(kind: str, name: str) -> Callable[..., Any]:
    """What says what a call should give: the definition of a fused operator, for any other the function itself."""
    return FUSED[plain] if kind == "NPU" and (plain := name.partition(".")[0]) in FUSED else function_of(kind, name)


def _vf(name: str) -> Callable[..., Any] | None:
    return getattr(internals.VF, name, None) if name in dir(internals.variable_functions) else None


_FINDERS: dict[str, Callable[[str], Callable[..., Any] | None]] = {
    "Functional": _functional,
    "Torch": _torch,
    "Tensor": _tensor_method,
    "VF": _vf,
    "Aten": _aten,
    "NPU": _npu,
}
KINDS = frozenset(_FINDERS)


def is_known(name: str) -> bool:
    """Whether torch has an operator of this name, wherever it is."""
    return (
        any(find(name) is not None for kind, find in _FINDERS.items() if kind != "NPU")
        or name.startswith("npu_")
        or name in FUSED
    )


@functools.cache
def _overridable() -> frozenset[Any]:
    return frozenset(torch.overrides.get_testing_overrides())


# --- values -----------------------------------------------------------------------------------------------------


class Data:
    """Makes the tensors of one call. Random ones depend on the call's name and the seed, on nothing else."""

    def __init__(self, name: str, bits: Bits, seed: int, *, real_only: bool = False) -> None:
        self._bits = bits
        self._real_only = real_only
        self._generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        self.real = True

    def tensor(self, value: Value) -> Tensor:
        """The tensor of a value, on CPU, in its own dtype. Raises UnrunnableError where the dump does not say enough."""
        odd = value.extra.keys() & {"layout", "stored_shape", "stored_dtype", "placements", "ragged"}
        if (
            value.error is not None
            or odd
            or value.type not in ("torch.Tensor", "torch.nn.parameter.Parameter", "Tensor")
        ):
            raise UnrunnableError(f"an argument is {value.error or f'a {value.type} of another layout'}")
        dtype = getattr(torch, (value.dtype or "").removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or value.shape is None or min(value.shape, default=0) < 0:
            raise UnrunnableError(f"an argument has dtype {value.dtype} and shape {value.shape}")
        if value.payload is not None:
            return self._stored(value, dtype)
        if "missing" in value.extra and "overwritten" not in value.extra:
            # What was recorded and is gone is not made up.
            raise UnrunnableError(f"{value.extra['missing']} is missing")
        if self._real_only:
            raise UnrunnableError("the dump does not hold the elements of an argument")
        self.real = False
        return self._made(value, dtype)

    def _stored(self, value: Value, dtype: torch.dtype) -> Tensor:
        raw = np.ascontiguousarray(self._bits(value))
        shape = value.shape or ()
        if not raw.size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(raw.reshape(-1).view(np.uint8).copy()).view(dtype).reshape(shape)

    def _made(self, value: Value, dtype: torch.dtype) -> Tensor:
        shape = value.shape or ()
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        stats = value.stats
        if stats is None or stats.max is None or stats.min is None:
            raise UnrunnableError("the dump has neither the elements of an argument nor their range")
        low, high = stats.min, stats.max
        if dtype is torch.bool:
            draws = torch.rand(count, generator=self._generator) < 0.5
            made = draws if bool(low) != bool(high) else torch.full((count,), bool(high))
        elif not dtype.is_floating_point and not dtype.is_complex:
            last = min(int(high), 2**63 - 2)
            first = min(int(low), last)
            made = torch.randint(first, last + 1, (count,), generator=self._generator)
        else:
            made = self._uniform(count, *_finite_range(low, high, stats.finite_min, stats.finite_max))
        if dtype is not torch.bool:
            made[0], made[-1] = low, high
        return made.to(dtype).reshape(shape)

    def _uniform(self, count: int, low: float, high: float) -> Tensor:
        # Halved, because the width of a range may be more than the largest number.
        width = high / 2 - low / 2
        return low + torch.rand(count, generator=self._generator, dtype=torch.float64) * width * 2


def _finite_range(low: float, high: float, finite_low: float, finite_high: float) -> tuple[float, float]:
    ends = [float(end) for end in (low, high) if math.isfinite(end)]
    first = float(finite_low) if math.isfinite(finite_low) else (ends[0] if ends else 0.0)
    last = float(finite_high) if math.isfinite(finite_high) else (ends[-1] if ends else 0.0)
    return first, last


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(values: Iterable[Value], data: Data, name: str) -> list[Arguments]:
    """The arguments of a call. An index may have been a list or a tuple, which a dump does not tell: then both, the likelier
    first. Raises UnrunnableError where one cannot be made."""
    tree: dict[Any, Any] = {}
    for value in values:
        place = tree
        *above, last = value.slot.path
        for step in above:
            place = place.setdefault(step, {})
        place[last] = data.tensor(value) if value.is_tensor else _constant(value)
    positions = sorted(key for key in tree if isinstance(key, int))
    if positions != list(range(len(positions))):
        raise UnrunnableError("an argument is missing in the dump")
    args = [_listed(tree[place]) for place in positions]
    kwargs = {key: _listed(item) for key, item in tree.items() if isinstance(key, str)}
    if name in _TAKES_AN_INDEX and len(args) > 1 and isinstance(args[1], list):
        return [((args[0], tuple(args[1]), *args[2:]), kwargs), (tuple(args), kwargs)]
    return [(tuple(args), kwargs)]


def _listed(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    if all(isinstance(step, int) for step in item):
        return [_listed(item[place]) for place in sorted(item)]
    return {key: _listed(each) for key, each in item.items()}


def _constant(value: Value) -> Any:
    kind, scalar = value.type, value.scalar
    if value.error is not None:
        raise UnrunnableError(f"an argument is {value.error}")
    if kind in _PLAIN:
        return scalar
    if kind == "float":
        return float(scalar)
    if kind in _CONSTANTS and isinstance(scalar, str):
        found = getattr(torch, scalar.removeprefix("torch."), None)
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
    if kind == "torch.device":
        return torch.device("meta")  # stands for the device that the call is run on
    if kind == "complex" and isinstance(scalar, list) and len(scalar) == 2:
        return complex(float(scalar[0]), float(scalar[1]))
    if kind == "slice" and isinstance(scalar, list) and all(type(part) in (int, type(None)) for part in scalar):
        return slice(*scalar)
    if kind == "ellipsis":
        return Ellipsis
    if kind in ("list", "tuple", "torch.Size", "torch.return_types"):
        return list(scalar or ())
    raise UnrunnableError(f"an argument is a {kind}, which a dump does not hold")
