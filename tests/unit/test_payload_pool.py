"""The pool that tensors of a device pass through, here with the memory of the CPU as the device."""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

from ulpscope.frameworks.torch import cuda_payloads
from ulpscope.frameworks.torch.cuda_payloads import CudaPayloads

POOL = 64 << 10


class SlowSink:
    """Keeps what it is given, now and then after a while. Refuses what is `refused` bytes long."""

    def __init__(self, refused: int = -1) -> None:
        self.stored = b""
        self.refused = refused

    def add_payload(self, pointer: int, *about: Any) -> tuple[int, int] | None:
        nbytes = about[-1]
        if nbytes == self.refused:
            raise OSError("no room")
        time.sleep(random.choice((0, 0, 0.001)))
        at = len(self.stored)
        self.stored += ctypes.string_at(pointer, nbytes)
        return at, nbytes


def pool(sink: SlowSink) -> CudaPayloads:
    return CudaPayloads(sink, torch.device("cpu"), POOL)  # type: ignore[arg-type]


def tensors(count: int) -> list[torch.Tensor]:
    sizes = np.random.default_rng(0).integers(1, POOL, count) // np.array([1, 3, 20, 500])[np.arange(count) % 4]
    return [torch.randint(0, 256, (max(1, int(size)),), dtype=torch.uint8) for size in sizes]


def test_every_tensor_arrives_as_it_was_sent() -> None:
    sink, values = SlowSink(), tensors(300)
    values.append(torch.randint(0, 256, (POOL,), dtype=torch.uint8))
    payloads = pool(sink)
    tickets = []
    for value in values:
        tickets.append(payloads.send(value, value.numel()))
        value.bitwise_not_()  # whoever writes it afterwards spoils nothing
    for value, ticket in zip(values, tickets, strict=True):
        start, nbytes = payloads.place(ticket) or (0, 0)
        assert sink.stored[start : start + nbytes] == bytes(value.bitwise_not_().numpy())


def test_the_same_bits_are_stored_once_in_a_step() -> None:
    sink, value = SlowSink(), torch.arange(100, dtype=torch.uint8)
    payloads = pool(sink)
    places = [payloads.place(payloads.send(value.clone(), 100)) for _ in range(3)]
    assert places == [(0, 100)] * 3
    payloads.begin_step()
    assert payloads.place(payloads.send(value, 100)) == (100, 100)


def test_a_tensor_that_cannot_be_stored_is_told_and_the_next_ones_are() -> None:
    sink = SlowSink(refused=33)
    payloads = pool(sink)
    tickets = [payloads.send(torch.full((size,), size, dtype=torch.uint8), size) for size in (32, 33, 34)]
    assert [payloads.place(ticket) for ticket in tickets] == [(0, 32), None, (32, 34)]


def test_a_thread_that_went_home_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_payloads, "_IDLE_SECONDS", 0.01)
    sink = SlowSink()
    payloads = pool(sink)
    for turn in range(40):
        value = torch.full((10,), turn, dtype=torch.uint8)
        assert payloads.place(payloads.send(value, 10)) == (10 * turn, 10)
        time.sleep(random.choice((0, 0.0095, 0.0105, 0.02)))


def test_a_signal_handler_that_raises_leaves_no_lock_and_no_room_behind() -> None:
    sink, values, rung = SlowSink(), tensors(40), 0
    payloads = pool(sink)

    def ring(number: int, frame: Any) -> None:
        nonlocal rung
        rung += 1
        raise TimeoutError("enough")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for turn in range(400):
            with contextlib.suppress(TimeoutError):
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + turn % 40 * 0.00003)
                while rung == turn:
                    value = values[turn % 40]
                    payloads.place(payloads.send(value, value.numel()))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    payloads.begin_step()
    for value in values:
        start, nbytes = payloads.place(payloads.send(value, value.numel())) or (0, 0)
        assert sink.stored[start : start + nbytes] == bytes(value.numpy())
