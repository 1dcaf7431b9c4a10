"""Right kernels that look wrong to a judge that does not compute as torch does: nobody is accused, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ulpscope
from ulpscope.analyze.ledger import Judgement, judge
from ulpscope.store.ledger_file import ledger_path, read_ledger


def judged(path: Path, run: Callable[[], object]) -> Judgement:
    with ulpscope.ledger(path):
        run()
    return judge(read_ledger(ledger_path(path, 0))[1])


def in_place() -> None:
    x = torch.rand(8)
    x *= x
    x.add_(x).div_(x)
    x -= x
    torch._foreach_mul_([x], [x])
    a = torch.randn(4, 4)
    torch.mm(a, a, out=torch.empty(4, 4))
    torch.mul(a, a, out=a)


def with_numbers() -> None:
    torch.tensor([0.1000001, 0.2, 0.3, 0.100001]) - 0.1
    torch.tensor([0.1000001, 0.2], dtype=torch.bfloat16) - 0.1
    torch.tensor([0.1000001, 0.2]) - torch.tensor(0.1, dtype=torch.float64)
    torch.baddbmm(torch.randn(4, 8, 8), torch.randn(4, 8, 16), torch.randn(4, 16, 8), beta=0.2, alpha=0.6)


def small_rows() -> None:
    x = torch.randn(100, 200) * 30
    x[3] *= 1e-28
    y = torch.randn(200, 200)
    y[:, 7] *= 1e-20
    torch.mm(x, y)
    a = torch.zeros(64, 256)
    a[:, 0], a[:, 1] = 1.0, 1e-30
    b = torch.zeros(256, 64)
    b[0], b[1] = 1e-30, 1.0
    torch.mm(a, b)


def not_unique() -> None:
    torch.manual_seed(0)
    same = torch.eye(5) + torch.ones(5, 5)
    for matrix in (torch.randn(5, 5), same, torch.randn(3, 6, 4)):
        torch.linalg.svd(matrix)
        torch.linalg.svd(matrix, full_matrices=False)
        torch.linalg.qr(matrix)
        torch.linalg.lu(matrix)
        torch.linalg.lu_factor_ex(matrix)
    torch.linalg.eigh(same)
    torch.linalg.eigh(same, UPLO="U")


def jumps() -> None:
    x = torch.randn(20, 20).bfloat16() * 10
    y = (torch.rand(20, 20) + 0.1).bfloat16()
    torch.div(x, y, rounding_mode="floor")
    torch.div(x, y, rounding_mode="trunc")
    torch.remainder(x, y)
    torch.nextafter(x, y)
    torch.linspace(-2, 3, 50, dtype=torch.bfloat16)
    for mode in ("bilinear", "nearest"):
        grid = (torch.rand(2, 9, 9, 2) * 2 - 1).bfloat16()
        nn.functional.grid_sample(torch.randn(2, 3, 8, 8).bfloat16(), grid, mode=mode, align_corners=False)


def few_elements() -> None:
    for _ in range(300):
        torch.rand(2).sqrt().rsqrt()


def quick_functions() -> None:
    x = torch.linspace(-95, 0, 2000)
    x.sigmoid(), nn.functional.silu(x), nn.functional.mish(x)
    (torch.randn(2000) * 1e-4).bfloat16().erf()


def one_rounding_for_all() -> None:
    x = nn.functional.layer_norm(torch.randn(700, 32), (32,))
    nn.functional.layer_norm(x, (32,))
    nn.BatchNorm1d(256, 0.8).eval()(torch.randn(64, 256))
    for _ in range(20):
        nn.BatchNorm2d(64)(torch.randn(4, 64, 8, 8) * 0.2)


@torch.enable_grad()
def a_scale_that_is_too_large() -> None:
    """The first steps of a scaler of gradients in float16: they overflow, and are left out."""
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1)
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(torch.randn(32, 64) * 3), torch.arange(32) % 10)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    "run",
    [
        a_scale_that_is_too_large,
        in_place,
        with_numbers,
        small_rows,
        not_unique,
        jumps,
        few_elements,
        quick_functions,
        one_rounding_for_all,
    ],
)
def test_nobody_is_accused(run: Callable[[], None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        found = judged(tmp_path, run)
    assert [(each.row.op, each.why) for each in found.findings] == []
    assert not found.unknown, found.unknown


class Device(TorchDispatchMode):
    """A device of which one result of one kernel is a thousandth too large."""

    def __init__(self, kernel: str, place: int) -> None:
        super().__init__()
        self.kernel, self.place = kernel, place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self.kernel in str(func):
            found[self.place].mul_(1.001)
        return found


@pytest.mark.parametrize(
    ("name", "place"), [("svd", 0), ("svd", 1), ("svd", 2), ("qr", 0), ("qr", 1), ("eigh", 1), ("lu", 1)]
)
def test_a_factor_that_does_not_give_the_matrix_is_named(name: str, place: int, tmp_path: Path) -> None:
    with torch.no_grad(), Device(f"linalg_{name}", place):
        found = judged(tmp_path, lambda: getattr(torch.linalg, name)(torch.eye(6) + torch.randn(6, 6)))
    assert found.first is not None
    assert f"linalg_{name}" in found.first.row.op


def test_large_products_leave_their_factors_as_they_were(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a, b = torch.randn(64, 256).to(dtype), torch.randn(256, 256).to(dtype)
        a[:, 0] *= 1e-30
        b[0] *= 1e-30
        before = a.clone(), b.clone()
        judged(tmp_path / str(dtype), lambda a=a, b=b: torch.mm(a, b))  # type: ignore[misc]
        assert torch.equal(a, before[0])
        assert torch.equal(b, before[1])


def test_a_pole_that_is_masked_is_a_remark_with_its_reader(tmp_path: Path) -> None:
    def masked() -> None:
        x = torch.tensor([2.0, 0.0, 4.0])
        inverse = x.pow(-0.5)
        torch.where(inverse.isinf(), 0.0, inverse)

    found = judged(tmp_path, masked)
    assert found.first is None
    assert found.counts["on purpose"] == 1
    assert found.remarks[0].why.startswith("1 value is infinite, made from numbers: in float64 too")
    assert "masked by Torch.where.0.forward" in found.remarks[0].why


@pytest.mark.parametrize("reaches", ["weight", "loss", "result"])
def test_what_is_no_number_is_a_finding_where_it_reaches_something(reaches: str, tmp_path: Path) -> None:
    def run() -> None:
        weight = nn.Parameter(torch.tensor([2.0, 1.0]))
        wrong = (weight - 3).log()
        if reaches == "weight":
            with torch.no_grad():
                weight += wrong
        elif reaches == "loss":
            wrong.sum().backward()

    found = judged(tmp_path, run)
    assert found.first is not None
    assert (found.first.row.op, found.first.verdict.value) == ("aten.log.default", "on purpose")
    words = {"weight": "the weight", "loss": "a loss", "result": "what the program is left with"}
    assert f"it reaches {words[reaches]}" in found.first.why


def test_a_loss_that_overflows_float16_inside_is_a_range_that_is_too_small(tmp_path: Path) -> None:
    x = torch.tensor([-20.0, 1.0], dtype=torch.float16)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.soft_margin_loss(x, torch.ones_like(x))

    found = judged(tmp_path, lambda: Model()(x))
    assert [each.why for each in found.findings] == []
    assert "beyond what float16 can hold" in found.remarks[0].why
