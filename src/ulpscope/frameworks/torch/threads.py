"""Putting the modes on every thread.

A mode belongs to one thread. The thread that starts a capture gets it at once, a thread that begins later when it
begins, an older one when it first calls a module.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ulpscope.frameworks.base import Observer, ThreadState
from ulpscope.frameworks.interruption import in_our_code
from ulpscope.frameworks.torch import doors, internals
from ulpscope.frameworks.torch.codeswap import CodeSwap, EngineSwap, bordered, watching

MakeMode = Callable[[ThreadState], Any]
# Of starts: all doors are opened at so many first ones, and at each so-many-th.
_FIRST, _AGAIN = 2, 64
# Seconds.
_SETTLING = 0.05


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
            *watching(threading.Thread, "_bootstrap_inner", self._new_thread, observer.trouble),
            CodeSwap(internals.run_engine, self._run_engine, observer.trouble)
            if internals.run_engine is not None
            else EngineSwap(bordered(self._run_engine, "a backward pass", observer.trouble)),
        ]
        self._has_torch_function: Any = None
        self._starts = 0

    def install(self) -> None:
        for swap in self._swaps:
            swap.install()
        self._hide_from_fast_paths()
        self._starts += 1
        self._open_doors()
        self.enter(self.observer.state())

    def remove(self) -> None:
        doors.open_doors(doors.NONE)
        for swap in self._swaps:
            swap.remove()
        if self._has_torch_function is not None:
            torch.overrides.has_torch_function = self._has_torch_function
            self._has_torch_function = None
        self.leave(self.observer.state())

    def enter(self, state: ThreadState) -> None:
        """Puts this thread's modes below those of the user, so that his `with` blocks end as they began."""
        if state.mode is None:
            _drop_dead_modes()
            kernel = self._make_dispatch_mode(state) if self._make_dispatch_mode is not None else None
            function = self._make_function_mode(state) if self._make_function_mode is not None else None
            state.mode = (function, kernel)
            self._on(state)

    def leave(self, state: ThreadState) -> None:
        if state.mode is not None:
            self._off(state)
            state.mode = None

    def tidy(self, state: ThreadState, caller: FrameType | None) -> None:
        """Makes sure that the mode of this thread is on, once, before a call of the program's: an exception of a signal
        handler can hit while it is being moved."""
        if state.mode is None or state.compiled or state.handling:
            return
        mode = state.mode[0]
        if mode is None:
            return
        count = internals.count_function_modes()
        if count == 1 and internals.function_mode_at(0) is mode:
            return
        if sum(internals.function_mode_at(place) is mode for place in range(count)) != 1 and not in_our_code(caller):
            _remove_function_mode(mode)
            _insert_function_mode(mode)

    def _on(self, state: ThreadState) -> None:
        function, kernel = state.mode
        if function is not None:
            _insert_function_mode(function)
        if kernel is not None:
            kernel.__enter__()

    def _off(self, state: ThreadState) -> None:
        function, kernel = state.mode
        if function is not None:
            _remove_function_mode(function)
        if kernel is not None:
            _remove_dispatch_mode(kernel)

    def _new_thread(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.observer.active:
            self.enter(self.observer.state())
        return original(*args, **kwargs)

    def _run_engine(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A backward pass: torch took the mode off to run `Tensor.backward`; Python inside the pass must be seen."""
        state = self.observer.state()
        mode = state.mode[0] if state.mode is not None and self.observer.active and not state.compiled else None
        depth = len(state.calls)
        try:
            if mode is None or _is_on(mode):
                return original(*args, **kwargs)
            with mode:
                return original(*args, **kwargs)
        finally:
            _settling.end = time.monotonic() + _SETTLING
            del state.calls[depth:]  # a node that raised has left its call there
            self._after_backward()

    def pause(self) -> None:
        """Gives the code back for a while."""
        doors.open_doors(doors.NONE)
        for swap in self._swaps:
            swap.remove()
        if self._has_torch_function is not None:
            torch.overrides.has_torch_function = self._has_torch_function

    def unpause(self) -> None:
        for swap in self._swaps:
            swap.install()
        self._hide_from_fast_paths()
        self._open_doors()

    def suspend(self, state: ThreadState) -> None:
        """Takes the modes off this thread for a while."""
        if state.mode is not None:
            self._off(state)

    def resume(self, state: ThreadState) -> None:
        if state.mode is not None:
            self._on(state)

    def _open_doors(self) -> None:
        """All of them at first, to learn which the program uses, and now and then: it may come to use others."""
        if self._make_function_mode is not None and self.observer.fast is not None:
            every = self._starts <= _FIRST or self._starts % _AGAIN == 0
            doors.open_doors(doors.ALL if every else doors.LEARNT)

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


def _insert_function_mode(mode: TorchFunctionMode) -> None:
    above = [internals.pop_function_mode() for _ in range(internals.count_function_modes())]
    internals.push_function_mode(mode)
    for other in reversed(above):
        internals.push_function_mode(other)


def _drop_dead_modes() -> None:
    """Takes off what a capture that has ended left on a thread it could not reach."""
    modes = [internals.pop_function_mode() for _ in range(internals.count_function_modes())]
    for mode in reversed(modes):
        if not getattr(mode, "is_dead", bool)():
            internals.push_function_mode(mode)


def _is_on(mode: TorchFunctionMode) -> bool:
    count = internals.count_function_modes()
    return any(internals.function_mode_at(place) is mode for place in range(count))


def _remove_function_mode(mode: TorchFunctionMode) -> None:
    modes = [internals.pop_function_mode() for _ in range(internals.count_function_modes())]
    for other in reversed(modes):
        if other is not mode:
            internals.push_function_mode(other)


def _remove_dispatch_mode(mode: Any) -> None:
    kept = []
    while internals.count_dispatch_modes():
        other = internals.pop_dispatch_mode()
        if other is mode:
            break
        kept.append(other)
    for other in reversed(kept):
        internals.push_dispatch_mode(other)
