"""ptdbg_ascend's names. Taking one that dumps sets dropout to zero, as its manual promises; importing ulpscope does not.

What compares and parses needs no framework, and imports none.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulpscope.compat.ptdbg_ascend.comparing import compare, compare_distributed
    from ulpscope.compat.ptdbg_ascend.debugger import PrecisionDebugger
    from ulpscope.compat.ptdbg_ascend.functions import (
        acc_cmp_dump,
        module_dump,
        module_dump_end,
        overflow_check,
        register_hook,
        seed_all,
        set_backward_input,
        set_dump_path,
        set_dump_switch,
        set_overflow_check_switch,
    )
    from ulpscope.compat.ptdbg_ascend.telling import parse

__all__ = [
    "PrecisionDebugger",
    "acc_cmp_dump",
    "compare",
    "compare_distributed",
    "module_dump",
    "module_dump_end",
    "overflow_check",
    "parse",
    "register_hook",
    "seed_all",
    "set_backward_input",
    "set_dump_path",
    "set_dump_switch",
    "set_overflow_check_switch",
]
_MODULES = {
    "PrecisionDebugger": "debugger",
    "compare": "comparing",
    "compare_distributed": "comparing",
    "parse": "telling",
}
_WITHOUT_FRAMEWORK = frozenset({"comparing", "telling"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name, "functions")
    # Only at first: from then on `dropout="keep"` decides.
    if module not in _WITHOUT_FRAMEWORK and f"{__name__}.dumping" not in sys.modules:
        importlib.import_module("ulpscope.frameworks.torch.determinism").dropout_off()
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
