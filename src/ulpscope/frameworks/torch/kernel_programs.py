"""Small right programs for measuring what kernels do: the usual operators of models, forward and backward, on random inputs.

Nothing here is judged as right or wrong; whoever runs it under a ledger learns how far this device's kernels round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Make = Callable[..., Tensor]
Program = Callable[[Make], Any]
DTYPES = ("float32", "bfloat16", "float16")
_SCALES = (1.0, 30.0, 1e-3, 0.2)
_SIZES = (1, 3, 8)


def _attention(make: Make, *, mask: bool = False, causal: bool = False) -> Tensor:
    q, k, v = (make(2, 4, 16, 32) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, make(16, 16) if mask else None, is_causal=causal)


def _positive(make: Make, *shape: int) -> Tensor:
    return make(*shape).abs() + 0.01


def _labels(x: Tensor, classes: int) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) % classes


def _norm(x: Tensor, kind: Callable[..., Tensor], *rest: Any) -> Tensor:
    return kind(x + 0.3, *rest)


def _batch_norm(make: Make, training: bool) -> Tensor:
    x, weight, bias = make(8, 16, 6, 6), make(16), make(16)
    mean, var = weight.detach().clone(), bias.detach().abs() + 0.5
    return F.batch_norm(x, mean, var, weight, bias, training)


_ROWS = 13  # of which there are more in some turns
_GRID = (2, 5, 5, 2)
_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.exp,
    torch.expm1,
    torch.sin,
    torch.cos,
    torch.tan,
    torch.tanh,
    torch.sigmoid,
    torch.erf,
    torch.erfc,
    torch.abs,
    torch.square,
    torch.reciprocal,
    torch.sinh,
    torch.cosh,
    torch.asinh,
    torch.atan,
    torch.relu,
)
_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    F.mish,
    F.elu,
    F.selu,
    F.celu,
    F.softplus,
    F.softsign,
    F.logsigmoid,
    F.hardswish,
    F.hardsigmoid,
    F.leaky_relu,
    F.tanhshrink,
    F.glu,
)
_POSITIVE: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sqrt,
    torch.rsqrt,
    torch.log,
    torch.log1p,
    torch.log2,
    torch.log10,
    lambda x: x.pow(2.5),
    lambda x: x.pow(-0.5),
    torch.lgamma,
)
_REDUCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sum,
    lambda x: x.sum(0),
    lambda x: x.mean(-1),
    lambda x: x.var(-1),
    lambda x: x.std(0),
    lambda x: x.norm(dim=-1),
    lambda x: x.logsumexp(-1),
    lambda x: x.cumsum(-1),
    lambda x: (0.5 + x.sigmoid()).cumprod(-1),
    lambda x: (0.5 + x.sigmoid()).prod(-1),
    lambda x: F.softmax(x, -1),
    lambda x: F.log_softmax(x, -1),
    lambda x: F.softmax(x, 0),
    lambda x: F.normalize(x, dim=-1),
    lambda x: x.amax(-1),
    lambda x: x.sort(-1)[0],
)
_PAIRS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x + 0.1 * y,
    lambda x, y: x * y,
    lambda x, y: x / (y.abs() + 0.1),
    lambda x, y: x - 0.1,
    lambda x, y: torch.lerp(x, y, 0.1),
    lambda x, y: torch.addcmul(x, x, y, value=0.3),
    lambda x, y: torch.addcdiv(x, x, y.abs() + 0.1, value=0.3),
    torch.maximum,
    torch.atan2,
    torch.hypot,
    torch.logaddexp,
    lambda x, y: torch.remainder(x, y.abs() + 0.1),
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid().detach()),
    lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach()),
    lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1).detach(), reduction="batchmean"),
    lambda x, y: F.cosine_similarity(x, y, -1),
    lambda x, y: F.cross_entropy(x, _labels(x, x.shape[1])),
    lambda x, y: x @ y.t(),
    lambda x, y: F.linear(x, y, y.sum(1)),
)
_OTHERS: tuple[Program, ...] = (
    _attention,
    lambda make: _attention(make, mask=True),
    lambda make: _attention(make, causal=True),
    lambda make: torch.bmm(make(4, 8, 16), make(4, 16, 8)),
    lambda make: torch.baddbmm(make(4, 8, 8), make(4, 8, 16), make(4, 16, 8), beta=0.2, alpha=0.6),
    lambda make: F.conv1d(make(2, 8, 32), make(8, 8, 3), make(8), padding=1),
    lambda make: F.conv2d(make(2, 8, 12, 12), make(16, 8, 3, 3), make(16), padding=1),
    lambda make: F.conv2d(make(2, 8, 12, 12), make(8, 1, 3, 3), groups=8),
    lambda make: F.conv_transpose2d(make(2, 8, 6, 6), make(8, 4, 3, 3), stride=2),
    lambda make: _norm(make(16, 64), F.layer_norm, (64,)),
    lambda make: F.layer_norm(F.layer_norm(make(64, 32), (32,)), (32,), make(32), make(32)),
    lambda make: _norm(make(16, 64), F.rms_norm, (64,)),
    lambda make: F.group_norm(make(4, 16, 8, 8) + make(16, 1, 1), 4, make(16), make(16)),
    lambda make: F.group_norm((make(4, 16, 8, 8) + make(16, 1, 1)).to(memory_format=torch.channels_last), 4),
    lambda make: _batch_norm(make, True),
    lambda make: _batch_norm(make, False),
    lambda make: F.instance_norm(make(4, 8, 6, 6)),
    lambda make: F.embedding(torch.arange(64, device=make(1).device) % 7, make(16, 32)),
    lambda make: F.interpolate(make(2, 3, 7, 9), scale_factor=1.7, mode="bilinear"),
    lambda make: F.interpolate(make(2, 3, 7, 9), size=(5, 12), mode="bicubic"),
    lambda make: F.interpolate(make(2, 3, 7), scale_factor=1.7, mode="linear"),
    lambda make: F.grid_sample(make(2, 3, 6, 6), make(*_GRID).tanh(), align_corners=False),
    lambda make: F.avg_pool2d(make(2, 4, 9, 9), 3, 2),
    lambda make: F.max_pool2d(make(2, 4, 9, 9), 3, 2),
    lambda make: F.adaptive_avg_pool2d(make(2, 4, 9, 9), 4),
    lambda make: torch.fft.irfft(torch.fft.rfft(make(4, 32).float())),
    lambda make: F.dropout(make(16, 64), 0.1),
    lambda make: torch.einsum("bij,bjk->bik", make(3, 8, 8), make(3, 8, 8)),
)


def is_there(device: str) -> bool:
    """Whether tensors can be made on this device."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        return False
    return True


def programs() -> list[Program]:
    """All of them; each gets what makes it a random leaf of a shape."""
    found: list[Program] = [_of_one(run) for run in (*_UNARY, *_ACTIVATIONS, *_REDUCTIONS)]
    found += [_of_positive(run) for run in _POSITIVE]
    found += [_of_two(run) for run in _PAIRS]
    found += _OTHERS
    for kind, told in _OPTIMIZERS.items():
        for way in ("", "foreach", "fused"):
            found.append(_updates(kind, {**told, **({way: True} if way else {"foreach": False})}))
    return found


_OPTIMIZERS: dict[Any, dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.9, "weight_decay": 0.1},
    torch.optim.Adam: {},
    torch.optim.AdamW: {},
}


def _of_one(run: Callable[[Tensor], Tensor]) -> Program:
    return lambda make: run(make(_ROWS, 40))


def _of_positive(run: Callable[[Tensor], Tensor]) -> Program:
    return lambda make: run(_positive(make, _ROWS, 40))


def _of_two(run: Callable[[Tensor, Tensor], Tensor]) -> Program:
    return lambda make: run(make(_ROWS, 40), make(_ROWS, 40))


def _updates(kind: Any, given: dict[str, Any]) -> Program:
    def run(make: Make) -> None:
        weights = [make(8, 16).detach().requires_grad_(True), make(2).detach().requires_grad_(True)]
        optimizer = kind(weights, lr=1e-3, **given)
        for _ in range(4):
            for weight in weights:
                weight.grad = make(*weight.shape).detach()
            optimizer.step()

    return run


def run_program(program: Program, dtype: str, device: str, turn: int) -> None:
    """One program forward and backward; `turn` chooses the random numbers, their scale and how many rows there are.

    What a device or a dtype does not have is left out."""
    generator = torch.Generator().manual_seed(turn)
    scale, size = _SCALES[turn % len(_SCALES)], _SIZES[turn % len(_SIZES)]

    def make(*shape: int) -> Tensor:
        first, *rest = shape
        found = torch.randn(first * size if first == _ROWS else first, *rest, generator=generator)
        return (found * scale).to(getattr(torch, dtype)).to(device).requires_grad_(True)

    try:
        found = program(make)
        if isinstance(found, Tensor) and found.requires_grad:
            torch.autograd.backward(found, torch.randn(found.shape, generator=generator).to(found.dtype).to(device))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return
