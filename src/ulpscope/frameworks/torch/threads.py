"""Putting the modes on every thread.

A mode belongs to one thread. The thread that starts a capture gets it at once, a thread that begins later when it
begins, an older one when it first calls a module.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread as pools
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from ulpscope.frameworks.base import Observer, ThreadState
from ulpscope.frameworks.interruption import in_our_code
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.codeswap import Around, CodeSwap, EngineSwap, StraightSwap, bordered, watching
from ulpscope.frameworks.torch.mode_dependent import nodes_run_without
from ulpscope.frameworks.torch.mode_stacks import DISPATCH, FUNCTION, GONE, Stack, is_blind

MakeMode = Callable[[ThreadState], Any]
Places = tuple[list[int], list[int]]
# Seconds.
_SETTLING = 0.05
_STACKS = (FUNCTION, DISPATCH)


class _Settling:
    """A thread of torch's engine lets go of our hooks a little after the pass in which they ran. It needs Python for that, and
    aborts the program where that has just ended: so the program ends this much later than its last pass."""

    def __init__(self) -> None:
        self.end = 0.0
        atexit.register(self.wait)

    def wait(self) -> None:
        time.sleep(max(0.0, self.end - time.monotonic()))


_settling = _Settling()


class ThreadTap:
    """Owns the modes of all threads of one capture."""

    def __init__(
        self,
        observer: Observer,
        make_function_mode: MakeMode | None,
        make_dispatch_mode: MakeMode | None,
        after_backward: Callable[[], None],
    ) -> None:
        self.observer = observer
        self._after_backward = after_backward
        self._make_function_mode = make_function_mode
        self._make_dispatch_mode = make_dispatch_mode
        self._swaps: list[CodeSwap | EngineSwap] = [
            *watching(threading.Thread, "start", self._begin_thread, observer.trouble),
            *watching(threading.Thread, "_bootstrap_inner", self._new_thread, observer.trouble),
            *watching(pools._WorkItem, "__init__", self._begin_task, observer.trouble),
            *watching(pools._WorkItem, "run", self._run_task, observer.trouble),
            CodeSwap(internals.run_engine, self._run_engine, observer.trouble)
            if internals.run_engine is not None
            else EngineSwap(bordered(self._run_engine, "a backward pass", observer.trouble)),
        ]
        if observer.fast is not None and internals.enter_hook is not None:
            self._swaps.append(StraightSwap(internals.enter_hook, self._enter_hook))
        if make_dispatch_mode is not None:
            self._swaps += watching(internals.DispatchMode, "__exit__", self._leave_mode, observer.trouble)
        # Runs a backward pass that torch is going to compile.
        self.compiled_backward: Around | None = None
        self._has_torch_function: Any = None
        self._suspended: dict[int, Places] = {}
        # Of threads and of tasks in the order of their beginnings: the ones odd, the others even.
        self._threads, self._tasks = itertools.count(1, 2), itertools.count(2, 2)
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        for swap in self._swaps:
            swap.install()
        self._hide_from_fast_paths()
        self.enter(self.observer.state())

    def remove(self) -> None:
        for swap in self._swaps:
            swap.remove()
        if self._has_torch_function is not None:
            torch.overrides.has_torch_function = self._has_torch_function
            self._has_torch_function = None
        self.leave(self.observer.state())

    def enter(self, state: ThreadState) -> None:
        """Puts this thread's modes on: the function mode below those of the program, so that its `with` blocks end as they began; the
        dispatch mode above those that are on already, which play the device."""
        if state.mode is None:
            FUNCTION.drop_dead()
            DISPATCH.drop_dead()
            kernel = self._make_dispatch_mode(state) if self._make_dispatch_mode is not None else None
            function = self._make_function_mode(state) if self._make_function_mode is not None else None
            state.mode = (function, kernel)
            self._on(state, ([0], [DISPATCH.length()]))

    def rise(self, state: ThreadState) -> None:
        """Puts the dispatch mode of this thread above what the program has put on since: that plays the device from now on."""
        if state.mode is not None and DISPATCH.remove(state.mode[1]):
            DISPATCH.insert(state.mode[1], DISPATCH.length())

    def leave(self, state: ThreadState) -> None:
        if state.mode is not None:
            suspended = self._suspended.pop(state.number, None) is not None
            for mode, stack, places in zip(state.mode, _STACKS, self._off(state), strict=True):
                if mode is not None and len(places) != 1 and not suspended:
                    tell = self.observer.note if places or stack is FUNCTION else self.observer.missed
                    tell(f"at the end torch's stack of {stack.name} held ours {len(places)} times, not once")
            state.mode = None

    def tidy(self, state: ThreadState, caller: FrameType | None) -> None:
        """Makes sure that each mode of this thread is on, once, before a call of the program's: an exception of a signal
        handler can hit while it is being moved, and the program can take off more than it had put on."""
        if state.mode is None or state.compiled or state.handling:
            return
        function, kernel = state.mode
        if function is not None and not FUNCTION.holds_only(function) and FUNCTION.count(function) != 1:
            self._put_back(function, FUNCTION, 0, caller)
        if kernel is not None and not kernel.away and not DISPATCH.holds_only(kernel) and DISPATCH.count(kernel) != 1:
            if not DISPATCH.count(kernel):
                self.observer.missed(GONE)
            self._put_back(kernel, DISPATCH, DISPATCH.length(), caller)

    def _put_back(self, mode: Any, stack: Stack, place: int, caller: FrameType | None) -> None:
        if not in_our_code(caller):
            stack.remove(mode)
            stack.insert(mode, min(place, stack.length()))

    def _on(self, state: ThreadState, wanted: Places) -> None:
        for mode, stack, places in zip(state.mode, _STACKS, wanted, strict=True):
            for place in places if mode is not None else ():
                stack.insert(mode, min(place, stack.length()))

    def _off(self, state: ThreadState) -> Places:
        """Where each mode was."""
        function, kernel = state.mode
        return FUNCTION.remove(function), DISPATCH.remove(kernel)

    def _begin_thread(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A thread has the number in which it was begun, whenever it comes to run. Those of a pool are begun when none is idle,
        which is a race: there the tasks are numbered."""
        if getattr(args[0], "_target", None) is not pools._worker:
            self._numbers[args[0]] = next(self._threads)
        return original(*args, **kwargs)

    def _begin_task(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._numbers[args[0]] = next(self._tasks)
        return original(*args, **kwargs)

    def _new_thread(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self.observer.state()
        if self.observer.active:
            state.number = self._numbers.get(args[0], state.number)
            self.enter(state)
        try:
            return original(*args, **kwargs)
        finally:
            if (
                self.observer.active
                and state.mode is not None
                and state.mode[1] is not None
                and is_blind(state.mode[1])
            ):
                self.observer.missed(GONE)

    def _leave_mode(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A mode of the program's ends. Torch takes off what lies on top, which is ours where that mode began before."""
        state = self.observer.state()
        mode = None if state.mode is None else state.mode[1]
        on_top = mode is not None and DISPATCH.is_on_top(mode)
        if on_top:
            DISPATCH.remove(mode)
        try:
            return original(*args, **kwargs)
        finally:
            if on_top:
                DISPATCH.insert(mode, DISPATCH.length())

    def _run_task(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.observer.active:
            return original(*args, **kwargs)
        state = self.observer.state()
        number, state.number = state.number, self._numbers.get(args[0], state.number)
        try:
            return original(*args, **kwargs)
        finally:
            state.number = number

    def _run_engine(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A backward pass: torch took the mode off to run `Tensor.backward`; Python inside the pass must be seen."""
        state = self.observer.state()
        if self.compiled_backward is not None and not state.compiled and internals.compiles_backward():
            return self.compiled_backward(original, args, kwargs)
        mode = state.mode[0] if state.mode is not None and self.observer.active and not state.compiled else None
        depth = len(state.calls)
        try:
            with ExitStack() as around:
                if mode is not None and not FUNCTION.count(mode):
                    around.enter_context(mode)
                if mode is not None and state.mode[1] is not None and args:
                    around.enter_context(nodes_run_without(state.mode[1], args[0]))
                return original(*args, **kwargs)
        finally:
            _settling.end = time.monotonic() + _SETTLING
            del state.calls[depth:]  # a node that raised has left its call there
            self._after_backward()

    def _enter_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        fast = self.observer.fast
        fast.give(enter_plainly=original)
        found: Callable[..., Any] = fast.enter_hook
        return found

    def pause(self) -> None:
        """Gives the code back for a while."""
        for swap in self._swaps:
            swap.remove()
        if self._has_torch_function is not None:
            torch.overrides.has_torch_function = self._has_torch_function

    def unpause(self) -> None:
        for swap in self._swaps:
            swap.install()
        self._hide_from_fast_paths()

    def suspend(self, state: ThreadState) -> None:
        """Takes the modes off this thread for a while."""
        if state.mode is not None:
            self._suspended[state.number] = self._off(state)

    def resume(self, state: ThreadState) -> None:
        """Puts back what `suspend` has taken: what torch itself had taken off, it puts back itself."""
        if state.mode is not None:
            self._on(state, self._suspended.pop(state.number, ([], [])))

    def _hide_from_fast_paths(self) -> None:
        """torch's attention layers leave their fast path when any function mode is on; ours must not count."""
        if self._make_function_mode is None:
            return
        original = self._has_torch_function = torch.overrides.has_torch_function
        mode_count = internals.count_function_modes
        state_of = self.observer.state
        reference = weakref.ref(self)

        def has_torch_function(args: Any) -> bool:
            tap = reference()
            if tap is None or state_of().mode is None or mode_count() > 1:
                return bool(original(args))
            mode = internals.pop_function_mode() if mode_count() else None
            try:
                return bool(original(args))
            finally:
                if mode is not None:
                    internals.push_function_mode(mode)

        torch.overrides.has_torch_function = has_torch_function
