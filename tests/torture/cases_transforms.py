"""Not in the list: torch.func, forward mode, custom functions, hooks that raise, and graphs that are used in odd ways."""

import gc
import threading
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.func import functional_call, stack_module_state
from torch.utils.checkpoint import CheckpointError, checkpoint, checkpoint_sequential

from integration.programs_layers import small_net, trained
from integration.runs import Program
from torture.cases_more import _said


def per_sample_gradients() -> Program:
    model = small_net()

    def loss(state: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, state, (row.unsqueeze(0),)), target.unsqueeze(0))

    def step() -> Any:
        state = {name: value.detach() for name, value in model.named_parameters()}
        return torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(state, torch.randn(4, 6), torch.randn(4, 3))

    return Program(step, model)


def model_ensemble() -> Program:
    models = [small_net() for _ in range(3)]
    skeleton = small_net().to("meta")

    def step() -> Any:
        state, buffers = stack_module_state(models)

        def one(parameters: Any, kept: Any, data: Tensor) -> Tensor:
            return functional_call(skeleton, (parameters, kept), (data,))

        out = torch.vmap(one, in_dims=(0, 0, None))(state, buffers, torch.randn(2, 6))
        out.sum().backward()
        return [out, {name: value.grad for name, value in state.items()}]

    return Program(step, nn.ModuleList(models))


def vmap_with_dropout() -> Program:
    def noisy(row: Tensor) -> Tensor:
        return F.dropout(row, 0.5, training=True) + torch.rand(())

    def step() -> list[Any]:
        data = torch.ones(3, 4)
        return [
            torch.vmap(noisy, randomness="different")(data),
            torch.vmap(noisy, randomness="same")(data),
            _said(lambda: torch.vmap(noisy)(data)),
        ]

    return Program(step)


def vmap_that_branches() -> Program:
    """A transform cannot branch on values: the error is torch's own, and the next call works."""

    def step() -> list[Any]:
        data = torch.ones(3, 4)
        return [
            _said(lambda: torch.vmap(lambda row: row if row.sum() > 0 else -row)(data)),
            _said(lambda: torch.vmap(lambda row: row.item())(data)),
            torch.vmap(torch.sum, in_dims=1, chunk_size=2)(data),
            torch.vmap(torch.vmap(torch.dot), in_dims=(None, 0))(data, torch.ones(2, 3, 4)),
        ]

    return Program(step)


def products_with_jacobians() -> Program:
    model = small_net()

    def step() -> list[Any]:
        data, tangent = torch.randn(2, 6), torch.randn(2, 6)
        out, pull = torch.func.vjp(model, data)
        _, push = torch.func.linearize(lambda row: model(row).sin(), data)
        return [
            out, pull(torch.ones_like(out)), pull(out), push(tangent), torch.func.jvp(model, (data,), (tangent,)),
            torch.func.jacfwd(model)(data[0]), torch.func.hessian(lambda row: model(row).sum())(data[0]),
            torch.func.grad_and_value(lambda row: (model(row).sum(), row * 2), has_aux=True)(data),
            torch.func.functionalize(lambda row: row.clone().add_(1).view(-1).mul_(2))(data),
        ]  # fmt: skip

    return Program(step, model)


def duals_through_modules() -> Program:
    model = small_net()

    def step() -> list[Any]:
        data = torch.randn(2, 6, requires_grad=True)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(data, torch.ones_like(data))
            out = model(dual)
            value, tangent = forward_ad.unpack_dual(out)
            (slope,) = torch.autograd.grad(tangent.sum(), data)
            return [value.detach().clone(), tangent.detach().clone(), slope]

    return Program(step, model)


class OwnVmap(torch.autograd.Function):
    @staticmethod
    def forward(data: Tensor) -> Tensor:
        return data.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * out

    @staticmethod
    def vmap(info: Any, in_dims: Any, data: Tensor) -> Any:
        return data.movedim(in_dims[0], 0).exp(), 0


def function_with_its_own_vmap() -> Program:
    def step() -> list[Any]:
        data = torch.randn(3, 4, requires_grad=True)
        out = torch.vmap(OwnVmap.apply, in_dims=1)(data)
        out.sum().backward()
        return [out, data.grad, torch.func.jacrev(OwnVmap.apply)(torch.ones(2))]

    return Program(step)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, unused: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(data)
        ctx.set_materialize_grads(False)
        ctx.factor = factor
        return data * factor, data.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        (data,) = ctx.saved_tensors
        assert second is None and ctx.needs_input_grad[0]
        return None if first is None else first * ctx.factor + 0 * data, None, None


def function_once_differentiable() -> Program:
    def step() -> list[Any]:
        data = torch.randn(3, requires_grad=True)
        out, signs = Once.apply(data, None, 2.0)
        (grad,) = torch.autograd.grad(out.sum(), data, create_graph=True)
        return [out, signs.requires_grad, grad, _said(lambda: grad.sum().backward())]

    return Program(step)


class Own(Exception):
    """An error of the program."""


def _raises(*_: Any) -> None:
    raise Own("not now")


def hooks_that_raise() -> Program:
    """An exception of a hook reaches the program; the steps after it are as if nothing had been."""
    model = small_net()

    def step() -> list[Any]:
        said: list[Any] = []
        data = torch.ones(2, 6)

        def train() -> Tensor:
            loss = model(data).sum()
            loss.backward()
            return loss

        for register in (
            model[1].register_forward_pre_hook,
            model[1].register_forward_hook,
            model[1].register_full_backward_hook,
            model[1].register_full_backward_pre_hook,
            model[0].weight.register_hook,
            model[0].weight.register_post_accumulate_grad_hook,
        ):
            handle = register(_raises)
            said.append(_said(train))
            handle.remove()
        model.zero_grad()
        return [said, train()]

    return Program(step, model)


def hooks_that_replace() -> Program:
    model = small_net()
    seen: list[Any] = []

    def once(grad: Tensor) -> Tensor:
        handle.remove()
        return grad * 2

    handle: Any = None

    def step() -> list[Any]:
        nonlocal handle
        model.zero_grad()
        hidden = model[0](torch.ones(2, 6))
        hidden.retain_grad()
        handle = hidden.register_hook(once)
        with_kwargs = model[1].register_forward_hook(lambda m, args, kw, out: seen.append(list(kw)), with_kwargs=True)
        early = model[1].register_forward_pre_hook(
            lambda m, args, kw: ((args[0] + 1,), kw), with_kwargs=True, prepend=True
        )
        out = model[2](model[1](hidden))
        for _ in range(2):
            out.sum().backward(retain_graph=True)
        with_kwargs.remove()
        early.remove()
        return [hidden.grad, list(seen), [value.grad for value in model.parameters()]]

    return Program(step, model)


def gradients_taken_away() -> Program:
    """What memory-saving trainers do: the gradient is used and dropped as soon as it has come."""
    model = small_net()
    sums: list[float] = []

    def eat(value: Tensor) -> None:
        sums.append(float(value.grad.sum()))
        value.grad = None

    for value in model.parameters():
        value.register_post_accumulate_grad_hook(eat)

    def step() -> list[Any]:
        for _ in range(2):
            model(torch.randn(2, 6)).sum().backward()
        return [list(sums), [value.grad for value in model.parameters()]]

    return Program(step, model)


def graphs_that_were_spoilt() -> Program:
    """Errors that torch finds in a graph are the same errors, word for word."""

    def step() -> list[Any]:
        weight = torch.ones(3, requires_grad=True)
        said = []
        out = weight.exp()
        out.add_(1)
        said.append(_said(lambda: out.sum().backward()).split("[")[0])
        done = weight.exp().sum()
        done.backward()
        said.append(_said(done.backward))
        said.append(_said(lambda: weight.add_(1)))
        said.append(_said(lambda: weight.view(-1).mul_(2)))
        said.append(_said(lambda: torch.ones(1).sum().backward()))
        said.append(_said(lambda: (weight * 2).backward()))
        parts = (weight * 1).unbind()
        said.append(_said(lambda: parts[0].mul_(2)))
        said.append(_said(lambda: weight.numpy()))
        with torch.inference_mode():
            made = torch.ones(3)
        said.append(_said(lambda: (weight * made).sum().backward()))
        said.append(_said(lambda: made.add_(1)))
        return [said, weight.grad]

    return Program(step)


def anomalies_found() -> Program:
    def step() -> list[Any]:
        weight = torch.zeros(2, requires_grad=True)
        with torch.autograd.detect_anomaly():
            found = _said(lambda: torch.sqrt(weight - 1).sum().backward())
        return [found, weight.grad]

    return Program(step)


def backward_on_another_thread() -> Program:
    model = small_net()

    def step() -> list[Any]:
        model.zero_grad()
        losses = [model(torch.full((1, 6), float(number))).sum() for number in range(3)]
        for loss in losses:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        with torch.autograd.set_multithreading_enabled(False):
            model(torch.ones(1, 6)).sum().backward()
        return losses

    return Program(step, model)


def collected_during_backward() -> Program:
    """The collector runs inside hooks, and cycles through tensors go when they would."""
    model = small_net()

    def step() -> list[Any]:
        model.zero_grad()
        hidden = model[0](torch.ones(2, 6))
        hidden.register_hook(lambda grad: (gc.collect(1), None)[1])
        cycle: list[Any] = [hidden * 2]
        cycle.append(cycle)
        gone = weakref.ref(cycle[0])
        out = model[2](model[1](hidden)).sum() + cycle[0].sum()
        del cycle
        out.backward()
        gc.collect(1)
        return [out, gone() is None]

    return Program(step, model)


def checkpoints_of_all_kinds() -> Program:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)))
    turn = [0]

    def unsteady(data: Tensor) -> Tensor:
        turn[0] += 1
        return data.sin() if turn[0] % 2 else data.sin().cos()

    def differs() -> str:
        try:
            data = torch.ones(2, 4, requires_grad=True)
            checkpoint(unsteady, data, use_reentrant=False).sum().backward()
        except CheckpointError as error:
            return str(error).splitlines()[0]
        return "no error"

    def step() -> list[Any]:
        data = torch.randn(2, 4, requires_grad=True)
        out = checkpoint_sequential(model, 2, data, use_reentrant=False)
        out = out + checkpoint(model[0], data, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
        out = out + checkpoint(lambda *, x: {"y": model[1](x)}, use_reentrant=False, x=data)["y"]
        out.sum().backward()
        return [out, data.grad, differs()]

    return Program(step, model)


def edges_of_the_graph() -> Program:
    model = small_net()

    def step() -> list[Any]:
        model.zero_grad()
        hidden = model[0](torch.ones(2, 6))
        edge = torch.autograd.graph.get_gradient_edge(hidden)
        out = model[2](model[1](hidden)).sum()
        found = torch.autograd.grad(out, edge, retain_graph=True)
        names = [type(node).__name__ for node, _ in out.grad_fn.next_functions]
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            said = _said(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__())
            out.backward()
        seen: list[Any] = []
        out2 = model(torch.ones(1, 6))
        with torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), seen.append, mode="any"):
            out2.sum().backward()
        return [found, names, said, len(seen), out.grad_fn.metadata, out.grad_fn.name()]

    return Program(step, model)


def graph_switched_on_and_off() -> Program:
    model = small_net()

    def step() -> list[Any]:
        data = torch.randn(2, 6)
        with torch.set_grad_enabled(False):
            first = model(data)
        second = torch.no_grad()(model)(data)
        hidden = model[0](data)
        hidden.detach_()
        with torch.inference_mode():
            third = model(data)
            with torch.inference_mode(False):
                fourth = model(data)
        model[0].requires_grad_(False)
        last = model(data)
        last.sum().backward()
        model[0].requires_grad_(True)
        return [first, second, hidden.requires_grad, third.is_inference(), fourth, last]

    return Program(step, model)


def complex_training() -> Program:
    weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def step() -> list[Any]:
        weight.grad = None
        data = torch.randn(3, 3, dtype=torch.complex64)
        out = (data @ weight.conj().T).abs().square().sum() + torch.view_as_real(weight.conj().resolve_conj()).sum()
        out = out + torch.fft.irfft(torch.fft.rfft(weight.real)).sum() + weight.imag.neg().sum()
        out.backward()
        return [out, weight.grad, weight.conj().is_conj(), weight.conj().imag.is_neg()]

    return Program(step)


def penalty_on_second_derivatives() -> Program:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss() -> Tensor:
        data = torch.randn(5, 3, requires_grad=True)
        (first,) = torch.autograd.grad(model(data).sum(), data, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), data, create_graph=True)
        return second.square().mean() + first.norm()

    return trained(model, loss)
