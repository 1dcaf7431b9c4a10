"""Watching a Python function without replacing it: only its code object is exchanged, and put back.

The function stays the same object with the same signature, so identity tests and names bound before hold, and every
thread and every importer is seen.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable
from typing import Any

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CodeSwap:
    """`around(original, args, kwargs)` runs in place of `function` between `install` and `remove`."""

    def __init__(self, function: types.FunctionType, around: Around) -> None:
        self.function = function
        self._around = around
        self._original = function.__code__
        self._target: list[Callable[..., Any]] = []
        self._code: types.CodeType | None = None

    def install(self) -> None:
        self._twin = _twin(self.function, self._original)
        self._target[:] = [functools.partial(self._around, self._twin)]
        if self._code is None:
            self._code = _calling(self._target, self._original)
        self.function.__code__ = self._code

    def remove(self) -> None:
        """Puts the function's own code back. A frame that still runs ours goes straight to the original."""
        if self._code is None:
            return
        if self.function.__code__ is self._code:
            self.function.__code__ = self._original
        twin = self._twin
        # The collector does not look into code objects: without this the cycle through its constant lives for ever.
        self._target[:] = [lambda args, kwargs: twin(*args, **kwargs)]


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


def _calling(target: list[Callable[..., Any]], original: types.CodeType) -> types.CodeType:
    """Code that hands its arguments to whatever is in `target`, with the same closure as the original."""
    code = _template(original.co_freevars)
    constants = tuple(target if constant == "__target__" else constant for constant in code.co_consts)
    return code.replace(co_consts=constants, co_name=original.co_name, co_filename=__file__)


# Tracebacks show this line where exchanged code passes a call on.
def _shown(target: list[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return target[0](args, kwargs)  # ulpscope watches this call and runs it


@functools.cache
def _template(closure: tuple[str, ...]) -> types.CodeType:
    lines = ["def outer():"]
    lines += [f"    {name} = None" for name in closure]
    lines += ["    def inner(*args, **kwargs):"]
    lines += [f"        if 0: {name}" for name in closure]
    lines += ["        target = '__target__'", "        return target[0](args, kwargs)", "    return inner"]
    scope: dict[str, Any] = {}
    tree = ast.parse("\n".join(lines))
    ast.increment_lineno(tree, _shown.__code__.co_firstlineno + 2 - len(lines))
    exec(compile(tree, __file__, "exec"), scope)
    code: types.CodeType = scope["outer"]().__code__
    assert code.co_freevars == closure, "a closure must keep its shape"
    return code
