"""Large calls are replayed in pieces: the same scores as of the whole call, and the same place of an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ulpscope.frameworks.torch import replay_pieces
from ulpscope.frameworks.torch.devices import environment
from ulpscope.frameworks.torch.replay_measure import measures, rounded_factors
from ulpscope.frameworks.torch.replay_pieces import cut
from ulpscope.frameworks.torch.replay_reference import outputs, plan_of
from ulpscope.frameworks.torch.replay_score import rounded_score
from ulpscope.frameworks.torch.replay_values import mapped_args
from ulpscope.frameworks.torch.settings import float32_products

aten = torch.ops.aten
Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attention_backward() -> Arguments:
    q, k, v = normal(2, 4, 8, 16), normal(2, 2, 8, 16), normal(2, 2, 8, 17)[..., :16]
    out, total = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return kernel, (normal(2, 4, 8, 16), q, k, v, out, total, 0.0, True), {}


TARGET = torch.arange(40) % 7
CALLS: dict[str, Callable[[], Arguments]] = {
    "mm by rows": lambda: (aten.mm.default, (normal(64, 20), normal(20, 16)), {}),
    "mm by columns": lambda: (aten.mm.default, (normal(16, 20), normal(20, 64)), {}),
    "addmm": lambda: (aten.addmm.default, (normal(64), normal(16, 20), normal(20, 64)), {}),
    "addmm of rows": lambda: (aten.addmm.default, (normal(64, 16), normal(64, 20), normal(20, 16)), {"beta": 2}),
    "bmm": lambda: (aten.bmm.default, (normal(8, 4, 5), normal(8, 5, 6)), {}),
    "embedding_dense_backward": lambda: (
        aten.embedding_dense_backward.default,
        (normal(40, 32), TARGET, 7, -1, False),
        {},
    ),
    "nll_loss_forward": lambda: (aten.nll_loss_forward.default, (normal(40, 7), TARGET, None, 1, 3), {}),
    "nll_loss_backward": lambda: (
        aten.nll_loss_backward.default,
        (normal(1)[0], normal(40, 7), TARGET, None, 1, 3, torch.tensor(34.0)),
        {},
    ),
    "add_": lambda: (aten.add_.Tensor, (normal(32, 16), normal(32, 16)), {"alpha": -0.1}),
    "mul of a row": lambda: (aten.mul.Tensor, (normal(32, 16), normal(16)), {}),
    "softmax": lambda: (aten._softmax.default, (normal(32, 16), 1, False), {}),
    "convolution": lambda: (
        aten.convolution.default,
        (normal(6, 3, 8, 8), normal(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
    ),
    "attention": lambda: (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (normal(2, 4, 8, 16), normal(2, 4, 8, 16), normal(2, 4, 8, 16)),
        {},
    ),
    "attention with a mask": lambda: (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (normal(1, 4, 8, 16), normal(1, 4, 8, 16), normal(1, 4, 8, 16)),
        {"attn_mask": normal(1, 1, 8, 8)},
    ),
    "attention backward, shared keys": attention_backward,
    "foreach": lambda: (aten._foreach_mul.List, ([normal(9, 9), normal(50)], [normal(9, 9), normal(50)]), {}),
    "foreach in place": lambda: (aten._foreach_add_.Scalar, ([normal(9, 9), normal(50)], 0.3), {}),
}


def call(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]:
    kernel, args, kwargs = CALLS[name]()
    plan = plan_of(kernel)
    before = mapped_args(lambda item: item.clone() if isinstance(item, Tensor) else item, args)
    found = outputs(plan, args, kwargs, kernel(*args, **kwargs))
    return plan, before, kwargs, found


@pytest.mark.parametrize("name", CALLS)
def test_pieces_have_the_scores_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, args, kwargs, found = call(name)
    whole = measures(plan, args, kwargs, found)
    monkeypatch.setattr(replay_pieces, "CHUNK", 48)
    assert cut(plan, args, kwargs, found) is not None
    pieces = measures(plan, args, kwargs, found)
    assert [each["place"] for each in pieces] == [each["place"] for each in whole]
    for piece, one in zip(pieces, whole, strict=True):
        # The scale of fused kernels is found by random moves: it is no exact number.
        near = 1.0 if plan.kind == "other" else 1e-6
        assert piece["shape"] == one["shape"]
        assert piece["rms"] == pytest.approx(one["rms"], rel=near)
        assert piece["worst"] == pytest.approx(one["worst"], rel=3 * near)
        assert piece.get("size", 0.0) == pytest.approx(one.get("size", 0.0))


@pytest.mark.parametrize("name", [name for name in CALLS if "nll_loss_forward" not in name])
def test_a_wrong_element_has_its_place_in_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, args, kwargs, found = call(name)
    last = [item for item in found if isinstance(item, Tensor)][-1]
    last[(-1,) * last.dim()] = 50.0
    monkeypatch.setattr(replay_pieces, "CHUNK", 48)
    measure = measures(plan, args, kwargs, found)[-1]
    assert measure["worst"] > 1e4
    assert measure["profile"]["worst_at"] == [length - 1 for length in last.shape]


def test_a_loss_is_replayed_on_the_elements_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, args, kwargs, found = call("nll_loss_forward")
    found[0] = found[0] + 1
    monkeypatch.setattr(replay_pieces, "CHUNK", 48)
    loss, weight = measures(plan, args, kwargs, found)
    assert loss["worst"] > 1e4
    assert weight["worst"] == 0


def test_few_distinct_elements_lean_by_chance_however_often_they_occur() -> None:
    values = torch.tensor([1.2, 1.4], dtype=torch.float64).repeat(1500)
    lean = rounded_score(values.half(), values, None, dtype=torch.float16, working=False)
    # In units, 1.2 is off by 0.33 and 1.4 by 0.57: two errors, not three thousand.
    assert 0.3 < abs(lean["toward"]) < 2 * lean["spread"]


def test_what_underflows_inside_a_fused_kernel_in_float16_is_rounding() -> None:
    kernel, (grad, *rest), kwargs = attention_backward()
    args = ((grad * 1e-6).half(), *(each.half() if isinstance(each, Tensor) else each for each in rest))
    args = (*args[:5], rest[4], *args[6:])
    plan = plan_of(kernel)
    found = outputs(plan, args, kwargs, kernel(*args, **kwargs))
    found[0] = found[0] + 8 * torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    assert measures(plan, args, kwargs, found)[0]["rms"] < 1.5
    found[0] = found[0] + 1e-4
    assert measures(plan, args, kwargs, found)[0]["rms"] > 10


def test_a_number_added_to_multiples_of_the_last_digit_has_one_error() -> None:
    # Between one half and one the last digit of float16 is 2**-11: all of these are off by the same 1e-4.
    values = 0.5 + torch.arange(1000, dtype=torch.float64) * 2.0**-11 + 1e-4
    lean = rounded_score(values.half(), values, None, dtype=torch.float16, working=False)
    assert abs(lean["toward"]) > 0.2
    assert abs(lean["toward"]) < 6 * lean["spread"]


def test_a_list_of_plain_values_does_not_cut_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_pieces, "CHUNK", 48)
    x, grad = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    _, mean, scale = aten.native_batch_norm(x, torch.ones(3), None, None, None, True, 0.1, 1e-5)
    kernel = aten.native_batch_norm_backward.default
    args = (grad, x, torch.ones(3), None, None, mean, scale, True, 1e-5, [True, True, True])
    plan = plan_of(kernel)
    found = measures(plan, args, {}, outputs(plan, args, {}, kernel(*args)))
    assert [measure["place"] for measure in found] == [0, 1, 2]
    assert max(measure["rms"] for measure in found) < 16


def test_gradients_of_a_convolution_know_how_many_terms_they_have() -> None:
    x, weight, grad = torch.randn(2, 3, 8, 8), torch.randn(6, 3, 5, 5), torch.randn(2, 6, 8, 8)
    plan = plan_of(aten.convolution_backward.default)
    args = (grad, x, weight, [6], [1, 1], [2, 2], [1, 1], False, [0, 0], 1, [True] * 3)
    found = measures(plan, args, {}, outputs(plan, args, {}, plan.func(*args)))
    assert [measure["terms"] for measure in found] == [6 * 5 * 5, 2 * 8 * 8, 2 * 8 * 8]


def test_norms_of_a_list_are_sums() -> None:
    values = [torch.rand(1 << 16), torch.rand(100)]
    plan = plan_of(aten._foreach_norm.Scalar)
    assert plan.kind == "other"
    found = measures(plan, (values, 2), {}, outputs(plan, (values, 2), {}, plan.func(values, 2)))
    assert [measure["terms"] for measure in found] == [1 << 16, 1 << 16]


def test_factors_that_may_be_rounded_have_units_of_their_own() -> None:
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    short = [(each.view(torch.int32) & -(1 << 13)).view(torch.float32) for each in (a, b)]
    plan, product = plan_of(aten.mm.default), short[0] @ short[1]
    assert measures(plan, (a, b), {}, [product])[0]["rms"] > 1000
    rounded = measures(plan, (a, b), {}, [product], factors="tf32")[0]
    assert (rounded["dtype"], rounded["rms"] < 1.5) == ("tf32 factors", True)
    assert measures(plan, (a, b), {}, [product * 1.01], factors="tf32")[0]["rms"] > 1.5
    low = measures(plan, (a.half(), b.half()), {}, [a.half() @ b.half()], factors="tf32")[0]
    assert low["dtype"] == "float16"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_factors_are_rounded_to_is_what_the_program_allows(device: str) -> None:
    backend = torch.backends.mkldnn if device == "cpu" else torch.backends.cuda
    before = backend.matmul.fp32_precision
    try:
        backend.matmul.fp32_precision = "tf32"
        products = float32_products()
    finally:
        backend.matmul.fp32_precision = before
    assert rounded_factors(plan_of(aten.mm.default), device, products) == "tf32"
    assert rounded_factors(plan_of(aten.mul.Tensor), device, products) is None
    assert rounded_factors(plan_of(aten.mm.default), device, float32_products()) is None
    assert environment()["flags"]["float32_products"] == float32_products()
