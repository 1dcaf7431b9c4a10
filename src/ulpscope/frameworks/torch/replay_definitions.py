"""Kernels that have no float64 form, or none to rely on, by their mathematical definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
    keys = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        keys = keys.remove(getattr(torch._C.DispatchKey, name))
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        leaves = [leaf.clone().requires_grad_(True) for leaf in inputs]
        results = forward(*leaves)
        pairs = [(out, grad.reshape(out.shape)) for out, grad in zip(results, grads, strict=True) if grad is not None]
        return torch.autograd.grad([out for out, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    total = scores.logsumexp(-1)
    return torch.exp(scores - total.unsqueeze(-1)).nan_to_num(0.0) @ v, total


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
    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        return (_attention(*leaves, attn_mask, is_causal, scale)[0],)  # type: ignore[call-arg, arg-type]

    return _gradients(forward, [q, k, v], [grad])


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if dropout_p:
        raise NotImplementedError("attention with dropout has no reference")
    out, total = _attention(q, k, v, None, is_causal, scale)
    return out, total, *([None] * 7)


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Any, ...]:
    dropout_p, is_causal = rest[4], rest[5]
    if dropout_p:
        raise NotImplementedError("attention with dropout has no reference")

    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        return (_attention(*leaves, None, is_causal, scale)[0],)  # type: ignore[call-arg, arg-type]

    return _gradients(forward, [q, k, v], [grad])


def efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if dropout_p:
        raise NotImplementedError("attention with dropout has no reference")
    return _attention(q, k, v, attn_bias, is_causal, scale)[0], None, None, None


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "mkldnn_rnn_layer": mkldnn_rnn_layer,
    "mkldnn_rnn_layer_backward": mkldnn_rnn_layer_backward,
    "_scaled_dot_product_flash_attention_for_cpu": flash_attention_for_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": flash_attention_for_cpu_backward,
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_efficient_attention": efficient_attention,
}
