"""Telling which module the backward of a custom `autograd.Function`, or of a compiled region, belongs to: the one that ran it.

What such a backward calls is recorded like any other call. No module runs meanwhile, so it would have none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from ulpscope.frameworks.base import Observer, PathOfCode, ThreadState
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.codeswap import CodeSwap, watching

# What torch calls the function that a compiled region is, and how many regions are remembered beyond their step.
_REGION, _REGIONS = "CompiledFunction", 64


class CustomFunctionTap:
    """Notes the module around each `Function.apply` by the number of the node that it makes, and puts that module on the stack while
    the node runs. Programs without such functions never come here."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        # By sequence number: the function and the module. Of this step, and of the one before, whose graphs may still run.
        self._modules: dict[int, tuple[Any, str]] = {}
        self._earlier: dict[int, tuple[Any, str]] = {}
        apply = getattr(Function.apply, "__func__", None)  # older versions have it in C
        # Of compiled regions: the numbers of what they made, from and to, and the module; and where those under way began, by thread.
        self._regions: list[tuple[int, int, str]] = []
        self._began: dict[int, int] = {}
        self._swaps = [] if apply is None else [CodeSwap(apply, self._apply, observer.trouble)]
        for name in ("apply", "apply_boxed"):
            self._swaps += watching(BackwardCFunction, name, self._run, observer.trouble)

    def install(self) -> None:
        for swap in self._swaps:
            swap.install()

    def remove(self) -> None:
        for swap in self._swaps:
            swap.remove()

    pause, unpause = remove, install

    def finish_step(self) -> None:
        self._earlier, self._modules = self._modules, {}
        del self._regions[:-_REGIONS]

    def begin_region(self, state: ThreadState) -> None:
        self._began[state.number] = internals.sequence_now()

    def end_region(self, state: ThreadState) -> None:
        began, now = self._began.pop(state.number, None), internals.sequence_now()
        if began is not None and now > began and state.modules:
            self._regions.append((began, now, _path(state)))

    def _apply(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.observer.active:
            state = self.observer.state()
            if state.modules:
                # The node is the first thing that is made. Numbers are of a thread: where two have the same, nobody knows whose it is.
                number, made = internals.sequence_now(), (args[0], _path(state))
                known = self._modules.get(number)
                self._modules[number] = made if known is None or known == made else (None, "")
        return original(*args, **kwargs)

    def _run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._module_of(args[0]) if self.observer.active else ""
        if not path:
            return original(*args, **kwargs)
        modules = self.observer.state().modules
        depth = len(modules)
        modules.append((path, None, None, -1))
        try:
            return original(*args, **kwargs)
        finally:
            del modules[depth:]

    def _module_of(self, node: Any) -> str:
        number = node._sequence_nr()
        for table in (self._modules, self._earlier):
            function, path = table.get(number, (None, ""))
            if function is not None and function is node._forward_cls:
                return path
        found = {path for began, ended, path in self._regions if began <= number < ended} if self._regions else set()
        return found.pop() if len(found) == 1 and node._forward_cls.__name__ == _REGION else ""


def _path(state: ThreadState) -> str:
    path = state.modules[-1][0]
    return path.inside(sys._getframe()) if isinstance(path, PathOfCode) else path
