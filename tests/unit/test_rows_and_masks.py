"""What follows a sketch: numbers by rows, and what is left of a tensor without its mask. Both parts say the same."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import ulpscope
from ulpscope.model.dtypes import DTYPES
from ulpscope.native import measuring, measuring_fallback

try:
    from ulpscope.native import _measure

    MODULES = [_measure, measuring_fallback]
except ImportError:
    MODULES = [measuring_fallback]
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
EVERYTHING = measuring.STATS | measuring.SKETCH | measuring.BY_ROWS


def measure(module: ModuleType, tensor: torch.Tensor, flags: int = EVERYTHING) -> tuple[Any, Any, Any, Any, Any]:
    """The row, its sketch, the part without a mask and its sketch (None where there is none), and the numbers by rows."""
    code = DTYPES[str(tensor.dtype)[6:]].code
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    data = module.measure(tensor.data_ptr(), code, tuple(tensor.shape), stride, flags, 0, 0, 0)
    row = np.frombuffer(data[:112], measuring.ROW)[0]
    floats, length = np.frombuffer(data[112:], "<f4"), int(row["sketch_len"])
    sketch, rest, part, own = floats[:length], floats[length:], None, None
    if row["known"] & 1:
        part, own, rest = rest[:12].view(measuring.UNMASKED)[0], rest[12 : 12 + length], rest[12 + length :]
    assert rest.size == 2 * (int(row["known"]) >> 1)
    return row, sketch, part, own, rest.reshape(-1, 2)


def signs(width: int) -> Any:
    masks = measuring.sketch_masks()
    return np.array([1.0 - 2.0 * (int(masks[j >> 8 & 255, j >> 5 & 7]) >> (j & 31) & 1) for j in range(width)])


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@each_module
@each_float
@pytest.mark.parametrize("shape", [(2, 8), (3, 17), (5, 300), (4, 6, 96), (2, 4099), (1024, 33)])
def test_each_row_has_its_sum_with_signs_and_its_norm(
    module: ModuleType, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = values(*shape, dtype=dtype)
    rows = measure(module, tensor)[4]
    exact = tensor.double().numpy().reshape(-1, shape[-1])
    assert rows.shape == (len(exact), 2)
    norms = np.linalg.norm(exact, axis=1)
    assert np.abs(rows[:, 0] - exact @ signs(shape[-1])).max() <= 2e-5 * norms.max()
    assert np.allclose(rows[:, 1], norms, rtol=2e-6)


@each_module
def test_rows_are_those_of_the_tensor_whatever_its_strides(module: ModuleType) -> None:
    tensor = values(40, 12).t()
    assert np.allclose(measure(module, tensor)[4], measure(module, tensor.contiguous())[4], rtol=1e-5, atol=1e-5)


@each_module
@pytest.mark.parametrize(
    "tensor",
    [values(1, 64), values(64), values(4, 7), values(1025, 8), torch.ones(4, 8, dtype=torch.int32), torch.ones(4, 8, dtype=torch.complex64)],
    ids=["one row", "no rows", "narrow", "many", "integers", "complex"],
)  # fmt: skip
def test_what_is_not_worth_it_has_no_rows(module: ModuleType, tensor: torch.Tensor) -> None:
    assert measure(module, tensor)[4].size == 0


@each_module
def test_without_being_asked_there_are_no_rows(module: ModuleType) -> None:
    assert measure(module, values(4, 8), measuring.STATS | measuring.SKETCH)[4].size == 0


@each_module
def test_what_is_not_finite_counts_as_zero_in_its_row(module: ModuleType) -> None:
    tensor = torch.ones(2, 8)
    tensor[0, 3], tensor[1, 4] = math.nan, math.inf
    assert measure(module, tensor)[4][:, 1].tolist() == pytest.approx([math.sqrt(7)] * 2)


@each_module
@each_float
@pytest.mark.parametrize("fill", ["lowest", "highest", "by hand"])
def test_a_mask_is_left_out_of_what_is_unmasked(module: ModuleType, dtype: torch.dtype, fill: str) -> None:
    limits = torch.finfo(dtype)
    by_hand = -1e4 if dtype is torch.float16 else -1e9
    number = {"lowest": limits.min, "highest": limits.max, "by hand": by_hand}[fill]
    tensor = values(20, 300, dtype=dtype)
    mask = torch.ones(20, 300).tril(150).bool()
    masked = torch.where(mask, tensor, torch.full((), number, dtype=dtype))
    row, _, part, own, _ = measure(module, masked, measuring.STATS | measuring.SKETCH)
    plain = measure(module, torch.where(mask, tensor, torch.zeros((), dtype=dtype)), measuring.STATS | measuring.SKETCH)
    exact = tensor[mask].double()
    assert part is not None
    assert (int(part["numel"]), int(part["zero"])) == (exact.numel(), int((exact == 0).sum()))
    assert (part["max"], part["min"]) == (exact.max().item(), exact.min().item())
    assert float(part["sum"]) == pytest.approx(exact.sum().item(), rel=1e-9)
    assert float(part["norm"]) == pytest.approx(exact.norm().item(), rel=1e-9)
    assert np.allclose(own, plain[1], rtol=1e-5, atol=1e-5)
    # What is told of the whole tensor stays what it was.
    finite = row.tobytes()[:16]
    assert np.frombuffer(finite, "<f8").tolist() == [masked.double().max().item(), masked.double().min().item()]


@each_module
def test_without_a_mask_nothing_follows(module: ModuleType) -> None:
    assert measure(module, values(4, 8) * 2.0**25, measuring.STATS)[2] is None
    assert measure(module, torch.full((4,), 2**40), measuring.STATS)[2] is None


@each_module
def test_a_tensor_that_is_all_mask_has_nothing_unmasked(module: ModuleType) -> None:
    tensor = torch.full((4,), torch.finfo(torch.float32).min)
    tensor[0], tensor[1] = math.nan, math.inf
    part = measure(module, tensor, measuring.STATS)[2]
    assert [float(part[name]) for name in measuring.UNMASKED.names or ()] == [0] * 6


@pytest.fixture(params=["C", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr("ulpscope.native.taps.C", None)


def test_a_dump_tells_rows_and_what_is_unmasked(way: None, tmp_path: Path) -> None:
    scores, mask = values(4, 6, 16), torch.full((6, 16), torch.finfo(torch.float32).min).triu(9)
    with ulpscope.capture(tmp_path, rows=True):
        masked = scores + mask
        torch.softmax(masked, -1)
    dump = ulpscope.open_dump(tmp_path)
    first, second, result = (value for value in dump.call("Tensor.__add__.0.forward").values if value.is_tensor)
    rows = dump.rows(first)
    assert rows is not None
    assert np.allclose(rows[:, 0], scores.double().reshape(-1, 16).numpy() @ signs(16), atol=1e-5)
    assert np.allclose(rows[:, 1], scores.reshape(-1, 16).norm(dim=1).numpy(), rtol=1e-6)
    plain = dump.unmasked(first)
    assert plain is not None
    assert plain.stats == first.stats
    kept = scores[(mask == 0).expand_as(scores)]
    found = dump.unmasked(result)
    assert found is not None
    assert (found.stats.numel, found.stats.finite_max) == (kept.numel(), kept.max().item())
    assert found.stats.finite_norm == pytest.approx(kept.double().norm().item())
    assert result.stats is not None
    assert result.stats.min == (scores + mask).min().item()
    assert found.sketch is not None
    assert len(found.sketch) == 256
    whole = dump.sketch(second)
    assert whole is not None
    assert len(whole) == 96


def test_a_dump_without_rows_has_none(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path):
        torch.sin(values(4, 8))
    dump = ulpscope.open_dump(tmp_path)
    assert dump.rows(dump.call("Torch.sin.0.forward").values[0]) is None


def test_rows_of_an_error_tell_its_norm() -> None:
    reference, error = values(512, 64), values(64, 512).reshape(512, 64) * 1e-3
    left, right = (measure(MODULES[0], each)[4][:, 0].astype(np.float64) for each in (reference, reference + error))
    estimate = float(np.linalg.norm(right - left))
    assert estimate == pytest.approx(error.norm().item(), rel=0.15)
