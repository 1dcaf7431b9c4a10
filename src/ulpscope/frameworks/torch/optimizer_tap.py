"""Watching optimizer steps through torch's own global optimizer hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ulpscope.frameworks.base import Observer, OpenCall
from ulpscope.frameworks.torch import internals
from ulpscope.model.names import OPTIMIZER
from ulpscope.model.records import Phase, Role

_NUMBERS = (float, int, Tensor)


class OptimizerTap:
    """Calls inside an optimizer step get it as their parent."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def finish_step(self) -> None:
        """Closes an optimizer step that is still open: whoever counts steps may come before us."""
        self._after(None, None, None)

    def install(self) -> None:
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def remove(self) -> None:
        for hooks, ours in zip(internals.optimizer_hooks, (self._before, self._after), strict=True):
            # Looked for, not remembered: what remembers can be interrupted.
            for key in [key for key, hook in hooks.items() if hook == ours]:
                del hooks[key]

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        observer = self.observer
        if not observer.active:
            return
        state = observer.state()
        if state.compiled or not observer.enter(state):
            return
        try:
            frame = sys._getframe(1)
            call = observer.open_call(state, OPTIMIZER, type(optimizer).__name__, frame, phase=Phase.STEP)
            if call.wanted:
                for place, value in _options(optimizer):
                    observer.show(call, Role.INPUT, place, value)
            state.calls.append(call)
            state.guard = (call, frame)
        except Exception as error:  # the hook border
            observer.trouble("optimizer step", error)
        finally:
            observer.leave(state)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        observer = self.observer
        if not observer.active:
            return
        state = observer.state()
        opened = _last(state.calls)
        if opened is not None:
            del state.calls[state.calls.index(opened) :]
            state.guard = None
            entered = observer.enter(state)
            observer.close_call(opened)
            if entered:
                observer.leave(state)


def _options(optimizer: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The numbers with which a step is made: `lr`, or, where parameters are in groups, `0.lr` of the first."""
    groups = optimizer.param_groups
    for at, group in enumerate(groups):
        for key, value in group.items():
            numbers = value if type(value) is tuple else (value,)
            if key != "initial_lr" and all(type(number) in _NUMBERS for number in numbers):
                yield (key,) if len(groups) == 1 else (at, key), value


def _last(calls: list[OpenCall]) -> OpenCall | None:
    return next((call for call in reversed(calls) if call.kind == OPTIMIZER), None)
