"""Asking a device whether a tensor is finite, without waiting for the answer.

One kernel of torch's own finds the smallest and the largest element. It runs on the stream that the tensor is used on, so
the order of the stream makes the answer right whoever writes to the tensor afterwards. A batch of answers comes back in one
copy with an event behind it; nobody waits for that event unless asked to. A batch is sent when it is full, or when none is on
its way: a device that keeps up is heard after every call, one that lags behind costs a copy every so many.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals

FINITE, HAS_INF, HAS_NAN = 0, 1, 2
_SIZE = 32
_NARROW = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_no_dispatch = internals.no_dispatch


class Answer:
    """What a device will say about one tensor."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: _Batch, place: int) -> None:
        self._batch = batch
        self._place = place

    def bits(self, *, wait: bool) -> int | None:
        """HAS_INF, HAS_NAN (then inf may be there too) or FINITE; None if that is not known yet and nobody waits."""
        found = self._batch.found(wait=wait)
        return None if found is None else found[self._place]


class DeviceAnswers:
    """The questions of one capture. A batch belongs to one stream and one type."""

    def __init__(self) -> None:
        self._open: dict[tuple[torch.device, int, torch.dtype], _Batch] = {}
        self._sent: dict[tuple[torch.device, int, torch.dtype], _Batch] = {}

    def ask(self, value: Tensor) -> Answer:
        """A dense tensor with elements; nothing is waited for."""
        whole = value.detach().resolve_conj().resolve_neg()
        if whole.is_complex():
            whole = torch.view_as_real(whole)
        if whole.dtype not in _NARROW:
            whole = whole.to(torch.float32)
        key = (whole.device, _stream_number(whole.device), whole.dtype)
        batch = self._open.get(key)
        if batch is None or batch.is_sent:
            batch = self._open[key] = _Batch(whole.device, whole.dtype)
        place = batch.add(whole)
        before = self._sent.get(key)
        if batch.used == _SIZE or before is None or before.found(wait=False) is not None:
            batch.send()
            self._sent[key] = batch
        return Answer(batch, place)


class _Batch:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.used = 0
        self.is_sent = False
        self._module = getattr(torch, device.type, None)
        current = getattr(self._module, "current_stream", None)
        self._stream = current(device) if current is not None else None
        self._there = torch.empty((2, _SIZE), dtype=dtype, device=device)
        self._least, self._most = self._there.unbind()
        self._here: Tensor | None = None
        self._event: Any = None
        self._found: list[int] | None = None

    def add(self, value: Tensor) -> int:
        place = self.used
        torch.aminmax(value, out=(self._least.select(0, place), self._most.select(0, place)))
        self.used = place + 1
        return place

    def send(self) -> None:
        """Queues the way back, behind everything that was asked."""
        self.is_sent = True
        with self._module.stream(self._stream) if self._stream is not None else contextlib.nullcontext():  # type: ignore[union-attr]
            event = getattr(self._module, "Event", None)
            if event is None:
                self._here = self._there.cpu()
                return
            self._here = _landing(self._there)
            self._here.copy_(self._there, non_blocking=True)
            self._event = event()
            self._event.record()

    def found(self, *, wait: bool) -> list[int] | None:
        if self._found is None:
            if not self.is_sent:
                if not wait:
                    return None
                with torch.no_grad(), _no_dispatch():
                    self.send()
            if self._event is not None and not self._event.query():
                if not wait:
                    return None
                self._event.synchronize()
            self._read()
        return self._found

    def _read(self) -> None:
        assert self._here is not None
        with internals.no_functions(), torch.no_grad(), _no_dispatch():
            nan, inf = self._here.isnan().any(0), self._here.isinf().any(0)
            self._found = (nan * HAS_NAN + inf * HAS_INF).tolist()
        self._here = self._event = self._stream = None
        del self._there, self._least, self._most


def _landing(there: Tensor) -> Tensor:
    try:
        return torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    except (RuntimeError, NotImplementedError):  # the device has no memory of this kind: its copies may wait
        return torch.empty(there.shape, dtype=there.dtype)


def _stream_number(device: torch.device) -> int:
    if device.type == "cuda":
        return int(internals.cuda_stream(device.index))
    current = getattr(getattr(torch, device.type, None), "current_stream", None)
    return 0 if current is None else int(current(device).stream_id)
