"""Measuring on a device: the same numbers as the native code gives for the same bits.

Without a CUDA device the torch-only way runs on the CPU, where it must give the same too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ulpscope.frameworks.torch import cuda_gauge
from ulpscope.frameworks.torch.cuda_gauge import CudaGauge
from ulpscope.model.dtypes import DTYPES
from ulpscope.native import measuring

FLAGS = measuring.STATS | measuring.SKETCH
ON_DEVICE = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
WAYS = ["plain", ON_DEVICE]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [1, 7, 255, 256, 257, 1000, 4096, 8192, 8193, 70_001, 3_000_000]
EXACT = ("max_bits", "min_bits", "numel", "nan", "posinf", "neginf", "zero", "kind", "sketch_len")


class Rows:
    """A sink that keeps what it is told."""

    unknown_measure = bytes(measuring.ROW.itemsize)

    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}
        self.sketches: dict[int, Any] = {}
        self._count = 0

    def reserve_measure(self) -> int:
        self._count += 1
        return self._count - 1

    def complete_measures(self, numbers: Any, rows: Any, sketches: bytes | memoryview) -> None:
        for number, row in zip(numbers, rows.copy(), strict=True):
            start, size = int(row["sketch_offset"]), int(row["sketch_len"])
            self.rows[number] = row
            self.sketches[number] = np.frombuffer(sketches, dtype=np.float32, count=size, offset=start).copy()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(cuda_gauge, "kernels", lambda: None)
        return "cpu"
    return str(request.param)


def measured(way: str, values: list[torch.Tensor], flags: int = FLAGS, shift: int = 0) -> Rows:
    sink = Rows()
    gauge = CudaGauge(sink, torch.device(way, 0) if way == "cuda" else torch.device(way), flags)  # type: ignore[arg-type]
    for value in values:
        moved = value if way == "cpu" else _moved(value, way, shift)
        plan = gauge.plan(moved, DTYPES[str(value.dtype).removeprefix("torch.")])
        gauge.measure(moved, moved.data_ptr(), plan)
    gauge.finish()
    return sink


def _moved(value: torch.Tensor, way: str, shift: int) -> torch.Tensor:
    """The same bits in the same layout on a device, so many elements behind the beginning of their memory."""
    extent = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    flat = torch.as_strided(value, (extent,), (1,), value.storage_offset())
    memory = torch.empty(shift + extent, dtype=value.dtype, device=way)
    memory[shift:] = flat.to(way)
    return torch.as_strided(memory, value.shape, value.stride(), shift)


def check(way: str, values: list[torch.Tensor], flags: int = FLAGS, shift: int = 0) -> None:
    sink = measured(way, values, flags, shift)
    for number, value in enumerate(values):
        code = DTYPES[str(value.dtype).removeprefix("torch.")].code
        stride = None if value.is_contiguous() else tuple(value.stride())
        raw = measuring.measure(value.data_ptr(), code, tuple(value.shape), stride, flags, 2**64 - 1, 0, 0)
        wanted = np.frombuffer(raw, dtype=measuring.ROW, count=1)[0]
        found = sink.rows[number]
        # The modulus of a complex128 is a library's hypot: the last digit may differ between devices.
        for name in EXACT[2:] if value.dtype is torch.complex128 else EXACT:
            assert found[name] == wanted[name], (name, value.dtype, value.shape, found, wanted)
        if flags & measuring.CRC:
            assert found["crc"] == wanted["crc"], (value.dtype, value.shape)
        if flags & measuring.STATS:
            size = max(abs(float(wanted["norm"])), 5e-324) * max(1.0, value.numel() ** 0.5)
            assert abs(found["sum"] - wanted["sum"]) <= 2e-7 * size, (value.dtype, value.shape, found, wanted)
            assert found["norm"] == pytest.approx(wanted["norm"], rel=3e-7, abs=0)
        if flags & measuring.SKETCH:
            # Behind the sketch may lie that of what a mask left.
            sketch = np.frombuffer(
                raw, dtype=np.float32, offset=measuring.ROW.itemsize, count=sink.sketches[number].size
            )
            assert np.abs(sink.sketches[number] - sketch).max() <= 1e-6 * max(float(np.abs(sketch).max()), 1e-45)


def numbers(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + size)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 3).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_of_all_sizes_give_the_numbers_of_the_native_code(way: str, dtype: torch.dtype) -> None:
    check(way, [numbers(size, dtype) for size in SIZES])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_is_counted_and_left_out(way: str, dtype: torch.dtype) -> None:
    values = []
    for size in (5, 300, 20_000):
        value = numbers(size, dtype)
        value[1], value[2], value[3], value[-1] = float("nan"), float("inf"), float("-inf"), float("nan")
        values.append(value)
    values += [torch.full((600,), float("nan"), dtype=dtype), torch.full((3,), float("-inf"), dtype=dtype)]
    check(way, values)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_of_both_signs_and_denormals_are_told_apart(way: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 4
    mixed = torch.tensor([0.0, -0.0, tiny, -tiny, 0.0] * 300, dtype=torch.float64).to(dtype)
    check(way, [torch.zeros(1000, dtype=dtype), -torch.zeros(7, dtype=dtype), mixed, mixed[2:3].clone()])


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool], ids=str
)
@pytest.mark.parametrize(
    "flags", [FLAGS, measuring.STATS | measuring.SKETCH, measuring.STATS], ids=["all", "sketch", "statistics"]
)
def test_every_layout_at_every_place(way: str, dtype: torch.dtype, shift: int, flags: int) -> None:
    block = numbers(7 * 12 * 33 * 6, dtype).reshape(7, 12, 33, 6)
    values = [
        block[:, 1:],
        block.transpose(1, 2),
        block[::2, :, 1:31:3],
        block.permute(3, 1, 0, 2)[:, :5],
        block[3, :, 5],
    ]
    values += [
        block.flatten()[:1],
        block.flatten()[:4097],
        block[0, 0, 0, :1].expand(5, 3),
        block[:, :, 3, 2].t(),
    ]
    check(way, values, flags, shift)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "size", [1 << 16, (1 << 16) + 300, (1 << 20) + 1, 5 * (1 << 20) + 256 * 300 + 9, 6 * (1 << 20) + 9, (1 << 23) + 77]
)
def test_large_tensors_with_zeros_and_what_is_hardly_one(way: str, dtype: torch.dtype, size: int) -> None:
    value = numbers(size, dtype)
    value[::13] = 0
    value[5::91] = -0.0
    value[7::89] = torch.finfo(dtype).smallest_normal / 4
    check(way, [value, value.abs() + 1, torch.zeros_like(value)])
    for place, flags in ((size // 2, FLAGS), (size - 300, measuring.STATS), (7_000, FLAGS | measuring.CRC)):
        value[place] = float("inf")
        check(way, [value], flags)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e18, 1e25, 1e35])
def test_squares_that_leave_float32_do_not_spoil_the_norm(way: str, scale: float) -> None:
    check(way, [(numbers(5000, torch.float64) * scale / 9).to(torch.float32)])


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_squares_that_leave_float64_do_not_spoil_the_norm(way: str, scale: float) -> None:
    check(way, [numbers(5000, torch.float64) * scale], measuring.STATS)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    ],
    ids=str,
)
def test_integers_are_exact(way: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (70_000 * 8,), generator=generator, dtype=torch.uint8)
    wide = raw if dtype is torch.bool else raw.view(dtype)
    value = wide > 127 if dtype is torch.bool else wide
    check(way, [value[:70_001].clone(), value[:9].clone(), value[:1].clone()])


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.reshape(300, 400).t(),
    "heads": lambda x: x.reshape(2, 60, 10, 100).transpose(1, 2),
    "sliced": lambda x: x.reshape(300, 400)[3:290:7, 1:399:3],
    "expanded": lambda x: x[:400].expand(300, 400),
    "five": lambda x: x.reshape(10, 6, 10, 20, 10).permute(4, 1, 3, 0, 2),
    "column": lambda x: x.reshape(300, 400)[:, 5],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_layouts_are_read_in_row_major_order(way: str, layout: str, dtype: torch.dtype) -> None:
    check(way, [LAYOUTS[layout](numbers(120_000, dtype))])


# In runs of 16 bytes, but for the last two; with more than one share of a turn, and blocks that are not whole.
RUNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads": lambda x: x[: 2 * 37 * 26 * 64].reshape(2, 37, 26, 64).transpose(1, 2),
    "pairs": lambda x: x[: 40 * 2 * 30 * 64].reshape(40, 2, 30, 64).permute(2, 0, 1, 3),
    "three": lambda x: x[: 300 * 8 * 56].reshape(300, 8, 56).transpose(0, 1),
    "halves": lambda x: x[: 2000 * 128].reshape(2000, 128)[:, 16:80],
    "odd end": lambda x: x[: 7 * 31 * 5 * 120].reshape(7, 31, 5, 120).permute(2, 0, 1, 3),
    "outermost repeated": lambda x: x[: 400 * 64].reshape(400, 64).expand(5, 400, 64),
    "large": lambda x: x[: 4 * 4099 * 16 * 64].reshape(4, 4099, 16, 64).transpose(1, 2),
    "short": lambda x: x[: 20_000 * 8].reshape(200, 100, 8).transpose(0, 1)[:, :, :4],
    "elsewhere": lambda x: x[: 2000 * 128].reshape(2000, 128)[:, 3:67],
}


@pytest.mark.parametrize("layout", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_that_lie_in_runs_are_read_in_row_major_order(way: str, layout: str, dtype: torch.dtype) -> None:
    if layout == "large" and way != "cuda":
        pytest.skip("takes long by torch operators, which know no shares")
    whole = numbers(4 * 4099 * 16 * 64 if layout == "large" else 300_000, dtype)
    value, tiny, odd = RUNS[layout](whole), RUNS[layout](whole * 1e-4), whole.clone()
    for place in (0, 70, 20_001):
        odd[place], odd[place + 1], odd[place + 2] = float("nan"), float("inf"), float("-inf")
    check(way, [value, RUNS[layout](odd), tiny])
    if way == "cuda":  # other kernels
        check(way, [value], measuring.STATS | measuring.SKETCH)
        check(way, [value], measuring.STATS)


def test_dividing_by_a_size_is_multiplying_and_shifting() -> None:
    generator = np.random.default_rng(0)
    sizes = [*range(2, 600), *map(int, generator.integers(2, 1 << 31, 500)), (1 << 31) - 1, 1 << 30, (1 << 30) + 1]
    for size in sizes:
        how = cuda_gauge._divisor(size)
        factor, shift = how & 0xFFFFFFFF, how >> 32
        last = ((1 << 31) - 1) // size * size
        for number in (
            0,
            1,
            size - 1,
            size,
            last - 1,
            last,
            (1 << 31) - 1,
            *map(int, generator.integers(0, 1 << 31, 20)),
        ):
            assert (number * factor >> 32) >> shift == number // size


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_measured_by_their_modulus(way: str, dtype: torch.dtype) -> None:
    value = torch.view_as_complex(numbers(60_000, torch.float64).reshape(-1, 2)).to(dtype)
    odd = value[:500].clone()
    odd[3], odd[4], odd[5] = complex("nan"), complex(float("inf"), 1), 0
    check(way, [value, odd, value[:1].clone()])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_measured(way: str, dtype: torch.dtype) -> None:
    check(way, [numbers(3000, torch.float32).to(dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_the_checksum_is_the_crc_of_the_bits(way: str, dtype: torch.dtype) -> None:
    values = [numbers(size, torch.float32).to(dtype) for size in (1, 3, 5, 256, 4097, 70_001, 2_500_003)]
    values += [values[-1][1:], values[5][:70_000].reshape(7, 10_000).t()]
    check(way, values, measuring.STATS | measuring.CRC | measuring.SKETCH)
    check(way, values[:3], measuring.CRC)


def test_more_tensors_than_a_batch_holds_come_back_in_order(way: str) -> None:
    values = [torch.tensor([float(number)]) for number in range(1500)]
    sink = measured(way, values, measuring.STATS)
    assert [float(sink.rows[number]["sum"]) for number in range(1500)] == [float(number) for number in range(1500)]
    check(way, [numbers(2_000_000, torch.bfloat16, seed) for seed in range(3)], measuring.STATS)


def test_equal_bits_give_equal_sketches(way: str) -> None:
    value = numbers(3_000_000, torch.float32)
    sink = measured(way, [value, value.clone()])
    assert sink.rows[0]["sum"] == sink.rows[1]["sum"]
    assert sink.rows[0]["norm"] == sink.rows[1]["norm"]
    assert np.array_equal(sink.sketches[0], sink.sketches[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_memory_grows_with_the_tensors() -> None:
    gauge = CudaGauge(Rows(), torch.device("cuda", 0), measuring.STATS | measuring.SKETCH)  # type: ignore[arg-type]
    small, large = (torch.ones(1 << bits, dtype=torch.bfloat16, device="cuda") for bits in (21, 29))
    taken = []
    for value in (small, large):
        gauge.measure(value, value.data_ptr(), gauge.plan(value, DTYPES["bfloat16"]))
        gauge.finish()
        taken.append(torch.cuda.memory_allocated())
    assert taken[1] == taken[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_streams_than_there_are_batches_take_turns_without_taking_more_memory() -> None:
    sink = Rows()
    gauge = CudaGauge(sink, torch.device("cuda", 0), measuring.STATS)  # type: ignore[arg-type]
    streams = [torch.cuda.Stream() for _ in range(6)]
    values = [torch.full((1000,), float(number), device="cuda") for number in range(60)]
    torch.cuda.synchronize()
    for number, value in enumerate(values):
        with torch.cuda.stream(streams[number % 6]):
            gauge.measure(value, value.data_ptr(), gauge.plan(value, DTYPES["float32"]))
    gauge.finish()
    assert [float(sink.rows[number]["sum"]) for number in range(60)] == [1000.0 * number for number in range(60)]
    assert gauge._mail._letters <= 12
    gauge.give_back()
    gauge.measure(values[7], values[7].data_ptr(), gauge.plan(values[7], DTYPES["float32"]))
    gauge.finish()
    assert float(sink.rows[60]["sum"]) == 7000.0
