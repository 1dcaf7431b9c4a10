"""Signals, timeouts and Ctrl+C at any moment, our own code included: they reach the program, and the capture goes on."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ulpscope
from integration.runs import LEVELS
from integration.test_torch_untouched import assert_untouched, survey
from ulpscope.store.ledger_file import ledger_path, read_ledger
from ulpscope.store.registry import find_folders

PROMISE = "the run is not changed"
case = pytest.mark.case
levels = pytest.mark.parametrize("level", LEVELS)
TURNS = 150


class TooLong(Exception):
    """The program's own timeout."""


class Alarm:
    """Handlers of all shapes: a method, an object that can be called."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.rung = 0

    def ring(self, number: int, frame: Any) -> None:
        self.rung += 1
        raise self.kind("enough")

    __call__ = ring


@contextmanager
def handled(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def work(model: nn.Module) -> None:
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()


def still_records(capture: ulpscope.Capture, model: nn.Module, path: Path, level: str) -> None:
    """Another thread and another step: nothing is locked, nothing is switched off."""
    capture.step()
    thread = threading.Thread(target=lambda: model(torch.ones(2, 4)))
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "a lock was left behind"
    state = capture._recorder.state()
    assert not state.calls and not state.modules, "what was under way is kept"
    model(torch.ones(2, 4)).sum().backward()
    last = capture.current_step
    capture.close()
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._is_torch_function_enabled()
    dump = ulpscope.open_dump(path, step=last)
    assert dump.ending == "complete"
    name = "tanh" if level == "op" else "1.Tanh"
    assert sorted(call.phase.value for call in dump.ids() if call.name == name) == ["backward", "forward", "forward"]


SHAPES: dict[str, Callable[[Alarm], Any]] = {"method": lambda alarm: alarm.ring, "object": lambda alarm: alarm}


@case("interrupted: by a handler that raises")
@levels
@pytest.mark.parametrize("kind", [TooLong, KeyboardInterrupt, RuntimeError], ids=["timeout", "Ctrl+C", "error"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_handler_raises_reaches_the_program_each_time(
    level: str, kind: type[BaseException], shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, alarm, caught = net(), Alarm(kind), 0
    # Python itself drops what is raised in a weak reference's callback or a finalizer, with or without us.
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    with ulpscope.capture(tmp_path, model=model, level=level, stacks=False) as capture:
        model(torch.ones(2, 4)).sum().backward()
        with handled(SHAPES[shape](alarm)):
            for turn in range(TURNS):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0003 + (turn % 50) * 0.000013)
                    while alarm.rung == turn:
                        work(model)
                except kind:
                    caught += 1
        assert alarm.rung == TURNS
        # Here and there torch takes a RuntimeError for its own, with or without us.
        assert caught + len(dropped) >= TURNS - 2 * (kind is RuntimeError)
        assert len(dropped) < TURNS // 10
        still_records(capture, model, tmp_path, level)


@case("interrupted: while kernels are judged")
@pytest.mark.parametrize("kind", [TooLong, KeyboardInterrupt], ids=["timeout", "Ctrl+C"])
def test_what_a_handler_raises_passes_through_a_ledger(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, alarm, caught = net(), Alarm(kind), 0
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    with ulpscope.ledger(tmp_path / "before", model=model):
        work(model)  # torch imports things when they are first needed, and an import that was cut short stays so
    with ulpscope.ledger(tmp_path / "run", model=model):
        with handled(alarm):
            for turn in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + turn * 0.00011)
                    while alarm.rung == turn:
                        work(model)
                except kind:
                    caught += 1
        assert caught + len(dropped) == alarm.rung == 60
        thread = threading.Thread(target=lambda: model(torch.ones(2, 4)))
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "a lock was left behind"
        work(model)
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
    _, rows = read_ledger(ledger_path(tmp_path / "run", 0))
    assert sum(row.op == "aten.tanh.default" for row in rows) > 20


@case("interrupted: by another thread")
def test_what_another_thread_injects_reaches_the_program(tmp_path: Path) -> None:
    model, caught = net(), 0
    main = ctypes.c_ulong(threading.get_ident())

    def inject() -> None:
        time.sleep(0.002)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(TooLong))

    with ulpscope.capture(tmp_path, model=model, level="mix", stacks=False) as capture:
        for _ in range(40):
            thread = threading.Thread(target=inject)
            try:
                thread.start()
                until = time.monotonic() + 5
                while time.monotonic() < until:
                    work(model)
            except TooLong:
                caught += 1
            thread.join()
        assert caught >= 38  # Python drops what is raised in a callback of a weak reference
        still_records(capture, model, tmp_path, "mix")


@case("interrupted: handlers that compute")
@levels
def test_a_handler_may_compute_and_is_recorded(level: str, tmp_path: Path) -> None:
    model, seen = net(), []

    def handler(number: int, frame: Any) -> None:
        seen.append(nn.Identity()(torch.ones(2).mul(3)).sum().item())

    with handled(handler), ulpscope.capture(tmp_path, model=model, level=level):
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for _ in range(60):
            model(torch.ones(2, 4)).sum().backward()
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert set(seen) == {6.0}
    assert ulpscope.open_dump(tmp_path).ending == "complete"


@case("signals: a handler raises while a step begins or ends")
@pytest.mark.parametrize("tensors", [False, True], ids=["statistics", "tensors"])
@pytest.mark.parametrize("kind", [TooLong, KeyboardInterrupt, RuntimeError, TimeoutError])
def test_a_handler_may_raise_while_dumps_are_opened_and_finished(
    tmp_path: Path, kind: type[BaseException], tensors: bool
) -> None:
    model, alarm, caught = net(), Alarm(kind), 0
    capture, untouched = ulpscope.Capture(tmp_path / "run", level="mix", tensors=tensors), survey(model)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with handled(alarm):
        for turn in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0004 + turn * 0.00005)
                while alarm.rung == turn:
                    capture.start(model)
                    model(torch.ones(2, 4)).sum().backward()
                    capture.stop()
                    capture.step()
            except kind as error:
                assert error.args == ("enough",)
                caught += 1
    # Python itself forgives what is raised in a callback of a weak reference, and an OSError where it makes a folder.
    assert alarm.rung == 100 and caught >= 95
    capture.start(model)
    still_records(capture, model, tmp_path / "run", "mix")
    assert_untouched(untouched, survey(model))
    dumps = [ulpscope.open_dump(place.folder) for place in find_folders(tmp_path / "run")]
    assert {dump.ending for dump in dumps} == {"complete"}
    assert all(len(list(dump.calls())) == len(dump) for dump in dumps)
    assert not list((tmp_path / "run").glob(".*")), "a ring was left behind"
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
