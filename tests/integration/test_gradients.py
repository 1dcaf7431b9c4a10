"""Gradients of a call are those that the call itself produced, checked against autograd asked directly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ulpscope
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Phase
from ulpscope.store.dump import Dump


def gradients(dump: Dump, name: str) -> dict[str, np.ndarray]:
    call = dump.call(name)
    return {slot_text(value.slot): dump.load(value) for value in call.values}


def recorded(path: Path, program: Callable[[], None], level: str = "op") -> Dump:
    with ulpscope.capture(path, level=level, tensors=True):
        program()
    return ulpscope.open_dump(path)


@pytest.fixture
def leaf() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, requires_grad=True)


def test_a_linear_of_three_dimensions_has_the_gradients_of_its_weight_and_input(tmp_path, leaf) -> None:
    x, weight, bias = leaf(2, 3, 4), leaf(5, 4), leaf(5)
    upstream = torch.randn(2, 3, 5)
    dump = recorded(tmp_path, lambda: F.linear(x, weight, bias).backward(upstream))
    expected = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), upstream)
    found = gradients(dump, "Functional.linear.0.backward")
    assert np.array_equal(found["input.0"], upstream.numpy())
    for slot, grad in zip(("output.0", "output.1", "output.2"), expected, strict=True):
        assert np.array_equal(found[slot], grad.numpy())


def test_a_matmul_of_more_than_two_dimensions_has_both_gradients(tmp_path, leaf) -> None:
    left, right = leaf(2, 3, 4), leaf(4, 5)
    dump = recorded(tmp_path, lambda: torch.matmul(left, right).sum().backward())
    expected = torch.autograd.grad(torch.matmul(left, right).sum(), (left, right))
    found = gradients(dump, "Torch.matmul.0.backward")
    assert np.array_equal(found["output.0"], expected[0].numpy())
    assert np.array_equal(found["output.1"], expected[1].numpy())


def test_the_gradient_of_an_input_is_the_part_this_call_produced_not_the_sum_of_all(tmp_path, leaf) -> None:
    x = leaf(4)
    y = x * 1.0

    def program() -> None:
        (torch.sin(y) + torch.exp(y)).sum().backward()

    dump = recorded(tmp_path, program)
    assert np.array_equal(gradients(dump, "Torch.sin.0.backward")["output.0"], torch.cos(y).detach().numpy())
    assert np.array_equal(gradients(dump, "Torch.exp.0.backward")["output.0"], torch.exp(y).detach().numpy())


def test_an_input_used_twice_by_one_call_keeps_both_gradients_apart(tmp_path, leaf) -> None:
    x = leaf(3)
    dump = recorded(tmp_path, lambda: torch.mul(x, x).sum().backward())
    found = gradients(dump, "Torch.mul.0.backward")
    assert np.array_equal(found["output.0"], x.detach().numpy())
    assert np.array_equal(found["output.1"], x.detach().numpy())


def test_an_in_place_call_has_the_gradient_of_what_it_overwrote(tmp_path, leaf) -> None:
    x = leaf(5)

    def program() -> None:
        y = x * 2.0
        y.mul_(3.0)
        F.relu(y, inplace=True).sum().backward()

    dump = recorded(tmp_path, program)
    positive = (x > 0).numpy().astype(np.float32)
    assert np.array_equal(gradients(dump, "Functional.relu.0.backward")["output.0"], positive)
    assert np.array_equal(gradients(dump, "Tensor.mul_.0.backward")["output.0"], 3 * positive)


def test_a_write_into_a_view_keeps_its_gradients(tmp_path, leaf) -> None:
    x = leaf(4)

    def program() -> torch.Tensor:
        y = x * 1.0
        y[1:3].mul_(10.0)
        y.sum().backward()
        return x.grad

    with ulpscope.capture(tmp_path, level="op", tensors=True):
        program()
    assert x.grad.tolist() == [1.0, 10.0, 10.0, 1.0]


def test_several_outputs_have_a_gradient_each(tmp_path, leaf) -> None:
    x = leaf(6)

    def program() -> None:
        first, second, third = torch.split(x, 2)
        (first.sum() + (second * 5).sum() + (third * 0.5).sum()).backward()

    found = gradients(recorded(tmp_path, program), "Torch.split.0.backward")
    assert found["input.1"].tolist() == [5.0, 5.0]
    assert found["output.0"].tolist() == [1.0, 1.0, 5.0, 5.0, 0.5, 0.5]


def test_a_module_that_uses_its_input_twice_gets_the_sum(tmp_path, leaf) -> None:
    class Residual(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x)

    x = leaf(4)
    model = Residual()
    dump = recorded(tmp_path, lambda: model(x * 1.0).sum().backward(), level="module")
    expected = 1 + (1 - torch.tanh(x.detach()) ** 2)
    assert np.allclose(gradients(dump, "Module.Residual.backward.0")["output.0"], expected.numpy(), rtol=1e-6)


def test_a_module_that_returns_its_input_has_a_backward(tmp_path, leaf) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.0).eval(), torch.nn.Linear(4, 1))
    dump = recorded(tmp_path, lambda: model(leaf(2, 4)).sum().backward(), level="module")
    found = gradients(dump, "Module.1.Dropout.backward.0")
    assert np.array_equal(found["input.0"], found["output.0"])
    assert np.array_equal(found["input.0"], gradients(dump, "Module.2.Linear.backward.0")["output.0"])


def test_a_second_backward_through_the_same_graph_is_a_record_of_its_own(tmp_path, leaf) -> None:
    x = leaf(3)

    def program() -> None:
        y = torch.exp(x)
        y.sum().backward(retain_graph=True)
        (y * 2).sum().backward()

    dump = recorded(tmp_path, program)
    once = gradients(dump, "Torch.exp.0.backward")["input.0"]
    again = gradients(dump, "Torch.exp.0.backward~1")["input.0"]
    assert np.array_equal(again, 2 * once)


def test_calls_inside_a_custom_function_are_seen_forward_and_backward(tmp_path, leaf) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.square(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return torch.mul(grad, 2 * x)

    x = leaf(3)
    dump = recorded(tmp_path, lambda: Square.apply(x).sum().backward())
    assert np.array_equal(gradients(dump, "Torch.mul.0.forward")["output.0"], 2 * x.detach().numpy())
    assert dump.call("Torch.square.0.forward")


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_calls_are_marked(tmp_path, leaf, reentrant: bool) -> None:
    x = leaf(3)

    def program() -> None:
        y = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(torch.sin(t)), x * 1.0, use_reentrant=reentrant)
        y.sum().backward()

    dump = recorded(tmp_path, program)
    marks = [call.recomputed for call in dump.calls() if call.id.name == "tanh" and call.id.phase.value == "forward"]
    assert marks == [False, True]


def test_a_parameter_gradient_holds_what_was_accumulated(tmp_path, leaf) -> None:
    model = torch.nn.Linear(3, 2)

    def program() -> None:
        for _ in range(2):
            model(leaf(4, 3)).sum().backward()

    dump = recorded(tmp_path, program, level="module")
    first = gradients(dump, "Module.Linear.parameters_grad.0")["parameters.bias"]
    second = gradients(dump, "Module.Linear.parameters_grad.1")["parameters.bias"]
    assert (first.tolist(), second.tolist()) == ([4.0, 4.0], [8.0, 8.0])


def test_a_backward_after_stop_is_not_lost_silently(tmp_path, leaf, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ulpscope")
    capture = ulpscope.Capture(tmp_path, level="op")
    capture.start()
    loss = (leaf(3) * 2).sum()
    capture.stop()
    loss.backward()
    capture.close()
    assert "a backward pass ran after stop()" in caplog.text


def test_a_chain_of_fifty_thousand_calls_is_freed_without_overflowing_the_stack(tmp_path: Path) -> None:
    program = """
import sys, torch, ulpscope
x = torch.ones(4, requires_grad=True)
with ulpscope.capture(sys.argv[1], sketch=False, stacks=False) as capture:
    y = x
    for _ in range(50_000):
        y = torch.sin(y)
    loss = y.sum()
    loss.backward()
    capture.step()
    del y, loss
    y = x
    for _ in range(50_000):
        y = torch.cos(y)
    del y
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr
    assert len(ulpscope.open_dump(tmp_path)) > 100_000


def test_hooks_of_the_program_are_put_where_torch_puts_them(tmp_path: Path) -> None:
    function = torch.autograd.Function
    before, code = dict(vars(function)), function._register_hook.__code__
    x = torch.ones(3, requires_grad=True)
    seen: list[str] = []
    with ulpscope.capture(tmp_path / "run", level="op"):
        y = (x * 2).sum()
        kept = y.grad_fn.register_hook(lambda *_: seen.append("after"))
        dropped = y.grad_fn.register_hook(lambda *_: seen.append("never"))
        y.grad_fn.register_prehook(lambda *_: seen.append("before"))
        dropped.remove()
        y.backward()
        kept.remove()
        assert dict(vars(function)) == before
    assert seen == ["before", "after"]
    assert dict(vars(function)) == before and function._register_hook.__code__ is code
    dump = ulpscope.open_dump(tmp_path / "run")
    assert [call_text(call.id) for call in dump.calls() if call.id.phase is Phase.BACKWARD] == [
        "Tensor.sum.0.backward",
        "Tensor.__mul__.0.backward",
    ]


def test_a_node_that_has_hooks_of_the_program_keeps_them_all(tmp_path: Path) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    seen: list[str] = []

    class Hooked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cos(x)
            y.grad_fn.register_hook(lambda *_: seen.append("after"))
            y.grad_fn.register_prehook(lambda *_: seen.append("before"))
            return y

    x = torch.ones(3, requires_grad=True)
    model = torch.nn.Sequential(Hooked(), Hooked())
    with ulpscope.capture(tmp_path / "run", model=model, level="mix"):
        y = Doubled.apply(model(x)).sum()
        y.backward()
    assert seen == ["before", "after"] * 2
    dump = ulpscope.open_dump(tmp_path / "run")
    backward = [call_text(call.id) for call in dump.calls() if call.id.phase is Phase.BACKWARD]
    assert {"Torch.cos.0.backward", "Torch.cos.1.backward", "Module.0.Hooked.backward.0"} <= set(backward), backward
    x.grad = None
    Doubled.apply(model(x)).sum().backward()
    assert seen == ["before", "after"] * 4
