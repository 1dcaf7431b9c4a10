"""What a device answers for one tensor, and how that becomes a row of the dump. Plain numbers: no device is needed here.

An answer is `HEAD` 64-bit words and 256 float32 sums of the sketch; `cuda_kernels.py` says which words. A large or small
value is a key: an integer in the order of the values, so that maxima of all types are taken in one way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ulpscope.native import measuring, taps

HEAD = 12
BUCKETS = 256
ANSWER = HEAD + BUCKETS // 2

# What a dtype is to the kernels.
FLOAT, DOUBLE, SIGNED, UNSIGNED, BOOLEAN = range(5)
KINDS = {
    "float32": FLOAT, "float16": FLOAT, "bfloat16": FLOAT, "float64": DOUBLE,
    "int8": SIGNED, "int16": SIGNED, "int32": SIGNED, "int64": SIGNED,
    "uint8": UNSIGNED, "uint16": UNSIGNED, "uint32": UNSIGNED, "uint64": UNSIGNED, "bool": BOOLEAN,
}  # fmt: skip
_TOP = np.uint64(1 << 63)
_NONE64 = 0xFFFFFFFFFFFFFFFF
# Squares of float64 outside of these have left the range or lost bits; the scaled sums serve then.
_SMALLEST_SQUARE = 2.0**-900
_SCALE = 2.0**600

# Of each measured tensor: number of elements, kind, dump flags, floats of the sketch, CRC of as many zero bytes.
ABOUT = np.dtype([("numel", "<u8"), ("kind", "<u4"), ("flags", "<u4"), ("sketch", "<u4"), ("zeros", "<u4")])


class Room:
    """Memory for the rows and sketches of so many answers, used again and again: fresh memory costs more than filling it."""

    def __init__(self, count: int) -> None:
        self.rows = np.zeros(count, dtype=measuring.ROW)
        self.sketches = bytearray(4 * BUCKETS * count)


def _rows_by_c(
    answers: NDArray[np.int64], about: NDArray[np.void], room: Room
) -> tuple[NDArray[np.void], bytes | memoryview]:
    """The rows of measured tensors, without payloads, and their sketches, with places counted from the first. The dump flags
    are the same for all of them."""
    rows = room.rows[: len(answers)]
    size = taps.C.rows_of(answers, about, rows, room.sketches)
    return rows, memoryview(room.sketches)[:size]


def plain_rows_of(
    answers: NDArray[np.int64], about: NDArray[np.void], room: Room
) -> tuple[NDArray[np.void], bytes | memoryview]:
    """The same in Python."""
    rows = np.zeros(len(answers), dtype=measuring.ROW)
    flags = int(about["flags"][0])
    rows["numel"] = about["numel"]
    rows["kind"] = flags
    rows["payload_offset"] = _NONE64
    if flags & measuring.STATS:
        _put_statistics(rows, answers[:, :HEAD], about)
    if flags & measuring.CRC:
        rows["crc"] = answers[:, 10].astype(np.uint32) ^ about["zeros"]
    lengths = about["sketch"].astype(np.int64)
    rows["sketch_len"] = lengths
    rows["sketch_offset"] = 4 * (np.cumsum(lengths) - lengths)
    return rows, _sketches(answers, lengths)


rows_of = plain_rows_of if taps.C is None else _rows_by_c


def _put_statistics(rows: NDArray[np.void], head: NDArray[np.int64], about: NDArray[np.void]) -> None:
    kind = about["kind"]
    integer = kind >= SIGNED
    counts = head[:, 4:8].view(np.uint64)
    unseen = about["numel"] == counts[:, :3].sum(axis=1)
    for name, column in (("max_bits", 0), ("min_bits", 1)):
        key = head[:, column]
        exact = np.where(kind == UNSIGNED, key.view(np.uint64) ^ _TOP, key.view(np.uint64))
        bits = key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)
        # Which of 0.0 and -0.0 wins depends on the order; adding zero makes both 0.0.
        with np.errstate(invalid="ignore"):
            value = np.where(unseen, 0.0, bits.view(np.float64)) + 0.0
        rows[name] = np.where(integer, exact, value.view(np.uint64))
    rows["sum"] = head[:, 2].view(np.float64)
    rows["norm"] = _norms(head, kind)
    for place, name in enumerate(("nan", "posinf", "neginf", "zero")):
        rows[name] = counts[:, place]
    rows["kind"] |= np.where(kind == SIGNED, measuring.KIND_SIGNED, 0).astype(np.uint32)
    rows["kind"] |= np.where(kind >= UNSIGNED, measuring.KIND_UNSIGNED, 0).astype(np.uint32)


def _sketches(answers: NDArray[np.int64], lengths: NDArray[np.int64]) -> bytes:
    """The sums of all sketches, one after the other. Nearly all have their full length."""
    pieces, start = [], 0
    for place in [*np.flatnonzero(lengths < BUCKETS), len(answers)]:
        pieces.append(answers[start:place, HEAD:].tobytes())
        if place < len(answers):
            pieces.append(answers[place, HEAD:].tobytes()[: 4 * lengths[place]])
        start = place + 1
    return b"".join(pieces)


def _norms(head: NDArray[np.int64], kind: NDArray[np.void]) -> NDArray[np.float64]:
    square, shrunk, grown = (np.ascontiguousarray(head[:, place]).view(np.float64) for place in (3, 8, 9))
    with np.errstate(invalid="ignore", over="ignore"):
        norm = np.sqrt(square)
        if (kind == DOUBLE).any():
            norm = np.where((kind == DOUBLE) & ~np.isfinite(square), np.sqrt(shrunk) * _SCALE, norm)
            norm = np.where((kind == DOUBLE) & (square < _SMALLEST_SQUARE), np.sqrt(grown) / _SCALE, norm)
    return norm
