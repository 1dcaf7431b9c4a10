"""msprobe.pytorch.common, answered by ulpscope: where scripts of 8.x take seed_all from."""

from ulpscope.compat.msprobe import seed_all

__all__ = ["seed_all"]
