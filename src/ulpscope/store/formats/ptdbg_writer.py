"""Writing a dump in the files of ptdbg_ascend: `{mode_}dump.pkl`, JSON lines, and the folder of .npy files beside it.

Statistics the format does not have (of truth values, of empty tensors, the norm of a tensor without dimensions) are left out
as there. Optimizer steps, gradients of parameters and saved values have no place in it. A file is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.model.dtypes import DTYPES, DType, dtype_named
from ulpscope.model.errors import DumpError
from ulpscope.model.records import CallRecord, Value
from ulpscope.store.dump import Dump
from ulpscope.store.files.npy import write_npy
from ulpscope.store.formats.pkl_lines import STACK
from ulpscope.store.formats.pkl_names import call_name, has_place, is_named_by_user, named_values

VERSION = "2.0"  # of the manual whose layout this is: `ptdbg_dump_v2.0`
_UNKNOWN = "Nan"
_NO_STATISTICS: list[Any] = [[], [], [], _UNKNOWN]
_SCALARS = {"int": "int64", "float": "float64", "bool": "bool"}
_WHOLE_NUMBERS = ("int", "uint", "bool")
_MODULE_STEP = 1  # what the tool writes for modules where all others have 0
_LONGEST_NAME = 255
_STACKS_ONLY, _WITH_STACKS = "stack", "api_stack"


def ptdbg_folder(root: Path, *, rank: int, step: int | None = None, tag: str = "ptdbg_dump") -> Path:
    """root/[step0/]ptdbg_dump_v2.0/rank0, in the manual's order."""
    return (root if step is None else root / f"step{step}") / f"{tag}_v{VERSION}" / f"rank{rank}"


def write_ptdbg(
    dump: Dump,
    folder: Path,
    *,
    mode: str = "all",
    arrays: bool = True,
    floats_only: bool = False,
    places: Sequence[int] | None = None,
    name: str | None = None,
    dump_step: int = 0,
) -> Path:
    """Writes a dump into the folder of a rank and returns its .pkl. An earlier one of the same name is replaced.

    `mode` says whether there are values, stacks or both, and gives the files their name where `name` does not; `places` are the
    calls to write, all by default; `floats_only` leaves out integers and truth values, tensors or not; `dump_step` is the
    second field of a line. Raises DumpError if it cannot be written.
    """
    name = name or ("dump" if mode == "all" else f"{mode}_dump")
    path = folder / f"{name}.pkl"
    draft = folder / f".{name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o750)
        draft.chmod(0o750)  # whatever the umask, as the tool does
        try:
            lines = _Lines(dump, draft if arrays and mode != _STACKS_ONLY else None, mode, floats_only)
            lines.dump_step = dump_step
            _write(draft / path.name, lines.rows(range(len(dump)) if places is None else places))
            shutil.rmtree(folder / name, ignore_errors=True)
            os.replace(draft / path.name, path)
            if lines.arrays is not None:
                os.replace(draft, folder / name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}; choose another folder") from error
    return path


def append_ptdbg(
    dump: Dump,
    folder: Path,
    *,
    mode: str = "all",
    arrays: bool = True,
    floats_only: bool = False,
    places: Sequence[int],
) -> None:
    """Adds calls of a dump to files that `write_ptdbg` wrote. Raises DumpError."""
    name = "dump" if mode == "all" else f"{mode}_dump"
    try:
        lines = _Lines(dump, folder / name if arrays and mode != _STACKS_ONLY else None, mode, floats_only)
        _write(folder / f"{name}.pkl", lines.rows(places), os.O_APPEND)
    except OSError as error:
        raise DumpError(f"cannot write {folder / name}.pkl: {error.strerror}; choose another folder") from error


def _write(path: Path, rows: Iterator[list[Any]], how: int = os.O_CREAT | os.O_EXCL) -> None:
    descriptor = os.open(path, os.O_WRONLY | how, 0o640)
    os.fchmod(descriptor, 0o640)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


class _Lines:
    """The rows of a dump, and its arrays on the way."""

    def __init__(self, dump: Dump, arrays: Path | None, mode: str, floats_only: bool) -> None:
        self.arrays = arrays
        self.dump_step = 0
        self._dump = dump
        self._stacks = mode in (_STACKS_ONLY, _WITH_STACKS)
        self._values = mode != _STACKS_ONLY
        self._floats_only = floats_only
        self._first: dict[tuple[Any, ...], str] = {}

    def rows(self, places: Sequence[int]) -> Iterator[list[Any]]:
        for place in places:
            call = self._dump.nth(place)
            if not has_place(call.id):
                continue
            name = call_name(self._dump, call.id)
            if self._values:
                yield from self._value_rows(call, name)
            if self._stacks and call.stack is not None:
                frames = self._dump.stack(call)
                yield [f"{name}_{STACK}", [[each.file, str(each.line), each.function, each.text] for each in frames]]

    def _value_rows(self, call: CallRecord, name: str) -> Iterator[list[Any]]:
        default = _MODULE_STEP if is_named_by_user(self._dump, call.id) else self.dump_step
        for value, role, at in named_values(call):
            if self._floats_only and not _is_float_tensor(value):
                continue
            row = [f"{name}_{role.value}{at}", value.extra.get("dump_step", default), []]
            if value.is_tensor and not _has_sizes(value):
                continue  # a nested tensor: there is no way to say its shape
            if value.is_tensor:
                self._store(row[0], value)
                yield [*row, value.dtype, list(value.shape or ()), _statistics(value)]
            elif value.type in _SCALARS:
                content = float(value.scalar) if value.type == "float" else value.scalar
                self._store_scalar(row[0], _SCALARS[value.type], content)
                yield [*row, f"<class '{value.type}'>", "[]", [content] * 4]

    # --- arrays -------------------------------------------------------------------------------------------------

    def _store(self, name: str, value: Value) -> None:
        """Writes the elements of a value, or a link to an equal one. What is stored as something else has no place here."""
        if self.arrays is None or value.payload is None or value.extra.keys() & {"stored_dtype", "stored_shape"}:
            return
        path = self._path(name)
        if path is None:
            return
        key = (value.payload, value.dtype, value.shape)
        first = self._first.get(key)
        if first is not None and path.with_name(first).exists():
            with contextlib.suppress(OSError):  # a file system without links, or too many of them
                os.link(path.with_name(first), path)
                return
        bits = np.ascontiguousarray(self._dump.load_bits(value)).reshape(-1)
        raw = bits.view(np.uint8).data if bits.size else b""
        self._write(path, dtype_named(str(value.dtype)), value.shape or (), raw)
        self._first[key] = path.name

    def _store_scalar(self, name: str, kind: str, content: Any) -> None:
        path = None if self.arrays is None else self._path(name)
        if path is None or (kind == "int64" and not -(1 << 63) <= content < 1 << 63):
            return
        dtype = DTYPES[kind]
        self._write(path, dtype, (), np.array(content, dtype=dtype.exact).tobytes())

    def _path(self, name: str) -> Path | None:
        """Where an array goes; None if its name is longer than a file system takes. A repeat of a call takes the place."""
        assert self.arrays is not None
        if len(f"{name}.npy".encode()) > _LONGEST_NAME or "/" in name:
            return None
        path = self.arrays / f"{name}.npy"
        path.unlink(missing_ok=True)
        return path

    def _write(self, path: Path, dtype: DType, shape: tuple[int, ...], bits: bytes | memoryview) -> None:
        write_npy(path, dtype, shape, bits)
        path.chmod(0o640)


def _has_sizes(value: Value) -> bool:
    return all(type(size) is int and size >= 0 for size in value.shape or ())


def _is_float_tensor(value: Value) -> bool:
    return value.is_tensor and not str(value.dtype).removeprefix("torch.").startswith(_WHOLE_NUMBERS)


def _statistics(value: Value) -> list[Any]:
    stats = value.stats
    if stats is None or value.dtype == "torch.bool" or 0 in (value.shape or ()):
        return _NO_STATISTICS
    ends: list[Any] = [[] if number is None else _float(number) for number in (stats.max, stats.min, stats.mean)]
    return [*ends, _UNKNOWN if not value.shape or stats.norm is None else _float(stats.norm)]


def _float(number: float | int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
