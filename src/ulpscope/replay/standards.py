"""How the output of one API is judged against the same API in higher precision: tables of limits, and pure functions.

Two questions, two answers. `judge` gives the status of the older tools, in their order: cosine, the largest absolute error,
then shares of small relative errors. `explained` asks whether rounding can have made the difference: its limit comes from
what one rounding of the inputs does to the result, so it is the same rule for every operator. `benchmark.py` has the third,
the ratio of two devices' errors. numpy only.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from ulpscope.model.dtypes import Array


class Status(enum.Enum):
    """What became of a check."""

    PASS = "pass"
    WARNING = "warning"
    ERROR = "error"
    SKIP = "SKIP"


class Standard(enum.Enum):
    """What an operator is held to."""

    BINARY = "binary"
    ABSOLUTE = "absolute"
    ULP = "ulp"
    THOUSANDTH = "thousandth"
    BENCHMARK = "benchmark"


_LISTED: dict[Standard, str] = {
    Standard.ABSOLUTE: """mul mul_ __mul__ __imul__ __rmul__ add add_ __add__ __iadd__ __radd__ div div_ __div__ __idiv__
        divide divide_ leaky_relu leaky_relu_ prelu reciprocal reciprocal_ rsqrt rsqrt_ square square_ sub sub_ rsub
        __isub__ __sub__""",
    Standard.BINARY: """abs abs_ absolute absolute_ argmin bitwise_and bitwise_and_ broadcast_to ceil ceil_ equal fill_
        flatten floor floor_ gather greater greater_ greater_equal greater_equal_ isfinite isnan less less_ less_equal
        less_equal_ logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ masked_fill masked_fill_
        max_pool3d maximum minimum neg neg_ nonzero not_equal not_equal_ one_hot pad relu reshape round round_ select
        sign sign_ sort tile topk transpose transpose_ tril tril_ triu triu_ type_as""",
    Standard.ULP: """__matmul__ addbmm addbmm_ addmm addmm_ baddbmm baddbmm_ bilinear bmm chain_matmul hspmm linear
        matmul mm mv smm sspaddmm""",
    Standard.THOUSANDTH: "conv1d conv2d",
}
# Operator -> standard; all others are held to the benchmark.
STANDARDS: dict[str, Standard] = {name: standard for standard, names in _LISTED.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of one dtype."""

    rtol: float
    small_value: float
    small_value_atol: float
    least_exponent: int
    mantissa_bits: int
    large_ulp: float


LIMITS: dict[str, Limits] = {
    "float32": Limits(1e-6, 1e-6, 1e-9, -126, 23, 32),
    "float16": Limits(1e-3, 1e-3, 1e-5, -14, 10, 1),
    "bfloat16": Limits(4e-3, 1e-3, 1e-5, -126, 7, 1),
}
_HALVES = frozenset({"float16", "bfloat16"})

LEAST_COSINE = 0.99
NEGLIGIBLE = 0.001
# The share of elements that must be within 1 %, 0.1 % and 0.01 %.
HUNDREDTH, THOUSANDTH, TEN_THOUSANDTH = 0.99, 0.999, 0.9999
DROPOUTS = frozenset(
    {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "native_dropout"}
)
_FEW_ZEROS, _ZEROS_APART = 100, 0.1
# How many roundings a kernel may be away from its definition. Kernels of 16 bits add up in 32, so they need fewer.
ROUNDINGS = {"float64": 256.0, "float32": 64.0, "float16": 16.0, "bfloat16": 8.0}
_SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}


def standard_of(op: str, dtype: str) -> Standard:
    """The standard of an operator's result; numbers that are counted, not measured, are equal or wrong."""
    if not dtype.startswith(("float", "bfloat", "complex")):
        return Standard.BINARY
    found = STANDARDS.get(op, Standard.BENCHMARK)
    measured = found in (Standard.ABSOLUTE, Standard.ULP)
    return Standard.BENCHMARK if measured and dtype not in LIMITS else found


def worst(statuses: Iterable[Status]) -> Status:
    """An error outweighs a warning wherever it stands; SKIP only where nothing was judged."""
    order = (Status.SKIP, Status.PASS, Status.WARNING, Status.ERROR)
    return max(statuses, key=order.index, default=Status.SKIP)


@dataclass(frozen=True, slots=True)
class Measures:
    """The numbers of one output, in the order of the older tools' columns. None was not measured."""

    cosine: float | None = None
    max_abs_error: float | None = None
    hundredth: float | None = None
    thousandth: float | None = None
    ten_thousandth: float | None = None
    binary_error_rate: float | None = None
    error_balance: float | None = None
    rmse: float | None = None
    small_value_error_rate: float | None = None
    max_relative_error: float | None = None
    mean_relative_error: float | None = None
    inf_nan_error_rate: float | None = None
    relative_error_rate: float | None = None
    absolute_error_rate: float | None = None
    max_ulp: float | None = None
    mean_ulp: float | None = None
    large_ulp_rate: float | None = None


MEASURES = tuple(field.name for field in fields(Measures))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The numbers of one output, what they amount to, and why."""

    measures: Measures
    status: Status
    message: str = ""


# --- measures -----------------------------------------------------------------------------------------------------


def cosine(reference: Array, target: Array) -> float | None:
    """Cosine of the angle between the two; None for fewer than two elements or where both are zero, 0 where one is."""
    a, b = _flat(reference), _flat(target)
    if a.size < 2:
        return None
    scale_a, scale_b = float(np.max(np.abs(a))), float(np.max(np.abs(b)))
    if not scale_a and not scale_b:
        return None
    if not scale_a or not scale_b:
        return 0.0
    a, b = a / scale_a, b / scale_b
    product = np.vdot(a, b).real
    return float(product / (np.linalg.norm(a) * np.linalg.norm(b)))


def relative_errors(reference: Array, target: Array) -> Array:
    """|target - reference| / |reference|; 0 where both are zero, inf where only the reference is."""
    size, error = np.abs(reference), np.abs(target - reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.where(error == 0, 0.0, error / size)
    return found


def share_within(relative: Array, limit: float) -> float:
    """The share of elements whose relative error is below a limit."""
    return float(np.count_nonzero(relative < limit) / relative.size) if relative.size else 1.0


def binary_error_rate(reference: Array, target: Array) -> float:
    """The share of elements that are not equal; nan equals nan."""
    if not reference.size:
        return 0.0
    same = (reference == target) | (_nan(reference) & _nan(target))
    return float(np.count_nonzero(~same) / reference.size)


def inf_nan_errors(rounded: Array, target: Array) -> Array:
    """Where one is not finite and the other is not the same: nan against a number, inf against another inf."""
    odd = ~np.isfinite(rounded) | ~np.isfinite(target)
    wrong: Array = odd & ~((rounded == target) | (_nan(rounded) & _nan(target)))
    return wrong


def error_balance(reference: Array, target: Array) -> float:
    """How one-sided the errors are: 0 as many above as below, 1 all on one side."""
    above, below = np.count_nonzero(target > reference), np.count_nonzero(target < reference)
    return abs(above - below) / reference.size if reference.size else 0.0


def ulp_errors(reference: Array, target: Array, limits: Limits) -> Array:
    """|target - reference| in units of the last place that the reference has in the target's dtype."""
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.abs(reference)))
    exponent = np.maximum(exponent, limits.least_exponent)
    found: Array = np.abs(target - reference) * np.exp2(limits.mantissa_bits - exponent)
    return found


def measure(reference: Array, rounded: Array, target: Array, *, op: str, dtype: str) -> Measures:
    """Every number of the standard that an operator is held to, of arrays of the same shape.

    `rounded` is the reference in the dtype of the target: what is infinite there may be finite in the reference."""
    standard = standard_of(op, dtype)
    unequal = binary_error_rate(rounded, target) if standard is Standard.BINARY else None
    if target.dtype.kind in "biu":
        return Measures(binary_error_rate=unequal, max_abs_error=_largest(rounded, target))
    odd = inf_nan_errors(rounded, target)
    finite = np.isfinite(rounded) & np.isfinite(target)
    a, b = _flat(reference)[finite.ravel()], _flat(target)[finite.ravel()]
    limits = LIMITS.get(dtype, LIMITS["float32"])
    relative = relative_errors(a, b)
    small = np.abs(a) < limits.small_value
    small_errors = np.abs(b[small] - a[small]) > limits.small_value_atol
    small_rate, normal = _rate(small_errors), relative[~small]
    found: dict[str, float | None] = {
        "cosine": cosine(a, b),
        "max_abs_error": _largest(a, b),
        "binary_error_rate": unequal,
        "thousandth": share_within(relative, 1e-3),
    }
    if dtype in _HALVES:
        found["hundredth"] = share_within(relative, 1e-2)
    else:
        found["ten_thousandth"] = share_within(relative, 1e-4)
    if standard is Standard.BINARY:
        return Measures(**found)
    if standard is Standard.ABSOLUTE:
        found["inf_nan_error_rate"] = _rate(odd)
        found["relative_error_rate"] = _rate(normal > limits.rtol)
        found["absolute_error_rate"] = small_rate
    elif standard is Standard.ULP:
        ulps = ulp_errors(a, b, limits)
        found["max_ulp"] = float(np.max(ulps)) if ulps.size else 0.0
        found["mean_ulp"] = float(np.mean(ulps)) if ulps.size else 0.0
        found["large_ulp_rate"] = _rate(ulps > limits.large_ulp)
    else:
        # Beside the nearest number of the target's own dtype: a result that is rounded right is on neither side.
        found["error_balance"] = error_balance(_flat(rounded)[finite.ravel()], b)
        errors = np.abs(b - a)[~small]
        found["rmse"] = float(np.sqrt(np.mean(np.square(errors)))) if errors.size else 0.0
        found["small_value_error_rate"] = small_rate
        found["max_relative_error"] = float(np.max(normal)) if normal.size else 0.0
        found["mean_relative_error"] = float(np.mean(normal)) if normal.size else 0.0
        found["inf_nan_error_rate"] = _rate(odd) or None
    return Measures(**found)


# --- the status of the older tools --------------------------------------------------------------------------------


def judge(reference: Array, rounded: Array, target: Array, *, op: str, dtype: str) -> Judgement:
    """The status of one output. Arrays of another shape are an error; of no elements there is nothing to say."""
    if reference.shape != target.shape:
        return Judgement(Measures(), Status.ERROR, f"Shapes differ: {reference.shape} and {target.shape}.")
    if not target.size:
        return Judgement(Measures(), Status.PASS, "There is nothing in it.")
    if op in DROPOUTS:
        return judge_dropout(reference, target)
    found = measure(reference, rounded, target, op=op, dtype=dtype)
    if not dtype.startswith(("float", "bfloat", "complex")):
        return _counted(found, op, dtype)
    if np.any(inf_nan_errors(rounded, target)):
        return Judgement(found, Status.ERROR, "Inf or nan stands where the other has none.")
    if found.cosine is not None and not found.cosine > LEAST_COSINE:
        text = f"Cosine similarity is less than {LEAST_COSINE}, consider as error, skip other check and set to SPACE."
        return Judgement(_without_shares(replace(found, max_abs_error=None), op, dtype), Status.ERROR, f"\n{text}\n")
    if found.max_abs_error is not None and found.max_abs_error < NEGLIGIBLE:
        text = f"Max abs error is less than {NEGLIGIBLE}, consider as pass, skip other check and set to SPACE."
        return Judgement(_without_shares(found, op, dtype), Status.PASS, f"\n{text}\n")
    coarse, fine = (
        (("hundredth", HUNDREDTH), ("thousandth", THOUSANDTH))
        if dtype in _HALVES
        else (("thousandth", THOUSANDTH), ("ten_thousandth", TEN_THOUSANDTH))
    )
    for (name, least), status in ((coarse, Status.ERROR), (fine, Status.WARNING)):
        share = getattr(found, name)
        if share is not None and not share > least:
            return Judgement(
                found, status, f"{share:.4%} of the elements are within one {name}, not above {least:.2%}."
            )
    return Judgement(found, Status.PASS)


def _without_shares(found: Measures, op: str, dtype: str) -> Measures:
    """Shares of small errors are blank where another check has decided, but for the standard that is one."""
    kept = found.thousandth if standard_of(op, dtype) is Standard.THOUSANDTH else None
    return replace(found, hundredth=None, thousandth=kept, ten_thousandth=None)


def judge_dropout(reference: Array, target: Array) -> Judgement:
    """Random, so only the share of zeros is compared, and of few elements not even that."""
    apart = abs(np.count_nonzero(reference == 0) - np.count_nonzero(target == 0)) / max(target.size, 1)
    passes = target.size < _FEW_ZEROS or apart < _ZEROS_APART
    status = Status.PASS if passes else Status.ERROR
    return Judgement(Measures(), status, f"Dropout: the shares of zeros are {apart:.2%} apart.")


def _counted(found: Measures, op: str, dtype: str) -> Judgement:
    shown = Measures(binary_error_rate=found.binary_error_rate)
    if not found.binary_error_rate:
        text = f"Compare algorithm is not supported for {dtype} data. Only judged by Error Rate.\n"
        return Judgement(shown, Status.PASS, text)
    if "quant" in op and found.max_abs_error is not None and found.max_abs_error <= 1:
        return Judgement(found, Status.PASS, "Quantised: off by one at most.")
    return Judgement(shown, Status.ERROR, f"{found.binary_error_rate:.4%} of the elements are not equal.")


# --- our own: what rounding explains ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Explained:
    """The largest error of an output, and how much of it rounding explains."""

    error: float
    limit: float

    @property
    def status(self) -> Status:
        return Status.PASS if self.error <= self.limit else Status.ERROR


def explained(
    reference: Array, rounded: Array, target: Array, *, op: str, dtype: str, unit: float, response: float, exact: bool
) -> Explained:
    """Whether rounding explains the error of an output.

    `unit` is the unit round-off of the coarsest dtype of the call, `response` the largest change of the result when every
    input is moved by its own unit round-off; `exact` says that the operator only moves or picks numbers."""
    if reference.shape != target.shape:
        return Explained(math.inf, 0.0)
    if not target.size:
        return Explained(0.0, 0.0)
    if op in DROPOUTS:
        return Explained(0.0 if judge_dropout(reference, target).status is Status.PASS else math.inf, 0.0)
    if not dtype.startswith(("float", "bfloat", "complex")):
        return Explained(_largest(rounded, target) if binary_error_rate(rounded, target) else 0.0, 0.0)
    if np.any(inf_nan_errors(rounded, target)):
        return Explained(math.inf, 0.0)
    if exact:
        return Explained(_largest(rounded, target), 0.0)
    finite = np.isfinite(rounded) & np.isfinite(target)
    a, b = _flat(reference)[finite.ravel()], _flat(target)[finite.ravel()]
    if not a.size:
        return Explained(0.0, 0.0)
    scale = float(np.max(np.abs(a)))
    coarse = next((name for name, digits in _BY_UNIT if unit >= digits), "float64")
    limit = ROUNDINGS[coarse] * (response + unit * scale) + _SMALLEST.get(dtype, 0.0)
    return Explained(_largest(a, b), limit)


_BY_UNIT = (("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 2.0**-24))


def _flat(array: Array) -> Array:
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    return np.asarray(array).reshape(-1).astype(wide)


def _nan(array: Array) -> Array:
    return np.isnan(array) if array.dtype.kind in "fc" else np.zeros(array.shape, bool)


def _rate(wrong: Array) -> float:
    return float(np.count_nonzero(wrong) / wrong.size) if wrong.size else 0.0


def _largest(a: Array, b: Array) -> float:
    if not a.size:
        return 0.0
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        # Python's integers: a difference of uint8 or int64 may not fit its type.
        different = a != b
        pairs = zip(a[different].tolist(), b[different].tolist(), strict=True)
        return float(max((abs(int(x) - int(y)) for x, y in pairs), default=0))
    x, y = _flat(a), _flat(b)
    with np.errstate(invalid="ignore"):
        error = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(y - x))
    return float(np.max(error))
