"""The accuracy pre-check over real small models: a faulty kernel is found, a clean run is not accused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ulpscope
from msprobe_files import call, floats, scalar, tensor, write_elements, write_json
from ulpscope.cli.main import cli
from ulpscope.frameworks.torch.api_arguments import UnrunnableError, function_of
from ulpscope.frameworks.torch.api_runner import ApiRunner
from ulpscope.model.errors import DumpError
from ulpscope.replay.precheck import Choice, Plan, Rule, check_dump, check_in_processes
from ulpscope.replay.results import CallResult
from ulpscope.replay.standards import Status
from ulpscope.store.registry import open_dump

DEVICE = Path(__file__).parents[1] / "device"


class Net(nn.Module):
    """Convolution, normalisation, dropout, attention, an embedding and indexing in a few small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 4)
        self.words, self.layer_norm = nn.Embedding(10, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        x = self.drop(x.view(x.size(0), -1))
        x = self.layer_norm(F.gelu(self.first(x)) * 1.5 + self.words(torch.arange(8)))
        q = x.view(2, 4, 1, 16).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(8, 16)
        x = torch.cat([x[:, [0, 2, 4, 6]], x[..., 4:]], dim=1)
        return self.last(x.softmax(-1)).sub_(0.01)


class Faulty(TorchDispatchMode):
    """Runs one kernel wrong."""

    def __init__(self, kernel: Any, factor: float) -> None:
        super().__init__()
        self.kernel, self.factor = kernel, factor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is self.kernel else result


def record(path: Path, *, tensors: bool = True, dtype: torch.dtype = torch.float32, mode: Any = None) -> Path:
    torch.manual_seed(0)
    model = Net().to(dtype)
    data = torch.randn(8, 1, 8, 8, dtype=dtype)
    with ulpscope.capture(path, level="op", tensors=tensors) as session:
        if mode is None:
            loss = F.cross_entropy(model(data), torch.arange(8) % 4)
            loss.backward()
        else:
            with mode:
                loss = F.cross_entropy(model(data), torch.arange(8) % 4)
                loss.backward()
        session.step()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {tensors: record(folder / str(tensors), tensors=tensors) for tensors in (True, False)}


def results(path: Path, **runner: Any) -> dict[str, CallResult]:
    return {result.name: result for result in check_dump(open_dump(path), Plan(ApiRunner(**runner)))}


def wrong(found: dict[str, CallResult]) -> list[str]:
    return [name for name, result in found.items() if result.status is Status.ERROR]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_clean_run_is_not_accused_and_every_call_is_judged(
    tmp_path: Path, dtype: torch.dtype, recorded: bool
) -> None:
    found = results(record(tmp_path / "run", dtype=dtype), recorded=recorded)
    assert wrong(found) == []
    assert [name for name, result in found.items() if not result.outputs] == []
    assert found["Functional.linear.0"].backward is Status.PASS
    assert {output.recorded for result in found.values() for output in result.outputs} == {recorded}


def test_inputs_made_from_statistics_have_their_range_and_do_not_accuse(runs: dict[bool, Path]) -> None:
    found = results(runs[False])
    assert wrong(found) == []
    assert not found["Functional.linear.0"].real
    assert found["Functional.linear.0"].backward is Status.PASS
    assert found["Functional.embedding.0"].forward is Status.PASS


@pytest.mark.parametrize(
    ("kernel", "factor", "call"),
    [
        (torch.ops.aten.gelu.default, 1.001, "Functional.gelu.0"),
        (torch.ops.aten.addmm.default, 1.0001, "Functional.linear.0"),
        (torch.ops.aten._softmax.default, 0.999, "Tensor.softmax.0"),
        (torch.ops.aten.gelu_backward.default, 1.01, "Functional.gelu.0"),
    ],
    ids=str,
)
def test_a_kernel_that_was_wrong_when_it_was_recorded_is_found(
    tmp_path: Path, kernel: Any, factor: float, call: str
) -> None:
    found = results(record(tmp_path / "run", mode=Faulty(kernel, factor)), recorded=True)
    assert call in wrong(found)
    assert {name.split(".")[1] for name in wrong(found)} == {call.split(".")[1]}


ON_DEVICE = """
import sys, json, torch
from pathlib import Path
from ulpscope.frameworks.torch.api_runner import ApiRunner
from ulpscope.replay.precheck import Plan, check_dump
from ulpscope.store.registry import open_dump
dump, plan = open_dump(sys.argv[1]), Plan(ApiRunner("npu"))
def wrong():
    return sorted({r.name for r in check_dump(dump, plan) if r.status.value == "error"})
found = {"clean": wrong()}
for operator, factor in (("aten::gelu", 1.001), ("aten::mm", 1.01), ("aten::_softmax", 0.99)):
    with fakenpu.fault(operator, lambda kernel, *args, **kwargs: kernel(*args, **kwargs) * factor):
        found[operator] = wrong()
print(json.dumps(found))
"""


def test_faults_of_a_device_are_found_and_the_clean_device_is_not_accused(runs: dict[bool, Path]) -> None:
    sys.path.insert(0, str(DEVICE))
    try:
        import fakenpu
    finally:
        sys.path.remove(str(DEVICE))
    found = fakenpu.run(ON_DEVICE, runs[True])
    assert found["clean"] == []
    assert found["aten::gelu"] == ["Functional.gelu.0"]
    assert "Functional.linear.0" in found["aten::mm"]
    # Without a fused kernel, attention is made of a softmax too.
    assert found["aten::_softmax"] == ["Functional.scaled_dot_product_attention.0", "Tensor.softmax.0"]


def test_the_same_numbers_whatever_the_order_and_the_number_of_processes(runs: dict[bool, Path]) -> None:
    folder, plan = open_dump(runs[False]).folder, Plan(ApiRunner(), Choice(white=frozenset({"linear", "gelu"})))
    alone = list(check_dump(open_dump(folder), plan))
    assert list(check_in_processes(folder, plan, processes=2)) == alone
    last = alone[-1]
    assert list(check_dump(open_dump(folder), plan, done={r.name for r in alone[:-1]})) == [last]


def test_a_dump_of_another_tool_with_statistics_is_run(tmp_path: Path) -> None:
    linear = call([tensor(shape=(2, 3), requires_grad=True), tensor(shape=(4, 3))], [tensor(shape=(2, 4))])
    gradient = {"input": [tensor(shape=(2, 4))], "output": [tensor(shape=(2, 3))]}
    mask = call([tensor(0.0, float("-inf"), shape=(2, 3)), scalar(-1)], [tensor(shape=(2, 3))])
    write_json(
        tmp_path,
        {
            "Functional.linear.0.forward": linear,
            "Functional.linear.0.backward": gradient,
            "Tensor.softmax.0.forward": mask,
        },
    )
    found = results(tmp_path)
    assert (found["Functional.linear.0"].forward, found["Functional.linear.0"].backward) == (Status.PASS, Status.PASS)
    assert found["Tensor.softmax.0"].forward is Status.PASS


def test_a_call_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    calls = {
        "Torch.rand.0.forward": call([scalar(3)], [tensor(shape=(3,))]),
        "Functional.nonsense.0.forward": call([tensor()], [tensor()]),
        "Tensor.add.0.forward": call([tensor(None, None, None, None), scalar(1)], [tensor()]),
        "Torch.matmul.0.forward": call([tensor(shape=(2, 3)), tensor(shape=(2, 3))], [tensor()]),
    }
    write_json(tmp_path, calls)
    messages = {name: result.message for name, result in results(tmp_path).items()}
    assert "random" in messages["Torch.rand.0"]
    assert "has no Functional.nonsense" in messages["Functional.nonsense.0"]
    assert "neither the elements" in messages["Tensor.add.0"]
    assert "RuntimeError" in messages["Torch.matmul.0"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Torch", "load"),
        ("Torch", "save"),
        ("Torch", "compile"),
        ("Torch", "from_file"),
        ("Torch", "classes"),
        ("Torch", "os"),
        ("Tensor", "__reduce_ex__"),
        ("Tensor", "__class__"),
        ("Functional", "boolean_dispatch"),
        ("Functional", "importlib"),
        ("Aten", "from_file.default"),
        ("System", "exit"),
    ],
)
def test_a_name_in_a_dump_reaches_nothing_but_operators(kind: str, name: str) -> None:
    with pytest.raises(UnrunnableError):
        function_of(kind, name)


def test_the_rule_of_msprobe_does_not_accuse_what_rounding_explains(runs: dict[bool, Path]) -> None:
    # The bias before a batch norm has a gradient of nothing but rounding: any cosine is possible.
    plan = Plan(ApiRunner(whole=False), Choice(white=frozenset({"conv2d"})), Rule.MSPROBE)
    (found,) = check_dump(open_dump(runs[True]), plan)
    assert (found.forward, found.backward) == (Status.PASS, Status.PASS)


def test_the_command_names_the_wrong_call_and_exits_with_1(tmp_path: Path) -> None:
    record(tmp_path / "run", mode=Faulty(torch.ops.aten.gelu.default, 1.01))
    command = [sys.executable, "-m", "ulpscope", "check", "ops", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stderr
    assert "1 wrong" in done.stdout
    assert "Functional.gelu.0" in done.stdout
    done = subprocess.run([*command, "--skip", "gelu", "--format", "json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["wrong"] == []
    assert content["recorded"] == content["judged"]


@pytest.mark.parametrize("role", ["input.0", "output.0"])
@pytest.mark.parametrize("processes", [1, 2])
def test_what_was_recorded_and_is_gone_is_neither_made_up_nor_run_again(
    tmp_path: Path, role: str, processes: int
) -> None:
    calls = {
        f"Torch.{name}": {("input", 0): floats(1, 2, 3), ("output", 0): floats(1, 2, 3)} for name in ("abs.0", "abs.1")
    }
    path = write_elements(tmp_path / "dump", calls)
    words = ["check", "ops", str(path), "--format", "json", "-n", str(processes)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    (path.parent / "dump_tensor_data" / f"Torch.abs.0.forward.{role}.pt").unlink()
    found = CliRunner().invoke(cli, words)
    assert isinstance(found.exception, DumpError) and "1 files with elements" in str(found.exception)
    told = json.loads(found.stdout)
    assert (told["judged"], told["recorded"], told["made_inputs"]) == (1, 1, 0)
    assert told["not_run"] == {f"Torch.abs.0.forward.{role}.pt is missing": 1}
