"""The names of torch_npu.hooks. `install()` makes the old import path work: `from torch_npu.hooks import register_hook`.

What compares needs no framework, and imports none.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ulpscope.compat.torch_npu_hooks.steps import schedule, step_schedule

if TYPE_CHECKING:
    from ulpscope.compat.torch_npu_hooks.dumping import (
        register_hook,
        seed_all,
        set_dump_path,
        wrap_acc_cmp_hook,
        wrap_async_datadump_hook,
        wrap_checkoverflow_hook,
    )

__all__ = [
    "register_hook",
    "schedule",
    "seed_all",
    "set_dump_path",
    "step_schedule",
    "wrap_acc_cmp_hook",
    "wrap_async_datadump_hook",
    "wrap_checkoverflow_hook",
]
_OLD_PATH = "torch_npu.hooks"


def install() -> None:
    """From now on `torch_npu.hooks` is this package, with or without a torch_npu."""
    package = sys.modules[__name__]
    sys.modules[_OLD_PATH] = package
    sys.modules[f"{_OLD_PATH}.tools"] = importlib.import_module(f"{__name__}.tools")
    above = sys.modules.get("torch_npu")
    if above is not None:
        above.hooks = package  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.dumping"), name)
