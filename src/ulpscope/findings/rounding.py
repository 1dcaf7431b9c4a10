"""What rounding, and cancellation, explain of the error of a call: the limit above which it is believed to be its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ulpscope.compare.comparison import Comparison
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import CallId, Value

# A correct kernel may round its output and every partial result of a long sum; the sum itself is kept in float32 or better.
_OUTPUT_ROUNDINGS = 8.0
_SUM_ROUNDINGS = 256.0
_SUM_ROUND_OFF = 2.0**-24
# How much more relative error than its inputs a well-behaved call may have.
_GAIN = 16.0
# A mask is filled with the largest number there is: its size says nothing.
_FILLED = 1e30


def limit_of(call: CallId, ins: Sequence[Comparison], outs: Sequence[Comparison], into: float | None) -> float:
    """The largest error that rounding and the inputs' own error, `into`, may have given the outputs of a call."""
    rounding = max(coarsest(ins), coarsest(outs))
    kept = _cancelled(ins, outs)
    return (1.0 if Trait.SCALES in traits(call.name) else kept) * rounded(rounding) + kept * _GAIN * (into or 0.0)


def is_rounding(each: Comparison) -> bool:
    """Whether one call of correct arithmetic may have made the difference."""
    return each.error is not None and each.error <= rounded(each.rounding)


def rounded(rounding: float) -> float:
    """What rounding alone may make of a value in one call."""
    return _OUTPUT_ROUNDINGS * rounding + _SUM_ROUNDINGS * min(rounding, _SUM_ROUND_OFF)


def _cancelled(ins: Sequence[Comparison], outs: Sequence[Comparison]) -> float:
    """How much smaller the output is than its inputs: a difference or sum of large numbers keeps their errors."""
    small = [size for each in outs if (size := _size(each.reference, 0))]
    if not small:
        return 1.0
    numel = min(_numel(each.reference) for each in outs if each.reference is not None)
    large = [size for each in ins if (size := _size(each.reference, numel))]
    return max(1.0, max(large) / min(small)) if large else 1.0


def _size(value: Value | None, numel: int) -> float | None:
    """The root mean square of a tensor; where it is summed down to `numel` elements, that of such a sum."""
    stats = value.stats if value is not None else None
    norm = stats.norm if stats is not None else None
    if stats is None or norm is None or not norm < _FILLED or value is None or not value.shape:
        return None
    count = stats.numel  # not what the shape makes: a ragged size is -1 there
    return norm / math.sqrt(min(count, numel) or count) if count else None


def _numel(value: Value) -> int:
    """How many elements a value has, as far as that is known."""
    return max(0, math.prod(value.shape or ())) if value.stats is None else value.stats.numel


def coarsest(values: Iterable[Comparison]) -> float:
    """The largest unit round-off of some values."""
    return max([each.rounding for each in values], default=0.0)
