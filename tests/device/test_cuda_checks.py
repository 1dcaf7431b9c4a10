"""The checks of one run on a CUDA device: overflow without waiting, noise, the pre-check, and its online form."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ulpscope
from ulpscope.frameworks.torch.api_runner import ApiRunner
from ulpscope.frameworks.torch.perturb import PERTURBATIONS
from ulpscope.model.errors import OverflowStop
from ulpscope.model.names import call_text, slot_text
from ulpscope.replay.noise import Noise, NoiseConfig
from ulpscope.replay.precheck import Plan, Rule, check_dump
from ulpscope.replay.standards import Status
from ulpscope.store.noise import NoiseRow
from ulpscope.store.registry import open_dump

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HALF = torch.float16
ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """Convolution, normalisation, attention, writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.first, self.last, self.layer_norm = nn.Linear(512, 64), nn.Linear(64, 8), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True).flatten(1)
        x = self.layer_norm(F.gelu(self.first(x)) * 1.5)
        q = x.view(4, 4, 1, 64).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(16, 64)
        return self.last(x.softmax(-1)).sub_(0.01)


def train(dtype: torch.dtype = torch.float32, steps: int = 2, then: Callable[[], None] = lambda: None) -> Tensor:
    torch.manual_seed(0)
    model = Net().to("cuda", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(16, 1, 8, 8, device="cuda", dtype=dtype)).float(), target())
        loss.backward()
        optimizer.step()
        then()
    return loss.detach()


def target() -> Tensor:
    return torch.arange(16, device="cuda") % 8


def found(folder: Path) -> list[str]:
    return [call_text(call.id) for call in ulpscope.open_dump(folder).calls()]


def held(folder: Path) -> dict[str, dict[str, Any]]:
    dump = ulpscope.open_dump(folder)
    return {
        call_text(call.id): {
            slot_text(value.slot): value.error or dump.load(value).tolist() for value in call.values if value.is_tensor
        }
        for call in dump.calls()
    }


# --- overflow -----------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting_is_an_error() -> Iterator[Callable[[bool], None]]:
    """torch itself says when the host waits for the device."""
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


def test_no_call_waits_for_the_device(tmp_path: Path, waiting_is_an_error: Callable[[bool], None]) -> None:
    x = torch.full((1 << 16,), 60000.0, dtype=HALF, device="cuda")
    weight = torch.randn(256, 256, device="cuda", requires_grad=True)
    with ulpscope.capture(tmp_path, overflows=-1):
        x - 1  # kernels are loaded
        waiting_is_an_error(True)
        try:
            for _ in range(300):
                y = x - 1
            h = torch.ones(256, 256, device="cuda")
            for _ in range(50):
                h = F.gelu(h @ weight * 0.01)
            h.sum().backward()
        finally:
            waiting_is_an_error(False)  # what overflows is written down, and that waits
        y = x * 2
        for _ in range(300):
            y = y - 1
    ((name, call),) = held(tmp_path).items()
    assert name == "Tensor.__mul__.50.forward"
    assert set(call["input.0"]) == {60000.0} and set(call["output.0"]) == {np.inf}


@pytest.mark.parametrize("write", [
    lambda x, y: y.zero_(),
    lambda x, y: y.data.zero_(),
    lambda x, y: y.view(2, 1)[0].fill_(0),
    lambda x, y: torch.neg(x, out=y),
    lambda x, y: F.relu(y, inplace=True),
])  # fmt: skip
def test_what_is_overwritten_before_the_device_is_heard_is_kept(tmp_path: Path, write: Any) -> None:
    x = torch.full((2,), 60000.0, dtype=HALF, device="cuda")
    with ulpscope.capture(tmp_path, overflows=-1):
        torch.cuda._sleep(200_000_000)  # the device is late
        y = x - 0
        z = y * 2
        write(x, y)
        z.clamp_(-1, 1)
    assert held(tmp_path) == {"Tensor.__mul__.0.forward": {"input.0": [60000.0] * 2, "output.0": [np.inf] * 2}}


def test_an_overflow_of_a_backward_pass_ends_the_program_out_of_it(tmp_path: Path) -> None:
    def backward() -> None:
        x = torch.zeros(8, device="cuda", requires_grad=True)
        z = x.sqrt()
        for _ in range(200):
            z = z * 1.0
        for _ in range(200):
            z = z + x * 2
        z.sum().backward()
        torch.cuda.synchronize()
        x + 1

    with pytest.raises(OverflowStop, match=r"Tensor\.sqrt\.0\.backward"), ulpscope.capture(tmp_path, overflows=1):
        backward()
    assert found(tmp_path) == ["Tensor.sqrt.0.backward"]
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("level", ["module", "op", "mix", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF], ids=str)
def test_a_clean_training_is_not_accused_and_not_changed(tmp_path: Path, dtype: torch.dtype, level: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        bare = train(dtype)
        with ulpscope.capture(tmp_path, overflows=-1, level=level):
            watched = train(dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found(tmp_path) == []
    assert torch.equal(bare, watched)


def test_overflows_on_two_streams_and_in_odd_types_are_found(tmp_path: Path) -> None:
    x = torch.full((1000,), 3e38, device="cuda")
    side = torch.cuda.Stream()
    with ulpscope.capture(tmp_path, overflows=-1):
        with torch.cuda.stream(side):
            x * 2
        torch.cuda.current_stream().wait_stream(side)
        x.double() * 1e300
        torch.complex(x, x) * 2
        x.bfloat16() * 2
        x[::3] + x[::3]
    assert sorted(found(tmp_path)) == [
        "Tensor.__add__.0.forward",
        *(f"Tensor.__mul__.{number}.forward" for number in range(4)),
    ]


def test_a_graph_that_is_captured_is_left_alone(tmp_path: Path) -> None:
    x = torch.ones(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with ulpscope.capture(tmp_path, overflows=-1):
        x * 2
        with torch.cuda.graph(graph):
            y = x * 3
        graph.replay()
    assert y.tolist() == [3.0] * 16
    assert found(tmp_path) == []


@pytest.fixture
def wrong_gelu() -> Iterator[None]:
    """gelu of float32 tensors on CUDA is wrong by a thousandth; wider ones are right, as another kernel computes them."""
    library = torch.library.Library("aten", "IMPL")

    def kernel(x: Tensor, approximate: str = "none") -> Tensor:
        right = x * 0.5 * (1 + torch.ops.aten.erf.default(x * 0.5**0.5))
        return right * 1.001 if x.dtype is torch.float32 else right

    library.impl("gelu", kernel, "CUDA", allow_override=True)
    yield
    library._destroy()


# --- noise --------------------------------------------------------------------------------------------------------


def noisy(program: Callable[[], Any], **options: Any) -> list[NoiseRow]:
    rows: list[NoiseRow] = []
    noise = Noise(NoiseConfig(**options), rows.append)
    noise.start()
    try:
        program()
    finally:
        noise.close()
    return rows


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mode", list(PERTURBATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_clean_calls_of_the_device_are_explained(mode: str, dtype: torch.dtype, backward: bool) -> None:
    rows = noisy(lambda: train(dtype, steps=1), mode=mode, backward=backward)
    assert sorted({f"{row.api_name} {row.excess}" for row in rows if row.is_unexplained}) == []


@pytest.mark.parametrize("mode", ["improve_precision", "to_cpu"])
def test_a_wrong_kernel_of_the_device_is_named_and_no_other(mode: str, wrong_gelu: None) -> None:
    rows = noisy(lambda: train(steps=1), mode=mode)
    assert {row.api_name for row in rows if row.is_unexplained} == {"Functional.gelu.0.forward"}


def test_fix_replaces_what_the_device_computed_and_training_goes_on() -> None:
    assert torch.isfinite(train(HALF))
    losses: list[Tensor] = []
    noisy(lambda: losses.append(train(HALF)), mode="improve_precision", fix=True)
    noisy(lambda: losses.append(train(HALF)), mode="to_cpu", fix=True)
    assert all(bool(torch.isfinite(loss)) and loss.is_cuda for loss in losses)


# --- the pre-check ------------------------------------------------------------------------------------------------


def record(path: Path, dtype: torch.dtype) -> Path:
    with ulpscope.capture(path, level="op", tensors=True):
        train(dtype, steps=1)
    return path


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF], ids=str)
def test_every_call_of_the_device_passes(tmp_path: Path, dtype: torch.dtype, rule: Rule) -> None:
    plan = Plan(ApiRunner("cuda", whole=rule is Rule.ROUNDING), rule=rule)
    results = list(check_dump(open_dump(record(tmp_path, dtype)), plan))
    assert len(results) > 15
    assert [(each.name, each.message) for each in results if each.status is Status.ERROR] == []
    assert {each.name: each.backward for each in results}["Functional.linear.0"] is Status.PASS


def test_a_kernel_of_the_device_that_is_wrong_is_found(tmp_path: Path, wrong_gelu: None) -> None:
    results = check_dump(open_dump(record(tmp_path, torch.float32)), Plan(ApiRunner("cuda")))
    assert [each.name for each in results if each.forward is Status.ERROR] == ["Functional.gelu.0"]


TRAIN = """
import torch, torch.nn as nn, torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
for _ in range(2):
    debugger.start(model)
    F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 2).backward()
    debugger.stop()
    debugger.step()
"""


def test_the_checking_machines_device_is_the_benchmark_of_an_online_check(tmp_path: Path) -> None:
    """The training process stands for another device: it runs on the CPU, the check has CUDA."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    where = {"host": "127.0.0.1", "port": port}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'dropin'}:{ROOT / 'src'}", "ULPSCOPE_SECRET": "shared"}
    (tmp_path / "check.json").write_text(json.dumps({"run_ut": {"is_online": True, "rank_list": [0], **where}}))
    section = {"online_run_ut": True, **where}
    config = {"task": "tensor", "dump_path": "./dump", "level": "L1", "tensor": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["-f", "pytorch", "run_ut", "-config", "check.json", "-o", "out"]
    check = subprocess.Popen(
        [sys.executable, "-m", "ulpscope.compat.msprobe", *words],
        cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert check.stderr is not None
    try:
        assert any("listening" in line for line in check.stderr)
        subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, env=environment, check=True, timeout=300)
        _, said = check.communicate(timeout=300)
    finally:
        check.kill()
    assert check.returncode == 0, said
    (result,) = (tmp_path / "out").glob("api_precision_compare_result_*_rank0.csv")
    (details,) = (tmp_path / "out").glob("accuracy_checking_details_*_rank0_cuda.csv")
    with result.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert [row[1:3] for row in rows if row[0] == "Functional.linear.0"] == [["pass", "pass"]] * 2
    assert details.read_text(encoding="utf-8-sig").count("Functional.gelu.0.forward") == 2
