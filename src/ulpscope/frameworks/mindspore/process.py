"""The MindSpore of this process: found, not imported, and in which mode it runs."""

from __future__ import annotations

import sys
from typing import Any

from ulpscope.model.errors import CaptureError

PYNATIVE, KERNEL_BY_KERNEL, WHOLE_GRAPH = "pynative", "graph_kbyk", "graph_ge"
_WHOLE = "O2"


def mindspore() -> Any:
    """The module. CaptureError where the program has not imported it."""
    found = sys.modules.get("mindspore")
    if found is None:
        raise CaptureError("MindSpore is not in this process; import mindspore before the debugger starts")
    return found


def execution_mode(module: Any) -> str:
    """PYNATIVE for dynamic graphs; static ones run as a whole where jit_level is O2, and kernel by kernel otherwise."""
    if module.get_context("mode") == module.PYNATIVE_MODE:
        return PYNATIVE
    level = (module.get_context("jit_config") or {}).get("jit_level") or module.get_context("jit_level")
    return WHOLE_GRAPH if level == _WHOLE else KERNEL_BY_KERNEL
