"""Kernels that have no float64 form, or none to rely on, by their mathematical definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.fused_references import FUSED_KERNELS


def _lstm_layer(
    x: Tensor, weights: tuple[Tensor, ...], hidden: Tensor, cell: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of an LSTM in one direction; x is time, batch, features."""
    w_in, w_hidden, b_in, b_hidden = weights
    h, c = hidden.reshape(x.shape[1], -1), cell.reshape(x.shape[1], -1)
    steps = []
    order = range(x.shape[0] - 1, -1, -1) if reverse else range(x.shape[0])
    for time in order:
        i, f, g, o = (x[time] @ w_in.t() + b_in + h @ w_hidden.t() + b_hidden).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        steps.append(h)
    if reverse:
        steps.reverse()
    return torch.stack(steps), h.reshape(hidden.shape), c.reshape(cell.shape)


def mkldnn_rnn_layer(
    x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, hx: Tensor, cx: Tensor, reverse: bool, *rest: Any
) -> tuple[Any, ...]:
    sizes, mode = rest[0], rest[1]
    if mode != 2 or sizes:
        raise NotImplementedError("only an LSTM of whole sequences has a reference")
    output, h, c = _lstm_layer(x, (w0, w1, w2, w3), hx, cx, reverse)
    return output, h, c, None


def mkldnn_rnn_layer_backward(
    x: Tensor,
    w0: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    hx: Tensor,
    cx: Tensor,
    output: Tensor,
    hy: Tensor,
    cy: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    reverse: bool,
    mode: int,
    *rest: Any,
) -> tuple[Any, ...]:
    if mode != 2:
        raise NotImplementedError("only an LSTM has a reference")
    inputs = [leaf.detach() for leaf in (x, w0, w1, w2, w3, hx, cx)]

    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        return _lstm_layer(leaves[0], leaves[1:5], leaves[5], leaves[6], reverse)

    dx, d0, d1, d2, d3, dh, dc = _gradients(forward, inputs, [grad_output, grad_hy, grad_cy])
    return dx, d0, d1, d2, d3, dh, dc


def _gradients(
    forward: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], grads: list[Tensor | None]
) -> tuple[Any, ...]:
    """Gradients of a definition, by autograd, from inside a kernel: there autograd is switched off."""
    with (
        internals.with_autograd(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        leaves = [leaf.clone().requires_grad_(True) for leaf in inputs]
        results = forward(*leaves)
        pairs = [(out, grad.reshape(out.shape)) for out, grad in zip(results, grads, strict=True) if grad is not None]
        return torch.autograd.grad([out for out, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True)


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, float]:
    """What the exponentials are taken of, the logarithm of their sums, and the factor of the products."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.transpose(-1, -2) * factor
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores, scores.logsumexp(-1), factor


def _for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for every head of the queries, which may share them."""
    shared = q.shape[1] // k.shape[1]
    return (k, v) if shared == 1 else (k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    k, v = _for_all_heads(q, k, v)
    scores, total, _ = _scores(q, k, mask, causal, scale)
    return torch.exp(scores - total.unsqueeze(-1)).nan_to_num(0.0) @ v, total


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """From what the forward kept, as kernels do: `out` was rounded, and its error goes into every gradient of a row."""
    heads = k.shape[1]
    wide_k, wide_v = _for_all_heads(q, k, v)
    scores, exact, factor = _scores(q, wide_k, mask, causal, scale)
    weights = torch.exp(scores - (exact if total is None else total).unsqueeze(-1)).nan_to_num(0.0)
    inner = weights * (grad @ wide_v.transpose(-1, -2) - (grad * out).sum(-1, True)) * factor
    dk, dv = inner.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
    dk, dv = (found.unflatten(1, (heads, -1)).sum(2) for found in (dk, dv))
    return inner @ wide_k, dk, dv


def _refuse(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError("attention with dropout has no reference")


def flash_attention_for_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    return _attention(q, k, v, attn_mask, is_causal, scale)


def flash_attention_for_cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    return _attention_backward(grad, q, k, v, out, total, attn_mask, is_causal, scale)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse(dropout_p)
    out, total = _attention(q, k, v, None, is_causal, scale)
    return out, total, *([None] * 7)


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Any, ...]:
    _refuse(rest[4])
    return _attention_backward(grad, q, k, v, out, total, None, rest[5], scale)


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Of the memory-efficient kernel and of cuDNN's; each pads its sums of exponentials in its own way."""
    _refuse(dropout_p)
    return _attention(q, k, v, attn_bias, is_causal, scale)[0], *([None] * 8)


def efficient_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    total: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse(dropout_p)
    return *_attention_backward(grad, q, k, v, out, None, attn_bias, is_causal, scale), None


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Any, ...]:
    _refuse(rest[7])
    return _attention_backward(grad, q, k, v, out, None, rest[2], rest[8], scale)


def cudnn_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    return *torch.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps), None


def cudnn_batch_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    saved_mean: Tensor | None,
    saved_scale: Tensor | None,
    eps: float,
    reserve: Tensor,
) -> tuple[Any, ...]:
    kernel = torch.ops.aten.native_batch_norm_backward.default
    return tuple(kernel(grad, x, weight, mean, var, saved_mean, saved_scale, True, eps, [True] * 3))


def cudnn_rnn_backward(*_: Any) -> tuple[Any, ...]:
    # What the forward left for it has another layout in float64: the kernel would read beyond it.
    raise NotImplementedError("the backward of cuDNN's RNN has no reference")


# --- optimizers: CUDA's fused kernels read their step counters as float32, whatever they are given -------------------


def _unscaled(
    grads: list[Tensor], maximize: bool, grad_scale: Tensor | None, found_inf: Tensor | None
) -> list[Tensor] | None:
    """The gradients to take, written back without their loss scale; None where this step is skipped."""
    if found_inf is not None and bool(found_inf):
        return None
    if grad_scale is not None:
        for grad in grads:
            grad.div_(grad_scale)
    return [-grad for grad in grads] if maximize else list(grads)


def _fused_adam(*, decoupled: bool) -> Callable[..., None]:
    def run(
        params: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        largest: list[Tensor],
        steps: list[Tensor],
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        for at, grad in enumerate(_unscaled(grads, maximize, grad_scale, found_inf) or ()):
            param, step = params[at], steps[at]
            if decoupled:
                param.mul_(1 - lr * weight_decay)
            else:
                grad = grad + weight_decay * param
            averages[at].mul_(beta1).add_(grad * (1 - beta1))
            squares[at].mul_(beta2).add_(grad * grad * (1 - beta2))
            square = squares[at]
            if amsgrad:
                square = largest[at].copy_(torch.maximum(largest[at], square))
            root = square.sqrt() / (1 - beta2**step).sqrt() + eps
            param.sub_(lr / (1 - beta1**step) * averages[at] / root)

    return run


def fused_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    for at, grad in enumerate(_unscaled(grads, maximize, grad_scale, found_inf) or ()):
        grad = grad + weight_decay * params[at]
        if momentum:
            kept = momenta[at]
            kept.copy_(grad if is_first_step else momentum * kept + (1 - dampening) * grad)
            grad = grad + momentum * kept if nesterov else kept
        params[at].sub_(lr * grad)


def amp_unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    for grad in grads:
        if not bool(torch.isfinite(grad).all()):
            found_inf.fill_(1.0)
        grad.mul_(inv_scale)


def amp_update_scale(
    scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    if bool(found_inf):
        scale.mul_(backoff)
        tracker.zero_()
        return scale
    tracker.add_(1)
    if int(tracker) >= interval:
        # A scale that would be infinite stays as it is.
        larger = scale * growth
        if bool(larger.abs() <= torch.finfo(torch.float32).max):
            scale.copy_(larger)
        tracker.zero_()
    return scale


def _margins(x: Tensor, target: Tensor) -> Tensor:
    return torch.exp(-x * target)


# What a kernel holds in its own dtype on the way: where that is out of range, so is what follows from it.
INSIDE: dict[str, Callable[..., Tensor]] = {
    "soft_margin_loss": lambda x, target, *_: _margins(x, target),
    "soft_margin_loss_backward": lambda grad, x, target, *_: _margins(x, target) * target,
}
DEFINITIONS: dict[str, Callable[..., Any]] = {
    "mkldnn_rnn_layer": mkldnn_rnn_layer,
    "mkldnn_rnn_layer_backward": mkldnn_rnn_layer_backward,
    "_scaled_dot_product_flash_attention_for_cpu": flash_attention_for_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": flash_attention_for_cpu_backward,
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_efficient_attention": biased_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    "_scaled_dot_product_cudnn_attention": biased_attention,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_attention_backward,
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "_cudnn_rnn_backward": cudnn_rnn_backward,
    "_amp_foreach_non_finite_check_and_unscale": amp_unscale,
    "_amp_update_scale": amp_update_scale,
    "_fused_adam": _fused_adam(decoupled=False),
    "_fused_adamw": _fused_adam(decoupled=True),
    "_fused_sgd": fused_sgd,
    **FUSED_KERNELS,
}
