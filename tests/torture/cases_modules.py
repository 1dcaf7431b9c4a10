"""Not in the list: what programs do to modules, their classes, their names and the functions of torch."""

import asyncio
import copy
import functools
import io
import pickle
import sys
import types
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, stateless

from integration.programs_layers import small_net, trained
from integration.runs import Program
from torture.cases_more import _said


class Loud(nn.Module):
    """Answers no question about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, data: Tensor) -> Tensor:
        return self.layer(data)

    def __repr__(self) -> str:
        raise RuntimeError("not for you")

    def __bool__(self) -> bool:
        raise RuntimeError("not for you")

    def __len__(self) -> int:
        raise RuntimeError("not for you")

    def __hash__(self) -> int:
        return 7

    @property
    def secret(self) -> int:
        raise RuntimeError("not for you")


def loud_modules() -> Program:
    model = nn.Sequential(Loud(), Loud())
    return trained(model, lambda: model(torch.randn(2, 3)).square().sum())


class Unhashable(nn.Module):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def forward(self, data: Tensor) -> Tensor:
        return data * 2


def module_without_a_hash() -> Program:
    return Program(lambda: [_said(lambda: Unhashable()(torch.ones(2))), nn.Identity()(torch.ones(1))])


class NeverMade(nn.Module):
    def __init__(self) -> None:
        pass

    def forward(self, data: Tensor) -> Tensor:
        return data


def module_half_made() -> Program:
    return Program(lambda: [_said(lambda: NeverMade()(torch.ones(2))), nn.ReLU()(torch.ones(1))])


class Many(NamedTuple):
    first: Tensor
    rest: Any


@dataclass
class Answer:
    loss: Tensor
    many: Many
    text: str = "x"

    @property
    def broken(self) -> int:
        raise RuntimeError("not for you")


class ModelOutput(OrderedDict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, *, data: Tensor, how: str) -> Any:
        out = self.layer(data)
        many = Many(out, {"a": [out * 2]})
        return {
            "dataclass": lambda: Answer(out.sum(), many),
            "output": lambda: ModelOutput(loss=out.sum(), many=many),
            "self": lambda: (self, out),
            "parameter": lambda: self.layer.weight,
            "nothing": lambda: None,
            "function": lambda: functools.partial(torch.mul, out),
            "coroutine": lambda: self.later(out),
            "stream": lambda: (out * number for number in range(2)),
            "iterator": lambda: zip([out], [out * 2], strict=True),
            "proxy": lambda: types.MappingProxyType({"a": out}),
            "set": lambda: {out},
            "kept": lambda: weakref.ref(self),
        }[how]()

    async def later(self, data: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return data * 3


def answers_of_every_shape() -> Program:
    model = Answers()

    def step() -> list[Any]:
        model.zero_grad()
        found = {
            how: model(data=torch.ones(1, 3), how=how)
            for how in ("dataclass", "output", "self", "parameter", "nothing", "function", "coroutine",
                        "stream", "iterator", "proxy", "set", "kept")
        }  # fmt: skip
        loss = found["dataclass"].many.rest["a"][0].sum() + found["output"].loss + found["self"][1].sum()
        loss = loss + found["function"](2).sum() + asyncio.run(found["coroutine"]).sum() + sum(found["stream"]).sum()
        loss = loss + next(found["iterator"])[1].sum() + found["proxy"]["a"].sum() + found["set"].pop().sum()
        loss.backward()
        names = {how: type(value).__name__ for how, value in found.items()}
        return [
            loss,
            names,
            found["self"][0] is model,
            found["parameter"] is model.layer.weight,
            found["kept"]() is model,
        ]

    return Program(step, model)


def coroutines_side_by_side() -> Program:
    """Tasks of one thread take turns between calls of modules."""
    model = small_net()

    async def work(number: int) -> Tensor:
        data = torch.full((1, 6), float(number))
        for layer in model:
            data = layer(data)
            await asyncio.sleep(0)
        return data

    async def all_of_them() -> list[Tensor]:
        return await asyncio.gather(*(work(number) for number in range(4)))

    def step() -> list[Tensor]:
        outs = asyncio.run(all_of_them())
        sum(out.sum() for out in outs).backward()
        return outs

    return Program(step, model)


def streams_side_by_side() -> Program:
    """Generators of one thread take turns inside calls of modules."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def run(self, data: Tensor) -> Any:
            for _ in range(3):
                data = self.layer(data)
                yield data

        def forward(self, data: Tensor) -> Tensor:
            return list(self.run(data))[-1]

    one, two = Slow(), Slow()

    def step() -> list[Any]:
        pairs = list(zip(one.run(torch.ones(1, 3)), two.run(torch.ones(1, 3)), strict=True))
        return [pairs, one(torch.ones(1, 3)), two(torch.ones(1, 3))]

    return Program(step, nn.ModuleList([one, two]))


def deep_nesting() -> Program:
    """Deep enough that frames of ours, on top of the program's, must not run into the limit of recursion."""
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(200):
        model = nn.Sequential(model)
    return trained(model, lambda: model(torch.ones(1, 2)).sum())


class Sinks(nn.Module):
    def forward(self, data: Tensor, depth: int) -> Tensor:
        return self(data + 1, depth + 1)


def endless_recursion() -> Program:
    """The program's own RecursionError is caught by the program, and the next call works."""

    def step() -> list[Any]:
        try:
            Sinks()(torch.zeros(1), 0)
        except RecursionError:
            said = "as deep as it goes"
        return [said, nn.ReLU()(torch.ones(1)), sys.getrecursionlimit()]

    return Program(step)


def odd_names() -> Program:
    names = ["a b", "ü✓", "x/y", "..", "\n", "0", "a" * 300, "%s{}", "\ud800"]
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names if "." not in name))
    return trained(model, lambda: model(torch.ones(1, 2)).sum())


def forward_by_other_means() -> Program:
    model = small_net()
    scripted = torch.jit.script(lambda_like)

    def step() -> list[Any]:
        model[1].forward = functools.partial(torch.add, other=1)
        first = model(torch.ones(1, 6))
        model[1].forward = scripted
        second = model(torch.ones(1, 6))
        model[1].forward = types.MethodType(lambda self, data: F.relu(data), model[1])
        third = model(torch.ones(1, 6))
        del model[1].forward
        return [first, second, third, model(torch.ones(1, 6))]

    return Program(step, model)


def lambda_like(data: Tensor) -> Tensor:
    return torch.tanh(data) * 2


def torch_patched_by_the_program() -> Program:
    """Before a capture and while it is on: the program's own functions are called as often, and stay."""
    model = small_net()
    calls = [0]
    linear, gelu = F.linear, F.gelu

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return linear(*args, **kwargs)

    def step() -> list[Any]:
        F.linear = counted  # type: ignore[assignment]
        F.gelu = lambda data, approximate="none": gelu(data, approximate="tanh")  # type: ignore[assignment]
        try:
            out = model(torch.ones(1, 6))
            kept = F.linear is counted
        finally:
            F.linear, F.gelu = linear, gelu
        return [out, calls[0], kept, model(torch.ones(1, 6))]

    return Program(step, model)


def call_patched_by_the_program() -> Program:
    """Module.__call__ wrapped by the program while a capture is on, as some tracers do, and put back."""
    model = small_net()
    seen: list[str] = []

    def step() -> list[Any]:
        original = nn.Module.__call__

        def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(self).__name__)
            return original(self, *args, **kwargs)

        nn.Module.__call__ = wrapped  # type: ignore[method-assign]
        try:
            out = model(torch.ones(1, 6))
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
        return [out, list(seen), nn.Module.__call__ is original]

    return Program(step, model)


def modules_that_come_and_go() -> Program:
    """Addresses are used again by other modules; nothing holds the old ones."""

    def step() -> list[Any]:
        alive = []
        out = torch.ones(1, 3)
        for number in range(20):
            layer = nn.Linear(3, 3) if number % 2 else nn.Tanh()
            alive.append(weakref.ref(layer))
            out = layer(out)
            del layer
        return [out, sum(each() is not None for each in alive)]

    return Program(step)


def objects_carried_about() -> Program:
    model = small_net()

    def step() -> list[Any]:
        out = model(torch.ones(1, 6))
        buffer = io.BytesIO()
        torch.save({"state": model.state_dict(), "out": out.detach()}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        twin = copy.deepcopy(model)
        twin.load_state_dict(loaded["state"])
        model.share_memory()
        marked = torch.ones(2)
        marked.note = {"mine": 1}  # type: ignore[attr-defined]
        again = copy.deepcopy(marked)
        return [
            twin(torch.ones(1, 6)), loaded["out"], _said(lambda: copy.deepcopy(out * 2)), copy.copy(marked).note,
            again.note, pickle.loads(pickle.dumps(marked)), pickle.loads(pickle.dumps(model.state_dict())),
            [value.is_shared() for value in model.parameters()],
        ]  # fmt: skip

    return Program(step, model)


class Doubles(nn.Module):
    def forward(self, data: Tensor) -> Tensor:
        return data * 2

    def right_inverse(self, data: Tensor) -> Tensor:
        return data / 2


def parametrized_in_a_step() -> Program:
    model = small_net()

    def step() -> list[Any]:
        model.zero_grad()
        parametrize.register_parametrization(model[0], "weight", Doubles())
        with parametrize.cached():
            first = model(torch.ones(1, 6)) + model(torch.ones(1, 6))
        first.sum().backward()
        parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
        return [first, model(torch.ones(1, 6)), type(model[0]).__name__]

    return Program(step, model)


def norms_of_old() -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4)))
    return trained(model, lambda: model(torch.randn(2, 4)).sum())


def lazy_modules_of_all_kinds() -> Program:
    model = nn.Sequential(nn.LazyConv2d(3, 2), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))

    def step() -> list[Any]:
        said = _said(lambda: nn.LazyLinear(2).weight.shape)
        loss = model(torch.randn(2, 1, 4, 4)).square().sum()
        loss.backward()
        return [said, loss, [type(module).__name__ for module in model]]

    return Program(step, model)


def scripted_with_hooks() -> Program:
    inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    seen: list[str] = []
    model = nn.Sequential(inner, nn.Linear(3, 2))
    model[1].register_forward_hook(lambda module, args, out: seen.append("after"))

    def step() -> list[Any]:
        model.zero_grad()
        out = model(torch.ones(1, 3))
        out.sum().backward()
        frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(3, 3)).eval()))
        buffer = io.BytesIO()
        torch.jit.save(frozen, buffer)
        buffer.seek(0)
        return [out, list(seen), torch.jit.load(buffer)(torch.ones(1, 3)).shape, torch.jit.is_scripting()]

    return Program(step, model)


def state_that_is_called_with() -> Program:
    model = small_net()
    model.register_state_dict_pre_hook(lambda module, prefix, keep: None)

    def step() -> list[Any]:
        state = {name: value * 2 for name, value in model.named_parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = stateless.functional_call(model, state, (torch.ones(1, 6),))
        out.sum().backward()
        found = model.load_state_dict({"0.weight": model[0].weight.detach() * 1}, strict=False)
        return [out, sorted(found.missing_keys), _said(lambda: model.load_state_dict({}))[:60]]

    return Program(step, model)


def registration_hooks() -> Program:
    seen: list[str] = []

    def step() -> list[Any]:
        handles = [
            nn.modules.module.register_module_parameter_registration_hook(lambda m, name, value: seen.append(name)),
            nn.modules.module.register_module_module_registration_hook(lambda m, name, child: seen.append(name)),
            nn.modules.module.register_module_buffer_registration_hook(lambda m, name, value: seen.append(name)),
            nn.modules.module.register_module_full_backward_hook(lambda m, given, got: seen.append("back")),
        ]
        try:
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            model(torch.randn(3, 2, requires_grad=True)).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        return list(seen)

    return Program(step)


def data_parallel_on_a_cpu() -> Program:
    inner = small_net()
    model = nn.DataParallel(inner)
    return trained(model, lambda: model(torch.randn(2, 6)).sum())


def pieces_that_modules_hold() -> Program:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": torch.ones(2)})
            self.list = nn.ParameterList([nn.Parameter(torch.ones(2))])
            self.register_buffer("gone", None)
            self.register_parameter("none", None)
            self.register_buffer("seen", torch.zeros(1), persistent=False)
            self.raw = torch.ones(2)
            self.child: Any = None

        def forward(self, data: Tensor, scale: float = 1.0, *rest: Any, **more: Any) -> Any:
            self.seen.add_(1)
            self.child = nn.Linear(2, 2) if self.child is None else self.child
            return self.child(data * self.parts["a"] + self.list[0] * self.raw) * scale, rest, more

    model = Holds()

    def step() -> list[Any]:
        out, rest, more = model(torch.ones(2), 2.0, None, "x", key=[1, (2,)])
        out.sum().backward()
        return [out, rest, more, model.seen, model.parts["a"].grad]

    return Program(step, model)


def code_without_a_source() -> Program:
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "made"}
    exec(
        compile(
            "class Made(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(2, 2)\n"
            "    def forward(self, data):\n        return eval('torch.relu(self.layer(data)) + data @ data.T', globals(), locals())\n",
            "<no such file>",
            "exec",
        ),
        scope,
    )
    model = scope["Made"]()
    return trained(model, lambda: model(torch.randn(2, 2)).sum())


def called_from_c() -> Program:
    """Functions that C code of Python calls for the program: map, sorted, reduce, a metaclass, a comprehension."""
    model = small_net()

    def step() -> list[Any]:
        rows = list(map(model, torch.ones(2, 1, 6)))
        ordered = sorted([torch.tensor(2.0), torch.tensor(1.0)], key=torch.neg)
        total = functools.reduce(torch.add, rows)
        made = type("Made", (), {"value": torch.ones(1) + 1, "__init_subclass__": classmethod(lambda cls: None)})
        return [rows, ordered, total, made.value, max(torch.arange(3.0)), sum(torch.ones(3)), [*torch.ones(2)]]

    return Program(step, model)
