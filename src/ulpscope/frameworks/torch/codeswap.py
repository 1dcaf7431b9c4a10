"""Watching a Python function without replacing it: only its code object is exchanged, and put back.

The function stays the same object with the same signature, so identity tests and names bound before hold, and every
thread and every importer is seen.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from ulpscope.model.errors import OverflowStop

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
Trouble = Callable[[str, BaseException], None]


class CodeSwap:
    """`around(original, args, kwargs)` runs in place of `function` between `install` and `remove`. What goes wrong in it, and not
    in the original, is told to `trouble`, and the call is as if it were not watched."""

    def __init__(self, function: Any, around: Around, trouble: Trouble | None = None) -> None:
        self.function: types.FunctionType = function
        self._around = around if trouble is None else bordered(around, function.__qualname__, trouble)
        self._original = function.__code__
        self._target: list[Callable[..., Any]] = []
        self._code: types.CodeType | None = None
        self._passed = ""
        # What others are told of its arguments, while the code takes any.
        self._signature = None if hasattr(function, "__signature__") else inspect.signature(function)

    def install(self) -> None:
        self._twin = _twin(self.function, self._original)
        self._target[:] = [self._instead(self._twin)]
        if self._code is None:
            self._code = _calling(self._target, self._original, self._passed)
        self.function.__code__ = self._code
        if self._signature is not None:
            self.function.__signature__ = self._signature  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Puts the function's own code back. A frame that still runs ours goes straight to the original."""
        if self._code is None:
            return
        if self.function.__code__ is self._code:
            self.function.__code__ = self._original
            if self._signature is not None:
                vars(self.function).pop("__signature__", None)
        # The collector does not look into code objects: without this the cycle through its constant lives for ever.
        self._target[:] = [self._plainly(self._twin)]

    def _instead(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._around, original)

    def _plainly(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda args, kwargs: original(*args, **kwargs)


class StraightSwap(CodeSwap):
    """What `instead(original)` makes runs in place of the function, with its own arguments: nothing of Python stands between."""

    def __init__(self, function: Any, instead: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__(function, _nothing)
        code = function.__code__
        self._passed = ", ".join(code.co_varnames[: code.co_argcount])
        self._make = instead

    def _instead(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._make(original)

    def _plainly(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return original


def _nothing(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(*args, **kwargs)


class _Original:
    """The function that is watched, which remembers what became of it."""

    __slots__ = ("error", "function", "has_run", "result")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.has_run = False
        self.error: BaseException | None = None
        self.result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_run = True
        try:
            self.result = self.function(*args, **kwargs)  # ulpscope watches this call and runs it
        except BaseException as error:
            self.error = error
            raise
        return self.result


def bordered(around: Around, name: str, trouble: Trouble) -> Around:
    """The same, whose own errors never reach the program."""

    def guarded(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = _Original(original)
        try:
            return around(run, args, kwargs)  # ulpscope watches this call and runs it
        except Exception as error:  # the hook border
            if error is run.error or isinstance(error, OverflowStop):
                raise
            trouble(name, error)  # raises what is meant for the program
            if run.error is not None:
                raise run.error from None
        finally:
            run.error = None  # it holds this frame
        return run.result if run.has_run else original(*args, **kwargs)

    return guarded


def watching(space: Any, name: str, around: Around, trouble: Trouble) -> list[CodeSwap]:
    """A watch of one function, or none where this torch has no such function in Python."""
    found = getattr(space, name, None)
    return [CodeSwap(found, around, trouble)] if isinstance(found, types.FunctionType) else []


class EngineSwap:
    """The same for the engine of a torch that begins each backward pass by an object of its class of variables."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._holder: Any = torch.autograd.Variable
        self._engine: Any = None

    def install(self) -> None:
        if self._engine is None:
            self._engine = self._holder._execution_engine
            self._holder._execution_engine = _Engine(self._engine, self._around)

    def remove(self) -> None:
        if self._engine is not None:
            self._holder._execution_engine, self._engine = self._engine, None


class _Engine:
    """Everything is asked of the real one."""

    def __init__(self, engine: Any, around: Around) -> None:
        self._engine = engine
        self._around = around

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._engine.run_backward, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _twin(like: types.FunctionType, code: types.CodeType) -> types.FunctionType:
    """The function as it was, under its own code."""
    twin = types.FunctionType(code, like.__globals__, like.__name__, like.__defaults__, like.__closure__)
    twin.__kwdefaults__ = like.__kwdefaults__
    return twin


def caller_of(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame that called a function whose code is exchanged."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _calling(target: list[Callable[..., Any]], original: types.CodeType, passed: str) -> types.CodeType:
    """Code that hands its arguments to whatever is in `target`, with the same closure as the original; all of them in a tuple and a
    dictionary, unless their names are said."""
    code = _template(original.co_freevars, passed)
    constants = tuple(target if constant == "__target__" else constant for constant in code.co_consts)
    return code.replace(co_consts=constants, co_name=original.co_name, co_filename=__file__)


# Tracebacks show this line where exchanged code passes a call on.
def _shown(target: list[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return target[0](args, kwargs)  # ulpscope watches this call and runs it


@functools.cache
def _template(closure: tuple[str, ...], passed: str) -> types.CodeType:
    lines = ["def outer():"]
    lines += [f"    {name} = None" for name in closure]
    lines += [f"    def inner({passed or '*args, **kwargs'}):"]
    lines += [f"        if 0: {name}" for name in closure]
    lines += [
        "        target = '__target__'",
        f"        return target[0]({passed or 'args, kwargs'})",
        "    return inner",
    ]
    scope: dict[str, Any] = {}
    tree = ast.parse("\n".join(lines))
    ast.increment_lineno(tree, _shown.__code__.co_firstlineno + 2 - len(lines))
    exec(compile(tree, __file__, "exec"), scope)
    code: types.CodeType = scope["outer"]().__code__
    assert code.co_freevars == closure, "a closure must keep its shape"
    return code
