"""Measuring tensors: which memory to read, and which values were measured already.

A value is measured once: its tensor (the base of a view), place, layout and version tell. Writes that do not raise the
version (`.data`, numpy, foreign kernels) make a memory distrusted: it is then measured each time. No operator of torch
runs for an ordinary CPU tensor; for the odd ones it runs with every mode of the user switched off.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ulpscope.frameworks.base import Sink
from ulpscope.frameworks.interruption import is_meant_for_the_program
from ulpscope.frameworks.torch import direct, internals, names, tensors
from ulpscope.frameworks.torch.cuda_gauge import IN_GRAPH, CudaGauge, Plan, is_capturing
from ulpscope.frameworks.torch.dense import dense_form, has_symbols, is_enormous
from ulpscope.frameworks.torch.names import Api
from ulpscope.frameworks.torch.tensors import Path, Unrecordable
from ulpscope.frameworks.torch.unwritten import Unwritten
from ulpscope.model.dtypes import DTYPES
from ulpscope.model.records import UNWRITTEN
from ulpscope.native import measuring

log = logging.getLogger(__name__)

NONE = 0xFFFFFFFF
# As good as id() while an object lives, and no audit event: packages in wide use install a Python hook for those, and
# then each id() costs more than what it is used for.
identity = object.__hash__
_CODES = {getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)}
_SWEEP = 10_000
# Pinned memory through which full tensors leave a device; also the largest that can be taken.
_POOL = 1 << 30
PENDING = "communication may still be under way; what came is the output of the wait"


# Reference, version, pointer, requires_grad, (offset, layout, unseen writes), row.
_Seen = tuple[Any, int, int, bool, tuple[int, Any, int], tuple[int, int, int]]


class _Meta:
    """One kind of tensor: everything that follows from dtype, shape, stride and device alone."""

    __slots__ = (
        "code", "extent", "facts", "itemsize", "lane", "layout", "nbytes", "number", "plain", "plan", "recipe", "shape", "stride",
    )  # fmt: skip

    # What it is, as JSON, and the number of that.
    facts: str
    number: int
    plain: bool
    code: int
    itemsize: int
    nbytes: int
    extent: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    layout: tuple[Any, ...]
    # How a device measures it; None for memory of the CPU.
    plan: Plan | None
    # The same for C.
    lane: Any
    recipe: Any


class TorchMeasurer:
    """Rows for the values of one capture."""

    leaf_types = frozenset({Tensor, Parameter, int, float, bool, str, type(None)})

    def __init__(
        self, sink: Sink, *, statistics: bool, checksum: bool, sketch: bool, rows: bool, payloads: bool, reuse: bool
    ) -> None:
        self._sink = sink
        self._flags = (
            (measuring.STATS if statistics else 0)
            | (measuring.CRC if checksum else 0)
            | (measuring.SKETCH if sketch else 0)
            | (measuring.BY_ROWS if rows else 0)
        )
        self._payloads = payloads
        self._reuse = reuse
        self._gauges: dict[int, CudaGauge] = {}
        self._fast: Any = None
        self._rewritten: dict[int, int] = {}
        self.unwritten = Unwritten()
        # Told what the reader of the dump should know.
        self.note: Callable[[str], None] = log.info
        self.begin_step()

    @property
    def reuses(self) -> bool:
        """Whether a value is measured once while nobody writes to it: then somebody must look out for whoever does."""
        return self._reuse

    def measure_always(self) -> None:
        """Trusts no value, where that costs less than looking out. Bits are stored once for each value: there it never does."""
        if not self._payloads:
            self._reuse = False
            if self._fast is not None:
                self._fast.give(reuse=False)

    def use(self, fast: Any) -> None:
        fast.give(
            reuse=self._reuse,
            rewritten=self._rewritten,
            unwritten=self.unwritten.places,
            wrapped=internals.is_wrapped,
            measure=None if self._payloads else measuring.MEASURE_FOR_C,
            measure_flags=self._flags,
            meant=is_meant_for_the_program,
            others={torch.dtype, torch.device, torch.Size, torch.memory_format, type(...)},
            tensor=Tensor,
            parameter=Parameter,
            transform=internals.transform_level,
            tracing=internals.jit_trace,
            grad_enabled=torch.is_grad_enabled,
            sequence=internals.sequence_now,
            no_functions=internals.no_functions,
            excluded=internals.below_autograd,
            inference=torch.is_inference_mode_enabled,
            resizable=internals.is_resizable,
        )
        direct.check()
        self._fast = fast
        self.row = fast.row  # type: ignore[method-assign]

    def begin_step(self) -> None:
        """Forgets everything: numbers belong to one dump."""
        self._metas: dict[Any, _Meta] = {}
        self._texts: dict[str, int] = {}
        self._seen: dict[int, _Seen] = {}
        self._scalars: dict[Any, tuple[int, int, int]] = {}
        self._known: dict[Any, tuple[Any, int, int, int]] = {}
        self._rewritten.clear()
        self._stored: dict[bytes, tuple[int, int]] = {}
        self._distrusted: set[int] = set()
        self._sweep_at = _SWEEP
        for gauge in self._gauges.values():
            if gauge.payloads is not None:
                gauge.payloads.begin_step()

    def finish_step(self) -> None:
        for gauge in self._gauges.values():
            gauge.finish()

    def give_back(self) -> None:
        for gauge in self._gauges.values():
            gauge.give_back()

    def begin_window(self) -> None:
        """Trusts no value that was measured before: between two windows anybody may have written anything."""
        self._known.clear()
        self._seen.clear()
        self.unwritten.forget()
        if self._fast is not None:
            self._fast.forget_values()

    def leaves(self, value: Any) -> Iterator[tuple[Path, Any]]:
        return tensors.leaves(value)

    def row(self, value: Any, produced: bool = False) -> tuple[int, int, int]:
        """The numbers of a value: what it is, its measure, and a text (a scalar, or why there is no measure). `produced`: an
        operator of torch has just returned it, so that its memory is torch's own."""
        return self.plain_row(value, produced)

    def plain_row(self, value: Any, produced: bool = False) -> tuple[int, int, int]:
        """As `row`, without the C extension."""
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            why = self.if_unwritten(value)
            if why is not None:
                return self.unread(value, why)
            seen = self._seen.get(identity(value))
            if seen is not None and seen[0]() is value and self._unchanged(value, seen):
                return seen[5]
            try:
                key = (kind, value.dtype, value.shape, value.stride(), value.device, value.requires_grad)
                meta = self._metas.get(key)
                if meta is None:
                    meta = self._new_meta(key, value)
                if meta.plain and not (value.is_neg() or value.is_conj() or is_wrapped(value)):
                    return meta.number, self._measure(value, meta, produced), NONE
            except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
                if is_meant_for_the_program(error):
                    raise
        return self.other(value)

    def other(self, value: Any) -> tuple[int, int, int]:
        """The numbers of what is not an ordinary tensor."""
        return self._odd(value) if isinstance(value, Tensor) else self._scalar(value)

    def _unchanged(self, value: Tensor, seen: _Seen) -> bool:
        if self._distrusted or self._rewritten:
            return False
        return seen[1] == value._version and seen[2] == value.data_ptr() and seen[3] == value.requires_grad

    def if_unwritten(self, value: Any) -> str | None:
        """The reason not to read a tensor of which something is still as `empty` left it, as far as torch knows."""
        return self.unwritten.why(value) if self.unwritten.places else None

    def called(self, api: Api, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call of the program has returned."""
        if self.unwritten.places or api.treatment == names.UNINITIALISED:
            self.unwritten.called(api, args, kwargs, result)

    def kernel_wrote(
        self, api: Api, written: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A kernel has returned, and wrote what it says; the versions rise later."""
        if self.unwritten.places or api.treatment == names.UNINITIALISED:
            self.unwritten.kernel_called(api, written, args, kwargs, result)

    def unread(self, value: Any, reason: str) -> tuple[int, int, int]:
        """A row without a measure, for memory that must not be looked at, or means nothing yet."""
        if not isinstance(value, Tensor):
            return self.row(value)
        self.measure_anew((value,))
        return self._text({"type": tensors.type_name(value), **_describe(value)}), NONE, self._text({"error": reason})

    def forget(self, values: Iterable[Any]) -> None:
        """These tensors were just written, whatever their version says: measure them anew, once."""
        for value in values:
            if isinstance(value, Tensor):
                base = value._base
                owner = identity(value if base is None else base)
                self._rewritten[owner] = self._rewritten.get(owner, 0) + 1

    def distrust(self, values: Iterable[Any]) -> None:
        """From now on the memory of these tensors is measured each time: anybody may write it."""
        values = list(values)
        if self.unwritten.places:
            with internals.no_functions():
                self.unwritten.give_up(values)
        self.measure_anew(values)

    def measure_anew(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and type(value).__name__ != "FakeTensor":
                # The hook border: a tensor without storage has nothing to distrust.
                with suppress(Exception), internals.no_functions():
                    self._distrust(value.untyped_storage().data_ptr())

    def release(self, value: Any) -> None:
        """Drops every weak reference to a tensor: torch refuses to swap one that has any."""
        self._known = {place: known for place, known in self._known.items() if place[0] != identity(value)}
        self._seen.pop(identity(value), None)
        if self._fast is not None:
            self._fast.release(value)

    def _distrust(self, memory: int) -> None:
        self._distrusted.add(memory)
        if self._fast is not None:
            self._fast.distrust(memory)

    # --- ordinary tensors ---------------------------------------------------------------------------------------

    def _measure(self, value: Tensor, meta: _Meta, produced: bool = False) -> int:
        pointer, offset = value.data_ptr(), int(value.storage_offset())
        memory = pointer - offset * meta.itemsize
        if meta.nbytes and not memory:
            raise RuntimeError("no storage")
        reusable = self._reuse and not value.is_inference()
        if reusable and self._distrusted:
            reusable = memory not in self._distrusted
        if reusable:
            base, version = value._base, value._version
            owner = value if base is None else base
            writes = self._rewritten.get(identity(owner), 0) if self._rewritten else 0
            number = self._known_number(owner, offset, meta.layout, version, writes)
            if number is not None:
                return number
        if not produced:
            reusable = self.trusts(value, meta, memory, reusable)
        number = self.take(value, pointer, meta)
        if reusable:
            if len(self._known) + len(self._seen) > self._sweep_at:
                self._sweep()
            reference = weakref.ref(owner)
            if base is None:
                row = (meta.number, number, NONE)
                self._seen[identity(value)] = (
                    reference, version, pointer, value.requires_grad, (offset, meta.layout, writes), row
                )  # fmt: skip
            else:
                self._known[identity(owner), offset, meta.layout] = (reference, version, number, writes)
        return number

    def trusts(self, value: Tensor, meta: _Meta, memory: int, reusable: bool) -> bool:
        """Whether a tensor that torch has not just returned need not be measured again. Raises RuntimeError where it has no
        memory. Asking makes torch keep a Python object for the storage: not done for each result of an operator."""
        storage = value.untyped_storage()
        if meta.nbytes and storage.nbytes() < (int(value.storage_offset()) + meta.extent) * meta.itemsize:
            raise RuntimeError("no storage")
        if reusable and not internals.is_resizable(storage):
            # Memory that numpy shares cannot be resized, and can be written without our knowledge.
            self._distrust(memory)
            return False
        return reusable

    def take(self, value: Tensor, pointer: int, meta: _Meta) -> int:
        """Measures a tensor as it is now; returns the number of its row."""
        if meta.plan is not None:
            return self._gauges[value.get_device()].measure(value, pointer, meta.plan)
        payload = self._payload(pointer, meta) if self._payloads else None
        return self._sink.add_measure(pointer, meta.code, meta.shape, meta.stride, self._flags, payload)

    def _known_number(self, owner: Tensor, offset: int, layout: Any, version: int, writes: int) -> int | None:
        """The measure of this part of a tensor, if it was taken and nobody has written since."""
        seen = self._seen.get(identity(owner))
        if seen is not None and seen[1] == version and seen[4] == (offset, layout, writes) and seen[0]() is owner:
            return seen[5][1]
        known = self._known.get((identity(owner), offset, layout)) if self._known else None
        if known is not None and known[1] == version and known[3] == writes and known[0]() is owner:
            return known[2]
        return None

    def _sweep(self) -> None:
        """Drops what is known of tensors that are gone: a step of a million calls must not grow by a million entries."""
        self._known = {place: known for place, known in self._known.items() if known[0]() is not None}
        self._seen = {number: seen for number, seen in self._seen.items() if seen[0]() is not None}
        self._sweep_at = 2 * (len(self._known) + len(self._seen)) + _SWEEP

    def _payload(self, pointer: int, meta: _Meta) -> tuple[int, int] | None:
        mark = measuring.fingerprint(pointer, meta.itemsize, meta.shape, meta.stride)
        payload = self._stored.get(mark)
        if payload is None:
            payload = self._sink.add_payload(pointer, meta.itemsize, meta.shape, meta.stride, meta.nbytes)
            if payload is not None:
                self._stored[mark] = payload
        return payload

    def _new_meta(self, key: Any, value: Tensor) -> _Meta:
        meta = _Meta()
        dtype = _CODES.get(value.dtype)
        shape = tuple(value.shape)
        contiguous = value.is_contiguous()
        on_device = value.is_cuda
        meta.plain = dtype is not None and value.layout is torch.strided and (on_device or value.device.type == "cpu")
        meta.plain = meta.plain and not value.is_quantized and not is_enormous(value)
        meta.plan = meta.lane = meta.recipe = None
        if on_device and meta.plain and dtype is not None and value.numel():
            gauge = self._gauge(value)
            meta.plan = gauge.plan(value, dtype)
            meta.lane, meta.recipe = gauge.lane, gauge.recipe(meta.plan)
        meta.facts = _json({"type": tensors.type_name(value), **_describe(value)})
        meta.number = self._number(meta.facts)
        if dtype is not None:
            meta.code, meta.itemsize = dtype.code, dtype.itemsize
            meta.nbytes = value.numel() * dtype.itemsize
            stride = value.stride()
            meta.extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            meta.shape, meta.stride = (shape, None) if contiguous else (shape, tuple(stride))
            meta.layout = (dtype.code, value.numel()) if contiguous else (dtype.code, shape, tuple(stride))
        self._metas[key] = meta
        return meta

    def _gauge(self, value: Tensor) -> CudaGauge:
        gauge = self._gauges.get(value.get_device())
        if gauge is None:
            pool = _POOL if self._payloads else 0
            gauge = self._gauges[value.get_device()] = CudaGauge(
                self._sink, value.device, self._flags & ~measuring.BY_ROWS, pool
            )
        return gauge

    # --- everything else ----------------------------------------------------------------------------------------

    def _odd(self, value: Tensor) -> tuple[int, int, int]:
        """A tensor that is not plain memory: measured through a dense form or a copy, or not, with the reason."""
        why = self.if_unwritten(value)
        if why is not None:
            return self.unread(value, why)
        with internals.no_functions(), internals.no_dispatch(), torch.no_grad():
            facts: dict[str, Any] = {"type": tensors.type_name(value)}
            if internals.is_lazy(value):
                return self._text(facts), NONE, self._text({"error": UNWRITTEN})
            try:
                facts |= _describe(value)
                if value.is_cuda and is_capturing():
                    self.note(f"values were {IN_GRAPH}")
                    return self._text(facts), NONE, self._text({"error": IN_GRAPH})
                dense = dense_form(value)
            except Exception as error:  # the hook border: whatever a foreign tensor raises becomes the reason
                return self._text(facts), NONE, self._text({"error": f"{type(error).__name__}: {error}"[:400]})
            facts |= dense.facts
            stored = dense.values
            if isinstance(stored, str):
                return self._text(facts), NONE, self._text({"error": stored})
            if list(stored.shape) != facts.setdefault("shape", list(stored.shape)):
                facts["stored_shape"] = list(stored.shape)
            if stored.dtype != value.dtype:
                facts["stored_dtype"] = str(stored.dtype)
            text: dict[str, Any] = {}
            try:
                number = self._measure_part(stored)
                parts = {name: self._part(part) for name, part in dense.parts.items()}
            except RuntimeError:
                return self._text(facts), NONE, self._text({"error": "its storage was freed"})
            if number == NONE:
                text["error"] = f"no statistics for {stored.dtype}"
            if parts:
                text["parts"] = parts
            return self._text(facts), number, self._text(text) if text else NONE

    def _measure_part(self, value: Tensor) -> int:
        meta = self._new_meta(None, value)
        return self._measure(value, meta) if meta.plain else NONE

    def _part(self, value: Tensor) -> dict[str, Any]:
        return {"dtype": str(value.dtype), "shape": list(value.shape), "measure": self._measure_part(value)}

    def _scalar(self, value: Any) -> tuple[int, int, int]:
        kind = type(value)
        if kind in (int, bool, str, type(None)) or (kind is float and value == value):
            # 0.0 and -0.0 are equal and not the same
            key = (kind, value, str(value)) if kind is float and not value else (kind, value)
            found = self._scalars.get(key)
            if found is None:
                kind_text, text = self.scalar_texts(value)
                found = self._scalars[key] = (self._number(kind_text), NONE, self._number(text))
            return found
        facts = {"type": tensors.type_name(value)}
        if isinstance(value, Unrecordable):
            return self._text(facts), NONE, self._text({"error": value.reason})
        plain = tensors.scalar(value)
        return self._text(facts), NONE, NONE if plain is None else self._text({"value": plain})

    def opaque_text(self, value: Any) -> str | None:
        """All that can be told of any object of the class of this one, as JSON; None where they differ."""
        return _json({"type": tensors.type_name(value)}) if tensors.is_opaque(type(value)) else None

    def scalar_texts(self, value: Any) -> tuple[str, str]:
        """The type and the value of a plain value, as JSON."""
        return _json({"type": tensors.type_name(value)}), _json({"value": tensors.scalar(value)})

    def _text(self, content: Any) -> int:
        return self._number(_json(content))

    def _number(self, text: str) -> int:
        if self._fast is not None:
            return int(self._fast.text(text))
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = self._sink.add_string(text)
        return found


_json = json.JSONEncoder(allow_nan=False).encode


def unread_output(api: Api) -> str | None:
    """Why the output of a call must not be read when it returns, if so."""
    if api.treatment == names.UNINITIALISED:
        return UNWRITTEN
    return PENDING if api.pending_outputs else None


def is_wrapped(value: Tensor) -> bool:
    """Whether a tensor belongs to a torch.func transform that is under way."""
    return internals.transform_level() is not None and internals.is_transformed(value)


def _describe(value: Tensor) -> dict[str, Any]:
    """What can be said of any tensor without reading it. Raises what a foreign tensor raises."""
    facts: dict[str, Any] = {
        "dtype": str(value.dtype),
        "device": str(value.device),
        "requires_grad": value.requires_grad,
    }
    if value.is_nested:
        # A ragged size is no number: the shape is that of all elements as they are stored, and the parts say whose they are.
        return {**facts, "ragged": True}
    if has_symbols(value):
        # Told as they are called: each number that is asked for becomes a constant of the graph that is being traced.
        return {**facts, "symbols": [size if type(size) is int else str(size) for size in value.shape]}
    facts["shape"] = list(value.shape)
    if value.layout is torch.strided:
        facts["stride"] = list(value.stride())
    else:
        facts["layout"] = str(value.layout)
    return facts
