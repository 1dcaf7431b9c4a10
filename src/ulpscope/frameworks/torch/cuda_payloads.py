"""Exact bits of tensors from a device into the dump, without waiting for them.

A tensor is copied on its own stream into one of a few slots on the device, so that whoever writes it afterwards cannot
spoil it, and from there by a second stream into a bounded pool of pinned memory. A thread of ours waits for the bytes,
leaves out those that are stored already and hands the rest to the writer. The training thread waits when the pool is
full, and then only. Neither takes a lock, which an exception of a signal handler could leave behind: a parcel is on its way
once it is in the queue, and its room is free again once it is out of it.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.base import Sink
from ulpscope.model.background import OwnThread
from ulpscope.native import measuring

log = logging.getLogger(__name__)

Place = tuple[int, int]
_SLOTS = 4
_SLOT_BYTES = 32 << 20
# Less than this goes straight to the pool, on the stream it is used on.
_SMALL = 256 << 10
_ALIGN = 4096
_IDLE_SECONDS = 30


@dataclass(slots=True)
class _Parcel:
    """One tensor on its way. `start` is its place in the pool, `taken` how much had been taken of it, ever, with this one."""

    ticket: int
    start: int
    nbytes: int
    taken: int
    event: Any


class CudaPayloads:
    """The way of the payloads of one device. `pool_bytes` is also the size of the largest tensor that can be taken."""

    def __init__(self, sink: Sink, device: torch.device, pool_bytes: int) -> None:
        self._sink = sink
        self._device = device
        on_cuda = device.type == "cuda"
        self._pool = torch.empty(pool_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._slots: list[Tensor] = []
        self._slot_events: list[Any] = []
        self._turn = itertools.cycle(range(_SLOTS))
        self._tickets = itertools.count()
        # Bytes of the pool that were taken and are free again, ever.
        self._freed = 0
        self._parcels: deque[_Parcel] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._places: dict[int, Place | None] = {}
        self._stored: dict[bytes, Place] = {}
        self._thread: OwnThread | None = None

    def begin_step(self) -> None:
        """Places belong to one dump."""
        self._wait(lambda: not self._parcels)  # one whose sender was interrupted, and of whom nobody knows
        self._stored.clear()
        self._places.clear()

    def send(self, value: Tensor, nbytes: int) -> int:
        """Queues the copying of a tensor as it is now; returns a ticket for `place`. It must not be larger than the pool."""
        start, taken = self._room(nbytes)
        target = self._pool[start : start + nbytes]
        if self._stream is None:
            target.copy_(_bytes_of(value))
            event = None
        elif nbytes <= _SMALL:
            target.copy_(_bytes_of(value), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            event = self._by_slots(_bytes_of(value), target)
        parcel = _Parcel(next(self._tickets), start, nbytes, taken, event)
        self._parcels.append(parcel)
        self._call_thread()
        return parcel.ticket

    def place(self, ticket: int) -> Place | None:
        """Where the payload of a ticket is stored, once it is; None when it could not be."""
        self._wait(lambda: ticket in self._places)
        return self._places.pop(ticket)

    def _by_slots(self, source: Tensor, target: Tensor) -> Any:
        assert self._stream is not None
        if not self._slots:
            self._slots = [torch.empty(_SLOT_BYTES, dtype=torch.uint8, device=self._device) for _ in range(_SLOTS)]
            self._slot_events = [torch.cuda.Event() for _ in range(_SLOTS)]
        current = torch.cuda.current_stream(self._device)
        ready = torch.cuda.Event()
        for start in range(0, source.numel(), _SLOT_BYTES):
            number = next(self._turn)
            piece = source[start : start + _SLOT_BYTES]
            slot = self._slots[number][: piece.numel()]
            current.wait_event(self._slot_events[number])
            slot.copy_(piece, non_blocking=True)
            ready.record(current)
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                target[start : start + piece.numel()].copy_(slot, non_blocking=True)
            self._slot_events[number].record(self._stream)
        done = torch.cuda.Event()
        done.record(self._stream)
        return done

    def _room(self, nbytes: int) -> tuple[int, int]:
        """Where the next stretch of the pool begins, and what will have been taken with it; waits while there is no room."""
        try:
            before = self._parcels[-1].taken
        except IndexError:
            before = self._freed
        size = self._pool.numel()
        at = before % size
        wanted = -(-nbytes // _ALIGN) * _ALIGN
        skipped = size - at if at + wanted > size else 0
        taken = before + skipped + wanted
        self._wait(lambda: taken - self._freed <= size or not self._parcels)
        return (0 if skipped else at), taken

    def _wait(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._call_thread()
            with suppress(Empty):
                self._done.get(timeout=0.1)

    def _call_thread(self) -> None:
        if self._thread is None or not self._thread.is_working():
            self._thread = OwnThread(self._run)
            self._thread.start()
        if self._wake.empty():
            self._wake.put(None)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(Empty):  # the next parcel starts another thread
            while True:
                self._wake.get(timeout=_IDLE_SECONDS)
                while self._parcels:
                    self._store(self._parcels[0])

    def _store(self, parcel: _Parcel) -> None:
        place = None
        try:
            if parcel.event is not None:
                parcel.event.synchronize()
            place = self._stored_place(self._pool.data_ptr() + parcel.start, parcel.nbytes)
        except Exception as error:  # the border of a thread: whoever waits for the ticket must be answered
            log.warning("a tensor could not be stored: %s", error)
        finally:
            self._places[parcel.ticket] = place
            self._freed = parcel.taken
            self._parcels.popleft()
            if self._done.empty():
                self._done.put(None)

    def _stored_place(self, pointer: int, nbytes: int) -> Place | None:
        mark = measuring.fingerprint(pointer, 1, (nbytes,), None)
        place = self._stored.get(mark)
        if place is None:
            place = self._sink.add_payload(pointer, 1, (nbytes,), None, nbytes)
            if place is not None:
                self._stored[mark] = place
        return place


def _bytes_of(value: Tensor) -> Tensor:
    flat = value.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8)
