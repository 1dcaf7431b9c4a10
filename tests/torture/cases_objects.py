"""Hooks, global state, and what programs do to model objects."""

import copy
import gc
import inspect
import io
import pickle
import random
from collections import Counter
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ulpscope
from integration.programs_layers import trained
from integration.runs import Program


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def user_hooks() -> Program:
    model = _net()
    order: list[str] = []

    def told(word: str, result: Any) -> Any:
        order.append(word)
        return result

    model[0].register_forward_pre_hook(lambda module, args: told("pre", (args[0] * 2,)))
    model[0].register_forward_hook(lambda module, args, out: told("forward", out + 1))
    model[1].register_full_backward_hook(lambda module, given, got: told("full", (given[0] * 0.5,)))
    model[2].register_full_backward_pre_hook(lambda module, got: told("full pre", (got[0] * 3,)))
    program = trained(model, lambda: model(torch.randn(3, 4)).square().sum())
    program.extras = lambda: list(order)
    return program


def old_backward_hook() -> Program:
    model = _net()
    seen: list[Any] = []
    model[1].register_backward_hook(lambda module, given, got: seen.append(got[0].clone()))
    program = trained(model, lambda: model(torch.randn(3, 4)).square().sum())
    program.extras = lambda: list(seen)
    return program


def holds_old_backward_hook(dump: ulpscope.Dump, level: str) -> None:
    if level != "op":
        backward = {call.name for call in dump.ids() if call.kind == "Module" and call.phase.value == "backward"}
        assert backward == {"Sequential", "0.Linear", "1.Tanh", "2.Linear"}


def global_hooks() -> Program:
    model = _net()
    seen: list[str] = []

    def step() -> Tensor:
        everywhere = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append("all"))
        once = model[1].register_forward_hook(lambda module, args, out: (seen.append("once"), once.remove())[1])
        always = model[0].register_forward_hook(lambda module, args, out: seen.append("always"), always_call=True)
        try:
            out = model(torch.randn(2, 4))
            try:
                model(torch.randn(2, 5))
            except RuntimeError:
                seen.append("raised")
            return out
        finally:
            everywhere.remove()
            always.remove()

    return Program(step, model, extras=lambda: list(seen))


def _hooks(model: nn.Module) -> list[int]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(getattr(module, name)) for module in model.modules() for name in names]


def hooks_left() -> Program:
    model = _net()
    program = trained(model, lambda: model(torch.randn(2, 4)).sum())
    program.extras = lambda: [
        _hooks(model),
        ["__call__" in vars(module) or "forward" in vars(module) for module in model.modules()],
        [value._post_accumulate_grad_hooks is None for value in model.parameters()],
    ]
    return program


KEPT = {"gelu": F.gelu, "matmul": torch.matmul, "add": Tensor.add, "call": nn.Module.__call__}


def api_identity() -> Program:
    def step() -> list[Any]:
        found = (F.gelu, torch.matmul, Tensor.add, nn.Module.__call__)
        same = [one is two for one, two in zip(KEPT.values(), found, strict=True)]
        signatures = [str(inspect.signature(function)) for function in (F.softmax, F.cross_entropy, nn.Linear.forward)]
        return [same, signatures, pickle.loads(pickle.dumps(torch.matmul)) is torch.matmul, torch.ones(2).sum()]

    return Program(step)


def rng() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def step() -> list[Any]:
        out = model(torch.randn(2, 4))
        return [out, random.random(), float(np.random.rand()), torch.rand(1)]

    return Program(step, model)


def gc_state() -> Program:
    def step() -> list[bool]:
        gc.disable()
        try:
            torch.ones(2).sum()
            return [gc.isenabled(), gc.get_threshold() == gc.get_threshold()]
        finally:
            gc.enable()

    return Program(step)


def stdout_clean() -> Program:
    model = _net()

    def step() -> list[Any]:
        with redirect_stdout(io.StringIO()) as out:
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
        return [out.getvalue(), loss]

    return Program(step, model)


def deepcopy_after() -> Program:
    model = _net()
    copies: list[nn.Module] = []

    def step() -> list[Any]:
        copies.append(copy.deepcopy(model))
        with torch.no_grad():
            for value in copies[-1].parameters():
                value.zero_()
        return [model(torch.ones(1, 4)), copies[-1](torch.ones(1, 4)), type(copies[-1]).__name__]

    def after() -> list[Any]:
        last = copy.deepcopy(model)
        with torch.no_grad():
            for value in last.parameters():
                value.fill_(0.5)
        return [last(torch.ones(1, 4)).detach(), _hooks(last)]

    return Program(step, model, extras=after)


def pickle_model() -> Program:
    model = _net()

    def step() -> list[Any]:
        first = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        second = torch.load(buffer, weights_only=False)
        return [first(torch.ones(1, 4)), second(torch.ones(1, 4)), _hooks(second), model(torch.ones(1, 4))]

    return Program(step, model)


def forward_replaced() -> Program:
    model = _net()
    turn = [0]

    def step() -> Tensor:
        turn[0] += 1
        if turn[0] == 2:
            model[1].forward = lambda data: data * 3
            model[2] = nn.Linear(4, 1)
        return model(torch.ones(1, 4))

    return Program(step, model)


class Patched(nn.Module):
    def forward(self, data: Tensor) -> Tensor:
        return data * 2


def class_patch() -> Program:
    model = nn.Sequential(Patched(), nn.Tanh())
    original = Patched.forward

    def step() -> list[Tensor]:
        first = model(torch.ones(2))
        Patched.forward = lambda self, data: data * 100  # type: ignore[method-assign]
        try:
            return [first, model(torch.ones(2))]
        finally:
            Patched.forward = original  # type: ignore[method-assign]

    return Program(step, model)


def shared_module() -> Program:
    model = nn.Linear(3, 3)

    def loss() -> Tensor:
        data = torch.randn(1, 3)
        for _ in range(50):
            data = model(data)
        return data.sum()

    return trained(model, loss)


def holds_shared_module(dump: ulpscope.Dump, level: str) -> None:
    name = "linear" if level == "op" else "Linear"
    count = Counter(call.phase.value for call in dump.ids() if call.name == name)
    assert (count["forward"], count["backward"]) == (50, 50)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, data: Tensor, depth: int) -> Tensor:
        return data * self.scale if not depth else self(data, depth - 1) + 1


def recursive_module() -> Program:
    model = Recursive()
    return trained(model, lambda: model(torch.zeros(1), 60).sum())


def holds_recursive_module(dump: ulpscope.Dump, level: str) -> None:
    if level == "op":
        return
    calls = [call for call in dump.calls() if call.id.name == "Recursive" and call.id.phase.value == "forward"]
    outputs = [value.stats.max for call in calls for value in call.values if value.slot.role.value == "output"]
    assert outputs == [float(60 - number) for number in range(61)]


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, data: Tensor) -> Tensor:
        self.seen += 1
        return self.lazy(data) * self.parts[0] + self.parts[1]


def lazy() -> Program:
    model = nn.Sequential(Loose(), nn.Identity())

    def step() -> Tensor:
        loss = model(torch.ones(2, 5)).sum()
        loss.backward()
        return loss

    return Program(step, model)


def dp_replica() -> Program:
    model = _net()

    def step() -> list[Any]:
        replica = copy.copy(model)
        replica._modules = {}
        for name, child in model.named_children():
            twin = child._replicate_for_data_parallel()
            for key, value in child._parameters.items():
                setattr(twin, key, value * 2)
            replica._modules[name] = twin
        out = replica(torch.ones(1, 4))
        out.sum().backward()
        return [out, model(torch.ones(1, 4))]

    return Program(step, model)
