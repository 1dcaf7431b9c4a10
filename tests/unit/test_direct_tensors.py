"""Tensors that C asks without Python: only where every answer was seen to be right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from ulpscope.frameworks.torch import direct, internals
from ulpscope.native import taps

pytestmark = pytest.mark.skipif(taps.C is None, reason="the extension was not built")


@pytest.fixture(autouse=True)
def learned() -> Iterator[None]:
    assert direct.learn()
    yield
    direct.learn.cache_clear()
    assert direct.learn()


WRONG = {
    "address": (1, lambda value: value + 8),
    "keys": (2, lambda value: value ^ 1),
    "requires_grad": (3, lambda value: not value),
    "version": (4, lambda value: value + 1),
    "data_ptr": (5, lambda value: value + 1),
    "shape": (6, lambda value: (*value, 1)),
    "stride": (7, lambda value: value[1:] or (7,)),
    "offset": (8, lambda value: value + 1),
    "output": (9, lambda value: value + 1),
    "base": (10, lambda value: torch.zeros(1) if value is None else None),
    "device": (11, lambda value: value + 1),
    "storage": (12, lambda value: value + 1),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("sample", [0, 3, -1])
def test_one_answer_that_differs_is_enough(what: str, sample: int) -> None:
    samples = direct.samples()
    place, changed = WRONG[what]
    one = list(samples[sample])
    one[place] = changed(one[place])
    samples[sample] = tuple(one)
    assert taps.C is not None
    assert not taps.C.learn(samples)


WRONG_NODES = {
    "sequence": lambda value, sequence, children: (value, sequence + 1, children),
    "fewer children": lambda value, sequence, children: (value, sequence, children[1:]),
    "more children": lambda value, sequence, children: (value, sequence, (*children, (None, 0, False))),
    "another child": lambda value, sequence, children: (value, sequence, ((value, 0, False), *children[1:])),
    "no child": lambda value, sequence, children: (value, sequence, ((None, 0, False), *children[1:])),
    "another output": lambda value, sequence, children: (
        value, sequence, ((children[0][0], children[0][1] + 1, children[0][2]), *children[1:])
    ),
    "another leaf": lambda value, sequence, children: (
        value, sequence, ((torch.nn.Parameter(torch.ones(2)), 0, True), *children[1:])
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_NODES)
@pytest.mark.parametrize("sample", [1, 2, 4])
def test_one_node_that_differs_is_enough(what: str, sample: int) -> None:
    nodes = direct.nodes()
    nodes[sample] = WRONG_NODES[what](*nodes[sample])
    assert taps.C is not None
    assert not taps.C.learn_graph(nodes)
    assert taps.C.learn_graph(direct.nodes())


@pytest.mark.parametrize("sample", range(8))
def test_one_storage_that_differs_is_enough(sample: int) -> None:
    storages = direct.storages()
    assert {told[2] for told in storages} == {False, True}
    value, place, resizable = storages[sample]
    assert taps.C is not None
    wrongs = [(value, storages[sample - 1][1], resizable)]
    if sample < 7:  # the last alone tells the flag from a byte of its allocator's address
        wrongs.append((value, place, not resizable))
    for wrong in wrongs:
        assert not taps.C.learn_storage([*storages[:sample], wrong, *storages[sample + 1 :]])
    assert taps.C.learn_storage(storages)


def test_a_leaf_that_is_told_to_be_none_is_enough() -> None:
    nodes = direct.nodes()
    value, sequence, ((leaf, number, _), *others) = nodes[2]
    nodes[2] = (value, sequence, ((nodes[0][0], number, False), *others))
    assert leaf.is_leaf
    assert taps.C is not None
    assert not taps.C.learn_graph(nodes)


def layers() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.Identity(), torch.nn.GELU())
    return block, torch.nn.GRU(6, 4, batch_first=True)


def graphs(block: torch.nn.Module, both: torch.nn.Module) -> None:
    """What a call can create: one node, several, none; leaves, views that were written, several outputs, custom nodes."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 2

    start = torch.randn(2, 3, 6, requires_grad=True)
    value = block(start)
    value = value + Twice.apply(value)
    halves = value.chunk(2, dim=-1)
    value = torch.cat([halves[1], halves[0] * halves[0]], dim=-1)
    other = value.clone()
    other[:, 1].mul_(3)
    outputs, last = both(other)
    (outputs.sum() + last.pow(2).sum() + torch.addmm(other[0], other[1], torch.eye(6)).sum()).backward()


@pytest.mark.parametrize("level", ["op", "module", "mix"])
def test_without_the_graph_the_same_is_recorded(tmp_path: Path, level: str) -> None:
    def recorded(name: str) -> list[Any]:
        block, both = layers()
        with ulpscope.capture(tmp_path / name, level=level, checksum=True):
            graphs(block, both)
        return [
            (call.id, [(value.slot, value.shape, value.stats) for value in call.values])
            for call in ulpscope.open_dump(tmp_path / name).calls()
        ]

    fast = recorded("fast")
    assert taps.C is not None
    assert not taps.C.learn_graph([(value, sequence + 1, children) for value, sequence, children in direct.nodes()])
    slow = recorded("slow")
    assert fast == slow
    assert any(call_id.phase is ulpscope.model.records.Phase.BACKWARD for call_id, _ in fast)


@pytest.mark.parametrize("level", ["op", "mix"])
def test_without_the_silence_the_same_is_recorded(tmp_path: Path, level: str) -> None:
    def recorded(name: str) -> list[Any]:
        with ulpscope.capture(tmp_path / name, level=level, checksum=True):
            odd_tensors()
        dump = ulpscope.open_dump(tmp_path / name)
        return [(call.id, [(value.slot, value.stats) for value in call.values]) for call in dump.calls()]

    fast = recorded("fast")
    assert taps.C is not None
    assert not taps.C.learn_thread(0, 0)
    assert fast == recorded("slow")


def test_a_torch_that_cannot_be_asked_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "as_negative", None)
    direct.learn.cache_clear()
    assert not direct.learn()
    monkeypatch.undo()


def test_learning_calls_no_hook_of_the_program() -> None:
    def refuse(_: object) -> object:
        raise AssertionError("nothing is to be kept for a backward pass")

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        direct.samples()


def rows(path: Path, programme: Any) -> list[Any]:
    with ulpscope.capture(path, level="mix", checksum=True):
        programme()
    dump = ulpscope.open_dump(path)
    return [
        (call.id, [(value.slot, value.dtype, value.shape, value.stats) for value in call.values])
        for call in dump.calls()
    ]


def odd_tensors() -> None:
    """What has the same form and is not the same: views, conjugates, inference, transforms, classes."""
    base = torch.arange(24.0).reshape(4, 6).requires_grad_()
    total = (base[1:, ::2] * base[:3, :3]).sum() + base.t()[2].pow(2).sum()
    wave = torch.complex(base.detach(), base.detach() + 1)
    total = total + (wave.conj() * wave).real.sum() + (wave.conj().imag + 1).sum()
    parts = base.unbind()
    total = total + sum(part.mean() for part in parts[1:])
    with torch.inference_mode():
        (torch.ones(4, 6) * 2).add_(1)
    torch.vmap(lambda row: row * 2)(base.detach())
    base.detach().clone().add_(1)
    torch.empty(0, 6).sum()
    torch.zeros(3, dtype=torch.bfloat16).expand(5, 3).contiguous()
    total.backward()


def test_attributes_tell_the_same(tmp_path: Path) -> None:
    told = rows(tmp_path / "direct", odd_tensors)
    samples = direct.samples()
    assert taps.C is not None
    assert not taps.C.learn([(*samples[0][:4], samples[0][4] + 1, *samples[0][5:]), *samples[1:]])
    assert rows(tmp_path / "asked", odd_tensors) == told
    assert len(told) > 40
