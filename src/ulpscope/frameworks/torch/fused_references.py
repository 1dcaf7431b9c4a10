"""Fused operators of an NPU by their definition: what the pre-check takes for the device's, and the judge for the truth.

Each takes the operator's arguments in any precision and may be differentiated. Nothing is written: an optimizer returns what it
would have written. What draws random numbers, or reads a layout that is not described, is refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.tensors import leaves

_MASKED = -10000.0  # what the masked softmax takes for a score that counts nothing
_PADDED = 8  # attention gives each maximum and each sum so many times
_LEFT, _RIGHT, _BAND = 2, 3, 4


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, linear = x.chunk(2, dim)
    return F.silu(gate) * linear


def rotary_mul(x: Tensor, cosine: Tensor, sine: Tensor, rotary_mode: str = "half") -> Tensor:
    """Each pair of elements turned by its angle; pairs are halves of a head apart, or neighbours."""
    if rotary_mode == "interleave":
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return x * cosine + turned * sine


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    scale = torch.rsqrt(x.square().mean(dims, keepdim=True) + epsilon)
    return x * scale * gamma, _wide(scale)


def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax((x * scale).masked_fill(mask.bool(), _MASKED), -1)


def fast_gelu(x: Tensor) -> Tensor:
    """The logistic approximation of gelu."""
    return x * torch.sigmoid(1.702 * x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def layer_norm_eval(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    return F.layer_norm(x, shape, weight, bias, eps)


def confusion_transpose(x: Tensor, perm: Any, shape: Any, transpose_first: bool) -> Tensor:
    return x.permute(*perm).reshape(*shape) if transpose_first else x.reshape(*shape).permute(*perm)


def group_norm_silu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.reshape(x.shape[0], group, -1)
    mean, variance = grouped.mean(-1), grouped.var(-1, correction=0)
    return F.silu(F.group_norm(x, group, weight, bias, eps)), mean, torch.rsqrt(variance + eps)


def moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the k best experts of each row, which they are, and where each goes, column by column."""
    weights, experts = torch.softmax(x, -1).topk(k, -1)
    if finished is not None:
        experts = experts.masked_fill(finished.bool().unsqueeze(-1), x.shape[-1])
    rows = torch.arange(weights.numel(), device=x.device).reshape(k, -1).t().reshape(weights.shape)
    return weights, experts.int(), rows.int()


def sort_v2(x: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    return torch.sort(x, dim=dim, descending=descending).values


def apply_adam(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    use_locking: bool | None = None,
    use_nesterov: bool | None = None,
    *,
    out: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    value, mean, square = out
    rate = lr * math.sqrt(1 - beta2_power) / (1 - beta1_power)
    mean = mean + (1 - beta1) * (grad - mean)
    square = square + (1 - beta2) * (grad.square() - square)
    step = beta1 * mean + (1 - beta1) * grad if use_nesterov else mean
    return value - rate * step / (square.sqrt() + epsilon), mean, square


def apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None = None,
    amsgrad: bool | None = None,
    maximize: bool | None = None,
    *,
    out: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`beta1_power` and `beta2_power` are those of the step before."""
    value, mean, square = out
    slope = -grad if maximize else grad
    mean = beta1 * mean + (1 - beta1) * slope
    square = beta2 * square + (1 - beta2) * slope.square()
    largest = torch.maximum(max_grad_norm, square) if amsgrad and max_grad_norm is not None else square
    root = (largest / (1 - beta2_power * beta2)).sqrt() + epsilon
    return value * (1 - lr * weight_decay) - lr / (1 - beta1_power * beta1) * mean / root, mean, square


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Any, ...]:
    """The result, the largest score and the sum of the exponentials of each row, and what is kept for a dropout."""
    if keep_prob < 1.0:
        raise NotImplementedError("it draws random numbers")
    if input_layout not in _LAYOUTS or sparse_mode not in (0, 1, _LEFT, _RIGHT, _BAND):
        raise NotImplementedError(f"layout {input_layout} with sparse_mode {sparse_mode} has no reference")
    split, joined = _LAYOUTS[input_layout]
    q, k, v = split(query, head_num), split(key, 0, query, head_num), split(value, 0, query, head_num)
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(-1, -2)
    scores = (scores if pse is None else scores + pse) * scale
    masked = _masked(scores, atten_mask, pre_tockens, next_tockens, sparse_mode)
    if masked is not None:
        scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
    largest = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - largest)
    total = powers.sum(-1, keepdim=True)
    result = joined(powers / total @ v)
    padded = [_wide(each.expand(*each.shape[:-1], _PADDED)) for each in (largest, total)]
    return result, *padded, query.new_empty(0), 0, 0, 0


def _masked(scores: Tensor, mask: Tensor | None, before: int, after: int, mode: int) -> Tensor | None:
    """Which scores do not count."""
    rows, columns = scores.shape[-2:]
    if mode in (0, 1):
        return None if mask is None else mask.bool()
    row, column = torch.arange(rows, device=scores.device), torch.arange(columns, device=scores.device)
    # How far a column lies ahead of the place of its row, counted from the first of both, or from the last.
    ahead = column - row.unsqueeze(1) - (0 if mode == _LEFT else columns - rows)
    return (ahead > after) | (ahead < -before) if mode == _BAND else ahead > 0


def _heads_of(x: Tensor, heads: int, query: Tensor | None, query_heads: int) -> int:
    """How many heads a tensor has whose last dimension holds all of them: as wide as those of the query."""
    return heads if query is None else x.shape[-1] * query_heads // query.shape[-1]


def _bsh(x: Tensor, heads: int, query: Tensor | None = None, query_heads: int = 0) -> Tensor:
    split: Tensor = x.unflatten(-1, (_heads_of(x, heads, query, query_heads), -1))
    return split.transpose(1, 2)


def _sbh(x: Tensor, heads: int, query: Tensor | None = None, query_heads: int = 0) -> Tensor:
    split: Tensor = x.unflatten(-1, (_heads_of(x, heads, query, query_heads), -1))
    return split.permute(1, 2, 0, 3)


# How a layout becomes batch, heads, sequence, width, and what the result is in it.
_LAYOUTS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "BSH": (_bsh, lambda x: x.transpose(1, 2).flatten(2)),
    "SBH": (_sbh, lambda x: x.permute(2, 0, 1, 3).flatten(2)),
    "BSND": (lambda x, *_: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "BNSD": (lambda x, *_: x, lambda x: x),
}

FUSED: dict[str, Callable[..., Any]] = {
    "fast_gelu": fast_gelu,
    "npu_apply_adam": apply_adam,
    "npu_apply_adam_w": apply_adam_w,
    "npu_confusion_transpose": confusion_transpose,
    "npu_fast_gelu": fast_gelu,
    "npu_fusion_attention": fusion_attention,
    "npu_group_norm_silu": group_norm_silu,
    "npu_layer_norm_eval": layer_norm_eval,
    "npu_linear": linear,
    "npu_mish": mish,
    "npu_moe_gating_top_k_softmax": moe_gating_top_k_softmax,
    "npu_rms_norm": rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_scaled_masked_softmax": scaled_masked_softmax,
    "npu_sort_v2": sort_v2,
    "npu_swiglu": swiglu,
}


def fused_on_cpu(name: str) -> Callable[..., Any]:
    """A fused operator as a device would have it, where there is none: computed in float32 at least, and rounded once."""

    def run(*args: Any, **kwargs: Any) -> Any:
        halves = [
            leaf.dtype for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dtype in _HALVES
        ]
        result = FUSED[name](*internals.tree_map(_widened, args), **internals.tree_map(_widened, kwargs))
        if not halves:
            return result
        if not isinstance(result, tuple):
            return result.to(halves[0])
        kept = 1 if name in _KEEPS_FLOAT32 else len(result)
        rounds = (isinstance(each, Tensor) and each.is_floating_point() and at < kept for at, each in enumerate(result))
        return tuple(each.to(halves[0]) if down else each for each, down in zip(result, rounds, strict=True))

    _stand_ins.add(run)
    return run


def is_stand_in(function: Callable[..., Any]) -> bool:
    """Whether a function only stands for one of a device that is not here: what it gives says nothing of that device."""
    return function in _stand_ins


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _wide(x: Tensor) -> Tensor:
    """What a kernel keeps in float32, whatever it is given."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


_stand_ins: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
_HALVES = (torch.float16, torch.bfloat16)
# Of these the results but the first are float32.
_KEEPS_FLOAT32 = frozenset({"npu_rms_norm", "npu_fusion_attention"})


# --- for the judge: kernels, with the arguments of their schemas ---------------------------------------------------------


def _slopes(forward: Callable[..., Any], given: list[Tensor], gradients: list[Tensor | None]) -> tuple[Any, ...]:
    """Gradients of a definition, by autograd, from inside a kernel: there autograd is switched off."""
    with internals.with_autograd(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        inputs = [leaf.detach().clone().requires_grad_(True) for leaf in given]
        found = forward(*inputs)
        results = found if isinstance(found, tuple) else (found,)
        pairs = [
            (out, grad.reshape(out.shape)) for out, grad in zip(results, gradients, strict=False) if grad is not None
        ]
        return torch.autograd.grad([out for out, _ in pairs], inputs, [grad for _, grad in pairs], allow_unused=True)


def _swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    return _slopes(lambda leaf: swiglu(leaf, dim), [x], [grad])[0]  # type: ignore[no-any-return]


def _rotary_mul_backward(
    grad: Tensor, x: Tensor, cosine: Tensor, sine: Tensor, rotary_mode: str = "half"
) -> tuple[Any, ...]:
    return _slopes(lambda a, b, c: rotary_mul(a, b, c, rotary_mode), [x, cosine, sine], [grad])


def _rms_norm_backward(grad: Tensor, x: Tensor, gamma: Tensor, scale: Tensor) -> tuple[Any, ...]:
    """From the scale that the forward kept."""
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    inner = grad * gamma * scale
    leaving = inner - x * scale.square() * (inner * x).mean(dims, keepdim=True)
    return leaving, (grad * x * scale).reshape(-1, *gamma.shape).sum(0)


def _scaled_masked_softmax_backward(
    grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    if fixed_triu_mask:
        mask = torch.ones(y.shape[-2:], dtype=torch.bool, device=y.device).triu(1)
    inner = y * (grad - (grad * y).sum(-1, keepdim=True))
    return (inner * scale).masked_fill(mask.bool(), 0.0)


def _of_one(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda grad, x: _slopes(forward, [x], [grad])[0]


def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


FUSED_KERNELS: dict[str, Callable[..., Any]] = {
    **{name: function for name, function in FUSED.items() if "apply" not in name},
    "npu_fast_gelu_backward": _of_one(fast_gelu),
    "npu_linear_backward": _linear_backward,
    "npu_mish_backward": _of_one(mish),
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_rotary_mul_backward": _rotary_mul_backward,
    "npu_scaled_masked_softmax_backward": _scaled_masked_softmax_backward,
    "npu_swiglu_backward": _swiglu_backward,
}
