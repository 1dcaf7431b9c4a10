"""Small changes of a call's arguments after which its result should be nearly the same: a table of functions.

Each takes copies of the arguments and returns arguments for a second run, or None where there is nothing to change. Random
numbers come from a generator of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_HALVES = (torch.float16, torch.bfloat16)
_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def improve_precision(arguments: Arguments) -> Arguments | None:
    """float16 and bfloat16 as float32; where there is none, float32 as float64."""
    kinds = {leaf.dtype for leaf in internals.tree_leaves(arguments) if isinstance(leaf, Tensor)}
    if kinds & set(_HALVES):
        return _cast(arguments, dict.fromkeys(_HALVES, torch.float32))
    return _cast(arguments, {torch.float32: torch.float64}) if torch.float32 in kinds else None


def add_noise(arguments: Arguments) -> Arguments | None:
    """Every element of the first tensor moved by one unit in the last place, up or down by chance."""

    def move(value: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, value.shape, generator=generator).mul_(2).sub_(1).to(value.device, value.dtype)
        return _inside(value, value * (1 + torch.finfo(value.dtype).eps * signs))

    return _first(arguments, move)


def bit_noise(arguments: Arguments) -> Arguments | None:
    """The last bit of every normal number of the first tensor turned over."""

    def turn(value: Tensor) -> Tensor:
        bits = value.contiguous().view(_INTEGERS[value.dtype])
        turned = (bits ^ torch.ones((), dtype=bits.dtype, device=bits.device)).view(value.dtype)
        return _inside(value, torch.where(value.abs() > torch.finfo(value.dtype).smallest_normal, turned, value))

    return _first(arguments, turn)


def _inside(value: Tensor, moved: Tensor) -> Tensor:
    """Moves to the other side what has left the range of the tensor: beyond 1 a probability ends the program on CUDA. Elements that
    are all the same move toward zero."""
    finite = torch.isfinite(value)
    known = value[finite]
    if not known.numel():
        return value
    low, high = torch.aminmax(known)
    mirrored = value - (moved - value)
    left = (moved < low) | (moved > high) if bool(low < high) else moved.abs() > mirrored.abs()
    return torch.where(finite, torch.where(left, mirrored, moved), value)


def change_value(arguments: Arguments) -> Arguments | None:
    """The first and the last element of the first tensor exchanged."""

    def exchange(value: Tensor) -> Tensor:
        flat = value.reshape(-1).clone()
        if flat.numel() > 1:
            flat[0], flat[-1] = flat[-1].clone(), flat[0].clone()
        return flat.reshape(value.shape)

    return _first(arguments, exchange)


def no_change(arguments: Arguments) -> Arguments | None:
    """The same again."""
    return arguments


def to_cpu(arguments: Arguments) -> Arguments | None:
    """The same on the CPU, halves as float32: it has no kernels of its own for all of them."""

    moved: Arguments = internals.tree_map(_on_cpu, arguments)
    return _cast(moved, dict.fromkeys(_HALVES, torch.float32))


PERTURBATIONS: dict[str, Callable[[Arguments], Arguments | None]] = {
    "improve_precision": improve_precision,
    "add_noise": add_noise,
    "no_change": no_change,
    "bit_noise": bit_noise,
    "change_value": change_value,
    "to_cpu": to_cpu,
}
# These compute the same values in a wider dtype, so autocast must not narrow them again.
WIDENING = frozenset({"improve_precision", "to_cpu"})


def widest(arguments: Arguments) -> Arguments:
    """Everything in float64 on the CPU: a device that computes wrongly may do so in any dtype."""
    wide = {kind: torch.float64 for kind in (*_HALVES, torch.float32)}
    on_cpu: Arguments = internals.tree_map(_on_cpu, arguments)
    return _cast(on_cpu, {**wide, torch.complex64: torch.complex128})


def float_tensors(value: Any) -> list[Tensor]:
    """The floating point tensors of nested arguments."""
    return [leaf for leaf in internals.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to("cpu")
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _cast(arguments: Arguments, kinds: dict[torch.dtype, torch.dtype]) -> Arguments:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(kinds.get(leaf.dtype, leaf.dtype))
        return kinds.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    done: Arguments = internals.tree_map(cast, arguments)
    return done


def _first(arguments: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments | None:
    """Changes the first floating point tensor that has elements, wherever it is given."""
    floats = [leaf for leaf in float_tensors(arguments) if leaf.numel() and leaf.dtype in _INTEGERS]
    if not floats:
        return None
    chosen = floats[0]
    changed: Arguments = internals.tree_map(lambda leaf: change(leaf) if leaf is chosen else leaf, arguments)
    return changed
