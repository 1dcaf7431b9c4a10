"""Rows of the seeds' feature list about overflow_check and free_benchmark, run with the seed's configuration."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ulpscope.compat.msprobe.config import read_config
from ulpscope.model.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
COLUMNS = ["rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index"]
SECTION = {
    "scope": [],
    "list": [],
    "fuzz_device": "npu",
    "pert_mode": "improve_precision",
    "handler_type": "check",
    "fuzz_level": "L1",
    "fuzz_stage": "forward",
    "if_preheat": False,
    "preheat_step": 15,
    "max_sample": 20,
}  # as in the seed
LOOP = """
import sys, torch, torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
    torch.manual_seed(0)
    a, b = torch.randn(64, 64).half().requires_grad_(), torch.randn(64, 64).half()
    debugger.start()
    c = torch.matmul(a, b)
    d = F.relu(c)
    e = torch.sort(c)
    d.sum().backward()
    debugger.stop()
    debugger.step()
print("end", float(c.sum()))
"""
ON_NPU = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests" / "device")!r}); import fakenpu; fakenpu.install()
import torch, torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
torch.manual_seed(0)
x = torch.randn(16, 16).npu()
wrong = fakenpu.fault("aten::gelu", lambda kernel, x, **kwargs: kernel(x, **kwargs) * 1.1)
debugger.start()
y = F.gelu(x) + 1
z = F.gelu(x * 2)
debugger.stop()
wrong.close()
print(torch.equal(y.cpu(), F.gelu(x.cpu()) + 1))
"""
OVERFLOW = """
import torch
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
for step in range(2):
    debugger.start()
    a = torch.full((4,), 60000., dtype=torch.float16)
    b = torch.mul(torch.ones(4, dtype=torch.float16), 2)
    c = torch.mul(a, b)
    d = torch.log(torch.add(c, 1))
    e = torch.exp(b * 20)
    debugger.stop()
    debugger.step()
print("end")
"""


def run(folder: Path, program: str, *words: str, task: str = "free_benchmark", **section: Any) -> Any:
    folder.mkdir(exist_ok=True)
    full = {**SECTION, **section} if task == "free_benchmark" else section
    common = {"dump_path": "./dump", "rank": [], "step": [], "level": "L1", "seed": 1234, "is_deterministic": False}
    (folder / "config.json").write_text(json.dumps({"task": task, **common, task: full}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "dropin"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def rows(folder: Path, program: str = LOOP, *words: str, **section: Any) -> list[dict[str, str]]:
    done = run(folder, program, *words, **section)
    assert done.returncode == 0, done.stderr
    path = folder / "dump" / "free_benchmark.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == COLUMNS
        return list(reader)


def names(found: list[dict[str, str]]) -> list[str]:
    return [row["api_name"] for row in found]


def bad(**section: Any) -> str:
    content = {"task": "free_benchmark", "dump_path": "x", "free_benchmark": section}
    with pytest.raises(ConfigError) as error:
        read_config(content)
    return str(error.value)


# --- free_benchmark -----------------------------------------------------------------------------------------------


def test_002_020_028_038_039_040_042_a_call_that_does_not_stand_noise_is_a_row_of_the_csv(tmp_path: Path) -> None:
    first = rows(tmp_path, pert_mode="bit_noise")[0]
    assert first["api_name"] == "Torch.matmul.0.forward"
    assert (first["rank"], first["pert_mode"], first["stage"], first["step"]) == ("0", "bit_noise", "forward", "0")
    assert (first["dtype"], first["shape"], first["output_index"]) == ("torch.float16", "(64, 64)", "")


def test_002_041_max_rel_is_the_largest_relative_error(tmp_path: Path) -> None:
    for row in rows(tmp_path, pert_mode="bit_noise"):
        assert row["max_rel"] == "symbol_flipping" or float(row["max_rel"]) > 0.002


def test_002_043_the_place_of_a_result_among_several_is_told(tmp_path: Path) -> None:
    found = rows(tmp_path, pert_mode="change_value", list=["sort"])
    assert {row["output_index"] for row in found} == {"0", "1"}


def test_002_021_scope_names_calls_exactly(tmp_path: Path) -> None:
    assert set(names(rows(tmp_path, pert_mode="change_value", scope=["Functional.relu.0"]))) == {
        "Functional.relu.0.forward"
    }
    assert rows(tmp_path / "part", pert_mode="change_value", scope=["Functional.relu"]) == []


def test_002_022_list_names_parts(tmp_path: Path) -> None:
    assert set(names(rows(tmp_path, pert_mode="change_value", list=["relu"]))) == {"Functional.relu.0.forward"}


def test_002_023_scope_and_list_are_refused_together() -> None:
    assert "exclude each other" in bad(scope=["Torch.matmul.0"], list=["relu"])


def test_002_024_030_the_cpu_is_the_benchmark(tmp_path: Path) -> None:
    found = rows(tmp_path, ON_NPU, fuzz_device="cpu", pert_mode="to_cpu")
    assert names(found) == ["Functional.gelu.0.forward", "Functional.gelu.1.forward"]
    assert "goes with pert_mode 'to_cpu' only" in bad(fuzz_device="cpu", pert_mode="add_noise")


def test_002_025_a_wider_dtype_changes_little(tmp_path: Path) -> None:
    assert rows(tmp_path, pert_mode="improve_precision", list=["relu"]) == []
    found = rows(tmp_path, pert_mode="improve_precision", list=["matmul"])
    assert all(row["api_name"] == "Torch.matmul.0.forward" for row in found)


def test_002_026_noise_changes_a_matmul(tmp_path: Path) -> None:
    assert names(rows(tmp_path, pert_mode="add_noise", list=["matmul"])) == ["Torch.matmul.0.forward"]


def test_002_027_calls_that_repeat_themselves_are_no_rows(tmp_path: Path) -> None:
    assert rows(tmp_path, pert_mode="no_change") == []


def test_002_029_first_and_last_value_are_exchanged(tmp_path: Path) -> None:
    assert "Functional.relu.0.forward" in names(rows(tmp_path, pert_mode="change_value"))


def test_002_031_032_check_leaves_the_result_and_fix_replaces_it(tmp_path: Path) -> None:
    assert "False" in run(tmp_path, ON_NPU, fuzz_device="cpu", pert_mode="to_cpu").stdout
    assert "True" in run(tmp_path, ON_NPU, fuzz_device="cpu", pert_mode="to_cpu", handler_type="fix").stdout
    assert "knows no preheating" in bad(handler_type="fix", if_preheat=True)
    assert "works on forward only" in bad(handler_type="fix", fuzz_stage="backward")


def test_002_033_the_level_is_l1() -> None:
    assert "must be one of L1" in bad(fuzz_level="L2")


def test_002_034_gradients_are_compared_in_the_backward_stage(tmp_path: Path) -> None:
    found = rows(tmp_path, pert_mode="change_value", fuzz_stage="backward", list=["matmul", "relu"])
    assert {row["stage"] for row in found} == {"backward"}
    assert set(names(found)) == {"Functional.relu.0.backward"}


def test_002_035_036_limits_adapt_to_a_function_in_the_first_steps(tmp_path: Path) -> None:
    cold = rows(tmp_path / "cold", LOOP, "3", pert_mode="bit_noise", list=["matmul"])
    assert [row["step"] for row in cold] == ["0", "1", "2"]
    warm = rows(tmp_path / "warm", LOOP, "3", pert_mode="bit_noise", list=["matmul"], if_preheat="true", preheat_step=2)
    assert warm == []
    assert "preheat_step" in bad(if_preheat=True, preheat_step=0)


def test_002_037_a_function_is_looked_at_so_often_in_a_step_of_preheating(tmp_path: Path) -> None:
    program = LOOP.replace("c = torch.matmul(a, b)", "c = torch.matmul(a, b); torch.matmul(b, b)")
    section = {"pert_mode": "no_change", "list": ["matmul"], "if_preheat": True, "preheat_step": 1, "max_sample": 1}
    assert rows(tmp_path, program, "1", **section) == []
    assert "max_sample" in bad(if_preheat=True, max_sample=0)


def test_the_program_computes_the_same_under_every_perturbation(tmp_path: Path) -> None:
    ends = {run(tmp_path / mode, LOOP, pert_mode=mode).stdout for mode in ("bit_noise", "no_change", "add_noise")}
    assert len(ends) == 1
    assert "end" in ends.pop()


# --- overflow_check -----------------------------------------------------------------------------------------------


def overflows(folder: Path, step: int) -> list[str]:
    return list(json.loads((folder / "dump" / f"step{step}" / "rank0" / "dump.json").read_text())["data"])


def test_002_070_073_training_stops_at_the_overflow_that_was_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, OVERFLOW, task="overflow_check", overflow_nums=1)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Exception: [msprobe] exit: [overflow 1 time]")
    assert overflows(tmp_path, 0) == ["Torch.mul.1.forward"]  # what mindstudio-probe 1.0.3 dumps here
    files = sorted(path.name for path in (tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data").iterdir())
    assert files == [f"Torch.mul.1.forward.{part}.pt" for part in ("input.0", "input.1", "output.0")]


def test_002_070_073_it_never_stops_with_minus_1_and_calls_with_bad_inputs_do_not_count(tmp_path: Path) -> None:
    done = run(tmp_path, OVERFLOW, task="overflow_check", overflow_nums=-1)
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert [overflows(tmp_path, step) for step in (0, 1)] == [["Torch.mul.1.forward", "Torch.exp.0.forward"]] * 2
    first = json.loads((tmp_path / "dump" / "step0" / "rank0" / "dump.json").read_text())
    assert first["task"] == "overflow_check"
    assert math.isinf(float(first["data"]["Torch.mul.1.forward"]["output"][0]["Max"]))


PTDBG = """
import torch
from ptdbg_ascend import *
set_dump_path("./overflow_dump")
register_hook(torch.nn.Linear(2, 2), overflow_check, overflow_nums=-1)
torch.full((3,), 60000., dtype=torch.float16) * 2
torch.zeros(3, requires_grad=True).sqrt().sum().backward()
"""


def test_000_098_what_overflowing_calls_were_given_is_told_where_the_program_runs(tmp_path: Path) -> None:
    assert run(tmp_path, PTDBG).returncode == 0
    (forward,), (backward,) = tmp_path.glob("forward_info_*.json"), tmp_path.glob("backward_info_*.json")
    told = json.loads(forward.read_text())["Tensor*__mul__*0"]
    assert (told["args"][0]["Max"], told["args"][1], told["kwargs"]) == (60000.0, {"type": "int", "value": 2}, {})
    assert Path(told["args"][0]["datapath"]).is_file()
    (gradient,) = json.loads(backward.read_text())["Tensor*sqrt*0"]
    assert (gradient["Max"], gradient["dtype"]) == (1.0, "torch.float32")


def test_000_099_an_overflow_is_normal_if_float64_does_not_fit_either(tmp_path: Path) -> None:
    run(tmp_path, OVERFLOW, task="overflow_check", overflow_nums=-1)
    (path,) = (tmp_path / "dump" / "step0").glob("*/dump.json")
    command = [
        sys.executable,
        "-m",
        "ulpscope.compat.msprobe",
        "-f",
        "pytorch",
        "run_overflow_check",
        "-api_info",
        str(path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "dropin")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "Torch.mul.1.forward: normal overflow" in said
    assert "Torch.exp.0.forward: normal overflow" in said


def test_000_099_an_overflow_is_abnormal_if_only_the_device_has_it(tmp_path: Path) -> None:
    program = ON_NPU.replace("* 1.1)", "* torch.inf)")
    run(tmp_path, program, task="overflow_check", overflow_nums=-1)
    command = [sys.executable, "-m", "ulpscope.compat.msprobe", "-f", "pytorch", "run_overflow_check", "-api_info"]
    path = tmp_path / "dump" / "step0" / "rank0" / "dump.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "dropin")}
    done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True)
    assert "Functional.gelu.0.forward: abnormal overflow" in done.stdout + done.stderr


def test_002_071_check_mode_is_read() -> None:
    for mode in ("aicore", "atomic", "all"):
        read_config({"task": "overflow_check", "dump_path": "x", "level": "L2", "overflow_check": {"check_mode": mode}})
    with pytest.raises(ConfigError, match="must be one of aicore, atomic, all"):
        read_config({"task": "overflow_check", "dump_path": "x", "overflow_check": {"check_mode": "both"}})
