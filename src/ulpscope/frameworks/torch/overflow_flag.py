"""The overflow flag of an NPU that saturates: there an overflow leaves no inf, only a bit that the chip raises.

On chips in inf/nan mode, and on every other device, there is no flag to ask and the values tell. torch_npu is found in the
process and never imported.
"""

from __future__ import annotations

import sys
from typing import Protocol


class OverflowFlag(Protocol):
    """What is used of `torch_npu.npu.utils`. Asking waits for the device."""

    def is_support_inf_nan(self) -> bool: ...
    def get_npu_overflow_flag(self) -> bool: ...
    def clear_npu_overflow_flag(self) -> None: ...


def overflow_flag() -> OverflowFlag | None:
    """The flag of this process's NPU, if it has one that saturates."""
    npu = getattr(sys.modules.get("torch_npu"), "npu", None)
    if npu is None or not npu.is_available():
        return None
    found: OverflowFlag | None = getattr(npu, "utils", None)
    return found if found is not None and not found.is_support_inf_nan() else None
