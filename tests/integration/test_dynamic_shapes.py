"""Tracing with symbols for sizes: the same graphs, guards and programs with and without capture, during it and after."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ulpscope
from integration.runs import LEVELS, assert_same, frozen, seed


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Rows may be many or few."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 6)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(self.table(rows))
        return self.head(hidden).view(rows.shape[0], -1) * rows.shape[0]


def told(graph: torch.fx.Graph) -> list[Any]:
    """Every node with its target and arguments, and the shape of every placeholder."""
    nodes = [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]
    shapes = [str(getattr(node.meta.get("val"), "shape", "")) for node in graph.nodes if node.op == "placeholder"]
    return [nodes, shapes]


def guards(env: Any) -> list[str]:
    return [str(guard.expr) for guard in env.guards]


def by_make_fx(model: nn.Module, rows: Tensor) -> tuple[list[Any], Any]:
    traced = make_fx(
        lambda data: torch.relu(model(data)).view(-1) * data.shape[0],
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
    )(rows)
    return [told(traced.graph), guards(traced.shape_env)], traced


def by_functional_make_fx(model: nn.Module, rows: Tensor) -> tuple[list[Any], Any]:
    function = torch.func.functionalize(lambda data: torch.relu(data * 2).mul_(data.shape[0]).view(-1))
    traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(rows)
    return [told(traced.graph), guards(traced.shape_env)], traced


def exported(model: nn.Module, rows: Tensor, strict: bool) -> tuple[list[Any], Any]:
    dynamic = {"rows": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(model, (rows,), strict=strict, dynamic_shapes=dynamic)
    decomposed = program.run_decompositions()
    limits = [str(limit) for limit in program.range_constraints.values()]
    return [told(program.graph), told(decomposed.graph), limits], decomposed.module()


def by_strict_export(model: nn.Module, rows: Tensor) -> tuple[list[Any], Any]:
    return exported(model, rows, True)


def by_export(model: nn.Module, rows: Tensor) -> tuple[list[Any], Any]:
    return exported(model, rows, False)


def by_compile(model: nn.Module, rows: Tensor) -> tuple[list[Any], Any]:
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        found.append(told(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    compiled(rows)
    return found, compiled


def without_counters(text: Any) -> Any:
    """Symbols are numbered by the hash of a source or in turn, lifted attributes by a running number."""
    if isinstance(text, list | tuple):
        return [without_counters(item) for item in text]
    return re.sub(r"\bs\d+\b", "s", text)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("trace", [by_make_fx, by_functional_make_fx, by_export, by_strict_export, by_compile])
def test_a_trace_with_symbols_for_sizes_is_that_of_a_bare_run(
    trace: Callable[[nn.Module, Tensor], tuple[list[Any], Any]], level: str, tmp_path: Path
) -> None:
    seed()
    model = Net().eval()
    few, many = torch.randint(0, 20, (3, 4)), torch.randint(0, 20, (7, 4))
    bare, program = trace(model, few)
    expected = frozen(program(many))
    with ulpscope.capture(tmp_path / "run", model=model, level=level):
        captured, program = trace(model, few)
        during = frozen(program(many))
        model(few)
    assert without_counters(captured) == without_counters(bare)
    assert_same(expected, during)
    assert_same(expected, frozen(program(many)))
    dump = ulpscope.open_dump(tmp_path / "run")
    assert [note for note in dump.manifest.notes if note.startswith("could not record")] == []
    assert len(dump) > 0
    names = {call.name for call in dump.ids()}
    assert names & {"linear", "Net", "head.Linear", "addmm.default"} or any("Linear" in name for name in names)


def test_what_a_tracer_wrote_down_is_no_call_and_the_dump_says_so(tmp_path: Path) -> None:
    model = Net().eval()
    with ulpscope.capture(tmp_path / "run", model=model, level="mix"):
        by_make_fx(model, torch.zeros(3, 4, dtype=torch.long))
    dump = ulpscope.open_dump(tmp_path / "run")
    assert [call for call in dump.ids() if call.name in ("linear", "relu", "layer_norm")] == []
    assert any("traced" in note for note in dump.manifest.notes)


def computed_with_symbols(model: nn.Module) -> list[list[str]]:
    """The guards after each step of a program that computes with symbols, outside of any tracer."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    data = mode.from_tensor(torch.ones(3, 8), static_shapes=False)
    found = []
    with mode:
        for step in (
            lambda: model(data),
            lambda: torch.relu(data),
            lambda: torch.zeros(data.shape[0], 4).reshape((data.shape[0] * 2, 2)),
            lambda: data[: data.shape[0]].sum(dim=0),
            lambda: data.clone().mul_(data.numel()),
            lambda: torch.empty(data.shape[0], 2, device="meta").expand(5, -1, -1),
            lambda: functional_of(data),
        ):
            step()
            found.append(guards(env))
    return found


def functional_of(data: Tensor) -> None:
    torch._enable_functionalization(reapply_views=True)
    try:
        torch._to_functional_tensor(data).mul_(2).view(-1)
    finally:
        torch._disable_functionalization()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("overflows", [None, 100])
def test_a_tensor_whose_sizes_are_symbols_is_never_asked_for_a_number(
    level: str, overflows: int | None, tmp_path: Path
) -> None:
    model = nn.LayerNorm(8)
    bare = computed_with_symbols(model)
    with ulpscope.capture(tmp_path / "run", model=model, level=level, overflows=overflows):
        captured = computed_with_symbols(model)
    assert captured == bare
    if overflows is None:
        values = [value for call in ulpscope.open_dump(tmp_path / "run").calls() for value in call.values]
        symbolic = [value for value in values if "symbols" in value.extra]
        assert symbolic and all(value.error and value.shape is None for value in symbolic)
        assert all(isinstance(size, str | int) for value in symbolic for size in value.extra["symbols"])
