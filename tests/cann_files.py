"""Kernel dump files of CANN, written from the description of the format: protobuf's wire format by hand, layouts by index."""

from __future__ import annotations

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


def to_fractal_nz(x: Array, c0: int = 16, n0: int = 16) -> Array:
    *lead, n, c = x.shape
    out = np.zeros((*lead, _up(c, c0), _up(n, n0), n0, c0), x.dtype)
    for i, j in np.ndindex(n, c):
        out[..., j // c0, i // n0, i % n0, j % c0] = x[..., i, j]
    return out
