"""Measuring tensors on their device, without waiting for it.

Each tensor gets a row number in the dump at once and launches on the stream it is used on: the order of the stream makes
the numbers right, whoever writes the tensor afterwards. Answers gather in a batch on the device; a full batch, or the
end of a step, sends them back in one copy that nobody waits for. The rows of a batch are filled in when a later one is
opened, or at the end of the step.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ulpscope import native
from ulpscope.dtypes import DType
from ulpscope.frameworks.base import Sink
from ulpscope.frameworks.torch import cuda_crc, cuda_plain
from ulpscope.frameworks.torch.cuda_payloads import CudaPayloads
from ulpscope.frameworks.torch.cuda_rows import ABOUT, ANSWER, BUCKETS, DOUBLE, FLOAT, KINDS, rows_of
from ulpscope.frameworks.torch.cuda_tables import SketchTables

log = logging.getLogger(__name__)

IN_GRAPH = "queued while a CUDA graph was captured: it is computed at each replay, which nobody sees"
_ROWS = 512
_PARTS = 20 << 10
_BATCHES = 4
_SMALLEST_SPAN = 32
_MOST_PROGRAMS = 512
_DIMENSIONS = 4
_RESIDUES = 128
_SMALLEST_RESIDUE_SPAN = 16 << 10
# A strided place is computed in 32 bits.
_STRIDED_LIMIT = 1 << 31
_no_dispatch = torch._C._DisableTorchDispatch


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph, where nothing of ours may be queued."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def kernels() -> Any:
    """The Triton kernels, or None where Triton is missing."""
    try:
        return importlib.import_module("ulpscope.frameworks.torch.cuda_kernels")
    except (ImportError, AttributeError, RuntimeError) as error:
        log.info("measuring with torch operators, which is slower: %s", error)
        return None


class Plan:
    """How tensors of one type and layout are measured."""

    __slots__ = ("about", "constants", "contiguous", "kind", "nbytes", "programs", "residues", "scalars")

    kind: int
    nbytes: int
    programs: int
    # numel, span, sizes and strides: the last arguments of a launch.
    scalars: tuple[int, ...]
    # None: by torch operators.
    constants: tuple[Any, ...] | None
    # Whether everything that reads it wants a contiguous copy.
    contiguous: bool
    # For the CRC: programs, bytes, words, words of a span.
    residues: tuple[int, int, int, int]
    about: tuple[int, ...]


class _Batch:
    """Answers of up to `_ROWS` tensors on one stream. The event marks the end of their way back."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.parts = torch.empty(_PARTS, ANSWER, dtype=torch.int64, device=device)
        self.segments = torch.empty(_ROWS, 2, dtype=torch.int64, device=device)
        self.rows = torch.empty(_ROWS, ANSWER, dtype=torch.int64, device=device)
        self.places = torch.empty(_ROWS, 2, dtype=torch.int64, device=device)
        self.residues = torch.empty(_ROWS, _RESIDUES, dtype=torch.int32, device=device)
        self.host = torch.empty(_ROWS, ANSWER, dtype=torch.int64, pin_memory=pinned)
        self.event = torch.cuda.Event() if pinned else None
        self.stream: Any = None
        self.addresses = self.parts.data_ptr(), self.segments.data_ptr()
        self.numbers: list[int] = []
        self.about: list[tuple[int, ...]] = []
        self.tickets: list[int] = []
        self.used = 0


class CudaGauge:
    """Measures the tensors of one device. `flags` are those of `native.measure`; with `pool_bytes`, takes their bits too."""

    def __init__(self, sink: Sink, device: torch.device, flags: int, pool_bytes: int = 0) -> None:
        self._sink = sink
        self._device = device
        self._index = device.index or 0
        self._on_cuda = device.type == "cuda"
        self._only_device = not self._on_cuda or torch.cuda.device_count() == 1
        self._flags = flags
        self._sketched = bool(flags & native.SKETCH)
        self._measured = bool(flags & (native.SKETCH | native.STATS))
        self._compiled: dict[Any, tuple[Any, ...]] = {}
        self._kernels = kernels()
        if self._kernels is not None and self._on_cuda:
            self._try_kernels()
        self._tables = SketchTables(device)
        self._table_addresses = (0, 0)
        self._weights = self._doublings = torch.empty(0, dtype=torch.int32)
        if flags & native.CRC and self._kernels is not None:
            self._weights = _words(cuda_crc.lane_weights(_RESIDUES), device)
            self._doublings = _words(cuda_crc.doublings(), device)
        self.payloads = CudaPayloads(sink, device, pool_bytes) if pool_bytes else None
        self._pool_bytes = pool_bytes
        self._open: dict[int, _Batch] = {}
        self._free: list[_Batch] = []
        self._sent: deque[_Batch] = deque()
        self._made = 0

    def plan(self, value: Tensor, dtype: DType) -> Plan:
        """How to measure tensors like this one. Raises RuntimeError while a graph is captured."""
        if self._on_cuda:
            _refuse_graphs()
        plan = Plan()
        numel = value.numel()
        plan.kind = KINDS.get(dtype.name, DOUBLE if dtype.name == "complex128" else FLOAT)
        plan.nbytes = numel * dtype.itemsize
        elements = numel * (2 if value.is_complex() else 1)
        blocks = -(-elements // BUCKETS)
        sizes, strides = _collapsed(tuple(value.shape), tuple(value.stride()))
        strided = bool(sizes) and not (len(sizes) == 1 and strides[0] == 1)
        whole = bool(self._flags & native.CRC) or self._pool_bytes > 0
        plan.contiguous = strided and (whole or len(sizes) > _DIMENSIONS or numel >= _STRIDED_LIMIT)
        strided = strided and not plan.contiguous
        span = max(_SMALLEST_SPAN, -(-blocks // _MOST_PROGRAMS))
        span = -(-span // 16) * 16
        plan.scalars = (numel, span, 1, 1, 1, 0, 0, 0, 1)
        if strided:
            missing = _DIMENSIONS - len(sizes)
            plan.scalars = (numel, span, *((1,) * missing + sizes)[1:], *(0,) * missing, *strides)
        plan.programs, plan.constants = 0, None
        if self._kernels is not None and dtype.name in KINDS and self._measured:
            plan.programs = -(-blocks // span)
            constants = (self._kernels.dtype(dtype.name), plan.kind, self._sketched, strided, self._kernels.ROWS)
            plan.constants = constants
        words = -(-plan.nbytes // 4)
        residue_span = max(_SMALLEST_RESIDUE_SPAN, -(-words // _RESIDUES))
        residue_span = -(-residue_span // 1024) * 1024
        plan.residues = (-(-words // residue_span), plan.nbytes, words, residue_span)
        length = min(BUCKETS, elements) if self._sketched else 0
        plan.about = (numel, plan.kind, self._flags, length, cuda_crc.of_zeros(plan.nbytes))
        if self._sketched and blocks > self._tables.blocks:
            with torch.no_grad(), _no_dispatch():
                self._tables.reach(blocks)
            self._table_addresses = self._tables.signs.data_ptr(), self._tables.turns.data_ptr()
        return plan

    def measure(self, value: Tensor, pointer: int, plan: Plan) -> int:
        """Queues the measuring of a tensor as it is now; returns the number of its row. Raises RuntimeError while a
        graph is captured."""
        stream = 0
        if self._on_cuda:
            _refuse_graphs()
            stream = torch._C._cuda_getCurrentRawStream(self._index)
        batch = self._open.get(stream)
        if batch is None:
            batch = self._open_batch(stream)
        elif len(batch.numbers) >= _ROWS or batch.used + plan.programs > _PARTS:
            self._send(stream)
            batch = self._open_batch(stream)
        if (
            plan.constants is not None
            and self._flags & native.CRC == 0
            and not plan.contiguous
            and not self._pool_bytes
        ):
            self._launch_measure(pointer, plan, batch, stream)
        else:
            with torch.no_grad(), _no_dispatch():
                self._queue_all(value, plan, batch, stream)
        number = self._sink.reserve_measure()
        batch.used += plan.programs
        batch.numbers.append(number)
        batch.about.append(plan.about)
        return number

    def finish(self) -> None:
        """Waits for every answer and fills in its row."""
        for stream in list(self._open):
            self._send(stream)
        while self._sent:
            self._complete()

    def _try_kernels(self) -> None:
        """One launch that does nothing: Triton wants a compiler, headers and a driver that suit each other."""
        try:
            with torch.no_grad(), _no_dispatch(), torch.cuda.device(self._device):
                nothing = torch.zeros(2, dtype=torch.int64, device=self._device).data_ptr()
                self._kernels.combine[(1,)](nothing, nothing, nothing, self._sketched)
        except Exception as error:  # whatever a foreign compiler raises, the other way serves
            log.warning("Triton does not work here (%s); measuring with torch operators, which is slower", error)
            self._kernels = None

    # --- launches -----------------------------------------------------------------------------------------------

    def _launch_measure(self, pointer: int, plan: Plan, batch: _Batch, stream: int) -> None:
        parts, segments = batch.addresses
        place = (pointer, parts, batch.used, segments, len(batch.numbers), *self._table_addresses, *plan.scalars)
        assert plan.constants is not None
        self._launch(self._kernels.measure, plan.programs, stream, place, plan.constants)

    def _queue_all(self, value: Tensor, plan: Plan, batch: _Batch, stream: int) -> None:
        """Everything that may need a contiguous form: torch operators, the CRC, the bits themselves."""
        row = len(batch.numbers)
        whole = value.detach()
        if plan.contiguous or not whole.is_contiguous():
            whole = whole.contiguous()
        if plan.constants is not None:
            self._launch_measure(whole.data_ptr(), plan, batch, stream)
        else:
            batch.segments[row].zero_()
            answer = batch.rows[row].zero_()
            if self._measured:
                cuda_plain.answer(whole, plan.kind, self._tables if self._sketched else None, answer)
        if self._flags & native.CRC:
            raw = whole.reshape(-1).view(torch.uint8)
            if self._kernels is None:
                batch.rows[row, 10] = cuda_crc.remainder(raw)
            else:
                if plan.nbytes % 4 or raw.data_ptr() % 4:
                    raw = torch.nn.functional.pad(raw, (0, -plan.nbytes % 4))
                programs, *sizes = plan.residues
                place = (raw.data_ptr(), batch.places.data_ptr(), batch.residues.data_ptr(), row)
                self._launch(self._kernels.residue, programs, stream, (*place, *sizes, self._weights.data_ptr()))
        if self.payloads is not None:
            batch.tickets.append(self.payloads.send(whole, plan.nbytes) if plan.nbytes <= self._pool_bytes else -1)

    def _launch(
        self, kernel: Any, programs: int, stream: int, arguments: tuple[Any, ...], constants: tuple[Any, ...] = ()
    ) -> None:
        known = self._compiled.get((kernel, constants))
        if known is not None:
            run, function, packed = known
            run(programs, 1, 1, stream, function, packed, None, None, None, *arguments, *constants)
            return
        with torch.cuda.device(self._device if self._on_cuda else None):
            made = kernel[(programs,)](*arguments, *constants)
        if self._only_device and self._on_cuda and self._kernels.LAUNCHES_DIRECTLY:
            self._compiled[kernel, constants] = (made.run, made.function, made.packed_metadata)

    # --- batches ------------------------------------------------------------------------------------------------

    def _open_batch(self, stream: int) -> _Batch:
        """A batch for a stream: a free one, a new one, or the one that has been on its way longest."""
        while self._sent and (self._sent[0].event is None or self._sent[0].event.query()):
            self._complete()
        if not self._free and self._made >= _BATCHES and self._sent:
            self._complete()
        if not self._free:
            self._made += 1
            with torch.no_grad(), _no_dispatch():
                self._free.append(_Batch(self._device))
        batch = self._open[stream] = self._free.pop()
        batch.stream = torch.cuda.current_stream(self._device) if self._on_cuda else None
        return batch

    def _send(self, stream: int) -> None:
        batch = self._open.pop(stream)
        count = len(batch.numbers)
        with torch.no_grad(), _no_dispatch(), torch.cuda.stream(batch.stream):
            rows = batch.rows.data_ptr()
            if batch.used:
                self._launch(self._kernels.combine, count, stream, (*batch.addresses, rows), (self._sketched,))
            if self._flags & native.CRC and self._kernels is not None:
                place = (batch.places.data_ptr(), batch.residues.data_ptr(), rows, self._doublings.data_ptr())
                self._launch(self._kernels.combine_residues, count, stream, place)
            batch.host[:count].copy_(batch.rows[:count], non_blocking=True)
            if batch.event is not None:
                batch.event.record()
        self._sent.append(batch)

    def _complete(self) -> None:
        batch = self._sent.popleft()
        if batch.event is not None:
            batch.event.synchronize()
        answers = batch.host.numpy()[: len(batch.numbers)]
        rows, sketches = rows_of(answers, np.array(batch.about, dtype=ABOUT))
        if self.payloads is not None:
            for row, ticket in zip(rows, batch.tickets, strict=True):
                place = self.payloads.place(ticket) if ticket >= 0 else None
                if place is not None:
                    row["payload_offset"], row["payload_nbytes"] = place
        self._sink.complete_measures(batch.numbers, rows, sketches)
        batch.numbers, batch.about, batch.tickets, batch.used = [], [], [], 0
        self._free.append(batch)


def _refuse_graphs() -> None:
    if torch._C._cuda_isCurrentStreamCapturing():
        raise RuntimeError(IN_GRAPH)


def _words(numbers: list[int], device: torch.device) -> Tensor:
    with torch.no_grad(), _no_dispatch():
        return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).to(device)


def _collapsed(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides without dimensions of one element, neighbours that lie as one joined."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == step * size:
            sizes[-1] *= size
            strides[-1] = step
        else:
            sizes.append(size)
            strides.append(step)
    return tuple(sizes), tuple(strides)
