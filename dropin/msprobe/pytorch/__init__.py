"""msprobe.pytorch, answered by ulpscope."""

from ulpscope.compat.msprobe import PrecisionDebugger, module_dump, module_dump_end, seed_all

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end", "seed_all"]
