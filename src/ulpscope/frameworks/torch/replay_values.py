"""Arguments of a kernel: tensors, plain values, and lists of them, never deeper. Quick, since it runs for every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def items(args: list[Any] | tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> list[Any]:
    """All arguments, lists taken apart."""
    found: list[Any] = []
    for value in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            found += value
        else:
            found.append(value)
    return found


def tensors(args: list[Any] | tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> list[Tensor]:
    return [item for item in items(args, kwargs) if isinstance(item, Tensor)]


def results(result: Any) -> list[Any]:
    """What a kernel returned, as a flat list."""
    return items(result) if isinstance(result, list | tuple) else [result]


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same value with every item changed."""
    if isinstance(value, list | tuple):
        return type(value)([change(item) for item in value])
    return change(value)


def mapped_args(change: Callable[[Any], Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([mapped(change, value) for value in args])


def mapped_kwargs(change: Callable[[Any], Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: mapped(change, value) for key, value in kwargs.items()} if kwargs else kwargs


def memory_of(value: Tensor) -> int:
    """What tells whether two tensors may share elements: their storage; the tensor itself where it has none."""
    return int(value.untyped_storage()._cdata) if value.layout is torch.strided else id(value)
