"""msprobe.pytorch.common.utils, answered by ulpscope."""

from msprobe.pytorch.common import seed_all

__all__ = ["seed_all"]
