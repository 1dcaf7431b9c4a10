"""Element types: their names, sizes, codes in a dump, and how to read their bits with numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.errors import DumpError

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `bits` is the numpy type that holds its raw bits; `exact` the one that holds its values."""

    name: str
    code: int
    itemsize: int
    bits: str
    exact: str | None


_TABLE = (
    DType("float32", 0, 4, "<f4", "<f4"),
    DType("float64", 1, 8, "<f8", "<f8"),
    DType("float16", 2, 2, "<f2", "<f2"),
    DType("bfloat16", 3, 2, "<u2", None),
    DType("int8", 4, 1, "|i1", "|i1"),
    DType("uint8", 5, 1, "|u1", "|u1"),
    DType("int16", 6, 2, "<i2", "<i2"),
    DType("int32", 7, 4, "<i4", "<i4"),
    DType("int64", 8, 8, "<i8", "<i8"),
    DType("bool", 9, 1, "|b1", "|b1"),
    DType("uint16", 10, 2, "<u2", "<u2"),
    DType("uint32", 11, 4, "<u4", "<u4"),
    DType("uint64", 12, 8, "<u8", "<u8"),
    DType("complex64", 13, 8, "<c8", "<c8"),
    DType("complex128", 14, 16, "<c16", "<c16"),
    DType("complex32", 15, 4, "<u4", None),
    DType("float8_e4m3fn", 16, 1, "|u1", None),
    DType("float8_e5m2", 17, 1, "|u1", None),
    DType("float8_e4m3fnuz", 18, 1, "|u1", None),
    DType("float8_e5m2fnuz", 19, 1, "|u1", None),
    DType("float8_e8m0fnu", 20, 1, "|u1", None),
)
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}


def dtype_named(name: str) -> DType:
    """The element type called `float32` or `torch.float32`. Raises DumpError for an unknown one."""
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise DumpError(f"{name} is not an element type that ulpscope can read; known are {', '.join(DTYPES)}")
    return found


# Digits of the significand, the hidden one counted.
_DIGITS = {
    "float64": 53,
    "complex128": 53,
    "float32": 24,
    "complex64": 24,
    "float16": 11,
    "complex32": 11,
    "bfloat16": 8,
    "float8_e4m3fn": 4,
    "float8_e4m3fnuz": 4,
    "float8_e5m2": 3,
    "float8_e5m2fnuz": 3,
    "float8_e8m0fnu": 1,
}


def round_off(name: str | None) -> float:
    """The unit round-off of a floating type: the largest relative error of rounding to nearest. 0 for all other types."""
    digits = _DIGITS.get((name or "").removeprefix("torch."))
    return 0.0 if digits is None else 2.0**-digits


def bits_from(raw: bytes | memoryview, dtype: DType, shape: tuple[int, ...]) -> Array:
    """The stored bits as an array: the values themselves where numpy has the type, raw integers otherwise."""
    return np.frombuffer(raw, dtype=dtype.bits).reshape(shape)


def values_from(raw: bytes | memoryview, dtype: DType, shape: tuple[int, ...]) -> Array:
    """The stored values; types numpy lacks (bfloat16, float8, complex32) come exactly in the next wider type."""
    bits = bits_from(raw, dtype, shape)
    if dtype.exact is not None:
        return bits
    if dtype.name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype.name == "complex32":
        halves = np.frombuffer(raw, dtype="<f2").astype(np.float32)
        return halves.view(np.complex64).reshape(shape)
    return _float8_values(dtype.name)[bits]


def _float8_values(name: str) -> Array:
    code = np.arange(256, dtype=np.uint32)
    if name == "float8_e8m0fnu":
        wide = np.exp2(code.astype(np.float64) - 127.0)
        wide[255] = np.nan
        return wide.astype(np.float32)
    mantissa_bits = 3 if "e4m3" in name else 2
    exponent_bits = 7 - mantissa_bits
    unusual = name.endswith("fnuz")
    bias = (1 << (exponent_bits - 1)) - (0 if unusual else 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)).astype(np.float64) / (1 << mantissa_bits)
    size = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * np.exp2(exponent.astype(float) - bias)
    )
    wide = np.where(code & 0x80, -size, size)
    if unusual:
        wide[0x80] = np.nan
    elif name == "float8_e4m3fn":
        wide[[0x7F, 0xFF]] = np.nan
    else:
        wide[[0x7C, 0xFC]] = [np.inf, -np.inf]
        wide[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return wide.astype(np.float32)
