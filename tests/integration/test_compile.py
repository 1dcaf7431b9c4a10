"""torch.compile, jit and fx: the same graphs and the same numbers with and without capture."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
from torch import Tensor, nn

import ulpscope
from integration.runs import LEVELS, Program, assert_same, frozen, seed

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, data: Tensor) -> Tensor:
        return self.last(self.norm(self.first(data)).relu())


class Breaking(Net):
    """With a graph break in its middle: two compiled regions and eager Python between them."""

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.norm(self.first(data))
        torch._dynamo.graph_break()
        return self.last(hidden.relu())


class CountingBackend:
    """Counts the graphs that dynamo hands over; runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def training(model: nn.Module, call: Callable[[Tensor], Tensor]) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = call(torch.randn(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, model)


def run(
    kind: type[Net], backend: Any, when: str, path: Path | None, level: str = "mix"
) -> tuple[list[Any], dict[str, int], nn.Module]:
    """Three steps; compiled and warmed before, compiled before, or compiled after the start of the capture."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    seed()
    model = kind()
    results: list[Any] = []

    def steps() -> None:
        call = torch.compile(model, backend=backend) if compiled is None else compiled
        program = training(model, call)
        for _ in range(3):
            results.append(frozen(program.step()))
            if cap is not None:
                cap.step()

    compiled = None if when == "compiled after" else torch.compile(model, backend=backend)
    if when == "warmed before":
        compiled(torch.randn(3, 4)).sum().backward()
        model.zero_grad()
    cap = None
    if path is None:
        steps()
    else:
        with ulpscope.capture(path, model=model, level=level) as cap:
            steps()
    results.append(frozen([dict(model.named_parameters()), dict(model.named_buffers())]))
    return results, dict(torch._dynamo.utils.counters["frames"] | torch._dynamo.utils.counters["stats"]), model


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["warmed before", "compiled before", "compiled after"])
@pytest.mark.parametrize("kind", [Net, Breaking])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_computes_the_same_from_the_same_graphs(
    backend: str, kind: type[Net], when: str, level: str, tmp_path: Path
) -> None:
    bare, bare_counts, _ = run(kind, backend, when, None)
    captured, counts, _ = run(kind, backend, when, tmp_path / "run", level)
    assert_same(bare, captured)
    assert counts == bare_counts
    assert counts.get("unique_graphs", 0) >= (2 if kind is Breaking else 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["warmed before", "compiled before", "compiled after"])
def test_no_graph_is_compiled_because_of_a_capture(when: str, level: str, tmp_path: Path) -> None:
    bare, captured = CountingBackend(), CountingBackend()
    run(Breaking, bare, when, None)
    run(Breaking, captured, when, tmp_path / "run", level)
    assert bare.graphs == captured.graphs > 0


@pytest.mark.parametrize("level", LEVELS)
def test_no_graph_is_compiled_anew_after_a_capture(level: str, tmp_path: Path) -> None:
    backend = CountingBackend()
    model = Net().eval()
    compiled = torch.compile(model, backend=backend)
    data = torch.randn(3, 4)
    with torch.no_grad():
        compiled(data)
        warm = backend.graphs
        with ulpscope.capture(tmp_path / "run", model=model, level=level):
            compiled(data)
        compiled(data)
    assert backend.graphs == warm == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["warmed before", "compiled before", "compiled after"])
def test_the_manifest_says_that_a_region_was_compiled(when: str, level: str, tmp_path: Path) -> None:
    run(Net, "eager", when, tmp_path / "run", level)
    for dump in ulpscope.open_run(tmp_path / "run"):
        assert any("compiled" in note and "boundary" in note for note in dump.manifest.notes)
        assert [note for note in dump.manifest.notes if note.startswith("could not record")] == []


@pytest.mark.parametrize("level", ["module", "mix"])
@pytest.mark.parametrize("when", ["warmed before", "compiled before", "compiled after"])
def test_the_compiled_module_is_one_record_with_its_values(when: str, level: str, tmp_path: Path) -> None:
    run(Net, "eager", when, tmp_path / "run", level)
    for dump in ulpscope.open_run(tmp_path / "run"):
        found = [call for call in dump.calls() if call.id.kind == "Module" and call.id.phase.value == "forward"]
        assert [call.id.name.rpartition(".")[2] for call in found] == ["OptimizedModule"]
        shapes = {
            value.slot.role.value: value.shape for value in found[0].values if value.slot.role.value != "parameters"
        }
        assert shapes == {"input": (3, 4), "output": (3, 2)}


@pytest.mark.parametrize("level", ["op", "mix", "kernel"])
def test_what_runs_around_a_compiled_region_is_still_recorded(level: str, tmp_path: Path) -> None:
    compiled = torch.compile(Net(), backend="eager")
    with ulpscope.capture(tmp_path / "run", level=level):
        data = torch.ones(3, 4) * 2
        out = compiled(data)
        out.cos()
    dump = ulpscope.open_dump(tmp_path / "run")
    names = {(call.kind, call.name) for call in dump.ids()}
    assert ("Tensor", "__mul__") in names and ("Tensor", "cos") in names
    assert ("Functional", "linear") not in names
    assert dump.parent(dump.call("Tensor.cos.0.forward")) is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_function_with_a_disabled_part_comes_back_to_capture(level: str, tmp_path: Path) -> None:
    @torch._dynamo.disable
    def outside(data: Tensor) -> Tensor:
        return data.sin()

    @torch.compile(backend="eager")
    def function(data: Tensor) -> Tensor:
        return outside(data * 2) + 1

    bare = frozen(function(torch.ones(2)))
    with ulpscope.capture(tmp_path / "run", level=level):
        captured = frozen(function(torch.ones(2)))
        torch.ones(1).cos()
        nn.Identity()(torch.ones(1))
    assert_same(bare, captured)
    names = {call.name for call in ulpscope.open_dump(tmp_path / "run").ids()}
    assert ("cos" if level != "module" else "Identity") in names


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_in_a_compiled_region_comes_back_to_capture(level: str, tmp_path: Path) -> None:
    @torch.compile(backend="eager")
    def function(data: Tensor) -> Tensor:
        return data @ torch.ones(3, 3)

    with ulpscope.capture(tmp_path / "run", level=level):
        function(torch.ones(2, 3))
        with pytest.raises(Exception, match=r"shape|size|mat1"):
            function(torch.ones(2, 4))
        torch.ones(1).cos()
        nn.Identity()(torch.ones(1))
    names = {call.name for call in ulpscope.open_dump(tmp_path / "run").ids()}
    assert ("cos" if level != "module" else "Identity") in names
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_first_import_of_dynamo_while_capturing_is_noticed(tmp_path: Path) -> None:
    """In a fresh process: torch.compile brings dynamo in when the capture is on already."""
    program = """
import sys, torch, ulpscope
assert "torch._dynamo" not in sys.modules
model = torch.nn.Linear(2, 2)
with ulpscope.capture(sys.argv[1], model=model, level="mix"):
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 2)).sum().backward()
    torch.ones(1).cos()
dump = ulpscope.open_dump(sys.argv[1])
names = {(call.kind, call.name) for call in dump.ids()}
assert ("Module", "OptimizedModule") in {(kind, name.rpartition(".")[2]) for kind, name in names}, names
assert ("Functional", "linear") not in names, names
assert ("Tensor", "cos") in names, names
assert any("compiled" in note for note in dump.manifest.notes), dump.manifest.notes
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# --- tracing ----------------------------------------------------------------------------------------------------


def graph_of_trace(model: nn.Module) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(torch.jit.trace(model, torch.ones(3, 4)).inlined_graph)


def graph_of_script(model: nn.Module) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(torch.jit.script(model).inlined_graph)


def graph_of_fx(model: nn.Module) -> str:
    return str(torch.fx.symbolic_trace(model).graph)


def graph_of_make_fx(model: nn.Module) -> str:
    from torch.fx.experimental.proxy_tensor import make_fx

    return str(make_fx(model)(torch.ones(3, 4)).graph)


def graph_of_export(model: nn.Module) -> str:
    return str(torch.export.export(model, (torch.ones(3, 4),)).graph)


def without_places(graph: str) -> str:
    """A TorchScript graph without source lines, which name this very stack, and without its running numbers."""
    lines = (line.partition(" # ")[0].partition(", scope: ")[0] for line in graph.splitlines())
    return re.sub(r"___torch_mangle_\d+\.", "", "\n".join(lines))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "trace",
    [graph_of_trace, graph_of_script, graph_of_fx, graph_of_make_fx, graph_of_export],
    ids=lambda one: one.__name__,
)
def test_a_model_is_traced_into_the_same_graph(trace: Callable[[nn.Module], str], level: str, tmp_path: Path) -> None:
    seed()
    model = Net().eval()
    bare = without_places(trace(model))
    with warnings.catch_warnings(), ulpscope.capture(tmp_path / "run", model=model, level=level):
        warnings.filterwarnings("error", message=".*FakeTensor.*")
        captured = without_places(trace(model))
        out = model(torch.ones(3, 4))
    assert captured == bare
    assert out.shape == (3, 2)
    dump = ulpscope.open_dump(tmp_path / "run")
    assert [note for note in dump.manifest.notes if note.startswith("could not record")] == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_scripted_and_a_traced_model_compute_the_same(level: str, tmp_path: Path) -> None:
    seed()
    model = Net().eval()
    data = torch.randn(3, 4)

    def twins() -> list[nn.Module]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [torch.jit.script(model), torch.jit.trace(model, data), torch.fx.symbolic_trace(model)]

    made = twins()
    for _ in range(3):  # TorchScript profiles its first runs and then runs another graph
        bare = [frozen(twin(data)) for twin in made]
    with ulpscope.capture(tmp_path / "run", level=level):
        captured = [frozen(twin(data)) for twin in made]
    assert_same(bare, captured)
    dump = ulpscope.open_dump(tmp_path / "run")
    assert len(dump) > 0
    assert [note for note in dump.manifest.notes if note.startswith("could not record")] == []


@pytest.mark.parametrize("how", ["kernel", "judge"])
def test_compiling_ahead_of_time_leaves_no_mode_of_ours_behind(how: str, tmp_path: Path) -> None:
    """Inductor takes all modes off and puts back what it took, and dynamo tells us of a compilation in between."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler
    from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

    watch = ulpscope.Capture(tmp_path, level="kernel") if how == "kernel" else ulpscope.ledger(tmp_path)
    watch.start()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*FakeTensor.*")
        with _disable_current_modes(), callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            torch.ones(2) + 1
        exported = torch.export.export(Net().eval(), (torch.ones(3, 4),))
        exported.run_decompositions()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 1
    watch.stop()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert not is_in_torch_dispatch_mode()
    watch.close()


def halved(data: Tensor) -> Tensor:
    return data / 2


def test_a_function_that_warns_is_scripted_and_compiled_as_before(tmp_path: Path) -> None:
    """TorchScript knows `warnings.warn` by its identity, and dynamo by its name."""

    def run() -> list[Any]:
        def halved(data: Tensor) -> Tensor:  # another one each time: neither compiles a function twice
            warnings.warn("halved", stacklevel=2)
            return data / 2

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [torch.jit.script(halved)(torch.ones(2)), torch.compile(halved, backend="eager")(torch.ones(2))]
        return frozen([found, dict(torch._dynamo.utils.counters["stats"])])

    before = warnings.warn
    bare = run()
    with ulpscope.capture(tmp_path / "run", level="mix"):
        captured = run()
        kept = warnings.warn  # as a module does that is loaded now
    assert_same(bare, captured)
    assert warnings.warn is before
    with pytest.warns(UserWarning, match="kept") as heard:
        kept("kept")
    assert heard[0].filename == __file__


@pytest.mark.parametrize("level", LEVELS)
def test_a_scripted_class_finds_the_names_of_whoever_scripts_it(level: str, tmp_path: Path) -> None:
    """TorchScript looks for them in the frame that called it."""
    named = halved

    class Sizes:
        def __init__(self, count: int) -> None:
            self.data = named(torch.ones(count))

    with ulpscope.capture(tmp_path / "run", level=level), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Sizes)
    assert scripted(2).data.tolist() == [0.5, 0.5]


def compiled_pass(loss: Tensor, how: str, backend: Any) -> None:
    from torch._dynamo import compiled_autograd

    if how == "the engine alone":
        with compiled_autograd._enable(torch.compile(backend=backend)):
            loss.backward(retain_graph=True)
    else:
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda: loss.backward(retain_graph=True), backend=backend)()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["the engine alone", "in a compiled function"])
def test_a_backward_pass_that_is_compiled_is_the_same_graph(how: str, level: str, tmp_path: Path) -> None:
    """torch writes down every hook of the graph: ours are away while it does, and there again in the next pass."""

    def train(backend: Any) -> Any:
        seed()
        torch._dynamo.reset()
        model = Net()
        seen: list[int] = []
        for _ in range(2):
            loss = model(torch.randn(3, 4)).square().sum()
            loss.grad_fn.register_hook(lambda *_: seen.append(1))
            compiled_pass(loss, how, backend)
        loss.backward()
        return frozen([dict(model.named_parameters()), [value.grad for value in model.parameters()], seen])

    bare, captured = CountingBackend(), CountingBackend()
    before = train(bare)
    with ulpscope.capture(tmp_path / "run", level=level):
        after = train(captured)
    assert_same(before, after)
    assert bare.graphs == captured.graphs > 0
    dump = ulpscope.open_dump(tmp_path / "run")
    assert [note for note in dump.manifest.notes if note.startswith("could not record")] == []
    assert any("compiled region" in note for note in dump.manifest.notes)
    names = [ulpscope.call_text(call) for call in dump.ids()]
    assert any(".backward" in name for name in names), "the pass that was not compiled"
