"""The top-level names of older tools beside the tools themselves: ours step back."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType


def refuse_beside(distribution: str, name: str) -> None:
    """Raises ImportError where the real tool is installed, whose name this is."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"{name} belongs to {distribution} {version}, which is installed too, so ulpscope does not answer for it. "
        f"Uninstall one of them (`pip uninstall ulpscope-dropin`), or import ulpscope.compat.{name} beside it"
    )


def stand_aside(name: str, file: str, path: str) -> None:
    """In the place of our package `name`: the real one, if there is any; else what answers for `path` inside of it, if that is what
    is asked for; else there is none, as without us."""
    own = Path(file).parent
    found = PathFinder.find_spec(
        name, [entry for entry in sys.path if Path(entry or ".").resolve() != own.parent.resolve()]
    )
    if found is not None and found.loader is not None:
        sys.modules[name] = module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    elif not _is_asked_for(path):
        del sys.modules[name]
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    else:
        importlib.import_module("ulpscope.compat.torch_npu_hooks").install()


def _is_asked_for(path: str) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if str(frame.f_locals.get("name", "")).startswith(path) and "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
