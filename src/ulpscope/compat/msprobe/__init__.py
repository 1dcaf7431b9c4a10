"""msprobe's names for PyTorch. Taking one that dumps sets dropout to zero, as its manual promises; importing ulpscope does not.

What compares needs no framework, and imports none.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulpscope.compat.msprobe.comparing import compare, compare_distributed
    from ulpscope.compat.msprobe.debugger import PrecisionDebugger, module_dump, module_dump_end, seed_all

__all__ = ["PrecisionDebugger", "compare", "compare_distributed", "module_dump", "module_dump_end", "seed_all"]

_COMPARING = frozenset({"compare", "compare_distributed"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _COMPARING:
        return getattr(importlib.import_module("ulpscope.compat.msprobe.comparing"), name)
    # Only at first: from then on a debugger's configuration decides.
    if "ulpscope.compat.msprobe.debugger" not in sys.modules:
        importlib.import_module("ulpscope.frameworks.torch.determinism").dropout_off()
    return getattr(importlib.import_module("ulpscope.compat.msprobe.debugger"), name)
