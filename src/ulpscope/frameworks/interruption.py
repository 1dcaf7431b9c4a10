"""Exceptions that arrive at any moment: of signal handlers, and injected by other threads.

Raised while our code runs they are not errors of ours. Raised between two statements of ours they leave a lock behind: Python
can be interrupted between taking a lock and the `try` that gives it back, and on the way into the function that does.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from ulpscope.frameworks.base import ThreadState
from ulpscope.native import taps

if TYPE_CHECKING:
    from threading import RLock

    from ulpscope.native._taps import Gate as CGate

    Gate: TypeAlias = RLock | CGate

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_RECORDING = tuple(os.path.join(_OURS, name) + os.sep for name in ("capture", "frameworks", "replay", "store"))
# What our own statements can raise comes from here; any other class was put on our thread by somebody.
_KNOWN = frozenset({"builtins", "torch", "numpy", "ulpscope"})


def is_meant_for_the_program(error: BaseException) -> bool:
    """Whether a signal handler raised it (a timeout by SIGALRM), or another thread injected it, as some timeouts do."""
    handlers = _handlers()
    trace, last = error.__traceback__, None
    while trace is not None:
        last = trace.tb_frame.f_code
        if id(last) in handlers:
            return True
        trace = trace.tb_next
    package = type(error).__module__.partition(".")[0]
    return (
        last is not None
        and (last.co_filename.startswith((_OURS, *_torch_folder())) or _is_of_python(last.co_filename))
        and package not in _KNOWN
        and package not in sys.stdlib_module_names
    )


def _is_of_python(file: str) -> bool:
    return file.startswith(_LIBRARY) and "site-packages" not in file


def _torch_folder() -> tuple[str, ...]:
    """Python of torch runs inside our own calls: where it hangs a hook on a node, for example."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return () if not file else (os.path.dirname(file) + os.sep,)


def in_our_code(frame: FrameType | None) -> bool:
    """Whether a frame, or one that it was called from, records."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_RECORDING):
            return True
        frame = frame.f_back
    return False


def is_left_over(state: ThreadState, caller: FrameType | None) -> bool:
    """Whether `busy` was left behind on this thread: then it is free again. `caller` is the frame that called a tap."""
    if not state.busy or state.free is None or state.in_c or in_our_code(caller):
        return False
    state.busy = False
    state.free()
    return True


def new_gate() -> Gate:
    """What every thread holds while our code runs on it."""
    return threading.RLock() if taps.C is None else taps.C.Gate()


def release(gate: Gate) -> None:
    """Gives up a gate, however often this thread has taken it."""
    try:
        while True:
            gate.release()
    except RuntimeError:
        return  # not ours any more


def freed(gate: Gate) -> Gate:
    """A new gate where the thread that holds this one is not in our code any more; else the same."""
    owner = re.search(r"owner=(\d+)", repr(gate))
    if owner is None or owner[1] == "0" or in_our_code(sys._current_frames().get(int(owner[1]))):
        return gate
    return new_gate()


def _handlers() -> set[int]:
    """Who they are: code that we exchanged has no hash."""
    found = (_code(signal.getsignal(number)) for number in signal.valid_signals())
    return {id(code) for code in found if code is not None}


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    for each in (handler, getattr(handler, "__func__", None), vars(type(handler)).get("__call__")):
        code = getattr(each, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
