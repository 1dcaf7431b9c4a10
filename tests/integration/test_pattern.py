"""The shape of an error has a name: errors made by hand, under rounding, in tensors of two precisions and with pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ulpscope.analyze.pattern import Pattern, pattern
from ulpscope.frameworks.torch import replay_measure, replay_pieces
from ulpscope.frameworks.torch.replay_measure import measures
from ulpscope.frameworks.torch.replay_reference import plan_of
from ulpscope.store.ledger_file import Measure, row_of

ROWS, COLUMNS, TERMS = 96, 160, 64


def zero(*where: Any) -> Callable[[Tensor], Tensor]:
    def change(y: Tensor) -> Tensor:
        y = y.clone()
        y[where] = 0
        return y

    return change


def toward_zero(y: Tensor) -> Tensor:
    """Below the nearest number in half of all cases, which is what dropping digits does."""
    down = torch.rand(y.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    bits = torch.int32 if y.dtype is torch.float32 else torch.int16
    return torch.where(down, (y.view(bits) - 1).view(y.dtype), y)


def outliers(y: Tensor) -> Tensor:
    y = y.clone()
    y.view(-1)[torch.tensor([17, 900, 4321, 7777, 11111, 15000])] *= 1.5
    return y


def noise(y: Tensor) -> Tensor:
    return (y.double() + 0.1 * torch.randn(y.shape, generator=torch.Generator().manual_seed(6))).to(y.dtype)


def clamped(y: Tensor) -> Tensor:
    top = float(y.abs().max()) * 0.4
    return y.clamp(-top, top)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str, tuple[Any, ...]]] = {
    "block": (zero(slice(8, 24), slice(32, 64)), "block", ((0, 8, 24), (1, 32, 64))),
    "tile of columns": (zero(slice(None), slice(32, 64)), "block", ((1, 32, 64),)),
    "tail": (zero(slice(None), slice(-7, None)), "tail", ((1, 153, 160),)),
    "last rows": (zero(slice(90, None)), "tail", ((0, 90, 96),)),
    "one channel": (zero(slice(None), 5), "one channel", ((1, 5, 6),)),
    "one row": (zero(50), "one channel", ((0, 50, 51),)),
    "stride": (zero(slice(None), slice(1, None, 4)), "stride", ((1, 1, 158),)),
    "stride to both ends": (zero(slice(None), slice(0, None, 3)), "stride", ((1, 0, 160),)),
    "stride of rows": (zero(slice(0, None, 2)), "stride", ((0, 0, 95),)),
    "scale": (lambda y: (y.double() * 1.03).to(y.dtype), "scale", ()),
    "smaller scale": (lambda y: (y.double() * 0.97).to(y.dtype), "scale", ()),
    "saturation": (clamped, "saturation", ()),
    "sparse outliers": (outliers, "sparse outliers", ()),
    "uniform": (noise, "uniform", ()),
}


def found(change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Pattern:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(ROWS, TERMS, generator=generator).to(dtype)
    b = torch.randn(TERMS, COLUMNS, generator=generator).to(dtype)
    b[:, 5] *= 0.9
    return pattern(of(measures(plan_of(torch.ops.aten.mm.default), (a, b), {}, [change(a @ b)])[0]))


def of(plain: dict[str, Any]) -> Measure:
    row = {"seq": 0, "step": 0, "rank": 0, "phase": "forward", "op": "aten.mm.default", "dtypes": "", "index": 0}
    return row_of({**row, "kind": "contraction", "measures": [plain]}).measures[0]


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGES)
def test_an_error_is_told_by_its_shape(
    name: str, dtype: torch.dtype, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        monkeypatch.setattr(replay_pieces, "CHUNK", 1 << 10)
        monkeypatch.setattr(replay_measure, "BLOCK", 1 << 10)
    change, kind, ranges = CHANGES[name]
    told = found(change, dtype)
    assert told.kind == kind, told
    assert not ranges or told.ranges == ranges


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_truncation_is_told(dtype: torch.dtype) -> None:
    assert found(toward_zero, dtype).kind == "truncation"


def test_the_factor_of_a_scale_is_told() -> None:
    told = found(CHANGES["scale"][0], torch.float32)
    assert abs(float(told.text.rsplit(" ", 1)[1]) - 1.03) < 1e-4
