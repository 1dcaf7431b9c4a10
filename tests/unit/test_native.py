"""The extension, the fallback and a naive definition say the same about one tensor's memory."""

import math
import os
import platform
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from ulpscope.frameworks.torch import cuda_tables
from ulpscope.native import measuring, measuring_fallback

try:
    from ulpscope.native import _measure

    MODULES = [_measure, measuring_fallback]
except ImportError:
    MODULES = [measuring_fallback]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
FLOAT8 = DTYPES[16:]
SIGNED = {torch.int8, torch.int16, torch.int32, torch.int64}
UNSIGNED = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
SIZES = [0, 1, 2, 255, 256, 257, 1000, 4097, 70000]
EVERYTHING = measuring.STATS | measuring.CRC | measuring.SKETCH

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rpartition(".")[2])
each_dtype = pytest.mark.parametrize("code", range(len(DTYPES)), ids=lambda code: str(DTYPES[code])[6:])

LAYOUTS = {
    "contiguous": lambda make, n: make(n),
    "rows": lambda make, n: make(5 * (n + 2)).view(5, n + 2)[:, 1 : n + 1],
    "transposed": lambda make, n: make(3 * n).view(n, 3).t(),
    "stepped": lambda make, n: make(2 * n + 1)[1::2],
    "expanded": lambda make, n: make(n).view(n, 1).expand(n, 3),
    "repeated": lambda make, n: make(n).expand(3, n),
    "four dimensions": lambda make, n: make(12 * n).view(2, n, 2, 3).permute(3, 1, 0, 2)[:, :, :, :1],
}


def random_bits(dtype: torch.dtype):
    """Make tensors of random bits, with NaN, infinities, both zeros and denormals among the floats."""
    generator = torch.Generator().manual_seed(7)
    part = dtype.to_real() if dtype.is_complex else dtype

    def make(n: int) -> torch.Tensor:
        raw = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        words = raw.view(-1, part.itemsize)
        words[::5] = 0
        if dtype is torch.bool:
            raw &= 1
        elif dtype is torch.float8_e8m0fnu:
            raw &= 127
            raw[3::13] = 255
        elif part.is_floating_point and dtype not in FLOAT8:
            # Below 2 in magnitude: a sketch is kept in float32, which sums of the largest floats overflow.
            words[:, -1] &= 0xBF
            words[2::29] = 0
            words[2::29, 0] = 1
            floats = raw.view(part)
            floats[3::13], floats[5::17], floats[7::19], floats[11::23] = math.nan, math.inf, -math.inf, -0.0
        return raw.view(dtype)

    return make


def arguments(tensor: torch.Tensor) -> tuple:
    stride = None if tensor.is_contiguous() else tensor.stride()
    return tuple(tensor.shape), stride


def measure(module: ModuleType, tensor: torch.Tensor, flags: int = EVERYTHING):
    shape, stride = arguments(tensor)
    code = DTYPES.index(tensor.dtype)
    data = module.measure(tensor.data_ptr(), code, shape, stride, flags, 11, 22, 33)
    row = np.frombuffer(data, measuring.ROW, 1)[0]
    return row, np.frombuffer(data, "<f4", int(row["sketch_len"]), 112)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    # contiguous() would leave a single element its odd stride.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1)


def logical_bytes(tensor: torch.Tensor) -> bytes:
    return flattened(tensor).view(torch.uint8).numpy().tobytes()


def parts_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements in order as float64, real and imaginary parts one after the other."""
    flat = flattened(tensor)
    if flat.is_complex():
        return torch.view_as_real(flat.to(torch.complex128)).reshape(-1).numpy()
    return (flat.to(torch.float32) if flat.dtype in FLOAT8 else flat).to(torch.float64).numpy()


def murmur(h: int) -> int:
    mask = (1 << 32) - 1
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def naive_sketch(parts: np.ndarray) -> np.ndarray:
    buckets = np.zeros(256)
    values = np.where(np.isfinite(parts), parts, 0.0)
    for b in range(-(-len(values) // 256)):
        place, group = b & 255, b >> 8
        turn = (53 * (place ^ place >> 4) + ((group * 0x9E3779B1 & 0xFFFFFFFF) >> 24)) & 255
        words = [murmur(0x756C7073 ^ (8 * turn + w)) for w in range(8)]
        flip = murmur(0x6F706521 ^ (turn + 256 * (group >> 5))) >> (group & 31) & 1
        block = values[b * 256 : b * 256 + 256]
        if not block.any():
            continue
        j = np.arange(len(block))
        signs = np.array([-1.0 if words[k >> 5] >> (k & 31) & 1 ^ flip else 1.0 for k in range(len(block))])
        np.add.at(buckets, (j + turn) & 255, signs * block)
    return buckets[: min(len(values), 256)]


@pytest.mark.parametrize("group", [0, 1, 2, 31, 32, 33, 1000, (1 << 20) + 7, (1 << 32) + 5, (1 << 40) + 3])
def test_turns_and_flips_are_those_of_the_definition(group: int) -> None:
    first = 256 * group
    ways = [tuple(part.tolist() for part in measuring_fallback.sketch_turns(first, 256))]
    ways.append(tuple(part.tolist() for part in cuda_tables._turns(first, 256, torch.device("cpu"))))
    group &= 0xFFFFFFFF
    turns = [(53 * (place ^ place >> 4) + ((group * 0x9E3779B1 & 0xFFFFFFFF) >> 24)) & 255 for place in range(256)]
    words = [murmur(0x6F706521 ^ (turn + 256 * (group >> 5) & 0xFFFFFFFF)) for turn in turns]
    assert sorted(turns) == list(range(256))
    assert ways == [(turns, [word >> (group & 31) & 1 for word in words])] * 2


@each_module
def test_sketches_of_many_groups_are_those_of_the_definition(module: ModuleType) -> None:
    ones = torch.zeros(70 * 65536 + 900, dtype=torch.float32)
    ones[torch.randint(0, len(ones), (400,), generator=torch.Generator().manual_seed(5))] = 1.0
    assert measure(module, ones)[1].tolist() == naive_sketch(ones.numpy()).tolist()


def limits(row: np.void) -> list:
    kind = "<i8" if row["kind"] & 8 else "<u8" if row["kind"] & 16 else "<f8"
    return np.array([row["max_bits"], row["min_bits"]], "<u8").view(kind).tolist()


def check_against_definition(module: ModuleType, tensor: torch.Tensor) -> None:
    row, sketch = measure(module, tensor)
    parts = parts_of(tensor)
    values = parts
    if tensor.is_complex():
        real, imaginary = parts[0::2], parts[1::2]
        with np.errstate(invalid="ignore"):
            values = np.where(np.isnan(real) | np.isnan(imaginary), np.nan, np.hypot(real, imaginary))
    finite = values[np.isfinite(values)]
    assert row["numel"] == tensor.numel()
    assert row["nan"] == np.isnan(values).sum()
    assert row["posinf"] == (values == np.inf).sum()
    assert row["neginf"] == (values == -np.inf).sum()
    assert row["zero"] == (values == 0).sum()
    assert row["crc"] == zlib.crc32(logical_bytes(tensor))
    kind = 8 if tensor.dtype in SIGNED else 16 if tensor.dtype in UNSIGNED else 0
    assert row["kind"] == EVERYTHING | kind
    assert (row["payload_offset"], row["payload_nbytes"], row["sketch_offset"], row["known"]) == (11, 22, 33, 0)
    if not kind:
        expected = [finite.max(), finite.min()] if len(finite) else [0.0, 0.0]
        # The modulus of complex64 is taken without hypot's scaling: the last bit may differ.
        assert limits(row) == pytest.approx(expected, rel=1e-15 if tensor.is_complex() else 0, abs=0)
    elif tensor.numel():
        assert limits(row) == [f(flattened(tensor).numpy().astype(object)) for f in (max, min)]
    assert row["sum"] == pytest.approx(math.fsum(finite), rel=0, abs=1e-13 * math.fsum(np.abs(finite)))
    assert row["norm"] == pytest.approx(math.sqrt(math.fsum(finite * finite)), rel=1e-13)
    assert row["sketch_len"] == len(sketch) == min(len(parts), 256)
    naive = naive_sketch(parts).astype(np.float32)
    np.testing.assert_allclose(sketch, naive, rtol=1e-6, atol=2e-6 * float(row["norm"]) + 1e-44)


@each_module
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_size_and_layout_is_measured_as_defined(module, code, layout):
    make = random_bits(DTYPES[code])
    for n in SIZES if layout == "contiguous" else SIZES[:-1]:
        check_against_definition(module, LAYOUTS[layout](make, n))


@each_module
@each_dtype
def test_a_tensor_without_dimensions_is_one_element(module, code):
    check_against_definition(module, random_bits(DTYPES[code])(3)[1])


@pytest.mark.skipif(len(MODULES) < 2, reason="the extension is not built")
@each_dtype
def test_extension_and_fallback_agree_exactly_but_for_sums(code):
    for layout in LAYOUTS.values():
        tensor = layout(random_bits(DTYPES[code]), 5000)
        rows = [measure(module, tensor)[0] for module in MODULES]
        for field in measuring.ROW.names:
            if field not in ("sum", "norm"):
                assert rows[0][field] == rows[1][field], field
        shape, stride = arguments(tensor)
        size = tensor.element_size()
        prints = {module.fingerprint(tensor.data_ptr(), size, shape, stride) for module in MODULES}
        assert len(prints) == 1


@each_module
@pytest.mark.parametrize("index", range(5), ids=[str(dtype)[6:] for dtype in FLOAT8])
def test_each_of_the_256_codes_of_an_8_bit_float_reads_as_in_torch(module, index):
    for byte in range(256):
        tensor = torch.tensor([byte], dtype=torch.uint8).view(FLOAT8[index])
        value = tensor.to(torch.float32).double().item()
        row, _ = measure(module, tensor)
        assert (row["nan"], row["posinf"], row["neginf"]) == (math.isnan(value), value == math.inf, value == -math.inf)
        assert limits(row)[0] == (value if math.isfinite(value) else 0.0)


@each_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_non_finite_elements_are_counted_and_left_out(module, dtype):
    tensor = torch.arange(1, 5001).remainder(100).to(dtype)
    tensor[[3, 2048, 4999]] = math.nan
    tensor[[0, 4096]] = math.inf
    tensor[17] = -math.inf
    row, _ = measure(module, tensor)
    kept = [float(i % 100) for i in range(1, 5001) if i - 1 not in (3, 2048, 4999, 0, 4096, 17)]
    assert (row["nan"], row["posinf"], row["neginf"], row["zero"]) == (3, 2, 1, kept.count(0.0))
    assert limits(row) == [99.0, 0.0]
    assert row["sum"] == sum(kept)
    assert row["norm"] == math.sqrt(sum(value * value for value in kept))


@each_module
def test_without_a_finite_element_the_numbers_are_zero_and_the_counts_tell(module):
    row, sketch = measure(module, torch.tensor([math.nan, math.inf, -math.inf, -math.inf]))
    assert limits(row) == [0.0, 0.0]
    assert (row["sum"], row["norm"], row["nan"], row["posinf"], row["neginf"]) == (0.0, 0.0, 1, 1, 2)
    assert sketch.tolist() == [0.0] * 4


@each_module
def test_minus_zero_is_a_zero_and_never_a_limit(module):
    row, _ = measure(module, torch.tensor([-0.0, -0.0]))
    assert row["zero"] == 2
    assert (row["max_bits"], row["min_bits"]) == (0, 0)


@each_module
def test_a_denormal_is_not_a_zero(module):
    row, _ = measure(module, torch.full((33,), 2.0**-149))
    assert (row["zero"], limits(row)[0], row["sum"]) == (0, 2.0**-149, 33 * 2.0**-149)


@each_module
@pytest.mark.parametrize("scale", [1e200, 1e-200, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_norm_holds_where_squares_leave_the_range_of_float64(module, scale, dtype):
    tensor = torch.full((10000,), scale, dtype=dtype)
    tensor[5] = math.nan
    row, _ = measure(module, tensor[: 5 + 1 + 9994])
    assert row["norm"] == pytest.approx(scale * math.sqrt(9999), rel=1e-12)


@each_module
def test_limits_of_64_bit_integers_are_exact(module):
    row, _ = measure(module, torch.tensor([2**63 - 1, -(2**63), 2**53 + 1]))
    assert limits(row) == [2**63 - 1, -(2**63)]
    row, _ = measure(module, torch.from_numpy(np.array([2**64 - 1, 2**53 + 1], np.uint64)))
    assert limits(row) == [2**64 - 1, 2**53 + 1]


@each_module
def test_a_complex_number_with_a_nan_part_is_nan_even_beside_infinity(module):
    for dtype in (torch.complex64, torch.complex128):
        values = [complex(math.inf, math.nan), complex(-math.inf, 1.0), complex(3.0, 4.0), 0j]
        row, sketch = measure(module, torch.tensor(values, dtype=dtype))
        assert (row["nan"], row["posinf"], row["neginf"], row["zero"]) == (1, 1, 0, 1)
        assert limits(row) == [5.0, 0.0]
        assert np.abs(sketch).tolist() == [0.0, 0.0, 0.0, 1.0, 3.0, 4.0, 0.0, 0.0]


@each_module
def test_what_was_not_asked_for_is_absent(module):
    tensor = torch.arange(1.0, 600.0)
    for flags in range(8):
        row, sketch = measure(module, tensor, flags)
        assert row["kind"] == flags
        assert (row["numel"], len(sketch)) == (599, 256 if flags & measuring.SKETCH else 0)
        assert limits(row)[0] == (599.0 if flags & measuring.STATS else 0.0)
        assert row["crc"] == (zlib.crc32(logical_bytes(tensor)) if flags & measuring.CRC else 0)


@each_module
def test_crc32_is_that_of_zlib_for_every_length_and_start(module):
    data = random_bits(torch.uint8)(5000).numpy().tobytes()
    for length in [*range(0, 300), *range(500, 530), *range(760, 780), 1023, 1024, 1025, 4999]:
        assert module.crc32(data[:length]) == zlib.crc32(data[:length])
        assert module.crc32(memoryview(data)[1 : length + 1], 12345) == zlib.crc32(data[1 : length + 1], 12345)


@each_module
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_copies_any_range_of_the_logical_bytes(module, layout):
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64, torch.complex128):
        tensor = LAYOUTS[layout](random_bits(dtype), 1100)
        shape, stride = arguments(tensor)
        expected = logical_bytes(tensor)
        for start, nbytes in [(0, len(expected)), (1, 5), (3, 1000), (len(expected) - 9, 9), (len(expected), 0)]:
            found = bytearray(nbytes)
            module.gather(tensor.data_ptr(), tensor.element_size(), shape, stride, start, nbytes, found)
            assert found == expected[start : start + nbytes]


@each_module
def test_gather_refuses_what_does_not_fit(module):
    tensor = torch.arange(4.0)
    for start, nbytes, dest in [(0, 17, bytearray(32)), (17, 0, bytearray()), (0, 16, bytearray(15))]:
        with pytest.raises(ValueError, match="do not fit"):
            module.gather(tensor.data_ptr(), 4, (4,), None, start, nbytes, dest)
    with pytest.raises((BufferError, TypeError)):
        module.gather(tensor.data_ptr(), 4, (4,), None, 0, 16, bytes(16))


@each_module
def test_a_fingerprint_is_of_the_logical_bytes_not_of_the_layout(module):
    tensor = torch.randn(70, 90)
    turned = tensor.t().contiguous().t()
    same = module.fingerprint(tensor.data_ptr(), 4, (70, 90), None)
    assert module.fingerprint(turned.data_ptr(), 4, (70, 90), turned.stride()) == same
    assert len(same) == 16


@each_module
def test_one_flipped_bit_changes_both_halves_of_a_fingerprint(module):
    data = bytearray(random_bits(torch.uint8)(3000).numpy().tobytes())
    array = np.frombuffer(data, np.uint8)
    seen = {module.fingerprint(array.ctypes.data, 1, (3000,), None)}
    for bit in range(0, 24000, 37):
        data[bit >> 3] ^= 1 << (bit & 7)
        seen.add(module.fingerprint(array.ctypes.data, 1, (3000,), None))
        data[bit >> 3] ^= 1 << (bit & 7)
    assert len(seen) == len({p[:8] for p in seen}) == len({p[8:] for p in seen}) == 650


@each_module
def test_zeros_of_different_lengths_and_swapped_stripes_have_different_fingerprints(module):
    zeros = np.zeros(5000, np.uint8)
    prints = {module.fingerprint(zeros.ctypes.data, 1, (n,), None) for n in range(0, 5000, 50)}
    assert len(prints) == 100
    halves = [np.repeat(np.array(order, np.uint8), 1024) for order in ([1, 2], [2, 1])]
    assert len({module.fingerprint(half.ctypes.data, 1, (2048,), None) for half in halves}) == 2


def estimate(module: ModuleType, reference: torch.Tensor, target: torch.Tensor) -> float:
    return measuring.sketch_relative_l2(measure(module, reference)[1], measure(module, target)[1])


@each_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_sketch_tells_the_relative_difference_within_a_quarter(module, dtype):
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(64, 4096, generator=generator, dtype=torch.float32).to(dtype)
    noisy = (reference + 0.05 * torch.randn(64, 4096, generator=generator)).to(dtype)
    rows, columns = torch.arange(64)[:, None], torch.arange(4096)[None]
    shapes = {
        "everywhere": torch.ones(64, 4096),
        "a column": columns == 1234,
        "a row": rows == 17,
        "a diagonal": rows == columns - 300,
        "a head": (columns >= 1024) & (columns < 1088),
        "rows alike": torch.randn(1, 4096, generator=generator),
        "columns alike": torch.randn(64, 1, generator=generator),
        "every eighth": columns % 8 == 3,
    }
    moved = (reference + 0.05 * shape.to(torch.float32) for shape in shapes.values())
    for target in (noisy, reference.roll(128, dims=1), *(values.to(dtype) for values in moved)):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        true = float((target.to(wide) - reference.to(wide)).norm() / reference.to(wide).norm())
        assert estimate(module, reference, target) == pytest.approx(true, rel=0.25)
    assert estimate(module, reference, reference.clone()) == 0.0


def test_sketches_that_cannot_be_compared_give_nan_and_zeros_are_equal():
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert math.isnan(measuring.sketch_relative_l2(zeros, np.zeros(5, np.float32)))
    assert measuring.sketch_relative_l2(zeros, zeros) == 0.0
    assert measuring.sketch_relative_l2(zeros, ones) == math.inf
    assert measuring.sketch_relative_l2(ones, zeros) == 1.0


@each_module
@pytest.mark.parametrize(("shape", "stride", "plain"), [
    ((1,), (2**62,), (1,)), ((1, 3), (2**62, 2), (6, 2)), ((3, 1, 2), (2, 2**63 - 1, 1), (2, 2, 1)), ((0, 3), (2**62, 1), (3, 1)),
])  # fmt: skip
def test_strides_of_a_single_element_mean_nothing(module, shape, stride, plain):
    values = torch.arange(1.0, 9.0)
    rows = [module.measure(values.data_ptr(), 0, shape, step, 7, 0, 0, 0) for step in (stride, plain)]
    assert rows[0] == rows[1]


@each_module
def test_arguments_that_describe_no_tensor_are_refused(module):
    at = torch.zeros(8).data_ptr()
    no_value = [
        (at, 21, (8,), None, 7),
        (at, -1, (8,), None, 7),
        (at, 0, (8,), None, 8),
        (at, 0, (8,), (1, 1), 7),
        (at, 0, (2, 4), (1,), 7),
        (at, 0, (-8,), None, 7),
        (at, 0, (8,), (-1,), 7),
        (at, 0, (2**62, 8), None, 7),
        (0, 0, (8,), None, 7),
    ]
    for arguments_ in no_value:
        with pytest.raises(ValueError):
            module.measure(*arguments_, 0, 0, 0)
    for arguments_ in [(at, 0, 8, None, 7), (at, 0, (8,), 1, 7), (at, 0, ("8",), None, 7), ("x", 0, (8,), None, 7)]:
        with pytest.raises(TypeError):
            module.measure(*arguments_, 0, 0, 0)
    with pytest.raises(TypeError):
        module.measure(at, 0)
    for itemsize in (0, 3, 32):
        with pytest.raises(ValueError, match="itemsize"):
            module.fingerprint(at, itemsize, (2,), None)


@pytest.mark.skipif(len(MODULES) < 2, reason="the extension is not built")
def test_a_float32_row_is_the_same_whatever_the_instruction_set():
    program = (
        "import numpy as np; from ulpscope.native import _measure as n;"
        "x = np.sin(np.arange(70001.0)).astype('f4'); x[999] = np.nan;"
        "print(n.measure(x.ctypes.data, 0, x.shape, None, 7, 0, 0, 0).hex())"
    )
    outputs = set()
    for isa in ("base", "avx2", "avx512"):
        environment = {**os.environ, "ULPSCOPE_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
        outputs.add(subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True).stdout)
    assert len(outputs) == 1
    assert len(outputs.pop()) == 2 * (112 + 1024) + 1


@pytest.mark.skipif(
    len(MODULES) < 2 or platform.machine() != "x86_64", reason="the extension is not built, or has one kernel"
)
def test_the_kernels_are_those_that_the_system_says_this_processor_has():
    flags = set(re.search(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    best = "base"
    if flags >= {"avx2", "fma", "f16c"}:
        best = "avx512" if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"} else "avx2"
    program = "from ulpscope.native import _measure, _pairs; print(_measure.ISA, _pairs.ISA)"
    for wish, expected in (
        ("", best),
        ("base", "base"),
        ("avx2", min("avx2", best, key=["base", "avx2", "avx512"].index)),
    ):
        environment = {**os.environ, "ULPSCOPE_ISA": wish, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program]
        chosen = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        assert chosen == [expected, expected]
