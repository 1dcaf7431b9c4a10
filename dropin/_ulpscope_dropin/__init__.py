"""Answers for the names of older tools where nobody else does. Loaded whenever Python starts, so it does next to nothing.

The names lie in a folder of our own: installed beside a tool, nothing of it is overwritten, and uninstalled nothing is missing.
"""

import os
import sys

_FOLDER = os.path.join(os.path.dirname(__file__), "names")
_NAMES = frozenset({"msprobe", "ptdbg_ascend", "torch_npu"})


class Last:
    """Behind all other finders: whoever has such a name is found before."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is not None or name not in _NAMES or (name == "torch_npu" and not _asks_for_hooks()):
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [_FOLDER])


def _asks_for_hooks():
    """Whether `torch_npu` is wanted for its hooks: a program that asks for it to know whether there is an NPU shall not find it."""
    frame = sys._getframe()
    while frame is not None:
        if str(frame.f_locals.get("name", "")).startswith("torch_npu.hooks"):
            return True
        frame = frame.f_back if "importlib" in frame.f_code.co_filename or frame.f_globals is globals() else None
    return False


sys.meta_path.append(Last)
