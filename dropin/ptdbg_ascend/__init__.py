"""ptdbg_ascend, answered by ulpscope. A name is taken when it is asked for: comparing needs no torch."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ulpscope.compat import ptdbg_ascend as _names

if TYPE_CHECKING:
    from ulpscope.compat.ptdbg_ascend import (
        PrecisionDebugger,
        acc_cmp_dump,
        compare,
        compare_distributed,
        module_dump,
        module_dump_end,
        overflow_check,
        parse,
        register_hook,
        seed_all,
        set_backward_input,
        set_dump_path,
        set_dump_switch,
        set_overflow_check_switch,
    )

__all__ = ["compare", "compare_distributed", "parse"]
if importlib.util.find_spec("torch") is not None:
    __all__ += [
        "PrecisionDebugger",
        "acc_cmp_dump",
        "module_dump",
        "module_dump_end",
        "overflow_check",
        "register_hook",
        "seed_all",
        "set_backward_input",
        "set_dump_path",
        "set_dump_switch",
        "set_overflow_check_switch",
    ]


def __getattr__(name: str) -> Any:
    return getattr(_names, name)
