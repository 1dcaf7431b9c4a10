"""The errors of two devices beside each other, both against the same CPU in higher precision: `api_precision_compare`.

A device is held to its operator's standard; where that is the benchmark, its error may not exceed a multiple of the other
device's. Pure functions of `Measures`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ulpscope.replay.standards import THOUSANDTH, Measures, Standard, Status, worst

# Measure -> ratio above which it is an error; above 1 it is a warning.
RATIOS: dict[str, float] = {
    "small_value_error_rate": 2,
    "rmse": 2,
    "max_relative_error": 10,
    "mean_relative_error": 2,
    "error_balance": 2,
}
_NOT_COUNTED = frozenset({"error_balance"})
NO_BENCHMARK_ERROR = 10000.0
MEAN_ULP, LARGE_ULP_32, LARGE_ULP_16 = 64, 0.05, 0.001
_ZERO = {
    Standard.ABSOLUTE: ("inf_nan_error_rate", "relative_error_rate", "absolute_error_rate"),
    Standard.BINARY: ("binary_error_rate",),
}


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Per measure its number (a ratio, where the standard is the benchmark) and status; and what they amount to."""

    standard: Standard
    numbers: dict[str, float]
    statuses: dict[str, Status]

    @property
    def status(self) -> Status:
        return worst(status for name, status in self.statuses.items() if name not in _NOT_COUNTED)


def ratio(target: float, benchmark: float) -> float:
    """How many times the benchmark's error; without any there, 1 if the target has none either."""
    if benchmark == 0:
        return 1.0 if target == 0 else NO_BENCHMARK_ERROR
    return target / benchmark


def ratio_status(name: str, found: float) -> Status:
    if found != found or found > RATIOS[name]:
        return Status.ERROR
    return Status.WARNING if found > 1 else Status.PASS


def beside(target: Measures, benchmark: Measures, *, standard: Standard, dtype: str) -> Verdicts:
    """The target's errors against its standard, and where that says so against the benchmark's."""
    numbers: dict[str, float] = {}
    statuses: dict[str, Status] = {}
    if standard is Standard.BENCHMARK:
        for name in RATIOS:
            own, other = getattr(target, name), getattr(benchmark, name)
            if own is not None and other is not None:
                numbers[name] = ratio(own, other)
                statuses[name] = ratio_status(name, numbers[name])
        # A nan or inf of its own is an error whatever the ratios of the other elements are.
        if target.inf_nan_error_rate:
            numbers["inf_nan_error_rate"] = target.inf_nan_error_rate
            statuses["inf_nan_error_rate"] = Status.ERROR
    elif standard is Standard.THOUSANDTH:
        if target.thousandth is not None:
            numbers["thousandth"] = target.thousandth
            statuses["thousandth"] = Status.PASS if target.thousandth >= THOUSANDTH else Status.ERROR
    elif standard is Standard.ULP:
        _ulp(target, benchmark, dtype, numbers, statuses)
    else:
        for name in _ZERO[standard]:
            own = getattr(target, name)
            if own is not None:
                numbers[name] = own
                statuses[name] = Status.PASS if own == 0 else Status.ERROR
    return Verdicts(standard, numbers, statuses)


def _ulp(
    target: Measures, benchmark: Measures, dtype: str, numbers: dict[str, float], statuses: dict[str, Status]
) -> None:
    mean, large = target.mean_ulp, target.large_ulp_rate
    if mean is None or large is None:
        return
    other = benchmark.large_ulp_rate
    passes = other is not None and large <= other
    if dtype == "float32":
        passes = passes or mean < MEAN_ULP or large < LARGE_ULP_32
    else:
        passes = passes or large < LARGE_ULP_16
    numbers |= {"mean_ulp": mean, "large_ulp_rate": large}
    if other is not None:
        numbers["large_ulp_ratio"] = ratio(large, other)
    statuses["large_ulp_rate"] = Status.PASS if passes else Status.ERROR
