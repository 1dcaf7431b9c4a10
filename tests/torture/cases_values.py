"""Not in the list: tensors of other kinds, memory that is not torch's alone, classes and modes of the program."""

import copy
import ctypes
import mmap
import os
import tempfile
import weakref
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from integration.programs_layers import small_net
from integration.runs import Program
from torture.cases_more import Gives, _said


class Plain(Tensor):
    """Steps out of the protocol, as parameters do."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Noted(Tensor):
    """Carries a note through every operation."""

    @staticmethod
    def __new__(cls, data: Any, note: str = "") -> "Noted":
        return torch.as_tensor(data).as_subclass(cls)

    def __init__(self, data: Any, note: str = "") -> None:
        self.note = note

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        notes = [arg.note for arg in args if isinstance(arg, Noted) and "note" in vars(arg)]
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Noted):
            out.note = "+".join([*notes, func.__name__])
        return out


class Duck:
    """No tensor, but torch functions take it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.asked: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args[0].asked.append(func.__name__)
        return Duck(func(*tree_map(lambda arg: arg.data if isinstance(arg, Duck) else arg, args), **(kwargs or {})))


def classes_of_the_program() -> Program:
    def step() -> list[Any]:
        plain = torch.ones(3).as_subclass(Plain)
        noted = Noted([1.0, 2.0], "mine")
        summed = (noted * 2).sum()
        duck = Duck(torch.ones(2))
        doubled = torch.mul(duck, 2)
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(Noted(torch.ones(2, 2)))
        return [
            type(plain * 2).__name__, type(summed).__name__, summed.note, torch.Tensor.sum(noted).note, doubled.data,
            duck.asked, type(layer.weight).__name__, layer(torch.ones(1, 2)).detach().as_subclass(Tensor),
            _said(lambda: copy.deepcopy(noted))[:80], repr(plain), type(torch.stack([noted, noted])).__name__,
        ]  # fmt: skip

    return Program(step)


class Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is F.relu else out


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def modes_of_the_program() -> Program:
    """They see the same calls in the same order, and may stay on over steps."""
    model = small_net()
    outer = Counts()
    entered = [False]

    def step() -> list[Any]:
        if not entered[0]:
            entered[0] = True
            outer.__enter__()
        with Counts() as counts, Kernels() as kernels:
            out = model(torch.ones(1, 6))
            out.sum().backward()
        with Halves():
            halved = F.relu(torch.ones(2))
        return [out, counts.seen, kernels.seen, halved]

    def extras() -> Any:
        outer.__exit__(None, None, None)
        return outer.seen

    return Program(step, model, extras=extras)


def devices_by_default() -> Program:
    def step() -> list[Any]:
        torch.set_default_device("meta")
        try:
            made = nn.Linear(2, 2)
            first = torch.zeros(3)
        finally:
            torch.set_default_device(None)
        with torch.device("cpu"), torch.random.fork_rng():
            torch.manual_seed(3)
            second = torch.rand(2)
        filled = made.to_empty(device="cpu")
        with torch.no_grad():
            filled.weight.fill_(1)
            filled.bias.zero_()
        return [made.weight.device.type, first.device.type, second, filled(torch.ones(1, 2))]

    return Program(step)


def random_numbers_of_ones_own() -> Program:
    generator = torch.Generator().manual_seed(7)

    def step() -> list[Any]:
        state = generator.get_state()
        first = torch.randn(3, generator=generator)
        generator.set_state(state)
        kept = torch.get_rng_state()
        second = torch.nn.init.xavier_uniform_(torch.empty(2, 2))
        torch.set_rng_state(kept)
        twin = generator.clone_state() if hasattr(generator, "clone_state") else generator
        return [
            first, torch.randn(3, generator=generator), second, torch.rand(1), torch.randperm(4, generator=twin),
            torch.bernoulli(torch.full((4,), 0.5)), torch.multinomial(torch.ones(4), 2), torch.initial_seed(),
            F.gumbel_softmax(torch.ones(3)), torch.normal(torch.zeros(2), torch.ones(2)),
        ]  # fmt: skip

    return Program(step)


def deterministic_mode() -> Program:
    def step() -> list[Any]:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            filled = torch.empty(3)
            added = torch.zeros(3).index_add_(0, torch.tensor([0, 0, 2]), torch.ones(3))
            return [
                torch.isnan(filled).all().item(),
                added,
                torch.zeros(4).scatter_add(0, torch.tensor([1, 1]), torch.ones(2)),
            ]
        finally:
            torch.use_deterministic_algorithms(before)

    return Program(step)


def enormous_expansions() -> Program:
    """A view may have more elements than any memory: it must not be read element by element."""

    def step() -> list[Any]:
        wide = torch.ones(1).expand(1 << 40)
        grid = torch.arange(4.0).reshape(1, 4, 1).expand(1 << 18, 4, 1 << 18)
        seen = Gives()(wide)
        return [wide.shape, grid[5, 2, 7], seen is wide, wide[1 << 39], torch.empty(0, 1 << 40).shape]

    return Program(step, Gives())


def many_dimensions() -> Program:
    def step() -> list[Any]:
        deep = torch.arange(2.0).reshape([1] * 24 + [2] + [1] * 20)
        return [deep.sum(), (deep + 1).flatten(), deep.permute(*range(44, -1, -1)).shape, torch.ones([1] * 64).shape]

    return Program(step)


def signs_and_conjugates_in_views() -> Program:
    def step() -> list[Any]:
        data = torch.arange(4.0).reshape(2, 2) + 1j
        lazy = data.conj()
        lazy.mul_(2)
        back = torch.view_as_real(data)
        back[0, 0, 0] = 9
        minus = data.conj().imag
        return [
            data,
            lazy.resolve_conj(),
            minus.is_neg(),
            minus.resolve_neg(),
            minus * 2,
            minus.T[::1],
            lazy[0],
            data.real.t(),
        ]

    return Program(step)


def files_as_memory() -> Program:
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "data")

    def step() -> list[Any]:
        np.arange(8, dtype=np.float32).tofile(path)
        shared = torch.from_file(path, shared=True, size=8)
        shared[0] = 5
        on_disk = np.memmap(path, dtype=np.float32, mode="r")
        with open(path, "rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            read_only = torch.frombuffer(view, dtype=torch.float32)
            total = (read_only * 2).sum()
        torch.save({"a": shared + 1}, path + ".pt")
        lazy = torch.load(path + ".pt", mmap=True)["a"]
        return [
            float(on_disk[0]),
            torch.from_numpy(on_disk) * 1,
            total,
            lazy * 2,
            shared.untyped_storage().filename is not None,
        ]

    return Program(step)


def memory_written_from_outside() -> Program:
    def step() -> list[Any]:
        array = np.ones(4, dtype=np.float32)
        tensor = torch.from_numpy(array)
        first = tensor.sum()
        array[:] = 3
        second = tensor.sum()
        own = torch.ones(4)
        third = own.sum()
        ctypes.memset(own.data_ptr(), 0, 8)
        fourth = own.sum()
        np.from_dlpack(own)[3] = 7
        own.untyped_storage()[0] = 1
        raw = memoryview(own.numpy())
        raw[2] = 2.5
        return [first, second, third, fourth, own.clone(), torch.asarray(array, copy=True), torch.as_tensor(raw)]

    return Program(step)


def holds_memory_written_from_outside(dump: Any, level: str) -> None:
    if level == "module":
        return
    sums = [call.values[-1].stats.max for call in dump.calls() if call.id.name == "sum"]
    assert sums == [4.0, 12.0, 4.0, 2.0]


def sparse_of_all_layouts() -> Program:
    def step() -> list[Any]:
        dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 4]])
        weight = torch.eye(4, requires_grad=True)
        outs = []
        for make in (Tensor.to_sparse_coo, Tensor.to_sparse_csr, Tensor.to_sparse_csc):
            outs.append((make(dense) @ weight).to_dense())
        blocks = dense.to_sparse_bsr((1, 2))
        repeated = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2))
        sum(out.sum() for out in outs).backward()
        return [
            outs, weight.grad, blocks.to_dense(), repeated.is_coalesced(), repeated.coalesce().values(), blocks.crow_indices(),
            torch.sparse.sum(repeated, 0).to_dense(), torch.sparse.softmax(repeated.coalesce(), 1).to_dense(),
        ]  # fmt: skip

    return Program(step)


def ragged_batches() -> Program:
    layer = nn.Linear(4, 4)

    def step() -> list[Any]:
        layer.zero_grad()
        parts = [torch.randn(2, 4), torch.randn(3, 4)]
        old = torch.nested.nested_tensor(parts)
        new = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        out = layer(new)
        heads = out.unflatten(-1, (2, 2)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads)
        seen.values().sum().backward()
        return [
            [part for part in (old * 2).unbind()],
            out.values(),
            out.offsets(),
            layer.weight.grad,
            old.to_padded_tensor(0.0),
        ]

    return Program(step, layer)


def numbers_of_few_bits() -> Program:
    def step() -> list[Any]:
        out: list[Any] = []
        for name in ("float8_e8m0fnu", "float8_e5m2", "float8_e4m3fn"):
            small = torch.tensor([0.5, 1.0, 2.0]).to(getattr(torch, name))
            out += [small.float(), Gives()(small).view(torch.uint8)]
        packed = torch.tensor([1, 2, 255], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        bits = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
        short = torch.empty(3, dtype=torch.int4) if hasattr(torch, "int4") else None
        for odd in (packed, bits, short):
            out.append(Gives()(odd) is odd)
        return [
            *out,
            torch.tensor([200], dtype=torch.uint8) + torch.tensor([100], dtype=torch.uint8),
            torch.tensor(True) & True,
        ]

    return Program(step)


def quantized_models() -> Program:
    def step() -> list[Any]:
        torch.backends.quantized.engine = (
            "onednn" if "onednn" in torch.backends.quantized.supported_engines else "qnnpack"
        )
        data = torch.randn(2, 4)
        fake = torch.fake_quantize_per_tensor_affine(data.requires_grad_(), 0.1, 0, -128, 127)
        fake.sum().backward()
        channels = torch.quantize_per_channel(
            torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
        )
        return [fake, data.grad, channels.dequantize(), channels.int_repr(), channels.q_per_channel_scales()]

    return Program(step)


def tensors_as_objects() -> Program:
    """Attributes, dictionaries, finalizers, identities."""

    class Last:
        def __init__(self, told: list[Any]) -> None:
            self.told = told

        def __del__(self) -> None:
            self.told.append(torch.ones(2).sum().item())

    def step() -> list[Any]:
        told: list[Any] = []
        data = torch.ones(3)
        data.mark = Last(told)  # type: ignore[attr-defined]
        table = {data: 1}
        gone = weakref.ref(data)
        found = table[data] + (data in table)
        out = data * 2
        del data, table
        return [
            found, gone() is None, told, out.__reduce_ex__(2)[0].__name__, _said(lambda: bool(out)), 2 in out,
            f"{out.sum():.2f}", repr(out), [type(item).__name__ for item in out], dict(zip("ab", out, strict=False)),
            _said(lambda: out["x"]), _said(lambda: out.nothing), hasattr(out, "grad_fn"), sorted(torch.tensor([2, 1])), out.__class__,
        ]  # fmt: skip

    return Program(step)


def indices_of_all_kinds() -> Program:
    def step() -> list[Any]:
        data = torch.arange(24.0).reshape(2, 3, 4)
        weight = torch.zeros(4, requires_grad=True)
        out = weight.clone()
        out[[0, 0, 2]] += 1
        out[torch.tensor([True, False, True, False])] = weight[:2] * 3
        out[...] = out.flip(0)
        out.sum().backward()
        data[0, :, None][:, 0, ::2] = -1
        return [
            data[..., 0], data[:, [0, 2]], data[torch.tensor([1]), :, 1:3], data[None, 0], data[data > 5], data[0][1][2], out,
            weight.grad, _said(lambda: data[5]), _said(lambda: data[torch.tensor([9])]), data[:0], data[True], data.take(torch.tensor([0, 5])),
        ]  # fmt: skip

    return Program(step)


def outputs_given() -> Program:
    def step() -> list[Any]:
        target = torch.empty(3)
        same = torch.add(torch.ones(3), 1, out=target) is target
        resized = torch.empty(0)
        torch.mul(torch.ones(2), 3, out=resized)
        values, places = torch.empty(2), torch.empty(2, dtype=torch.long)
        torch.max(torch.tensor([[1.0, 5], [7, 2]]), 1, out=(values, places))
        part = torch.zeros(4)
        torch.exp(torch.ones(2), out=part[1:3])
        return [
            same,
            target,
            resized,
            values,
            places,
            part,
            _said(lambda: torch.add(torch.ones(2), 1, out=torch.empty(2, dtype=torch.int))),
        ]

    return Program(step)


def storages_exchanged() -> Program:
    def step() -> list[Any]:
        first, second = torch.ones(3), torch.zeros(3)
        first.data = second
        second[0] = 4
        third = torch.ones(2, requires_grad=True)
        out = third * 2
        third.data.mul_(10)
        out.sum().backward()
        torch.utils.swap_tensors(first, third)
        fourth = torch.ones(4)
        fourth.set_(second)
        fifth = torch.ones(6)
        fifth.untyped_storage().copy_(torch.full((6,), 2.0).untyped_storage())
        fifth.resize_(2, 5)
        fifth.zero_()
        return [first.shape, third, out, fourth, fifth, first.data_ptr() == second.data_ptr()]

    return Program(step)


def operators_of_the_program() -> Program:
    library = torch.library.Library("torture_values", "FRAGMENT")
    if not hasattr(torch.ops.torture_values, "twice"):
        library.define("twice(Tensor x, *, float by=2.0) -> Tensor")
        library.define("bump_(Tensor(a!) x) -> ()")
        library.impl("twice", lambda x, *, by=2.0: x * by, "CompositeExplicitAutograd")
        library.impl("bump_", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")

    def step() -> list[Any]:
        data = torch.ones(2)
        torch.ops.torture_values.bump_(data)
        out = torch.ops.torture_values.twice(data, by=3.0)
        return [
            data,
            out,
            torch.ops.torture_values.twice.default(out),
            torch.ops.aten.add.Tensor(data, out),
            str(torch.ops.torture_values.twice),
        ]

    program = Program(step)
    program.keep = library  # type: ignore[attr-defined]
    return program
