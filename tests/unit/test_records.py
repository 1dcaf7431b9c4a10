"""Statistics follow torch where elements are not finite; element types read back exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ulpscope.model.dtypes import DTYPES, dtype_named, values_from
from ulpscope.model.errors import DumpError
from ulpscope.model.records import Stats

CASES = [
    [1.0, -2.0, 0.0],
    [math.nan, 1.0],
    [math.inf, 1.0],
    [-math.inf, 1.0],
    [math.inf, -math.inf],
    [math.nan],
    [-3.0],
]


@pytest.mark.parametrize("items", CASES)
def test_max_min_mean_and_norm_are_those_of_torch(items: list[float]) -> None:
    tensor = torch.tensor(items, dtype=torch.float64)
    finite = [item for item in items if math.isfinite(item)]
    stats = Stats(
        len(items),
        max(finite, default=0.0),
        min(finite, default=0.0),
        sum(finite),
        math.sqrt(sum(item * item for item in finite)),
        nan_count=sum(map(math.isnan, items)),
        posinf_count=items.count(math.inf),
        neginf_count=items.count(-math.inf),
    )
    expected = [tensor.max().item(), tensor.min().item(), tensor.mean().item(), tensor.norm().item()]
    assert [stats.max, stats.min, stats.mean, stats.norm] == pytest.approx(expected, nan_ok=True, rel=1e-15)


def test_an_empty_tensor_has_no_statistics() -> None:
    stats = Stats(0, 0.0, 0.0, 0.0, 0.0)
    assert (stats.max, stats.min, stats.mean, stats.norm) == (None, None, None, None)


@pytest.mark.parametrize("name", [name for name in DTYPES if name.startswith("float8")])
def test_every_float8_has_the_value_torch_gives_it(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(getattr(torch, name)).to(torch.float32).numpy()
    found = values_from(codes.numpy().tobytes(), DTYPES[name], (256,))
    assert np.array_equal(found, expected, equal_nan=True)


def test_bfloat16_and_complex32_come_exactly_in_a_wider_type() -> None:
    half = torch.randn(64).to(torch.bfloat16)
    found = values_from(half.view(torch.int16).numpy().tobytes(), DTYPES["bfloat16"], (64,))
    assert np.array_equal(found, half.to(torch.float32).numpy())
    parts = torch.randn(8, 2).to(torch.float16)
    found = values_from(parts.numpy().tobytes(), DTYPES["complex32"], (8,))
    assert np.array_equal(found, torch.view_as_complex(parts.to(torch.float32)).numpy())


def test_an_unknown_element_type_is_named() -> None:
    with pytest.raises(DumpError, match=r"torch\.qint8 is not an element type"):
        dtype_named("torch.qint8")
