"""Fused operators of an NPU: their definitions, `run_ut` and `check ops` on calls of them, and the judge on their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

import ulpscope
from msprobe_files import call, scalar, tensor, write_elements, write_json
from ulpscope.cli.blame import blame
from ulpscope.compat.msprobe.command import main as msprobe
from ulpscope.frameworks.torch.api_runner import ApiRunner
from ulpscope.frameworks.torch.fused_references import FUSED, FUSED_KERNELS
from ulpscope.replay.precheck import Plan, check_dump
from ulpscope.store.registry import open_dump

torch.manual_seed(0)
X, W, B = (
    torch.randn(2, 6, 8, dtype=torch.float64),
    torch.rand(8, dtype=torch.float64),
    torch.rand(8, dtype=torch.float64),
)
OPTIMIZED = torch.randn(3, 4, 5, dtype=torch.float64)


def adam(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two steps of torch's own; what the second one made of the state is to be the same."""
    value = torch.nn.Parameter(OPTIMIZED[0].clone())
    optimizer = kind([value], lr=0.1, betas=(0.9, 0.99), eps=1e-8, **options)  # type: ignore[call-arg]
    for grad in OPTIMIZED[1:]:
        value.grad = grad.clone()
        before = value.detach().clone(), *(optimizer.state[value].get(key) for key in ("exp_avg", "exp_avg_sq"))
        before = tuple(None if each is None else each.clone() for each in before)  # type: ignore[assignment]
        optimizer.step()
    return before, (value.detach(), optimizer.state[value]["exp_avg"], optimizer.state[value]["exp_avg_sq"])  # type: ignore[return-value]


def test_the_definitions_are_those_of_torch_where_torch_has_the_same() -> None:
    same = torch.testing.assert_close
    same(FUSED["npu_swiglu"](X), F.silu(X[..., :4]) * X[..., 4:])
    same(FUSED["npu_rms_norm"](X, W)[0], F.rms_norm(X, [8], W, 1e-6))
    same(FUSED["npu_mish"](X), F.mish(X))
    same(FUSED["npu_linear"](X, X[0], None), F.linear(X, X[0]))
    same(FUSED["npu_layer_norm_eval"](X, [8], W, B, 1e-5), F.layer_norm(X, [8], W, B))
    same(FUSED["npu_sort_v2"](X, 1, True), torch.sort(X, 1, True).values)
    same(FUSED["npu_confusion_transpose"](X, (0, 2, 1), (2, 48), True), X.permute(0, 2, 1).reshape(2, 48))
    same(FUSED["npu_confusion_transpose"](X, (1, 0), (2, 48), False), X.reshape(2, 48).t())
    out, mean, scale = FUSED["npu_group_norm_silu"](X.transpose(1, 2), W, B, 4)
    same(out, F.silu(F.group_norm(X.transpose(1, 2), 4, W, B)))
    expected = torch.ops.aten.native_group_norm(X.transpose(1, 2).contiguous(), W, B, 2, 8, 6, 4, 1e-5)
    same((mean, scale), expected[1:])
    mask = torch.rand(6, 8) < 0.5
    same(FUSED["npu_scaled_masked_softmax"](X, mask, 0.5), torch.softmax((X * 0.5).masked_fill(mask, -1e4), -1))
    # (x1 cos - x2 sin, x2 cos + x1 sin), by halves and by neighbours.
    cosine, sine = torch.cos(W).expand(8), torch.sin(W).expand(8)
    turned = FUSED["npu_rotary_mul"](X, cosine, sine)
    same(turned[..., 0], X[..., 0] * cosine[0] - X[..., 4] * sine[0])
    same(turned[..., 4], X[..., 4] * cosine[4] + X[..., 0] * sine[4])
    turned = FUSED["npu_rotary_mul"](X, cosine, sine, "interleave")
    same(turned[..., 0], X[..., 0] * cosine[0] - X[..., 1] * sine[0])
    same(FUSED["fast_gelu"](torch.tensor([0.0, 1e3, -1e3])), torch.tensor([0.0, 1e3, 0.0]))
    same(FUSED["fast_gelu"](X), X / (1 + torch.exp(-1.702 * X)))
    weights, experts, rows = FUSED["npu_moe_gating_top_k_softmax"](X[0], torch.tensor([True] + [False] * 5), k=2)
    same(weights, torch.softmax(X[0], -1).topk(2).values)
    assert experts[0].tolist() == [8, 8] and rows.tolist() == [[at, at + 6] for at in range(6)]


@pytest.mark.parametrize("maximize", [False, True])
def test_the_optimizers_are_those_of_torch(maximize: bool) -> None:
    grad = OPTIMIZED[2]
    before, after = adam(torch.optim.AdamW, weight_decay=0.02, maximize=maximize)
    found = FUSED["npu_apply_adam_w"](0.9, 0.99, 0.1, 0.02, 0.9, 0.99, 1e-8, grad, None, False, maximize, out=before)
    torch.testing.assert_close(found, after)
    before, after = adam(torch.optim.Adam, maximize=maximize)
    slope = -grad if maximize else grad
    # The powers are those of this step, and the smallest number is added to the root before it is corrected.
    found = FUSED["npu_apply_adam"](0.81, 0.9801, 0.1, 0.9, 0.99, 0.0, slope, False, False, out=before)
    torch.testing.assert_close(found, after, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("mode", [0, 2, 3, 4])
def test_attention_is_that_of_torch(layout: str, mode: int) -> None:
    q, k, v = (torch.randn(2, heads, length, 4, dtype=torch.float64) for heads, length in ((4, 5), (2, 7), (2, 7)))
    row, column = torch.arange(5).unsqueeze(1), torch.arange(7)
    keep = {
        0: torch.rand(5, 7) < 0.7,
        2: column <= row,
        3: column <= row + 2,
        4: (column - row - 2 <= 1) & (column - row - 2 >= -2),
    }[mode]
    keep[:, 0] = True if mode == 0 else keep[:, 0]
    split = {
        "BSH": lambda x: x.transpose(1, 2).flatten(2),
        "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
        "BSND": lambda x: x.transpose(1, 2),
        "BNSD": lambda x: x,
    }[layout]
    options: dict[str, Any] = {"atten_mask": ~keep, "sparse_mode": mode, "scale": 0.5}
    if mode == 4:
        options |= {"pre_tockens": 2, "next_tockens": 1}
    result, largest, total, *_ = FUSED["npu_fusion_attention"](split(q), split(k), split(v), 4, layout, **options)
    wide = [each.repeat_interleave(2, 1) for each in (k, v)]
    torch.testing.assert_close(result, split(F.scaled_dot_product_attention(q, *wide, attn_mask=keep, scale=0.5)))
    scores = (q @ wide[0].transpose(-1, -2) * 0.5).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(largest, scores.amax(-1, True).expand(2, 4, 5, 8))
    torch.testing.assert_close(largest[..., 0] + total[..., 0].log(), scores.logsumexp(-1))


@pytest.mark.parametrize(
    ("name", "given", "more"),
    [
        ("swiglu", [X], ()),
        ("rotary_mul", [X, W.expand(6, 8), B.expand(6, 8)], ("interleave",)),
        ("rms_norm", [X, W], ()),
        ("scaled_masked_softmax", [X], (torch.rand(6, 8) < 0.5, 0.5, False)),
        ("fast_gelu", [X], ()),
        ("mish", [X], ()),
        ("linear", [X, X[0].clone()], ()),
    ],
)
def test_the_backwards_are_the_slopes_of_the_definitions(name: str, given: list[torch.Tensor], more: Any) -> None:
    inputs = [each.clone().requires_grad_() for each in given]
    result = FUSED[f"npu_{name}"](*inputs, *more)
    first = result[0] if isinstance(result, tuple) else result
    grad = torch.randn_like(first)
    expected = torch.autograd.grad(first, inputs, grad)
    kept = {"rms_norm": [*given, result[1]], "scaled_masked_softmax": [first]}.get(name, given)
    with torch.no_grad():
        found = FUSED_KERNELS[f"npu_{name}_backward"](grad, *(each.detach() for each in kept), *more)
    torch.testing.assert_close(found if isinstance(found, tuple) else (found,), expected)


def wrong(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return FUSED["npu_swiglu"](x, dim) * 1.01  # type: ignore[no-any-return]


@pytest.fixture(params=[False, True])
def kernel(request: pytest.FixtureRequest) -> Iterator[bool]:
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("npu_swiglu(Tensor self, int dim=-1) -> Tensor")
    library.impl("npu_swiglu", wrong if request.param else FUSED["npu_swiglu"], "CPU")
    yield request.param
    library._destroy()


def test_the_judge_knows_what_a_fused_kernel_should_give(tmp_path: Path, kernel: bool) -> None:
    with ulpscope.ledger(tmp_path):
        torch.ops.npu.npu_swiglu(torch.randn(16, 32), -1)
    done = CliRunner().invoke(blame, [str(tmp_path)])
    assert done.exit_code == (1 if kernel else 0), done.output
    assert "npu_swiglu" in done.output or not kernel


HALF, FULL = {"dtype": "torch.float16"}, {"requires_grad": True}
CALLS = {
    "NPU.npu_swiglu.0.forward": call([tensor(shape=(4, 8), **FULL)], [tensor(shape=(4, 4))]),
    "NPU.npu_rms_norm.0.forward": call(
        [tensor(shape=(4, 8), **HALF), tensor(shape=(8,), **HALF)], [tensor(shape=(4, 8), **HALF), tensor(shape=(4, 1))]
    ),
    "NPU.fast_gelu.0.forward": call([tensor(shape=(4, 8), **HALF)], [tensor(shape=(4, 8), **HALF)]),
    "NPU.npu_fusion_attention.0.forward": call(
        [*[tensor(shape=(2, 4, 8))] * 3, scalar(2), scalar("BSH")], [tensor(shape=(2, 4, 8))], {"scale": scalar(0.5)}
    ),
    "NPU.npu_apply_adam.0.forward": call(
        [*map(scalar, (0.9, 0.99, 0.1, 0.9, 0.99, 1e-8)), tensor(), scalar(False), scalar(False)],
        [tensor()] * 3,
        {"out": [tensor(), tensor(), tensor(2.0, 0.0)]},
    ),
    "NPU.npu_swiglu.0.backward": {"input": [tensor(shape=(4, 4))], "output": [tensor(shape=(4, 8))]},
}


def test_run_ut_runs_them_forward_and_backward(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rank0", CALLS)
    assert msprobe(["-f", "pytorch", "run_ut", "-api_info", str(path), "-o", str(tmp_path)]) == 0
    (result,) = tmp_path.glob("accuracy_checking_result_*.csv")
    rows = [line.split(",") for line in result.read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == [name.removesuffix(".forward") for name in CALLS if name.endswith("forward")]
    assert {row[1] for row in rows} == {"pass"}
    assert rows[0][2] == "pass"


def test_check_ops_does_not_call_clean_what_no_device_has_run(tmp_path: Path) -> None:
    """Statistics alone say nothing of an operator that this machine does not have; recorded results do."""
    write_json(tmp_path / "statistics", CALLS)
    found = list(check_dump(open_dump(tmp_path / "statistics"), Plan(ApiRunner(recorded=True))))
    assert {each.message for each in found if "swiglu" in each.name} == {
        "not run again: there is no NPU here to run npu_swiglu; record it with its tensors"
    }
    x = torch.randn(4, 8, dtype=torch.float32)
    for factor, words in ((1.0, "pass"), (1.01, "error")):
        values = {("input", 0): x.numpy(), ("output", 0): (FUSED["npu_swiglu"](x) * factor).numpy()}
        folder = tmp_path / words
        write_elements(folder, {"NPU.npu_swiglu.0": values})
        (one,) = check_dump(open_dump(folder), Plan(ApiRunner(recorded=True)))
        assert one.forward.value == words
