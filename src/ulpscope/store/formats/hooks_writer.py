"""Writing a dump in the files of torch_npu.hooks: one .pkl of JSON lines, or one .npy file for each value.

    ["0_Functional_linear_forward_input.0", [value, ..., max, min, mean], "torch.float32", [2, 2]]    sample=True
    16_Functional_relu_backward_input0_shape[2,1]_stride[1,1]_offset[0]_format[2].npy                 asynchronous export

The lines hold floating tensors with a dimension, whose elements were recorded, as numbers that passed float32. Backward, `input` is
the gradient that leaves the call, as torch named it for its hooks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.model.dtypes import Array, dtype_named
from ulpscope.model.errors import DumpError
from ulpscope.model.records import CallRecord, Frame, Phase, Role, Value
from ulpscope.store.dump import Dump
from ulpscope.store.files.npy import write_npy
from ulpscope.store.formats.pkl_lines import STACK
from ulpscope.store.formats.pkl_names import api_name, has_place, named_values

SAMPLED = 10
_FLOATS = ("float", "bfloat")
_PLAIN_FORMAT = 2  # ACL_FORMAT_ND: the elements in row-major order
_SWAPPED = {Role.INPUT: Role.OUTPUT, Role.OUTPUT: Role.INPUT}


def write_hooks(dump: Dump, path: Path, *, sample: bool = True) -> None:
    """Writes a dump as a .pkl; an earlier file is replaced. Raises DumpError if it cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        append_hooks(dump, draft, sample=sample)
        os.replace(draft, path)
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}; choose another file") from error
    finally:
        draft.unlink(missing_ok=True)


def append_hooks(dump: Dump, path: Path, *, sample: bool = True, first: int = 0) -> int:
    """Adds a dump to a .pkl, its lines numbered from `first`; returns the next number. Raises DumpError."""
    number = first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for name, value in _values(dump):
                content = numbers_of(dump, value, sample=sample).tolist()
                file.write(json.dumps([f"{number}_{name}", content, value.dtype, list(value.shape or ())]) + "\n")
                number += 1
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}; choose another file") from error
    return number


def write_overflow(dump: Dump, call: CallRecord, path: Path) -> None:
    """Writes one call as the overflow check did: its stack, then all of its values whole. Raises DumpError."""
    name = f"{api_name(dump, call.id)}_{call.id.phase.value}"
    frames = map(_frame_text, dump.stack(call))
    rows: list[list[Any]] = [[f"{name}_{STACK}.{at}", text] for at, text in enumerate(frames)]
    for role, place, value in _in_order(call):
        if value.payload is not None and "stored_shape" not in value.extra:
            numbers = numbers_of(dump, value, sample=False).tolist()
            rows.append([f"{name}_{role.value}{place}", numbers, value.dtype, list(value.shape or ())])
        elif not value.is_tensor:
            rows.append([f"{name}_{role.value}{place}", value.scalar])
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}") from error


def _frame_text(frame: Frame) -> str:
    return (
        f"FrameInfo(filename='{frame.file}', lineno={frame.line}, function='{frame.function}', "
        f"code_context=['{frame.text}'], index=0)"
    )


def export_arrays(dump: Dump, folder: Path, *, first: int = 0) -> int:
    """Writes each recorded tensor as a .npy file of its own, numbered from `first`; returns the next number. Raises DumpError.

    The strides and the offset in a name are those of the file: the elements are whole, and one behind the other.
    """
    number = first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for call in dump.calls():
            if not has_place(call.id):
                continue
            for value, role, at in named_values(call):
                if not value.is_tensor or value.payload is None:
                    continue
                side = _role(call.id.phase, role).value
                name = f"{number}_{api_name(dump, call.id)}_{call.id.phase.value}_{side}{at.removeprefix('.') or 0}"
                _export(dump, value, folder, name)
                number += 1
    except OSError as error:
        raise DumpError(f"cannot write into {folder}: {error.strerror}; choose another folder") from error
    return number


def _export(dump: Dump, value: Value, folder: Path, name: str) -> None:
    shape = tuple(value.extra.get("stored_shape", value.shape or ()))
    dtype = dtype_named(str(value.extra.get("stored_dtype", value.dtype)))
    strides = [int(np.prod(shape[at + 1 :], dtype=object)) for at in range(len(shape))]
    path = folder / f"{name}_shape{_list(shape)}_stride{_list(strides)}_offset[0]_format[{_PLAIN_FORMAT}].npy"
    bits = np.ascontiguousarray(dump.load_bits(value)).reshape(-1)
    draft = folder / f".{os.getpid()}.npy"
    draft.unlink(missing_ok=True)
    write_npy(draft, dtype, shape, bits.view(np.uint8).data if bits.size else b"")
    shutil.move(draft, path)


def _list(sizes: Any) -> str:
    return "[" + ",".join(map(str, sizes)) + "]"


def _values(dump: Dump) -> Iterator[tuple[str, Value]]:
    """The values that the lines hold, with their names, inputs first."""
    for call in dump.calls():
        if not has_place(call.id):
            continue
        for role, at, value in _in_order(call):
            if is_held(value):
                yield f"{api_name(dump, call.id)}_{call.id.phase.value}_{role.value}{at}", value


def _in_order(call: CallRecord) -> list[tuple[Role, str, Value]]:
    """The values of a call with the roles that they have here, inputs first."""
    rows = [(_role(call.id.phase, role), at, value) for value, role, at in named_values(call)]
    return sorted(rows, key=lambda row: row[0] is Role.OUTPUT)


def _role(phase: Phase, role: Role) -> Role:
    return _SWAPPED[role] if phase is Phase.BACKWARD else role


def is_held(value: Value) -> bool:
    """Whether a line can hold a value."""
    return (
        value.payload is not None
        and bool(value.shape)
        and all(type(size) is int and size > 0 for size in value.shape or ())
        and str(value.dtype).removeprefix("torch.").startswith(_FLOATS)
        and "stored_shape" not in value.extra
    )


def numbers_of(dump: Dump, value: Value, *, sample: bool) -> Array:
    """The numbers of a line, for a value that it can hold."""
    elements = dump.load(value).reshape(-1)
    with np.errstate(over="ignore"):
        if not sample:
            return elements.astype(np.float32).astype(np.float64)
        stats = value.stats
        if stats is None or None in (stats.max, stats.min, stats.mean):
            told = [elements.max(), elements.min(), elements.mean(dtype=np.float64)]
        else:
            told = [stats.max, stats.min, stats.mean]
        numbers = [np.array(each, dtype=np.float32) for each in (elements[:SAMPLED], told)]
    return np.concatenate(numbers).astype(np.float64)
