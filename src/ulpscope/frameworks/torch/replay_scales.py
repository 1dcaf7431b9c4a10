"""Condition scales: how much rounding an operation may show at each element, where the tables alone cannot say.

Each function gets the operands in float64 and the results in float64 and returns one scale for each result, or None where
the result itself is the scale. They are the first-order terms of the textbook formula of the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Scales = Callable[[tuple[Any, ...], dict[str, Any], list[Any]], list[Tensor | None]]


def softmax(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    x, dim = args[0], args[1]
    return [results[0] * (1 + (x.amax(dim, True) - x).clamp_max(1e3))]


def log_softmax(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    x, dim = args[0], args[1]
    return [results[0].abs() + (x.amax(dim, True) - x) + 1]


def softmax_backward(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    grad, y, dim = args[0], args[1], args[2]
    return [y * (grad.abs() + (grad * y).abs().sum(dim, True))]


def log_softmax_backward(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    grad, y, dim = args[0], args[1], args[2]
    return [grad.abs() + y.exp() * (1 + y.abs().clamp_max(1e3)) * grad.abs().sum(dim, True)]


def gelu(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    # 1 + erf(x) cancels for negative x: the error is that of one half of x.
    return [args[0].abs() * 0.5 + results[0].abs()]


def gelu_backward(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    grad, x = args[0], args[1]
    return [grad.abs() * (1 + (x * torch.exp(-0.5 * x * x)).abs())]


def erf(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    # Quick ones are one less an exponential: near zero the error is that of one.
    return [torch.ones_like(results[0])]


def silu(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    return [results[0].abs() * (1 + args[0].abs())]


def silu_backward(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    grad, x = args[0], args[1]
    return [grad.abs() * torch.sigmoid(x) * (1 + x.abs()) * 2]


def exponential(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    return [results[0].abs() * (1 + args[0].abs())]


def tanh(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    return [results[0].abs() * 2]


def tanh_backward(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    return [args[0].abs() * (1 + args[1] * args[1])]


def sigmoid_backward(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    return [args[0].abs() * args[1].abs() * 2]


def _normalised(x: Tensor, dims: list[int], eps: float, weight: Tensor | None, bias: Tensor | None) -> list[Any]:
    """Scale of (x - mean) / sqrt(var + eps) * weight + bias, whichever of the usual formulas the kernel takes."""
    mean = x.mean(dims, True)
    var = x.var(dims, unbiased=False, keepdim=True)
    rstd = (var + eps).rsqrt()
    ratio = 1 + mean * mean * rstd * rstd
    count = x.numel() / max(mean.numel(), 1)
    y = (x - mean) * rstd
    spread = (x * x).mean(dims, True).div(count).sqrt()
    # The mean itself is a sum: where x is near it, its error is all there is.
    scale = (x.abs() + mean.abs() + 4 * spread) * rstd + y.abs() * ratio
    if weight is not None:
        scale = scale * weight.abs()
    if bias is not None:
        scale = scale + bias.abs()
    # Its terms cancel, whichever the order they are added in.
    return [scale, spread + x.abs().mean(dims, True), rstd * ratio]


def layer_norm(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    x, shape, weight, bias, eps = args[:5]
    return _normalised(x, list(range(-len(shape), 0)), eps, weight, bias)


def group_norm(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    x, weight, bias, n, _, _, group, eps = args[:8]
    lines = x.reshape(n, group, -1)
    scale, mean, rstd = _normalised(lines, [-1], eps, None, None)
    scale = scale.reshape(x.shape)
    wide = (1, -1, *([1] * (x.dim() - 2)))
    if weight is not None:
        scale = scale * weight.abs().reshape(wide)
    if bias is not None:
        scale = scale + bias.abs().reshape(wide)
    return [scale, mean.reshape(n, group), rstd.reshape(n, group)]


def batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    x, weight, bias = args[:3]
    eps = args[-1]
    dims = [place for place in range(x.dim()) if place != 1]
    wide = (1, -1, *([1] * (x.dim() - 2)))
    w = None if weight is None else weight.reshape(wide)
    b = None if bias is None else bias.reshape(wide)
    scale, mean, rstd = _normalised(x, dims, eps, w, b)
    found: list[Tensor | None] = [scale, mean.flatten(), rstd.flatten()]
    found += [None] * (len(results) - 3)
    for place in range(3, len(results)):
        if isinstance(results[place], Tensor) and results[place].numel() == x.shape[1]:
            found[place] = results[place].abs() + mean.flatten().abs()
    return [
        s if s is None or r is None or s.numel() == r.numel() else None for s, r in zip(found, results, strict=False)
    ]


def layer_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    grad, x, shape, mean, rstd, weight = args[:6]
    dims = list(range(-len(shape), 0))
    rows = [place for place in range(x.dim() - len(shape))]
    g = grad if weight is None else grad * weight
    hat = (x - mean) * rstd
    loose = (x.abs() + mean.abs()) * rstd
    dx = rstd * (g.abs() + g.abs().mean(dims, True) + loose * (g * hat).abs().mean(dims, True))
    dw = (grad * loose).square().sum(rows).sqrt() if rows else (grad * loose).abs()
    db = grad.square().sum(rows).sqrt() if rows else grad.abs()
    return [dx, dw, db]


def lerp(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    x, y, weight = args[0], args[1], args[2] if len(args) > 2 else kwargs["weight"]
    if isinstance(weight, Tensor):
        return [(x * (1 - weight)).abs() + (y * weight).abs() + ((y - x) * weight).abs()]
    return [x.abs().mul_(abs(1 - weight)).add_(y.abs(), alpha=abs(weight))]


def addcmul(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    return [_with_two(args[0], args[1] * args[2], kwargs)]


def addcdiv(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    return [_with_two(args[0], args[1] / args[2], kwargs)]


def _with_two(x: Tensor, term: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Of a sum with a product of two: both factors count."""
    return term.abs_().mul_(2 * abs(kwargs.get("value", 1))).add_(x.abs())


def linspace(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    """Steps are rounded: the error is that of the whole range, also where the numbers pass through zero."""
    return [torch.full_like(results[0], abs(float(args[0])) + abs(float(args[1])))]


def logspace(args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> list[Tensor | None]:
    base = args[3] if len(args) > 3 else kwargs.get("base", 10.0)
    range_ = (abs(float(args[0])) + abs(float(args[1]))) * abs(math.log(abs(base) or 1.0))
    return [results[0].abs() * (1 + range_)]


# The same as by differences, in one pass: an optimizer runs these for every parameter.
MAPS: dict[str, Scales] = {"lerp": lerp, "addcmul": addcmul, "addcdiv": addcdiv}
SCALES: dict[str, Scales] = {
    "linspace": linspace,
    "logspace": logspace,
    "_softmax": softmax,
    "_safe_softmax": softmax,
    "_log_softmax": log_softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": log_softmax_backward,
    "gelu": gelu,
    "gelu_backward": gelu_backward,
    "erf": erf,
    "silu": silu,
    "silu_backward": silu_backward,
    "exp": exponential,
    "sigmoid": exponential,
    "tanh": tanh,
    "tanh_backward": tanh_backward,
    "sigmoid_backward": sigmoid_backward,
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
    "native_batch_norm": batch_norm,
    "cudnn_batch_norm": batch_norm,
    "_native_batch_norm_legit": batch_norm,
    "_batch_norm_with_update": batch_norm,
    "native_layer_norm_backward": layer_norm_backward,
}
