"""msprobe.pytorch, answered by ulpscope. A name is taken when it is asked for: comparing needs no torch."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ulpscope.compat import msprobe as _names

if TYPE_CHECKING:
    from ulpscope.compat.msprobe import (
        PrecisionDebugger,
        compare,
        compare_distributed,
        module_dump,
        module_dump_end,
        seed_all,
    )

__all__ = ["compare", "compare_distributed"]
if importlib.util.find_spec("torch") is not None:
    __all__ += ["PrecisionDebugger", "module_dump", "module_dump_end", "seed_all"]


def __getattr__(name: str) -> Any:
    return getattr(_names, name)
