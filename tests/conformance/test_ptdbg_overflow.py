"""The examples of ptdbg_ascend's guide about overflows ("溢出检测场景"), which work on any device here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from device.fakenpu import run as run_on_npu
from ulpscope import open_run
from ulpscope.model.names import call_text

ROOT = Path(__file__).parents[2]
HALF = """
import torch, torch.nn as nn
model = nn.ReLU()
def train(model, device="cpu"):
    large = torch.full((2,), 60000.0, dtype=torch.float16, device=device)
    return model(large + large)
"""


def run(folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(ROOT / "dropin"), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", HALF + program]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)


EXAMPLE_1 = """
from ptdbg_ascend import *
seed_all()
set_dump_path("./overflow_dump")
register_hook(model, overflow_check, overflow_nums=3)
for iteration in range(10):
    train(model)
    print(iteration, flush=True)
"""


def test_000_025_051_096_097_100_example_1_the_training_ends_at_the_third_overflow(tmp_path: Path) -> None:
    done = run(tmp_path, EXAMPLE_1)
    rank = Path("overflow_dump/ptdbg_dump_v2.0/rank0")
    last = rank / "Tensor___add___2_forward_3.pkl"
    assert done.stdout.split() == ["0", "1"]
    assert done.stderr.splitlines()[-1] == f"ValueError: [overflow 3 times]: dump file is saved in '{last}'."
    names = [f"Tensor___add___{number}_forward_{number + 1}" for number in range(3)]
    assert sorted(path.name for path in (tmp_path / rank).iterdir()) == sorted(
        [*names, *(f"{name}.pkl" for name in names)]
    )
    rows = [json.loads(line) for line in (tmp_path / last).read_text().splitlines()]
    assert [row[:2] for row in rows[:3]] == [
        [f"Tensor___add___2_forward_{slot}", 101] for slot in ("input.0", "input.1", "output")
    ]
    assert np.isinf(np.load(tmp_path / rank / names[2] / "Tensor___add___2_forward_output.npy")).all()
    assert [call_text(call) for dump in open_run(tmp_path / rank) for call in dump.ids()] == [
        f"Tensor.__add__.{number}.forward" for number in range(3)
    ]
    again = run(tmp_path, EXAMPLE_1)
    assert again.returncode == 1 and "holds the overflows of an earlier run; delete them" in again.stderr


SWITCHED = """
from ptdbg_ascend import *
register_hook(model, overflow_check, overflow_nums=-1)
set_overflow_check_switch("OFF")
train(model)
set_overflow_check_switch("ON")
train(model)
set_overflow_check_switch("OFF")
train(model)
print("to the end")
"""


def test_000_025_058_101_a_stretch_is_checked_and_without_a_path_the_files_lie_where_the_program_runs(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, SWITCHED)
    assert done.stdout == "to the end\n", done.stderr
    assert [path.name for path in (tmp_path / "ptdbg_dump_v2.0" / "rank0").glob("*.pkl")] == [
        "Tensor___add___0_forward_1.pkl"
    ]


DEBUGGER = """
from ptdbg_ascend import *
debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="overflow_check", step=[1])
debugger.configure_hook(overflow_nums=2)
for step in range(4):
    debugger.start()
    train(model)
    debugger.stop()
    debugger.start()
    train(model)
    debugger.stop()
    debugger.step()
    print(step, flush=True)
"""


def test_000_009_031_the_manual_mode_checks_the_asked_step(tmp_path: Path) -> None:
    done = run(tmp_path, DEBUGGER)
    rank = tmp_path / "dump_path" / "step1" / "ptdbg_dump_v2.0" / "rank0"
    assert done.stdout == "0\n"
    assert "ValueError: [overflow 2 times]: dump file is saved in" in done.stderr
    assert sorted(path.name for path in rank.glob("*.pkl")) == [
        "Tensor___add___0_forward_1.pkl",
        "Tensor___add___1_forward_2.pkl",
    ]


ON_NPU = """
import json, pathlib, torch_npu
from ptdbg_ascend import *
set_dump_path("./overflow_dump")
register_hook(model, overflow_check, dump_mode='acl', dump_config='./dump.json')
try:
    train(model, "npu")
    train(model, "npu")
except ValueError as error:
    print(json.dumps(str(error)))
"""


def test_000_032_102_103_on_an_npu_the_call_whose_inputs_are_finite_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump" / "output").mkdir(parents=True)
    settings = {"dump_list": [], "dump_path": "./dump/output", "dump_mode": "all", "dump_op_switch": "on"}
    (tmp_path / "dump.json").write_text(json.dumps({"dump": settings}))
    said = run_on_npu(HALF + ON_NPU, PYTHONPATH=str(ROOT / "dropin"))
    kernels = [path.name.split(".")[0] for path in (tmp_path / "dump" / "output").rglob("*") if path.is_file()]
    assert kernels == ["Add"]  # of the call that overflows, and of no other
    assert said.startswith("[overflow 1 times]: dump file is saved in ")
    assert said.endswith("Tensor___add___0_forward_1.pkl'.")


SCALED = """
import json, torch_npu
from ptdbg_ascend import *
fakenpu.saturate()
set_dump_path("./overflow_dump")
register_hook(model, overflow_check, overflow_nums=-1)
said = []
for _ in range(2):
    torch_npu.npu.utils.clear_npu_overflow_flag()
    train(model, "npu")
    if torch_npu.npu.utils.get_npu_overflow_flag():      # as a dynamic loss scale does after every backward
        said.append("Gradient overflow. SKipping step")
print(json.dumps(said))
"""


@pytest.mark.parametrize(("variable", "said"), [("0", []), ("1", ["Gradient overflow. SKipping step"] * 2)])
def test_000_066_the_loss_scale_still_sees_an_overflow_with_a_flag_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    heard = run_on_npu(HALF + SCALED, PYTHONPATH=str(ROOT / "dropin"), OVERFLOW_DEBUG_MODE_ENABLE=variable)
    assert heard == said
    assert sorted(path.name for path in tmp_path.rglob("*.pkl")) == [
        "Tensor___add___0_forward_1.pkl",
        "Tensor___add___1_forward_2.pkl",
    ]


def test_000_066_a_device_without_the_second_flag_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = SCALED.replace("fakenpu.saturate()", "fakenpu.saturate(); del torch_npu.npu_get_float_status")
    program = "try:\n" + "".join(f"    {line}\n" for line in program.splitlines() if "import *" not in line)
    program = (
        "from ptdbg_ascend import *\n" + program + "except Exception as error:\n    print(json.dumps(str(error)))\n"
    )
    heard = run_on_npu(HALF + program, PYTHONPATH=str(ROOT / "dropin"), OVERFLOW_DEBUG_MODE_ENABLE="1")
    assert "needs torch_npu.npu_get_float_status" in heard


REPLICATED = """
from ptdbg_ascend import *
debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="overflow_check")
debugger.configure_hook(overflow_nums=-1, need_replicate=True)
debugger.start()
train(model)
x = torch.zeros(2, requires_grad=True)
x.sqrt().sum().backward()
debugger.stop()
"""


def test_000_026_098_the_tensors_of_need_replicate_have_folders_of_their_own(tmp_path: Path) -> None:
    done = run(tmp_path, REPLICATED)
    assert done.returncode == 0, done.stderr
    for word, call, value in (("forward", "Tensor*__add__*0", 60000.0), ("backward", "Tensor*sqrt*0", 1.0)):
        (info,) = tmp_path.glob(f"{word}_info_*.json")
        told = json.loads(info.read_text())[call]
        path = Path((told["args"] if word == "forward" else told)[0]["datapath"])
        assert path == tmp_path / "dump_path" / f"{word}_real_data" / f"{call}.0.pt"
        assert torch.load(path, weights_only=True).tolist() == [value] * 2
