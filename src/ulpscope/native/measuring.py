"""What one tensor's memory holds, read once: statistics, a CRC-32, a sketch, a fingerprint.

The functions come from the C extension where it could be built, else from `measuring_fallback`, with the same arguments
and the same results (sums, norms and sketches to rounding).  Nothing here knows torch: a tensor is a pointer, a dtype
code, a shape, and strides in elements (None when contiguous).  The caller keeps the memory alive.

    measure(ptr, code, shape, stride, flags, payload_offset, payload_nbytes, sketch_offset) -> bytes
    gather(ptr, itemsize, shape, stride, start, nbytes, dest) -> None
    crc32(data, value=0) -> int
    fingerprint(ptr, itemsize, shape, stride) -> bytes

`MEASURE_FOR_C` is `measure` for C, without a payload (None in the fallback); `measure.h` declares it.

`measure` returns one `ROW` (schema.py) followed by `sketch_len` float32.  `max_bits` and `min_bits` are the bits of a float64, of an
int64 where `kind` has KIND_SIGNED, or of a uint64 where it has KIND_UNSIGNED; a zero is always 0.0, never -0.0.  Maximum,
minimum, sum and norm are over the finite elements, and 0 when there is none: look at the counts.  For complex dtypes
they are of the modulus.

The sketch is a count sketch of 256 buckets over the elements in row-major order, real and imaginary parts being two
elements.  With i the position, j = i & 255, b = i >> 8 its block, p = b & 255 and g = b >> 8 the group of the block:

    mix(h) : h = (h ^ (h >> 16)) * 0x85EBCA6B
             h = (h ^ (h >> 13)) * 0xC2B2AE35
             return h ^ (h >> 16)                                  (all modulo 2**32)
    turn   = (53 * (p ^ (p >> 4)) + ((g * 0x9E3779B1) % 2**32 >> 24)) & 255
    mask   = bit j & 31 of mix(0x756C7073 ^ (8 * turn + (j >> 5)))
    flip   = bit g & 31 of mix(0x6F706521 ^ (turn + 256 * (g >> 5)))
    sketch[(j + turn) & 255] += -value if mask ^ flip else value

Each group has one block of each turn, found by arithmetic.  Blocks of one turn lie in the same buckets with the same signs
but for their flip: a device adds such blocks as they lie, and turns their sum once.  Two elements that meet in a bucket are
of different blocks; their signs agree by chance, for different turns by the masks, for one turn by the flips.

Where an element is as large as those that masks are made of (2**29, or 2**13 of float16; not of complex, integer and 8-bit dtypes), the
same follows of all that is smaller, as `UNMASKED`, with a sketch of the same length for which the others are 0.  `known` has bit 0
for that.  Asked for with BY_ROWS, two float32 for each row of the last dimension come last, their count being `known >> 1`: the sum of
its elements with signs, negated if bit j & 31 of mix(0x756C7073 ^ (8 * (j >> 8 & 255) + (j >> 5 & 7))) is set for the j-th, and
their norm.  Only of floats, of 2 to 1024 rows of 8 elements or more.

A non-finite value counts as 0.  A tensor of fewer than 256 elements has as many buckets as elements, so that its
sketch is the tensor itself up to signs.
"""

import numpy as np
from numpy.typing import NDArray

try:
    from ulpscope.native._measure import MEASURE_FOR_C, VERSION, crc32, fingerprint, gather, measure

    HAVE_EXTENSION = True
except ImportError:
    from ulpscope.native.measuring_fallback import VERSION, crc32, fingerprint, gather, measure

    HAVE_EXTENSION = False
    MEASURE_FOR_C = None
from ulpscope.native.measuring_fallback import sketch_masks
from ulpscope.native.schema import CRC, KIND_SIGNED, KIND_UNSIGNED, MEASURE, SKETCH, STATS

__all__ = [
    "BY_ROWS",
    "CRC",
    "HAVE_EXTENSION",
    "KIND_SIGNED",
    "KIND_UNSIGNED",
    "MEASURE_FOR_C",
    "ROW",
    "SKETCH",
    "STATS",
    "UNMASKED",
    "VERSION",
    "crc32",
    "fingerprint",
    "gather",
    "mask_limit",
    "measure",
    "sketch_masks",
    "sketch_relative_l2",
]

ROW = MEASURE.dtype
# Asks for two numbers by row; the other flags are the kinds of a measure.
BY_ROWS = 128

# Statistics of the elements below the limit of masks.
UNMASKED = np.dtype(
    [("numel", "<u8"), ("zero", "<u8"), ("max", "<f8"), ("min", "<f8"), ("sum", "<f8"), ("norm", "<f8")]
)
_LIMITS = {"torch.float16": 2.0**13, "torch.float32": 2.0**29, "torch.bfloat16": 2.0**29, "torch.float64": 2.0**29}


def mask_limit(dtype: str | None) -> float:
    """From which size on elements of a dtype are taken for those of a mask; infinite where none are."""
    return _LIMITS.get(str(dtype), float("inf"))


def sketch_relative_l2(reference: NDArray[np.float32], target: NDArray[np.float32]) -> float:
    """Estimate ||target - reference|| / ||reference|| of two tensors from their sketches.

    About 5 % off (one standard deviation) for large tensors, up to 9 % where blocks of 256 elements differ alike, exact below 256 elements, exactly 0 for equal ones.  nan
    when the lengths differ, 0 when both are all zero, inf when only the reference is.
    """
    if reference.shape != target.shape:
        return float("nan")
    left = reference.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = float(np.linalg.norm(target.astype(np.float64) - left))
    norm = float(np.linalg.norm(left))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else difference * float("inf")
    return difference / norm
