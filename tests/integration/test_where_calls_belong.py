"""Calls that no module makes by itself: of graphs, of the backward of custom functions, of compiled regions, inside transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import ulpscope
from integration.runs import LEVELS, assert_same, frozen
from ulpscope.model.names import call_text
from ulpscope.native import taps

INPUT = torch.arange(12.0).reshape(3, 4).sin()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, data: Tensor) -> Tensor:
        return self.rest(self.first(data)).sum(-1)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor) -> Tensor:
        ctx.save_for_backward(data)
        return data * data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (data,) = ctx.saved_tensors
        return torch.mul(2 * data, grad)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, data: Tensor) -> Tensor:
        return Squared.apply(self.linear(data))


def exported(strict: bool) -> Callable[[], nn.Module]:
    return lambda: torch.export.export(Net(), (INPUT,), strict=strict).module()


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(Net())


def inside_a_model() -> nn.Module:
    return nn.Sequential(exported(False)())


def customs() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Custom(), Custom())


def compiled() -> nn.Module:
    net = Net()
    net.rest = torch.compile(net.rest, backend="aot_eager")
    return net


def compiled_in_place() -> nn.Module:
    net = Net()
    net.rest.compile(backend="aot_eager")
    return net


def run(make: Callable[[], nn.Module], path: Path | None, level: str = "mix", **options: Any) -> list[Any]:
    """Two steps of training, and everything that came of them."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []

    def step() -> None:
        data = torch.tensor(INPUT.tolist(), requires_grad=True)
        optimizer.zero_grad()
        loss = model(data).square().sum()
        loss.backward()
        results.append(frozen([loss, data.grad, {name: each.grad for name, each in model.named_parameters()}]))
        optimizer.step()

    if path is None:
        step(), step()
        return results
    with ulpscope.capture(path, model=model, level=level, checksum=True, **options) as capture:
        step()
        capture.step()
        step()
    return results


def modules(path: Path, step: int = 1) -> dict[str, str]:
    return {call_text(call.id): call.module for call in ulpscope.open_dump(path, step=step).calls()}


MODELS = {
    "strict": exported(True),
    "exported": exported(False),
    "traced": traced,
    "inside": inside_a_model,
    "customs": customs,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_run_is_not_changed(kind: str, level: str, tmp_path: Path) -> None:
    assert_same(run(MODELS[kind], None), run(MODELS[kind], tmp_path / "run", level))


@pytest.fixture(params=["C", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(taps, "C", None)


@pytest.mark.parametrize("kind", ["strict", "exported"])
def test_a_call_of_an_exported_graph_is_in_the_module_of_its_node(way: None, kind: str, tmp_path: Path) -> None:
    run(MODELS[kind], tmp_path)
    found = modules(tmp_path)
    for phase in ("forward", "backward"):
        assert found[f"Aten.linear.default.0.{phase}"] == "first"
        assert found[f"Aten.linear.default.1.{phase}"] == "rest.0"
        assert found[f"Aten.relu.default.0.{phase}"] == "rest.1"
        assert found[f"Aten.sum.dim_IntList.0.{phase}"] == ""
    assert {"Module.first.Linear.parameters_grad.0", "Module.rest.0.Linear.parameters_grad.0"} <= set(found)


def test_below_a_model_the_graph_comes_before_the_paths_of_its_nodes(way: None, tmp_path: Path) -> None:
    run(inside_a_model, tmp_path)
    found = modules(tmp_path)
    assert found["Aten.linear.default.0.forward"] == "0.first"
    assert found["Aten.sum.dim_IntList.0.backward"] == "0"
    assert "Module.0.rest.0.Linear.parameters_grad.0" in found


def test_only_what_is_in_a_module_of_a_graph_can_be_wanted(way: None, tmp_path: Path) -> None:
    run(exported(False), tmp_path, level="op", only=["rest.0"])
    assert {name for name in modules(tmp_path) if name.startswith("Aten")} == {
        "Aten.linear.default.1.forward",
        "Aten.linear.default.1.backward",
    }


def test_a_module_that_a_traced_graph_calls_is_in_the_module_that_it_was_called_by(way: None, tmp_path: Path) -> None:
    run(traced, tmp_path)
    found = modules(tmp_path)
    assert found["Module.rest.0.Linear.forward.0"] == "rest"
    assert found["Module.first.Linear.forward.0"] == ""
    assert found["Functional.linear.1.forward"] == "rest.0"


def test_what_the_backward_of_a_custom_function_calls_is_in_the_module_that_applied_it(
    way: None, tmp_path: Path
) -> None:
    run(customs, tmp_path)
    for step in (0, 1):
        found = modules(tmp_path, step)
        assert (found["Tensor.__rmul__.0.forward"], found["Torch.mul.0.forward"]) == ("1", "1")
        assert (found["Tensor.__rmul__.1.forward"], found["Torch.mul.1.forward"]) == ("0", "0")


def test_a_custom_function_that_nobody_watched_has_a_backward_in_no_module(way: None, tmp_path: Path) -> None:
    model = customs()
    loss = model(INPUT).sum()
    with ulpscope.capture(tmp_path, model=model):
        loss.backward()
    assert modules(tmp_path, 0)["Torch.mul.0.forward"] == ""


@pytest.mark.parametrize("kind", ["compiled", "compiled in place"])
def test_parameters_of_a_compiled_region_have_their_gradients(way: None, kind: str, tmp_path: Path) -> None:
    run(Net, tmp_path / "plain")
    run(MODELS[kind], tmp_path / "run")
    plain, found = (
        {
            call_text(call.id).replace("_orig_mod.", ""): call
            for call in ulpscope.open_dump(tmp_path / name, step=1).calls()
        }
        for name in ("plain", "run")
    )
    name = "Module.rest.0.Linear.parameters_grad.0"
    sides = [{value.slot: value.checksum for value in side[name].values} for side in (plain, found)]
    assert sides[0] == sides[1]
    assert len(sides[0]) == 2
    assert "Module.first.Linear.parameters_grad.0" in found
    assert [
        value.checksum
        for value in plain["Module.rest.Sequential.backward.0"].values
        if value.slot.role.value == "output"
    ] == [
        value.checksum
        for each, call in found.items()
        if each.startswith("Module.rest.") and each.endswith("backward.0")
        for value in call.values
        if value.slot.role.value == "output"
    ]


def test_what_runs_in_the_backward_of_a_region_is_in_the_module_that_was_compiled(way: None, tmp_path: Path) -> None:
    run(compiled, tmp_path)
    assert modules(tmp_path)["Aten.mm.default.0.forward"] == "rest"


TRANSFORMS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    "vmap": lambda model, own: torch.vmap(lambda row: torch.func.functional_call(model, own, (row,)))(INPUT),
    "vmap of the last": lambda model, own: torch.vmap(lambda row: torch.func.functional_call(model, own, (row,)), 1)(
        INPUT.T
    ),
    "grad": lambda model, own: torch.func.grad(lambda at: torch.func.functional_call(model, at, (INPUT,)).sum())(own),
    "vmap of grad": lambda model, own: torch.vmap(
        torch.func.grad(lambda at, row: torch.func.functional_call(model, at, (row,)).sum()), (None, 0)
    )(own, INPUT),
    "jvp": lambda model, own: torch.func.jvp(
        lambda data: torch.func.functional_call(model, own, (data,)), (INPUT,), (INPUT,)
    ),
    "jacrev": lambda model, own: torch.func.jacrev(lambda data: torch.func.functional_call(model, own, (data,)))(INPUT),
}


def transform(name: str, path: Path | None, level: str = "mix", **options: Any) -> Any:
    model = Net()
    own = {key: value.detach() for key, value in model.named_parameters()}
    if path is None:
        return frozen(TRANSFORMS[name](model, own))
    with ulpscope.capture(path, model=model, level=level, checksum=True, **options):
        return frozen(TRANSFORMS[name](model, own))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_computes_the_same(name: str, level: str, tmp_path: Path) -> None:
    assert_same(transform(name, None), transform(name, tmp_path / "run", level, tensors=True))


def values(path: Path, name: str) -> list[ulpscope.Value]:
    return [value for value in ulpscope.open_dump(path).call(name).values if value.is_tensor]


def test_values_inside_vmap_are_those_of_all_rows_together(way: None, tmp_path: Path) -> None:
    transform("vmap", tmp_path / "run", tensors=True)
    with ulpscope.capture(tmp_path / "plain", tensors=True, checksum=True):
        Net()(INPUT)
    for name in ("Functional.linear.0.forward", "Functional.linear.1.forward", "Functional.relu.0.forward"):
        for inside, plain in zip(values(tmp_path / "run", name), values(tmp_path / "plain", name), strict=True):
            assert inside.checksum is not None
            assert inside.checksum == plain.checksum
    (data, *_) = values(tmp_path / "run", "Functional.linear.0.forward")
    assert (data.shape, data.extra["stored_shape"], data.extra["batch_dims"]) == ((4,), [3, 4], [0])


def test_values_inside_grad_are_those_without_it(way: None, tmp_path: Path) -> None:
    transform("grad", tmp_path / "run")
    with ulpscope.capture(tmp_path / "plain", checksum=True):
        Net()(INPUT)
    for inside, plain in zip(
        values(tmp_path / "run", "Functional.relu.0.forward"),
        values(tmp_path / "plain", "Functional.relu.0.forward"),
        strict=True,
    ):
        assert inside.checksum == plain.checksum
        assert "batch_dims" not in inside.extra
