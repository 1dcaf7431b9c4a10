"""One kernel's inputs and outputs in a dump file of CANN, read without CANN and without protobuf.

    u64 length of the header | header | elements of all inputs, then of all outputs, buffers and workspaces, without gaps

The header is a protobuf message `DumpData`. It names no field and repeats no size twice, so nothing in it is trusted: every
length is checked against the file before it is used, nothing is allocated from a number in it, and elements stay in the file
until they are looked at. They are in the layout of the device (`layout`, `shape`); cann_layouts.py takes them to the shape
the program knows.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ulpscope.model.dtypes import DTYPES, DType
from ulpscope.model.errors import DumpError, did_you_mean
from ulpscope.store.files.plain_file import mapped
from ulpscope.store.formats import cann_nano, cann_small

_LENGTH = 8
_MAX_HEADER = 16 << 20
_MAX_PARTS = 4096
_MAX_DIMS = 64
_MAX_MAPPING = 64 << 20
_MOST_FOLDERS = 1000

_TYPE_NAMES = dict(
    enumerate(
        [
            "UNDEFINED",
            "FLOAT",
            "FLOAT16",
            "INT8",
            "UINT8",
            "INT16",
            "UINT16",
            "INT32",
            "INT64",
            "UINT32",
            "UINT64",
            "BOOL",
            "DOUBLE",
            "STRING",
            "DUAL_SUB_INT8",
            "DUAL_SUB_UINT8",
            "COMPLEX64",
            "COMPLEX128",
            "QINT8",
            "QINT16",
            "QINT32",
            "QUINT8",
            "QUINT16",
            "RESOURCE",
            "STRING_REF",
            "DUAL",
            "VARIANT",
            "BF16",
            "INT4",
            "UINT1",
            "INT2",
            "UINT2",
            "COMPLEX32",
            "HIFLOAT8",
            "FLOAT8_E5M2",
            "FLOAT8_E4M3FN",
            "FLOAT8_E8M0",
            "FLOAT6_E3M2",
            "FLOAT6_E2M3",
            "FLOAT4_E2M1",
            "FLOAT4_E1M2",
        ]
    )
)
_ELEMENTS = {
    "UNDEFINED": "int8",
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "DUAL_SUB_INT8": "int8",
    "DUAL_SUB_UINT8": "uint8",
    "QINT8": "int8",
    "QINT16": "int16",
    "QINT32": "int32",
    "QUINT8": "uint8",
    "QUINT16": "uint16",
    "RESOURCE": "int64",
    "BF16": "bfloat16",
    "FLOAT8_E8M0": "float8_e8m0fnu",
}
LAYOUTS = {
    0: "NCHW",
    1: "NHWC",
    2: "ND",
    3: "NC1HWC0",
    4: "FRACTAL_Z",
    5: "NC1C0HWPAD",
    6: "NHWC1C0",
    9: "C1HWNC0",
    12: "NC1HWC0_C04",
    13: "FRACTAL_Z_C04",
    14: "CHWN",
    16: "HWCN",
    26: "MD",
    27: "NDHWC",
    28: "FRACTAL_ZZ",
    29: "FRACTAL_NZ",
    30: "NCDHW",
    31: "DHWCN",
    32: "NDC1HWC0",
    33: "FRACTAL_Z_3D",
    34: "CN",
    35: "NC",
    36: "DHWNC",
    37: "FRACTAL_Z_3D_TRANSPOSE",
    38: "FRACTAL_ZN_LSTM",
    39: "FRACTAL_Z_G",
    47: "NCL",
    48: "FRACTAL_Z_WINO",
    49: "C1HWC0",
}


@dataclass(frozen=True, slots=True)
class KernelTensor:
    """An input or output of a kernel as it lay on the device."""

    path: Path
    slot: str
    """`input.0`, `output.1`."""
    type_name: str
    layout: str
    shape: tuple[int, ...]
    origin_shape: tuple[int, ...]
    """The shape in the program; the device's own where the file tells none."""
    groups: int
    address: int
    data: memoryview

    @property
    def dtype(self) -> DType:
        """Raises DumpError for a type whose elements cannot be told apart."""
        found = _element(self.type_name)
        if found is None:
            raise DumpError(f"{self.path}: {self.slot} is of type {self.type_name}, which cannot be read")
        return found

    def raw(self) -> tuple[DType, tuple[int, ...], memoryview]:
        """Element type, shape on the device and the elements in row-major order. Raises DumpError naming the file."""
        dtype, data = self.dtype, self.data
        if cann_small.element(self.type_name) is not None:
            data = cann_small.unpacked(self.type_name, data)
        if not self.shape and len(data) != dtype.itemsize:
            # No sizes at all: one number, or a shape that was not known when the kernel ran.
            count = len(data) // dtype.itemsize
            return dtype, (count,), data[: count * dtype.itemsize]
        nbytes = math.prod(self.shape) * dtype.itemsize
        if nbytes > len(data):
            raise DumpError(
                f"{self.path}: {self.slot} has {len(data)} bytes; a {dtype.name} of shape {self.shape} has {nbytes}"
            )
        return dtype, self.shape, data[:nbytes]


@dataclass(frozen=True, slots=True)
class KernelDump:
    """What one file holds."""

    path: Path
    version: str
    op_name: str
    time: int
    """Microseconds since 1970, as the file tells."""
    inputs: tuple[KernelTensor, ...]
    outputs: tuple[KernelTensor, ...]

    @property
    def tensors(self) -> tuple[KernelTensor, ...]:
        return self.inputs + self.outputs

    def tensor(self, slot: str) -> KernelTensor:
        """The one of a name such as `output.0`. Raises DumpError when there is none."""
        for each in self.tensors:
            if each.slot == slot:
                return each
        known = [each.slot for each in self.tensors]
        raise DumpError(
            f"{self.path} has no {slot!r}; it has {', '.join(known) or 'nothing'}.{did_you_mean(slot, known)}"
        )


@dataclass(frozen=True, slots=True)
class KernelName:
    """What the name of a file tells. `moment` orders files of one kernel."""

    op_type: str
    op_name: str
    task: int
    moment: int


_NAME = re.compile(
    r"(?P<type>[\w-]+)\.(?P<name>[\w-]+)\.(?P<task>\d{1,20})(?:\.\d{1,20})?\.(?P<moment>\d{10,20})"
    r"(?:\.\d{1,9}\.\d{1,9}\.\d{1,9}(?:\.\d{1,9})?)?",
    re.ASCII,
)
_HASHED = re.compile(r"\d{10,40}", re.ASCII)


def kernel_name(path: Path) -> KernelName | None:
    """The kernel a file is of, by its name or by the `mapping.csv` beside it; None when the name is not a kernel dump's."""
    return _parsed(_real_names(path.parent).get(path.name, path.name) if _HASHED.fullmatch(path.name) else path.name)


def kernel_files(folder: Path) -> dict[Path, KernelName]:
    """The kernel dumps in a folder, by name, in the order of their names."""
    real = _real_names(folder)
    names = {path: _parsed(real.get(path.name, path.name)) for path in sorted(folder.iterdir()) if path.is_file()}
    return {path: name for path, name in names.items() if name is not None}


def nearest_kernels(folder: Path) -> str:
    """A sentence naming a folder below that holds kernel dumps, or nothing: they lie in TIME/DEVICE/MODEL."""
    for visited, (inner, _, names) in enumerate(os.walk(folder)):
        if any(_NAME.fullmatch(name) for name in names):
            return f" There are some in {inner}."
        if visited >= _MOST_FOLDERS:
            break
    return ""


def _parsed(name: str) -> KernelName | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return KernelName(found["type"], found["name"], int(found["task"]), int(found["moment"]))


def _real_names(folder: Path) -> dict[str, str]:
    """Names too long for a file system are replaced by a number, and told in a table."""
    path = folder / "mapping.csv"
    if not path.is_file() or path.stat().st_size > _MAX_MAPPING:
        return {}
    text = bytes(mapped(path)).decode("utf-8", "replace")
    return {row[0].strip(): row[1].strip() for row in csv.reader(text.splitlines()) if len(row) >= 2}


def read_kernel(path: Path) -> KernelDump:
    """The tensors of a file. Raises DumpError naming the file when it is cut, damaged or something else."""
    data = mapped(path)
    try:
        return _read(path, memoryview(data))
    except ValueError as error:
        raise DumpError(f"{path} is no kernel dump of CANN that can be read: {error}") from error


# --- the header -------------------------------------------------------------------------------------------------

_Field = tuple[int, "int | memoryview"]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Where the parts of an input, or of an output, stand in its message."""

    size: int
    origin_shape: int
    groups: int
    address: int


_INPUT = _Numbers(size=5, origin_shape=6, groups=7, address=8)
_OUTPUT = _Numbers(size=6, origin_shape=7, groups=8, address=9)


def _read(path: Path, data: memoryview) -> KernelDump:
    if len(data) <= _LENGTH:
        raise ValueError(f"it has {len(data)} bytes")
    length = int.from_bytes(data[:_LENGTH], "little")
    if length > min(len(data) - _LENGTH, _MAX_HEADER):
        raise ValueError(f"its header would have {length} bytes, the file has {len(data)}")
    header = data[_LENGTH : _LENGTH + length]
    if bytes(header[:4]) == cann_nano.MAGIC:
        return _read_nano(path, header, _Elements(data, _LENGTH + length))
    texts = {1: "", 6: ""}
    time, inputs, outputs, others = 0, [], [], []
    for number, value in _fields(header):
        match number, value:
            case ((1 | 6), memoryview()):
                texts[number] = bytes(value).decode("utf-8", "replace")
            case 2, int():
                time = value
            case 3, memoryview():
                outputs.append(value)
            case 4, memoryview():
                inputs.append(value)
            case ((5 | 8), memoryview()):
                others.append(_number(dict(_fields(value)).get(3, 0)))
            case ((1 | 2 | 3 | 4 | 5 | 6 | 8), _):
                raise ValueError(f"field {number} of its header has the wrong type")
        if max(len(inputs), len(outputs), len(others)) > _MAX_PARTS:
            raise ValueError(f"it has more than {_MAX_PARTS} inputs, outputs or buffers")
    elements = _Elements(data, _LENGTH + length)
    found_inputs = [_tensor(path, f"input.{at}", part, _INPUT, elements) for at, part in enumerate(inputs)]
    found_outputs = [_tensor(path, f"output.{at}", part, _OUTPUT, elements) for at, part in enumerate(outputs)]
    for size in others:
        elements.take(size, "a buffer")
    return KernelDump(path, texts[1], texts[6], time, tuple(found_inputs), tuple(found_outputs))


def _read_nano(path: Path, header: memoryview, elements: _Elements) -> KernelDump:
    """The header knows neither the kernel nor the time; the name of the file does."""
    version, *sides = cann_nano.read_header(header)
    inputs, outputs = (
        tuple(
            KernelTensor(
                path=path,
                slot=f"{side}.{at}",
                type_name=told.type_name,
                layout=LAYOUTS.get(told.layout, f"number {told.layout}"),
                shape=_plausible(told.shape),
                origin_shape=_plausible(told.origin_shape),
                groups=0,
                address=told.address,
                data=elements.take(told.size, f"{side}.{at}"),
            )
            for at, told in enumerate(found)
        )
        for side, found in zip(("input", "output"), sides, strict=True)
    )
    name = kernel_name(path)
    return KernelDump(path, version, name.op_name if name else "", name.moment if name else 0, inputs, outputs)


class _Elements:
    """What lies behind the header, handed out piece by piece."""

    def __init__(self, data: memoryview, start: int) -> None:
        self._data = data
        self._at = start

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self._data) - self._at:
            raise ValueError(f"{what} would have {size} bytes, {len(self._data) - self._at} are left: the file is cut")
        self._at += size
        return self._data[self._at - size : self._at]


def _tensor(path: Path, slot: str, message: memoryview, numbers: _Numbers, elements: _Elements) -> KernelTensor:
    parts: dict[int, int | memoryview] = {}
    shapes: dict[int, tuple[int, ...]] = {3: (), numbers.origin_shape: ()}
    for number, value in _fields(message):
        if number in shapes:
            shapes[number] = _sizes(value)
        else:
            parts[number] = value
    size = _number(parts.get(numbers.size, 0))
    type_code, layout = _number(parts.get(1, 0)), _number(parts.get(2, 0))
    return KernelTensor(
        path=path,
        slot=slot,
        type_name=_TYPE_NAMES.get(type_code, f"number {type_code}"),
        layout=LAYOUTS.get(layout, f"number {layout}"),
        shape=shapes[3],
        origin_shape=shapes[numbers.origin_shape] or shapes[3],
        groups=_number(parts.get(numbers.groups, 0)),
        address=_number(parts.get(numbers.address, 0)),
        data=elements.take(size, slot),
    )


def _element(type_name: str) -> DType | None:
    return cann_small.element(type_name) or DTYPES.get(_ELEMENTS.get(type_name, type_name.lower()))


# --- protobuf's wire format -------------------------------------------------------------------------------------


def _fields(message: memoryview) -> Iterator[_Field]:
    """The fields of a message in order: numbers, and the bytes of everything that has a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
                yield key >> 3, value
            case 2:
                size, at = _varint(message, at)
                if size > len(message) - at:
                    raise ValueError("a field of its header is cut")
                yield key >> 3, message[at : at + size]
                at += size
            case 1 | 5 as width:
                size = 8 if width == 1 else 4
                if size > len(message) - at:
                    raise ValueError("a field of its header is cut")
                yield key >> 3, int.from_bytes(message[at : at + size], "little")
                at += size
            case kind:
                raise ValueError(f"its header has a field of the unknown kind {kind}")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    found = 0
    for place, byte in enumerate(message[at : at + 10]):
        found |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return found & ((1 << 64) - 1), at + place + 1
    raise ValueError("a number of its header is cut or too long")


def _sizes(value: int | memoryview) -> tuple[int, ...]:
    """The sizes of a shape, packed or one by one."""
    if isinstance(value, int):
        raise ValueError("a shape of its header has the wrong type")
    sizes: list[int] = []
    for number, part in _fields(value):
        if number != 1:
            continue
        at = 0
        while isinstance(part, memoryview) and at < len(part) and len(sizes) <= _MAX_DIMS:
            size, at = _varint(part, at)
            sizes.append(size)
        if isinstance(part, int):
            sizes.append(part)
        if len(sizes) > _MAX_DIMS:
            raise ValueError(f"a shape of its header has more than {_MAX_DIMS} dimensions")
    return _plausible(tuple(sizes))


def _plausible(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) > _MAX_DIMS:
        raise ValueError(f"a shape of its header has more than {_MAX_DIMS} dimensions")
    if any(size >> 63 for size in sizes) or math.prod(size or 1 for size in sizes) >> 58:
        raise ValueError(f"a shape of its header has more elements than can be: {sizes}")
    return sizes


def _number(value: int | memoryview) -> int:
    if isinstance(value, memoryview):
        raise ValueError("a number of its header has the wrong type")
    return value
