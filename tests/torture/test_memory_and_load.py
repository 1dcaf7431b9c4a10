"""Memory stays flat, nothing of the program is kept alive, and size does not matter. The long ones are marked slow."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import ulpscope
from integration.runs import LEVELS, whole_dumps

PROMISE = "fast and small enough"
case = pytest.mark.case
levels = pytest.mark.parametrize("level", LEVELS)
MB = 1 << 20


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def net(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


def train(model: nn.Module, steps: int, capture: ulpscope.Capture | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().sum().backward()
        optimizer.step()
        if capture is not None:
            capture.step()


@case("rss_200")
@levels
def test_memory_does_not_grow_with_the_steps(level: str, tmp_path: Path) -> None:
    model = net()
    with ulpscope.capture(tmp_path, model=model, level=level, stacks=False) as capture:
        train(model, 20, capture)
        before, objects = resident(), len(gc.get_objects())
        train(model, 180, capture)
        assert resident() - before < 60 * MB
        assert len(gc.get_objects()) - objects < 5000


@case("load: memory flat over 500 steps")
@pytest.mark.slow
@levels
def test_memory_is_flat_over_500_steps(level: str, tmp_path: Path) -> None:
    model = net()
    with ulpscope.capture(tmp_path, model=model, level=level, tensors=True) as capture:
        train(model, 100, capture)
        before, objects = resident(), len(gc.get_objects())
        train(model, 400, capture)
        assert resident() - before < 30 * MB
        assert len(gc.get_objects()) - objects < 2000


@case("pin_activations")
@levels
def test_an_activation_is_freed_when_it_would_be(level: str, tmp_path: Path) -> None:
    model = net()
    seen: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    with ulpscope.capture(tmp_path, model=model, level=level, tensors=True):
        gc.disable()
        try:
            for _ in range(3):
                loss = model(torch.ones(8, 64)).square().sum()
                loss.backward()
                del loss
                assert [each() for each in seen] == [None] * len(seen)
        finally:
            gc.enable()


@case("pin_inference")
@levels
def test_a_large_intermediate_is_freed_at_once(level: str, tmp_path: Path) -> None:
    size = 4 * MB
    model = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Tanh())
    seen: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
    data = torch.ones(size)
    with torch.no_grad():
        for _ in range(10):  # what the allocator keeps for later is its own business, and there from now on
            data = model(data)
        before = resident()
        with ulpscope.capture(tmp_path, model=model, level=level):
            for _ in range(30):
                data = model(data)
                assert seen[-1]() is None
            grown = resident() - before
    assert grown < 10 * 4 * size


@case("index_speed")
def test_an_index_costs_about_what_it_costs_without_us(tmp_path: Path) -> None:
    """Ten times is the limit of the case; the figures are in benchmarks/."""
    table, places = torch.ones(8192, 64), torch.randint(8192, (8192,))

    def seconds() -> float:
        best = 1e9
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(5):
                table[places]
            best = min(best, time.perf_counter() - began)
        return best

    seconds()
    bare = seconds()
    capture = ulpscope.Capture(tmp_path)
    assert seconds() < 10 * bare
    with capture:
        pass
    assert seconds() < 10 * bare


@case("load: a million calls in one step")
@pytest.mark.slow
def test_a_million_calls_in_one_step(tmp_path: Path) -> None:
    data = torch.ones(2)
    with ulpscope.capture(tmp_path, level="op"), torch.no_grad():
        for _ in range(1000):
            torch.add(data, 1)
        before = resident()
        for _ in range(999_000):
            torch.add(data, 1)
        assert resident() - before < 200 * MB
    dump = ulpscope.open_dump(tmp_path)
    assert dump.ending == "complete" and len(dump) == 1_000_000
    assert dump.call("Torch.add.999999.forward").values[-1].stats.max == 2.0


@case("load: a hundred thousand calls with a graph")
@pytest.mark.slow
def test_a_long_graph_is_walked_back(tmp_path: Path) -> None:
    data = torch.ones(2, requires_grad=True)
    with ulpscope.capture(tmp_path, level="op", stacks=False):
        total = data
        for _ in range(100_000):
            total = total + 1
        total.sum().backward()
        del total
    dump = ulpscope.open_dump(tmp_path)
    assert sum(call.phase.value == "backward" for call in dump.ids()) == 100_001


@case("load: ten thousand steps")
@pytest.mark.slow
def test_ten_thousand_steps(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path, level="op") as capture:
        for _ in range(100):
            torch.add(torch.ones(1), 1)
            capture.step()
        before = resident()
        for _ in range(9_900):
            torch.add(torch.ones(1), 1)
            capture.step()
        assert resident() - before < 50 * MB
    places = list((tmp_path).glob("step*/rank0/manifest.json"))
    assert len(places) == 10_000
    assert ulpscope.open_dump(tmp_path, step=9_999).ending == "complete"


@case("load: a tensor of 2 GB")
@pytest.mark.slow
def test_a_tensor_of_two_gigabytes(tmp_path: Path) -> None:
    data = torch.ones((1 << 31) + 10, dtype=torch.int8)
    data[-1] = 5
    with ulpscope.capture(tmp_path, level="op", tensors=True, checksum=True, queue_mb=64):
        before = resident()
        data.view(-1).max()
        assert resident() - before < 500 * MB
    dump = ulpscope.open_dump(tmp_path)
    value = dump.call("Tensor.max.0.forward").values[0]
    assert (value.stats.max, value.stats.numel) == (5, (1 << 31) + 10)
    assert dump.load(value)[-1] == 5


@case("load: a hundred thousand modules")
@pytest.mark.slow
def test_a_hundred_thousand_modules(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(100_000)))
    with ulpscope.capture(tmp_path, model=model, level="module", stacks=False):
        model(torch.ones(1))
    dump = ulpscope.open_dump(tmp_path)
    assert dump.ending == "complete" and len(dump) == 100_001


@case("load: 64 ranks at once")
def test_many_ranks_write_at_once(tmp_path: Path) -> None:
    count = int(os.environ.get("ULPSCOPE_RANKS", "64"))
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            code = 1
            try:
                with ulpscope.capture(tmp_path / "run", rank=rank) as capture:
                    for step in range(3):
                        torch.add(torch.full((10,), float(rank)), step)
                        capture.step()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * count
    dumps = whole_dumps(tmp_path / "run", 3 * count)
    for dump in dumps:
        value = dump.call("Torch.add.0.forward").values[-1]
        assert value.stats.max == dump.manifest.rank + dump.manifest.step
    assert not list((tmp_path / "run").glob(".*"))


@case("load: names longer than the file system allows")
@levels
def test_names_of_any_length_are_kept(level: str, tmp_path: Path) -> None:
    name = "n" * 3000
    model: Any = nn.Module()
    model.forward = lambda data: getattr(model, name)(data)
    model.add_module(name, nn.Linear(1, 1))
    with ulpscope.capture(tmp_path, model=model, level=level, tensors=True) as capture:
        model(torch.ones(1)).sum().backward()
        capture.save(name, torch.ones(1))
    (dump,) = whole_dumps(tmp_path, 1)
    assert dump.call(f"{name}.0.debug").values[0].stats.max == 1.0
    if level != "op":
        assert dump.call(f"Module.{name}.Linear.forward.0").values
