"""An exception of the program passes through unchanged and leaves a dump that ends with the open call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ulpscope
from integration.runs import LEVELS
from ulpscope.model.names import call_text


class Trouble(Exception):
    """Compared by identity."""


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.inner = nn.Linear(3, 3)

    def forward(self, data: Tensor) -> Tensor:
        data = self.inner(data)
        raise self.error


class Catches(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.wrong = Raises(error)
        self.last = nn.Linear(3, 3)
        self.caught: BaseException | None = None

    def forward(self, data: Tensor) -> Tensor:
        data = self.first(data)
        try:
            data = self.wrong(data)
        except Trouble as error:
            self.caught = error
        return self.last(data).relu()


def names(dump: ulpscope.Dump) -> list[str]:
    return [call_text(call.id) for call in dump.calls()]


def raised(dump: ulpscope.Dump) -> dict[str, str]:
    return {call_text(call.id): call.error for call in dump.calls() if call.error is not None}


def no_notes_of_ours(dump: ulpscope.Dump) -> None:
    assert [note for note in dump.manifest.notes if note.startswith("could not record")] == []


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("error", [Trouble("x"), KeyboardInterrupt(), SystemExit(3), StopIteration("end")])
def test_an_exception_in_forward_is_the_same_object_outside(error: BaseException, level: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Raises(error))
    with (
        pytest.raises(type(error)) as caught,
        ulpscope.capture(tmp_path / "run", model=model, level=level),
    ):
        model(torch.ones(2, 3))
    assert caught.value is error
    assert error.__context__ is None and error.__cause__ is None and not getattr(error, "__notes__", [])
    dump = ulpscope.open_dump(tmp_path / "run")
    no_notes_of_ours(dump)
    assert len(dump) > 0


@pytest.mark.parametrize("level", ["module", "mix"])
def test_the_open_modules_are_recorded_with_the_error_and_their_inputs(level: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Raises(Trouble("the reason")))
    with pytest.raises(Trouble), ulpscope.capture(tmp_path / "run", model=model, level=level):
        model(torch.ones(2, 3))
    dump = ulpscope.open_dump(tmp_path / "run")
    assert raised(dump) == {
        "Module.Sequential.forward.0": "Trouble: the reason",
        "Module.1.Raises.forward.0": "Trouble: the reason",
    }
    call = dump.call("Module.1.Raises.forward.0")
    assert {value.slot.role.value for value in call.values} == {"input"}
    assert dump.call("Module.1.inner.Linear.forward.0").error is None


@pytest.mark.parametrize("level", ["op", "mix", "kernel"])
def test_an_operator_that_raises_is_the_last_call(level: str, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught,
        ulpscope.capture(tmp_path / "run", level=level),
    ):
        data = torch.ones(2, 3) * 2
        torch.mm(data, data)
    dump = ulpscope.open_dump(tmp_path / "run")
    assert dump.ending == "complete" or "RuntimeError" in dump.ending
    outermost = [call for call in dump.calls() if call.id.kind != "Aten"]
    assert call_text(outermost[-1].id) == "Torch.mm.0.forward"
    assert outermost[-1].error == f"RuntimeError: {caught.value}"
    assert [value.shape for value in outermost[-1].values] == [(2, 3), (2, 3)]
    assert any("RuntimeError" in note for note in dump.manifest.notes)


@pytest.mark.parametrize("level", LEVELS)
def test_calls_after_a_caught_exception_have_the_right_parent(level: str, tmp_path: Path) -> None:
    error = Trouble("caught")
    model = Catches(error)
    with ulpscope.capture(tmp_path / "run", model=model, level=level):
        out = model(torch.ones(2, 3))
        out.sum().backward()
    assert model.caught is error
    dump = ulpscope.open_dump(tmp_path / "run")
    no_notes_of_ours(dump)
    assert dump.ending == "complete"
    above = {call_text(call.id): call_text(found) if (found := dump.parent(call)) else None for call in dump.calls()}
    if level != "op":
        assert above["Module.last.Linear.forward.0"] == "Module.Catches.forward.0"
        assert dump.call("Module.wrong.Raises.forward.0").error == "Trouble: caught"
        assert dump.call("Module.Catches.forward.0").error is None
        assert dump.call("Module.last.Linear.backward.0").error is None
    if level in ("mix", "kernel"):
        assert above["Tensor.relu.0.forward"] == "Module.Catches.forward.0"
        assert above["Functional.linear.2.forward"] == "Module.last.Linear.forward.0"
        assert above["Tensor.sum.0.forward"] is None
    if level != "module":
        assert dump.call("Functional.linear.2.forward").module == "last"
        assert dump.call("Tensor.relu.0.forward").module == ""


@pytest.mark.parametrize("level", LEVELS)
def test_a_caught_operator_error_leaves_the_following_calls_in_order(level: str, tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    with ulpscope.capture(tmp_path / "run", model=layer, level=level):
        for width in (3, 4, 3):
            try:
                layer(torch.ones(2, width))
            except RuntimeError:
                pass
    dump = ulpscope.open_dump(tmp_path / "run")
    name = "Module.Linear.forward.{}" if level in ("module", "mix", "kernel") else "Functional.linear.{}.forward"
    errors = [dump.call(name.format(number)).error for number in range(3)]
    assert errors[0] is None and errors[2] is None
    assert "shapes cannot be multiplied" in str(errors[1])
    outputs = [
        [value for value in dump.call(name.format(number)).values if value.slot.role.value == "output"]
        for number in range(3)
    ]
    assert [len(found) for found in outputs] == [1, 0, 1]
    tops = [call for call in dump.calls() if call.parent is None and call.id.name in ("Linear", "linear")]
    assert len(tops) == 3


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return data * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("error", [Trouble("back"), KeyboardInterrupt()])
def test_an_exception_in_backward_is_the_same_object_and_the_next_pass_works(
    error: BaseException, level: str, tmp_path: Path
) -> None:
    layer = nn.Linear(3, 3)
    with ulpscope.capture(tmp_path / "run", model=layer, level=level):
        with pytest.raises(type(error)) as caught:
            RaisesInBackward.apply(layer(torch.ones(1, 3)), error).sum().backward()
        assert caught.value is error
        layer(torch.ones(1, 3)).sum().backward()
        after = torch.ones(1) + 1
    assert after.item() == 2
    dump = ulpscope.open_dump(tmp_path / "run")
    assert dump.ending == "complete"
    no_notes_of_ours(dump)
    if level != "op":
        assert "Module.Linear.backward.1" in names(dump)
    if level != "module":
        assert "Functional.linear.1.backward" in names(dump)
        assert dump.parent(dump.call("Tensor.__add__.0.forward")) is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_torch_node_that_raises_in_backward_does_not_adopt_later_calls(level: str, tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path / "run", level=level):
        weight = torch.ones(2, requires_grad=True)
        hidden = weight.exp()
        loss = (hidden * hidden).sum()
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        torch.ones(1).cos()
        nn.Identity()(torch.ones(1))
    dump = ulpscope.open_dump(tmp_path / "run")
    no_notes_of_ours(dump)
    if level != "module":
        assert dump.parent(dump.call("Tensor.cos.0.forward")) is None
    if level != "op":
        assert dump.parent(dump.call("Module.Identity.forward.0")) is None


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_a_hook_of_the_program_passes_through(level: str, tmp_path: Path) -> None:
    error = Trouble("hook")
    layer = nn.Linear(3, 3)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        raise error

    handle = layer.register_forward_hook(hook)
    with pytest.raises(Trouble) as caught, ulpscope.capture(tmp_path / "run", model=layer, level=level):
        layer(torch.ones(1, 3))
    assert caught.value is error
    handle.remove()
    no_notes_of_ours(ulpscope.open_dump(tmp_path / "run"))


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_an_optimizer_step_does_not_adopt_later_calls(level: str, tmp_path: Path) -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.ones(1).exp()
            raise Trouble("step")

    layer = nn.Linear(3, 3)
    optimizer = Breaks(layer.parameters(), lr=0.1)
    with ulpscope.capture(tmp_path / "run", model=layer, level=level):
        layer(torch.ones(1, 3)).sum().backward()
        with pytest.raises(Trouble):
            optimizer.step()
        layer(torch.ones(1, 3))
        torch.ones(1).cos()
    dump = ulpscope.open_dump(tmp_path / "run")
    if level != "module":
        assert dump.parent(dump.call("Tensor.cos.0.forward")) is None
    if level != "op":
        assert dump.parent(dump.call("Module.Linear.forward.1")) is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_value_whose_own_methods_raise_does_not_disturb_the_program(level: str, tmp_path: Path) -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise Trouble("repr")

        def __eq__(self, other: object) -> bool:
            raise Trouble("eq")

        __hash__ = None

        def __len__(self) -> int:
            raise Trouble("len")

        def __getattr__(self, name: str) -> Any:
            raise Trouble(name)

    class Takes(nn.Module):
        def forward(self, data: Tensor, other: Any, *, more: Any) -> Any:
            return {"data": data + 1, "other": other}

    hostile = Hostile()
    with ulpscope.capture(tmp_path / "run", level=level):
        result = Takes()(torch.ones(1), hostile, more=[hostile, {hostile.__class__: hostile}])
    assert result["other"] is hostile
    dump = ulpscope.open_dump(tmp_path / "run")
    no_notes_of_ours(dump)
    assert len(dump) > 0


def test_a_generator_that_is_left_does_not_shift_the_parents(tmp_path: Path) -> None:
    class Streams(nn.Module):
        def forward(self, data: Tensor) -> Any:
            for _ in range(3):
                yield data * 2

    model = Streams()
    with ulpscope.capture(tmp_path / "run", model=model, level="mix"):
        for value in model(torch.ones(1)):
            value.exp()
            break
        torch.ones(1).cos()
    dump = ulpscope.open_dump(tmp_path / "run")
    assert dump.parent(dump.call("Tensor.cos.0.forward")) is None
    assert dump.parent(dump.call("Tensor.exp.0.forward")) is None
