"""What rounding explains: limits for the error of one call, from dtype, operator and length of its sums.

Units are those of `store.ledger_file.Measure`. A result that is rounded once and to nearest has a root mean square below 0.58
and no element above 1. The limits leave room for other but correct kernels: other orders of summation, up to four
partial sums in the working precision, approximations that are off by a unit or two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ulpscope.analyze.measured import MARGIN, measured
from ulpscope.model.operators import Trait, traits
from ulpscope.store.ledger_file import Measure, Row

# Unit round-off: half the distance of 1 to the next number.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Where a kernel was never measured, the limit in a wide dtype is so many times as wide.
UNMEASURED = 2.0
# Factors of products that are rounded before they are multiplied, by dropping digits or to nearest.
FACTORS = {"tf32 factors": 2.0**-11, "bf16 factors": 2.0**-8}
UNITS |= FACTORS
LOW = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})


@dataclass(frozen=True, slots=True)
class Limit:
    """Above any, rounding does not explain the call. `bias` is the mean relative error that chance explains, `misrounded` the
    share of results that may be another than the nearest number of a low precision. `assumed`: nobody has measured this kernel.
    """

    rms: float
    worst: float
    bias: float
    misrounded: float = 0.2
    assumed: bool = False


def limit(row: Row, measure: Measure) -> Limit:
    """What right kernels of this name were seen to do, or theory where that is wider; one or two elements have no
    root mean square, and that of a few is near the worst of them."""
    found = theory(row, measure)
    known = measured(kernel_name(row), measure.dtype, row.device, measure.place)
    wide = UNMEASURED if known is None and measure.dtype not in LOW else 1.0
    if known is not None:
        found = Limit(
            found.rms * max(1.0, MARGIN * known.rms),
            found.worst * max(1.0, MARGIN * known.worst),
            found.bias * max(1.0, MARGIN * known.lean),
            max(found.misrounded, MARGIN * known.misrounded),
        )
    rms, worst = found.rms * wide, found.worst * wide
    few = min(1.0, 2 / max(1, math.prod(measure.shape)))
    lean = found.bias if row.kind == "contraction" else found.bias * wide  # how sums lean is known from theory
    return Limit(rms + few * max(0.0, worst - rms), worst, lean, found.misrounded, assumed=known is None)


def kernel_name(row: Row) -> str:
    """One name for all forms of a kernel: `mul` for `mul_` and `_foreach_mul_` too."""
    return row.name.removeprefix("_foreach_").rstrip("_")


def theory(row: Row, measure: Measure) -> Limit:
    """The limit from theory alone."""
    found = _theory(row, measure)
    return replace(found, misrounded=0.5) if Trait.STEPWISE in traits(row.name) else found


def _theory(row: Row, measure: Measure) -> Limit:
    low = measure.dtype in LOW
    length = math.sqrt(max(1, measure.terms))
    name = kernel_name(row)
    known = traits(name)
    if Trait.ONE_BY_ONE in known or (Trait.SUMS_BESIDE in known and measure.place > 0):
        return Limit(2.0 + 4.0 * length, 16.0 + 32.0 * length, 1.0)
    if Trait.ROUNDED_FACTOR in known:
        return Limit(1.5, 6.0, 1.2) if low else Limit(2.0, 16.0, 1.2)
    if measure.dtype in FACTORS:
        return Limit(8.0, 64.0, 4.0) if row.kind == "other" else Limit(1.5, 10.0, 1.2)
    if row.kind == "map":
        if name == "div":
            # By a scalar: the rounded reciprocal is multiplied.
            return Limit(1.0, 2.5, 0.2) if low else Limit(2.0, 4.0, 1.2)
        if Trait.ROUNDED_ONCE in known and row.scalars and not low:
            return Limit(1.6, 3.0, 1.2)  # the scalar is rounded to the dtype first
        if Trait.ROUNDED_ONCE in known:
            return Limit(1.0, 2.5, 0.4)
        if Trait.CANCELS in known and low:
            return Limit(1.0, 4.0, 0.2)
        if Trait.STEPWISE in known and low:
            return Limit(1.2, 4.0, 0.3)
        return Limit(1.0, 2.5, 0.2) if low else Limit(2.0, 16.0, 0.5)
    if row.kind == "norm":
        # The reciprocal root, or a mean, is rounded once for many results: these lean together.
        return Limit(1.0, 4.0, 0.2) if low else Limit(4.0, 32.0, 1.2)
    if name.startswith("upsample") and low:
        return Limit(1.6, 10.0, 1.2)  # few terms, one by one on CUDA; their weights are rounded, each for many results
    if name == "convolution_backward" and not low:
        # Sums over all samples and places, one by one on some devices, in tensor cores that drop digits on others.
        return Limit(2.0 + length, 16.0 + 12.0 * length, 0.4 + 0.02 * length)
    if name.startswith("convolution") and measure.dtype == "float16":
        # The CPU's adds up samples and places of the kernel in the working precision.
        return Limit(2.0, 16.0, 0.2)
    if low:
        # A fused kernel rounds between its stages.
        return Limit(1.5, 24.0, 1.2) if row.kind == "other" else Limit(0.8, 6.0, 0.2)
    if row.kind == "other":
        # Fused kernels take quick exponentials that are good to 20 bits.
        return Limit(16.0 + length, 256.0 + 16.0 * length, 4.0)
    return Limit(2.0 + 0.5 * length, 16.0 + 6.0 * length, 0.4)
