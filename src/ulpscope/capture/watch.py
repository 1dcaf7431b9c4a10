"""Capturing a program that was not edited: begins when it imports torch, ends when it ends.

`ulpscope capture -- CMD` puts the options into the environment and a sitecustomize on the path of every Python process
below it. A process that never imports torch is left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

from ulpscope.frameworks.building import is_building
from ulpscope.model.errors import OverflowStop

OPTIONS_VARIABLE = "ULPSCOPE_CAPTURE"
Begin = Callable[[dict[str, Any]], None]
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_TORCH = "torch"


def watch(begins: Mapping[str, Begin]) -> None:
    """Arranges for everything whose variable is set to begin once torch is loaded, or now if it is."""
    asked = {variable: (begin, text) for variable, begin in begins.items() if (text := os.environ.get(variable))}

    def begin_all() -> None:
        while asked:  # each once, whoever else may have found torch loaded
            _, (begin, text) = asked.popitem()
            try:
                begin(json.loads(text))
            except Exception as error:  # the border: the program must run even if it cannot be recorded
                sys.stderr.write(f"ulpscope: not recording process {os.getpid()}: {error}\n")

    def look_back() -> None:
        if asked and sys.modules.get(_TORCH) is not None:
            sys.stderr.write(
                f"ulpscope: process {os.getpid()} was not recorded: its torch was loaded in an unusual way\n"
            )

    if asked and sys.modules.get(_TORCH) is not None:
        begin_all()
    elif asked:
        sys.meta_path.insert(0, LoadWatch(_TORCH, begin_all))
        atexit.register(look_back)


class LoadWatch(importlib.abc.MetaPathFinder):
    """Calls `then` when a module has been loaded for the first time.

    It is found as everybody finds it, by the loader that everybody gets: only what that one does is heard. Whoever asks where
    the module is (`importlib.util.find_spec`) may do so any number of times. It stays where it is afterwards: a list of finders
    that gets shorter hides modules from threads that are walking it."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._is_loaded = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._is_loaded:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._listen(spec.loader)
        return spec

    def _listen(self, loader: Any) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            vars(loader).pop("exec_module", None)
            if not self._is_loaded:
                self._is_loaded = True
                self._then()

        with contextlib.suppress(AttributeError):  # a loader of a kind that does not let itself be heard
            loader.exec_module = exec_module


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
    capture.watch_steps(is_building)
    capture.start()


def _ending_briefly(hook: Hook) -> Hook:
    """A program that a check ends, as it was asked to, needs no traceback: the report tells where."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OverflowStop):
            sys.stderr.write(f"ulpscope: {error}\n")
        else:
            hook(kind, error, trace)

    return show
