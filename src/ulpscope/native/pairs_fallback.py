"""The functions of `_pairs` in numpy, for machines where the extension could not be built, and for complex numbers.

Same arguments, same results: counts and maxima are equal to the extension's, sums agree to rounding.  Works in pieces,
so the memory it takes does not grow with the streams.  Of complex numbers, d and |r| are moduli and the products those
of pairs of reals; one is NaN if either part is, else infinite if either part is.
"""

import mmap
import re
import zlib
from collections.abc import Iterator
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import DTYPES, DType, values_from

Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview | mmap.mmap

SPECIAL = (
    "nan_reference",
    "nan_target",
    "nan_both",
    "inf_reference",
    "inf_target",
    "inf_same",
    "inf_opposite",
    "either",
)
SUMS = ("dot", "reference", "target", "difference", "absolute", "relative", "ulp")
STATE = np.dtype(
    [
        ("count", "<u8"),
        ("differing", "<u8"),
        ("below_thousandth", "<u8"),
        ("below_five_thousandths", "<u8"),
        ("special", [(name, "<u8") for name in SPECIAL]),
        ("place", "<u8"),
        ("max_absolute", "<f8"),
        ("max_relative", "<f8"),
        ("max_ulp", "<f8"),
        ("sums", [(name, "<f8", (8,)) for name in SUMS]),
    ]
)

_LANES = 8
_COUNTS, _NUMBERS = Struct("<13Q"), Struct(f"<{3 + 7 * _LANES}d")
_PIECE = 1 << 16
_CHECKSUMS = Struct("<2I")
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}

# Bits of mantissa, and the exponent of the smallest normal number; a complex dtype has those of its parts.
_FLOATS = {
    "float32": (23, -126),
    "float64": (52, -1022),
    "float16": (10, -14),
    "bfloat16": (7, -126),
    "complex64": (23, -126),
    "complex128": (52, -1022),
    "complex32": (10, -14),
    "float8_e4m3fn": (3, -6),
    "float8_e5m2": (2, -14),
    "float8_e4m3fnuz": (3, -7),
    "float8_e5m2fnuz": (2, -15),
    "float8_e8m0fnu": (0, -127),
}


def _dtype_of(code: int) -> DType:
    if code not in _BY_CODE:
        raise ValueError(f"unknown dtype code {code}; codes are 0 to {max(_BY_CODE)}")
    return _BY_CODE[code]


def _pieces(reference: Buffer, left: DType, target: Buffer, right: DType) -> Iterator[tuple[Array, Array]]:
    """The values of both streams, some thousand at a time, in the narrowest type that holds them."""
    first, second = memoryview(reference).cast("B"), memoryview(target).cast("B")
    count = len(first) // left.itemsize
    if count * left.itemsize != len(first) or count * right.itemsize != len(second):
        raise ValueError(
            f"{len(first)} bytes of {left.name} and {len(second)} of {right.name} are not equally many elements"
        )
    for start in range(0, count, _PIECE):
        stop = min(start + _PIECE, count)
        yield (
            values_from(first[start * left.itemsize : stop * left.itemsize], left, (stop - start,)),
            values_from(second[start * right.itemsize : stop * right.itemsize], right, (stop - start,)),
        )


def _widened(r: Array, t: Array) -> tuple[Array, Array]:
    wide = np.complex128 if "c" in r.dtype.kind + t.dtype.kind else np.float64
    return r.astype(wide), t.astype(wide)


def finite_pieces(
    reference: Buffer, reference_code: int, target: Buffer, target_code: int
) -> Iterator[tuple[Array, Array]]:
    """Both streams in pieces as float64 or complex128, with zeros on both sides where either is not finite."""
    for r, t in _pieces(reference, _dtype_of(reference_code), target, _dtype_of(target_code)):
        with np.errstate(invalid="ignore"):
            r, t = _widened(r, t)
        kept = np.isfinite(r) & np.isfinite(t)
        yield np.where(kept, r, 0.0), np.where(kept, t, 0.0)


def differences(
    reference: Buffer, reference_code: int, target: Buffer, target_code: int
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Both streams in pieces: the exact values of each, d, and d in units in the last place of r.

    Where either value is not finite, d is 0 if the two are the same, NaN counting as itself, and infinite if not.
    """
    left, right = _dtype_of(reference_code), _dtype_of(target_code)
    for exact in _pieces(reference, left, target, right):
        with np.errstate(all="ignore"):
            r, t = _widened(*exact)
            kept = np.isfinite(r) & np.isfinite(t)
            same = (r == t) | (np.isnan(r) & np.isnan(t))
            r, t = np.where(kept, r, 0.0), np.where(kept, t, 0.0)
            distance = _distance(r, t, exact)
            ulps = _ulps(distance, np.abs(r), left, right)
        lost = np.where(same, 0.0, np.inf)
        yield *exact, np.where(kept, distance, lost), np.where(kept, ulps, lost)


def _integer_distance(r: Array, t: Array) -> Array:
    """|t - r| of integers as float64, rounded once."""
    if r.dtype.kind == "u" and t.dtype.kind != "u":
        return _integer_distance(t, r)
    kinds = [np.dtype(np.uint64 if values.dtype.kind == "u" else np.int64) for values in (r, t)]
    r, t = r.astype(kinds[0]), t.astype(kinds[1])
    a, b = r.view(np.uint64), t.view(np.uint64)
    if kinds[0] == kinds[1]:
        return np.where(t > r, b - a, a - b).astype(np.float64)
    # The reference is signed and the target is not.  Of a sum of 65 bits half is rounded, the lowest bit kept as one that
    # tells which way.
    d = np.where((r < 0) | (b > a), b - a, a - b)
    one = np.uint64(1)
    half = (d >> one) | (d & one) | (one << np.uint64(63))
    return np.where((r < 0) & (d < b), half.astype(np.float64) * 2.0, d.astype(np.float64))


def _distance(r: Array, t: Array, exact: tuple[Array, Array]) -> Array:
    if all(values.dtype.kind in "biu" for values in exact) and 8 in (exact[0].itemsize, exact[1].itemsize):
        narrow = [values.astype(np.uint8) if values.dtype.kind == "b" else values for values in exact]
        return _integer_distance(narrow[0], narrow[1])
    distance: Array = np.abs(t - r)
    return distance


def _ulps(distance: Array, size: Array, left: DType, right: DType) -> Array:
    """The distance in units in the last place at `size`, in the float dtype with fewer digits; of integers, itself."""
    floats = [_FLOATS[dtype.name] for dtype in (left, right) if dtype.name in _FLOATS]
    if not floats:
        return distance
    digits, least = min(floats, key=lambda each: (each[0], -each[1]))
    exponent = np.maximum(np.frexp(size)[1] - 1, least)
    # In two steps, because the inverse of the smallest unit of float64 is no float64.
    exponent = np.where(size == 0, least, exponent)
    return np.ldexp(np.ldexp(distance, -exponent), digits)


def _count_special(special: Any, r: Array, t: Array) -> tuple[Array, int, int]:
    """Which pairs are finite; how many of the others differ, and how many are finite on one side."""
    finite_r, finite_t = np.isfinite(r), np.isfinite(t)
    kept: Array = finite_r & finite_t
    if kept.all():
        return kept, 0, 0
    nan_r, nan_t = np.isnan(r), np.isnan(t)
    inf_r, inf_t = np.isinf(r) & ~nan_r, np.isinf(t) & ~nan_t
    found = {
        "nan_reference": nan_r & ~nan_t,
        "nan_target": nan_t & ~nan_r,
        "nan_both": nan_r & nan_t,
        "inf_reference": inf_r & ~inf_t,
        "inf_target": inf_t & ~inf_r,
        "inf_same": inf_r & inf_t & (r == t),
        "inf_opposite": inf_r & inf_t & (r != t),
        "either": ~kept,
    }
    counts = {name: int(np.count_nonzero(where)) for name, where in found.items()}
    for name, count in counts.items():
        special[name] += count
    return kept, counts["either"] - counts["nan_both"] - counts["inf_same"], int(np.count_nonzero(finite_r != finite_t))


def _product(a: Array, b: Array) -> float:
    return float(np.dot(a.view(np.float64), b.view(np.float64)))


def contrast(
    reference: Buffer,
    reference_code: int,
    target: Buffer,
    target_code: int,
    state: bytearray,
    checksums: bytearray | None = None,
    /,
) -> None:
    """Add how the two streams differ to the state described in `pairs`.  ValueError if they are not equally long."""
    if len(state) != STATE.itemsize:
        raise ValueError(f"state has {len(state)} bytes; it must have {STATE.itemsize}")
    if checksums is not None:
        if len(checksums) != _CHECKSUMS.size:
            raise ValueError(f"checksums have {len(checksums)} bytes; they must have {_CHECKSUMS.size}")
        sides = zip((reference, target), _CHECKSUMS.unpack(checksums), strict=True)
        _CHECKSUMS.pack_into(checksums, 0, *(zlib.crc32(side, before) for side, before in sides))
    left, right = _dtype_of(reference_code), _dtype_of(target_code)
    found = np.frombuffer(state, STATE)[0]
    with np.errstate(all="ignore"):
        for exact in _pieces(reference, left, target, right):
            _add(found, exact, left, right)


def contrast_all(streams: list[tuple[Any, ...]], /) -> None:
    """`contrast` for each of a list of its arguments."""
    for each in streams:
        contrast(*each)


def _add(found: Any, exact: tuple[Array, Array], left: DType, right: DType) -> None:
    r, t = _widened(*exact)
    kept, differing, alone = _count_special(found["special"], r, t)
    r, t = np.where(kept, r, 0.0), np.where(kept, t, 0.0)
    size, distance = np.abs(r), _distance(r, t, exact)
    relative = np.where(distance == 0, 0.0, distance / size)
    ulps = _ulps(distance, size, left, right)
    largest = int(np.argmax(distance))
    if distance[largest] > found["max_absolute"]:
        found["max_absolute"], found["place"] = distance[largest], found["count"] + np.uint64(largest + 1)
    found["max_relative"] = max(found["max_relative"], relative.max())
    found["max_ulp"] = max(found["max_ulp"], ulps.max())
    found["count"] += r.size
    found["differing"] += np.count_nonzero(distance) + differing
    found["below_thousandth"] += np.count_nonzero(relative < 0.001) - alone
    found["below_five_thousandths"] += np.count_nonzero(relative < 0.005) - alone
    sums = found["sums"]
    sums["dot"][0] += _product(r, t)
    sums["reference"][0] += _product(r, r)
    sums["target"][0] += _product(t, t)
    sums["difference"][0] += _product(distance, distance)
    sums["absolute"][0] += distance.sum()
    sums["relative"][0] += relative[relative < np.inf].sum()
    sums["ulp"][0] += ulps.sum()


def totals(state: bytearray, /) -> tuple[Any, ...]:
    """The fields of a state in their order, the lanes of a sum added up."""
    numbers = _NUMBERS.unpack_from(state, _COUNTS.size)
    sums = [sum(numbers[start : start + _LANES]) for start in range(3, len(numbers), _LANES)]
    return (*_COUNTS.unpack_from(state), *numbers[:3], *sums)


_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)
_SCALAR = re.compile(
    rb'"[^"\\]*(?:\\.[^"\\]*)*"|(?:true|false|null|NaN|-?Infinity|-?\d(?:[\d.eE+-]*\d)?)(?![\w.+-])', re.DOTALL
)


def skip_json(buffer: Buffer, start: int, /) -> int:
    """The index behind the JSON value that begins at `start`.  ValueError if none begins there or the buffer ends first."""
    text = memoryview(buffer)
    if 0 <= start < len(text) and text[start] not in b"[{":
        scalar = _SCALAR.match(text, start)
        if scalar:
            return scalar.end()
    elif 0 <= start < len(text):
        depth = 0
        for mark in _MARKS.finditer(text, start):
            first = text[mark.start()]
            if first == 34 and mark.end() == mark.start() + 1:
                break
            depth += (first in b"[{") - (first in b"]}")
            if depth == 0:
                return mark.end()
    raise ValueError(f"no whole JSON value begins at byte {start}")


def let_go(*views: memoryview) -> None:
    """Let go of the pages that lie wholly within views of mapped files."""
    for view in views:
        mapping = view.obj
        if isinstance(mapping, mmap.mmap) and hasattr(mapping, "madvise"):
            first = _address(view) - _address(mapping)
            begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (first + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _address(memory: memoryview | mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
