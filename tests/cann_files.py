"""Kernel dump files of CANN, written from the description of the format: protobuf's wire format by hand, layouts by index."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TYPES = {
    "float32": 1,
    "float16": 2,
    "int8": 3,
    "uint8": 4,
    "int16": 5,
    "uint16": 6,
    "int32": 7,
    "int64": 8,
    "uint32": 9,
    "uint64": 10,
    "bool": 11,
    "float64": 12,
    "complex64": 16,
    "complex128": 17,
}
LAYOUTS = {"NCHW": 0, "NHWC": 1, "ND": 2, "NC1HWC0": 3, "FRACTAL_Z": 4, "HWCN": 16, "FRACTAL_NZ": 29, "NDC1HWC0": 32}
MOMENT = 1636595794631347


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number: int, content: int | bytes | str) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    data = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(data)) + data


def shape_field(number: int, shape: tuple[int, ...]) -> bytes:
    return field(number, field(1, b"".join(map(varint, shape))))


@dataclass(frozen=True)
class Stored:
    """A tensor to write: the array in device layout, and what the header says about it."""

    data: Array
    layout: str = "ND"
    origin: tuple[int, ...] | None = None
    type_code: int | None = None
    shape: tuple[int, ...] | None = None
    groups: int = 0
    address: int = 4096

    def message(self, *, output: bool) -> bytes:
        size, origin, groups, address = (6, 7, 8, 9) if output else (5, 6, 7, 8)
        code = TYPES[self.data.dtype.name] if self.type_code is None else self.type_code
        shape = self.data.shape if self.shape is None else self.shape
        message = field(1, code) + field(2, LAYOUTS[self.layout]) + shape_field(3, shape)
        if output:
            message += field(4, field(1, "the op before fusion") + field(2, 0))
        message += field(size, self.data.nbytes) + shape_field(origin, shape if self.origin is None else self.origin)
        return message + field(groups, self.groups) + field(address, self.address)


def kernel_bytes(
    inputs: list[Stored], outputs: list[Stored], *, op_name: str = "add_1", buffers: tuple[bytes, ...] = ()
) -> bytes:
    header = field(1, "2.0") + field(2, MOMENT)
    header += b"".join(field(3, each.message(output=True)) for each in outputs)
    header += b"".join(field(4, each.message(output=False)) for each in inputs)
    header += b"".join(field(5, field(1, 0) + field(3, len(each))) for each in buffers)
    header += field(6, op_name) + field(7, field(1, "attr") + field(2, "value"))
    elements = b"".join(each.data.tobytes() for each in (*inputs, *outputs)) + b"".join(buffers)
    return len(header).to_bytes(8, "little") + header + elements


NANO_TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int64": 9, "float64": 11, "bool": 12}


def nano_bytes(inputs: list[Stored], outputs: list[Stored]) -> bytes:
    """The same for a nano device."""

    def tag(number: int, content: bytes) -> bytes:
        return struct.pack("<II", number, len(content)) + content

    def each(stored: Stored, output: bool) -> bytes:
        code = NANO_TYPES[stored.data.dtype.name] if stored.type_code is None else stored.type_code
        shape = stored.data.shape if stored.shape is None else stored.shape
        origin = shape if stored.origin is None else stored.origin
        told = tag(0, struct.pack(f"<{len(shape)}Q", *shape)) + tag(1, struct.pack(f"<{len(origin)}Q", *origin))
        told += tag(2, b"the op before fusion") if output else b""
        before = struct.pack("<3i", 0, code, 2) if output else b""
        head = struct.pack("<3i", code, LAYOUTS[stored.layout], 0) + before
        return head + struct.pack("<3QI", stored.address, 0, stored.data.nbytes, len(told)) + told

    header = struct.pack("<II", 0x5A5A5A5A, 1)
    for number, side in ((4, inputs), (5, outputs)):
        header += tag(number, struct.pack("<I", len(side)) + b"".join(each(item, number == 5) for item in side))
    return struct.pack("<Q", len(header)) + header + b"".join(item.data.tobytes() for item in (*inputs, *outputs))


def file_name(op_type: str = "Add", op_name: str = "add_1", *, task: int = 24, moment: int = MOMENT) -> str:
    return f"{op_type}.{op_name}.{task}.5.{moment}"


def write_kernel(
    folder: Path,
    inputs: list[Stored],
    outputs: list[Stored],
    *,
    op_type: str = "Add",
    op_name: str = "add_1",
    moment: int = MOMENT,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(op_type, op_name, moment=moment)
    path.write_bytes(kernel_bytes(inputs, outputs, op_name=op_name))
    return path


# --- layouts, element by element --------------------------------------------------------------------------------


def _up(size: int, width: int) -> int:
    return -(-size // width)


def to_nc1hwc0(x: Array, c0: int = 16) -> Array:
    n, c, h, w = x.shape
    out = np.zeros((n, _up(c, c0), h, w, c0), x.dtype)
    for i, j in np.ndindex(n, c):
        out[i, j // c0, :, :, j % c0] = x[i, j]
    return out


def to_ndc1hwc0(x: Array, c0: int = 16) -> Array:
    n, c, d, h, w = x.shape
    out = np.zeros((n, d, _up(c, c0), h, w, c0), x.dtype)
    for i, j, k in np.ndindex(n, c, d):
        out[i, k, j // c0, :, :, j % c0] = x[i, j, k]
    return out


def to_fractal_z(x: Array, c0: int = 16, n0: int = 16) -> Array:
    n, c, h, w = x.shape
    out = np.zeros((_up(c, c0), h, w, _up(n, n0), n0, c0), x.dtype)
    for i, j in np.ndindex(n, c):
        out[j // c0, :, :, i // n0, i % n0, j % c0] = x[i, j]
    return out.reshape(-1, _up(n, n0), n0, c0)


def to_grouped_fractal_z(x: Array, groups: int, c0: int = 16, n0: int = 16) -> Array:
    """`x` has the rows of all groups and the channels of one; `side` groups lie side by side so that blocks are full."""
    rows, c, h, w = x.shape
    n = rows // groups
    side = min(math.lcm(math.lcm(c, c0) // c, math.lcm(n, n0) // n), groups)
    big, c1, n1 = _up(groups, side), _up(side * c, c0), _up(side * n, n0)
    out = np.zeros((big, c1, h, w, n1, n0, c0), x.dtype)
    for group, i, j in np.ndindex(groups, n, c):
        row, column = (group % side) * n + i, (group % side) * c + j
        out[group // side, column // c0, :, :, row // n0, row % n0, column % c0] = x[group * n + i, j]
    return out.reshape(-1, n1, n0, c0)


def to_fractal_nz(x: Array, c0: int = 16, n0: int = 16) -> Array:
    *lead, n, c = x.shape
    out = np.zeros((*lead, _up(c, c0), _up(n, n0), n0, c0), x.dtype)
    for i, j in np.ndindex(n, c):
        out[..., j // c0, i // n0, i % n0, j % c0] = x[..., i, j]
    return out
