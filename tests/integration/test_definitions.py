"""Definitions of fused kernels against torch: its own kernels in float64, or autograd through its plain operations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ulpscope.analyze.ledger import judge
from ulpscope.frameworks.torch.replay_definitions import DEFINITIONS
from ulpscope.frameworks.torch.replay_measure import measures
from ulpscope.frameworks.torch.replay_reference import outputs, plan_of
from ulpscope.store.ledger_file import row_of

aten = torch.ops.aten


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def state(lists: int) -> list[list[Tensor]]:
    return [[numbers(3, 4, seed=10 * at).abs(), numbers(5, seed=10 * at + 1).abs()] for at in range(lists)]


@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
@pytest.mark.parametrize(("amsgrad", "maximize", "scaled"), list(itertools.product([False, True], repeat=3)))
def test_fused_adam_is_what_torch_computes(name: str, amsgrad: bool, maximize: bool, scaled: bool) -> None:
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.2, "eps": 1e-3}
    options |= {"amsgrad": amsgrad, "maximize": maximize, "grad_scale": torch.tensor(4.0) if scaled else None}

    def run(kernel: Any) -> list[list[Tensor]]:
        params, grads, averages, squares, largest = lists = state(5)
        steps = [torch.tensor(step, dtype=torch.float64) for step in (3.0, 7.0)]
        kernel(params, grads, averages, squares, largest if amsgrad else [], steps, **options)
        return lists

    for found, expected in zip(run(DEFINITIONS[name]), run(getattr(aten, f"{name}_").default), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("nesterov", "first", "maximize"), list(itertools.product([False, True], repeat=3)))
def test_fused_sgd_is_what_torch_computes(nesterov: bool, first: bool, maximize: bool) -> None:
    options = {"weight_decay": 0.2, "momentum": 0.9, "lr": 0.1, "dampening": 0.0 if nesterov else 0.3}
    options |= {"nesterov": nesterov, "maximize": maximize, "is_first_step": first}

    def run(kernel: Any) -> list[list[Tensor]]:
        lists = state(3)
        kernel(*lists, **options)
        return lists

    for found, expected in zip(run(DEFINITIONS["_fused_sgd"]), run(aten._fused_sgd_.default), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_step_with_an_infinite_gradient_is_skipped() -> None:
    lists = state(3)
    before = [[item.clone() for item in each] for each in lists]
    options = {"weight_decay": 0.2, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False}
    options |= {"maximize": False, "is_first_step": False, "found_inf": torch.ones(())}
    DEFINITIONS["_fused_sgd"](*lists, **options)
    for each, kept in zip(lists, before, strict=True):
        torch.testing.assert_close(each, kept, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_gradients_of_attention_are_those_of_autograd(causal: bool, biased: bool) -> None:
    if causal and biased:
        pytest.skip("torch refuses both")
    q, k, v = numbers(2, 4, 6, 8), numbers(2, 2, 6, 8, seed=1), numbers(2, 2, 6, 8, seed=2)
    bias = numbers(2, 4, 6, 6, seed=3) if biased else None
    leaves = [leaf.requires_grad_() for leaf in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=bias, is_causal=causal, enable_gqa=True)
    grad = numbers(2, 4, 6, 8, seed=4)
    expected = torch.autograd.grad(out, leaves, grad)
    q, k, v, out = (each.detach() for each in (q, k, v, out))
    forward = DEFINITIONS["_scaled_dot_product_efficient_attention"](q, k, v, bias, True, 0.0, causal)[0]
    torch.testing.assert_close(forward, out)
    kept = (grad, q, k, v)
    efficient = DEFINITIONS["_scaled_dot_product_efficient_attention_backward"]
    found = efficient(*kept, bias, out, None, None, None, 0.0, [True] * 3 + [False], causal)
    torch.testing.assert_close(tuple(found[:3]), expected)
    cudnn = DEFINITIONS["_scaled_dot_product_cudnn_attention_backward"]
    found = cudnn(*kept, out, None, None, None, bias, None, None, 6, 6, 0.0, causal)
    torch.testing.assert_close(tuple(found), expected)
    if not biased:
        total = DEFINITIONS["_scaled_dot_product_flash_attention"](q, k, v, 0.0, causal)[1]
        flash = DEFINITIONS["_scaled_dot_product_flash_attention_backward"]
        found = flash(*kept, out, total, None, None, 6, 6, 0.0, causal, None, None)
        torch.testing.assert_close(tuple(found), expected)


def test_the_backward_of_attention_takes_what_the_forward_had_rounded() -> None:
    # Nearly equal values: what is left of them is of the size of the rounding of `out`.
    q, k = (numbers(1, 2, 64, 16, seed=seed).mul(0.1).bfloat16() for seed in (0, 1))
    v = (1 + 0.01 * numbers(1, 2, 64, 16, seed=2)).bfloat16()
    grad = numbers(1, 2, 64, 16, seed=3).bfloat16()
    out, total = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (grad, q, k, v, out, total, 0.0, True)
    plan = plan_of(kernel)
    found = outputs(plan, args, {}, kernel(*args))
    assert max(measure["rms"] for measure in measures(plan, args, {}, found)) < 1.5
    assert measures(plan, args, {}, [*found[:2], found[2] * 1.05])[2]["rms"] > 1.5


@pytest.mark.parametrize(("beta2", "named"), [(float(torch.tensor(0.999, dtype=torch.float32)), False), (0.9991, True)])
def test_a_beta_that_is_rounded_first_is_no_fault_and_another_one_is(beta2: float, named: bool) -> None:
    # 1 - 0.999 of the rounded number is off by 216 units of float32, the same for all elements.
    options = {"lr": 0.1, "beta1": 0.9, "weight_decay": 0.2, "eps": 1e-3, "amsgrad": False, "maximize": False}
    lists = [[item.float() for item in each] for each in ([numbers(40, 30, seed=at)] for at in range(4))]
    lists[3] = [torch.zeros(40, 30)]
    steps = [torch.tensor(1.0)]
    before = [[item.clone() for item in each] for each in lists]
    kernel = aten._fused_adamw_.default
    kernel(*lists, [], steps, **options, beta2=beta2)
    plan = plan_of(kernel)
    args, kwargs = (*before, [], steps), {**options, "beta2": 0.999}
    found = measures(plan, args, kwargs, outputs(plan, (*lists, [], steps), kwargs, None))
    row = {"seq": 0, "step": 0, "rank": 0, "phase": "optimizer", "op": plan.op, "dtypes": "", "index": 0}
    judgement = judge([row_of({**row, "kind": plan.kind, "measures": found})])
    assert (judgement.first is not None) is named
