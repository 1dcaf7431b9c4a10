"""One tensor, wherever it lies: a .npy or .pt file, a kernel dump of CANN, or a value of a dump.

    a.npy    a.pt    Add.add_1.24.5.1636595794631347::output.0    runs/a::Functional.linear.0.forward.output.0

What a file is, its first bytes say. Elements stay in the file until they are looked at.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import DType, values_from
from ulpscope.model.errors import DumpError, did_you_mean
from ulpscope.model.names import call_of_value, value_text
from ulpscope.model.records import Stats, Value
from ulpscope.native import measuring
from ulpscope.store.dump import Dump
from ulpscope.store.files.npy import read_npy
from ulpscope.store.files.pt import read_pt
from ulpscope.store.formats.cann import KernelDump, kernel_name, read_kernel
from ulpscope.store.formats.cann_layouts import logical
from ulpscope.store.registry import open_dump

BETWEEN = "::"
_NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Elements in row-major order, their type and shape. `source` is how it was asked for."""

    source: str
    dtype: DType
    shape: tuple[int, ...]
    raw: memoryview

    @property
    def count(self) -> int:
        return len(self.raw) // self.dtype.itemsize

    def values(self) -> NDArray[Any]:
        """The elements; types that numpy lacks come exactly in the next wider one."""
        return values_from(self.raw, self.dtype, self.shape)

    def stats(self) -> Stats:
        """Largest, smallest, sum, norm and counts, by one pass through the elements."""
        flat = np.frombuffer(self.raw, dtype=np.uint8)
        packed = measuring.measure(flat.ctypes.data, self.dtype.code, (self.count,), None, measuring.STATS, 0, 0, 0)
        row = np.frombuffer(packed, dtype=measuring.ROW, count=1)[0]
        largest, smallest = (_extreme(int(row[end]), int(row["kind"])) for end in ("max_bits", "min_bits"))
        counts = [int(row[name]) for name in ("nan", "posinf", "neginf", "zero")]
        return Stats(self.count, largest, smallest, float(row["sum"]), float(row["norm"]), *counts)


def read_tensor(source: str, *, step: int | None = None, rank: int | None = None) -> StoredTensor:
    """The tensor at `FILE`, `FILE::SLOT` or `RUN::VALUE`. Raises DumpError that says what there is instead."""
    path, between, name = source.partition(BETWEEN)
    place = Path(path)
    if not place.exists():
        raise DumpError(f"{path} does not exist; give a .npy, .pt or kernel dump file, or RUN{BETWEEN}VALUE")
    kind = _first_bytes(place) if place.is_file() else b""
    if kind.startswith(_NPY):
        dtype, shape, raw = read_npy(place)
        return _whole(source, name, dtype, shape, raw)
    if kind.startswith(_ZIP):
        dtype, shape, bits = read_pt(place)
        return _whole(source, name, dtype, shape, memoryview(bits))
    if place.is_file() and (kernel_name(place) is not None or not _may_be_dump(place)):
        return kernel_tensor(read_kernel(place), name, source)
    if not between:
        raise DumpError(
            f"{source} is no tensor; name one of its files, or a value: {path}{BETWEEN}Functional.linear.0.forward.output.0"
        )
    return _value_tensor(source, open_dump(place, step=step, rank=rank), name)


def kernel_tensor(kernel: KernelDump, slot: str, source: str) -> StoredTensor:
    """A tensor of a kernel in the shape the program knows; without a slot, its only output."""
    if not slot:
        if len(kernel.outputs) != 1:
            slots = ", ".join(each.slot for each in kernel.tensors) or "nothing"
            raise DumpError(f"{source} holds {slots}; name one: {source}{BETWEEN}output.0")
        slot = kernel.outputs[0].slot
    dtype, bits = logical(kernel.tensor(slot))
    return StoredTensor(source, dtype, bits.shape, bits.reshape(-1).view(np.uint8).data)


def _whole(source: str, name: str, dtype: DType, shape: tuple[int, ...], raw: memoryview) -> StoredTensor:
    if name:
        raise DumpError(f"{source}: the file holds one tensor; leave {BETWEEN}{name} out")
    return StoredTensor(source, dtype, shape, raw)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8)
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error


def _may_be_dump(path: Path) -> bool:
    return path.suffix in (".json", ".pkl", ".bin", ".jsonl")


def _value_tensor(source: str, dump: Dump, name: str) -> StoredTensor:
    try:
        dtype, raw, shape = dump.raw(_find(dump, name))
    except DumpError as error:
        raise DumpError(f"{source}: {error}") from error
    return StoredTensor(source, dtype, shape, memoryview(raw))


def _find(dump: Dump, name: str) -> Value:
    """A value by the name that `ulpscope show` gives it, or by the one its own tool wrote."""
    try:
        calls = [dump.call(call_of_value(name))]
    except ValueError:
        calls = list(dump.calls())
    known: list[str] = []
    for call in calls:
        for value in call.values:
            names = [value_text(call.id, value.slot), str(value.extra.get("name"))]
            if name in names:
                return value
            known.append(names[0])
    raise DumpError(f"{dump.folder} has no value {name!r}.{did_you_mean(name, known)}")


def _extreme(bits: int, kind: int) -> float | int:
    if kind & measuring.KIND_UNSIGNED:
        return bits
    raw = bits.to_bytes(8, "little")
    signed = kind & measuring.KIND_SIGNED
    return int.from_bytes(raw, "little", signed=True) if signed else float(struct.unpack("<d", raw)[0])
