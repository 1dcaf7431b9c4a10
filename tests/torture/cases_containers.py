"""Arguments and results in containers of every kind, and names of every length."""

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ulpscope
from integration.programs_layers import trained
from integration.runs import Program

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Holder(nn.Module):
    """Two layers whose results go into a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)
        self.kind = kind

    def forward(self, data: Tensor) -> Any:
        left, right = self.left(data), self.right(data)
        if self.kind == "dict":
            return OrderedDict(left=left, more={"right": [right, (left + right,)], "n": 3})
        if self.kind == "dataclass":
            return Output(left, right)
        return Pair(left, right)


def out_dict() -> Program:
    model = Holder("dict")

    def loss() -> Tensor:
        out = model(torch.randn(2, 3))
        assert type(out) is OrderedDict and type(out["more"]["right"][1]) is tuple
        return out["left"].sum() + out["more"]["right"][1][0].square().sum()

    return trained(model, loss)


def out_dataclass() -> Program:
    model = Holder("dataclass")

    def loss() -> Tensor:
        out = model(torch.randn(2, 3, requires_grad=True))
        assert type(out) is Output
        return out.logits.square().sum() + out.hidden.sum()

    return trained(model, loss)


def holds_out_dataclass(dump: ulpscope.Dump, level: str) -> None:
    if level == "op":
        return
    paths = {
        value.slot.path for value in dump.call("Module.Holder.forward.0").values if value.slot.role.value == "output"
    }
    assert paths == {("logits",), ("hidden",)}
    assert {value.slot.path for value in dump.call("Module.Holder.backward.0").values} >= paths


def out_namedtuple() -> Program:
    model = Holder("namedtuple")

    def loss() -> Tensor:
        out = model(torch.randn(2, 3))
        assert type(out) is Pair
        return out.left.sum() * out.right.sum()

    return trained(model, loss)


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, *, data: Tensor, scale: float) -> Tensor:
        return self.layer(data) * scale


def kwargs_only() -> Program:
    first, model = nn.Linear(3, 3), KeywordsOnly()
    return trained(
        nn.ModuleList([first, model]), lambda: model(data=first(torch.randn(2, 3)), scale=2.0).square().sum()
    )


def holds_kwargs_only(dump: ulpscope.Dump, level: str) -> None:
    if level == "op":
        return
    name = next(call for call in dump.ids() if call.name.endswith("KeywordsOnly") and call.phase.value == "backward")
    shown = {value.slot.path: value for value in dump.call(name).values if value.slot.role.value == "output"}
    assert shown[("data",)].stats is not None


class Sums(nn.Module):
    def forward(self, items: list[Tensor]) -> Tensor:
        return items[0] * 10 + items[1]


def list_arg_leaf() -> Program:
    leaf, first, sums = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), Sums()

    def step() -> list[Any]:
        leaf.grad = None
        items = [leaf, first(torch.randn(4))]
        before = list(map(id, items))
        out = sums(items)
        out.square().sum().backward()
        return [out, leaf.grad, before == list(map(id, items))]

    return Program(step, first)


class GivesLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, data: Tensor) -> list[Tensor]:
        return [self.leaf, self.layer(data)]


def list_out_leaf() -> Program:
    model = GivesLeaf()

    def loss() -> Tensor:
        leaf, out = model(torch.randn(4))
        assert leaf is model.leaf
        return (leaf * 10 + out).square().sum()

    return trained(model, loss)


class Reads(nn.Module):
    def forward(self, items: list[Tensor], table: dict[str, Tensor]) -> Tensor:
        return items[0] + table["a"]


def caller_container_untouched() -> Program:
    model = Reads()

    def step() -> list[Any]:
        items, table = [torch.randn(2, requires_grad=True) * 1], {"a": torch.randn(2, requires_grad=True) * 1}
        kept = items[0], table["a"]
        model(items, table).sum().backward()
        return [items[0] is kept[0], table["a"] is kept[1], len(items), list(table)]

    return Program(step, model)


class Colour(enum.Enum):
    RED = 1


class Returns(nn.Module):
    def forward(self, value: Any) -> Any:
        return value


def odd_dict_keys() -> Program:
    model = Returns()

    def step() -> list[Any]:
        table = {1: torch.ones(1), (2, "x"): torch.ones(2), Colour.RED: torch.ones(3), None: 4, 1.5: True, b"k": 1}
        return [model(table) is table, len(table)]

    return Program(step, model)


def hostile_dict_keys() -> Program:
    model = Returns()
    keys = ("../../up", "/etc/x", " ", "ünï✓", "k" * 300, "a\nb\0c", "\ud800", "..", "")

    def step() -> int:
        return len(model({key: torch.ones(2) for key in keys}))

    return Program(step, model)


class Nest(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.a_module_with_a_rather_long_name_to_go_with = nn.Linear(2, 2) if not depth else Nest(depth - 1)

    def forward(self, data: Tensor) -> Tensor:
        return self.a_module_with_a_rather_long_name_to_go_with(data)


def long_module_names() -> Program:
    model = Nest(12)
    return trained(model, lambda: model(torch.randn(1, 2)).sum())


def holds_long_module_names(dump: ulpscope.Dump, level: str) -> None:
    if level != "op":
        assert max(len(call.name) for call in dump.ids()) > 500


def numpy_args() -> Program:
    model = Returns()
    values: list[Any] = [
        np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1j), np.datetime64("2020-01-01"), np.float64("nan"),
        np.arange(4.0), np.array([1j, 2j]), np.array([{}, []], dtype=object), np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["a", "b"]), np.zeros((0, 3)), np.str_("text"), np.void(b"\0\1"), np.zeros(2, dtype=[("x", "f4")]),
    ]  # fmt: skip
    return Program(lambda: len(model(values)), model)


def recursive_args() -> Program:
    model = Returns()

    def step() -> list[int]:
        knot: list[Any] = [torch.ones(1)]
        knot.append(knot)
        deep: list[Any] = [torch.ones(2)]
        for _ in range(600):
            deep = [deep]
        table: dict[str, Any] = {}
        table["self"] = table
        return [len(model(knot)), len(model(deep)), len(model(table))]

    return Program(step, model)
