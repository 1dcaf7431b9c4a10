"""The plain arguments of a kernel as a ledger keeps them: the same thing said in two ways is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ulpscope.frameworks.torch.replay_origins import scalars
from ulpscope.frameworks.torch.replay_reference import plan_of

aten = torch.ops.aten
X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("kernel", "one", "other"),
    [
        (aten._softmax.default, (X, 2, False), (X, -1, False)),
        (aten.sum.dim_IntList, (X, [-1, 0]), (X, [2, 0])),
        (aten.transpose.int, (X, 1, 2), (X, -2, -1)),
        (aten.unsqueeze.default, (X, 3), (X, -1)),
        (aten.stack.default, ([X, X], 3), ([X, X], -1)),
        (aten.cat.default, ([X, X], 0), ([X, X],)),
        (aten.sum.dim_IntList, (X, [0], False), (X, [0])),
    ],
)
def test_two_ways_to_say_it(kernel: Any, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    plan = plan_of(kernel)
    assert scalars(plan, one, {}) == scalars(plan, other, {})


@pytest.mark.parametrize(
    ("kernel", "one", "other"),
    [
        (aten._softmax.default, (X, 1, False), (X, -1, False)),
        (aten.sum.dim_IntList, (X, [0], True), (X, [0])),
        (aten.unsqueeze.default, (X, 2), (X, -1)),
    ],
)
def test_two_things(kernel: Any, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    plan = plan_of(kernel)
    assert scalars(plan, one, {}) != scalars(plan, other, {})
