"""Programs that surprise the part of a capture which is C: it records what Python would, and nothing breaks."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ulpscope
from integration.runs import LEVELS
from ulpscope.frameworks import threads
from ulpscope.model.names import call_text
from ulpscope.native import taps

PROMISE = "the run is not changed"
case = pytest.mark.case
levels = pytest.mark.parametrize("level", LEVELS)
both = pytest.mark.parametrize(
    "extension",
    [pytest.param(True, marks=pytest.mark.skipif(taps.C is None, reason="not built")), False],
    ids=["C", "Python"],
)


@pytest.fixture
def part(extension: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not extension:
        monkeypatch.setattr(taps, "C", None)


def names(path: Path) -> list[str]:
    return [call_text(call.id) for call in ulpscope.open_dump(path).calls()]


FINALIZERS = """
import gc, os, random, sys, torch, ulpscope
from torch import nn

class Cycle:
    def __init__(self): self.me = self
    def __del__(self): model(torch.ones(2, 3))

model, x, count = nn.Linear(3, 3), torch.ones(4), 0
random.seed(int(sys.argv[2]))
with ulpscope.capture(sys.argv[1], model=model, level="mix") as capture:
    for turn in range(6000):
        gc.disable()
        Cycle()
        kept = [[] for _ in range(random.randrange(40))]
        gc.set_threshold(random.randrange(10, 50))
        gc.enable()
        for _ in range(4): torch.add(x, 1)
        gc.disable()
        if turn % 500 == 499: capture.step()
os._exit(0)  # torch itself may fall over finalizers at the end
"""


@case("finalizers: that call a model")
@pytest.mark.parametrize("seed", [1, 2])
def test_garbage_may_call_a_model_wherever_it_is_collected(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-c", FINALIZERS, str(tmp_path / "run"), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first = ulpscope.open_dump(tmp_path / "run", step=0)
    assert sum(call.name == "add" for call in first.ids()) >= 4 * 500


WRITERS_GARBAGE = """
import os, sys, threading, torch, ulpscope
from torch import nn
from ulpscope.model.background import is_own

model, x, ending, called, replace = nn.Linear(3, 3), torch.ones(4), threading.Event(), threading.Event(), os.replace

def collecting(*args, **kwargs):
    if is_own() and ending.is_set() and not called.is_set():  # the step ends, and waits for this thread
        called.set()
        model(torch.ones(2, 3))  # as a finalizer would
    return replace(*args, **kwargs)

os.replace = collecting
with ulpscope.capture(sys.argv[1], model=model, level="mix") as capture:
    torch.add(x, 1)
    ending.set()
    capture.step()
    assert called.is_set(), "nothing was written"
    model(torch.ones(2, 3))
"""


@case("finalizers: that call a model on a thread of ours")
def test_garbage_may_call_a_model_on_the_thread_that_writes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITERS_GARBAGE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [call.name for call in ulpscope.open_dump(tmp_path / "run", step=0).ids()] == ["add"]
    assert "linear" in [call.name for call in ulpscope.open_dump(tmp_path / "run", step=1).ids()]


@case("threads: one that measures for long")
def test_a_thread_that_measures_for_long_keeps_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PATIENCE", 0.02)
    large = torch.ones(30_000_000)
    large[::7] = 3.0
    done = threading.Event()

    def other() -> None:
        x = torch.randn(1000)
        while not done.is_set():
            x = torch.tanh(x * 1.5)
            time.sleep(0.002)

    with ulpscope.capture(tmp_path, level="op") as capture:
        gate = capture._recorder.gate
        thread = threading.Thread(target=other)
        thread.start()
        for _ in range(4):
            torch.neg(large)
        done.set()
        thread.join()
        assert capture._recorder.gate is gate, "the gate was taken from a thread that was at work"
    dump = ulpscope.open_dump(tmp_path)
    found = [dump.sketch(call.values[-1]) for call in dump.calls() if call.id.name == "neg"]
    assert len(found) == 4
    assert all((sketch == found[0]).all() for sketch in found)  # type: ignore[union-attr]


class Numbered(nn.Module):
    """Children under numbers, as ModuleList had them long ago."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(2):
            self._modules[number] = nn.Sequential(nn.Linear(2, 2))  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            x = self._modules[number](x)  # type: ignore[index,misc]
        return x


@case("modules: under numbers")
@both
@pytest.mark.usefixtures("part")
def test_children_under_numbers_are_recorded(tmp_path: Path) -> None:
    model = Numbered()
    with ulpscope.capture(tmp_path, model=model, level="module"):
        model(torch.ones(1, 2)).sum().backward()
    assert {"Module.0.Sequential.forward.0", "Module.1.0.Linear.backward.0"} <= set(names(tmp_path))


class Nameless(type):
    """A class of classes without a name that is a text, or a hash."""

    __hash__ = None  # type: ignore[assignment]

    @property
    def __name__(cls) -> Any:
        return 5


class Odd(nn.Module, metaclass=Nameless):
    def forward(self, x: torch.Tensor, more: Any = None) -> torch.Tensor:
        return x * 2


class Bag(metaclass=Nameless):
    """An argument of such a class."""


@case("modules: classes of an odd class")
@both
@pytest.mark.usefixtures("part")
def test_a_class_without_name_or_hash_changes_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), Odd())
    with ulpscope.capture(tmp_path, model=model, level="mix"):
        assert model(torch.ones(2)).tolist() == [2.0, 2.0]
        assert model[1](torch.ones(2), more=Bag()).tolist() == [2.0, 2.0]
    assert "Module.0.Identity.forward.0" in names(tmp_path)


class Pairless(dict[str, Any]):
    def items(self) -> Any:
        return [("weight",)]


@case("modules: parameters that are no pairs")
@both
@pytest.mark.usefixtures("part")
def test_parameters_that_are_no_pairs_are_told_and_change_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU())
    object.__setattr__(model[0], "_parameters", Pairless())
    with ulpscope.capture(tmp_path, level="module"):
        assert model(torch.ones(2)).tolist() == [1.0, 1.0]
        assert model(torch.ones(2)).tolist() == [1.0, 1.0]


@case("modules: a call of nothing")
@both
@levels
@pytest.mark.usefixtures("part")
def test_a_call_without_a_module_raises_what_it_would(tmp_path: Path, level: str) -> None:
    with pytest.raises(TypeError) as bare:
        nn.Module.__call__()  # type: ignore[call-arg]
    with ulpscope.capture(tmp_path, level=level), pytest.raises(TypeError) as recorded:
        nn.Module.__call__()  # type: ignore[call-arg]
    assert str(bare.value) == str(recorded.value)


@case("views: conjugated")
@both
@pytest.mark.usefixtures("part")
def test_a_conjugated_view_has_its_own_numbers(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path, level="op", checksum=True):
        plain = torch.mul(torch.tensor([1 + 2j, 3 - 4j]), 1)
        view = torch.conj(plain)
        torch.resolve_conj(view)
    dump = ulpscope.open_dump(tmp_path)
    crc = {call.id.name: call.values[-1].checksum for call in dump.calls()}
    assert crc["conj"] == crc["resolve_conj"] != crc["mul"]


@case("gradients: a node that only says there is none")
@both
@pytest.mark.usefixtures("part")
def test_a_result_without_a_derivative_is_recorded_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(3, requires_grad=True)
    with caplog.at_level(logging.WARNING), ulpscope.capture(tmp_path, level="op"):
        floored = x // 1
        torch.stack([floored * 2, x])
        x.mul(2).sum().backward()
    assert [record.message for record in caplog.records if "could not" in record.message] == []
    assert {"Torch.stack.0.forward", "Tensor.mul.0.backward"} <= set(names(tmp_path))
