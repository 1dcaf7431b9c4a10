"""Answers of a device on their way back: pinned memory that copies fill which nobody waits for.

Whoever sends the next ones looks whether earlier ones have come, and has their rows filled in. At the end of a step the rest is
waited for.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ulpscope import taps
from ulpscope.frameworks.base import Sink
from ulpscope.frameworks.torch.cuda_payloads import CudaPayloads
from ulpscope.frameworks.torch.cuda_rows import ABOUT, ANSWER, Room, rows_of

# Copies that may be under way at a time.
_LETTERS = 8


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No mode of the program hears of our copies."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield


class _Letter:
    """The answers of one copy, and an event after it."""

    def __init__(self, device: torch.device, most: int) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.empty(most, ANSWER, dtype=torch.int64, pin_memory=is_cuda)
        self.address = self.host.data_ptr()
        # Of each answer: the number of its row in the dump, and what `rows_of` wants to know.
        self.numbers = np.empty(most, dtype=np.uint32)
        self.about = np.empty(most, dtype=ABOUT)
        self.tickets: list[int] = []
        self.count = 0
        self.event = torch.cuda.Event() if is_cuda else None
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(device))  # which makes it


class CudaMail:
    """The way back from one device. `most` answers go in one copy; `direct` says whether C may queue it."""

    def __init__(
        self, sink: Sink, device: torch.device, payloads: CudaPayloads | None, *, most: int, direct: bool
    ) -> None:
        self._sink = sink
        self._device = device
        self._payloads = payloads
        self._most = most
        self._direct = direct and device.type == "cuda" and taps.C is not None
        self._letters = 0
        self._free: list[_Letter] = []
        self._sent: deque[_Letter] = deque()
        self._room = Room(most)

    def send(
        self, rows: Tensor, stream: Any, numbers: NDArray[np.uint32], about: NDArray[np.void], tickets: list[int]
    ) -> None:
        """Queues the copying of as many answers as there are numbers, on their stream."""
        letter = self._letter()
        count = letter.count = len(numbers)
        letter.numbers[:count] = numbers
        letter.about[:count] = about
        letter.tickets = tickets
        if self._direct:
            event = letter.event.cuda_event  # type: ignore[union-attr]
            taps.C.copy_back(letter.address, rows.data_ptr(), 8 * ANSWER * count, stream.cuda_stream, event)
        else:
            with _quiet(), torch.cuda.stream(stream):
                letter.host[:count].copy_(rows[:count], non_blocking=True)
                if letter.event is not None:
                    letter.event.record()
        self._sent.append(letter)
        if self._payloads is None:  # for whose places others would be waited for
            while self._sent and (self._sent[0].event is None or self._sent[0].event.query()):
                self._complete_first()

    def finish(self) -> None:
        """Waits for every answer and fills in its row."""
        while self._sent:
            self._complete_first()

    def give_back(self) -> None:
        """Frees the memory; what is still under way is of no use any more."""
        self._free.clear()
        self._sent.clear()
        self._letters = 0

    def _letter(self) -> _Letter:
        if not self._free and self._letters >= _LETTERS:
            self._complete_first()
        if not self._free:
            with _quiet():
                self._free.append(_Letter(self._device, self._most))
            self._letters += 1
        return self._free.pop()

    def _complete_first(self) -> None:
        """Fills in the rows of what was sent first. It stays first until that is done: a signal handler may raise here."""
        letter = self._sent[0]
        if letter.event is not None:
            letter.event.synchronize()
        rows, sketches = rows_of(letter.host.numpy()[: letter.count], letter.about[: letter.count], self._room)
        if self._payloads is not None:
            for row, ticket in zip(rows, letter.tickets, strict=True):
                place = self._payloads.place(ticket) if ticket >= 0 else None
                if place is not None:
                    row["payload_offset"], row["payload_nbytes"] = place
        self._sink.complete_measures(letter.numbers[: letter.count], rows, sketches)
        self._sent.popleft()
        self._free.append(letter)
