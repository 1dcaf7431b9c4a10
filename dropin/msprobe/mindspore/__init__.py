"""msprobe.mindspore, answered by ulpscope."""

from ulpscope.compat.msprobe.mindspore import PrecisionDebugger

__all__ = ["PrecisionDebugger"]
