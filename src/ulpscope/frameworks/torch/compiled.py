"""Keeping out of compiled regions.

Dynamo looks at every frame that runs below a compiled call: it would trace our modes and our exchanged code, or compile
anew because of them. So all of it is taken away while a compiled region runs, or anything is being compiled or traced, and put
back afterwards. Such a region is recorded at its boundary.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from ulpscope.frameworks.base import Observer, ThreadState
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.codeswap import CodeSwap, watching
from ulpscope.frameworks.torch.compiled_backward import without_our_hooks
from ulpscope.frameworks.torch.warning_lines import frames_of_ours

# Both are called in the frame of a compiled call: the first before it looks at the dispatcher's state, the second when dynamo
# begins to look at frames, and at the end. Older versions have one of them, for the latter.
_FIRST, _LAST = "set_eval_frame", "_maybe_set_eval_frame"
_COMPILED_CALL = "compile_wrapper"
_WHERE = "a compiled region"
_NOTE = "a compiled region (torch.compile) is recorded at its boundary only"
_TRACED = (
    "what was traced (torch.export, make_fx, torch.jit, torch.fx) was written down, not computed: it is not recorded"
)
# By module, what writes down what it sees, in whichever torch has it. `dispatch_trace` is where older ones come by.
_TRACERS = {
    "torch.jit": ("trace", "trace_module"),
    "torch.fx": ("symbolic_trace",),
    "torch.export": ("export", "export_for_training", "draft_export", "ExportedProgram.run_decompositions"),
    "torch.fx.experimental.proxy_tensor": ("_MakefxTracer.trace", "_MakefxTracer.trace_subgraph", "dispatch_trace"),
}


# Of torch.jit.script: where that argument is, and how many frames of ours are below the one that asks.
_FRAMES_UP_PLACE, _BELOW = 2, 3


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
        self,
        observer: Observer,
        suspend: Callable[[ThreadState], None],
        resume: Callable[[ThreadState], None],
        *,
        begins: Callable[[ThreadState], None],
        ended: Callable[[ThreadState], None],
    ) -> None:
        """`begins` and `ended` are told of compiled regions alone, while everything else is away."""
        self.observer = observer
        self._begins, self._ended = begins, ended
        self._suspend = suspend
        self._resume = resume
        self._swaps = watching(torch, "compile", self._compile, observer.trouble)
        self._swaps += [CodeSwap(tracer, self._trace, observer.trouble) for tracer in _tracers()]
        self._swaps += watching(torch.jit, "script", self._script, observer.trouble)
        # Where dynamo's functions are, and what stands there while we do not.
        self._dynamo: ModuleType | None = None
        self._exchanged: dict[str, Any] = {}
        self._first: Any = None
        self._last: Any = None
        self._set_raw: Any = None
        # Stands where backward passes begin while all others are away.
        self._engine = None if internals.run_engine is None else CodeSwap(internals.run_engine, self._run_inside)
        self._look: Any = None

    def install(self) -> None:
        for swap in self._swaps:
            swap.install()
        self._watch()

    def remove(self) -> None:
        self.unpause()
        for swap in self._swaps:
            swap.remove()
        if self._dynamo is not None:
            for name, original in self._exchanged.items():
                setattr(self._dynamo, name, original)
            handler = internals.compile_callbacks()
            if handler is not None and self._begin_compiling in handler.start_callbacks:
                handler.remove_start_callback(self._begin_compiling)
            if handler is not None and self._end_compiling in handler.end_callbacks:
                handler.remove_end_callback(self._end_compiling)
            self._dynamo = None

    def _compile(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        if self.observer.active:
            self._watch()
        return result

    def _trace(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tracer writes down what it sees: it must not see us."""
        self.observer.note(_TRACED)
        return self._aside(original, args, kwargs)

    def _script(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """It asks the frame that called it, so many frames up, what the names in a class stand for."""
        if len(args) <= _FRAMES_UP_PLACE:
            up = kwargs.get("_frames_up", 0) + frames_of_ours(sys._getframe(0)) + _BELOW
            kwargs = {**kwargs, "_frames_up": up}
        return self._trace(original, args, kwargs)

    def run_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A backward pass that torch writes down and compiles, and then runs."""
        self.observer.missed(_NOTE)
        with without_our_hooks(args[0] if args else ()):
            return self._aside(original, args, kwargs)

    def pause(self) -> None:
        """What runs inside a region may be such a pass. Dynamo looks at the frames that lead to it: not at ours."""
        dynamo = internals.dynamo()
        if dynamo is not None and self._engine is not None:
            self._look = dynamo.set_eval_frame
            self._engine.install()
            for code in (self._engine.function.__code__, CompiledTap._run_inside.__code__):
                dynamo.skip_code(code)

    def unpause(self) -> None:
        if self._engine is not None:
            self._engine.remove()

    def _run_inside(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        looks = self._look(None)  # before anything else
        try:
            with ExitStack() as around:
                try:
                    if internals.compiles_backward():
                        around.enter_context(without_our_hooks(args[0] if args else ()))
                except Exception as error:  # the hook border
                    self.observer.trouble(_WHERE, error)
                self._look(looks)
                try:
                    return original(*args, **kwargs)
                finally:
                    self._look(None)
        finally:
            self._look(looks)

    def _aside(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self.observer.state()
        self._enter(state)
        try:
            return original(*args, **kwargs)
        finally:
            self._leave(state)
            if self.observer.active:
                self._watch()

    def _watch(self) -> None:
        """Dynamo is heavy to import: it is watched where it is loaded already, else as soon as torch.compile loads it."""
        dynamo = internals.dynamo()
        if dynamo is None or self._dynamo is not None:
            return
        space = vars(dynamo.space)
        self._exchanged = {name: space[name] for name in (_FIRST, _LAST) if name in space}
        if not self._exchanged:
            self.observer.missed(
                "torch.compile of this torch is not one that we know: compiled regions may be recorded wrongly"
            )
            return
        for watch in (CompiledTap._set_first, CompiledTap._set_last):
            dynamo.skip_code(watch.__code__)
        self._set_raw = dynamo.set_eval_frame
        self._first, self._last = self._exchanged.get(_FIRST), self._exchanged.get(_LAST, self._exchanged.get(_FIRST))
        self._dynamo = dynamo.space
        for name in self._exchanged:
            setattr(
                dynamo.space, name, self._set_first if name == _FIRST and len(self._exchanged) > 1 else self._set_last
            )
        handler = internals.compile_callbacks()
        if handler is not None:
            handler.register_start_callback(self._begin_compiling)
            handler.register_end_callback(self._end_compiling)

    def _set_first(self, callback: Any) -> Any:
        prior = self._first(callback)  # before anything else: until then dynamo looks at every frame of ours
        try:
            state = self.observer.state()
            caller = sys._getframe(1)
            if state.region is None and caller.f_code.co_name == _COMPILED_CALL:
                self._begin_region(state, caller)
        except Exception as error:  # the hook border
            self.observer.trouble(_WHERE, error)
        return prior

    def _set_last(self, callback: Any) -> Any:
        ends = callback is None or callback is False
        prior = self._last(callback) if ends else self._set_raw(None)  # before anything else, here too
        try:
            state = self.observer.state()
            caller = sys._getframe(1)
            if state.region is None and not ends:
                self._begin_region(state, caller)
            elif state.region is not None and ends and _ends(state.region, caller):
                # Helpers that dynamo disables for itself pass here too, inside the region; only its own frame ends it.
                state.region = None
                self._ended(state)
                self._leave(state)
        except Exception as error:  # the hook border
            self.observer.trouble(_WHERE, error)
        if ends:
            return prior
        self._set_raw(prior)
        return self._last(callback)

    def _begin_region(self, state: ThreadState, caller: FrameType) -> None:
        state.region = caller
        self._enter(state)
        self.observer.missed(_NOTE)
        self._begins(state)

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
