"""Failing, or dying, at each place where our code asks the operating system for something. The child is a fork."""

from __future__ import annotations

import errno
import io
import logging
import mmap
import os
import pathlib
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ulpscope
from ulpscope.compat.msprobe.debugger import PrecisionDebugger
from ulpscope.compat.ptdbg_ascend.debugger import PrecisionDebugger as OlderDebugger
from ulpscope.model.errors import UlpscopeError
from ulpscope.store import writer

STEPS, CALLS, SIZE = 3, 5, 3000
_ASKED: dict[Any, tuple[str, ...]] = {
    os: ("open", "pwrite", "replace", "rename", "mkdir", "ftruncate", "posix_fallocate", "unlink", "link", "rmdir", "fchmod",
         "scandir", "fdopen"),
    mmap: ("mmap",),
    io: ("open",),
    writer: ("file_frames",),  # which asks in C
}  # fmt: skip
_OURS = os.path.dirname(ulpscope.__file__) + os.sep


class Asks:
    """Counts what our code asks for, and acts at one of them."""

    def __init__(self, at: int, act: Callable[[str], None]) -> None:
        self.count = 0
        self.at = at
        self._act = act
        self._lock = threading.Lock()

    def install(self) -> None:
        for module, names in _ASKED.items():
            for name in names:
                setattr(module, name, self._around(name, getattr(module, name)))

    def _around(self, name: str, original: Any) -> Any:
        def asked(*args: Any, **kwargs: Any) -> Any:
            if _is_ours(sys._getframe(1)):
                with self._lock:
                    self.count += 1
                    now = self.count == self.at
                if now:
                    self._act(name)
            return original(*args, **kwargs)

        return asked


def _is_ours(frame: Any) -> bool:
    while frame is not None and frame.f_code.co_filename in (pathlib.__file__, shutil.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def failing(number: int) -> Callable[[str], None]:
    def act(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return act


def dying(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES)


# --- ways to record ---------------------------------------------------------------------------------------------

Loop = Callable[[Callable[[], None]], None]


def native(path: Path, loop: Loop, **options: Any) -> None:
    with ulpscope.capture(path, stacks=False, queue_mb=1, **options) as capture:
        loop(capture.step)


# Otherwise what is done to dropout and the generators is said too.
_QUIET: dict[str, Any] = {"dropout": "keep", "seed": None}


def msprobe(path: Path, loop: Loop) -> None:
    debugged(PrecisionDebugger(dump_path=str(path), task="tensor", level="L1", **_QUIET), loop)


def stretches(path: Path, loop: Loop) -> None:
    """All in one step: at each stop, what is new goes into the files of the stop before."""
    debugger = PrecisionDebugger(dump_path=str(path), task="tensor", level="mix", **_QUIET)
    debugged(debugger, loop, steps=False)


def ptdbg(path: Path, loop: Loop) -> None:
    debugger = OlderDebugger(dump_path=str(path), hook_name="dump", step=list(range(STEPS + 1)), dropout="keep")
    debugger.configure_hook(mode="api_stack")
    debugged(debugger, loop)


def debugged(debugger: Any, loop: Loop, *, steps: bool = True) -> None:
    try:
        debugger.start()

        def step() -> None:
            debugger.stop()
            if steps:
                debugger.step()
            debugger.start()

        loop(step)
    finally:
        debugger._close()


WAYS: dict[str, Callable[[Path, Loop], None]] = {
    "statistics": lambda path, loop: native(path, loop),
    "tensors": lambda path, loop: native(path, loop, tensors=True),
    "overflows": lambda path, loop: native(path, loop, overflows=1000),
    "msprobe": msprobe,
    "msprobe, one step": stretches,
    "ptdbg": ptdbg,
}


def numbers(call: int) -> torch.Tensor:
    return torch.full((SIZE,), float(call))


class Heard(logging.Handler):
    """The warnings that a user would see."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []
        logging.getLogger("ulpscope").addHandler(self)

    def emit(self, entry: logging.LogRecord) -> None:
        self.words.append(entry.getMessage())


def run(way: str, path: Path, asks: Asks, say: Callable[[int], None], *, overflow: bool) -> tuple[list[str], str]:
    """Runs a program of three steps; returns the warnings, and the error with which a capture refused to start."""
    heard, done = Heard(), []

    def loop(step: Callable[[], None]) -> None:
        for number in range(STEPS * CALLS):
            data = numbers(number)
            out = torch.exp(data + 1000) if overflow else torch.add(data, 1)
            assert out[0].item() == (float("inf") if overflow else number + 1.0)
            done.append(number)
            say(number)
            if number % CALLS == CALLS - 1:
                step()

    asks.install()
    try:
        WAYS[way](path, loop)
    except UlpscopeError as error:
        assert not done, f"raised after {len(done)} calls: {error}"
        return heard.words, str(error)
    assert len(done) == STEPS * CALLS
    assert torch._C._len_torch_function_stack() == 0
    return heard.words, ""


def found_calls(path: Path) -> set[int]:
    """The numbers of all calls that can be read below a folder, each checked; whatever files hold them."""
    places = {file.parent for name in ("manifest.json", "dump.json") for file in path.rglob(name)}
    places |= {file.parent for file in path.rglob("*.pkl") if file.stat().st_size}
    found: set[int] = set()
    for place in places:
        if any(part.startswith(".") and part.endswith(tuple("0123456789")) for part in place.parts):
            continue  # a draft that nobody gave its name
        dump = ulpscope.open_dump(place)
        for call in dump.calls():
            if call.id.name != "add":
                continue
            shown = [value for value in call.values if value.is_tensor and value.slot.role.value == "input"]
            output = [value for value in call.values if value.slot.role.value == "output"]
            if not output or output[0].stats is None:
                continue
            number = int(output[0].stats.max) - 1
            assert shown[0].stats is not None and shown[0].stats.max == number
            if output[0].payload is not None:
                assert np.array_equal(dump.load(output[0]), np.full(SIZE, number + 1, np.float32))
            found.add(number)
    return found
