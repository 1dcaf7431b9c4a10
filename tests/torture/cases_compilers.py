"""Compilers and tracers, before a capture and while it is on."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from integration.programs_layers import small_net, trained
from integration.runs import Program


def compile_before() -> Program:
    torch._dynamo.reset()
    model = small_net()
    fast = torch.compile(model, backend="eager")
    fast(torch.ones(3, 6))
    return trained(model, lambda: fast(torch.randn(3, 6)).square().sum())


def compile_after() -> Program:
    torch._dynamo.reset()
    model = small_net()
    found: list[Any] = []

    def loss() -> Tensor:
        if not found:
            found.append(torch.compile(model, backend="eager"))
        return found[0](torch.randn(3, 6)).square().sum()

    return trained(model, loss)


def compile_helper() -> Program:
    torch._dynamo.reset()
    model = small_net()

    @torch.compile(backend="aot_eager")
    def helper(data: Tensor) -> Tensor:
        return data.sin() * 2 + 1

    return trained(model, lambda: helper(model(torch.randn(3, 6))).square().sum())


def _twice(data: Tensor) -> Tensor:
    return torch.relu(data) * 2


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, data: Tensor) -> Tensor:
        data = self.layer(data)
        if bool(data.sum() > 0):
            data = data * 2
        return F.gelu(data)


def jit_script() -> Program:
    def step() -> list[Any]:
        function, module = torch.jit.script(_twice), torch.jit.script(Branching())
        out = module(function(torch.randn(2, 4)))
        out.sum().backward()
        return [out, str(function.graph), [value.grad for value in module.parameters()]]

    return Program(step)


def jit_trace() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def step() -> list[Any]:
        traced = torch.jit.trace(model, torch.randn(2, 4))
        kinds = [node.kind() for node in traced.inlined_graph.nodes()]
        return [traced(torch.ones(5, 4)), kinds, torch.jit.trace(_twice, torch.ones(1))(torch.ones(3))]

    return Program(step, model)


def jit_submodule() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Branching()), nn.Linear(4, 1))
    return trained(model, lambda: model(torch.randn(2, 4)).square().sum())


def fx_trace() -> Program:
    model = small_net()

    def step() -> list[Any]:
        graph = torch.fx.symbolic_trace(model)
        return [graph(torch.ones(2, 6)), graph.code, model(torch.ones(2, 6))]

    return Program(step, model)
