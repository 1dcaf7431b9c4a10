"""Answers of a device on their way back: pinned memory that copies fill which nobody waits for.

Whoever sends the next ones looks whether earlier ones have come, and has their rows filled in. At the end of a step the rest is
waited for.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ulpscope.frameworks.base import Sink
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.cuda_payloads import CudaPayloads
from ulpscope.frameworks.torch.cuda_rows import ABOUT, ANSWER, Room, rows_of
from ulpscope.native import taps

# There may be so many at a time: one for each batch, and those under way.
_LETTERS = 12
# 64-bit words that tell a kernel of one of several tensors (`cuda_kernels.py`).
_WORDS = 24


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No mode of the program hears of our copies."""
    with torch.no_grad(), internals.no_dispatch():
        yield


class Letter:
    """What is kept of a batch until its answers are here. The event is after their copy, and so after all kernels of the batch."""

    def __init__(self, device: torch.device, most: int) -> None:
        is_cuda = device.type == "cuda"
        self.host = torch.empty(most, ANSWER, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        # Kernels read there which tensors they measure.
        self.told = torch.empty(most, _WORDS, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        # Of each answer: the number of its row in the dump, and what `rows_of` wants to know.
        self.numbers = np.empty(most, dtype=np.uint32)
        self.about = np.empty(most, dtype=ABOUT)
        self.addresses = self.numbers.ctypes.data, self.about.ctypes.data, self.told.data_ptr()
        self.tickets: list[int] = []
        self.count = 0
        self.event = torch.cuda.Event() if is_cuda else None
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(device))  # which makes it


class CudaMail:
    """The way back from one device. `most` answers go in one copy; `direct` says whether C may queue it; `is_held`, whether a
    batch still has a letter: a signal handler may raise between any two statements, and it has what it has sent."""

    def __init__(
        self,
        sink: Sink,
        device: torch.device,
        payloads: CudaPayloads | None,
        is_held: Callable[[Letter], bool],
        *,
        most: int,
        direct: bool,
    ) -> None:
        self._sink = sink
        self._device = device
        self._payloads = payloads
        self._is_held = is_held
        self._most = most
        self._direct = direct and device.type == "cuda" and taps.C is not None
        self._letters = 0
        self._free: list[Letter] = []
        self._sent: deque[Letter] = deque()
        self._room = Room(most)

    def letter(self) -> Letter:
        """One that nothing waits for; waits for the first that was sent where there are too many."""
        if not self._free and self._sent and self._letters >= _LETTERS:
            self._complete_first()
        found = next((letter for letter in self._free if not self._is_held(letter)), None)
        if found is None:
            self._letters += 1
            with _quiet():
                return Letter(self._device, self._most)
        self._free.remove(found)
        return found

    def send(self, letter: Letter, rows: Tensor, stream: Any, count: int) -> None:
        """Queues the copying of so many answers, on their stream."""
        letter.count = count
        if letter in self._free:
            self._free.remove(letter)
        if self._direct:
            place = (letter.host.data_ptr(), rows.data_ptr(), 8 * ANSWER * count)
            self._direct = taps.C.copy_back(*place, stream.cuda_stream, letter.event.cuda_event)  # type: ignore[union-attr]
        if not self._direct:
            with _quiet(), torch.cuda.stream(stream):
                letter.host[:count].copy_(rows[:count], non_blocking=True)
                if letter.event is not None:
                    letter.event.record()
        if letter not in self._sent:
            self._sent.append(letter)
        if self._payloads is None:  # for whose places others would be waited for
            while self._sent and (self._sent[0].event is None or self._sent[0].event.query()):
                self._complete_first()

    def finish(self) -> None:
        """Waits for every answer and fills in its row."""
        while self._sent:
            self._complete_first()

    def give_back(self) -> None:
        """Frees the memory; what is still under way is of no use any more, but the device may be at it."""
        for letter in self._sent:
            if letter.event is not None:
                with contextlib.suppress(RuntimeError):  # a device that has failed is at nothing any more
                    letter.event.synchronize()
        self._free.clear()
        self._sent.clear()
        self._letters = 0

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
        letter.tickets = []
        if letter not in self._free:
            self._free.append(letter)
