"""Functions of the program that are recorded like those of torch, because it asked for them by name.

Such a function is the one thing here that takes the place of another: `mymodule.fused` is ours until it is given back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.names import NAMED
from ulpscope.model.errors import CaptureError

Function = Callable[..., Any]


class CustomCalls:
    """The functions that were asked for, and what they were before."""

    def __init__(self) -> None:
        self._replaced: dict[tuple[int, str], tuple[Any, Function, Function]] = {}

    def register(self, owner: Any, name: str, prefix: str | None = None) -> None:
        """Records a function of a module or class from now on. Raises CaptureError where there is no such function."""
        prefix = prefix or getattr(owner, "__name__", "Custom")
        if not isinstance(prefix, str):
            raise CaptureError(f"api_prefix must be a text, not {prefix!r}")
        original = self._function(owner, name)
        if (id(owner), name) not in self._replaced:
            ours = _told(original, prefix, name)
            self._replaced[id(owner), name] = owner, original, ours
            setattr(owner, name, ours)

    def restore(self, owner: Any, name: str) -> None:
        """Puts the function back, unless somebody else has replaced it meanwhile."""
        current = self._function(owner, name)
        _, original, ours = self._replaced.pop((id(owner), name), (None, None, None))
        if ours is not None and current is ours:
            setattr(owner, name, original)

    def restore_all(self) -> None:
        for (_, name), (owner, _, _) in list(self._replaced.items()):
            self.restore(owner, name)

    @staticmethod
    def _function(owner: Any, name: str) -> Function:
        found = getattr(owner, name, None) if isinstance(name, str) else None
        if not callable(found):
            raise CaptureError(f"{getattr(owner, '__name__', owner)} has no function {name!r}")
        return found  # type: ignore[no-any-return]


def _told(original: Function, prefix: str, name: str) -> Function:
    """The same function; while a mode is on, the mode is told of the call as it is of torch's own."""
    kind, _, path = prefix.partition(".")

    @functools.wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        if internals.count_function_modes() > 0:
            return handle_torch_function(told, (), *args, **kwargs)
        return original(*args, **kwargs)

    setattr(told, NAMED, (kind, f"{path}.{name}" if path else name))
    return told
