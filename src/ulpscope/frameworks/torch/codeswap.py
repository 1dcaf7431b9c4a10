"""Watching a Python function without replacing it: only its code object is exchanged, and put back.

The function stays the same object with the same signature, so identity tests and names bound before hold, and every
thread and every importer is seen.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CodeSwap:
    """`around(original, args, kwargs)` runs in place of `function` between `install` and `remove`."""

    def __init__(self, function: types.FunctionType, around: Around) -> None:
        self.function = function
        self._original = function.__code__
        twin = types.FunctionType(
            self._original, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        self.original = twin

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return around(twin, args, kwargs)

        self._code = _calling(call, self._original)

    def install(self) -> None:
        self.function.__code__ = self._code

    def remove(self) -> None:
        if self.function.__code__ is self._code:
            self.function.__code__ = self._original


def _calling(call: Callable[..., Any], original: types.CodeType) -> types.CodeType:
    """Code that hands its arguments to `call`, with the same closure as the original."""
    lines = ["def outer():"]
    lines += [f"    {name} = None" for name in original.co_freevars]
    lines += ["    def inner(*args, **kwargs):"]
    lines += [f"        if 0: {name}" for name in original.co_freevars]
    lines += ["        call = '__call__'", "        return call(args, kwargs)", "    return inner"]
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    code: types.CodeType = scope["outer"]().__code__
    constants = tuple(call if constant == "__call__" else constant for constant in code.co_consts)
    free = code.co_freevars
    assert free == original.co_freevars, "a closure must keep its shape"
    return code.replace(co_consts=constants, co_name=original.co_name, co_filename=__file__)
