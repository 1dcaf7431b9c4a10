"""Warnings name the line of the program that they name without us, so that its filters still know them.

`warnings.warn` counts frames, and a capture puts some between: those are left out of the count while it is on. A warning of torch's
C++ names the innermost line of Python, so what we call for the program is called from a frame that stands for its own.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from ulpscope.frameworks.base import STAND_IN
from ulpscope.frameworks.torch import internals

_OURS = str(Path(__file__).parents[2])
_OVERRIDES = torch.overrides.handle_torch_function.__code__


_plain = warnings.warn


@functools.wraps(_plain)
def _warn(message: Any, category: Any = None, stacklevel: Any = 1, *args: Any, **kwargs: Any) -> None:
    level = _level(sys._getframe(1), stacklevel) if isinstance(stacklevel, int) else stacklevel
    _plain(message, category, level, *args, **kwargs)


class WarningTap:
    """Counts for `warnings.warn` between `install` and `remove`. What stands there is always the same function: a module that loads
    meanwhile may keep it, and TorchScript is told that it is what it knows as a warning."""

    def __init__(self) -> None:
        internals.know_as_warning(_warn)

    def install(self) -> None:
        if warnings.warn is _plain:
            warnings.warn = _warn

    def remove(self) -> None:
        if warnings.warn is _warn:
            warnings.warn = _plain

    pause, unpause = remove, install


def _level(frame: FrameType, wanted: int) -> int:
    """How many frames to count from one of ours, where the program's own would be `wanted`."""
    level = 2
    for hidden in _outward(frame):
        if wanted <= 1:
            break
        level += 1
        wanted -= not hidden
    return level + max(wanted - 1, 0)


def _outward(frame: FrameType) -> Iterator[bool]:
    """Whether each frame around this one is there because of us: our own, torch's way to a mode, and the function that went it,
    which runs a second time inside."""
    twice = False
    walk = frame.f_back
    while walk is not None:
        code = walk.f_code
        if not _is_of_the_loader(code.co_filename):  # those Python leaves out itself
            twice, told = code is _OVERRIDES, twice
            yield told or twice or code.co_filename.startswith(_OURS) or code.co_name == STAND_IN
        walk = walk.f_back


def _is_of_the_loader(file: str) -> bool:
    return "importlib" in file and "_bootstrap" in file


def _call(function: Any, args: Any, kwargs: Any) -> Any: return function(*args, **kwargs)  # fmt: skip


@functools.lru_cache(4096)
def _call_at(file: str, line: int) -> CodeType:
    names: Any = {"co_qualname": STAND_IN} if hasattr(_call.__code__, "co_qualname") else {}
    return _call.__code__.replace(co_filename=file, co_name=STAND_IN, co_firstlineno=line, **names)


def call_from(frame: FrameType, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function as if from the line at which a frame is. Where a debugger or a profiler looks at frames it is not shown one
    that the program has not."""
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return function(*args, **kwargs)
    code = frame.f_code
    line = frame.f_lineno or code.co_firstlineno
    return types.FunctionType(_call_at(code.co_filename, line), frame.f_globals)(function, args, kwargs)


def program_frame() -> FrameType:
    """The innermost frame that is not ours."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def frames_of_ours(frame: FrameType) -> int:
    """How many frames of ours are one around the other, from this one on outward."""
    count = 0
    walk: FrameType | None = frame
    while walk is not None and walk.f_code.co_filename.startswith(_OURS):
        count, walk = count + 1, walk.f_back
    return count


def caller_of(frame: FrameType, function: Any) -> FrameType:
    """The frame that called a function of torch, from the one in which torch told a mode of it."""
    while frame.f_code is _OVERRIDES and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code is getattr(function, "__code__", None) and frame.f_back is not None:
        frame = frame.f_back
    return frame
