"""Watching every outermost torch call with a function mode.

A mode keeps torch's attributes as they are (`F.gelu is F.gelu`), sees names bound earlier and needs no list of
functions. It belongs to one thread, so each thread gets its own; it is taken off while a compiled region runs, and put
on again inside a backward pass, which torch would otherwise run without it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ulpscope.frameworks.base import Observer, OpenCall, Shared, ThreadState
from ulpscope.frameworks.interruption import is_left_over
from ulpscope.frameworks.torch import internals, mode_stacks
from ulpscope.frameworks.torch.backward import BackwardTap
from ulpscope.frameworks.torch.mode_dependent import WHY
from ulpscope.frameworks.torch.names import (
    FUNCTIONALS,
    IGNORED,
    SHARING,
    UNINITIALISED,
    WRITTEN_OUT,
    Api,
    ApiNames,
    is_apart,
)
from ulpscope.frameworks.torch.npu import Around
from ulpscope.frameworks.torch.summary import PENDING, TorchMeasurer, unread_output
from ulpscope.frameworks.torch.tensors import leaves
from ulpscope.frameworks.torch.warning_lines import call_from, caller_of
from ulpscope.model.records import Role
from ulpscope.native import taps

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_OVERRIDES = torch.overrides.__file__
_tracing = internals.jit_trace
_HANDLER_DEPTH = 6
_no_functions = internals.no_functions


def _inside_kernel(api: Api) -> bool:
    """Whether a dispatch mode of the program's makes this call: it plays the device, and what it computes is no call."""
    if internals.below_autograd() and not torch.is_inference_mode_enabled():
        return True
    if api.kind != "Aten":
        return False
    # Kernels that autograd itself runs reach the mode with nothing excluded.
    caller = sys._getframe(2).f_back
    for _ in range(_HANDLER_DEPTH):
        if caller is None:
            return False
        if caller.f_code.co_name == "__torch_dispatch__":
            return True
        caller = caller.f_back
    return False


def _has_zeros(args: tuple[Any, ...]) -> bool:
    return any(type(value) is torch.Tensor and value._is_zerotensor() for value in args)


class CallMode(TorchFunctionMode):
    """The mode of one thread. `records` is False where only the module level is wanted: then it just looks out for
    writes behind torch's back."""

    tap: FunctionTap
    state: ThreadState

    def __init__(self, tap: FunctionTap, state: ThreadState) -> None:
        super().__init__()
        self.tap = tap
        self.state = state

    def is_dead(self) -> bool:
        """Whether its capture has ended."""
        return not self.tap.observer.active

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tap, state = self.tap, self.state
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        run = functools.partial(call_from, caller_of(frame, func), func)
        try:
            api = self._api(func, types, frame)
            unrecorded = (
                not tap.records
                or tap.quiet
                or is_apart(frame.f_code)
                or (api is not None and not state.calls and _inside_kernel(api))
            )
        except Exception as error:  # the hook border
            tap.observer.trouble(getattr(func, "__name__", "a call"), error)
            api = None
        if api is None:
            return run(args, kwargs)
        if api.treatment == SHARING:
            return tap.run_sharing(api, run, args, kwargs)
        if api.treatment == WRITTEN_OUT:
            with self:
                return func.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        if unrecorded:
            return tap.run_unrecorded(api, run, args, kwargs)
        return tap.run_recorded(state, api, func, run, types, args, kwargs)

    def _api(self, func: Callable[..., Any], types: Any, frame: FrameType) -> Api | None:
        """What is called, or None where nothing is to be done about it."""
        state, observer = self.state, self.tap.observer
        api = self.tap.names.of(func)
        if func is state.redispatched:
            state.redispatched = None
            return None
        if not observer.active:
            mode_stacks.DISPATCH.drop_dead()
            return None
        if api.treatment == IGNORED or (state.busy and not is_left_over(state, frame)):
            return None
        foreign = types and not all(issubclass(kind, torch.Tensor) for kind in types)
        return None if foreign or _tracing() is not None else api


if taps.C is not None:

    @taps.C.asked_mode
    class FastMode(taps.C.Mode, CallMode):
        """The same with the usual calls done in C; the unusual ones come back to Python."""

        slow = CallMode.__torch_function__

        def __init__(self, fast: Any, tap: FunctionTap, state: ThreadState) -> None:
            taps.C.Mode.__init__(self, fast, state)
            CallMode.__init__(self, tap, state)


class FunctionTap:
    """Turns torch calls into opened and closed calls of the observer."""

    quiet = Shared(False)

    def __init__(
        self,
        observer: Observer,
        measurer: TorchMeasurer,
        backward: BackwardTap,
        *,
        records: bool,
        kernels: bool,
        vendor: Around | None = None,
        as_msprobe: bool = False,
    ) -> None:
        self.observer = observer
        self.measurer = measurer
        self.backward = backward
        self.records = records
        self._kernels = kernels
        self._vendor = vendor
        self.names = ApiNames(as_msprobe=as_msprobe)
        fast = self.fast = observer.fast
        self.quiet = False
        if fast is not None:
            fast.give(
                backward=backward, names=self.names, apis=self.names.known, on_module=not records,
                node_order=as_msprobe,
            )  # fmt: skip

    def mode(self, state: ThreadState) -> CallMode:
        if self.fast is None or self._kernels or self._vendor is not None:
            return CallMode(self, state)
        return FastMode(self.fast, self, state)

    def run_sharing(self, api: Api, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(args, kwargs)
        if api.name == "data":  # torch goes on to write it
            self.measurer.measure_anew((*args, result))
        else:
            self.measurer.distrust((*args, *kwargs.values(), result))
        return result

    def run_unrecorded(self, api: Api, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(args, kwargs)
        try:
            if api.treatment == UNINITIALISED:
                self.measurer.distrust((result,))
            if api.unseen is not None:
                self._distrust_written(api.unseen, args, kwargs)
        except Exception as error:  # the hook border
            self.observer.trouble(f"{api.kind}.{api.name}", error)
        return result

    def _run_with_kernels(
        self, state: ThreadState, api: Api, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call below the dispatch mode; without it where that would change what torch computes."""
        mode = state.mode[1]
        if mode_stacks.is_blind(mode):
            self.observer.missed(mode_stacks.GONE)
            return run(args, kwargs)
        with internals.no_functions():
            dependent = api.dependent is not None and api.dependent(args, kwargs)
            # Under any dispatch mode torch fails to add a number to zeros that have no memory.
            is_watched = not dependent and not _has_zeros(args)
        if is_watched:
            return run(args, kwargs)
        why = WHY if dependent else "it is given zeros without memory (torch._efficientzerotensor)"
        mode.tap.unwatched(state, f"{api.kind}.{api.name}", why)
        with mode_stacks.off(mode):
            return run(args, kwargs)

    def _distrust_written(self, places: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a call wrote without raising a version must be measured anew."""
        if not places:
            found = [leaf for value in (*args, *kwargs.values()) for _, leaf in leaves(value)]
        else:
            found = [args[place] for place in places if isinstance(place, int) and place < len(args)]
            found += [kwargs[place] for place in places if isinstance(place, str) and place in kwargs]
        self.measurer.distrust(found)

    def run_recorded(
        self,
        state: ThreadState,
        api: Api,
        func: Any,
        run: Run,
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        observer = self.observer
        if not observer.enter(state):
            return run(args, kwargs)
        call: OpenCall | None = None
        edges = None
        shown_args, shown_kwargs = args, kwargs
        # A subclass is asked even for an attribute, and would answer our questions as if they were the program's. Plain
        # tensors do without: entering costs a tenth of the call.
        unheard = _no_functions() if types else None
        if unheard is not None:
            unheard.__enter__()
        try:
            frame = sys._getframe(2)
            while frame.f_code.co_filename == _OVERRIDES and frame.f_back is not None:
                frame = frame.f_back  # torch's own way from a Python function to the mode
            if api.kind == "Functional" and frame.f_code.co_filename == FUNCTIONALS and frame.f_back is not None:
                shown_args, shown_kwargs = self.names.positions(frame, args, kwargs)
                frame = frame.f_back
            name = self.names.spelling(api, frame, args) if api.signed else api.name
            call = observer.open_call(state, api.kind, name, frame)
            if call.wanted:
                for at, value in enumerate(shown_args):
                    unread = PENDING if api.pending_inputs else self.measurer.if_unwritten(value)
                    observer.show(call, Role.INPUT, (at,), value, unread=unread)
                for key, value in shown_kwargs.items():
                    observer.show(call, Role.INPUT, (key,), value, unread=self.measurer.if_unwritten(value))
            follow = torch.is_grad_enabled() and observer.wants_backward(call)
            if follow and (api.mutates or "out" in kwargs or kwargs.get("inplace") is True):
                edges = self.backward.edges(shown_args, shown_kwargs)
        except Exception as error:  # the hook border: recording must not disturb the program
            observer.trouble(f"{api.kind}.{api.name}", error)
            follow = False
        finally:
            if unheard is not None:
                unheard.__exit__(None, None, None)
            observer.leave(state)
        if call is None:
            return run(args, kwargs)
        sequence = internals.sequence_now()
        state.calls.append(call)
        try:
            if self._kernels:
                result = self._run_with_kernels(state, api, run, args, kwargs)
            else:
                result = run(args, kwargs) if self._vendor is None else self._vendor.run(call, func, args, kwargs)
        except BaseException as error:
            observer.close_raised(call, error)
            raise
        finally:
            state.calls.pop()
        observer.enter(state)
        unheard = _no_functions() if types or type(result) is not torch.Tensor else None
        if unheard is not None:
            unheard.__enter__()
        try:
            if api.unseen is not None:
                self._distrust_written(api.unseen, args, kwargs)
            self.measurer.called(api, args, kwargs, result)
            shown = args[0] if result is None and api.mutates and args else result
            if call.wanted:
                unread = unread_output(api) or self.measurer.if_unwritten(shown)
                observer.show(call, Role.OUTPUT, (), shown, unread=unread, produced=True)
                observer.close_call(call)
            if follow:
                self.backward.arm(call, sequence, edges, shown_args, shown_kwargs, shown, watch=self._kernels)
        except Exception as error:  # the hook border
            observer.trouble(f"{api.kind}.{api.name}", error)
        finally:
            if unheard is not None:
                unheard.__exit__(None, None, None)
            observer.leave(state)
        return result
