"""Watching every kernel that the dispatcher runs, forward and backward, below all calls or below one named call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ulpscope.frameworks.base import Observer, OpenCall, ThreadState
from ulpscope.frameworks.torch.names import IGNORED, UNINITIALISED, ApiNames
from ulpscope.frameworks.torch.summary import TorchMeasurer
from ulpscope.records import Phase, Role


class KernelMode(TorchDispatchMode):
    """The mode of one thread."""

    def __init__(self, tap: DispatchTap, state: ThreadState) -> None:
        super().__init__()
        self.tap = tap
        self.state = state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tap, state = self.tap, self.state
        if state.busy or not tap.observer.active or tap.names.of(func).treatment == IGNORED:
            return func(*args, **kwargs)
        return tap.run(state, func, args, kwargs)


class DispatchTap:
    """Opens and closes kernel calls. `below`, if given, limits them to what runs inside that call."""

    def __init__(
        self, observer: Observer, measurer: TorchMeasurer, below: Callable[[OpenCall], bool] | None = None
    ) -> None:
        self.observer = observer
        self.measurer = measurer
        self.below = below
        self.names = ApiNames()

    def run(self, state: ThreadState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observer = self.observer
        above = state.calls[-1] if state.calls else None
        if self.below is not None and not any(self.below(call) for call in state.calls):
            return func(*args, **kwargs)
        phase = Phase.FORWARD if torch._C._current_graph_task_id() == -1 else Phase.BACKWARD
        call: OpenCall | None = None
        api = self.names.of(func)
        state.busy = True
        try:
            with torch._C.DisableTorchFunction():
                call = observer.open_call(state, api.kind, api.name, None, phase=phase)
                if above is not None and phase is Phase.BACKWARD:
                    call.origin = above.seq
                if call.wanted:
                    for at, value in enumerate(args):
                        observer.show(call, Role.INPUT, (at,), value)
                    for key, value in kwargs.items():
                        observer.show(call, Role.INPUT, (key,), value)
        except Exception as error:  # the hook border
            observer.trouble(str(func), error)
        finally:
            state.busy = False
        # Inside a backward pass the function mode is on and would see this call a second time.
        state.redispatched = func
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            if call is not None:
                observer.close_raised(call, error)
            raise
        if call is None or not call.wanted:
            return result
        state.busy = True
        try:
            with torch._C.DisableTorchFunction():
                shown = args[0] if result is None and func._schema.is_mutable and args else result
                observer.show(call, Role.OUTPUT, (), shown, unread=api.treatment == UNINITIALISED)
                observer.close_call(call)
        except Exception as error:  # the hook border
            observer.trouble(str(func), error)
        finally:
            state.busy = False
        return result
