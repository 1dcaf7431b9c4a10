"""Names and counters exactly as the seeds spell them, and nothing left out."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import relu
from torch.utils._python_dispatch import TorchDispatchMode

import ulpscope
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Phase
from ulpscope.native import taps

A = torch.tensor([1.0, 2.0, 3.0])
I = torch.tensor([1, 2, 3])  # noqa: E741

SIGNS: dict[str, Any] = {
    "__add__": lambda: A + 1, "__radd__": lambda: 1 + A, "add": lambda: A.add(1), "__sub__": lambda: A - 1,
    "__rsub__": lambda: 1 - A, "__mul__": lambda: A * 2, "__rmul__": lambda: 2 * A, "__truediv__": lambda: A / 2,
    "__floordiv__": lambda: A // 2, "__mod__": lambda: A % 2, "__pow__": lambda: A**2, "__rpow__": lambda: 2**A,
    "__matmul__": lambda: A @ A, "__neg__": lambda: -A, "__eq__": lambda: A == A, "__ne__": lambda: A != A,
    "__lt__": lambda: A < 1, "__le__": lambda: A <= 1, "__gt__": lambda: A > 1, "__ge__": lambda: A >= 1,
    "__and__": lambda: I & 1, "__or__": lambda: I | 1, "__xor__": lambda: I ^ 1, "__lshift__": lambda: I << 1,
    "__rshift__": lambda: I >> 1, "__getitem__": lambda: A[0], "__bool__": lambda: bool(A[0] > 0),
}  # fmt: skip


def names(path: Path) -> list[str]:
    return [call_text(call) for call in ulpscope.open_dump(path).ids()]


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_is_spelt_as_the_caller_wrote_it(name: str, tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path):
        SIGNS[name]()
    assert f"Tensor.{name}.0.forward" in names(tmp_path)


@pytest.mark.parametrize(
    ("sign", "name"),
    [("+", "__iadd__"), ("-", "__isub__"), ("*", "__imul__"), ("/", "__itruediv__"), ("**", "__ipow__")],
)
def test_an_in_place_sign_is_spelt_with_an_i(sign: str, name: str, tmp_path: Path) -> None:
    scope = {"x": A.clone()}
    code = compile(f"x {sign}= 2", "user.py", "exec")
    with ulpscope.capture(tmp_path):
        exec(code, scope)
    assert names(tmp_path) == [f"Tensor.{name}.0.forward"]


def test_a_number_from_the_left_is_a_reflected_sign_whatever_stands_on_the_right(tmp_path: Path) -> None:
    half = 0.5
    with ulpscope.capture(tmp_path):
        0.5 * A * (1.0 + torch.tanh(A))
        half * A
    assert names(tmp_path)[:4] == [
        "Tensor.__rmul__.0.forward",
        "Torch.tanh.0.forward",
        "Tensor.__radd__.0.forward",
        "Tensor.__mul__.0.forward",
    ]


class Holder:
    scale = 0.5

    def __init__(self) -> None:
        self.scale = 0.25

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


def test_a_number_in_a_variable_or_an_attribute_is_a_number_too(tmp_path: Path) -> None:
    holder = Holder()
    half, x = 0.5, A
    with ulpscope.capture(tmp_path):
        half * x
        x * half
        holder.times(x)
        math.sqrt(4.0) * x
        math.sqrt(2.0 / math.pi) * (x + x)
        total = 0
        total += x
    assert names(tmp_path) == [
        "Tensor.__rmul__.0.forward",
        "Tensor.__mul__.0.forward",
        "Tensor.__rmul__.1.forward",
        "Tensor.__rmul__.2.forward",
        "Tensor.__add__.0.forward",
        "Tensor.__rmul__.3.forward",
        "Tensor.__radd__.0.forward",
    ]


class Weight(torch.nn.Parameter):
    pass


def _same(value: Any) -> Any:
    return value


def test_a_variable_tells_which_operand_was_the_tensor(tmp_path: Path) -> None:
    x, number, weight = torch.ones(3), 0.5, Weight(torch.ones(3))

    def program() -> None:
        count = 2
        for _ in range(2):
            x + number
            number + x
            x * _same(0.5)
            _same(0.5) * x
            x + x
            math.prod([x, x]) + x
            _same(weight) + weight
            _same(x) * count

    with ulpscope.capture(tmp_path):
        program()
    signs = [name.split(".")[1] for name in names(tmp_path)]
    once = ["__add__", "__radd__", "__mul__", "__rmul__", "__add__", "__add__", "__add__", "__mul__"]
    assert [sign for sign in signs if sign != "mul"] == once * 2  # math.prod is C, and writes no sign


def test_arguments_of_a_python_function_stand_where_the_caller_put_them(tmp_path: Path) -> None:
    x, weight, bias = torch.randn(2, 3, requires_grad=True), torch.ones(3, requires_grad=True), torch.zeros(3)
    with ulpscope.capture(tmp_path):
        F.layer_norm(x, (3,), weight, bias).sum().backward()
        F.layer_norm(x, (3,), bias=bias, weight=weight)
        F.layer_norm(*(x, (3,), weight))
    dump = ulpscope.open_dump(tmp_path)
    slots = [
        [slot_text(value.slot) for value in dump.call(f"Functional.layer_norm.{n}.forward").values] for n in range(3)
    ]
    assert slots[0] == ["input.0", "input.1.0", "input.2", "input.3", "input.eps", "output.0"]
    assert slots[1] == ["input.0", "input.1.0", "input.weight", "input.bias", "input.eps", "output.0"]
    assert "input.weight" in slots[2]  # a call with a star cannot be read
    backward = [slot_text(value.slot) for value in dump.call("Functional.layer_norm.0.backward").values]
    assert backward == ["input.0", "output.0", "output.2"]


def test_a_functional_behind_a_dispatcher_keeps_its_positions(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path):
        F.max_pool2d(torch.ones(1, 1, 4, 4), 2, 2, 0)
    slots = [
        slot_text(value.slot) for value in ulpscope.open_dump(tmp_path).call("Functional.max_pool2d.0.forward").values
    ]
    assert slots[:4] == ["input.0", "input.1", "input.2", "input.3"]


def test_each_family_of_calls_has_its_kind(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    with ulpscope.capture(tmp_path):
        torch.matmul(x, x.T)
        F.gelu(x)
        F.softmax(x, dim=-1)
        F.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))
        relu(x)
        torch.nn.LSTM(3, 2)(x)
        torch.ops.aten.mul.Tensor(x, x)
    found = set(names(tmp_path))
    assert {
        "Torch.matmul.0.forward",
        "Functional.gelu.0.forward",
        "Functional.softmax.0.forward",
        "Functional.conv2d.0.forward",
        "Torch.relu.0.forward",
        "VF.lstm.0.forward",
        "Aten.mul.Tensor.0.forward",
    } <= found


def test_a_custom_operator_is_named_by_its_namespace(tmp_path: Path) -> None:
    @torch.library.custom_op("ulptest::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with ulpscope.capture(tmp_path):
        torch.ops.ulptest.twice(A)
        twice(A)
    assert any(name.startswith("ulptest.twice") for name in names(tmp_path))


def test_counters_count_each_name_from_zero_in_every_step(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path) as capture:
        for _ in range(2):
            torch.sin(A)
            torch.sin(A)
            torch.cos(A)
            capture.step()
    for step in range(2):
        found = [call_text(call) for call in ulpscope.open_dump(tmp_path, step=step).ids()]
        assert found == ["Torch.sin.0.forward", "Torch.sin.1.forward", "Torch.cos.0.forward"]


def test_shape_queries_leave_no_record(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path):
        _ = (
            A.shape,
            A.size(0),
            A.dim(),
            A.dtype,
            A.device,
            len(A),
            A.numel(),
            A.is_contiguous(),
            A.requires_grad,
            repr(A),
        )
        torch.sin(A)
    assert [name for name in names(tmp_path) if not name.startswith("Torch.sin")] == []


def test_only_the_outermost_call_is_recorded(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path):
        F.cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]))
    assert [name for name in names(tmp_path) if "randn" not in name and "tensor" not in name] == [
        "Functional.cross_entropy.0.forward"
    ]


def test_modules_are_named_by_their_path_and_class(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()))
    with ulpscope.capture(tmp_path, model=model, level="module"):
        model(torch.randn(2, 3))
        model(torch.randn(2, 3))
    assert names(tmp_path) == [
        f"Module.{name}.forward.{index}"
        for index in range(2)
        for name in ("Sequential", "0.Linear", "1.Sequential", "1.0.ReLU", "1.1.ReLU")
    ]


def test_two_models_in_a_list_are_told_apart_by_their_number(tmp_path: Path) -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(3, 3)), torch.nn.Sequential(torch.nn.Linear(3, 3))]
    with ulpscope.capture(tmp_path, model=models, level="module"):
        for model in models:
            model(torch.randn(2, 3))
    assert {"Module.0.0.Linear.forward.0", "Module.1.0.Linear.forward.0"} <= set(names(tmp_path))


@pytest.mark.parametrize("fast", [True, False], ids=["c", "python"])
def test_a_model_that_joins_later_renames_nothing_and_is_no_child_of_the_first(
    tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setattr(taps, "C", None)
    first = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    second, third = torch.nn.Sequential(torch.nn.Tanh()), torch.nn.Tanh()
    capture = ulpscope.Capture(tmp_path, level="module")
    for joining, called in ((first, [first]), (second, [first, second]), ([first, third], [third, second, first])):
        capture.start(joining)
        if joining is second:
            capture.start([third])  # while it is on
        for model in called:
            model(torch.randn(2, 3))
        capture.stop()
        capture.step()
    capture.close()
    own = ["Module.Sequential.forward.0", "Module.0.Linear.forward.0", "Module.1.Linear.forward.0"]
    # 0 and 1 are children of the first.
    others = ["Module.2.Sequential.forward.0", "Module.2.0.Tanh.forward.0"]
    found = [[call_text(call) for call in dump.ids()] for dump in ulpscope.open_run(tmp_path)]
    assert found == [own, own + others, ["Module.3.Tanh.forward.0", *others, *own]]


def test_a_model_that_joins_a_list_has_the_next_number(tmp_path: Path) -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(3, 3)) for _ in range(3)]
    with ulpscope.capture(tmp_path, model=models[:2], level="module") as capture:
        capture.start(models[2])
        for model in models:
            model(torch.randn(2, 3))
    assert names(tmp_path) == [
        f"Module.{number}.{name}.forward.0" for number in range(3) for name in ("Sequential", "0.Linear")
    ]


def test_a_model_keeps_the_name_that_it_had_before_it_was_given(tmp_path: Path) -> None:
    model, other = torch.nn.Sequential(torch.nn.Tanh()), torch.nn.Linear(3, 3)
    with ulpscope.capture(tmp_path, level="module") as capture:
        for given in (None, other, model):
            capture.start(given)
            model(torch.randn(2, 3))
            capture.step()
        other(torch.randn(2, 3))
    *steps, last = [[call_text(call) for call in dump.ids()] for dump in ulpscope.open_run(tmp_path)]
    assert steps == [["Module.Sequential.forward.0", "Module.0.Tanh.forward.0"]] * 3
    assert last == ["Module.1.Linear.forward.0"]


def test_mix_tells_the_parent_of_each_call_forward_and_backward(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ulpscope.capture(tmp_path, model=model, level="mix"):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    dump = ulpscope.open_dump(tmp_path)
    parents = {call_text(call.id): dump.parent(call) for call in dump.calls()}
    texts = {name: parent and call_text(parent) for name, parent in parents.items()}
    assert texts["Functional.linear.0.forward"] == "Module.0.Linear.forward.0"
    assert texts["Module.0.Linear.forward.0"] == "Module.Sequential.forward.0"
    assert texts["Functional.linear.0.backward"] == "Module.0.Linear.backward.0"
    assert texts["Module.0.Linear.backward.0"] == "Module.Sequential.backward.0"
    assert texts["Module.Sequential.forward.0"] is None
    assert [parent for name, parent in texts.items() if name.startswith(("Torch._foreach", "Tensor.add_"))] != []
    assert {texts[name] for name in texts if name.startswith(("Torch._foreach", "Tensor.add_"))} == {
        "Optimizer.SGD.step.0"
    }


def test_the_stack_shows_the_users_own_line(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    with ulpscope.capture(tmp_path, model=model, level="mix"):
        model(torch.randn(2, 3))  # this very line
    dump = ulpscope.open_dump(tmp_path)
    own = [frame for frame in dump.stack(dump.call("Functional.linear.0.forward")) if not frame.library]
    assert own[0].file == __file__
    assert own[0].text.endswith("# this very line")
    assert not any(
        "ulpscope/" in frame.file and "/src/" in frame.file
        for frame in dump.stack(dump.call("Functional.linear.0.forward"))
    )


@pytest.mark.parametrize(
    ("below", "phases"),
    [
        ("Torch.matmul.1", ["forward", "backward"]),
        ("Torch.matmul.1.forward", ["forward"]),
        ("Torch.matmul.1.backward", ["backward"]),
    ],
)
def test_kernels_below_one_call_only(tmp_path: Path, below: str, phases: list[str]) -> None:
    """One with its phase is this phase alone; nothing else of the program is recorded."""
    x = torch.randn(2, 3, requires_grad=True)
    with ulpscope.capture(tmp_path, level="kernel", below=below):
        for _ in range(2):
            torch.matmul(x, x.T).sum().backward()
    dump = ulpscope.open_dump(tmp_path)
    kernels = [call for call in dump.calls() if call.id.kind == "Aten"]
    assert {call.id.phase.value for call in kernels} == set(phases)
    parents = {call_text(parent) for parent in map(dump.parent, kernels) if parent is not None}
    assert parents == ({f"Torch.matmul.1.{phase}" for phase in phases} if "forward" in phases else set())
    others = [call for call in dump.calls() if call.id.kind != "Aten"]
    assert [call_text(call.id) for call in others] == [f"Torch.matmul.1.{phase}" for phase in phases]
    assert all(call.origin == others[-1].origin for call in kernels if call.id.phase is Phase.BACKWARD)


def test_what_a_dispatch_mode_computes_is_no_call_of_the_program(tmp_path: Path) -> None:
    class Device(TorchDispatchMode):
        def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = kernel(*args, **(kwargs or {}))
            return out * 1.0 if kernel is torch.ops.aten.mul.Tensor else out

    def names(folder: Path, device: Any) -> list[str]:
        x = torch.ones(3, requires_grad=True)
        with device, ulpscope.capture(folder):
            (x * x).sum().backward()
        return [ulpscope.call_text(call) for call in ulpscope.open_dump(folder).ids()]

    assert names(tmp_path / "a", Device()) == names(tmp_path / "b", contextlib.nullcontext())


@pytest.mark.parametrize("groups", [1, 2])
def test_an_optimizer_step_tells_the_numbers_it_is_made_with(tmp_path: Path, groups: int) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(groups)]
    optimizer = torch.optim.Adam([{"params": [weight]} for weight in weights], lr=0.5)
    for weight in weights:
        weight.grad = torch.ones(2)
    with ulpscope.capture(tmp_path / "run", level="op"):
        optimizer.step()
    (step,) = (call for call in ulpscope.open_dump(tmp_path / "run").calls() if call.id.kind == "Optimizer")
    told = {value.slot.path: value.scalar for value in step.values if "lr" in value.slot.path}
    assert told == ({("lr",): 0.5} if groups == 1 else {(0, "lr"): 0.5, (1, "lr"): 0.5})
