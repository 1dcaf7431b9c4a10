"""msprobe's names for PyTorch. Taking one sets dropout to zero, as its manual promises; importing ulpscope does not."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulpscope.compat.msprobe.debugger import PrecisionDebugger, module_dump, module_dump_end, seed_all

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end", "seed_all"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("ulpscope.frameworks.torch.determinism").dropout_off()
    return getattr(importlib.import_module("ulpscope.compat.msprobe.debugger"), name)
