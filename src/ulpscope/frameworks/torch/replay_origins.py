"""What a call read that this run did not compute: weights, inputs, masks, and the plain arguments of a kernel.

A replay cannot see that these are wrong: the kernel did what it was told. They are compared with those of a reference run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_values import items, memory_of
from ulpscope.frameworks.torch.tensors import generator_state
from ulpscope.model.operators import Trait, traits

_SKETCHES = (0.6180339887498949, 0.4142135623730950, 0.7320508075688772, 0.2360679774997898)
_NOT_NUMBERS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy"})


_DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim"})
# Arguments by which a view says what it looks at are shapes; what they say is seen in what is computed next.
_SHAPES = frozenset({"size", "shape", "stride", "storage_offset", "repeats", "split_size", "split_sizes", "sizes"})


class Origins:
    """Knows which memory was written by a call it has seen."""

    def __init__(self) -> None:
        # Storage -> whether floating point values went into it: what follows from constants alone is the same in any run.
        self._made: dict[int, bool] = {}
        self._told: set[tuple[int, int, int, int]] = set()

    def made(self, values: list[Any], *, measured: bool) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = memory_of(value)
                self._made[storage] = measured or self._made.get(storage, False)

    def is_measured(self, values: list[Any]) -> bool:
        """Whether any of these comes from floating point values that are not constants of the program."""
        for value in values:
            if isinstance(value, Tensor):
                known = self._made.get(memory_of(value))
                if known or (known is None and (value.is_floating_point() or value.is_complex())):
                    return True
        return False

    def leaves(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        """What is read for the first time and was not computed here."""
        found = []
        written = {key for _, key in plan.written}
        for place, value in _tensors(plan, args, kwargs):
            if place.split(".")[0] in written or value.layout is not torch.strided or not value.numel():
                continue
            storage = memory_of(value)
            if storage in self._made:
                continue
            told = (
                storage,
                value._version if not value.is_inference() else 0,
                int(value.storage_offset()),
                value.numel(),
            )
            if told not in self._told:
                self._told.add(told)
                found.append({"place": place, **fingerprint(value)})
        return found


def fingerprint(value: Tensor) -> dict[str, Any]:
    """The bits as a checksum, and four weighted sums that tell a rounded copy from other values."""
    flat = value.detach().reshape(-1)
    plain = flat.cpu()
    dtype = str(value.dtype).removeprefix("torch.")
    whole = plain.contiguous()
    bits = whole.view(torch.uint8) if not whole.is_complex() else torch.view_as_real(whole).view(torch.uint8)
    answer: dict[str, Any] = {"dtype": dtype, "shape": tuple(value.shape), "crc": zlib.crc32(bits.numpy().data)}
    wide = (torch.view_as_real(whole) if whole.is_complex() else whole).double().flatten()
    norm = float(wide.norm())
    return answer | {"norm": norm if math.isfinite(norm) else -1.0, "sketch": sketch(wide)}


def sketch(wide: Tensor, parts: int = 1) -> tuple[float, ...]:
    """Weighted sums, linear in the values; `parts` of them for each weight, over equal stretches."""
    place = torch.arange(1, wide.numel() + 1, dtype=torch.float64, device=wide.device)
    known = wide.nan_to_num(0.0, 0.0, 0.0)
    sums = []
    for step in _SKETCHES:
        weighted = torch.frac(place * step).sub_(0.5).mul_(known)
        sums += [piece.sum() for piece in weighted.tensor_split(parts)]
    found: list[float] = torch.stack(sums).tolist()
    return tuple(found)


def scalars(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The plain arguments by name, in JSON form: without shapes and what is the default anyway, dimensions counted from 0."""
    found: dict[str, Any] = {}
    for name, value in (*zip(plan.schema, args, strict=False), *kwargs.items()):
        if isinstance(value, Tensor) or value is None or name in _SHAPES or name in _NOT_NUMBERS:
            continue
        plain = _plain(value)
        if plain is None or (name in plan.defaults and plain == _plain(plan.defaults[name])):
            continue
        found[name] = _from_zero(plan, plain, args) if name in _DIMENSIONS else plain
    return found


def _from_zero(plan: Plan, dims: Any, args: tuple[Any, ...]) -> Any:
    """The same dimensions without negative numbers."""
    first = next((item for item in items(args) if isinstance(item, Tensor)), None)
    rank = (0 if first is None else first.dim()) + (Trait.ADDS_DIMENSION in traits(plan.name))

    def shift(dim: Any) -> Any:
        return dim + rank if isinstance(dim, int) and -rank <= dim < 0 else dim

    return [shift(dim) for dim in dims] if isinstance(dims, list) else shift(dims)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.Generator):
        return generator_state(value)
    if isinstance(value, list | tuple) and value and all(isinstance(item, int | float) for item in value):
        return [_plain(item) for item in value]
    return None


def _tensors(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in (*zip(plan.schema, args, strict=False), *kwargs.items()):
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield f"{name}.{place}", item
