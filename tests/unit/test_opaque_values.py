"""Classes of which only the class can be told: C asks for each of them once."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ulpscope
from ulpscope.frameworks.torch.tensors import is_opaque, leaves, scalar
from ulpscope.native import taps


class Plain:
    pass


class Pretender:
    """Passes for a dictionary, as proxies do."""

    @property
    def __class__(self) -> Any:
        return dict


class BelowPretender(Pretender):
    pass


@dataclasses.dataclass
class Fields:
    one: int = 1


class Named(NamedTuple):
    one: int


class Colour(enum.Enum):
    RED = 1


class Unhashed(type):
    __hash__ = None  # type: ignore[assignment]


class WithoutHash(metaclass=Unhashed):
    pass


OPAQUE = [
    Plain(),
    object(),
    len,
    leaves,
    functools.partial(len),
    types.MappingProxyType({}),
    {1, 2},
    iter([]),
    range(3),
]
TELLING = [
    1, 1.5, True, None, "x", b"x", 1j, [1], (1,), {"a": 1}, Named(1), Fields(), Colour.RED, collections.OrderedDict(a=1),
    collections.defaultdict(int), collections.deque([1]), collections.UserDict(a=1), types.SimpleNamespace(a=1), torch.float32,
    torch.device("cpu"), torch.strided, torch.preserve_format, torch.Size((1,)), slice(1), ..., np.float32(1), np.zeros(2),
    torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), int, Pretender(), BelowPretender(),
]  # fmt: skip


@pytest.mark.parametrize("value", OPAQUE, ids=lambda value: type(value).__name__)
def test_of_an_opaque_value_nothing_more_can_be_told(value: Any) -> None:
    assert is_opaque(type(value))
    assert list(leaves(value)) == [((), value)]
    assert scalar(value) is None


@pytest.mark.parametrize("value", TELLING, ids=lambda value: type(value).__name__)
def test_what_has_leaves_or_a_value_is_not_opaque(value: Any) -> None:
    assert not is_opaque(type(value))


def test_both_ways_record_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            return x + 1

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for value in (*OPAQUE, *TELLING, WithoutHash()):
                x = self.inner(x, value, value=value)
            return x

    found = []
    for with_c in (True, False):
        if not with_c:
            monkeypatch.setattr(taps, "C", None)
        model, path = Whole(), tmp_path / str(with_c)
        capture = ulpscope.Capture(path, level="module").start(model)
        for _ in range(2):
            model(torch.zeros(2))
            capture.step()
        capture.close()
        found.append(
            [
                [
                    (call.id, [(item.slot, item.type, item.scalar, item.shape) for item in call.values])
                    for call in dump.calls()
                ]
                for dump in ulpscope.open_run(path)
            ]
        )
    assert found[0] == found[1]
