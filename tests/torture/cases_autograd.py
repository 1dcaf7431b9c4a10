"""What autograd, checkpointing, mixed precision and torch.func do to a graph."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad as dual
from torch.utils.checkpoint import checkpoint

import ulpscope
from integration.programs_corners import selective_checkpoint
from integration.programs_layers import trained
from integration.runs import Program


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, data: Tensor) -> Tensor:
        data = self.norm(data)
        return self.down(F.gelu(self.up(data))) + data


def branch_accumulation() -> Program:
    model = nn.ModuleDict({"first": Block(32), "one": Block(32), "two": Block(32)})

    def loss() -> Tensor:
        hidden = model["first"](torch.randn(7, 32))
        return (model["one"](hidden) * model["two"](hidden)).sum()

    return trained(model, loss)


def dense_reuse() -> Program:
    layers = nn.ModuleList(nn.Linear(8 + 4 * number, 4) for number in range(4))

    def loss() -> Tensor:
        data = [torch.randn(5, 8)]
        for layer in layers:
            data.append(layer(torch.cat(data, 1)).relu())
        return torch.cat(data, 1).square().sum()

    return trained(layers, loss)


def fan_out_modules() -> Program:
    model = nn.ModuleList([nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))])

    def loss() -> Tensor:
        hidden = model[0](torch.randn(5, 8))
        return sum(head(hidden).sum() * number for number, head in enumerate(model[1:], 1))

    return trained(model, loss)


def index_empty_2d() -> Program:
    weight = nn.Parameter(torch.randn(5, 3))

    def step() -> list[Any]:
        weight.grad = None
        out = weight[torch.empty(0, 2, dtype=torch.long)]
        (out.sum() + weight[torch.tensor([[0, 1], [2, 2]])].sum()).backward()
        return [out, weight.grad]

    return Program(step)


def index_bf16_mask() -> Program:
    def step() -> list[Any]:
        bits = torch.arange(-64, 64, dtype=torch.int16) * 255
        data = bits.view(torch.bfloat16)
        out = data[bits > 0]
        return [out, out.view(torch.int16), out.dtype == torch.bfloat16]

    return Program(step)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, other: Tensor) -> Any:
        ctx.mark_dirty(data)
        sign = torch.sign(other)
        ctx.mark_non_differentiable(sign)
        return data.mul_(2), sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return grad * 2, None


class UsesDirty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, data: Tensor) -> Any:
        return Dirty.apply(self.layer(data), data)


def custom_function_dirty() -> Program:
    model = UsesDirty()

    def loss() -> Tensor:
        out, sign = model(torch.randn(3, 4, requires_grad=True))
        return (out * sign).sum()

    return trained(model, loss)


def double_backward() -> Program:
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss() -> Tensor:
        data = torch.randn(3, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(critic(data).sum(), data, create_graph=True)
        return ((slope.norm(2, 1) - 1) ** 2).mean()

    return trained(critic, loss)


def grad_accum() -> Program:
    model = Block(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> list[Tensor]:
        losses = []
        for _ in range(4):
            loss = model(torch.randn(2, 6)).square().mean() / 4
            loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return losses

    return Program(step, model)


def ckpt_reentrant() -> Program:
    blocks = nn.ModuleList([Block(6), nn.Sequential(Block(6), nn.Dropout(0.3))])

    def loss() -> Tensor:
        data = torch.randn(3, 6, requires_grad=True)
        for block in blocks:
            data = checkpoint(block, data, use_reentrant=True)
        return data.square().sum()

    return trained(blocks, loss)


def holds_ckpt_reentrant(dump: ulpscope.Dump, level: str) -> None:
    calls = [call for call in dump.calls() if call.id.phase.value == "forward"]
    again = [call for call in calls if call.recomputed]
    name = "linear" if level == "op" else "Block"
    assert sum(call.id.name.endswith(name) for call in again) * 2 == sum(call.id.name.endswith(name) for call in calls)


def ckpt_nested() -> Program:
    inner, outer = Block(4), Block(4)
    selective = selective_checkpoint()

    def both(data: Tensor) -> Tensor:
        return outer(checkpoint(inner, data, use_reentrant=False))

    def step() -> Any:
        loss = checkpoint(both, torch.randn(2, 4, requires_grad=True), use_reentrant=False).sum()
        loss.backward()
        return [loss, selective.step()]

    return Program(step, nn.ModuleList([inner, outer, *([selective.model] if selective.model is not None else [])]))


def saved_hooks() -> Program:
    model = Block(6)
    count = [0, 0]

    def pack(value: Tensor) -> Tensor:
        count[0] += 1
        return value.detach().clone()

    def unpack(value: Tensor) -> Tensor:
        count[1] += 1
        return value

    def loss() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            first = model(torch.randn(2, 6)).sum()
        with torch.autograd.graph.save_on_cpu():
            return first + model(torch.randn(2, 6)).square().sum()

    program = trained(model, loss)
    program.extras = lambda: list(count)
    return program


def autocast() -> Program:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4))

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(2, 1, 5, 5))
            assert out.dtype == torch.bfloat16
        return out.float().square().sum()

    return trained(model, loss)


def grad_scaler() -> Program:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    turn = [0]

    def step() -> list[Any]:
        turn[0] += 1
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).sum() * (float("inf") if turn[0] == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return [scaler.get_scale(), loss]

    return Program(step, model)


def func_jacrev() -> Program:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def step() -> list[Tensor]:
        data = torch.randn(3)
        return [
            torch.func.jacrev(model)(data),
            torch.func.hessian(lambda row: model(row).square().sum())(data),
            torch.func.jacfwd(model)(data),
        ]

    return Program(step, model)


def func_functional_call() -> Program:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def step() -> list[Any]:
        fast = {name: value * 2 for name, value in model.named_parameters()}
        out = torch.func.functional_call(model, fast, (torch.randn(2, 3),))
        out.sum().backward()
        return [out, torch.func.functional_call(model, dict(model.named_buffers()), torch.ones(1, 3))]

    return Program(step, model)


def vmap_index() -> Program:
    def step() -> list[Tensor]:
        data, places = torch.randn(4, 6), torch.randint(6, (4, 2))
        return [torch.vmap(lambda row, at: row[at])(data, places), torch.vmap(lambda row: row[1:3])(data)]

    return Program(step)


def forward_ad() -> Program:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1))

    def step() -> list[Tensor]:
        with dual.dual_level():
            out = model(dual.make_dual(torch.randn(2, 3), torch.randn(2, 3)))
            value, tangent = dual.unpack_dual(out)
            return [value.detach().clone(), tangent.detach().clone()]

    return Program(step, model)


def param_grad_values() -> Program:
    model = nn.Linear(2, 1, bias=False)

    def step() -> None:
        model.weight.grad = None
        for factor in (1.0, 10.0):
            model(torch.full((1, 2), factor)).sum().backward()

    return Program(step, model)


def holds_param_grad_values(dump: ulpscope.Dump, level: str) -> None:
    if level == "op":
        return
    for number, expected in enumerate((1.0, 11.0)):
        (value,) = dump.call(f"Module.Linear.parameters_grad.{number}").values
        assert value.stats.max == value.stats.min == expected


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, places: Tensor) -> Tensor:
        return self.head(self.embed(places))


def tied_weights() -> Program:
    model = Tied()
    return trained(model, lambda: model(torch.tensor([1, 2])).square().sum())


def holds_tied_weights(dump: ulpscope.Dump, level: str) -> None:
    if level != "op":
        owners = {call.name for call in dump.ids() if call.phase.value == "parameters_grad"}
        assert owners == {"embed.Embedding", "head.Linear"}
