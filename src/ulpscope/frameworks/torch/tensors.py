"""Taking arguments apart into leaves, and describing leaves that are not tensors.

Nothing here calls a method of an object it does not know: a user's class is named, never asked.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import enum
import math
import types
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.model.records import PathStep

MAX_DEPTH = 32
# A longer list of plain numbers is one value: a thousand token ids are not a thousand rows.
MAX_SCALARS = 64
_MAX_TEXT = 2000
_SCALARS = (bool, int, float, str, complex, type(None))
_MISSING = object()
Path = tuple[PathStep, ...]


def leaves(value: Any) -> Iterator[tuple[Path, Any]]:
    """Every leaf of nested containers with its path: positions of sequences, keys of mappings, names of fields."""
    kind = type(value)
    if kind is Tensor or kind in _SCALARS:
        yield (), value
    else:
        yield from _walk(value, (), ())


def _walk(value: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
    items = None if isinstance(value, Tensor) else _items(value)
    if items is None:
        yield path, value
    elif id(value) in above or len(above) >= MAX_DEPTH:
        yield path, Unrecordable(type(value).__name__, "nested in itself, or deeper than 32 levels")
    elif not items or (len(items) > MAX_SCALARS and all(type(item) in _SCALARS for _, item in items)):
        yield path, value
    else:
        for step, item in items:
            yield from _walk(item, (*path, step), (*above, id(value)))


def _items(value: Any) -> list[tuple[PathStep, Any]] | None:
    kind = type(value)
    if kind in _SCALARS or isinstance(value, str | bytes | torch.Size):
        return None
    if isinstance(value, dict):
        return [(key if type(key) is str else _key_text(key), item) for key, item in dict.items(value)]
    if isinstance(value, tuple):
        return list(enumerate(tuple.__iter__(value)))
    if isinstance(value, list):
        return list(enumerate(list.__iter__(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(name, item) for name in _field_names(kind) if (item := _field(value, name)) is not _MISSING]
    if isinstance(value, collections.deque):
        return list(enumerate(collections.deque.__iter__(value)))
    if kind is types.SimpleNamespace:
        return list(vars(value).items())
    if isinstance(value, collections.UserDict):
        kept = value.__dict__.get("data")
        return _items(kept) if isinstance(kept, dict) else None
    return None


# What has leaves, or more to tell than its type.
_TELLING = (
    *_SCALARS, bytes, Tensor, torch.Size, dict, tuple, list, collections.deque, types.SimpleNamespace, collections.UserDict,
    torch.dtype, torch.device, torch.layout, torch.memory_format, slice, enum.Enum, np.generic, np.ndarray, torch.SymInt,
    torch.SymFloat, torch.SymBool, torch.Generator, type, type(...),
)  # fmt: skip


def is_opaque(kind: type) -> bool:
    """Whether of each object of a class only the class can be told. One that passes for another class is not known by its own."""
    return not (
        issubclass(kind, (*_TELLING, Unrecordable))
        or hasattr(kind, "__dataclass_fields__")
        or kind.__name__ in ("ReduceOp", "RedOpType", "ProcessGroup")
        or any("__class__" in vars(each) for each in kind.__mro__[:-1])
    )


def _field_names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _field(value: Any, name: str) -> Any:
    """A field of a dataclass where it is kept, without asking the object: it may compute, or raise."""
    own = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    slot = getattr(type(value), name, None)
    try:
        return slot.__get__(value) if isinstance(slot, types.MemberDescriptorType) else _MISSING
    except AttributeError:
        return _MISSING


def _key_text(key: Any) -> str:
    if isinstance(key, enum.Enum):
        return f"{type(key).__name__}.{key.name}"
    if isinstance(key, str):
        return str.__str__(key)
    return repr(key) if type(key) in (*_SCALARS, tuple) else type(key).__name__


@dataclasses.dataclass(frozen=True, slots=True)
class Unrecordable:
    """Stands for a value that could not be taken, and says why."""

    type: str
    reason: str


def type_name(value: Any) -> str:
    """`torch.Tensor`, `int`, `NoneType`, `package.Class`."""
    kind = type(value)
    if isinstance(value, Unrecordable):
        return value.type
    if kind.__module__ == "builtins":
        return kind.__qualname__
    if kind is Tensor or kind is torch.nn.Parameter:
        return "torch.Tensor"
    return f"{kind.__module__}.{kind.__qualname__}"


def scalar(value: Any) -> Any:
    """A JSON form of a plain value, exact for numbers; None where only the type can be told."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else repr(value)
    if kind in (bool, int, type(None)):
        return value if kind is not int or abs(value) < 1 << 63 else str(value)
    if kind is str:
        return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + f"... ({len(value)} characters)"
    if kind is complex:
        return [scalar(value.real), scalar(value.imag)]
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.Size | list | tuple):
        items = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        plain = list(items)
        if all(type(item) in _SCALARS for item in plain):
            return [scalar(item) for item in plain]
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return [scalar(part) if type(part) in _SCALARS else type(part).__name__ for part in parts]
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.generic):
        return repr(value.item()) if value.dtype.kind not in "biuf" else scalar(value.item())
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value)
    if kind.__name__ in ("ReduceOp", "RedOpType"):
        return str(value)
    if kind.__name__ == "ProcessGroup":
        return process_group(value)
    if value is Ellipsis:
        return "..."
    return generator_state(value) if isinstance(value, torch.Generator) else None


def generator_state(generator: torch.Generator) -> str | None:
    """What a generator was seeded with and a digest of where it stands; None where it does not tell."""
    try:
        with internals.no_functions(), internals.no_dispatch():
            state = torch.Generator.get_state(generator)
            digest = zlib.crc32(ctypes.string_at(state.data_ptr(), state.nbytes))
            return f"{generator.device.type}, seed {torch.Generator.initial_seed(generator)}, state {digest:08x}"
    except (RuntimeError, NotImplementedError):  # such as while a CUDA graph is recorded
        return None


def process_group(group: Any) -> dict[str, Any] | None:
    """The ranks of a process group."""
    try:
        return {"group_ranks": torch.distributed.get_process_group_ranks(group), "group_id": group.group_name}
    except (RuntimeError, ValueError, AttributeError, KeyError):
        return None
