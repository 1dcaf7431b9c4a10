"""Programs that use autograd, torch.func, hooks and memory in unusual ways. Each function builds one, afresh."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from integration.programs_layers import small_net, trained
from integration.runs import Program


class ScaledExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        result = torch.exp(data * factor)
        ctx.save_for_backward(result)
        ctx.factor = factor
        ctx.mark_non_differentiable(rounded := result.round())
        return result, rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return grad * result * ctx.factor, None


def custom_function() -> Program:
    model = nn.Linear(4, 4)

    def loss() -> Tensor:
        one, rounded = ScaledExp.apply(model(torch.randn(3, 4)), 0.5)
        return one.sum() + rounded.sum()

    return trained(model, loss)


class AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor) -> Tensor:
        ctx.mark_dirty(data)
        return data.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def custom_function_in_place() -> Program:
    model = nn.Linear(4, 4)
    return trained(model, lambda: AddInPlace.apply(model(torch.randn(3, 4))).square().sum())


def double_backward() -> Program:
    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 1))

    def loss() -> Tensor:
        data = torch.randn(3, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(data).sum(), data, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + model(data).mean()

    return trained(model, loss)


def backward_twice_through_one_graph() -> Program:
    model = small_net()

    def step() -> Tensor:
        loss = model(torch.randn(2, 6)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    return Program(step, model)


def _checkpointed(**options: Any) -> Program:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True)) for _ in range(2))

    def loss() -> Tensor:
        data = torch.randn(3, 4, requires_grad=True)
        for block in blocks:
            data = checkpoint(block, data, **options)
        return data.square().sum()

    return trained(blocks, loss)


def checkpoint_reentrant() -> Program:
    return _checkpointed(use_reentrant=True)


def checkpoint_not_reentrant() -> Program:
    return _checkpointed(use_reentrant=False)


def checkpoint_under_autocast() -> Program:
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(block, torch.randn(3, 4, requires_grad=True), use_reentrant=False).float().sum()

    return trained(block, loss)


def hooks_on_modules() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    order: list[str] = []

    def pre(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        order.append("pre")
        return (args[0] * 2,), kwargs

    def after(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        order.append("after")
        return output + 1

    def full(module: nn.Module, grads_in: Any, grads_out: Any) -> tuple[Tensor]:
        order.append("full backward")
        return (grads_in[0] * 0.5,)

    def before_full(module: nn.Module, grads_out: Any) -> tuple[Tensor]:
        order.append("pre backward")
        return (grads_out[0] * 3,)

    model[0].register_forward_pre_hook(pre, with_kwargs=True)
    model[0].register_forward_hook(after)
    model[1].register_full_backward_hook(full)
    model[1].register_full_backward_pre_hook(before_full)
    model[2].register_forward_hook(lambda module, args, output: order.append("seen"))
    program = trained(model, lambda: model(torch.randn(3, 4)).square().sum())
    program.extras = lambda: list(order)
    return program


def old_backward_hook() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[Tensor] = []
    model[1].register_backward_hook(lambda module, grads_in, grads_out: seen.append(grads_in[0].clone()))
    program = trained(model, lambda: model(torch.randn(3, 4)).square().sum())
    program.extras = lambda: list(seen)
    return program


def hooks_on_tensors() -> Program:
    model = nn.Linear(4, 4)
    seen: list[Tensor] = []
    model.weight.register_hook(lambda grad: grad * 2)
    model.bias.register_post_accumulate_grad_hook(lambda value: seen.append(value.grad.clone()))

    def loss() -> Tensor:
        out = model(torch.randn(3, 4))
        out.retain_grad()
        out.grad_fn.register_hook(lambda grads_in, grads_out: seen.append(grads_out[0].clone()))
        out.register_hook(lambda grad: grad + 1)
        total = out.square().sum()
        seen.append(out)
        return total

    program = trained(model, loss)
    program.extras = lambda: [[value, value.grad if value.is_leaf or value.retains_grad else None] for value in seen]
    return program


def in_place_views() -> Program:
    weight = nn.Parameter(torch.randn(4, 3))

    def step() -> dict[str, Tensor | None]:
        weight.grad = None
        data = weight * 1
        data[0].add_(1)
        data[1:3].mul_(2)
        row = data[2]
        row += data[0].detach()
        data[:, 0] = 5
        data.t()[1].copy_(weight.sum(0)[:1].expand(4))
        left, right = data.chunk(2)
        total = (left * right).sum() + row.sum()
        total.backward()
        return {"data": data, "gradient": weight.grad, "total": total}

    return Program(step, extras=lambda: weight)


def unbind_and_out_arguments() -> Program:
    def step() -> list[Tensor]:
        data = torch.randn(3, 4)
        with torch.no_grad():
            target = torch.empty(3, 4)
            torch.add(data, 1, out=target)
            values, places = torch.max(data, dim=1)
            torch.sort(data, out=(sorted_ := torch.empty(0), order := torch.empty(0, dtype=torch.long)))
            for row in target.unbind():
                row.clamp_(min=0)
            np_view = target.numpy()
            np_view[0, 0] = -7
            target.data.mul_(2)
        return [target, values, places, sorted_, order, target + 0]

    return Program(step)


def saved_tensor_hooks() -> Program:
    model = small_net()
    count = [0, 0]

    def pack(value: Tensor) -> Any:
        count[0] += 1
        return value.detach().numpy().copy(), value.requires_grad

    def unpack(packed: Any) -> Tensor:
        count[1] += 1
        return torch.from_numpy(packed[0].copy())

    def loss() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(torch.randn(3, 6)).square().sum()

    program = trained(model, loss)
    program.extras = lambda: list(count)
    return program


def save_on_cpu() -> Program:
    model = small_net()

    def loss() -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(torch.randn(3, 6)).square().sum()

    return trained(model, loss)


def inference_mode() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4)).eval()

    def step() -> list[Any]:
        with torch.inference_mode():
            out = model(torch.randn(3, 4))
            out[0].mul_(2)
            return [out.tolist(), out.sum().item(), out.is_inference()]

    return Program(step, model)


def functional_transforms() -> Program:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    state = {name: value.detach() for name, value in model.named_parameters()}

    def energy(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (row,)).square().sum()

    def step() -> dict[str, Any]:
        data = torch.randn(5, 3)
        return {
            "grad": torch.func.grad(energy)(state, data[0]),
            "per sample": torch.func.vmap(torch.func.grad(energy), in_dims=(None, 0))(state, data),
            "jacobian": torch.func.jacrev(lambda row: torch.tanh(row) @ row)(data[0]),
            "forward jacobian": torch.func.jacfwd(torch.sin)(data[0]),
            "hessian": torch.func.hessian(lambda row: row.pow(3).sum())(data[0]),
            "vmap random": torch.func.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(data),
        }

    return Program(step, model)


def forward_mode() -> Program:
    model = nn.Linear(3, 3)

    def step() -> dict[str, Any]:
        data, direction = torch.randn(2, 3), torch.randn(2, 3)
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(data, direction)).tanh()
            value, tangent = forward_ad.unpack_dual(out)
            result = {"value": value.detach().clone(), "tangent": tangent.detach().clone()}
        result["jvp"] = torch.func.jvp(torch.sin, (data,), (direction,))
        return result

    return Program(step, model)


def complex_fft() -> Program:
    weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def step() -> dict[str, Any]:
        weight.grad = None
        signal = torch.randn(2, 8)
        spectrum = torch.fft.fft(signal) * weight
        back = torch.fft.ifft(spectrum.conj())
        total = torch.view_as_real(back).square().sum() + back.imag.sum() + back.conj().abs().sum()
        total.backward()
        return {
            "total": total,
            "gradient": weight.grad,
            "lazy": spectrum.detach().conj(),
            "neg": back.detach().conj().imag,
        }

    return Program(step, extras=lambda: weight)


def odd_dtypes() -> Program:
    def step() -> list[Any]:
        data = torch.randn(4, 4)
        return [
            data.to(torch.float8_e4m3fn),
            data.to(torch.float8_e5m2).float(),
            data.half() * 3,
            data.double().inverse(),
            data > 0,
            (data * 10).to(torch.int8) // 3,
            torch.empty(0, 3).sum(0),
            torch.tensor(3.0) * 2,
            data.to_sparse() * 2,
            torch.quantize_per_tensor(data, 0.1, 0, torch.qint8).dequantize(),
            data.to("meta").sum().shape,
        ]

    return Program(step)


def learned_through_autograd_grad() -> Program:
    """A meta-learning step: update inside the graph, gradient through the update."""
    model = nn.Linear(3, 1)

    def step() -> Tensor:
        model.zero_grad()
        data, target = torch.randn(4, 3), torch.randn(4, 1)
        inner = F.mse_loss(model(data), target)
        grads = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
        fast = {name: value - 0.1 * grad for (name, value), grad in zip(model.named_parameters(), grads, strict=True)}
        outer = F.mse_loss(torch.func.functional_call(model, fast, (data,)), target)
        outer.backward()
        return outer

    return Program(step, model)


class Batch(Tensor):
    """A subclass of Tensor with a mark that must survive every call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Batch):
            result.mark = "marked"
        return result


def tensor_subclass() -> Program:
    def step() -> list[Any]:
        data = torch.randn(3).as_subclass(Batch)
        result = (data + 1).relu().sum()
        return [result, result.mark, type(torch.cat([data, torch.ones(1)])).__name__]

    return Program(step)


def user_modes() -> Program:
    """The program has function and dispatch modes of its own; they see the same calls as without the tool."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"function {getattr(func, '__name__', func)}")
            return func(*args, **(kwargs or {}))

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"kernel {func}")
            return func(*args, **(kwargs or {}))

    model = nn.Linear(3, 3)

    def step() -> Tensor:
        model.zero_grad()
        with Functions(), Kernels():
            loss = model(torch.randn(2, 3)).square().sum()
            loss.backward()
        with torch.device("cpu"):
            return loss + torch.ones(())

    return Program(step, model, extras=lambda: list(seen))
