"""What there is for MindSpore. With MindSpore itself where a Python has it: this one, or ULPSCOPE_MINDSPORE_PYTHON."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ulpscope.compat.msprobe.mindspore import PrecisionDebugger
from ulpscope.frameworks.mindspore.process import execution_mode
from ulpscope.frameworks.mindspore.twice import FLIPPED, ratio
from ulpscope.model.errors import CaptureError, ConfigError

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("ULPSCOPE_MINDSPORE_PYTHON") or (
    sys.executable if importlib.util.find_spec("mindspore") is not None else None
)
needs_mindspore = pytest.mark.skipif(PYTHON is None, reason="no Python here has MindSpore")


def config(folder: Path, task: str, section: dict[str, Any], level: str = "L1") -> str:
    path = folder / "config.json"
    content = {"task": task, "dump_path": str(folder / "out"), "rank": [], "step": [], "level": level, task: section}
    path.write_text(json.dumps(content))
    return str(path)


def run(folder: Path, program: str) -> Any:
    """What a program prints last, as JSON. MindSpore may crash a process, so it has one of its own."""
    assert PYTHON is not None
    paths = os.pathsep.join([str(ROOT / "dropin"), str(ROOT / "src")])
    given = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    (folder / "program.py").write_text(PROGRAM + program)  # graphs are compiled from source files
    done = subprocess.run([PYTHON, "program.py"], cwd=folder, env=given, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


PROGRAM = """
import json, numpy as np, mindspore as ms
from mindspore import Tensor, mint, ops
from msprobe.mindspore import PrecisionDebugger
"""


@pytest.mark.parametrize(("section", "said"), [
    ({"fuzz_device": "cpu", "pert_mode": "to_cpu"}, ["fuzz_device must be npu or empty"]),
    *(
        ({"pert_mode": mode}, ["pert_mode must be improve_precision, add_noise, bit_noise, no_change or empty"])
        for mode in ("change_value", "to_cpu")
    ),
    ({"fuzz_stage": "backward"}, ["fuzz_stage must be forward or empty"]),
    ({"handler_type": "fix", "pert_mode": "add_noise"},
     ["pert_mode must be improve_precision or empty when handler_type is fix, but got add_noise."]),
    ({"fuzz_level": "L2"}, ["fuzz_level"]),
    ({"handler_type": "mend"}, ["handler_type"]),
    ({"scope": ["Torch.matmul.0"]}, ["scope"]),
])  # fmt: skip
def test_002_044_what_mindspore_cannot_do_is_said(tmp_path: Path, section: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        PrecisionDebugger(config(tmp_path, "free_benchmark", section))
    text = str(caught.value)
    assert all(each in text for each in said), text


def test_002_044_the_example_of_the_manual_is_accepted_and_other_tasks_are_refused(tmp_path: Path) -> None:
    section = {
        "list": ["mindspore.ops.add"], "fuzz_device": "npu", "pert_mode": "improve_precision", "handler_type": "check",
        "fuzz_level": "L1", "fuzz_stage": "forward",
    }  # fmt: skip
    assert PrecisionDebugger(config(tmp_path, "free_benchmark", section)).config.options["pert_mode"]
    with pytest.raises(ConfigError, match="ulpscope records PyTorch"):
        PrecisionDebugger(config(tmp_path, "statistics", {}))


def test_002_044_ratios_are_those_of_the_manual() -> None:
    one = np.array([1.0, 2.0, 1e-9])
    assert ratio(one, one * [1.0, 1.5, 100.0], 1e-4) == 1.5
    assert ratio(one, -one, 1e-4) == FLIPPED
    assert ratio(one, np.array([1.0, np.inf, 0.0]), 1e-4) == np.inf
    assert ratio(np.array([np.inf, 1.0]), np.array([np.inf, 1.0]), 1e-4) == 1.0


def context(mode: int, jit_config: dict[str, str], jit_level: str = "") -> Any:
    told = {"mode": mode, "jit_config": jit_config, "jit_level": jit_level}
    return SimpleNamespace(get_context=told.get, PYNATIVE_MODE=1, GRAPH_MODE=0)


@pytest.mark.parametrize(("module", "mode"), [
    (context(1, {}), "pynative"),
    (context(1, {"jit_level": "O2"}), "pynative"),
    (context(0, {}), "graph_kbyk"),
    (context(0, {"jit_level": "O0"}), "graph_kbyk"),
    (context(0, {"jit_level": "O1"}), "graph_kbyk"),
    (context(0, {"jit_level": "O2"}), "graph_ge"),
    (context(0, {}, "O2"), "graph_ge"),
])  # fmt: skip
def test_002_072_the_mode_is_that_of_the_jit_level(module: Any, mode: str) -> None:
    assert execution_mode(module) == mode


@pytest.mark.parametrize("jit_level", ["O0", "O1"])
def test_002_072_static_graphs_that_do_not_run_as_a_whole_are_refused(
    tmp_path: Path, jit_level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    debugger = PrecisionDebugger(config(tmp_path, "overflow_check", {"check_mode": "all"}, level="L2"))
    with pytest.raises(CaptureError, match="import mindspore"):
        debugger.start()
    monkeypatch.setitem(sys.modules, "mindspore", context(0, {"jit_level": jit_level}))
    with pytest.raises(CaptureError, match="graph_kbyk mode when level is kernel; run static graphs with jit_level O2"):
        debugger.start()
    assert "MINDSPORE_DUMP_CONFIG" not in os.environ


# --- MindSpore itself ---------------------------------------------------------------------------------------------

TWICE = """
original = ops.matmul
debugger = PrecisionDebugger("config.json")
rng = np.random.default_rng(0)
a, b = (Tensor(rng.standard_normal((64, 64)).astype(np.float16)) for _ in range(2))
plain = ops.matmul(a, b)
debugger.start()
results = [ops.matmul(a, b), mint.add(a, b), a + b, ops.relu(a)]
debugger.stop()
debugger.step()
same = bool((results[0].asnumpy() == plain.asnumpy()).all())
wide = ops.matmul(a.astype(ms.float32), b.astype(ms.float32)).astype(ms.float16)
is_wide = bool((results[0].asnumpy() == wide.asnumpy()).all())
print(json.dumps([same, is_wide, str(results[0].dtype), ops.matmul is original]))
"""


@needs_mindspore
@pytest.mark.parametrize("mode", ["improve_precision", "add_noise", "bit_noise", "no_change"])
@pytest.mark.parametrize("names", [[], ["mindspore.ops.matmul", "mindspore.mint.add", "mindspore.Tensor.__add__"]])
def test_002_044_dynamic_functions_are_run_twice(tmp_path: Path, mode: str, names: list[str]) -> None:
    config(tmp_path, "free_benchmark", {"list": names, "pert_mode": mode})
    same, _, dtype, is_restored = run(tmp_path, TWICE)
    assert (same, dtype, is_restored) == (True, "Float16", True)
    path = tmp_path / "out" / "free_benchmark.csv"
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    if mode == "no_change":
        assert rows == []
    else:
        matmul = [row for row in rows if row["api_name"] == "Functional.matmul.0.forward"]
        assert [(row["pert_mode"], row["stage"], row["dtype"], row["shape"]) for row in matmul] == [
            (mode, "forward", "Float16", "(64, 64)")
        ] or (mode == "improve_precision" and not matmul)
        assert not any(row["api_name"].startswith("Functional.relu") for row in rows)


@needs_mindspore
def test_002_044_fix_gives_the_program_the_wider_result_in_its_own_dtype(tmp_path: Path) -> None:
    config(tmp_path, "free_benchmark", {"list": ["mindspore.ops.matmul"], "handler_type": "fix"})
    _, is_wide, dtype, is_restored = run(tmp_path, TWICE)
    assert (is_wide, dtype, is_restored) == (True, "Float16", True)


@needs_mindspore
def test_002_044_a_name_that_is_none_is_said_with_the_nearest(tmp_path: Path) -> None:
    config(tmp_path, "free_benchmark", {"list": ["mindspore.ops.matmull"]})
    said = run(
        tmp_path,
        "try:\n    PrecisionDebugger('config.json').start()\nexcept Exception as error:\n    print(json.dumps(str(error)))\n",
    )
    assert "'mindspore.ops.matmull' is no function" in said and "matmul" in said


GRAPH = """
ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": LEVEL})
class Net(ms.nn.Cell):
    def construct(self, x):
        return ops.exp(x * 2.0) + 1.0
debugger = PrecisionDebugger("config.json")
said = ""
try:
    debugger.start()
    Net()(Tensor(np.full((2, 2), 50.0, np.float32)))
    debugger.stop()
except Exception as error:
    said = str(error)
print(json.dumps([said, getattr(debugger._work, "found", [])]))
"""


@needs_mindspore
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_002_071_072_the_kernel_that_overflows_is_kept_and_other_jit_levels_are_refused(
    tmp_path: Path, level: str
) -> None:
    config(tmp_path, "overflow_check", {"check_mode": "aicore"}, level="L2")
    said, found = run(tmp_path, GRAPH.replace("LEVEL", repr(level)))
    if level != "O2":
        assert "jit_level O2" in said and found == []
        return
    assert said == ""
    assert [name.split(".")[0] for name in found] == ["Exp"]
    assert all(path.name.startswith("Exp.") for path in (tmp_path / "out").rglob("*.npy"))
    settings = json.loads((tmp_path / "out" / "kernel_graph_overflow_check.json").read_text())["common_dump_settings"]
    assert (settings["op_debug_mode"], settings["kernels"]) == (1, [])
