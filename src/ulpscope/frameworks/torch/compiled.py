"""Keeping out of compiled regions.

Dynamo looks at every frame that runs below a compiled call: it would trace our modes and our exchanged code, or compile
anew because of them. So all of it is taken away while a compiled region runs, or anything is being compiled or traced, and put
back afterwards. Such a region is recorded at its boundary.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from ulpscope.frameworks.base import Observer, ThreadState
from ulpscope.frameworks.torch.codeswap import CodeSwap

# Both are called in the frame of a compiled call: the first before it looks at the dispatcher's state, the second at its end.
_FIRST, _LAST = "set_eval_frame", "_maybe_set_eval_frame"
_COMPILED_CALL = "compile_wrapper"
_NOTE = "a compiled region (torch.compile) is recorded at its boundary only"
_TRACED = (
    "what was traced (torch.export, make_fx, torch.jit, torch.fx) was written down, not computed: it is not recorded"
)
# By module, what writes down what it sees, in whichever torch has it. `dispatch_trace` is where older ones come by.
_TRACERS = {
    "torch.jit": ("trace", "trace_module", "script"),
    "torch.fx": ("symbolic_trace",),
    "torch.export": ("export", "export_for_training", "draft_export", "ExportedProgram.run_decompositions"),
    "torch.fx.experimental.proxy_tensor": ("_MakefxTracer.trace", "_MakefxTracer.trace_subgraph", "dispatch_trace"),
}


def _tracers() -> Iterator[FunctionType]:
    """Those that are loaded: the others load with a tracer that is watched here, or with dynamo."""
    for module, names in _TRACERS.items():
        for name in names:
            try:
                found: Any = functools.reduce(getattr, name.split("."), sys.modules[module])
            except (KeyError, AttributeError):
                continue
            if isinstance(found, FunctionType):
                yield found


class CompiledTap:
    """Calls `suspend` and `resume` around compiled regions and compilations, once for each thread's outermost one."""

    def __init__(
        self, observer: Observer, suspend: Callable[[ThreadState], None], resume: Callable[[ThreadState], None]
    ) -> None:
        self.observer = observer
        self._suspend = suspend
        self._resume = resume
        self._swaps = [CodeSwap(torch.compile, self._compile)]  # type: ignore[arg-type]
        self._swaps += [CodeSwap(tracer, self._trace) for tracer in _tracers()]
        self._dynamo: ModuleType | None = None
        self._first: Any = None
        self._last: Any = None

    def install(self) -> None:
        for swap in self._swaps:
            swap.install()
        self._watch()

    def remove(self) -> None:
        for swap in self._swaps:
            swap.remove()
        if self._dynamo is not None:
            handler = sys.modules["torch._dynamo.callback"].callback_handler
            setattr(self._dynamo, _FIRST, self._first)
            setattr(self._dynamo, _LAST, self._last)
            if self._begin_compiling in handler.start_callbacks:
                handler.remove_start_callback(self._begin_compiling)
            if self._end_compiling in handler.end_callbacks:
                handler.remove_end_callback(self._end_compiling)
            self._dynamo = None

    def _compile(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        if self.observer.active:
            self._watch()
        return result

    def _trace(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tracer writes down what it sees: it must not see us."""
        state = self.observer.state()
        self.observer.note(_TRACED)
        self._enter(state)
        try:
            return original(*args, **kwargs)
        finally:
            self._leave(state)
            if self.observer.active:
                self._watch()

    def _watch(self) -> None:
        """Dynamo is heavy to import: it is watched where it is loaded already, else as soon as torch.compile loads it."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        callback = sys.modules.get("torch._dynamo.callback")
        if (
            dynamo is None
            or callback is None
            or self._dynamo is not None
            or not all(hasattr(dynamo, name) for name in (_FIRST, _LAST, "skip_code"))
        ):
            return
        dynamo.skip_code(CompiledTap._set_first.__code__)
        self._first, self._last = getattr(dynamo, _FIRST), getattr(dynamo, _LAST)
        self._dynamo = dynamo
        setattr(dynamo, _FIRST, self._set_first)
        setattr(dynamo, _LAST, self._set_last)
        callback.callback_handler.register_start_callback(self._begin_compiling)
        callback.callback_handler.register_end_callback(self._end_compiling)

    def _set_first(self, callback: Any) -> Any:
        prior = self._first(callback)  # before anything else: until then dynamo looks at every frame of ours
        state = self.observer.state()
        caller = sys._getframe(1)
        if state.region is None and caller.f_code.co_name == _COMPILED_CALL:
            self._begin_region(state, caller)
        return prior

    def _set_last(self, callback: Any) -> Any:
        state = self.observer.state()
        caller = sys._getframe(1)
        if callback is not None and callback is not False:
            if state.region is None:
                self._begin_region(state, caller)
        elif state.region is not None and _ends(state.region, caller):
            # Helpers that dynamo disables for itself pass here too, inside the region; only its own frame ends it.
            state.region = None
            self._leave(state)
        return self._last(callback)

    def _begin_region(self, state: ThreadState, caller: FrameType) -> None:
        state.region = caller
        self._enter(state)
        self.observer.note(_NOTE)

    def _begin_compiling(self, *_: Any) -> None:
        self._enter(self.observer.state())

    def _end_compiling(self, *_: Any) -> None:
        self._leave(self.observer.state())

    def _enter(self, state: ThreadState) -> None:
        state.compiled += 1
        if state.compiled == 1:
            self._suspend(state)

    def _leave(self, state: ThreadState) -> None:
        state.compiled -= 1
        if state.compiled == 0:
            self._resume(state)


def _ends(region: FrameType, caller: FrameType) -> bool:
    return caller is region or caller.f_code.co_name == "__exit__"
