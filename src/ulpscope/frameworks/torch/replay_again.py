"""One recorded call run again, in several ways: as it was recorded, here in its own dtypes, and in another precision.

A kernel is judged by its plan. A call of the API has none: one is made for it, and the scale of its error is how its float64
result answers to small changes of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch import replay_reference as references
from ulpscope.frameworks.torch.api_arguments import KINDS, UnrunnableError, function_of
from ulpscope.frameworks.torch.replay_measure import measures
from ulpscope.frameworks.torch.replay_origins import scalars
from ulpscope.frameworks.torch.replay_recorded import (
    Bits,
    kernel_plan,
    recorded_arguments,
    recorded_factors,
    recorded_results,
)
from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_values import mapped_args, mapped_kwargs
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text
from ulpscope.model.operators import FIRST_FACTOR, OPAQUE_OUTPUTS, Trait, traits
from ulpscope.model.records import CallRecord, PathStep, Phase, Role

_ALL_RESULTS = list(range(64))
_INDEXING = frozenset({"__getitem__", "__setitem__"})
_UNCHECKED = {
    "view": "it is a view, which computes nothing",
    "unwritten": "its memory is not written yet",
    "random": "it draws random numbers, and a dump has no state of the generator",
}
PRECISIONS = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Way:
    """The results of one way to run the call, and their scores; `trouble` says why there are none."""

    name: str
    results: list[Any] = field(default_factory=list)
    measures: list[dict[str, Any]] = field(default_factory=list)
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A call, its arguments, what it should have made, and the ways it was run; the first is what was recorded."""

    plan: Plan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wide: list[Any]
    ways: list[Way]

    @property
    def places(self) -> list[int]:
        """Where in what the call returns, lists taken apart, its results stand; those it only writes are left out."""
        count = len(self.wide)
        hidden = OPAQUE_OUTPUTS.get(self.plan.name, ())
        fresh = [place for place in self.plan.fresh if place not in hidden]
        mixed = bool(self.plan.fresh) and bool(self.plan.written or hidden)
        return fresh if mixed else list(range(count))

    def row(self, way: Way) -> dict[str, Any]:
        """The fields of a ledger row that come from the values."""
        floats = [leaf for leaf in tensor_leaves((self.args, self.kwargs)) if leaf.is_floating_point()]
        return {
            "op": self.plan.op,
            "dtypes": ",".join(str(leaf.dtype).removeprefix("torch.") for leaf in floats),
            "kind": self.plan.kind,
            "scalars": scalars(self.plan, self.args, self.kwargs),
            "measures": way.measures,
        }


def is_tensor(item: Any) -> bool:
    return isinstance(item, Tensor)


def raw_of(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Element type, shape and row-major bytes."""
    plain = tensor.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(plain.dtype).removeprefix("torch."), tuple(plain.shape), raw


def tensor_leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in internals.tree_leaves(value) if isinstance(leaf, Tensor)]


def repeat(
    call: CallRecord, bits: Bits, *, products: dict[str, str], precision: str = "float64", device: str = "cpu"
) -> Repeated:
    """Runs a call again. Raises DumpError where that cannot be done, with the reason.

    `products`: what the recording run allowed for factors of float32."""
    plan = _plan(call)
    missing = [value for value in call.values if value.is_tensor and value.payload is None]
    if missing:
        why = missing[0].error or "it was captured without --tensors"
        raise DumpError(f"the elements of {call_text(call.id)} are not in this dump: {why}")
    inputs = [value for value in call.values if value.slot.role is Role.INPUT]
    outputs = [value for value in call.values if value.slot.role is Role.OUTPUT]
    args, kwargs = _at(recorded_arguments(inputs, bits, strided=True), torch.device("cpu"))
    found = recorded_results(plan, (args, kwargs), outputs, bits)
    try:
        with torch.no_grad():
            wide = references.expected(plan, args, kwargs, found).values
            factors = recorded_factors(plan, outputs, products)
            recorded = Way("recorded", found, measures(plan, args, kwargs, found, factors=factors))
    except Exception as error:  # the border: there is no reference for this call
        raise DumpError(f"{call_text(call.id)} cannot be run again in float64: {_told(error)}") from None
    repeated = Repeated(plan, args, kwargs, wide, [recorded])
    again = _way(f"again on {device}", repeated, lambda: _run(plan, *_at((args, kwargs), torch.device(device))))
    if precision == "float64":
        better = _way("as float64", repeated, lambda: wide)
    else:
        better = _way(f"as {precision}", repeated, lambda: _run(plan, *_as(args, kwargs, getattr(torch, precision))))
    repeated.ways.extend([again, better])
    return repeated


def same_bits(reference: Way, target: Way) -> bool:
    """Whether two ways give the same, to the bit."""
    pairs = list(zip(reference.results, target.results, strict=False))
    return len(reference.results) == len(target.results) and all(
        torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype is b.dtype
        else a is b or a == b
        for a, b in pairs
    )


def _way(name: str, repeated: Repeated, run: Callable[[], list[Any]]) -> Way:
    recorded = repeated.ways[0].results
    try:
        with torch.no_grad():
            results = [_like(item, beside) for item, beside in zip(run(), recorded, strict=True)]
            return Way(name, results, measures(repeated.plan, repeated.args, repeated.kwargs, results))
    except Exception as error:  # the border: this device or precision may not have the call
        return Way(name, trouble=_told(error))


def _like(item: Any, recorded: Any) -> Any:
    return item.to("cpu", recorded.dtype) if isinstance(item, Tensor) and isinstance(recorded, Tensor) else item


def _run(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    args, kwargs = references.keep_written(plan, args, kwargs)
    return references.outputs(plan, args, kwargs, plan.func(*args, **kwargs))


def _at(given: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else device if isinstance(leaf, torch.device) else leaf

    return mapped_args(move, given[0]), mapped_kwargs(move, given[1])


def _as(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        return dtype if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

    return mapped_args(cast, args), mapped_kwargs(cast, kwargs)


# --- plans ------------------------------------------------------------------------------------------------------


def _plan(call: CallRecord) -> Plan:
    kind, name, text = call.id.kind, call.id.name, call_text(call.id)
    plan = kernel_plan(kind, name)
    if plan is not None:
        if plan.kind in _UNCHECKED:
            raise DumpError(f"{text} cannot be checked from a dump: {_UNCHECKED[plan.kind]}")
        return plan
    if call.id.phase is not Phase.FORWARD or kind not in KINDS:
        raise DumpError(
            f"{text} is no forward call of an operator; name a kernel below it, such as Aten.mm.default.0.backward "
            f"(`ulpscope capture --level kernel --tensors` records them, `ulpscope show RUN` lists them)"
        )
    try:
        function = function_of(kind, name)
    except UnrunnableError as error:
        raise DumpError(f"{text} cannot be run again: {error}") from None
    if Trait.CHOOSES in traits(name):
        raise DumpError(f"{text} chooses elements, and a tie may be broken either way; name the kernel below it")
    return api_plan(function, kind, name)


def api_plan(function: Callable[..., Any], kind: str, name: str) -> Plan:
    """The plan of a function of the API: nothing is known about it but what it is called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        copies, named = internals.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        if name in _INDEXING and isinstance(copies[1], list):  # a dump does not tell a tuple from a list
            copies = (copies[0], tuple(copies[1]), *copies[2:])
        with _NoDraws():
            result = function(*copies, **named)
        return copies[0] if result is None and copies else tuple(result) if isinstance(result, list) else result

    is_product, is_exact = FIRST_FACTOR.get(name) == 0, Trait.EXACT in traits(name)
    what = "contraction" if is_product else "movement" if is_exact else "other"
    # The tables of the judge are about kernels: an operator of the same name takes other arguments.
    known = name if what != "other" else ""
    return Plan(run, f"{kind}.{name}", known, what, [], _ALL_RESULTS, working=True)


class DrawsError(Exception):
    """A call that draws random numbers: run again, it is another call."""


class _NoDraws(internals.DispatchMode):
    """Refuses kernels that draw random numbers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports dynamo to keep it out, which changes the process."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if torch.Tag.nondeterministic_seeded in func.tags and Trait.DROPS_INSIDE not in traits(name):
            raise DrawsError("it draws random numbers, and a dump has no state of the generator")
        return func(*args, **(kwargs or {}))


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:200] if isinstance(error, DrawsError) else f"{type(error).__name__}: {lines[0]}"[:200]


# --- introduced errors ------------------------------------------------------------------------------------------


def introduced(call: CallRecord, bits: Bits) -> dict[tuple[PathStep, ...], Any]:
    """How far every floating point result of a forward call of the API is off, in float64, by its path.

    Raises DumpError where the call cannot be run again.
    """
    plan = _plan(call)
    inputs = [value for value in call.values if value.slot.role is Role.INPUT]
    outputs = [value for value in call.values if value.slot.role is Role.OUTPUT and value.is_tensor]
    if any(value.is_tensor and value.payload is None for value in call.values):
        raise DumpError(f"the elements of {call_text(call.id)} are not in this dump")
    args, kwargs = _at(recorded_arguments(inputs, bits), torch.device("cpu"))
    found = recorded_results(plan, (args, kwargs), outputs, bits)
    try:
        with torch.no_grad():
            # In float64 a cast would round as it did: what it should give is what it was given.
            wide = (
                [args[0].double()]
                if Trait.CASTS in traits(call.id.name)
                else _run(plan, *_as(args, kwargs, torch.float64))
            )
        pairs = zip(outputs, found, wide, strict=True)
        return {
            value.slot.path: (item.double() - exact.double()).numpy()
            for value, item, exact in pairs
            if item.is_floating_point()
        }
    except Exception as error:  # the border: torch raises what it likes
        raise DumpError(f"{call_text(call.id)} cannot be run again in float64: {_told(error)}") from None
