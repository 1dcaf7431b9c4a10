"""Every metric of every pair of dtypes against its definition, by the extension and by the fallback."""

import dataclasses
import math
import os
import struct
import subprocess
import sys
import zlib
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.compare import metrics
from ulpscope.compare.metrics import METRICS, Contrast
from ulpscope.model.dtypes import DTYPES, values_from
from ulpscope.native import pairs, pairs_fallback

try:
    from ulpscope.native import _pairs

    MODULES = [_pairs, pairs_fallback]
except ImportError:
    MODULES = [pairs_fallback]

REAL = [name for name in DTYPES if not name.startswith("complex")]
COMPLEX = [name for name in DTYPES if name.startswith("complex")]
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
INTEGERS = [name for name in REAL if "float" not in name]

each_module = pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rpartition(".")[2])


def contrast_of(module: ModuleType, reference: bytes, left: str, target: bytes, right: str, **options) -> Contrast:
    with patch.object(pairs, "contrast", module.contrast):
        return metrics.contrast_bits(memoryview(reference), DTYPES[left], memoryview(target), DTYPES[right], **options)


def contrast(module: ModuleType, reference: object, target: object, dtype: str = "float32") -> Contrast:
    with patch.object(pairs, "contrast", module.contrast):
        return metrics.contrast(np.array(reference, dtype), np.array(target, dtype))


def all_metrics(c: Contrast) -> dict[str, float]:
    return {name: metric(c) for name, metric in METRICS.items()}


# --- the definition, one element after the other ------------------------------------------------------------------


def unit_at(size: float, left: str, right: str) -> float:
    """The unit in the last place by what torch says of the dtype with fewer digits."""
    names = [PARTS.get(name, name) for name in (left, right)]
    infos = {name: torch.finfo(getattr(torch, name)) for name in names if name not in INTEGERS}
    if not infos:
        return 1.0
    # torch says 0.125 for e5m2fnuz, which has two digits behind the point as e5m2 has.
    eps, least = max((0.25 if "e5m2" in name else info.eps, info.smallest_normal) for name, info in infos.items())
    return math.ldexp(eps, math.frexp(max(size, least))[1] - 1)


def kind(x) -> str:
    if not isinstance(x, int) and (math.isnan(x.real) or math.isnan(x.imag)):
        return "nan"
    return "inf" if not isinstance(x, int) and (math.isinf(x.real) or math.isinf(x.imag)) else "finite"


def length(values: list) -> float:
    return math.hypot(*(part for x in values for part in ((x.real, x.imag) if isinstance(x, complex) else (x,))))


def cosine_of(r: list, t: list) -> float:
    wide = [np.array(side, np.complex128).view(np.float64) for side in (r, t)]
    if not wide[0].any() or not wide[1].any():
        return 1.0 if not wide[0].any() and not wide[1].any() else math.nan
    a, b = (side / np.abs(side).max() for side in wide)
    return math.fsum(a * b) / math.sqrt(math.fsum(a * a)) / math.sqrt(math.fsum(b * b))


def plain(values: np.ndarray) -> list:
    return [
        x.item() if values.dtype.kind in "iu" else (complex if values.dtype.kind == "c" else float)(x) for x in values
    ]


def mean(values: list[float]) -> float:
    return float(np.sum(values)) / len(values) if values else math.nan


def definition(reference: bytes, left: str, target: bytes, right: str) -> dict[str, float]:
    sides = [
        plain(values_from(raw, DTYPES[name], (len(raw) // DTYPES[name].itemsize,)))
        for raw, name in ((reference, left), (target, right))
    ]
    kinds = [(kind(r), kind(t)) for r, t in zip(*sides, strict=True)]
    neither = sum("finite" not in pair for pair in kinds)
    r, t = ([x for x, pair in zip(side, kinds, strict=True) if pair == ("finite", "finite")] for side in sides)
    if left not in INTEGERS or right not in INTEGERS:
        wide = complex if left in COMPLEX or right in COMPLEX else float
        r, t = [wide(x) for x in r], [wide(x) for x in t]
    d = [float(abs(y - x)) for x, y in zip(r, t, strict=True)]
    sizes = [abs(complex(x)) if isinstance(x, complex) else abs(float(x)) for x in r]
    with np.errstate(all="ignore"):
        relative = [0.0 if e == 0 else float(np.float64(e) / np.float64(x)) for e, x in zip(d, sizes, strict=True)]
        ulps = [float(np.float64(e) / np.float64(unit_at(x, left, right))) for e, x in zip(d, sizes, strict=True)]
        return {
            "cosine": cosine_of([complex(x) for x in r], [complex(x) for x in t]) if kinds else math.nan,
            "euclidean_distance": length(d) if kinds else math.nan,
            "max_abs_error": max(d, default=0.0) if kinds else math.nan,
            "max_relative_error": max(relative, default=0.0) if kinds else math.nan,
            "one_thousandth_ratio": (sum(e < 0.001 for e in relative) + neither) / len(kinds) if kinds else math.nan,
            "five_thousandths_ratio": (sum(e < 0.005 for e in relative) + neither) / len(kinds) if kinds else math.nan,
            "rmse": length(d) / math.sqrt(len(d)) if d else math.nan,
            "mape": mean(relative),
            "relative_l2": (length(d) / length(r) if length(r) else math.inf if any(d) else 0.0) if kinds else math.nan,
            "max_ulp_error": max(ulps, default=0.0) if kinds else math.nan,
            "mean_ulp_error": mean(ulps),
        }


def check(module: ModuleType, reference: bytes, left: str, target: bytes, right: str) -> None:
    found = all_metrics(contrast_of(module, reference, left, target, right))
    expected = definition(reference, left, target, right)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # The modulus of a complex number may be off by its last bit.
        exact = name.startswith("max") and left in REAL and right in REAL
        tolerance = {"rel": 0.0, "abs": 0.0} if exact else {"rel": 1e-12, "abs": 1e-12 if name == "cosine" else 0.0}
        assert found[name] == pytest.approx(value, nan_ok=True, **tolerance), name


def random_bits(generator: np.random.Generator, name: str, n: int) -> bytes:
    raw = generator.integers(0, 256, n * DTYPES[name].itemsize, np.uint8)
    if name == "bool":
        raw &= 1
    return raw.tobytes()


def nearby(generator: np.random.Generator, raw: bytes, name: str) -> bytes:
    """Some of the lowest bits changed, here and there."""
    changed = np.frombuffer(raw, np.uint8).copy()
    lowest = changed.reshape(-1, DTYPES[name].itemsize)[:, 0]
    lowest ^= generator.integers(0, 2, len(lowest), np.uint8) & (generator.random(len(lowest)) < 0.5)
    return changed.tobytes()


@each_module
@pytest.mark.parametrize("right", DTYPES)
@pytest.mark.parametrize("left", DTYPES)
def test_every_pair_of_dtypes_is_compared_as_defined(module, left, right):
    generator = np.random.default_rng(list(DTYPES).index(left) * 100 + list(DTYPES).index(right))
    for n in (1, 7, 100):
        check(module, random_bits(generator, left, n), left, random_bits(generator, right, n), right)


@each_module
@pytest.mark.parametrize("name", DTYPES)
def test_small_differences_are_measured_as_defined(module, name):
    generator = np.random.default_rng(5)
    for n in (8, 64, 1024, 1025, 3000):
        raw = random_bits(generator, name, n)
        check(module, raw, name, nearby(generator, raw, name), name)


# Three blocks of the extension and a bit: after the first, close elements are measured in float32 and others put aside.
LONG = 3 * 4096 + 13
FLOATS = ["float32", "float16", "bfloat16"]
ODD = {
    "nothing": [],
    "zeros": [(0.0, 0.0), (-0.0, 0.0), (0.0, -0.0)],
    "a reference of zero": [(0.0, 1e-3)],
    "large differences": [(1.0, 2.0), (1.0, -1.0), (2.0, 0.0), (-3.0, 1e30)],
    "limits": [(1000.0, 1001.0), (1000.0, 999.0), (200.0, 201.0), (-200.0, -199.0)],
    "what is not finite": [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf), (math.inf, 1.0), (2.0, -math.inf)],
    "denormals": [(1e-41, 1.1e-41), (1e-40, 1.0001e-40), (-6e-8, -6e-8), (0.0, 1e-45)],
    "what is large": [(3e38, 3.0001e38), (-3e38, 3e38), (6e4, 6.1e4)],
}


def bits_of(values: np.ndarray, name: str) -> bytes:
    with np.errstate(all="ignore"):
        if name == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(DTYPES[name].bits).tobytes()


@each_module
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.02, 0.5])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", FLOATS)
def test_close_elements_with_others_among_them_are_measured_as_defined(module, name, odd, share):
    generator = np.random.default_rng(len(odd) + int(1000 * share))
    values = generator.standard_normal(LONG)
    noisy = values * (1 + 1e-4 * generator.standard_normal(LONG))
    noisy[generator.random(LONG) < share] += 1e-2
    if name != "float32":
        # Numbers of fewer digits are either equal or not close.
        noisy[generator.random(LONG) < 0.99] = np.nan
        noisy = np.where(np.isnan(noisy), values, noisy)
    for at, (r, t) in zip(range(4100, LONG, 311), ODD[odd] * 5, strict=False):
        values[at], noisy[at] = r, t
    check(module, bits_of(values, name), name, bits_of(noisy, name), name)


@each_module
@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-120, 2.0**125, 2.0**127])
def test_close_elements_of_any_size_are_measured_as_defined(module, scale):
    generator = np.random.default_rng(1)
    values = generator.uniform(0.5, 1.0, LONG) * generator.choice([-1, 1], LONG)
    noisy = values * (1 + 1e-4 * generator.standard_normal(LONG))
    check(module, bits_of(values * scale, "float32"), "float32", bits_of(noisy * scale, "float32"), "float32")


@each_module
def test_the_largest_relative_error_is_found_wherever_it_is(module):
    values = np.ones(LONG, np.float32)
    values[: LONG // 2] += np.float32(2.0**-20)
    for size in (2.0**-13, 2.0**-12, 2.0**-9):
        for place in (0, 4095, 5000, LONG - 1):
            target = values * np.float32(1 + 2.0**-14)
            target[place] = values[place] * np.float32(1 + size)
            check(module, values.tobytes(), "float32", target.tobytes(), "float32")


@each_module
@pytest.mark.parametrize("name", ["float32", "uint8", "int64"])
def test_the_checksums_of_both_streams_come_with_the_contrast(module, name):
    generator = np.random.default_rng(2)
    for n in (0, 1, 100, 40000):
        sides = [random_bits(generator, name, n) for _ in range(2)]
        checksums = bytearray(8)
        contrast_of(module, sides[0], name, sides[1], name, checksums=checksums)
        assert struct.unpack("<2I", checksums) == tuple(map(zlib.crc32, sides))
    with pytest.raises(ValueError, match="checksums have 4 bytes"):
        contrast_of(module, sides[0], name, sides[1], name, checksums=bytearray(4))


@each_module
def test_several_short_pairs_are_contrasted_as_each_alone(module):
    generator = np.random.default_rng(4)
    streams = []
    for name, n in (("float32", 9000), ("float32", 0), ("bfloat16", 77), ("int64", 3), ("float32", 20000)):
        raw = random_bits(generator, name, n)
        sides = [memoryview(side) for side in (raw, nearby(generator, raw, name))]
        streams.append(metrics.Streams(sides[0], DTYPES[name], sides[1], DTYPES[name], bytearray(8) if n % 2 else None))
    assert all(each.short for each in streams)
    alone = [
        contrast_of(module, each.reference, each.reference_dtype.name, each.target, each.target_dtype.name)
        for each in streams
    ]
    with patch.object(pairs, "contrast_all", module.contrast_all):
        assert list(map(repr, metrics.contrast_short(streams))) == list(map(repr, alone))
    assert struct.unpack("<2I", streams[2].checksums) == tuple(
        map(zlib.crc32, (streams[2].reference, streams[2].target))
    )


@each_module
def test_a_list_with_one_pair_that_is_not_equally_long_is_refused_and_adds_nothing(module):
    states = [bytearray(pairs.STATE.itemsize) for _ in range(2)]
    with pytest.raises(ValueError, match="not equally many"):
        module.contrast_all([(bytes(8), 0, bytes(12), 0, states[1]), (bytes(8), 0, bytes([1] * 8), 0, states[0])])
    assert states == [bytearray(pairs.STATE.itemsize)] * 2
    module.contrast_all([])
    assert not metrics.Streams(memoryview(bytes(8)), DTYPES["float32"], memoryview(bytes(12)), DTYPES["float32"]).short
    assert not metrics.Streams(
        memoryview(bytes(8)), DTYPES["complex64"], memoryview(bytes(8)), DTYPES["complex64"]
    ).short


def elements(name: str, n: int) -> st.SearchStrategy[bytes]:
    size = DTYPES[name].itemsize * n
    raw = st.binary(min_size=size, max_size=size)
    if name == "bool":
        return raw.map(lambda b: bytes(x & 1 for x in b))
    if name == "float64":
        # Not denormal: a norm below the normal numbers has lost digits.
        return st.lists(st.floats(allow_subnormal=False), min_size=n, max_size=n).map(lambda x: np.array(x).tobytes())
    return raw


@each_module
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_two_streams_are_compared_as_defined(module, data):
    left, right = data.draw(st.sampled_from(REAL)), data.draw(st.sampled_from(REAL))
    n = data.draw(st.integers(0, 20))
    check(module, data.draw(elements(left, n)), left, data.draw(elements(right, n)), right)


@pytest.mark.skipif(len(MODULES) < 2, reason="the extension is not built")
@pytest.mark.parametrize("left", REAL)
def test_extension_and_fallback_agree_on_counts_places_and_maxima_and_on_sums_to_rounding(left):
    generator = np.random.default_rng(3)
    for right in (left, "float32", "bfloat16", "uint64"):
        raw = random_bits(generator, left, 70001)
        target = nearby(generator, raw, left) if right == left else random_bits(generator, right, 70001)
        ours, theirs = (dataclasses.asdict(contrast_of(m, raw, left, target, right)) for m in MODULES)
        for name, value in ours.items():
            exact = isinstance(value, int) or name.startswith("max")
            assert theirs[name] == (value if exact else pytest.approx(value, rel=1e-12, abs=1e-12)), name


# --- by hand ------------------------------------------------------------------------------------------------------


@each_module
def test_the_metrics_of_four_numbers(module):
    found = all_metrics(contrast(module, [1.0, 2.0, 0.0, -4.0], [1.0, 2.5, 0.0, -3.0]))
    assert found == {
        "cosine": pytest.approx(18.0 / math.sqrt(21.0 * 16.25), rel=1e-15),
        "euclidean_distance": math.sqrt(1.25),
        "max_abs_error": 1.0,
        "max_relative_error": 0.25,
        "one_thousandth_ratio": 0.5,
        "five_thousandths_ratio": 0.5,
        "rmse": math.sqrt(1.25 / 4),
        "mape": 0.125,
        "relative_l2": math.sqrt(1.25) / math.sqrt(21.0),
        "max_ulp_error": 2.0**21,
        "mean_ulp_error": (2.0**21 + 2.0**21) / 4,
    }


@each_module
def test_the_first_of_the_largest_differences_is_named(module):
    c = contrast(module, [0.0, 1.0, 2.0, 3.0], [0.5, 3.0, 2.0, 1.0])
    assert (c.max_abs, c.max_abs_index, c.differing, c.abs_sum) == (2.0, 1, 3, 4.5)
    assert contrast(module, [1.0], [1.0]).max_abs_index == -1
    reference = np.zeros(5000)
    target = reference.copy()
    target[[4100, 4999]] = 7.0
    assert contrast(module, reference, target).max_abs_index == 4100


@each_module
def test_the_thousandths_are_strict_limits(module):
    reference = [1000.0] * 4
    target = [1001.0, 1000.5, 1005.0, 1004.5]
    c = contrast(module, reference, target, "float64")
    assert (c.below_thousandth, c.below_five_thousandths) == (1, 3)


@each_module
def test_a_zero_in_the_reference_makes_the_relative_error_infinite_unless_the_target_is_zero_too(module):
    c = contrast(module, [0.0, -0.0, 2.0], [0.0, 0.0, 2.0])
    assert (metrics.max_relative_error(c), metrics.mape(c), metrics.one_thousandth_ratio(c)) == (0.0, 0.0, 1.0)
    c = contrast(module, [0.0, 2.0], [1e-30, 3.0])
    assert (metrics.max_relative_error(c), metrics.mape(c), c.relative_sum) == (math.inf, math.inf, 0.5)
    assert metrics.five_thousandths_ratio(c) == 0.0


@each_module
def test_minus_zero_is_zero(module):
    c = contrast(module, [0.0, -0.0], [-0.0, 0.0])
    assert (c.differing, c.max_ulp, metrics.cosine(c)) == (0, 0.0, 1.0)


@each_module
def test_the_cosine_is_one_if_both_are_all_zero_and_nan_if_one_is(module):
    assert metrics.cosine(contrast(module, [0.0, 0.0], [0.0, 0.0])) == 1.0
    assert math.isnan(metrics.cosine(contrast(module, [0.0, 0.0], [0.0, 1.0])))
    assert math.isnan(metrics.cosine(contrast(module, [0.0, 1.0], [0.0, 0.0])))
    assert metrics.relative_l2(contrast(module, [0.0], [1.0])) == math.inf
    assert metrics.relative_l2(contrast(module, [0.0], [0.0])) == 0.0


@each_module
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_cosine_of_a_tensor_with_itself_is_exactly_one_and_with_its_opposite_minus_one(module, dtype):
    values = np.random.default_rng(1).standard_normal(5001).astype(dtype)
    assert metrics.cosine(contrast(module, values, values, dtype)) == 1.0
    assert metrics.cosine(contrast(module, values, -values, dtype)) == -1.0
    assert abs(metrics.cosine(contrast(module, values, values * np.dtype(dtype).type(3), dtype))) <= 1.0


@each_module
@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1e307])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_lengths_and_cosine_hold_where_squares_leave_the_range_of_float64(module, scale, dtype):
    c = contrast(module, [3 * scale, 4 * scale], [4 * scale, 3 * scale], dtype)
    assert metrics.cosine(c) == pytest.approx(24 / 25, rel=1e-12 if scale > 1e-300 else 1e-3)
    assert metrics.euclidean_distance(c) == pytest.approx(math.sqrt(2) * scale, rel=1e-12, abs=1e-323)
    assert metrics.relative_l2(c) == pytest.approx(math.sqrt(2) / 5, rel=1e-12 if scale > 1e-300 else 1e-3)


@each_module
def test_a_small_reference_is_not_lost_beside_a_large_target(module):
    c = contrast(module, [1e-200, 1e-200], [1e200, 0.0], "float64")
    assert metrics.cosine(c) == pytest.approx(math.sqrt(0.5), rel=1e-15)
    assert (c.reference_norm, c.target_norm) == (pytest.approx(math.sqrt(2) * 1e-200, rel=1e-15), 1e200)


@each_module
def test_a_difference_whose_square_vanishes_has_a_length(module):
    c = contrast(module, [1.0, 0.0], [1.0, 1e-200], "float64")
    assert (c.difference_norm, c.differing) == (1e-200, 1)


@each_module
def test_a_difference_beyond_the_range_of_float64_is_infinite(module):
    c = contrast(module, [1.7e308], [-1.7e308], "float64")
    assert (c.max_abs, c.difference_norm, metrics.cosine(c)) == (math.inf, math.inf, -1.0)


@each_module
def test_without_an_element_nothing_is_defined(module):
    c = contrast(module, [], [])
    assert (c.count, c.finite, c.differing, c.max_abs_index) == (0, 0, 0, -1)
    assert all(math.isnan(value) for value in all_metrics(c).values())


@each_module
def test_a_tensor_without_dimensions_is_one_element(module):
    c = contrast(module, 1.5, 1.25)
    assert (c.count, metrics.max_abs_error(c), metrics.max_relative_error(c)) == (1, 0.25, 0.25 / 1.5)


@each_module
def test_what_is_not_finite_is_counted_by_side_and_left_out(module):
    nan, inf = math.nan, math.inf
    reference = [nan, 1.0, nan, inf, 1.0, inf, inf, nan, 2.0]
    target = [1.0, nan, nan, 1.0, -inf, inf, -inf, inf, 3.0]
    for padding in (0, 1, 2000):
        c = contrast(module, [7.0] * padding + reference, [7.0] * padding + target)
        counts = (c.nan_in_reference, c.nan_in_target, c.nan_in_both, c.inf_in_reference, c.inf_in_target)
        # NaN against an infinity is NaN in the reference only and infinite in the target only.
        assert counts == (2, 1, 1, 1, 2)
        assert (c.inf_same, c.inf_opposite, c.same_places) == (1, 1, False)
        assert (c.count, c.finite) == (padding + 9, padding + 1)
        # Of the others NaN with NaN and inf with inf are the same.
        assert (c.differing, c.max_abs, c.max_abs_index) == (7, 1.0, padding + 8)
        assert (c.below_thousandth, c.below_five_thousandths) == (padding + 4, padding + 4)


@each_module
def test_the_same_places_not_finite_on_both_sides_are_no_difference(module):
    values = [math.nan, math.inf, -math.inf, 5.0]
    c = contrast(module, values, values)
    assert (c.same_places, c.differing, c.finite) == (True, 0, 1)
    assert (metrics.cosine(c), metrics.max_abs_error(c), metrics.one_thousandth_ratio(c)) == (1.0, 0.0, 1.0)
    assert not contrast(module, [math.inf], [-math.inf]).same_places
    only = contrast(module, [math.nan], [math.nan])
    assert (metrics.cosine(only), metrics.max_abs_error(only), math.isnan(metrics.rmse(only))) == (1.0, 0.0, True)


@each_module
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_64_bit_integers_are_compared_as_integers(module, dtype):
    c = contrast(module, [2**53, 5], [2**53 + 1, 5], dtype)
    assert (c.differing, c.max_abs, c.max_abs_index, c.max_ulp) == (1, 1.0, 0, 1.0)
    high = np.iinfo(dtype)
    c = contrast(module, [high.min], [high.max], dtype)
    assert c.max_abs == 2.0**64


@each_module
def test_signed_and_unsigned_64_bit_integers_are_compared_as_integers(module):
    def apart(reference: int, target: int) -> float:
        left, right = np.array([reference], np.int64), np.array([target], np.uint64)
        found = {
            contrast_of(module, left.tobytes(), "int64", right.tobytes(), "uint64").max_abs,
            contrast_of(module, right.tobytes(), "uint64", left.tobytes(), "int64").max_abs,
        }
        assert len(found) == 1
        return found.pop()

    assert apart(2**62 + 1, 2**62) == 1.0
    assert apart(-1, 2**64 - 1) == 2.0**64
    assert apart(-(2**63), 2**64 - 1) == 2.0**63 + 2.0**64
    assert apart(-3, 5) == 8.0


@each_module
def test_the_unit_in_the_last_place_is_that_of_the_coarser_type(module):
    reference = np.array([1.0, 2.0**-140], np.float32)
    bf16 = np.array([0x3F81, 0x0003], np.uint16)
    c = contrast_of(module, reference.tobytes(), "float32", bf16.tobytes(), "bfloat16")
    # 1 + 2**-7 is one unit from 1; 3 * 2**-133 is 3 denormal units from 0, of which 2**-140 is 2**-7.
    assert (c.max_ulp, c.ulp_sum) == (3.0 - 2.0**-7, 4.0 - 2.0**-7)
    assert contrast(module, [False, True], [True, True], "bool").max_ulp == 1.0


@each_module
def test_complex_numbers_are_compared_by_modulus(module):
    for dtype in ("complex64", "complex128"):
        c = contrast(module, [3 + 4j, 1j], [3 + 1j, 1j], dtype)
        assert (c.max_abs, c.max_relative, c.difference_norm, c.reference_norm) == (3.0, 0.6, 3.0, math.sqrt(26.0))
        assert c.alignment == pytest.approx(14.0 / math.sqrt(26.0 * 11.0), rel=1e-15)
    real = np.array([3.0, 0.0], np.float32)
    c = contrast_of(module, real.tobytes(), "float32", np.array([3 + 4j, 0j], np.complex64).tobytes(), "complex64")
    assert (c.max_abs, c.differing) == (4.0, 1)


# --- pieces -------------------------------------------------------------------------------------------------------


@each_module
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "complex64"])
def test_a_chunk_that_ends_changes_nothing(module, name):
    generator = np.random.default_rng(2)
    raw = random_bits(generator, name, 10001)
    target = nearby(generator, raw, name)
    whole = contrast_of(module, raw, name, target, name)
    ranges: list[tuple[int, int]] = []
    with patch.object(metrics, "_CHUNK", 4096):
        pieces = contrast_of(module, raw, name, target, name, done=lambda start, stop: ranges.append((start, stop)))
    assert ranges == [(0, 4096), (4096, 8192), (8192, 10001)]
    for field in dataclasses.fields(Contrast):
        found, expected = getattr(pieces, field.name), getattr(whole, field.name)
        # The extension sums block by block: there even the last bit is the same.
        rounding = 0.0 if module is not pairs_fallback and name != "complex64" else 1e-12
        assert found == pytest.approx(expected, rel=rounding, abs=rounding), field.name


@each_module
def test_identical_bits_give_what_the_elements_would(module):
    values = np.random.default_rng(4).standard_normal(3000).astype(np.float32)
    values[2500] = math.nan
    target = values.copy()
    target[10] += 1.0
    same, other = contrast(module, values, values), contrast(module, values, target)
    assert same.reference_norm == same.target_norm == other.reference_norm
    assert (same.differing, same.difference_norm, same.nan_in_both, same.finite) == (0, 0.0, 1, 2999)
    assert (same.alignment, same.below_thousandth) == (1.0, 3000)


@each_module
def test_arrays_of_any_layout_and_byte_order_are_taken(module):
    values = np.arange(12.0).reshape(3, 4)
    with patch.object(pairs, "contrast", module.contrast):
        assert metrics.contrast(values.T, np.ascontiguousarray(values.T)).differing == 0
        assert metrics.contrast(values.astype(">f8"), values).differing == 0
        assert metrics.contrast(values.astype(np.int16), values).differing == 0


@each_module
def test_streams_that_are_not_equally_long_are_refused(module):
    with pytest.raises(ValueError, match="not equally many"):
        contrast_of(module, bytes(8), "float32", bytes(12), "float32")
    with pytest.raises(ValueError, match="not equally many"):
        module.contrast(bytes(7), 0, bytes(7), 0, bytearray(pairs.STATE.itemsize))
    with pytest.raises(ValueError, match="state has 3 bytes"):
        module.contrast(bytes(8), 0, bytes(8), 0, bytearray(3))
    with pytest.raises(ValueError, match="dtype code 21"):
        module.contrast(bytes(8), 0, bytes(8), 21, bytearray(pairs.STATE.itemsize))


@pytest.mark.skipif(len(MODULES) < 2, reason="the extension is not built")
@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "int32", "int64", "uint64", "float8_e5m2"])
def test_the_numbers_are_the_same_whatever_the_instruction_set(name, close):
    program = (
        "import sys, numpy as np; from ulpscope.native import _pairs, pairs; from ulpscope.model.dtypes import DTYPES;"
        "d = DTYPES[sys.argv[1]]; g = np.random.default_rng(0); s = bytearray(pairs.STATE.itemsize); n = 20003;"
        "r, t = (g.integers(0, 256, n * d.itemsize, np.uint8) & 191 for _ in range(2));"
        "t = np.where(g.random(t.size) < 0.001, t, r) if sys.argv[2] == 'True' else t;"
        "t[:: d.itemsize] ^= d.itemsize >= 4;"
        "_pairs.contrast(r, d.code, t, d.code, s); print(s.hex())"
    )
    outputs = set()
    for isa in ("base", "avx2", "avx512"):
        environment = {**os.environ, "ULPSCOPE_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program, name, str(close)]
        outputs.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(outputs) == 1
