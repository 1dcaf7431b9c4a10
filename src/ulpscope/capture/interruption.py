"""Telling an error of ours from one that only happened to be raised while our code ran."""

from __future__ import annotations

import functools
import os
import signal
import sys
from types import CodeType
from typing import Any

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What our own statements can raise comes from here; any other class was put on our thread by somebody.
_KNOWN = frozenset({"builtins", "torch", "numpy", "ulpscope"})


def is_meant_for_the_program(error: BaseException) -> bool:
    """Whether a signal handler raised it (a timeout by SIGALRM), or another thread injected it, as some timeouts do."""
    handlers = _handlers()
    trace, last = error.__traceback__, None
    while trace is not None:
        last = trace.tb_frame.f_code
        if last in handlers:
            return True
        trace = trace.tb_next
    package = type(error).__module__.partition(".")[0]
    return (
        last is not None
        and last.co_filename.startswith(_OURS)
        and package not in _KNOWN
        and package not in sys.stdlib_module_names
    )


def _handlers() -> set[CodeType]:
    found = (_code(signal.getsignal(number)) for number in signal.valid_signals())
    return {code for code in found if code is not None}


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    for each in (handler, getattr(handler, "__func__", None), vars(type(handler)).get("__call__")):
        code = getattr(each, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
