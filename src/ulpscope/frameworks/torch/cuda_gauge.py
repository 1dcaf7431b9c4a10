"""Measuring tensors on their device, without waiting for it.

Each tensor gets a row number in the dump at once and launches on the stream it is used on: the order of the stream makes
the numbers right, whoever writes the tensor afterwards. Answers gather in a batch on the device; a full batch, or the
end of a step, sends them back in one copy that nobody waits for (`cuda_mail.py`).
"""

from __future__ import annotations

import importlib
import logging
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ulpscope.frameworks.base import Sink
from ulpscope.frameworks.torch import cuda_crc, cuda_plain, internals
from ulpscope.frameworks.torch.cuda_launch import Launch
from ulpscope.frameworks.torch.cuda_mail import CudaMail, Letter
from ulpscope.frameworks.torch.cuda_payloads import CudaPayloads
from ulpscope.frameworks.torch.cuda_rows import ABOUT, ANSWER, BUCKETS, DOUBLE, FLOAT, KINDS
from ulpscope.frameworks.torch.cuda_tables import SketchTables
from ulpscope.model.dtypes import DType
from ulpscope.native import measuring, taps

log = logging.getLogger(__name__)

IN_GRAPH = "queued while a CUDA graph was captured: it is computed at each replay, which nobody sees"
# Of one letter. With more, most of a step's answers come at its end, where they are waited for.
_ROWS = 256
# Room for the parts of answers, which are made into rows whenever it is full.
_PARTS = 16 << 10
_BATCHES = 4
# From so many elements on programs take blocks of one turn: of each turn one program for so many elements, up to a limit.
_WIDE, _SHARE, _MOST_SHARES = 1 << 16, 1 << 21, 4
_MOST_PROGRAMS = 512
_DIMENSIONS, _CONTIGUOUS = 4, (1, 1, 1, 0, 0, 0, 1)
_NO_RUNS = (0,) * 9
_NO_CHECKS = (0, 0, 0, 0)
_RESIDUES = 1024
_SMALLEST_RESIDUE_SPAN, _RESIDUE_STEP = 16 << 10, 2 << 10
# A strided place is computed in 32 bits.
_STRIDED_LIMIT = 1 << 31
_PACKED, _HOPPER = {"bfloat16": 1, "float16": 2}, (9, 0)
# Of a thread that reads a large tensor: with more than 64, fewer programs run at a time, and memory is waited for. For pairs of
# 16-bit floats the compiler takes less than the larger limit, and puts loads further from their use.
_REGISTERS, _REGISTERS_OF_PAIRS = 64, 72
_no_dispatch = internals.no_dispatch


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph, where nothing of ours may be queued."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def kernels() -> Any:
    """The Triton kernels, or None where Triton is missing."""
    try:
        return importlib.import_module("ulpscope.frameworks.torch.cuda_all_kernels")
    except (ImportError, AttributeError, RuntimeError) as error:
        log.info("measuring with torch operators, which is slower: %s", error)
        return None


class Plan:
    """How tensors of one type and layout are measured."""

    __slots__ = (
        "about", "aligned", "checks", "contiguous", "direct", "form", "item", "kind", "launch", "nbytes", "programs", "room", "scalars",
        "wide", "wide_programs", "wide_scalars",
    )  # fmt: skip

    kind: int
    nbytes: int
    about: tuple[int, ...]
    # Whether everything that reads it wants a contiguous copy.
    contiguous: bool
    # Whether the kernels can read it where it lies, and whether that must be a multiple of four.
    direct: bool
    aligned: bool
    # Sizes of all dimensions but the first, and strides, of four; the size of an element that must be found by them, or 0.
    form: tuple[int, ...]
    item: int
    # Parts that it may need.
    room: int
    # None: by torch operators. The scalars are the number of elements, span, sizes and strides. Where a CRC is wanted, its programs
    # come first in each launch.
    launch: Launch | None
    programs: int
    scalars: tuple[int, ...]
    # For large ordinary tensors at aligned places. The scalars are the number of elements, the shares of a turn, and the runs of 16
    # bytes that it lies in.
    wide: Launch | None
    wide_programs: int
    wide_scalars: tuple[int, ...]
    # For the CRC: programs, bytes, words, words of a span.
    checks: tuple[int, int, int, int]


class _Batch:
    """Room for the answers of up to `_ROWS` tensors on one stream. Its order lets the next ones in once they are copied."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(_PARTS, ANSWER, dtype=torch.int64, device=device)
        # Of a tensor that could not be launched they tell nothing, or of an earlier one.
        self.segments = torch.zeros(_ROWS, 2, dtype=torch.int64, device=device)
        self.rows = torch.empty(_ROWS, ANSWER, dtype=torch.int64, device=device)
        self.places = torch.zeros(_ROWS, 2, dtype=torch.int64, device=device)
        self.residues = torch.empty(_ROWS, _RESIDUES, dtype=torch.int32, device=device)
        self.stream: Any = None
        self.addresses = self.parts.data_ptr(), self.segments.data_ptr()
        self.residue_addresses = self.places.data_ptr(), self.residues.data_ptr()

    def begin(self, letter: Letter) -> None:
        """Anew, with the memory that the answers will come back to."""
        self.letter = letter
        self.count = 0
        # Rows that were made of their parts, and parts of the others.
        self.combined = 0
        self.used = 0
        # Tensors that launches of several were told of.
        self.told = 0


class CudaGauge:
    """Measures the tensors of one device. `flags` are those of `measuring.measure`; with `pool_bytes`, takes their bits too. Raises
    RuntimeError while a graph is captured."""

    def __init__(self, sink: Sink, device: torch.device, flags: int, pool_bytes: int = 0) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            _refuse_graphs()
        self._sink = sink
        self._device = device
        self._index = device.index or 0
        self._only_device = not self._on_cuda or torch.cuda.device_count() == 1
        self._flags = flags
        self._sketched = bool(flags & measuring.SKETCH)
        self._measured = bool(flags & (measuring.SKETCH | measuring.STATS))
        self._checked = bool(flags & measuring.CRC)
        self._simple = not pool_bytes
        self._launches: dict[tuple[str, ...], Launch] = {}
        self._plans: dict[Any, Plan] = {}
        self._kernels = kernels()
        # How two 16-bit floats are handled at a time, where the device can.
        self._packed = _PACKED if self._on_cuda and torch.cuda.get_device_capability(device) >= _HOPPER else {}
        if self._kernels is not None and self._on_cuda:
            self._try_kernels()
        self._pieces = self._kernels.PIECES[0 if self._sketched else 1] if self._kernels is not None else 0
        with torch.no_grad(), _no_dispatch():
            self._tables = SketchTables(device)
        self._weights = self._doublings = torch.empty(0, dtype=torch.int32)
        self._check_constants = (0, 0)
        if flags & measuring.CRC and self._kernels is not None:
            self._weights = _words(cuda_crc.lane_weights(self._kernels.LANES), device)
            self._doublings = _words(cuda_crc.doublings(), device)
            self._check_constants = (_RESIDUE_STEP // self._kernels.LANES, _RESIDUES)
        self.payloads = CudaPayloads(sink, device, pool_bytes) if pool_bytes else None
        self._pool_bytes = pool_bytes
        self._batches: dict[int, _Batch] = {}
        self._mail = CudaMail(sink, device, self.payloads, self._is_held, most=_ROWS, direct=self._only_device)
        # The batch of the stream that was measured last, for C, which goes on with it.
        self.lane: Any = None
        if taps.C is not None and self._on_cuda and self._simple:
            ask = internals.is_cuda_capturing, internals.cuda_stream, self._index
            combine = None
            if self._kernels is not None:
                combine = self._launch(self._kernels.combine, (self._sketched,)).for_c
            tables = self._tables.masks.data_ptr(), self._weights.data_ptr()
            self.lane = taps.C.Lane(
                *ask, sink.unknown_measure, self._checked, _ROWS, _PARTS, combine, self._pieces, *tables
            )

    def recipe(self, plan: Plan) -> Any:
        """A plan as C has it; None without C."""
        if self.lane is None:
            return None
        has_wide = plan.wide is not None
        return taps.C.Recipe(
            plan.launch and plan.launch.for_c, plan.programs if plan.launch else 0, plan.scalars if plan.launch else (),
            plan.wide and plan.wide.for_c, plan.wide_programs if has_wide else 0, plan.wide_scalars if has_wide else (),
            plan.checks if self._checked else _NO_CHECKS, plan.room, plan.direct, plan.aligned, np.array(plan.about, dtype=ABOUT).tobytes(),
        )  # fmt: skip

    def plan(self, value: Tensor, dtype: DType) -> Plan:
        """How to measure tensors like this one. Raises RuntimeError while a graph is captured."""
        if self._on_cuda:
            _refuse_graphs()
        key = (dtype.name, tuple(value.shape), tuple(value.stride()))
        found = self._plans.get(key)
        if found is None:
            with torch.no_grad(), _no_dispatch():
                found = self._plans[key] = self._new_plan(value, dtype)
        return found

    def _new_plan(self, value: Tensor, dtype: DType) -> Plan:
        plan = Plan()
        numel = value.numel()
        plan.kind = KINDS.get(dtype.name, DOUBLE if dtype.name == "complex128" else FLOAT)
        plan.nbytes = numel * dtype.itemsize
        elements = numel * (2 if value.is_complex() else 1)
        blocks = -(-elements // BUCKETS)
        sizes, strides = _collapsed(tuple(value.shape), tuple(value.stride()))
        strided = bool(sizes) and not (len(sizes) == 1 and strides[0] == 1)
        checked = bool(self._flags & measuring.CRC)
        by_kernels = self._kernels is not None and dtype.name in KINDS and self._measured
        plan.contiguous = strided and (
            (checked and not by_kernels) or self._pool_bytes > 0 or len(sizes) > _DIMENSIONS or numel >= _STRIDED_LIMIT
        )
        strided = strided and not plan.contiguous
        plan.form, plan.item = _CONTIGUOUS, 0
        if strided:
            missing = _DIMENSIONS - len(sizes)
            plan.form = (*((1,) * missing + sizes)[1:], *(0,) * missing, *strides)
            plan.item = dtype.itemsize
        length = min(BUCKETS, elements) if self._sketched else 0
        plan.about = (numel, plan.kind, self._flags, length, cuda_crc.of_zeros(plan.nbytes) if checked else 0)
        words = -(-plan.nbytes // 4)
        reach = _rounded(max(_SMALLEST_RESIDUE_SPAN, -(-words // _RESIDUES)), _RESIDUE_STEP)
        plan.checks = (-(-words // reach), plan.nbytes, words, reach)
        plan.launch = plan.wide = None
        plan.room = 0
        plan.direct = False
        plan.aligned = checked and not plan.item
        if by_kernels:
            self._plan_kernels(plan, dtype, numel, blocks)
        return plan

    def _plan_kernels(self, plan: Plan, dtype: DType, numel: int, blocks: int) -> None:
        span = _rounded(-(-blocks // _MOST_PROGRAMS), 16)
        plan.room = plan.programs = -(-blocks // span)
        plan.scalars = (numel, span, *plan.form)
        name = self._kernels.dtype(dtype.name)
        further = (self._checked, *self._check_constants)
        constants = (name, plan.kind, self._sketched, plan.item > 0, self._kernels.ROWS, *further, plan.item)
        plan.launch = self._launch(self._kernels.measure, constants)
        plan.direct = not plan.contiguous and (not self._checked or plan.item > 0 or plan.nbytes % 4 == 0)
        runs = _runs(plan.form, 16 // dtype.itemsize) if plan.item else _NO_RUNS
        if plan.kind == FLOAT and runs is not None and numel >= _WIDE:
            split = min(_MOST_SHARES, max(1, numel // _SHARE))
            packed = self._packed.get(dtype.name, 0)
            registers = _REGISTERS_OF_PAIRS if packed and not self._checked else _REGISTERS
            plan.wide = self._launch(
                self._kernels.measure_wide,
                (name, self._sketched, 16 // dtype.itemsize, packed, plan.item, *further),
                registers=registers if packed or dtype.name == "float32" else None,
            )
            plan.wide_programs = BUCKETS * split + (numel % BUCKETS > 0)
            plan.wide_scalars = (numel, split, *runs)
            plan.room = max(plan.programs, plan.wide_programs)

    def _launch(self, kernel: Any, constants: tuple[Any, ...] = (), *, registers: int | None = None) -> Launch:
        key = (kernel.__name__, *map(str, constants))
        found = self._launches.get(key)
        if found is None:
            direct = self._only_device and self._kernels.LAUNCHES_DIRECTLY
            found = self._launches[key] = Launch(kernel, constants, self._device, direct=direct, registers=registers)
        return found

    def measure(self, value: Tensor, pointer: int, plan: Plan) -> int:
        """Queues the measuring of a tensor as it is now; returns the number of its row. Raises RuntimeError while a
        graph is captured."""
        stream = 0
        self._unbind()
        if self._on_cuda:
            _refuse_graphs()
            stream = internals.cuda_stream(self._index)
        batch = self._batches.get(stream)
        if batch is None:
            batch = self._new_batch(stream)
        elif batch.count >= _ROWS:
            self._send(stream)
        elif batch.used + plan.room > _PARTS:
            self._combine(batch, stream)
        if self._simple and plan.direct and not (plan.aligned and pointer % 4):
            self._launch_measure(pointer, plan, batch, stream)
        else:
            with torch.no_grad(), _no_dispatch():
                self._queue_all(value, plan, batch, stream)
        number = self._sink.reserve_measure()
        batch.letter.numbers[batch.count] = number
        batch.letter.about[batch.count] = plan.about
        batch.used += plan.room
        batch.count += 1
        if self.lane is not None:
            places = (*batch.addresses, *batch.residue_addresses)
            state = (batch.used, batch.count, batch.combined, batch.told)
            self.lane.bind(stream, *state, *places, batch.rows.data_ptr(), *batch.letter.addresses)
        return number

    def _unbind(self) -> None:
        """Takes the batch back from C."""
        if self.lane is not None and self.lane.bound:
            batch, lane = self._batches[self.lane.stream], self.lane
            lane.launch()
            batch.used, batch.count, batch.combined, batch.told = lane.used, lane.count, lane.combined, lane.told
            lane.bound = False

    def _is_held(self, letter: Letter) -> bool:
        return any(batch.letter is letter for batch in self._batches.values())

    def finish(self) -> None:
        """Waits for every answer and fills in its row."""
        for stream in list(self._batches):
            self._send(stream)
        self._mail.finish()

    def give_back(self) -> None:
        """Frees the memory of answers; it is taken again when it is needed."""
        with suppress(RuntimeError):  # of a device that has failed
            for stream in list(self._batches):
                self._send(stream)
        if self.lane is not None:
            self.lane.bound = False
        self._batches.clear()
        self._mail.give_back()

    def _try_kernels(self) -> None:
        """One launch that does nothing: Triton wants a compiler, headers and a driver that suit each other."""
        try:
            with torch.no_grad(), _no_dispatch(), torch.cuda.device(self._device):
                nothing = torch.zeros(2, dtype=torch.int64, device=self._device).data_ptr()
                self._kernels.combine[(1,)](nothing, nothing, nothing, 0, self._sketched)
        except Exception as error:  # whatever a foreign compiler raises, the other way serves
            log.warning("Triton does not work here (%s); measuring with torch operators, which is slower", error)
            self._kernels = None

    # --- launches -----------------------------------------------------------------------------------------------

    def _launch_measure(self, pointer: int, plan: Plan, batch: _Batch, stream: int) -> None:
        masks = self._tables.masks.data_ptr()
        place = (pointer, *batch.addresses[:1], batch.used, *batch.addresses[1:], batch.count, masks)
        checks = plan.checks if self._checked else _NO_CHECKS
        wide = plan.wide is not None and pointer % 16 == 0
        launch, scalars = (plan.wide, plan.wide_scalars) if wide else (plan.launch, plan.scalars)
        programs = (plan.wide_programs if wide else plan.programs) + checks[0]
        if launch is not None:
            others = (0, 1, programs)  # none
            behind = (*checks, *others, *batch.residue_addresses, self._weights.data_ptr())
            launch(programs, stream, *place, *scalars, *behind)

    def _queue_all(self, value: Tensor, plan: Plan, batch: _Batch, stream: int) -> None:
        """Everything that may need a contiguous form: torch operators, the CRC, the bits themselves."""
        row = batch.count
        whole = value.detach()
        if plan.contiguous or not whole.is_contiguous():
            whole = whole.contiguous()
        raw = whole
        if self._checked:
            raw = whole.reshape(-1).view(torch.uint8)
            if self._kernels is not None and (plan.nbytes % 4 or raw.data_ptr() % 4):
                raw = torch.nn.functional.pad(raw, (0, -plan.nbytes % 4))
        if plan.launch is not None:
            self._launch_measure(raw.data_ptr(), plan, batch, stream)
        else:
            batch.segments[row].zero_()
            answer = batch.rows[row].zero_()
            if self._measured:
                cuda_plain.answer(whole, plan.kind, self._tables if self._sketched else None, answer)
            if self._checked and self._kernels is None:
                batch.rows[row, 10] = cuda_crc.remainder(raw)
            elif self._checked:
                programs, *sizes = plan.checks
                residue = self._launch(self._kernels.residue, self._check_constants)
                residue(
                    programs, stream, raw.data_ptr(), row, *batch.residue_addresses, *sizes, self._weights.data_ptr()
                )
        if self.payloads is not None:
            batch.letter.tickets.append(
                self.payloads.send(whole, plan.nbytes) if plan.nbytes <= self._pool_bytes else -1
            )

    # --- the way back -------------------------------------------------------------------------------------------

    def _new_batch(self, stream: int) -> _Batch:
        """A batch for a stream that has none: a new one, or that of the stream which has had one longest."""
        with torch.no_grad(), _no_dispatch():
            current = torch.cuda.current_stream(self._device) if self._on_cuda else None
            if len(self._batches) < _BATCHES:
                batch = _Batch(self._device)
                batch.begin(self._mail.letter())
            else:
                oldest = next(iter(self._batches))
                self._send(oldest)
                batch = self._batches.pop(oldest)
                current.wait_stream(batch.stream)  # type: ignore[union-attr]
        batch.stream = current
        self._batches[stream] = batch
        return batch

    def _combine(self, batch: _Batch, stream: int) -> None:
        """Queues the making of rows from parts, whose room is then free."""
        if batch.used:
            rows = batch.rows.data_ptr()
            combine = self._launch(self._kernels.combine, (self._sketched,))
            combine(self._pieces * (batch.count - batch.combined), stream, *batch.addresses, rows, batch.combined)
        batch.combined, batch.used = batch.count, 0

    def _send(self, stream: int) -> None:
        """Queues the copying of a batch's answers, after which the batch is empty."""
        self._unbind()
        batch = self._batches[stream]
        count = batch.count
        if not count:
            return
        elsewhere = self._on_cuda and internals.cuda_stream(self._index) != stream
        with torch.cuda.stream(batch.stream) if elsewhere else nullcontext():
            self._combine(batch, stream)
            if self._checked and self._kernels is not None:
                place = (*batch.residue_addresses, batch.rows.data_ptr(), self._doublings.data_ptr())
                self._launch(self._kernels.combine_residues, (_RESIDUES,))(count, stream, *place)
        self._mail.send(batch.letter, batch.rows, batch.stream, count)
        batch.begin(self._mail.letter())


def _refuse_graphs() -> None:
    if internals.is_cuda_capturing():
        raise RuntimeError(IN_GRAPH)


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step


def _words(numbers: list[int], device: torch.device) -> Tensor:
    with torch.no_grad(), _no_dispatch():
        return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).to(device)


def _runs(form: tuple[int, ...], width: int) -> tuple[int, ...] | None:
    """A form counted in runs of so many elements, and how to divide by its sizes; None where it does not lie in such."""
    n1, n2, n3, s0, s1, s2, s3 = form
    if s3 != 1 or n3 < 2 * width or any(number % width for number in (n3, s0, s1, s2)):
        return None
    sizes = (n1, n2, n3 // width)
    return *sizes, s0 // width, s1 // width, s2 // width, *map(_divisor, sizes)


def _divisor(size: int) -> int:
    """How to divide numbers below 2**31 by a size without dividing: a factor in the low 32 bits, and by how much the high half of
    the product is shifted. By one only zero is divided: it is the size of a dimension that is not there."""
    if size < 2:
        return 0
    bits = (size - 1).bit_length()
    return (bits - 1) << 32 | (1 << (31 + bits)) // size + 1


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
