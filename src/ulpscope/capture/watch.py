"""Capturing a program that was not edited: begins when it imports torch, ends when it ends.

`ulpscope capture -- CMD` puts the options into the environment and a sitecustomize on the path of every Python process
below it. A process that never imports torch is left alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType, TracebackType
from typing import Any

from ulpscope.errors import OverflowStop

OPTIONS_VARIABLE = "ULPSCOPE_CAPTURE"
Begin = Callable[[dict[str, Any]], None]
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
RUN_VARIABLE = "ULPSCOPE_RUN"  # the same in all processes of one run
# Building and loading a model is not what a person wants to compare; forward, backward and optimizer are.
_BUILDING = frozenset(
    {
        "init_weights",
        "_init_weights",
        "_initialize_weights",
        "reset_parameters",
        "from_pretrained",
        "load_state_dict",
    }
)


def watch(variable: str = OPTIONS_VARIABLE, begin: Begin | None = None) -> None:
    """Arranges for a capture, or what `begin` begins with the options in `variable`, to begin once torch is imported."""
    if os.environ.get(variable) and "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchFinder(variable, begin or begin_capture))


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as everybody does, and has a word when it is loaded."""

    def __init__(self, variable: str, begin: Begin) -> None:
        self._variable = variable
        self._begin = begin

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._variable, self._begin)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, variable: str, begin: Begin) -> None:
        self._loader = loader
        self._variable = variable
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._begin(json.loads(os.environ[self._variable]))
        except Exception as error:  # the border: the program must run even if it cannot be recorded
            sys.stderr.write(f"ulpscope: not recording process {os.getpid()}: {error}\n")


def begin_capture(options: dict[str, Any]) -> None:
    """Starts a capture for the rest of the process; steps are found by themselves."""
    from ulpscope.capture.session import Capture

    if not logging.getLogger("ulpscope").handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ulpscope: %(message)s"))
        logging.getLogger("ulpscope").addHandler(handler)
    if options.get("overflows") is not None:
        sys.excepthook = _ending_briefly(sys.excepthook)
    capture = Capture(**options)
    capture.watch_steps(_is_building)
    capture.start()


def _ending_briefly(hook: Hook) -> Hook:
    """A program that a check ends, as it was asked to, needs no traceback: the report tells where."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OverflowStop):
            sys.stderr.write(f"ulpscope: {error}\n")
        else:
            hook(kind, error, trace)

    return show


def _is_building(frame: FrameType) -> bool:
    walk: FrameType | None = frame
    while walk is not None:
        code = walk.f_code
        if code.co_name in _BUILDING or code.co_filename.endswith("nn/init.py"):
            return True
        if code.co_name == "__init__" and hasattr(type(walk.f_locals.get("self")), "named_parameters"):
            return True
        walk = walk.f_back
    return False
