"""One wrong kernel for each of sixty operators, in the manner of FaultBench: the device is outside of the ledger, and wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ulpscope
from ulpscope.analyze.ledger import judge
from ulpscope.store.ledger_file import ledger_path, read_ledger

SHAPE = (48, 64)


def x() -> Tensor:
    return torch.randn(SHAPE)


def positive() -> Tensor:
    return torch.rand(SHAPE) + 0.1


def heads() -> list[Tensor]:
    return [torch.randn(2, 4, 16, 32) for _ in range(3)]


# The kernel that is wrong, and what calls it.
OPERATORS: dict[str, Callable[[], Any]] = {
    "mm": lambda: x() @ x().t(),
    "addmm": lambda: F.linear(x(), x(), torch.randn(48)),
    "bmm": lambda: torch.bmm(torch.randn(4, 48, 16), torch.randn(4, 16, 64)),
    "baddbmm": lambda: torch.baddbmm(torch.randn(4, 8, 64), torch.randn(4, 8, 16), torch.randn(4, 16, 64)),
    "mv": lambda: torch.mv(torch.randn(512, 64), torch.randn(64)),
    "convolution": lambda: F.conv2d(torch.randn(2, 8, 12, 12), torch.randn(16, 8, 3, 3)),
    "sum": lambda: torch.randn(512, 64).sum(1),
    "mean": lambda: (1 + torch.randn(512, 64)).mean(1),
    "var": lambda: torch.randn(512, 64).var(1),
    "std": lambda: torch.randn(512, 64).std(1),
    "linalg_vector_norm": lambda: torch.linalg.vector_norm(torch.randn(512, 64), dim=1),
    "logsumexp": lambda: torch.randn(512, 64).logsumexp(1),
    "cumsum": lambda: x().abs().cumsum(1),
    "cumprod": lambda: positive().cumprod(1),
    "prod": lambda: torch.rand(512, 8).prod(1),
    "_softmax": lambda: F.softmax(x(), -1),
    "_log_softmax": lambda: F.log_softmax(x(), -1),
    "native_layer_norm": lambda: F.layer_norm(x(), (64,)),
    "native_group_norm": lambda: F.group_norm(torch.randn(4, 16, 8, 8), 4),
    "native_batch_norm": lambda: F.batch_norm(torch.randn(8, 16, 6, 6), None, None, training=True),
    "_scaled_dot_product_flash_attention_for_cpu": lambda: F.scaled_dot_product_attention(*heads()),
    "gelu": lambda: F.gelu(x()),
    "silu": lambda: F.silu(x()),
    "mish": lambda: F.mish(x()),
    "elu": lambda: F.elu(x()),
    "softplus": lambda: F.softplus(x()),
    "hardswish": lambda: F.hardswish(x()),
    "leaky_relu": lambda: F.leaky_relu(x()),
    "log_sigmoid_forward": lambda: F.logsigmoid(x()),
    "relu": lambda: F.relu(x()),
    "sigmoid": lambda: x().sigmoid(),
    "tanh": lambda: x().tanh(),
    "exp": lambda: x().exp(),
    "expm1": lambda: x().expm1(),
    "log": lambda: positive().log(),
    "log1p": lambda: positive().log1p(),
    "log2": lambda: positive().log2(),
    "sqrt": lambda: positive().sqrt(),
    "rsqrt": lambda: positive().rsqrt(),
    "reciprocal": lambda: positive().reciprocal(),
    "pow": lambda: positive().pow(2.5),
    "sin": lambda: x().sin(),
    "cos": lambda: x().cos(),
    "atan": lambda: x().atan(),
    "sinh": lambda: x().sinh(),
    "erf": lambda: x().erf(),
    "lgamma": lambda: positive().lgamma(),
    "digamma": lambda: (positive() + 2).digamma(),
    "add": lambda: x() + x(),
    "sub": lambda: x() - 0.1,
    "mul": lambda: x() * x(),
    "div": lambda: x() / positive(),
    "addcmul": lambda: torch.addcmul(x(), x(), x(), value=0.5),
    "addcdiv": lambda: torch.addcdiv(x(), x(), positive(), value=0.5),
    "lerp": lambda: torch.lerp(x(), x(), 0.3),
    "atan2": lambda: torch.atan2(x(), x()),
    "hypot": lambda: torch.hypot(x(), x()),
    "logaddexp": lambda: torch.logaddexp(x(), x()),
    "mse_loss": lambda: F.mse_loss(x(), x(), reduction="none"),
    "smooth_l1_loss": lambda: F.smooth_l1_loss(x(), x(), reduction="none"),
    "embedding": lambda: F.embedding(torch.arange(48), x()),
    "upsample_bilinear2d": lambda: F.interpolate(torch.randn(2, 4, 8, 8), scale_factor=2, mode="bilinear"),
    "avg_pool2d": lambda: F.avg_pool2d(torch.randn(2, 8, 16, 16), 2),
    "cat": lambda: torch.cat([x(), x()]),
    "_linalg_svd": lambda: torch.linalg.svd(torch.randn(24, 24)),
}


def scaled(found: Tensor) -> None:
    found.mul_(1.001)


def one_element(found: Tensor) -> None:
    found.view(-1)[found.abs().argmax()] *= 1.01


def one_tile(found: Tensor) -> None:
    flat = found.view(-1)
    size = flat.numel() // 8
    flat[size : 2 * size] = flat[:size].clone()


def truncated(found: Tensor) -> None:
    """To the next number toward zero, as if it had been cut to bfloat16."""
    found.copy_((found.view(torch.int32) & -65536).view(torch.float32))


FAULTS = (scaled, one_element, one_tile, truncated)


class Device(TorchDispatchMode):
    """Runs kernels as they are but one, whose first result it spoils."""

    def __init__(self, kernel: str, fault: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.kernel, self.fault, self.hits = kernel, fault, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") == self.kernel:
            first = found[0] if isinstance(found, tuple | list) else found
            if not first.is_contiguous():  # matrices of LAPACK lie by columns
                whole = first.contiguous()
                self.fault(whole)
                first.copy_(whole)
            else:
                self.fault(first)
            self.hits += 1
        return found


def test_a_wrong_kernel_of_sixty_operators_is_named_and_the_right_ones_are_not(tmp_path: Path) -> None:
    assert len(OPERATORS) >= 60
    missed, alarms = [], []
    for number, (kernel, run) in enumerate(OPERATORS.items()):
        fault = FAULTS[number % len(FAULTS)]
        for wrong in (fault, lambda found: None):
            torch.manual_seed(number)
            path = tmp_path / f"{kernel}.{wrong is fault}"
            with torch.no_grad(), Device(kernel, wrong) as device, ulpscope.ledger(path):
                run()
            assert device.hits == 1, kernel
            first = judge(read_ledger(ledger_path(path, 0))[1]).first
            if wrong is fault and (first is None or first.row.name != kernel):
                missed.append((kernel, fault.__name__))
            if wrong is not fault and first is not None:
                alarms.append((kernel, first.why))
    assert alarms == []
    assert len(missed) <= len(OPERATORS) // 20, missed
