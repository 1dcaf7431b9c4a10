"""Functions of C++ extensions that take tensors: they may write into them, and torch sees no call.

Whatever such a function was given is measured anew from then on. Operators that are registered with torch need none of this: their
calls are seen (`names.py`). Where Python does not let us watch a function, the dump says which one may have written.
"""

from __future__ import annotations

import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ulpscope.frameworks.base import Observer
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.codeswap import CodeSwap
from ulpscope.frameworks.torch.summary import TorchMeasurer
from ulpscope.frameworks.torch.tensors import leaves
from ulpscope.native import taps

log = logging.getLogger(__name__)
_MAPS = Path("/proc/self/maps")
# How pybind11 writes the type of an argument; older ones the second.
_WORDS = ("torch.Tensor", "at::Tensor")
# Of no module are functions of torch's that say what they return.
_OWN = ("torch", "ulpscope", "None")
_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_NOTE = "functions of {} take tensors and can write into them unseen: what they wrote keeps its old numbers; reuse=False measures every value each time"


class ForeignTap:
    """Watches the functions of extensions that are loaded, and of those that will be."""

    def __init__(self, observer: Observer, measurer: TorchMeasurer) -> None:
        self._observer = observer
        self._measurer = measurer
        self._looked: set[str] = set()
        # Whether there is one.
        self.any = False
        load: Any = importlib.machinery.ExtensionFileLoader.exec_module
        self._swap = CodeSwap(load, self._loaded) if isinstance(load, types.FunctionType) else None

    def install(self) -> None:
        if not self._measurer.reuses:
            return
        self._watch()
        if self._swap is not None:
            self._swap.install()

    def remove(self) -> None:
        if self._swap is not None:
            self._swap.remove()
        self.pause()

    def pause(self) -> None:
        """A compiled region begins: dynamo would look at what is told of its calls."""
        if taps.C is not None:
            taps.C.watch_foreign([], [], None)

    def unpause(self) -> None:
        if self.any:
            self._watch()

    def _loaded(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original(*args, **kwargs)
        if self._observer.active:
            try:
                self._watch(*args[1:], *kwargs.values())
            except Exception as error:  # the hook border
                self._observer.trouble("extensions", error)

    def _watch(self, *loaded: Any) -> None:
        """Looks at what was just loaded, and at all modules that it has not met."""
        names = set(sys.modules) - self._looked
        self._looked |= names
        new = [sys.modules.get(name) for name in names]
        found = [each for module in filter(_is_foreign, (*loaded, *new)) for each in _functions_of(module)]
        self.any = self.any or bool(found)
        if self.any and taps.C is not None and internals.native() == "full":
            found = taps.C.watch_foreign(found, _writable() if found else [], self._called)
        for module in {each.__module__: None for each in found}:
            self._observer.note(_NOTE.format(module))

    def _called(self, given: tuple[Any, ...]) -> None:
        if self._observer.active:
            try:
                self._measurer.distrust(leaf for _, leaf in leaves(given))
            except Exception as error:  # the hook border
                self._observer.trouble("a function of an extension", error)


def _writable() -> list[tuple[int, int]]:
    """Where memory may be written, as far as the system tells."""
    try:
        text = _MAPS.read_text()
    except OSError as error:
        log.debug("functions of extensions are not watched: %s", error)
        return []
    ranges = (line.split(maxsplit=2) for line in text.splitlines())
    places = (place.partition("-") for place, rights, _ in ranges if rights.startswith("rw"))
    return [(int(begin, 16), int(end, 16)) for begin, _, end in places]


def _is_foreign(module: Any) -> bool:
    """Whether it may be a part of an extension: a file of machine code, or something without a file."""
    if type(module) is not types.ModuleType or str(vars(module).get("__name__")).partition(".")[0] in _OWN:
        return False
    file = vars(module).get("__file__")
    return file is None or str(file).endswith(_SUFFIXES)


def _functions_of(module: types.ModuleType) -> Iterator[Any]:
    """Functions and methods that say they take tensors. No object is asked for anything: it may answer with code of its own."""
    for item in list(vars(module).values()):
        yield from filter(_takes_tensors, (item,))
        if issubclass(type(item), type) and vars(item).get("__module__") == module.__name__:
            methods = (each for each in list(vars(item).values()) if type(each).__name__ == "instancemethod")
            yield from filter(_takes_tensors, (each.__func__ for each in methods))


def _takes_tensors(item: Any) -> bool:
    if type(item) is not types.BuiltinFunctionType or str(item.__module__).partition(".")[0] in _OWN:
        return False
    return any(word in (item.__doc__ or "") for word in _WORDS)
