"""Rows of the seeds' feature list that capture itself serves. Each test carries the ids of its rows."""

from __future__ import annotations

import inspect
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ulpscope
from ulpscope.model.errors import ConfigError
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.operators import ROLES_OF_COLLECTIVES

MAGIC = [
    "__add__",
    "__and__",
    "__bool__",
    "__eq__",
    "__ge__",
    "__gt__",
    "__iadd__",
    "__iand__",
    "__ifloordiv__",
    "__ilshift__",
    "__imod__",
    "__imul__",
    "__ior__",
    "__irshift__",
    "__isub__",
    "__ixor__",
    "__lshift__",
    "__matmul__",
    "__mod__",
    "__mul__",
    "__or__",
    "__radd__",
    "__rmul__",
    "__rshift__",
    "__sub__",
    "__truediv__",
    "__xor__",
    "__itruediv__",
]
SIGNS = {
    "add": "+", "and": "&", "floordiv": "//", "lshift": "<<", "mod": "%", "mul": "*", "or": "|", "rshift": ">>", "sub": "-",
    "xor": "^", "truediv": "/", "matmul": "@", "eq": "==", "ge": ">=", "gt": ">",
}  # fmt: skip


@pytest.fixture
def restored():
    """Puts every random source and backend flag back."""
    cudnn = torch.backends.cudnn
    flags = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    variable = os.environ.get("PYTHONHASHSEED")
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = flags
    torch.use_deterministic_algorithms(False)
    os.environ.pop("PYTHONHASHSEED", None)
    if variable is not None:
        os.environ["PYTHONHASHSEED"] = variable


def test_000_041_042_every_random_source_is_fixed(restored) -> None:
    drawn = []
    for _ in range(2):
        ulpscope.seed_all(1234)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item(), os.environ["PYTHONHASHSEED"]))
    assert drawn[0] == drawn[1]
    assert drawn[0][3] == "1234"


def test_000_045_cudnn_is_off_not_benchmarking_and_deterministic(restored) -> None:
    ulpscope.seed_all(1, deterministic=True)
    cudnn = torch.backends.cudnn
    assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) == (False, False, True)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("arguments", [("x",), (-1,), (2**32,), (1.5,), (True,), (1, "yes")])
def test_002_106_a_wrong_seed_or_mode_is_refused(arguments) -> None:
    with pytest.raises(ConfigError, match="seed_all"):
        ulpscope.seed_all(*arguments)


@pytest.mark.parametrize("name", MAGIC)
def test_004_009_every_magic_function_is_recorded(name: str, tmp_path: Path) -> None:
    word = name.strip("_")
    x = (
        torch.tensor([[5, 6], [7, 8]])
        if word in ("and", "or", "xor") or "shift" in word or word[1:] in ("and", "or", "xor")
        else torch.ones(2, 2)
    )
    plain, reflected = (word[1:], word[0]) if word[1:] in SIGNS and word not in SIGNS else (word, "")
    program = {
        "bool": "bool(x.sum() > 0)",
        "i": f"x {SIGNS.get(plain)}= 2",
        "r": f"2 {SIGNS.get(plain)} x",
    }.get(reflected or word, f"x {SIGNS.get(plain)} {'x' if plain == 'matmul' else 2}")
    code = compile(program, "user.py", "exec")
    with ulpscope.capture(tmp_path):
        exec(code, {"x": x})
    assert f"Tensor.{name}.0.forward" in [call_text(call) for call in ulpscope.open_dump(tmp_path).ids()]


def test_004_006_011_slicing_works_as_without_capture(tmp_path: Path) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    index = torch.tensor([[0, 1], [1, 0]])
    bare = [x[0], x[..., 1], x[:, None, 1:3], x[index], x[x > 5], x[torch.tensor(1)], x[index[:, :0]]]
    with ulpscope.capture(tmp_path):
        found = [x[0], x[..., 1], x[:, None, 1:3], x[index], x[x > 5], x[torch.tensor(1)], x[index[:, :0]]]
    assert all(torch.equal(one, two) for one, two in zip(bare, found, strict=True))
    dump = ulpscope.open_dump(tmp_path)
    assert len([call for call in dump.ids() if call.name == "__getitem__"]) >= len(bare)


def test_004_007_012_a_function_is_still_itself(tmp_path: Path) -> None:
    activation, signature = F.gelu, inspect.signature(F.softmax)
    with ulpscope.capture(tmp_path):
        assert activation is F.gelu
        assert inspect.signature(F.softmax) == signature
        assert pickle.loads(pickle.dumps(torch.matmul)) is torch.matmul


def test_004_008_013_no_operator_of_ours_runs(tmp_path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def program() -> None:
        x = torch.ones(3, 4, requires_grad=True)
        (x.t().transpose(0, 1) @ x.t()).sum().backward()

    with Seen() as bare:
        program()
    with Seen() as captured, ulpscope.capture(tmp_path, level="mix", tensors=True, checksum=True):
        program()
    assert captured.names == bare.names


def test_004_025_nested_lists_add_their_index(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path):
        torch.nn.LSTM(3, 2)(torch.ones(1, 3))
    call = ulpscope.open_dump(tmp_path).call("VF.lstm.0.forward")
    slots = [slot_text(value.slot) for value in call.values]
    assert {"input.0", "input.1.0", "input.1.1", "output.0", "output.1", "output.2"} <= set(slots)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5, 2, 3, 4)])
def test_004_029_the_weight_of_a_matmul_has_its_gradient_whatever_the_input(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    x, weight = torch.randn(*shape, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    with ulpscope.capture(tmp_path, tensors=True):
        F.linear(x, weight).sum().backward()
    dump = ulpscope.open_dump(tmp_path)
    found = {slot_text(value.slot): dump.load(value) for value in dump.call("Functional.linear.0.backward").values}
    assert np.array_equal(found["output.1"], weight.grad.numpy())
    assert np.array_equal(found["output.0"], x.grad.numpy())


def test_000_069_communication_calls_are_watched() -> None:
    seeds = (
        "send recv broadcast all_reduce reduce all_gather gather isend irecv scatter reduce_scatter _reduce_scatter_base"
        " _all_gather_base"
    )
    assert set(seeds.split()) <= set(ROLES_OF_COLLECTIVES)
    assert all(hasattr(torch.distributed.distributed_c10d, name) for name in seeds.split())


def test_002_103_every_module_is_recorded_with_its_parameters_and_gradients(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with ulpscope.capture(tmp_path, model=model, level="module"):
        model(torch.randn(4, 3, requires_grad=True)).sum().backward()
    dump = ulpscope.open_dump(tmp_path)
    for name in ("0.Linear", "1.BatchNorm1d"):
        forward = {slot_text(value.slot) for value in dump.call(f"Module.{name}.forward.0").values}
        backward = {slot_text(value.slot) for value in dump.call(f"Module.{name}.backward.0").values}
        grads = {slot_text(value.slot) for value in dump.call(f"Module.{name}.parameters_grad.0").values}
        assert forward == {"input.0", "parameters.weight", "parameters.bias", "output.0"}
        assert backward == {"input.0", "output.0"}
        assert grads == {"parameters.weight", "parameters.bias"}
