"""Standards from numbers made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ulpscope.model.dtypes import Array
from ulpscope.replay.benchmark import beside, ratio
from ulpscope.replay.standards import (
    LIMITS,
    STANDARDS,
    Judgement,
    Measures,
    Standard,
    Status,
    binary_error_rate,
    cosine,
    error_balance,
    explained,
    inf_nan_errors,
    judge,
    measure,
    relative_errors,
    share_within,
    standard_of,
    ulp_errors,
    worst,
)


def wide(*numbers: float) -> Array:
    return np.array(numbers, np.float64)


def judged(reference: Array, target: Array, op: str = "softmax", dtype: str = "float32") -> Judgement:
    return judge(reference, reference.astype(target.dtype), target, op=op, dtype=dtype)


@pytest.mark.parametrize(
    ("op", "dtype", "standard"),
    [
        ("conv2d", "float32", Standard.THOUSANDTH),
        ("linear", "bfloat16", Standard.ULP),
        ("__add__", "float16", Standard.ABSOLUTE),
        ("relu", "float32", Standard.BINARY),
        ("softmax", "float32", Standard.BENCHMARK),
        ("linear", "int64", Standard.BINARY),
        ("linear", "float64", Standard.BENCHMARK),
        ("npu_fusion_attention", "float16", Standard.BENCHMARK),
    ],
)
def test_an_operator_has_the_standard_of_the_table(op: str, dtype: str, standard: Standard) -> None:
    assert standard_of(op, dtype) is standard


def test_the_tables_have_as_many_operators_as_the_original() -> None:
    counts = [list(STANDARDS.values()).count(standard) for standard in Standard]
    assert dict(zip(Standard, counts, strict=True)) == {
        Standard.BINARY: 61,
        Standard.ABSOLUTE: 30,
        Standard.ULP: 17,
        Standard.THOUSANDTH: 2,
        Standard.BENCHMARK: 0,
    }


def test_a_later_warning_does_not_hide_an_earlier_error() -> None:
    assert worst([Status.ERROR, Status.WARNING]) is Status.ERROR
    assert worst([Status.SKIP, Status.PASS]) is Status.PASS
    assert worst([]) is Status.SKIP


def test_cosine_of_a_right_angle_of_a_line_and_of_zeros() -> None:
    assert cosine(wide(1, 0), wide(0, 1)) == 0
    assert cosine(wide(3, 4), wide(6, 8)) == pytest.approx(1)
    assert cosine(wide(0, 0), wide(0, 0)) is None
    assert cosine(wide(0, 0), wide(1, 0)) == 0
    assert cosine(wide(1), wide(2)) is None
    assert cosine(wide(1e300, 1e300), wide(1e300, 1e300)) == pytest.approx(1)


def test_relative_errors_of_nothing_and_to_nothing() -> None:
    assert relative_errors(wide(0, 0, 4), wide(0, 1, 5)).tolist() == [0, math.inf, 0.25]
    assert share_within(wide(0.5, 0.0001, 0.0, 0.001), 0.001) == 0.5


def test_binary_error_rate_counts_unequal_elements_and_nan_equals_nan() -> None:
    assert binary_error_rate(wide(1, 2, math.nan, 4), wide(1, 3, math.nan, 4)) == 0.25


def test_inf_of_the_other_sign_and_a_nan_are_errors() -> None:
    found = inf_nan_errors(wide(math.inf, math.inf, math.nan, 1), wide(math.inf, -math.inf, 1, 1))
    assert found.tolist() == [False, True, True, False]


def test_error_balance_is_one_where_all_errors_are_on_one_side() -> None:
    assert error_balance(wide(1, 1, 1, 1), wide(2, 2, 2, 2)) == 1
    assert error_balance(wide(1, 1, 1, 1), wide(2, 0, 1, 1)) == 0


def test_an_ulp_is_that_of_the_reference_in_the_targets_dtype() -> None:
    one_ulp = 2.0**-23
    found = ulp_errors(wide(1, 2, 1.5), wide(1 + one_ulp, 2 + 4 * one_ulp, 1.5), LIMITS["float32"])
    assert found.tolist() == [1, 2, 0]
    assert ulp_errors(wide(0), wide(2.0**-149), LIMITS["float32"]).tolist() == [1]


def test_measures_are_those_of_the_standard() -> None:
    reference, target = wide(1, 2), np.array([1, 2], np.float32)
    rounded = reference.astype(np.float32)
    absolute = measure(reference, rounded, target, op="add", dtype="float32")
    assert (absolute.relative_error_rate, absolute.absolute_error_rate, absolute.inf_nan_error_rate) == (0, 0, 0)
    assert absolute.rmse is absolute.mean_ulp is None
    ulp = measure(reference, rounded, target, op="linear", dtype="float32")
    assert (ulp.max_ulp, ulp.mean_ulp, ulp.large_ulp_rate, ulp.rmse) == (0, 0, 0, None)


def test_small_values_are_judged_by_their_absolute_error() -> None:
    # 1e-7 is below the small value 1e-6 of float32; 5e-9 off is above its 1e-9.
    found = measure(wide(1e-7, 1), wide(1e-7, 1), wide(1.05e-7, 1), op="softmax", dtype="float32")
    assert found.small_value_error_rate == 1
    assert found.max_relative_error == 0


def test_the_status_order_cosine_then_small_errors_then_shares() -> None:
    assert judged(wide(1, 0), np.array([0, 1], np.float32)).status is Status.ERROR
    # Cosine comes first: errors below 0.001 do not save what points elsewhere.
    assert judged(wide(1e-5, 0), np.array([0, 1e-5], np.float32)).status is Status.ERROR
    tiny = judged(wide(1, 2), np.array([1.0005, 2], np.float32))
    assert tiny.status is Status.PASS
    assert "less than 0.001" in tiny.message
    assert tiny.measures.ten_thousandth is None


@pytest.mark.parametrize(
    ("dtype", "factor", "status"),
    [
        ("float32", 1.00001, Status.PASS),
        ("float32", 1.0005, Status.WARNING),
        ("float32", 1.005, Status.ERROR),
        ("bfloat16", 1.0005, Status.PASS),
        ("bfloat16", 1.005, Status.WARNING),
        ("float16", 1.05, Status.ERROR),
    ],
)
def test_shares_of_small_errors_depend_on_the_dtype(dtype: str, factor: float, status: Status) -> None:
    reference = np.linspace(100, 200, 50)
    assert judge(reference, reference, reference * factor, op="softmax", dtype=dtype).status is status


def test_a_nan_where_there_is_none_is_an_error_even_beside_small_errors() -> None:
    assert judged(wide(1, 2), np.array([1, math.nan], np.float32)).status is Status.ERROR


def test_what_overflows_the_targets_dtype_is_infinite_there() -> None:
    reference = wide(1e6, 1)
    with np.errstate(over="ignore"):
        rounded = reference.astype(np.float16)
    assert judge(reference, rounded, rounded, op="softmax", dtype="float16").status is Status.PASS


def test_integers_are_equal_or_wrong_and_large_ones_do_not_lose_bits() -> None:
    a, b = np.array([2**53 + 1]), np.array([2**53])
    found = judge(a, a, b, op="argmin", dtype="int64")
    assert (found.status, found.measures.binary_error_rate) == (Status.ERROR, 1)
    assert judge(a, a, a, op="argmin", dtype="int64").status is Status.PASS


def test_a_quantised_result_may_be_off_by_one() -> None:
    a, b = np.array([1, 2], np.int8), np.array([1, 3], np.int8)
    assert judge(a, a, b, op="npu_dynamic_quant", dtype="int8").status is Status.PASS
    assert judge(a, a, b, op="argmin", dtype="int8").status is Status.ERROR


def test_dropout_is_judged_by_its_zeros_and_only_from_a_hundred_elements_on() -> None:
    half, none = np.tile([0.0, 2.0], 100), np.ones(200)
    assert judged(half, half[::-1].copy(), op="dropout").status is Status.PASS
    assert judged(half, none, op="dropout").status is Status.ERROR
    assert judged(half[:50], none[:50], op="dropout").status is Status.PASS


def test_another_shape_is_an_error() -> None:
    assert judged(wide(1, 2), np.zeros((2, 1), np.float32)).status is Status.ERROR


# --- the ratio of two devices' errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "benchmark", "found"), [(2, 1, 2), (0, 0, 1), (1e-9, 0, 10000), (0, 3, 0)])
def test_a_ratio_to_no_error(target: float, benchmark: float, found: float) -> None:
    assert ratio(target, benchmark) == found


def errors(size: float) -> Measures:
    return Measures(
        rmse=size,
        small_value_error_rate=size,
        max_relative_error=size,
        mean_relative_error=size,
        error_balance=size,
    )


@pytest.mark.parametrize(("times", "status"), [(1, Status.PASS), (1.5, Status.WARNING), (3, Status.ERROR)])
def test_twice_the_benchmarks_error_is_too_much(times: float, status: Status) -> None:
    found = beside(errors(times), errors(1), standard=Standard.BENCHMARK, dtype="float32")
    assert found.status is status
    assert found.statuses["max_relative_error"] is (Status.PASS if times == 1 else Status.WARNING)


def test_error_balance_is_shown_and_not_counted() -> None:
    target = Measures(rmse=1, error_balance=9)
    found = beside(target, Measures(rmse=1, error_balance=1), standard=Standard.BENCHMARK, dtype="float32")
    assert (found.status, found.statuses["error_balance"]) == (Status.PASS, Status.ERROR)


@pytest.mark.parametrize(
    ("dtype", "mean", "large", "benchmark", "status"),
    [
        ("float32", 63, 0.9, 0.0, Status.PASS),
        ("float32", 99, 0.04, 0.0, Status.PASS),
        ("float32", 99, 0.9, 0.9, Status.PASS),
        ("float32", 99, 0.9, 0.8, Status.ERROR),
        ("float16", 1, 0.0009, 0.0, Status.PASS),
        ("bfloat16", 1, 0.01, 0.0, Status.ERROR),
    ],
)
def test_the_ulp_standard(dtype: str, mean: float, large: float, benchmark: float, status: Status) -> None:
    target = Measures(mean_ulp=mean, large_ulp_rate=large)
    found = beside(target, Measures(large_ulp_rate=benchmark), standard=Standard.ULP, dtype=dtype)
    assert found.status is status


def test_absolute_binary_and_thousandth_need_no_benchmark() -> None:
    good = Measures(inf_nan_error_rate=0, relative_error_rate=0, absolute_error_rate=0)
    bad = Measures(inf_nan_error_rate=0, relative_error_rate=0.001, absolute_error_rate=0)
    assert beside(good, Measures(), standard=Standard.ABSOLUTE, dtype="float32").status is Status.PASS
    assert beside(bad, Measures(), standard=Standard.ABSOLUTE, dtype="float32").status is Status.ERROR
    wrong = Measures(binary_error_rate=1e-9)
    assert beside(wrong, Measures(), standard=Standard.BINARY, dtype="int64").status is Status.ERROR
    for share, status in ((0.999, Status.PASS), (0.998, Status.ERROR)):
        found = beside(Measures(thousandth=share), Measures(), standard=Standard.THOUSANDTH, dtype="float32")
        assert found.status is status


# --- what rounding explains ---------------------------------------------------------------------------------------

UNIT = 2.0**-24


def explains(reference: Array, target: Array, response: float = 0.0, *, exact: bool = False) -> Status:
    rounded = reference.astype(target.dtype)
    return explained(
        reference, rounded, target, op="sum", dtype="float32", unit=UNIT, response=response, exact=exact
    ).status


def test_an_error_of_some_roundings_is_explained_and_one_of_many_is_not() -> None:
    assert explains(wide(1), np.array([1 + 16 * UNIT], np.float32)) is Status.PASS
    assert explains(wide(1), np.array([1 + 200 * UNIT], np.float32)) is Status.ERROR


def test_what_cancels_is_explained_by_how_much_its_inputs_move_it() -> None:
    assert explains(wide(0, 1e-12), np.array([1e-8, 0], np.float32)) is Status.ERROR
    assert explains(wide(0, 1e-12), np.array([1e-8, 0], np.float32), response=1e-8) is Status.PASS


def test_an_operator_that_only_moves_numbers_has_no_error() -> None:
    assert explains(wide(1), np.array([1 + 2 * UNIT], np.float32), exact=True) is Status.ERROR
    assert explains(wide(0.1), np.array([0.1], np.float32), exact=True) is Status.PASS


def test_nan_is_never_explained() -> None:
    assert explains(wide(1), np.array([math.nan], np.float32), response=math.inf) is Status.ERROR
    assert explains(wide(math.nan), np.array([math.nan], np.float32)) is Status.PASS
