"""One array in a .npy file, read and written without numpy's loader: nothing is unpickled, nothing allocated on trust.

The header is text in one form, as numpy writes it; element types that are no plain numbers (objects, texts, records,
dates) are refused. There is no bfloat16 in this format: the older tools store it as float32, and so does `write_npy`;
`narrowed` takes it back.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ulpscope.model.dtypes import DTYPES, DType, values_from
from ulpscope.model.errors import DumpError
from ulpscope.store.files.plain_file import mapped

_MAGIC = b"\x93NUMPY"
_ALIGN = 64
_MAX_HEADER = 1 << 16
_MAX_DIMS = 64
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
_HEADER = re.compile(
    r"\{ *'descr': *'(?P<descr>[<>|=][a-zA-Z]\d{0,3})', *'fortran_order': *(?P<fortran>True|False), *"
    r"'shape': *\((?P<shape>[\dL, ]*)\),? *\} *\n?"
)
_SIZE = re.compile(r"(\d{1,19})L?")  # Python 2 wrote 3L
_TYPES: dict[tuple[str, int], DType] = {
    (np.dtype(dtype.exact).kind, dtype.itemsize): dtype for dtype in DTYPES.values() if dtype.exact is not None
}


def read_npy(path: Path) -> tuple[DType, tuple[int, ...], memoryview]:
    """Element type, shape and the elements in row-major order. Raises DumpError naming the file.

    The elements stay in the file until they are looked at; only big-endian and column-major arrays are copied.
    """
    data = mapped(path)
    start, (descr, fortran, shape) = _header(path, data)
    order, dtype = descr[0], _TYPES.get((descr[1], int(descr[2:] or 0)))
    if dtype is None:
        _refuse(path, f"has elements of type {descr!r}; only plain numbers are read")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != len(data) - start:
        _refuse(path, f"has {len(data) - start} bytes of elements; a {dtype.name} of shape {shape} has {nbytes}")
    raw = memoryview(data)[start:]
    if order != ">" and not (fortran and len(shape) > 1):
        return dtype, shape, raw
    numbers = np.frombuffer(raw, dtype=np.dtype(f"{order}{descr[1:]}")).reshape(shape, order="F" if fortran else "C")
    straight = np.ascontiguousarray(numbers, dtype=dtype.bits)
    return dtype, shape, memoryview(straight.tobytes())


def write_npy(path: Path, dtype: DType, shape: tuple[int, ...], bits: bytes | memoryview) -> None:
    """Writes a new file that `numpy.load` reads. Raises FileExistsError when there is one.

    What numpy has no type for (bfloat16, float8, complex32) is written exactly, in the next wider type.
    """
    raw = memoryview(bits).cast("B") if len(bits) else memoryview(b"")
    if raw.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{raw.nbytes} bytes do not hold a {dtype.name} of shape {shape}")
    descr = dtype.exact
    if descr is None:
        wide: Any = values_from(raw, dtype, shape)
        descr, raw = wide.dtype.str, memoryview(wide.tobytes())
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(map(int, shape))}, }}"
    prefix = len(_MAGIC) + 4
    text += " " * (-(prefix + len(text) + 1) % _ALIGN) + "\n"
    with path.open("xb") as file:
        file.write(_MAGIC + b"\x01\x00" + len(text).to_bytes(2, "little") + text.encode("ascii"))
        file.write(raw)


def as_bfloat16(raw: bytes | memoryview) -> memoryview | None:
    """The bits of float32 numbers that all are bfloat16; None when one of them is not."""
    bits = np.frombuffer(raw, dtype="<u4")
    return memoryview((bits >> 16).astype("<u2").tobytes()) if not np.any(bits & 0xFFFF) else None


def narrowed(raw: bytes | memoryview, dtype: DType) -> memoryview | None:
    """The bits of a type that numpy lacks from the wider elements `write_npy` gave it; None where one is not of that type.

    Of several kinds of NaN that look the same there, the first comes back.
    """
    if dtype.name == "bfloat16":
        return as_bfloat16(raw)
    if dtype.name == "complex32":
        parts = np.frombuffer(raw, dtype="<f4")
        halves = parts.astype("<f2")
        same = np.array_equal(halves.astype("<f4").view("<u4"), parts.view("<u4"))
        return memoryview(halves.tobytes()) if same else None
    if dtype.itemsize != 1:
        return None
    codes = np.arange(256, dtype=np.uint8)
    wide = values_from(codes.data, dtype, codes.shape)
    known, first = np.unique(wide.view("<u4"), return_index=True)
    given = np.frombuffer(raw, dtype="<u4")
    places = np.minimum(np.searchsorted(known, given), len(known) - 1)
    if not np.array_equal(known[places], given):
        return None
    return memoryview(codes[first[places]].tobytes())


def _header(path: Path, data: Any) -> tuple[int, tuple[str, bool, tuple[int, ...]]]:
    """Where the elements begin, and the header in its parts."""
    if data[: len(_MAGIC)] != _MAGIC:
        _refuse(path, "is not a .npy file")
    at = len(_MAGIC) + 2
    width = _LENGTH_BYTES.get(data[len(_MAGIC)]) if len(data) >= at else None
    if width is None:
        _refuse(path, "is a .npy file of an unknown version")
    size = int.from_bytes(data[at : at + width], "little")
    start = at + width + size
    if size > _MAX_HEADER or start > len(data):
        _refuse(path, "has a header that is cut or too long")
    text = data[start - size : start].decode("latin-1")
    found = _HEADER.fullmatch(text)
    if found is None:
        _refuse(path, f"has a header that describes no array of plain numbers: {text[:80].strip()!r}")
    sizes = [part.strip() for part in found["shape"].split(",")]
    if sizes[-1] == "":
        sizes.pop()
    matches = [_SIZE.fullmatch(part) for part in sizes]
    shape = tuple(int(match[1]) for match in matches if match is not None)
    if len(shape) != len(sizes) or len(shape) > _MAX_DIMS or any(size >> 63 for size in shape):
        _refuse(path, f"has a shape that is none: ({found['shape'][:80]})")
    return start, (found["descr"], found["fortran"] == "True", shape)


def _refuse(path: Path, why: str) -> NoReturn:
    raise DumpError(f"{path} {why}")
