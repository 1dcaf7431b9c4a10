"""What the C part of a capture must know to ask tensors without Python; `_taps_torch.c` says how."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ulpscope import taps

log = logging.getLogger(__name__)


def is_ordinary(value: Tensor) -> bool:
    """Whether a tensor, and all with its dispatch keys, are plain memory that torch keeps a version of."""
    odd = value.is_neg() or value.is_conj() or value.is_inference() or value.is_quantized or value.is_nested
    odd = odd or torch._C._functorch.is_functorch_wrapped_tensor(value) or torch._is_functional_tensor(value)
    return not odd and value.layout is torch.strided and value.device.type in ("cpu", "cuda")


@functools.cache
def learn() -> bool:
    """Shows the C part a few tensors, so that it can ask others without Python. Whether that can be done."""
    try:
        return taps.C is not None and taps.C.learn(samples())
    except Exception as error:  # another torch: attributes serve everywhere
        log.debug("tensors are asked through their attributes: %s", error)
        return False


def samples() -> list[tuple[Any, ...]]:
    """Tensors of many kinds, each with what Python tells of it. No operator that keeps anything for a backward pass: the
    program may have hooks for that."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        base = torch.zeros(6, 4, dtype=torch.complex64)
        weight = Parameter(torch.ones(3, 5))
        shown = [base, base.conj(), base[2:, 1:3].t(), weight, weight.detach()[1:], torch._neg_view(base.real)]
        shown += [torch.zeros(3).add_(1), torch.empty(0), torch.zeros(2, dtype=torch.bool)]
        with torch.enable_grad():
            shown += [weight.t(), *weight.unbind()]
        return [
            (
                value, value._cdata, torch._C._dispatch_keys(value).raw_repr(), value.requires_grad, value._version,
                value.data_ptr(), tuple(value.shape), value.stride(), value.storage_offset(), value.output_nr,
                value._is_view(), -1,
            )
            for value in shown
        ]  # fmt: skip
