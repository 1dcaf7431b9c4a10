"""Programs in the corners of torch: lazy and swapped parameters, flat gradients, selective checkpoints, odd tensors."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from integration.programs_layers import small_net, trained
from integration.runs import Program


def lazy_modules() -> Program:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d())
    optimizers: list[torch.optim.Optimizer] = []

    def step() -> Tensor:
        out = model(torch.randn(3, 5))
        if not optimizers:
            optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizers[0].zero_grad()
        loss = out.square().sum()
        loss.backward()
        optimizers[0].step()
        return loss

    return Program(step, model)


def swapped_parameters() -> Program:
    """torch refuses to swap a tensor that anyone has a weak reference to."""
    model = nn.Linear(3, 3)

    def step() -> list[Tensor]:
        out = model(torch.randn(2, 3, dtype=model.weight.dtype))
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(torch.float64 if model.weight.dtype == torch.float32 else torch.float32)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
        return [out.detach(), model.weight.detach()]

    return Program(step, model)


def flat_gradients() -> Program:
    """Gradients are views of one buffer, as large trainers keep them; backward must write into it."""
    model = small_net()
    flat = torch.zeros(sum(value.numel() for value in model.parameters()))
    place = 0
    for value in model.parameters():
        value.grad = flat[place : place + value.numel()].view_as(value)
        place += value.numel()

    def step() -> list[Tensor]:
        flat.zero_()
        loss = model(torch.randn(3, 6)).square().sum()
        loss.backward()
        with torch.no_grad():
            for value in model.parameters():
                value.sub_(value.grad, alpha=0.1)
        return [loss, flat.clone()]

    return Program(step, model, extras=lambda: flat)


def selective_checkpoint() -> Program:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    kernels: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kernels.append(str(op))
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def loss() -> Tensor:
        return checkpoint(
            block,
            torch.randn(2, 4, requires_grad=True),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        ).sum()

    program = trained(block, loss)
    program.extras = lambda: list(kernels)
    return program


def anomaly_detection() -> Program:
    model = small_net()

    def loss() -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return model(torch.randn(3, 6)).square().sum()

    return trained(model, loss)


def several_gradient_hooks() -> Program:
    model = small_net()
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda grads: seen.append([None if grad is None else grad.clone() for grad in grads])
    )
    program = trained(model, lambda: model(torch.randn(3, 6)).square().sum())
    program.extras = lambda: list(seen)
    return program


def functional_autograd() -> Program:
    def step() -> list[Any]:
        data = torch.randn(3)
        return [
            torch.autograd.functional.jacobian(lambda row: row.exp() * row.sum(), data),
            torch.autograd.functional.hvp(lambda row: row.pow(4).sum(), data, torch.ones(3)),
            torch.autograd.functional.vhp(lambda row: row.pow(4).sum(), data, torch.ones(3))[1],
        ]

    return Program(step)


def own_call_method() -> Program:
    class Calls(nn.Linear):
        def __call__(self, data: Tensor) -> Tensor:
            return super().__call__(data) + 1

    model = nn.Sequential(Calls(3, 3), nn.Identity())
    return trained(model, lambda: model(torch.randn(2, 3)).sum())


def named_and_nested_outputs() -> Program:
    import collections
    import dataclasses

    Pair = collections.namedtuple("Pair", ["left", "right"])

    @dataclasses.dataclass
    class Out:
        pair: Any
        table: dict[Any, Any]
        nothing: None = None

    class Many(nn.Module):
        def forward(self, data: Tensor, *, options: dict[str, Any]) -> Out:
            data = data * options["factor"]
            return Out(Pair(data + 1, (data - 1, [data])), {0: data * 2, ("a", 1): "text", "x": 3.5})

    model = Many()

    def step() -> list[Any]:
        data = torch.randn(2, requires_grad=True)
        out = model(data, options={"factor": 2.0, "names": ["a"]})
        assert isinstance(out, Out) and type(out.pair) is Pair
        total = out.pair.left.sum() + out.pair.right[0].sum() + out.table[0].sum()
        total.backward()
        return [total, data.grad, out.table]

    return Program(step, model)


def nested_tensors() -> Program:
    projection = nn.Linear(4, 4)

    def loss() -> Tensor:
        rows = [torch.randn(2, 4), torch.randn(3, 4)]
        ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        out = projection(ragged)
        return F.relu(out).values().sum()

    return trained(projection, loss)


def custom_operators() -> Program:
    if not hasattr(torch.ops.ulpscope_tests, "twice"):

        @torch.library.custom_op("ulpscope_tests::twice", mutates_args=())
        def twice(data: Tensor) -> Tensor:
            return data * 2

        twice.register_autograd(lambda ctx, grad: grad * 2)

        @torch.library.custom_op("ulpscope_tests::count", mutates_args=("counter",))
        def count(counter: Tensor) -> None:
            counter.numpy()[0] += 1

    counter = torch.zeros(1)
    model = nn.Linear(3, 3)

    def loss() -> Tensor:
        torch.ops.ulpscope_tests.count(counter)
        return torch.ops.ulpscope_tests.twice(model(torch.randn(2, 3))).sum() + counter.sum()

    program = trained(model, loss)
    program.extras = lambda: counter
    return program


def higher_order_operators() -> Program:
    from torch._higher_order_ops.while_loop import while_loop

    def step() -> list[Any]:
        data = torch.randn(3)
        looped = while_loop(
            lambda count, value: count < 3,
            lambda count, value: (count + 1, value * 2),
            (torch.zeros((), dtype=torch.int64), data),
        )
        return [looped[1], torch.vmap(torch.dot)(torch.randn(2, 3), torch.randn(2, 3))]

    return Program(step)


def pruned_and_quantized() -> Program:
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    model.eval()
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 2)), {nn.Linear}, dtype=torch.qint8)

    def step() -> list[Tensor]:
        data = torch.randn(2, 4)
        return [model(data).sum(), quantized(data)]

    return Program(step, model)


def memory_shared_with_numpy() -> Program:
    import numpy as np

    memory = np.zeros(4, dtype=np.float32)
    tensor = torch.from_numpy(memory)

    def step() -> list[Tensor]:
        before = tensor + 0
        memory[:] += 1
        return [before, tensor * 2, torch.as_tensor(memory) - 1]

    return Program(step)


def memory_of_a_storage() -> Program:
    def step() -> list[Tensor]:
        data = torch.ones(4)
        first = data * 1
        data.untyped_storage().copy_(torch.arange(4.0).untyped_storage())
        second = data * 1
        data.data = torch.full((4,), 9.0)
        third = data * 1
        data.set_(torch.full((4,), 5.0))
        return [first, second, third, data * 1]

    return Program(step)
