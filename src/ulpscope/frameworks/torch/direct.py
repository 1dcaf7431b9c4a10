"""Whether the C part of a capture may ask torch's own library of tensors; `native/torch_abi.c` says what it asks."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch.nn import Parameter

from ulpscope.frameworks.torch import internals
from ulpscope.native import taps

log = logging.getLogger(__name__)


@functools.cache
def check() -> bool:
    """Shows the C part a few tensors: it asks others without Python if torch told it the same of each of these as Python."""
    try:
        return taps.C is not None and internals.native() == "full" and taps.C.check_torch(samples())
    except Exception as error:  # another torch: attributes serve everywhere
        log.debug("torch is asked through Python: %s", error)
        return False


def samples() -> list[tuple[Any, ...]]:
    """Thirteen tensors, each with where it is and what Python tells of it. No operator that keeps anything for a backward pass:
    the program may have hooks for that."""
    with internals.no_functions(), internals.no_dispatch(), torch.inference_mode(False):
        base = torch.zeros(6, 4, dtype=torch.complex64)
        weight = Parameter(torch.ones(3, 5))
        shown = [base, base.conj(), base[2:, 1:3].t(), weight, weight.detach()[1:], torch.ones(2, 3).expand(4, 2, 3)]
        shown += [torch.zeros(3).add_(1), torch.empty(0), torch.zeros(2, dtype=torch.bool)]
        with torch.enable_grad():
            shown += [weight.t(), *weight.unbind()]
        return [
            (
                value, value._cdata, value.requires_grad, value._version, value._is_view(), value.data_ptr(), value.dtype,
                tuple(value.shape), value.stride(), value.storage_offset(), -1,
            )
            for value in shown
        ]  # fmt: skip
