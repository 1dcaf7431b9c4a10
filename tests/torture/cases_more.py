"""More of what real programs do: not in the list, kept because the promise is the same. Tensors, containers, autograd."""

import collections
import ctypes
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from integration.programs_layers import small_net, trained
from integration.runs import Program


def _said(work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Gives(nn.Module):
    def forward(self, value: Any, **more: Any) -> Any:
        return value


def wide_integers() -> Program:
    kinds = (torch.uint16, torch.uint32, torch.uint64)
    return Program(lambda: [torch.tensor([0, 3], dtype=kind).clone() for kind in kinds])


def overlapping_memory() -> Program:
    def step() -> list[Any]:
        data = torch.arange(6.0)
        windows = data.as_strided((4, 3), (1, 1))
        return [
            windows * 2,
            torch.ones(1).expand(3, 4).sum(0),
            windows.unfold(0, 2, 1).mean(),
            torch.ones(0, 3, 0).sum(1),
        ]

    return Program(step)


def resized_storage() -> Program:
    """What sharded trainers do: free the memory of a tensor, and fill it again later."""

    def step() -> list[Any]:
        data = torch.ones(8)
        large = torch.ones(1 << 20)
        for freed in (data, large):
            freed.untyped_storage().resize_(0)
            Gives()(freed)
        data.untyped_storage().resize_(32)
        data.fill_(3)
        other = torch.empty(0).set_(data.untyped_storage(), 2, (3,))
        return [data + 1, other * 2, torch.ones(2).resize_(4).shape, data.data.mul_(2), data]

    return Program(step)


def foreign_memory() -> Program:
    def step() -> list[Any]:
        raw = bytearray(range(16))
        seen = torch.frombuffer(raw, dtype=torch.uint8)
        first = seen.float().sum()
        raw[0] = 200
        shared = torch.ones(4).share_memory_()
        exchanged = torch.from_dlpack(torch.ones(3))
        exchanged.add_(1)
        return [
            first,
            seen.float().sum(),
            shared * 2,
            exchanged,
            torch.utils.dlpack.to_dlpack(torch.ones(1)) is not None,
        ]

    return Program(step)


def odd_views_of_bits() -> Program:
    def step() -> list[Any]:
        data = torch.arange(8, dtype=torch.int32)
        return [
            data.view(torch.float32),
            data.view(torch.uint8)[::3],
            data.view(torch.int64),
        ]

    return Program(step)


def zero_tensors() -> Program:
    """Tensors of zeros without memory, as forward-mode differentiation makes them."""

    def step() -> list[Any]:
        zeros, ones = torch._efficientzerotensor((3,)), torch.ones(3)
        return [
            zeros + 1,
            zeros + ones,
            ones - zeros,
            zeros - 1,
            zeros * 2,
            (zeros / ones).clone(),
            zeros.sum() + 1,
            2 + zeros,
        ]

    return Program(step)


def jagged_and_padded() -> Program:
    layer = nn.LSTM(3, 4, batch_first=True)

    def step() -> list[Any]:
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
        packed = pack_padded_sequence(torch.randn(2, 4, 3), torch.tensor([4, 2]), batch_first=True)
        out, _ = layer(packed)
        whole, sizes = pad_packed_sequence(out, batch_first=True)
        return [(nested * 2).values().sum(), whole, sizes, type(out).__name__]

    return Program(step, layer)


def default_settings() -> Program:
    def step() -> list[Any]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                shape = torch.ones(3).device.type
            out = torch.ones(2) / 3
        finally:
            torch.set_default_dtype(before)
        return [shape, out, torch.get_default_dtype() is before, torch.get_default_device().type]

    return Program(step)


class Loud(collections.UserDict[str, Tensor]):
    def __getitem__(self, key: str) -> Tensor:
        raise RuntimeError("not for you")


class LoudDict(dict[str, Tensor]):
    def items(self) -> Any:
        raise RuntimeError("not for you")

    def __iter__(self) -> Any:
        raise RuntimeError("not for you")


class LoudList(list[Tensor]):
    def __iter__(self) -> Any:
        raise RuntimeError("not for you")

    def __len__(self) -> int:
        raise RuntimeError("not for you")


class Text(str):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not for you")

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Slim:
    left: Tensor
    right: Any = None


def quiet_containers() -> Program:
    model = Gives()

    def step() -> list[Any]:
        weight = torch.ones(2, requires_grad=True) * 1
        given = [
            Slim(weight),
            collections.deque([weight]),
            types.SimpleNamespace(a=weight),
            collections.UserDict(a=weight),
        ]
        return [model(item) is item for item in given]

    return Program(step, model)


def holds_quiet_containers(dump: Any, level: str) -> None:
    if level != "op":
        for number in range(4):
            shown = dump.call(f"Module.Gives.forward.{number}").values
            assert any(value.stats is not None for value in shown), number


def loud_containers() -> Program:
    model = Gives()

    def step() -> list[Any]:
        data = torch.ones(2)
        missing: Any = collections.defaultdict(list)
        given = [
            Loud(a=data), LoudDict(a=data), LoudList([data]), Slim(data), {data}, frozenset([1]), iter([data]),
            (x for x in [data]), missing, types.SimpleNamespace(a=data), types.MappingProxyType({"a": data}),
            collections.ChainMap({"a": data}), collections.deque([data]), range(10**9), memoryview(b"x"), ctypes.c_int(3),
            object(), type, model, lambda: None, slice(None), Ellipsis, NotImplemented, list(range(100_000)), Text("x"),
        ]  # fmt: skip
        same = [model(item) is item for item in given]
        for name in ("args", "kwargs", "original", "call", "func", "module", "input"):
            model(data, **{name: data})
        return [same, len(missing), next(given[6]) is data, model(None), _said(lambda: model())]

    return Program(step, model)


def gradients_by_other_ways() -> Program:
    model = small_net()

    def step() -> list[Any]:
        model.zero_grad()
        data = torch.randn(2, 6, requires_grad=True)
        out = model(data)
        unused = torch.ones(1, requires_grad=True)
        found = torch.autograd.grad(out.sum(), [data, unused], allow_unused=True, retain_graph=True)
        out.backward(torch.ones_like(out), inputs=[data], retain_graph=True)
        rows = torch.autograd.grad(out[0], data, torch.eye(3), is_grads_batched=True, retain_graph=True)
        torch.autograd.backward([out.sum(), out.mean()], inputs=list(model.parameters()))
        return [found, data.grad, rows, _said(lambda: out.sum().backward())]

    return Program(step, model)


class Modern(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(data: Tensor, factor: float) -> Tensor:
        return data * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent * ctx.factor


def modern_function() -> Program:
    def step() -> list[Any]:
        data = torch.randn(3, requires_grad=True)
        Modern.apply(data, 3.0).sum().backward()
        return [
            data.grad, torch.vmap(lambda row: Modern.apply(row, 2.0))(torch.ones(2, 3)),
            torch.func.grad(lambda row: Modern.apply(row, 2.0).sum())(torch.ones(3)),
            torch.func.jvp(lambda row: Modern.apply(row, 2.0), (torch.ones(3),), (torch.ones(3),)),
            torch.autograd.gradcheck(lambda row: Modern.apply(row, 2.0), torch.ones(2, dtype=torch.float64, requires_grad=True)),
        ]  # fmt: skip

    return Program(step)


def hooks_of_every_kind() -> Program:
    model = small_net()
    seen: list[Any] = []

    def step() -> list[Any]:
        model.zero_grad()
        seen.clear()
        values = list(model.parameters())
        many = torch.autograd.graph.register_multi_grad_hook(values, lambda grads: seen.append(len(grads)))
        out = model(torch.randn(2, 6))
        node = out.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
        kept = values[0].register_hook(lambda grad: grad.mul(3))
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            model(torch.randn(2, 6)).sum().backward()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = torch.ones(2, requires_grad=True)
            y = x.clone()
            z = y.sin()
            y.mul_(2)
            z.sum().backward()
        out.square().sum().backward()
        for handle in (many, node, kept):
            handle.remove()
        return [list(seen), x.grad, [value.grad for value in values], type(out.grad_fn.next_functions[0][0]).__name__]

    return Program(step, model)


def backward_inside_forward() -> Program:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, data: Tensor) -> Tensor:
            with torch.enable_grad():
                point = data.detach().requires_grad_()
                for _ in range(2):
                    (slope,) = torch.autograd.grad(self.layer(point).square().sum(), point)
                    point = (point - 0.1 * slope).detach().requires_grad_()
            return self.layer(point)

    model = Inner()
    return trained(model, lambda: model(torch.randn(2, 3)).sum())


def parametrized() -> Program:
    from torch.nn.utils import parametrizations, prune

    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4)
    )
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    return trained(model, lambda: model(torch.randn(3, 4)).square().sum())


class OwnCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(3, 3), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().__call__(*args, **kwargs)

    def forward(self, data: Tensor) -> Tensor:
        return self.layer.forward(data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("magic"):
            raise RuntimeError("not for you")
        return super().__getattr__(name)


def calls_of_their_own() -> Program:
    model = OwnCall()
    original = nn.ReLU.__call__

    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) * 2

    def step() -> list[Any]:
        nn.ReLU.__call__ = patched  # type: ignore[method-assign]
        try:
            out = nn.ReLU()(model(torch.ones(1, 3)))
        finally:
            del nn.ReLU.__call__
        return [out, model.count, _said(lambda: nn.Module()(torch.ones(1))), nn.ReLU()(torch.ones(1))]

    return Program(step, model)


def state_moved_about() -> Program:
    model = small_net()

    def step() -> list[Any]:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value * 2 for name, value in state.items()})
        doubled = model(torch.ones(1, 6))
        model.load_state_dict(state, assign=True)
        model.double().float()
        model.apply(lambda module: nn.init.ones_(module.bias) if isinstance(module, nn.Linear) else None)
        return [doubled, model(torch.ones(1, 6)), [value.requires_grad for value in model.parameters()]]

    return Program(step, model)


def profiled() -> Program:
    model = small_net()

    def step() -> list[Any]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            out = model(torch.ones(1, 6))
        names = {event.key for event in found.key_averages()}
        return [out, "aten::addmm" in names, "aten::gelu" in names]

    return Program(step, model)


def exported() -> Program:
    model = small_net()

    def step() -> list[Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(lambda data: model(data).sin())(torch.ones(2, 6))
        program = torch.export.export(model, (torch.ones(2, 6),))
        kinds = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        return [graph.code, graph(torch.ones(2, 6)), kinds, program.module()(torch.ones(2, 6)), F.gelu(torch.ones(1))]

    return Program(step, model)
