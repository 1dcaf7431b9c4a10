"""Watching every kernel that the dispatcher runs, forward and backward, below all calls or below one named call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ulpscope.frameworks.base import Observer, OpenCall, ThreadState
from ulpscope.frameworks.interruption import is_left_over
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.mode_dependent import run_as_called
from ulpscope.frameworks.torch.names import IGNORED, ApiNames
from ulpscope.frameworks.torch.summary import PENDING, TorchMeasurer, unread_output
from ulpscope.frameworks.torch.tensors import leaves
from ulpscope.model.records import Phase, Role


class KernelTap(Protocol):
    """What is told of every kernel: the recorder's tap, or the judge's."""

    observer: Observer
    names: ApiNames

    def run(self, state: ThreadState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def unwatched(self, state: ThreadState, name: str, why: str, node: Any = None) -> None:
        """A call, or a node of autograd, is run with the mode taken off: its kernels will not be told."""
        ...


class KernelMode(internals.DispatchMode):
    """The mode of one thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports dynamo to keep it out, which changes the process."""
        return False

    def __init__(self, tap: KernelTap, state: ThreadState) -> None:
        super().__init__()
        self.tap = tap
        self.state = state
        # How often we have taken it off its thread ourselves, to put it back.
        self.away = 0

    def is_dead(self) -> bool:
        """Whether its capture has ended."""
        return not self.tap.observer.active

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tap, state = self.tap, self.state
        try:
            ignored = not tap.observer.active or tap.names.of(func).treatment == IGNORED
            ignored = ignored or (state.busy and not is_left_over(state, sys._getframe(1)))
        except Exception as error:  # the hook border
            tap.observer.trouble(str(func), error)
            ignored = True
        return redispatch(state, func, args, kwargs) if ignored else tap.run(state, func, args, kwargs)


class DispatchTap:
    """Opens and closes kernel calls. `below`, if given, limits them to what runs inside that call."""

    def __init__(
        self, observer: Observer, measurer: TorchMeasurer, below: Callable[[OpenCall, Phase], bool] | None = None
    ) -> None:
        self.observer = observer
        self.measurer = measurer
        self.below = below
        self.names = ApiNames()

    def unwatched(self, state: ThreadState, name: str, why: str, node: Any = None) -> None:
        self.observer.note(f"{name} is recorded without its kernels: {why}")

    def run(self, state: ThreadState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observer = self.observer
        above = state.calls[-1] if state.calls else None
        phase = Phase.FORWARD if internals.backward_pass() == -1 else Phase.BACKWARD
        if self.below is not None and not any(self.below(call, phase) for call in state.calls):
            return redispatch(state, func, args, kwargs)
        call: OpenCall | None = None
        written: list[torch.Tensor] = []
        api = self.names.of(func)
        observer.enter(state)
        try:
            with internals.no_functions():
                written = written_by(func, args, kwargs)
                call = observer.open_call(state, api.kind, api.name, None, phase=phase)
                call.wanted = call.wanted or self.below is not None
                if above is not None and phase is Phase.BACKWARD:
                    call.origin = above.seq
                if call.wanted:
                    for at, value in enumerate(args):
                        unread = PENDING if api.pending_inputs else self.measurer.if_unwritten(value)
                        observer.show(call, Role.INPUT, (at,), value, unread=unread)
                    for key, value in kwargs.items():
                        observer.show(call, Role.INPUT, (key,), value, unread=self.measurer.if_unwritten(value))
        except Exception as error:  # the hook border
            observer.trouble(str(func), error)
        finally:
            observer.leave(state)
        lists = [tensor for tensor in written if tensor.is_cpu] if raises_late(func) else []
        versions = [tensor._version for tensor in lists]
        try:
            result = redispatch(state, func, args, kwargs)
        except BaseException as error:
            if call is not None:
                observer.close_raised(call, error)
            raise
        for tensor, version in zip(lists, versions, strict=True):
            # Without a mode torch would have raised it: a list kernel on the CPU calls the in-place kernel of each tensor.
            if tensor._version == version:
                torch.autograd.graph.increment_version(tensor)
        observer.enter(state)
        try:
            with internals.no_functions():
                # The version of what a kernel wrote rises only after it has returned through us.
                self.measurer.forget(written)
                self.measurer.kernel_wrote(api, written, args, kwargs, result)
                if api.unseen is not None or api.name.startswith("native_batch_norm"):
                    self.measurer.distrust(leaf for value in (*args, *kwargs.values()) for _, leaf in leaves(value))
                if call is None or not call.wanted:
                    return result
                shown = args[0] if result is None and func._schema.is_mutable and args else result
                unread = unread_output(api) or self.measurer.if_unwritten(shown)
                observer.show(call, Role.OUTPUT, (), shown, unread=unread, produced=True)
                observer.close_call(call)
        except Exception as error:  # the hook border
            observer.trouble(str(func), error)
        finally:
            observer.leave(state)
        return result


def redispatch(state: ThreadState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the kernel. Inside a backward pass the function mode is on and must not take it for a call of the program."""
    state.redispatched = func
    try:
        return run_as_called(func, args, kwargs)
    finally:
        state.redispatched = None


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a kernel says it writes."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            items = value if isinstance(value, list | tuple) else [value]
            found += [item for item in items if isinstance(item, torch.Tensor) and not item.is_inference()]
    return found


def raises_late(func: Any) -> bool:
    """Whether the versions rise only through the in-place kernels that a list kernel calls: on the CPU, below a mode,
    those calls no longer raise them."""
    name = func._schema.name
    return "foreach" in name and not name.startswith(("aten::_fused", "aten::_amp"))
