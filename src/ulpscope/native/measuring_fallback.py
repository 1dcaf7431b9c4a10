"""The functions of `_measure` in numpy, for machines where the extension could not be built.

Same arguments, same bytes: maximum, minimum, counts, CRC and fingerprint are equal to the extension's, sums, norms and
sketches agree to rounding.  Works on raw memory in chunks, so the memory it takes does not grow with the tensor.
"""

import ctypes
import math
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.native.schema import CRC, KIND_SIGNED, KIND_UNSIGNED, MEASURE, SKETCH, STATS

VERSION = 2

Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview | NDArray[Any]

_BY_ROWS, _MOST_ROWS, _NARROWEST = 128, 1024, 8
# From which size on a number is what masks are made of: of most dtypes, and of the one with this code.
_LIMIT, _HALF_LIMIT, _HALF = 2.0**29, 2.0**13, 2
_BUCKETS = 256
_CHUNK = 64 * _BUCKETS
_MASK_SEED, _FLIP_SEED = np.uint32(0x756C7073), np.uint32(0x6F706521)
_STRIPE = 1024
_STRIPE_STEP = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
_RAW: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}
_MASK = (1 << 64) - 1


def _small_floats(mantissa: int, bias: int, special: dict[int, float]) -> Array:
    """The 256 values of an 8-bit float with a sign bit; `special` names the codes that are no plain numbers."""
    codes = np.arange(256)
    exponent, fraction = (codes & 127) >> mantissa, (codes & ((1 << mantissa) - 1)).astype(np.float64)
    value = np.where(
        exponent > 0,
        np.ldexp(fraction + (1 << mantissa), exponent - bias - mantissa),
        np.ldexp(fraction, 1 - bias - mantissa),
    )
    table = np.where(codes & 128, -value, value).astype(np.float32)
    for code, number in special.items():
        table[code] = number
    return table


def _powers_of_two() -> Array:
    table = np.ldexp(1.0, np.arange(256) - 127)
    table[255] = np.nan
    return table.astype(np.float32)


_INF, _NAN = math.inf, math.nan
_E4M3FN = _small_floats(3, 7, {127: _NAN, 255: _NAN})
_E5M2 = _small_floats(2, 15, {124: _INF, 252: -_INF, **dict.fromkeys((125, 126, 127, 253, 254, 255), _NAN)})
_E4M3FNUZ = _small_floats(3, 8, {128: _NAN})
_E5M2FNUZ = _small_floats(2, 16, {128: _NAN})
_E8M0FNU = _powers_of_two()

# Per dtype code: item size, what max and min are, parts per element, and raw words -> numbers (integers of 64 bits are
# left alone, everything else comes out exact in float32 or float64).
_Read = Callable[[Array], Array]
_DTYPES: list[tuple[int, int, int, _Read]] = [
    (4, 0, 1, lambda raw: raw.view("<f4")),
    (8, 0, 1, lambda raw: raw.view("<f8")),
    (2, 0, 1, lambda raw: raw.view("<f2").astype(np.float32)),
    (2, 0, 1, lambda raw: (raw.astype(np.uint32) << 16).view(np.float32)),
    (1, KIND_SIGNED, 1, lambda raw: raw.view("i1").astype(np.int64)),
    (1, KIND_UNSIGNED, 1, lambda raw: raw.astype(np.uint64)),
    (2, KIND_SIGNED, 1, lambda raw: raw.view("<i2").astype(np.int64)),
    (4, KIND_SIGNED, 1, lambda raw: raw.view("<i4").astype(np.int64)),
    (8, KIND_SIGNED, 1, lambda raw: raw.view("<i8")),
    (1, KIND_UNSIGNED, 1, lambda raw: (raw != 0).astype(np.uint64)),
    (2, KIND_UNSIGNED, 1, lambda raw: raw.astype(np.uint64)),
    (4, KIND_UNSIGNED, 1, lambda raw: raw.astype(np.uint64)),
    (8, KIND_UNSIGNED, 1, lambda raw: raw),
    (8, 0, 2, lambda raw: raw.view("<f4")),
    (16, 0, 2, lambda raw: raw.view("<f8")),
    (4, 0, 2, lambda raw: raw.view("<f2").astype(np.float32)),
    (1, 0, 1, lambda raw: _E4M3FN[raw]),
    (1, 0, 1, lambda raw: _E5M2[raw]),
    (1, 0, 1, lambda raw: _E4M3FNUZ[raw]),
    (1, 0, 1, lambda raw: _E5M2FNUZ[raw]),
    (1, 0, 1, lambda raw: _E8M0FNU[raw]),
]


def _view(ptr: int, itemsize: int, shape: tuple[int, ...], stride: tuple[int, ...] | None) -> Array:
    """The tensor as an array of raw words on its own memory."""
    if not isinstance(shape, tuple) or not (stride is None or isinstance(stride, tuple)):
        raise TypeError("shape must be a tuple of int, stride a tuple of int or None")
    if itemsize not in _RAW:
        raise ValueError(f"itemsize is {itemsize}; it must be 1, 2, 4, 8 or 16")
    if stride is not None and len(stride) != len(shape):
        raise ValueError(f"shape has {len(shape)} dimensions; stride must have as many, it has {len(stride)}")
    numel = math.prod(shape)
    empty = numel == 0
    if stride is not None:  # those of a single element mean nothing
        stride = tuple(0 if empty or size == 1 else step for size, step in zip(shape, stride, strict=True))
    if min(shape, default=0) < 0 or min(stride or (), default=0) < 0 or (ptr <= 0 and not empty) or numel >> 59:
        raise ValueError("no such tensor: null pointer, negative size or stride, or sizes that overflow")
    if empty:
        return np.empty(0, _RAW[itemsize])
    if stride is None:
        shape, stride = (numel,), (1,)
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = memoryview((ctypes.c_char * (reach * itemsize)).from_address(ptr))
    return np.ndarray(shape, _RAW[itemsize], memory, strides=tuple(step * itemsize for step in stride))


def _chunks(view: Array, size: int) -> Iterator[Array]:
    """The elements in row-major order, `size` at a time; copies unless the memory is contiguous."""
    flat = view.reshape(-1) if view.flags.c_contiguous else view.flat
    for start in range(0, view.size, size):
        yield np.asarray(flat[start : start + size])


def _mix(z: Array) -> Array:
    """The mixing function of splitmix64, on uint64."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def _mix_short(h: Array) -> Array:
    """The mixing function of murmur3, on uint32."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed: Array = h ^ (h >> np.uint32(16))
    return mixed


@cache
def sketch_masks() -> NDArray[np.uint32]:
    """The signs of each turn: eight words of 32 elements."""
    return _mix_short(_MASK_SEED ^ np.arange(8 * _BUCKETS, dtype=np.uint32)).reshape(_BUCKETS, 8)


def sketch_turns(first_block: int, count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Of each block its turn, and 1 where all its signs are flipped."""
    block = np.arange(first_block, first_block + count, dtype=np.uint64)
    group, place = (block >> np.uint64(8)).astype(np.uint32), (block & np.uint64(255)).astype(np.uint32)
    turn = place ^ (place >> np.uint32(4))
    turn = (np.uint32(53) * turn + (group * np.uint32(0x9E3779B1) >> np.uint32(24))) & np.uint32(255)
    words = _mix_short(_FLIP_SEED ^ (turn + np.uint32(256) * (group >> np.uint32(5))))
    return turn, words >> (group & np.uint32(31)) & np.uint32(1)


def _sketch_of(values: Array, first_block: int) -> Array:
    """What these values (finite float64) add to the 256 buckets, the first being element 256 * first_block."""
    blocks = -(-values.size // _BUCKETS)
    padded = np.zeros(blocks * _BUCKETS)
    padded[: values.size] = values
    turn, flip = sketch_turns(first_block, blocks)
    words = (sketch_masks()[turn] ^ (np.uint32(0) - flip)[:, None]).astype("<u4")
    minus = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    signed = padded.reshape(blocks, _BUCKETS) * (1.0 - 2.0 * minus)
    source = (np.arange(_BUCKETS) - turn.astype(np.int64)[:, None]) & 255
    summed: Array = np.take_along_axis(signed, source, axis=1).sum(axis=0)
    return summed


def _modulus(parts: Array) -> Array:
    real, imaginary = parts[0::2].astype(np.float64), parts[1::2].astype(np.float64)
    if parts.dtype == np.float64:
        modulus = np.hypot(real, imaginary)
        # A finite number whose modulus overflows stays finite.
        modulus = np.where(np.isinf(modulus) & np.isfinite(real) & np.isfinite(imaginary), np.finfo("f8").max, modulus)
    else:
        modulus = np.sqrt(real * real + imaginary * imaginary)
    return np.where(np.isnan(real) | np.isnan(imaginary), np.nan, modulus)


class _Statistics:
    """Running statistics over chunks of numbers (float32, float64, int64 or uint64)."""

    def __init__(self) -> None:
        self.numel = self.nan = self.posinf = self.neginf = self.zero = 0
        self.total = self.square = self.scale = 0.0
        self.limits: tuple[Any, Any] | None = None

    def add(self, numbers: Array) -> None:
        self.numel += numbers.size
        self.zero += int(np.count_nonzero(numbers == 0))
        finite = numbers
        if numbers.dtype.kind == "f":
            mask = np.isfinite(numbers)
            if not mask.all():
                self.nan += int(np.count_nonzero(np.isnan(numbers)))
                self.posinf += int(np.count_nonzero(numbers == np.inf))
                self.neginf += int(np.count_nonzero(numbers == -np.inf))
                finite = numbers[mask]
        if not finite.size:
            return
        high, low = finite.max(), finite.min()
        if self.limits is not None:
            high, low = max(high, self.limits[0]), min(low, self.limits[1])
        self.limits = (high, low)
        exact = finite.astype(np.float64)
        self.total += float(exact.sum())
        self._add_squares(exact)

    def _add_squares(self, exact: Array) -> None:
        # Scaled by about the largest magnitude so far, for the squares may leave the range, but by a power of two: exact.
        scale = math.ldexp(1.0, min(math.frexp(float(np.abs(exact).max()))[1], 1023))
        if scale > self.scale and exact.any():
            self.square *= (self.scale / scale) ** 2
            self.scale = scale
        if self.scale > 0.0:
            scaled = exact / self.scale
            self.square += float(np.dot(scaled, scaled))

    def reaches(self, limit: float) -> bool:
        return self.limits is not None and max(self.limits[0], -self.limits[1]) >= limit

    def put(self, row: Array, integer: int) -> None:
        high, low = self.limits if self.limits is not None else (0, 0)
        form = "<i8" if integer == KIND_SIGNED else "<u8" if integer == KIND_UNSIGNED else "<f8"
        # Which of 0.0 and -0.0 wins depends on the order; adding zero makes both 0.0.
        limits = (high, low) if integer else (float(high) + 0.0, float(low) + 0.0)
        row["max_bits"], row["min_bits"] = np.array(limits, form).view("<u8")
        row["sum"], row["norm"] = self.total, self.scale * math.sqrt(self.square)
        row["nan"], row["posinf"], row["neginf"], row["zero"] = self.nan, self.posinf, self.neginf, self.zero


def measure(
    ptr: int,
    code: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    flags: int,
    payload_offset: int,
    payload_nbytes: int,
    sketch_offset: int,
    /,
) -> bytes:
    """The row described in `schema`, then the sketch.  ValueError for an unknown code, flag or no tensor."""
    if not 0 <= code < len(_DTYPES):
        raise ValueError(f"unknown dtype code {code}; codes are 0 to {len(_DTYPES) - 1}")
    if flags & ~(STATS | CRC | SKETCH | _BY_ROWS):
        raise ValueError(f"unknown flags {flags}; known are 1 STATS, 2 CRC, 4 SKETCH, 128 BY_ROWS")
    by_rows, flags = bool(flags & _BY_ROWS), flags & ~_BY_ROWS
    itemsize, integer, parts, read = _DTYPES[code]
    view = _view(ptr, itemsize, shape, stride)
    statistics, crc, sketch = _Statistics(), 0, np.zeros(_BUCKETS)
    with np.errstate(over="ignore", invalid="ignore"):
        for index, raw in enumerate(_chunks(view, _CHUNK)):
            if flags & CRC:
                crc = zlib.crc32(raw.data, crc)
            if not flags & (STATS | SKETCH):
                continue
            numbers = read(raw)
            if flags & STATS:
                statistics.add(_modulus(numbers) if parts == 2 else numbers)
            if flags & SKETCH:
                exact = numbers.astype(np.float64)
                values = np.where(np.isfinite(exact), exact, 0.0)
                sketch += _sketch_of(values, index * _CHUNK // _BUCKETS * parts)
        length = min(view.size * parts, _BUCKETS) if flags & SKETCH else 0
        row = np.zeros((), MEASURE.dtype)
        if flags & STATS:
            statistics.put(row, integer)
        row["numel"], row["crc"], row["kind"] = view.size, crc, flags | (integer if flags & STATS else 0)
        row["payload_offset"], row["payload_nbytes"] = payload_offset, payload_nbytes
        row["sketch_offset"], row["sketch_len"] = sketch_offset, length
        floats = not integer and parts == 1
        limit = (_HALF_LIMIT if code == _HALF else _LIMIT) if floats and itemsize > 1 and flags & STATS else math.inf
        more = _unmasked(view, read, limit, length) if statistics.reaches(limit) else b""
        rows = _rows(view, read, shape[-1]) if by_rows and shape and floats else b""
        row["known"] = len(rows) // 8 << 1 | bool(more)
        return row.tobytes() + sketch[:length].astype("<f4").tobytes() + more + rows


def _unmasked(view: Array, read: Callable[[Array], Array], limit: float, length: int) -> bytes:
    """Of the elements below the limit: how many, zeros, max, min, sum, norm, and the sketch with 0 for the others."""
    statistics, sketch = _Statistics(), np.zeros(_BUCKETS)
    for index, raw in enumerate(_chunks(view, _CHUNK)):
        exact = read(raw).astype(np.float64)
        kept = np.abs(exact) < limit
        statistics.add(exact[kept])
        sketch += _sketch_of(np.where(kept, exact, 0.0), index * _CHUNK // _BUCKETS)
    row = np.zeros((), MEASURE.dtype)
    statistics.put(row, 0)
    counts = np.array([statistics.numel, statistics.zero], "<u8")
    return counts.tobytes() + row.tobytes()[:32] + sketch[:length].astype("<f4").tobytes()


def _rows(view: Array, read: Callable[[Array], Array], width: int) -> bytes:
    """Of each row of the last dimension the sum with signs and the norm, where they are worth it."""
    count = view.size // width if width >= _NARROWEST else 0
    if not 1 < count <= _MOST_ROWS:
        return b""
    at = np.arange(width, dtype=np.uint32)
    words = sketch_masks()[at >> np.uint32(8) & np.uint32(255), at >> np.uint32(5) & np.uint32(7)]
    signs = 1.0 - 2.0 * (words >> (at & np.uint32(31)) & np.uint32(1))
    found = np.zeros((count, 2))
    for index, raw in enumerate(_chunks(view, width)):
        exact = read(raw).astype(np.float64)
        exact = np.where(np.isfinite(exact), exact, 0.0)
        found[index] = float(exact @ signs), math.sqrt(float(exact @ exact))
    return found.astype("<f4").tobytes()


def _memory_of(buffer: Buffer) -> memoryview:
    return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)


def gather(
    ptr: int,
    itemsize: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    start: int,
    nbytes: int,
    dest: Buffer,
    /,
) -> None:
    """Copy bytes [start, start + nbytes) of the tensor's row-major byte string into `dest`."""
    view = _view(ptr, itemsize, shape, stride)
    target = _memory_of(dest).cast("B")
    total = view.size * itemsize
    if target.readonly:
        raise BufferError("dest is read-only; give a writable buffer")
    if start < 0 or nbytes < 0 or start + nbytes > total or nbytes > len(target):
        raise ValueError(
            f"{nbytes} bytes from {start} do not fit a tensor of {total} bytes and a buffer of {len(target)}"
        )
    flat = view.reshape(-1) if view.flags.c_contiguous else view.flat
    done = 0
    while done < nbytes:
        element, skip = divmod(start + done, itemsize)
        raw = np.ascontiguousarray(flat[element : element + _CHUNK]).view(np.uint8)[skip:]
        count = min(len(raw), nbytes - done)
        target[done : done + count] = raw[:count].data
        done += count


def crc32(data: Buffer, value: int = 0, /) -> int:
    """The CRC-32 of zlib."""
    return zlib.crc32(_memory_of(data), value)


def _folded_product(a: Array, b: Array) -> Array:
    """The two halves of the 128-bit product of uint64, combined by exclusive or."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    cross = a1 * b0 + (a0 * b0 >> half)
    middle = a0 * b1 + (cross & low)
    folded: Array = (a1 * b1 + (cross >> half) + (middle >> half)) ^ (a * b)
    return folded


def fingerprint(ptr: int, itemsize: int, shape: tuple[int, ...], stride: tuple[int, ...] | None, /) -> bytes:
    """16 bytes that tell tensors apart; not cryptographic.

    The row-major bytes are cut into stripes of 1024, the last padded with zeros, each read as 128 little-endian words
    w[0..127].  For g = 0 and 1, with K[g][i] = mix(128 * g + i), mix as in `native`, and everything modulo 2**64:

        t[s]   = sum over even i of fold((w[i] ^ K[g][i]) * (w[i + 1] ^ K[g][i + 1])),  fold(p) = p ^ (p >> 64)
        sum[g] = sum over stripes s = 0, 1, ... of mix(t[s] + (s + 1) * STEP[g])
        result = mix(sum[g] ^ mix(L)) with L the number of bytes for g = 0, its complement for g = 1
    """
    view = _view(ptr, itemsize, shape, stride)
    keys = _mix(np.arange(256, dtype=np.uint64)).reshape(2, 128)
    sums, index = [0, 0], 0
    for raw in _chunks(view, 64 * _STRIPE // itemsize):
        data = raw.view(np.uint8)
        padded = np.zeros(-(-data.size // _STRIPE) * _STRIPE, np.uint8)
        padded[: data.size] = data
        words = padded.view("<u8").reshape(-1, 128)
        number = np.arange(index + 1, index + 1 + len(words), dtype=np.uint64)
        index += len(words)
        for g in (0, 1):
            keyed = words ^ keys[g]
            stripes = _folded_product(keyed[:, 0::2], keyed[:, 1::2]).sum(axis=1, dtype=np.uint64)
            sums[g] += int(_mix(stripes + number * np.uint64(_STRIPE_STEP[g])).sum(dtype=np.uint64))
    length = view.size * itemsize
    lengths = _mix(np.array([length, _MASK - length], np.uint64))
    return _mix(np.array([total & _MASK for total in sums], np.uint64) ^ lengths).astype("<u8").tobytes()
