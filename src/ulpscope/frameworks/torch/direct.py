"""What the C part of a capture must know to ask tensors, the graph and a thread without Python; `torch_abi.c` says how."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ulpscope.frameworks.torch import internals
from ulpscope.native import taps

log = logging.getLogger(__name__)


def is_ordinary(value: Tensor) -> bool:
    """Whether a tensor, and all with its dispatch keys, are plain memory that torch keeps a version of."""
    odd = value.is_neg() or value.is_conj() or value.is_inference() or value.is_quantized or value.is_nested
    odd = odd or internals.is_transformed(value) or internals.is_functional(value)
    return not odd and value.layout is torch.strided and value.device.type in ("cpu", "cuda")


@functools.cache
def learn() -> bool:
    """Shows the C part a few tensors and nodes, so that it can ask others without Python. Whether that can be done."""
    try:
        if taps.C is None or internals.native() != "full" or not taps.C.learn(samples()):
            return False
        taps.C.learn_storage(storages())  # else each tensor that comes from elsewhere is asked through Python
        # Each serves without the other.
        return all([_learn_thread(taps.C), taps.C.learn_graph(nodes())])
    except Exception as error:  # another torch: attributes serve everywhere
        log.debug("torch is asked through Python: %s", error)
        return False


def _learn_thread(extension: Any) -> bool:
    """Shows what a thread is set to, in each way in which it can be."""
    number = int(internals.AUTOGRAD)
    answers = []
    for setting in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode(), internals.no_functions()):
        with setting:
            told = extension.thread_state(number)
            if told is None:
                return False
            tracing = internals.jit_trace() is not None
            excluded = internals.below_autograd()
            if told[1:] != (torch.is_grad_enabled(), tracing, excluded):
                return False
            answers.append(told)
    heard, silent = answers[0][0], answers[-1][0]
    return bool(extension.learn_thread(silent if silent != heard else 0, number))


def samples() -> list[tuple[Any, ...]]:
    """Tensors of many kinds, each with what Python tells of it. No operator that keeps anything for a backward pass: the
    program may have hooks for that."""
    with internals.no_functions(), internals.no_dispatch(), torch.inference_mode(False):
        base = torch.zeros(6, 4, dtype=torch.complex64)
        weight = Parameter(torch.ones(3, 5))
        shown = [base, base.conj(), base[2:, 1:3].t(), weight, weight.detach()[1:], internals.as_negative(base.real)]
        shown += [torch.zeros(3).add_(1), torch.empty(0), torch.zeros(2, dtype=torch.bool)]
        with torch.enable_grad():
            shown += [weight.t(), *weight.unbind()]
        return [
            (
                value, value._cdata, internals.dispatch_keys(value).raw_repr(), value.requires_grad, value._version,
                value.data_ptr(), tuple(value.shape), value.stride(), value.storage_offset(), value.output_nr,
                value._base, -1, value.untyped_storage().nbytes(),
            )
            for value in shown
        ]  # fmt: skip


def storages() -> list[tuple[Any, ...]]:
    """Tensors whose memory is torch's own, and some whose memory is not; each with where torch keeps what it knows of that, and
    whether it may resize it."""
    with internals.no_functions(), internals.no_dispatch(), torch.inference_mode(False):
        buffers = [bytearray(size) for size in (8, 400, 3000)]
        shown = [torch.zeros(2), torch.ones(500, 3), torch.zeros(1, dtype=torch.bool), Parameter(torch.zeros(70))[3:]]
        shown += [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        shown.append(torch.ones(9))
        shown[-1].numpy()  # torch's own memory, which it may not resize any more
        known = [(value, value.untyped_storage()) for value in shown]
        return [(value, storage._cdata, storage.resizable()) for value, storage in known]


def nodes() -> list[tuple[Any, ...]]:
    """Tensors that operators made, each with the sequence number of its node and what the node leads to: a tensor that has the
    node, the number of its output, and whether it is a leaf. Nothing is kept for a backward pass here either."""
    with (
        internals.no_functions(),
        internals.no_dispatch(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        one, two, three = Parameter(torch.ones(3, 5)), Parameter(torch.zeros(5)), Parameter(torch.zeros(1))
        rows = one.unbind()
        total = rows[1] + rows[2]
        made = [rows[0], total, two + total, torch.ones(5) + rows[1], torch.cat((total, three, rows[2], torch.ones(1)))]
        found = []
        for value in made:
            assert value.grad_fn is not None
            children: list[tuple[Any, int, bool]] = []
            for child, number in value.grad_fn.next_functions:
                if child is None:
                    children.append((None, 0, False))
                elif hasattr(child, "variable"):
                    children.append((child.variable, number, True))
                else:
                    children.append((next(known for known in made if known.grad_fn is child), number, False))
            found.append((value, value.grad_fn._sequence_nr(), tuple(children)))
        return found
