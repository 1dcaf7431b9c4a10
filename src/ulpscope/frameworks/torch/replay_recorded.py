"""A call from a dump, measured as a live one: its arguments are put together again, and the same functions judge it.

A dump has no generator states and no storages: random kernels are unknown, and what was not computed is told by who
recorded the bits first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch import replay_reference as references
from ulpscope.frameworks.torch.replay_measure import measures, rounded_factors
from ulpscope.frameworks.torch.replay_origins import fingerprint, scalars
from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.model.names import GENERATOR
from ulpscope.model.records import CallRecord, PathStep, Payload, Role, Value

Bits = Callable[[Value], Any]
_SPACES = {"Aten": "aten", "NPU": "npu"}
_PARTS = ("torch.dtype", "torch.layout", "torch.memory_format")


class RecordedCalls:
    """Measures the kernel calls of one rank, one after the other, in their order."""

    def __init__(self, products: dict[str, str]) -> None:
        self._products = products
        self._plans: dict[tuple[str, str], Plan | None] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        # Bits that a call of this run has made -> whether floating point values went into them.
        self._made: dict[Payload, bool] = {}
        self._told: set[Payload] = set()

    def begin_step(self) -> None:
        """Payload keys belong to one dump."""
        self._made.clear()
        self._told.clear()

    def is_kernel(self, call: CallRecord) -> bool:
        return self._plan(call) is not None

    def fields(self, call: CallRecord, bits: Bits, *, first_step: bool) -> dict[str, Any]:
        """The fields of the call's ledger row that come from its values."""
        plan = self._plan(call)
        assert plan is not None
        inputs = [value for value in call.values if value.slot.role is Role.INPUT]
        outputs = [value for value in call.values if value.slot.role is Role.OUTPUT]
        dtypes = ",".join(_short(value.dtype) for value in inputs if value.dtype and _is_float(value.dtype))
        row: dict[str, Any] = {"op": plan.op, "dtypes": dtypes, "index": self._counts[plan.op, dtypes]}
        self._counts[plan.op, dtypes] += 1
        row["kind"] = plan.kind
        measured = any(self._is_measured(value) for value in inputs)
        try:
            if plan.kind == "view":
                row["scalars"] = scalars(plan, *_arguments(inputs, _blank))
                measured = any(self._made.get(value.payload, True) for value in inputs if value.payload is not None)
            else:
                missing = next(
                    (value.error for value in call.values if value.is_tensor and value.payload is None), None
                )
                if missing is not None or any(value.is_tensor and value.payload is None for value in call.values):
                    raise ValueError(f"the dump does not hold its tensors: {missing or 'statistics only'}")
                row |= self._measured(plan, inputs, outputs, bits, first_step)
        except Exception as error:  # the border: no reference, or arguments that were not recorded
            row["unknown"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        if plan.decides and measured:
            row["decides"] = True
        made_here = plan.kind != "view" or all(
            value.payload in self._made for value in inputs if value.payload is not None
        )
        for value in outputs:
            if value.payload is not None and made_here:
                self._made[value.payload] = measured or plan.kind == "random"
        return row

    def _measured(
        self, plan: Plan, inputs: list[Value], outputs: list[Value], bits: Bits, first_step: bool
    ) -> dict[str, Any]:
        args, kwargs = recorded_arguments(inputs, bits)
        row: dict[str, Any] = {"scalars": scalars(plan, args, kwargs)}
        written = {key for _, key in plan.written}
        names = plan.schema
        if first_step:
            row["leaves"] = [
                {"place": name, **fingerprint(_tensor(value, bits))}
                for value in inputs
                if value.is_tensor
                and value.payload is not None
                and value.payload not in self._made
                and value.payload not in self._told
                and (name := _place(value, names)).split(".")[0] not in written
            ]
            self._told |= {value.payload for value in inputs if value.payload is not None}
        if plan.kind == "random":
            raise ValueError("a dump has no state of the generator; blame -- CMD replays random kernels")
        found = recorded_results(plan, (args, kwargs), outputs, bits)
        factors = recorded_factors(plan, outputs, self._products)
        with torch.no_grad():
            row["measures"] = measures(plan, args, kwargs, found, factors=factors)
        return row

    def _is_measured(self, value: Value) -> bool:
        if value.payload is None:
            return False
        known = self._made.get(value.payload)
        return bool(known) or (known is None and value.dtype is not None and _is_float(value.dtype))

    def _plan(self, call: CallRecord) -> Plan | None:
        key = (call.id.kind, call.id.name)
        if key not in self._plans:
            self._plans[key] = kernel_plan(*key)
        return self._plans[key]


def kernel_plan(kind: str, name: str) -> Plan | None:
    """The plan of the kernel that a dump calls so; None for what is no kernel."""
    space = getattr(torch.ops, _SPACES.get(kind, kind), None)
    packet_name, _, overload = name.rpartition(".")
    packet = getattr(space, packet_name, None) if space is not None and packet_name else None
    func = getattr(packet, overload, None) if packet is not None else None
    return references.plan_of(func) if isinstance(func, internals.Overload) else None


def recorded_arguments(
    inputs: Iterable[Value], bits: Bits, *, strided: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a call was given, with its elements; `strided`: in the memory layout they had, where it has no overlap."""
    make = _laid_out if strided else _tensor
    return _arguments(inputs, lambda value: make(value, bits))


def recorded_results(
    plan: Plan, given: tuple[tuple[Any, ...], dict[str, Any]], outputs: Iterable[Value], bits: Bits
) -> list[Any]:
    """What a call has made or written, in the order of `replay_reference.outputs`."""
    result = _nested(outputs, lambda value: _tensor(value, bits))
    return references.outputs(plan, *_after(plan, *given, result), tuple(result))


def recorded_factors(plan: Plan, outputs: Iterable[Value], products: dict[str, str]) -> str | None:
    """What factors were rounded to on the device of the recording, by its own switches."""
    device = next((value.device for value in outputs if value.device is not None), "cpu")
    return rounded_factors(plan, device.partition(":")[0], products)


def _after(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: list[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments after the call: of what it wrote, the dump holds what it returned."""
    if not plan.written:
        return args, kwargs
    written = list(result) if not plan.fresh else []
    after: list[Any] = list(args)
    for number, (place, _) in enumerate(plan.written):
        if place < len(after):
            listed = isinstance(after[place], list | tuple)
            after[place] = (
                written if listed and len(plan.written) == 1 else written[number] if number < len(written) else None
            )
    return tuple(after), {
        key: None if key in {name for _, name in plan.written} else value for key, value in kwargs.items()
    }


def _arguments(inputs: Iterable[Value], tensor: Callable[[Value], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments_at((value.slot.path, _plain(value, tensor)) for value in inputs)


def arguments_at(given: Iterable[tuple[tuple[PathStep, ...], Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call from its leaves and where each stood."""
    tree: dict[Any, Any] = {}
    for path, leaf in given:
        place = tree
        *above, last = path
        for step in above:
            place = place.setdefault(step, {})
        place[last] = leaf
    args = tuple(_listed(tree[place]) for place in sorted(key for key in tree if isinstance(key, int)))
    return args, {key: _listed(item) for key, item in tree.items() if isinstance(key, str)}


def _nested(outputs: Iterable[Value], tensor: Callable[[Value], Any]) -> list[Any]:
    args, _ = _arguments(outputs, tensor)
    return list(args)


def _listed(item: Any) -> Any:
    return [_listed(item[place]) for place in sorted(item)] if isinstance(item, dict) else item


def _plain(value: Value, tensor: Callable[[Value], Any]) -> Any:
    if value.is_tensor:
        return tensor(value)
    if value.type in _PARTS:
        return getattr(torch, value.scalar.removeprefix("torch."))
    if value.type == "torch.device":
        return torch.device(value.scalar)
    if value.type == "float" and isinstance(value.scalar, str):
        return float(value.scalar)
    if value.type == "slice":
        return slice(*value.scalar)
    if value.type == GENERATOR:
        return None  # which a digest does not bring back
    return ... if value.type == "ellipsis" else value.scalar


def _tensor(value: Value, bits: Bits) -> Tensor:
    if value.parts:
        names = " and ".join(name for name, _ in value.parts)
        raise ValueError(f"a tensor made of elements and {names} is not made again")
    dtype = getattr(torch, (value.dtype or "").removeprefix("torch."))
    raw = np.ascontiguousarray(bits(value))
    if not raw.size:
        return torch.empty(value.shape or (), dtype=dtype)
    return torch.from_numpy(raw.reshape(-1).view(np.uint8).copy()).view(dtype).reshape(value.shape or ())


def _blank(value: Value) -> Tensor:
    """The shape alone."""
    return torch.empty(value.shape or (), device="meta")


def _laid_out(value: Value, bits: Bits) -> Tensor:
    found = _tensor(value, bits)
    if value.stride is None or value.stride == found.stride() or not found.numel():
        return found
    room = torch.empty_strided(found.shape, value.stride, dtype=found.dtype)
    return room.copy_(found) if internals.has_overlap(room) == 0 else found


def _place(value: Value, names: list[str]) -> str:
    first, *rest = value.slot.path
    head = names[first] if isinstance(first, int) and first < len(names) else str(first)
    return ".".join([head, *map(str, rest)])


def _short(dtype: str | None) -> str:
    return (dtype or "").removeprefix("torch.")


def _is_float(dtype: str) -> bool:
    found = getattr(torch, _short(dtype), None)
    return isinstance(found, torch.dtype) and found.is_floating_point
