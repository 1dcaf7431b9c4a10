"""What two values are to each other, from numbers one can check by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ulpscope.compare.comparison import Code, Evidence, Level
from ulpscope.compare.metrics import contrast
from ulpscope.compare.verdict import elements_error, rounding_of, scalar_verdict, statistics_error, tensor_verdict
from ulpscope.model.records import Role, Slot, Stats, ToldStats, Value

SLOT = Slot(Role.OUTPUT, (0,))


def tensor(dtype: str = "torch.float32", **more: Any) -> Value:
    return Value(SLOT, "torch.Tensor", dtype=dtype, shape=(4,), **more)


def plain(kind: str, scalar: Any) -> Value:
    return Value(SLOT, kind, scalar=scalar)


def told(largest: float | None, smallest: float | None, mean: float | None, norm: float | None) -> ToldStats:
    return ToldStats(4, largest, smallest, mean, norm)


def error(reference: list[float], target: list[float]) -> float:
    return elements_error(contrast(np.array(reference, np.float64), np.array(target, np.float64)))


def test_equal_elements_have_no_error() -> None:
    assert error([1, -2, 0], [1, -2, 0]) == 0


def test_the_error_is_the_length_of_the_difference_over_that_of_the_reference() -> None:
    assert error([3, 4], [3, 4.5]) == pytest.approx(0.5 / 5)


def test_one_wrong_element_among_many_is_not_averaged_away() -> None:
    reference = np.ones(1_000_000)
    target = reference.copy()
    target[5] = 2.0
    assert elements_error(contrast(reference, target)) == pytest.approx(1 / 16)


def test_a_nan_at_another_place_has_no_scale() -> None:
    assert error([1, math.nan], [math.nan, 1]) == math.inf
    assert error([1, math.inf], [1, -math.inf]) == math.inf


def test_a_nan_at_the_same_place_leaves_the_rest_to_be_compared() -> None:
    assert error([3, math.nan, 4], [3, math.nan, 4]) == 0


def test_anything_but_zero_where_the_reference_is_all_zero_has_no_scale() -> None:
    assert error([0, 0], [0, 1e-30]) == math.inf


def test_statistics_show_the_largest_of_their_four_differences() -> None:
    # |max| is 10, so 1 there is 0.1; the norm is 20, so 1 there is 0.05.
    assert statistics_error(told(10, -5, 0, 20), told(11, -5, 0, 21)) == pytest.approx(0.1)


def test_a_difference_of_means_counts_in_units_of_the_root_mean_square() -> None:
    # Norm 20 of 4 elements: the root mean square is 10.
    assert statistics_error(told(10, -10, 0, 20), told(10, -10, 1, 20)) == pytest.approx(0.1)


def test_numbers_that_were_not_told_do_not_count_as_equal() -> None:
    assert statistics_error(told(None, None, None, None), told(1, 1, 1, 1)) is None
    assert statistics_error(told(2, None, None, None), told(2, 7, 7, 7)) == 0


def test_other_counts_of_nan_have_no_scale() -> None:
    clean, dirty = Stats(4, 1.0, 0.0, 2.0, 1.0), Stats(4, 1.0, 0.0, 2.0, 1.0, nan_count=1)
    assert statistics_error(clean, dirty) == math.inf
    assert statistics_error(dirty, dirty) == 0


def test_an_infinite_maximum_on_one_side_has_no_scale() -> None:
    assert statistics_error(told(math.inf, 0, 1, 1), told(5, 0, 1, 1)) == math.inf
    assert statistics_error(told(math.inf, 0, 1, 1), told(math.inf, 0, 1, 1)) == 0


def test_the_coarser_dtype_gives_the_rounding() -> None:
    assert rounding_of(tensor("torch.float32"), tensor("torch.bfloat16")) == 2**-8
    assert rounding_of(tensor("torch.int64"), tensor("torch.int64")) == 0


@pytest.mark.parametrize(
    ("found", "level", "code"),
    [
        (0.0, Level.PASS, Code.IDENTICAL),
        (2**-22, Level.PASS, Code.ROUNDING),
        (2**-21, Level.FAIL, Code.DIFFERENT),
        (math.inf, Level.FAIL, Code.DIFFERENT),
    ],
)
def test_four_roundings_are_rounding(found: float, level: Level, code: Code) -> None:
    verdict = tensor_verdict(tensor(), tensor(), Evidence.ELEMENTS, found)
    assert (verdict.level, verdict.codes) == (level, (code,))


def test_integers_have_no_rounding() -> None:
    verdict = tensor_verdict(tensor("torch.int64"), tensor("torch.int64"), Evidence.ELEMENTS, 1e-18)
    assert verdict.level is Level.FAIL


def test_equal_statistics_are_not_called_identical() -> None:
    for evidence in (Evidence.STATISTICS, Evidence.SKETCH):
        assert tensor_verdict(tensor(), tensor(), evidence, 0.0).codes == (Code.AGREES,)


def test_what_was_not_measured_is_unknown_not_equal() -> None:
    verdict = tensor_verdict(tensor(), tensor(error="on a meta device"), Evidence.NOTHING, None)
    assert (verdict.level, verdict.codes, verdict.text) == (Level.UNKNOWN, (Code.NOT_MEASURED,), "on a meta device")


def test_other_checksums_alone_say_different() -> None:
    assert tensor_verdict(tensor(), tensor(), Evidence.CHECKSUM, None).level is Level.FAIL


def test_equal_numbers_of_another_dtype_are_a_warning() -> None:
    verdict = tensor_verdict(tensor("torch.float32"), tensor("torch.float16"), Evidence.ELEMENTS, 0.0)
    assert (verdict.level, verdict.codes) == (Level.WARN, (Code.IDENTICAL, Code.DTYPE))


def test_another_requires_grad_is_a_warning_only_where_both_are_known() -> None:
    yes, no, unknown = (tensor(requires_grad=each) for each in (True, False, None))
    assert tensor_verdict(yes, no, Evidence.ELEMENTS, 0.0).level is Level.WARN
    assert tensor_verdict(yes, unknown, Evidence.ELEMENTS, 0.0).level is Level.PASS


@pytest.mark.parametrize(
    ("reference", "target", "level", "code"),
    [
        (plain("int", 3), plain("int", 3), Level.PASS, Code.IDENTICAL),
        (plain("float", 1e-5), plain("float", 1e-3), Level.FAIL, Code.ARGUMENT),
        (plain("int", 1), plain("float", 1.0), Level.PASS, Code.IDENTICAL),
        (plain("int", 1), plain("str", "1"), Level.FAIL, Code.TYPE),
        (plain("float", "nan"), plain("float", "nan"), Level.PASS, Code.IDENTICAL),
        (plain("NoneType", None), plain("NoneType", None), Level.PASS, Code.IDENTICAL),
        (plain("torch.device", "cpu"), plain("torch.device", "cuda:0"), Level.PASS, Code.DEVICE),
        (plain("object", None), plain("object", None), Level.UNKNOWN, Code.NOT_MEASURED),
    ],
)
def test_arguments_are_compared_as_they_are(reference: Value, target: Value, level: Level, code: Code) -> None:
    verdict = scalar_verdict(reference, target)
    assert (verdict.level, verdict.codes[0]) == (level, code)


@pytest.mark.parametrize("told", [("cpu, seed 1, state 00000000", None), (None, "cpu, seed 1, state 00000000")])
def test_what_one_side_did_not_record_is_unknown(told: tuple[str | None, str | None]) -> None:
    one, two = (Value(Slot(Role.INPUT, (0,)), "torch._C.Generator", scalar=text) for text in told)
    assert scalar_verdict(one, two).level is Level.UNKNOWN
