"""Ending a capturing process at any moment, and looking at what it left. The child is a fork: torch is there already."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ulpscope

SIZE = 700
EACH_STEP = 7


class Adds(nn.Module):
    """One call of every level that adds its number."""

    def forward(self, data: torch.Tensor, number: int) -> torch.Tensor:
        return torch.add(data, number)


def record(run: Path, level: str, say: Callable[[int], None], *, tensors: bool) -> None:
    """Records for ever, a step every few calls; `say` hears the number of each finished call."""
    model, data = Adds(), torch.arange(SIZE, dtype=torch.float32)
    capture = ulpscope.Capture(run, level=level, tensors=tensors, queue_mb=1, stacks=False).start()
    number = 0
    while True:
        model(data, number)
        say(number)
        number += 1
        if number % EACH_STEP == 0:
            capture.step()


def killed(run: Path, level: str, seed: int, *, how: int = signal.SIGKILL, tensors: bool = True) -> list[int]:
    """Forks a recording child, ends it at a random moment, and returns the calls that it had said were finished."""
    dice = random.Random(seed)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            if how != signal.SIGKILL:
                signal.signal(how, signal.SIG_DFL)  # whoever started us may ignore it, as nohup does
            record(run, level, lambda number: os.write(writing, b"%d\n" % number) and None, tensors=tensors)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as said:
        heard = b""
        for _ in range(dice.randrange(4 * EACH_STEP)):
            heard += said.readline()
        time.sleep(dice.random() * 0.004)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, how)
        heard += said.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself: {status}"
    return [int(line) for line in heard.splitlines()]


def check(run: Path, level: str, said: list[int], *, tensors: bool = True) -> None:
    """Every call that had finished is there, with the right numbers, and the dump says where it ends."""
    dumps = {dump.manifest.step: dump for dump in ulpscope.open_run(run)} if run.exists() else {}
    kind = "Module.Adds.forward.{}" if level == "module" else "Torch.add.{}.forward"
    for number in said:
        dump = dumps[number // EACH_STEP]
        output = dump.call(kind.format(number % EACH_STEP)).values[-1]
        assert output.stats is not None and output.stats.max == SIZE - 1.0 + number
        if tensors:
            assert np.array_equal(dump.load(output), np.arange(SIZE, dtype=np.float32) + number)
    for dump in dumps.values():
        for call in dump.calls():
            assert call.error is None
            for value in call.values:
                assert not value.is_tensor or value.stats is not None or value.error is not None
        assert dump.ending == "complete" or "before the step was closed" in dump.ending
