"""Elements of an Ascend device that are smaller than a byte, or that no other device has, as numbers that numpy has.

Bits lie with the first element highest; of numbers with 2 or 4 bits the first lies lowest in its byte.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import DTYPES, DType

Array = NDArray[Any]
_WHOLE = {"INT2": (2, "int8"), "UINT2": (2, "uint8"), "INT4": (4, "int8")}
_FLOATS = ("FLOAT4_E2M1", "FLOAT4_E1M2", "HIFLOAT8")
_BITS = "UINT1"
# Of HIFLOAT8: where a prefix begins, how many bits of exponent it stands for, how many are left for the fraction.
_PREFIXES = ((0x60, 4, 1), (0x40, 3, 2), (0x20, 2, 3), (0x10, 1, 3), (0x08, 0, 3))


def element(type_name: str) -> DType | None:
    """What such elements become; None for a type that is not one of them."""
    if type_name == _BITS:
        return DTYPES["uint8"]
    if type_name in _FLOATS:
        return DTYPES["float32"]
    return DTYPES[_WHOLE[type_name][1]] if type_name in _WHOLE else None


def unpacked(type_name: str, data: memoryview) -> memoryview:
    """The elements in the type that `element` names."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if type_name == _BITS:
        found: Array = np.unpackbits(raw)
    elif type_name in _FLOATS:
        found = _values(type_name)[_split(raw, 4) if type_name.startswith("FLOAT4") else raw]
    else:
        width, name = _WHOLE[type_name]
        found = _split(raw, width).astype(np.int8)
        if name == "int8":
            found = np.where(found >= 1 << (width - 1), found - (1 << width), found).astype(np.int8)
    return memoryview(found.tobytes())


def _split(raw: Array, width: int) -> Array:
    places = np.arange(0, 8, width, dtype=np.uint8)
    return ((raw[:, None] >> places) & ((1 << width) - 1)).reshape(-1)


@functools.cache
def _values(type_name: str) -> Array:
    if type_name == "HIFLOAT8":
        return np.array([_hifloat8(code) for code in range(256)], dtype=np.float32)
    fraction = 1 if type_name == "FLOAT4_E2M1" else 2
    sizes = []
    for code in range(8):
        exponent, rest = code >> fraction, (code & ((1 << fraction) - 1)) / (1 << fraction)
        sizes.append((1 + rest) * 2.0 ** (exponent - 1) if exponent else rest)
    return np.array([*sizes, *(-size for size in sizes)], dtype=np.float32)


def _hifloat8(code: int) -> float:
    """Sign, a prefix that tells how many bits the exponent has, the exponent with its own sign, and the fraction."""
    sign, rest = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if rest < 0x08:
        if not rest:
            return 0.0 if sign > 0 else float("nan")
        return sign * 2.0 ** (rest - 23)
    bits, fraction = next((bits, fraction) for least, bits, fraction in _PREFIXES if rest >= least)
    part = (rest >> fraction) & ((1 << bits) - 1)
    exponent = 0
    if bits:
        size = 1 << (bits - 1) | (part & ((1 << (bits - 1)) - 1))
        exponent = -size if part >> (bits - 1) else size
    significand = 1 + (rest & ((1 << fraction) - 1)) / (1 << fraction)
    if exponent == 15 and significand > 1:
        return sign * float("inf")
    return sign * significand * 2.0**exponent
