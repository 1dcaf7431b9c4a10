"""Tensors of every kind. A function builds one program; `holds_NAME` looks into its dump."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import ulpscope
from integration.programs_layers import trained
from integration.runs import Program
from ulpscope.model.records import CallRecord, Value


def tensors_of(call: CallRecord, role: str) -> list[Value]:
    return [value for value in call.values if value.slot.role.value == role and value.is_tensor]


def inplace_ops() -> Program:
    weight = nn.Parameter(torch.randn(4, 4))

    def step() -> list[Any]:
        weight.grad = None
        data = weight.sin()
        data.add_(2).mul_(3).clamp_(min=0)
        data[0] = 7
        torch.relu_(data)
        loss = data.square().sum()
        loss.backward()
        return [data, loss, weight.grad]

    return Program(step)


def holds_inplace_ops(dump: ulpscope.Dump, level: str) -> None:
    if level == "module":
        return
    sine, added = dump.call("Tensor.sin.0.forward"), dump.call("Tensor.add_.0.forward")
    before, after = tensors_of(added, "input")[0], tensors_of(added, "output")[0]
    assert before.stats == tensors_of(sine, "output")[0].stats
    assert after.stats.max == torch.tensor(before.stats.max, dtype=torch.float32).add(2).item()


def views() -> Program:
    weight = nn.Parameter(torch.randn(6, 4))

    def step() -> list[Any]:
        weight.grad = None
        data = weight * 2
        window = data.as_strided((3, 2), (4, 1), 1)
        window.mul_(3)
        wide = weight[:1].expand(5, 4)
        data.view(-1)[3:9].add_(1)
        loss = (data.t() @ wide.repeat(2, 1)[:6]).sum() + window.sum()
        loss.backward()
        return [data, window, wide, loss, weight.grad, window._base is data]

    return Program(step)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, data: Tensor) -> Tensor:
        out = self.norm(self.conv(data))
        out += data
        return F.relu_(out)


def module_output_inplace() -> Program:
    model = nn.Sequential(Residual(), Residual())
    return trained(model, lambda: model(torch.randn(2, 2, 5, 5)).square().sum())


class Same(nn.Module):
    def forward(self, data: Tensor) -> Tensor:
        return data


class Viewing(nn.Module):
    def forward(self, data: Tensor) -> Tensor:
        return data.view(-1)


def module_identity() -> Program:
    same, viewing = Same(), Viewing()

    def step() -> list[Any]:
        data = torch.randn(2, 3, requires_grad=True)
        hidden = data * 1
        out, flat = same(hidden), viewing(hidden)
        (out.sum() + flat.sum()).backward()
        return [out is hidden, same(data) is data, flat._base is hidden, data.grad]

    return Program(step, same)


def zero_dim() -> Program:
    return Program(lambda: [torch.tensor(-3.0) * 1, torch.tensor(5) + 0, torch.tensor(True) & True])


def holds_zero_dim(dump: ulpscope.Dump, level: str) -> None:
    if level == "module":
        return
    (value,) = tensors_of(dump.call("Tensor.__mul__.0.forward"), "output")
    assert (value.stats.max, value.stats.min, value.stats.mean, value.stats.norm) == (-3.0, -3.0, -3.0, 3.0)


def nan_inf() -> Program:
    model = nn.Linear(3, 3)

    def step() -> Tensor:
        return model(torch.tensor([[float("nan"), 1.0, 2.0], [float("inf"), -float("inf"), 0.0]])).exp()

    return Program(step, model)


def holds_nan_inf(dump: ulpscope.Dump, level: str) -> None:
    stats = [value.stats for call in dump.calls() for value in tensors_of(call, "input") if value.stats is not None]
    assert any(item.nan_count == 1 and item.posinf_count == item.neginf_count == 1 for item in stats)


def int_bool() -> Program:
    kinds = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

    def step() -> list[Tensor]:
        data = torch.tensor([0, 1, 100])
        big = torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1])
        return [*(data.to(kind).clone() for kind in kinds), big.clone(), torch.empty(0, dtype=torch.int8).clone()]

    return Program(step)


def holds_int_bool(dump: ulpscope.Dump, level: str) -> None:
    if level == "module":
        return
    (value,) = tensors_of(dump.call("Tensor.clone.6.forward"), "output")
    assert (value.stats.max, value.stats.min) == (2**63 - 1, -(2**63))
    (value,) = tensors_of(dump.call("Tensor.clone.0.forward"), "output")
    assert (value.stats.max, value.stats.min) == (1, 0)


def complex_conj() -> Program:
    weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def step() -> list[Any]:
        weight.grad = None
        lazy = weight.conj()
        negative = lazy.imag
        loss = (lazy * weight).real.sum() + negative.square().sum()
        loss.backward()
        wide = torch.randn(3, dtype=torch.complex128).conj() @ torch.randn(3, dtype=torch.complex128)
        return [loss, weight.grad, lazy.is_conj(), negative.is_neg(), lazy.detach(), negative.detach(), wide]

    return Program(step)


def complex_half() -> Program:
    def step() -> list[Any]:
        data = torch.randn(4).to(torch.complex32)
        return [data.real.float() + 1, data.conj().imag.float(), data.clone()]

    return Program(step)


def _eight_bits(*kinds: torch.dtype) -> Program:
    def step() -> list[Any]:
        data = [torch.randn(16).to(kind) for kind in kinds]
        moved = [item.view(4, 4).t().contiguous() for item in data]
        return [*data, *moved, *(item.float() for item in data), *(item.untyped_storage().nbytes() for item in data)]

    return Program(step)


def fp8() -> Program:
    return _eight_bits(torch.float8_e4m3fn, torch.float8_e5m2)


def fp8_fnuz() -> Program:
    return _eight_bits(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class EightBit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, data: Tensor) -> Tensor:
        return F.linear(data, self.weight.to(data.dtype), self.bias)


def fp8_module() -> Program:
    model = nn.Sequential(EightBit(), nn.ReLU(), EightBit())
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1)
    return trained(model, lambda: model(torch.randn(2, 4)).square().sum(), optimizer)


def float64() -> Program:
    return Program(lambda: torch.tensor([1e300, 3.0, -4.0, 2**-60], dtype=torch.float64) * torch.tensor(1.0).double())


def holds_float64(dump: ulpscope.Dump, level: str) -> None:
    if level == "module":
        return
    (value,) = tensors_of(dump.call("Tensor.__mul__.0.forward"), "output")
    assert math.isclose(value.stats.mean, (1e300 - 1) / 4, rel_tol=1e-12)
    assert math.isclose(value.stats.norm, 1e300, rel_tol=1e-12)


def quantized() -> Program:
    def step() -> list[Any]:
        data = torch.randn(3, 4)
        one = torch.quantize_per_tensor(data, 0.1, 2, torch.quint8)
        many = torch.quantize_per_channel(data, torch.rand(3) + 0.1, torch.zeros(3), 0, torch.qint8)
        return [one.dequantize(), many.dequantize(), one.int_repr(), many.int_repr(), one.clone().q_scale()]

    return Program(step)


def sparse() -> Program:
    model = nn.Embedding(8, 3, sparse=True)

    def step() -> list[Any]:
        model.zero_grad()
        loss = model(torch.tensor([1, 1, 5])).square().sum()
        loss.backward()
        coo = torch.eye(3).to_sparse()
        csr = torch.eye(3).to_sparse_csr()
        data = torch.randn(3, 2)
        return [loss, model.weight.grad.to_dense(), coo @ data, csr @ data, (coo * 2).coalesce().to_dense()]

    return Program(step)


def mkldnn() -> Program:
    def step() -> list[Any]:
        data = torch.randn(2, 3).to_mkldnn()
        return [(data + data).to_dense(), F.relu(data).to_dense()]

    return Program(step)


def meta_fake() -> Program:
    def step() -> list[Any]:
        shape = nn.Linear(4, 2, device="meta")(torch.ones(3, 4, device="meta")).shape
        with FakeTensorMode():
            fake = nn.Linear(4, 2)(torch.ones(5, 4))
        return [tuple(shape), tuple(fake.shape), type(fake).__name__]

    return Program(step)


class Counting(Tensor):
    """Counts how often its override is called."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def subclass_tf() -> Program:
    layer = nn.Linear(3, 3)

    def step() -> list[Any]:
        Counting.calls = 0
        data = torch.randn(2, 3).as_subclass(Counting)
        out = F.gelu(layer(data)) + 1
        return [out, type(out).__name__, type(out.sum()).__name__, Counting.calls]

    return Program(step, layer)


class Wrapper(Tensor):
    """Holds another tensor and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return "Wrapper"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Wrapper, lambda value: value.inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return Wrapper(out) if isinstance(out, Tensor) else out


def subclass_wrapper() -> Program:
    layer = nn.Linear(3, 3).requires_grad_(False)

    def step() -> list[Any]:
        out = layer(Wrapper(torch.randn(2, 3))).relu() * 2
        return [type(out).__name__, out.inner]

    return Program(step, layer)


def flop_counter() -> Program:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def step() -> list[Any]:
        model.zero_grad()
        with FlopCounterMode(model, display=False) as counter:
            loss = model(torch.randn(3, 4)).sum()
            loss.backward()
        return [counter.get_total_flops(), sorted(counter.get_flop_counts()), loss]

    return Program(step, model)
