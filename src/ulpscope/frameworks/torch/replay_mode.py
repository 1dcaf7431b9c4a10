"""The mode that runs every kernel as it is, and then once more in higher precision on the same inputs.

The run is not changed: what a kernel writes is copied before, generators are put back, our own kernels run below all modes,
and whatever goes wrong here is a note on the row, never an exception in the program.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from ulpscope.frameworks.base import Observer, ThreadState
from ulpscope.frameworks.interruption import is_meant_for_the_program
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch import replay_reference as references
from ulpscope.frameworks.torch.dense import untouchable
from ulpscope.frameworks.torch.dispatch_tap import KernelMode, raises_late, redispatch, written_by
from ulpscope.frameworks.torch.names import ApiNames
from ulpscope.frameworks.torch.replay_exchange import Exchanges
from ulpscope.frameworks.torch.replay_measure import exact_measures, measures, rounded_factors, view_measures
from ulpscope.frameworks.torch.replay_origins import Origins, scalars
from ulpscope.frameworks.torch.replay_place import Places
from ulpscope.frameworks.torch.replay_poles import FOLLOWED, Poles, ends_in
from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_values import items, results, tensors
from ulpscope.frameworks.torch.settings import float32_products
from ulpscope.model.operators import FACTORS_ROUNDED

Emit = Callable[[dict[str, Any]], None]
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


_PLAIN = Tensor.__torch_dispatch__
_LARGE = 1 << 20  # elements
_TRACED = frozenset({"FakeTensor", "FunctionalTensor"})


class ReplayMode(KernelMode):
    """Leaves a tensor of a class of its own (DTensor, one that a collective still fills) to that class: it has no elements
    to read, and the kernels that it calls on those inside come by here. What is only traced has nothing inside.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            if any(kind.__name__ in _TRACED for kind in types):
                return redispatch(self.state, func, args, kwargs or {})
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Namer(Observer, Protocol):
    """Gives calls their names, and knows which module runs."""

    def outermost(self, state: ThreadState) -> str: ...


class ReplayTap:
    """Measures every kernel call and emits one row of plain values for each."""

    def __init__(self, observer: Namer, emit: Emit, places: Places) -> None:
        self.observer: Observer = observer
        self._namer = observer
        self.names = ApiNames()
        # Tells of a frame whether what it calls is not to be judged.
        self.ignored: Callable[[FrameType], bool] | None = None
        # While there is somebody to tell: whether all this may still be preparation, which should cost little.
        self._prepares = True
        self._emit = emit
        self._places = places
        self._origins = Origins()
        self._exchanges = Exchanges()
        self._poles = Poles()
        self._plans: dict[Any, Plan] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def forget(self) -> None:
        """What was seen until now is no part of what is judged: it is as if it had been made elsewhere."""
        self._origins = Origins()
        self._poles = Poles()
        self._counts.clear()

    def unwatched(self, state: ThreadState, name: str, why: str, node: Any = None) -> None:
        """A row for what runs without its kernels: it is not judged."""
        observer = self.observer
        observer.enter(state)
        try:
            op = f"Autograd.{name}" if node is not None else name
            index = self._counts[op, ""]
            self._counts[op, ""] = index + 1
            place = self._places.of(state, ()) if node is None else self._places.of_node(node)
            self._emit({"op": op, "dtypes": "", "index": index, "kind": "unwatched", **place, "unknown": why})
        except Exception as error:  # the hook border
            observer.trouble(name, error)
        finally:
            observer.leave(state)

    def _run_unjudged(self, state: ThreadState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.unwatched(
            state, str(func), "it is large, and neither a model nor a backward had run: --from-start judges it"
        )
        result = redispatch(state, func, args, kwargs)
        self._origins.made(results(result), measured=True)
        return result

    def run(self, state: ThreadState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observer = self.observer
        large = aside = False
        try:
            with internals.no_functions():
                # Traced, or a parameter without a shape: there are no numbers to judge.
                aside = any(untouchable(leaf) is not None for leaf in tensors(args, kwargs))
                if self.ignored is not None and not aside:
                    aside = self.ignored(sys._getframe(2))
                    self._prepares = self._prepares and internals.backward_pass() == -1
                    large = self._prepares and sum(leaf.numel() for leaf in tensors(args, kwargs)) > _LARGE
        except Exception as error:  # the hook border
            observer.trouble(str(func), error)
            aside = True
        if aside:
            return redispatch(state, func, args, kwargs)
        if large:
            return self._run_unjudged(state, func, args, kwargs)
        row: dict[str, Any] | None = None
        plan: Plan | None = None
        before: Any = None
        # Not torch.no_grad(): what a signal handler raises inside its Python would leave gradients switched off.
        grad = torch.is_grad_enabled()
        observer.enter(state)
        try:
            place = self._places.of(state, args)
            internals.set_grad_enabled(False)
            with internals.no_functions(), internals.no_dispatch():
                plan = self._plan(func)
                row = self._begin(place, plan, args, kwargs)
                before = self._before(plan, args, kwargs)
        except Exception as error:  # the hook border
            observer.trouble(str(func), error)
        finally:
            internals.set_grad_enabled(grad)
            observer.leave(state)
        lists = [tensor for tensor in written_by(func, args, kwargs) if tensor.is_cpu] if raises_late(func) else []
        versions = [tensor._version for tensor in lists]
        result = redispatch(state, func, args, kwargs)
        for tensor, version in zip(lists, versions, strict=True):
            if tensor._version == version:  # as in dispatch_tap: without a mode torch would have raised it
                torch.autograd.graph.increment_version(tensor)
        if plan is None or row is None:
            return result
        observer.enter(state)
        try:
            internals.set_grad_enabled(False)
            with internals.no_functions(), internals.no_dispatch():
                self._after(plan, row, args, kwargs, before, result)
                self._follow(plan, row, state, grad, args, kwargs, result)
                self._emit(row)
        except Exception as error:  # the hook border
            observer.trouble(str(func), error)
        finally:
            internals.set_grad_enabled(grad)
            observer.leave(state)
        return result

    def _plan(self, func: Any) -> Plan:
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = references.plan_of(func)
        return plan

    def _begin(
        self, place: dict[str, Any], plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        read = tensors(args, kwargs)
        dtypes = ",".join(str(leaf.dtype)[6:] for leaf in read if leaf.is_floating_point())
        index = self._counts[plan.op, dtypes]
        self._counts[plan.op, dtypes] = index + 1
        row = {"op": plan.op, "dtypes": dtypes, "index": index, "kind": plan.kind, **place}
        plain = scalars(plan, args, kwargs)
        if plain:
            row["scalars"] = plain
        if plan.kind not in ("view", "unwritten"):
            leaves = self._origins.leaves(plan, args, kwargs)
            if leaves:
                row["leaves"] = [{**leaf, "name": self._places.name_of(read, leaf)} for leaf in leaves]
        reads = self._poles.read(plan, args, kwargs)
        if reads:
            row["reads"] = reads
        device = next((leaf.device.type for leaf in read), "cpu")
        if device != "cpu":
            row["device"] = device
        row["measured"] = self._origins.is_measured(read)
        if plan.decides and row["measured"]:
            row["decides"] = True
        return row

    def _before(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _communicates(plan):
            return self._exchanges.before(plan, args)
        if plan.kind == "random":
            return *references.keep_written(plan, args, kwargs), _Generators(args, kwargs)
        return references.keep_written(plan, args, kwargs)

    def _after(
        self,
        plan: Plan,
        row: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Any,
        result: Any,
    ) -> None:
        if _communicates(plan):
            row["kind"] = "collective"
            row |= self._exchanges.after(plan, args, before, result)
            self._origins.made([*items(args), *results(result)], measured=True)
            del row["measured"]
            return
        try:
            row["measures"] = self._measures(plan, row, args, kwargs, before, result)
        except Exception as error:  # the hook border: no reference for this kernel, or not for these arguments
            if is_meant_for_the_program(error):
                raise
            row["unknown"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        measured = row.pop("measured") or plan.kind == "random"
        if plan.kind != "view":
            self._origins.made(results(result), measured=measured)
            self._origins.made(references.outputs(plan, args, kwargs, result), measured=measured)

    def _follow(
        self,
        plan: Plan,
        row: dict[str, Any],
        state: ThreadState,
        grad: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """What is not finite, on its way from the call that made it."""
        reads = row.pop("reads", [])
        found = references.outputs(plan, args, kwargs, result) if plan.kind != "view" else results(result)
        self._poles.wrote(row, reads, found)
        if "poles" in row:
            row["ends"] = ends_in(row, self._in_model(state), grad, (args, kwargs), found)
            if row["ends"] in FOLLOWED:
                self._poles.reached(row, found)

    def _in_model(self, state: ThreadState) -> bool:
        """Whether a module runs that is more than a loss; a loss is told by the name of its class."""
        return len(state.modules) > 1 or (bool(state.modules) and "Loss" not in self._namer.outermost(state))

    def _measures(
        self,
        plan: Plan,
        row: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Any,
        result: Any,
    ) -> list[dict[str, Any]]:
        if any(leaf._is_zerotensor() for leaf in (*tensors(args, kwargs), *tensors(results(result)))):
            raise LookupError("zeros without memory")  # which our own arithmetic would read
        if plan.kind == "view":
            return view_measures(plan, args, kwargs, result)
        found = references.outputs(plan, args, kwargs, result)
        if plan.kind != "random":
            kept, kept_kwargs = before
            return measures(plan, kept, kept_kwargs, found, factors=_factors(plan, found))
        kept, kept_kwargs, generators = before
        row["seed"] = generators.seed
        with generators:
            expected = references.outputs(plan, kept, kept_kwargs, plan.func(*kept, **kept_kwargs))
        return exact_measures(found, expected)


def _communicates(plan: Plan) -> bool:
    return plan.op.partition(".")[0] in _COMMUNICATION and plan.kind != "view"


def _factors(plan: Plan, found: list[Any]) -> str | None:
    device = next((item.device.type for item in found if isinstance(item, Tensor)), "cpu")
    return rounded_factors(plan, device, float32_products()) if plan.name in FACTORS_ROUNDED else None


class _Generators:
    """The state of the generators a call draws from, taken before it; inside `with`, they stand there again."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [item for item in items(args, kwargs) if isinstance(item, torch.Generator)]
        self._generators = given or _default_generators(args, kwargs)
        self._before = [generator.get_state() for generator in self._generators]
        self._now: list[Tensor] = []

    @property
    def seed(self) -> int:
        return self._generators[0].initial_seed() % (1 << 62) if self._generators else 0

    def __enter__(self) -> None:
        self._now = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)

    def __exit__(self, *error: object) -> None:
        for generator, state in zip(self._generators, self._now, strict=True):
            generator.set_state(state)


def _default_generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    devices = {leaf.device for leaf in tensors(args, kwargs)}
    asked = kwargs.get("device")
    if asked is not None:
        devices.add(torch.device(asked))
    found = [torch.default_generator]
    for device in devices:
        if device.type == "cuda":
            found.append(torch.cuda.default_generators[device.index or 0])
    return found
