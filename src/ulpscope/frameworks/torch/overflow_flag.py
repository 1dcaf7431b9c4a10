"""The overflow flag of an NPU that saturates: there an overflow leaves no inf, only a bit that the chip raises.

On chips in inf/nan mode, and on every other device, there is no flag to ask and the values tell. torch_npu is found in the
process and never imported. Asking for the flag clears it for whoever else asks, a loss scaler for one; with
OVERFLOW_DEBUG_MODE_ENABLE=1 a second flag of the chip's is asked, which is there for debuggers alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

import torch

from ulpscope.frameworks.torch import internals
from ulpscope.model.errors import CaptureError

VARIABLE = "OVERFLOW_DEBUG_MODE_ENABLE"
_STATUS_WORDS, _OF_DEBUGGERS = 8, 1


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
    if found is None or found.is_support_inf_nan():
        return None
    return DebuggersFlag(sys.modules["torch_npu"]) if os.environ.get(VARIABLE) == "1" else found


class DebuggersFlag:
    """The second flag, by `npu_get_float_status` and `npu_clear_float_status`. CaptureError where torch_npu has them not."""

    def __init__(self, torch_npu: Any) -> None:
        missing = [name for name in ("npu_get_float_status", "npu_clear_float_status") if not hasattr(torch_npu, name)]
        if missing:
            raise CaptureError(f"{VARIABLE}=1 needs torch_npu.{missing[0]}, which this torch_npu has not; unset it")
        self._npu = torch_npu

    def is_support_inf_nan(self) -> bool:
        return False

    def get_npu_overflow_flag(self) -> bool:
        with internals.no_functions():
            return bool(self._npu.npu_get_float_status(_words(), _OF_DEBUGGERS).cpu()[0])

    def clear_npu_overflow_flag(self) -> None:
        with internals.no_functions():
            self._npu.npu_clear_float_status(_words(), _OF_DEBUGGERS)


def _words() -> torch.Tensor:
    return torch.zeros(_STATUS_WORDS, device="npu")
