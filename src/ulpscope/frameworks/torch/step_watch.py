"""Finding the steps of a program that was not written for us.

A step is an optimizer step; the next begins with the next outermost forward, so that what a loop does in between (logging
the loss, the schedule) stays with the step it belongs to. Where there is no optimizer, a step is an outermost forward of
the largest model.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ulpscope.frameworks.torch.codeswap import CodeSwap, Trouble


class StepWatch:
    """Calls `next_step` between two steps, and `first_forward` when the first model runs.

    While a capture records, its module tap tells `outermost`; while it does not, `install` makes us see for ourselves.
    """

    def __init__(self, next_step: Callable[[], None], first_forward: Callable[[], None], trouble: Trouble) -> None:
        self._next_step = next_step
        self._first_forward = first_forward
        self._local = threading.local()
        self._sizes: dict[int, tuple[weakref.ref[Module], int]] = {}
        self._largest = 0
        self._forwards = 0
        self._optimizer_steps = 0
        self._ended = False
        self._installed = False
        self._swap = CodeSwap(Module.__call__, self._around, trouble)
        register_optimizer_step_post_hook(self._after_optimizer)

    def install(self) -> None:
        if not self._installed:
            self._installed = True
            self._swap.install()

    def remove(self) -> None:
        if self._installed:
            self._installed = False
            self._swap.remove()

    def outermost(self, module: Module) -> None:
        """A model begins its forward, called by no other."""
        if getattr(self._local, "told", False):
            self._local.told = False
            return
        if self._ended:
            self._ended = False
            self._next_step()
        size = self._size(module)
        if size < self._largest:
            return
        self._largest = size
        self._forwards += 1
        if self._forwards == 1:
            self._first_forward()
        elif not self._optimizer_steps and not _has_optimizer():
            self._next_step()

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer_steps += 1
        if self._forwards:
            self._ended = True
        else:
            self._next_step()

    def _around(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local = self._local
        depth = getattr(local, "depth", 0)
        if not depth:
            self.outermost(args[0])
            if not self._installed:
                # The new step is recorded: the call goes through the module tap, which need not tell us again.
                local.told = True
                return Module.__call__(*args, **kwargs)
        local.depth = depth + 1
        try:
            return original(*args, **kwargs)
        finally:
            local.depth = depth

    def _size(self, module: Module) -> int:
        known = self._sizes.get(id(module))
        if known is None or known[0]() is not module:
            known = (weakref.ref(module), sum(value.numel() for value in module.parameters() if _counts(value)))
            self._sizes[id(module)] = known
        return known[1]


def _counts(value: Any) -> bool:
    return type(value).__name__ not in ("UninitializedParameter", "UninitializedBuffer")


def _has_optimizer() -> bool:
    """Whether any optimizer is alive: then several forwards before its step are one step."""
    return any(issubclass(type(thing), Optimizer) for thing in gc.get_objects())
