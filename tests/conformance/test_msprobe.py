"""Scripts written for msprobe, verbatim, through the names-only distribution in dropin/. Each runs in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ulpscope.compare.comparison import How
from ulpscope.compare.engine import compare_dumps
from ulpscope.model.names import call_text
from ulpscope.store.registry import open_dump

ROOT = Path(__file__).parents[2]
MODEL = """
import torch, torch.nn as nn, torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64, 16)
        self.fc2 = nn.Linear(16, 4)
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = self.drop(x.view(x.size(0), -1))
        x = F.gelu(self.fc1(x)) * 1.0 + 0.0
        return self.fc2(x)
def step(model, optimizer):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.arange(8) % 4).backward()
    optimizer.step()
"""
LOOP = """
from msprobe.pytorch import PrecisionDebugger, seed_all
seed_all(seed=1234, mode=False)
debugger = PrecisionDebugger(config_path="config.json")
model = Net(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    debugger.start(model)
    step(model, optimizer)
    debugger.stop()
    debugger.step()
"""


FROM_RELU = ["Functional.relu.0.forward", "Functional.max_pool2d.0.forward"]
TO_LINEAR = ["Tensor.__mul__.0.backward", "Functional.gelu.0.backward", "Functional.linear.0.backward"]
MODULES = ["Module.drop.Dropout.forward.0", "Module.fc1.Linear.forward.0"]


def run(folder: Path, program: str, **config: Any) -> subprocess.CompletedProcess[str]:
    base = {"task": "statistics", "dump_path": "./dump", "rank": [], "step": [], "level": "L1"}
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "dropin")}
    command = [sys.executable, "-c", MODEL + program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def dumped(folder: Path, name: str = "dump.json", step: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "dump" / f"step{step}" / "rank0" / name).read_text())
    return content


def test_the_loop_of_the_manual_gives_the_layout_of_the_manual(tmp_path: Path) -> None:
    done = run(tmp_path, LOOP, step=[0, 2])
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "dump").iterdir() if not path.name.startswith(".")) == [
        "step0",
        "step2",
    ]
    files = {path.name for path in (tmp_path / "dump" / "step0" / "rank0").iterdir()}
    assert files == {"dump.json", "stack.json", "construct.json"}
    content = dumped(tmp_path)
    assert (content["task"], content["level"], content["framework"]) == ("statistics", "L1", "pytorch")
    leaf = content["data"]["Functional.conv2d.0.forward"]["input_args"][0]
    assert {"type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"} <= set(leaf)
    assert (leaf["dtype"], leaf["shape"]) == ("torch.float32", [8, 1, 8, 8])
    assert "Functional.linear.1.backward" in content["data"]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_002_006_103_levels_write_modules_apis_or_both(tmp_path: Path, level: str) -> None:
    assert run(tmp_path, LOOP, level=level).returncode == 0
    names = set(dumped(tmp_path)["data"])
    assert ("Module.conv1.Conv2d.forward.0" in names) == (level != "L1")
    assert ("Module.fc2.Linear.parameters_grad.0" in names) == (level != "L1")
    assert ("Functional.conv2d.0.forward" in names) == (level != "L0")
    construct = dumped(tmp_path, "construct.json")
    if level == "mix":
        assert construct["Functional.conv2d.0.forward"] == "Module.conv1.Conv2d.forward.0"
        assert construct["Functional.linear.1.backward"] == "Module.fc2.Linear.backward.0"
    if level == "L1":
        assert construct == {}


def test_002_056_md5_is_the_crc_32_of_the_bytes(tmp_path: Path) -> None:
    assert run(tmp_path, LOOP, statistics={"summary_mode": "md5"}).returncode == 0
    leaf = dumped(tmp_path)["data"]["Functional.relu.0.forward"]["output"][0]
    assert len(leaf["md5"]) == 8
    assert int(leaf["md5"], 16) >= 0


def test_002_060_tensor_files_are_readable_by_torch_and_links_where_equal(tmp_path: Path) -> None:
    assert run(tmp_path, LOOP, task="tensor", step=[0]).returncode == 0
    folder = tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data"
    content = dumped(tmp_path)
    leaf = content["data"]["Functional.relu.0.forward"]["output"][0]
    value = torch.load(folder / leaf["data_name"], weights_only=True)
    assert list(value.shape) == leaf["shape"]
    assert value.max().item() == pytest.approx(leaf["Max"], rel=1e-6)
    used = content["data"]["Functional.max_pool2d.0.forward"]["input_args"][0]["data_name"]
    assert (folder / used).samefile(folder / leaf["data_name"])
    assert Path(content["dump_data_dir"]).samefile(folder)


def test_002_051_052_a_list_selects(tmp_path: Path) -> None:
    assert run(tmp_path, LOOP, statistics={"list": ["relu"]}).returncode == 0
    assert set(dumped(tmp_path)["data"]) == {"Functional.relu.0.forward", "Functional.relu.0.backward"}


@pytest.mark.parametrize(
    ("level", "section", "found"),
    [
        ("L1", {"list": (full := ["Functional.gelu.0.forward", "Functional.relu.0.backward"])}, full),
        ("L1", {"scope": ["Functional.relu.0.forward", "Functional.max_pool2d.0.forward"]}, FROM_RELU),
        ("L1", {"scope": ["Tensor.__mul__.0.backward", "Functional.linear.0.backward"]}, TO_LINEAR),
        ("L0", {"scope": ["Module.drop.Dropout.forward.0", "Module.fc1.Linear.forward.0"]}, MODULES),
        ("mix", {"list": ["Module.fc1.Linear.forward.0"]}, [MODULES[1], "Functional.linear.0.forward"]),
    ],
)
def test_002_050_051_a_full_name_stands_for_its_phase_alone(
    tmp_path: Path, level: str, section: dict[str, Any], found: list[str]
) -> None:
    """Two forward names give no backwards; one layer of a large model is dumped by its name, with all that it calls."""
    done = run(tmp_path, LOOP, level=level, step=[0], statistics=section)
    assert done.returncode == 0, done.stderr
    assert list(dumped(tmp_path)["data"]) == found


def test_002_050_a_scope_selects_a_closed_interval(tmp_path: Path) -> None:
    scope = ["Functional.relu.0.forward", "Functional.linear.0.forward"]
    assert run(tmp_path, LOOP, statistics={"scope": scope, "data_mode": ["forward"]}).returncode == 0
    names = list(dumped(tmp_path)["data"])
    assert (names[0], names[-1]) == (scope[0], scope[1])


LOADER = """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
loader = torch.utils.data.DataLoader(list(range(10)), batch_size=1)
for number, batch in enumerate(loader):
    print(number, flush=True)
    torch.sin(batch.float())
"""


def test_004_031_a_data_loader_ends_the_run_with_an_exception_that_says_why(tmp_path: Path) -> None:
    done = run(tmp_path, LOADER, enable_dataloader=True, step=[0, 2])
    assert done.returncode == 1
    assert "Exception: msprobe: exit after iteration 2" in done.stderr


def test_002_010_a_data_loader_counts_the_steps(tmp_path: Path) -> None:
    done = run(tmp_path, LOADER, enable_dataloader=True, step=[0, 2])
    assert done.stdout.split() == ["0", "1", "2"]
    assert {path.name for path in (tmp_path / "dump").iterdir() if not path.name.startswith(".")} == {"step0", "step2"}


LEFT_ALONE = """
import copy, random, numpy as np
x = torch.ones(1000)
def drawn():
    torch.manual_seed(5); random.seed(5); np.random.seed(5)
    return [F.dropout(x, 0.5).sum().item(), torch.rand(1).item(), random.random(), np.random.rand()]
bare, swapped = drawn(), [F.dropout.__code__, nn.modules.dropout._DropoutNd.__init__.__code__]
from msprobe.pytorch import PrecisionDebugger
off = nn.Dropout(0.5), nn.Dropout(0.25), nn.Dropout(0.75)
off[2].p = 0.1
assert (F.dropout(x, 0.5) == 1).all() and [layer.p for layer in off] == [0, 0, 0.1]
clone = copy.deepcopy(off)
states = torch.get_rng_state(), random.getstate()
debugger = PrecisionDebugger("config.json"%s)
assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
assert torch.backends.cudnn.enabled
assert [layer.p for layer in (*off, *clone)] == [0.5, 0.25, 0.1] * 2 and nn.Dropout(0.5).p == 0.5
import msprobe.pytorch
msprobe.pytorch.PrecisionDebugger.start(clone[0])
assert drawn() == bare
msprobe.pytorch.PrecisionDebugger.stop()
assert drawn() == bare and not vars(nn.Dropout(0.5)).keys() - vars(off[0]).keys()
assert [F.dropout.__code__, nn.modules.dropout._DropoutNd.__init__.__code__] == swapped
"""


@pytest.mark.parametrize(
    ("keywords", "config"),
    [
        ("", {"extra_info": True}),
        ("", {"seed": None, "dropout": "keep"}),
        (', seed=None, dropout="keep"', {}),
    ],
    ids=["as 26.x", "in the file", "as arguments"],
)
def test_dropout_and_the_generators_are_left_alone_where_that_is_asked_for(
    tmp_path: Path, keywords: str, config: dict[str, Any]
) -> None:
    done = run(tmp_path, LEFT_ALONE % keywords, **config)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert dumped(tmp_path)["data"]["Functional.dropout.0.forward"]["output"][0]["Max"] == 2.0


def test_what_is_done_to_dropout_and_the_generators_is_said_once(tmp_path: Path) -> None:
    done = run(tmp_path, LOOP)
    assert done.stderr.count("dropout is off (p = 0)") == done.stderr.count("seeded with 1234") == 1
    assert '"dropout": "keep" and "seed": null' in done.stderr
    assert "dropout" not in run(tmp_path, LOOP, dropout="keep", seed=7).stderr.partition(", as msprobe")[0]


def test_002_107_dropout_is_off_after_the_import_and_only_then(tmp_path: Path) -> None:
    program = """
import ulpscope
x = torch.ones(1000)
before = F.dropout
assert (F.dropout(x, 0.5) == 0).any() and nn.Dropout(0.5).p == 0.5
ulpscope.Capture
assert (F.dropout(x, 0.5) == 0).any()
from msprobe.pytorch import PrecisionDebugger
assert F.dropout is before
for off in (F.dropout(x, 0.5), F.dropout(x, p=0.9), nn.Dropout(0.5)(x), nn.Dropout(p=0.3, inplace=False)(x)):
    assert torch.equal(off, x)
for off in (F.dropout2d(x.view(1, 10, 10, 10)), F.dropout3d(x.view(1, 10, 10, 10, 1)), nn.Dropout2d()(x.view(1, 10, 10, 10))):
    assert torch.equal(off.flatten(), x)
assert nn.Dropout(0.5).p == 0 and nn.AlphaDropout(0.5).p == 0.5
assert torch.equal(torch.compile(lambda t: F.dropout(t, 0.5), backend="eager")(x), x)
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr


def test_000_061_062_one_module_is_dumped_as_a_whole(tmp_path: Path) -> None:
    program = """
from msprobe.pytorch import PrecisionDebugger, module_dump, module_dump_end
debugger = PrecisionDebugger(config_path="config.json")
model = Net(); x = torch.randn(8, 1, 8, 8)
debugger.start()
torch.sin(x)
module_dump(model.fc1, "MyModule")
model(x)
module_dump_end()
torch.cos(x)
debugger.stop(); debugger.step()
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    names = list(dumped(tmp_path)["data"])
    assert names[0] == "Torch.sin.0.forward"
    assert names[-1] == "Torch.cos.0.forward"
    assert [name for name in names if "MyModule" in name] == ["Module.MyModule.Linear.forward.0"]
    assert not any("linear" in name or "conv2d" in name for name in names)


def test_single_values_go_into_debug_json_with_their_gradients(tmp_path: Path) -> None:
    program = """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
x = torch.ones(3, requires_grad=True)
y = x * 2
PrecisionDebugger.save(y, "y", save_backward=True)
PrecisionDebugger.save({"a": y, "b": [1, "t"]}, "pack", save_backward=False)
y.sum().backward()
PrecisionDebugger.step()
"""
    done = run(tmp_path, program, level="debug")
    assert done.returncode == 0, done.stderr
    data = dumped(tmp_path, "debug.json")["data"]
    assert data["y.0.debug"]["Max"] == 2.0
    assert data["y_grad.0.debug"]["Max"] == 1.0
    assert data["pack.0.debug"]["a"]["shape"] == [3]


def test_004_020_a_second_run_into_the_same_folder_replaces_the_first(tmp_path: Path) -> None:
    assert run(tmp_path, LOOP).returncode == 0
    assert run(tmp_path, LOOP, step=[1]).returncode == 0
    steps = [path.name for path in (tmp_path / "dump").iterdir() if not path.name.startswith(".")]
    assert steps == ["step1"]


@pytest.mark.parametrize("name", ["abc++", "my dump", "lr=1e-4"])
def test_004_028_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, LOOP, dump_path=f"./{name}/dump", step=[0]).returncode == 0
    assert (tmp_path / name / "dump" / "step0" / "rank0" / "dump.json").is_file()


def test_the_task_run_ut_is_a_command_and_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, LOOP, task="run_ut")
    assert done.returncode == 1
    assert "task 'run_ut' is not for a debugger" in done.stderr
    assert "msprobe -f pytorch run_ut -api_info" in done.stderr


def test_using_the_class_before_there_is_a_debugger_says_what_to_do(tmp_path: Path) -> None:
    done = run(tmp_path, "from msprobe.pytorch import PrecisionDebugger\nPrecisionDebugger.start()")
    assert "make one first" in done.stderr


def test_004_021_kernels_below_one_api(tmp_path: Path) -> None:
    config = {"task": "tensor", "level": "L2", "step": [0], "tensor": {"scope": ["Functional.linear.0.forward"]}}
    done = run(tmp_path, LOOP, **config)
    assert done.returncode == 0, done.stderr
    assert list(dumped(tmp_path)["data"]) == ["Aten.t.default.0.forward", "Aten.addmm.default.0.forward"]


def test_004_021_kernels_of_a_call_that_never_comes_are_an_error_at_the_end(tmp_path: Path) -> None:
    config = {"task": "tensor", "level": "L2", "step": [0], "tensor": {"scope": ["Functional.nothing.0.forward"]}}
    done = run(tmp_path, LOOP, **config)
    assert done.returncode == 1
    assert "there was no call Functional.nothing.0.forward, so there are no kernels of it" in done.stderr


def test_calls_of_scripts_of_8_x(tmp_path: Path) -> None:
    """A function of the program is recorded under its module's name until it is given back."""
    program = """
import types
from msprobe.pytorch.common import seed_all
from msprobe.pytorch import PrecisionDebugger
seed_all(1234, True, rm_dropout=True)
ops = types.ModuleType("myops")
ops.swish = swish = lambda x, scale=1.0: x * torch.sigmoid(x) * scale
debugger = PrecisionDebugger("config.json")
debugger.register_custom_api(ops, "swish")
debugger.set_init_step(5)
x = torch.randn(3, requires_grad=True)
debugger.start(None, token_range=[0, 2])
(ops.swish(x, scale=2.0) + 1).sum().backward()
debugger.forward_backward_dump_end()
debugger.step()
debugger.restore_custom_api(ops, "swish")
assert ops.swish is swish
for call in (lambda: debugger.set_init_step(-1), lambda: debugger.register_custom_api(ops, "none")):
    try: call()
    except Exception as error: print(error)
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert "whole number from 0 on" in done.stdout and "has no function 'none'" in done.stdout
    data = json.loads((tmp_path / "dump" / "step5" / "rank0" / "dump.json").read_text())["data"]
    assert list(data)[:2] == ["myops.swish.0.forward", "Tensor.__add__.0.forward"]
    assert list(data)[-1] == "myops.swish.0.backward"
    assert data["myops.swish.0.forward"]["input_kwargs"]["scale"]["value"] == 2.0


def test_002_005_after_the_last_asked_step_training_goes_on_and_it_is_said_once(tmp_path: Path) -> None:
    done = run(tmp_path, "import logging; logging.basicConfig(level='INFO')" + LOOP + "print('done')", step=["0-1"])
    assert done.stdout == "done\n", done.stderr
    assert done.stderr.count("msprobe ends successfully.") == 1
    assert {path.name for path in (tmp_path / "dump").iterdir() if not path.name.startswith(".")} == {"step0", "step1"}


def test_gradients_of_a_call_are_in_the_order_of_its_node_as_in_msprobe(tmp_path: Path) -> None:
    program = """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
weight = torch.ones(4, 3, requires_grad=True); bias = torch.zeros(4, requires_grad=True)
debugger.start()
(F.linear(torch.ones(2, 3), weight, bias) * 2).sum().backward()
F.linear(torch.ones(2, 5, 3), weight).sum().backward()
debugger.stop(); debugger.step()
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    data = dumped(tmp_path)["data"]
    # addmm(bias, input, weight.t()), and behind it the gradient of the argument itself.
    bias, none, transposed, (_, weight) = data["Functional.linear.0.backward"]["output"]
    assert (bias["shape"], none, transposed["shape"]) == ([4], None, [3, 4])
    assert (weight["shape"], weight["Max"], weight["slot"]) == ([4, 3], 4.0, ["argument", 1])
    assert [leaf and leaf["shape"] for leaf in data["Tensor.__mul__.0.backward"]["output"]] == [[2, 4], None]
    # The node of a linear with a 3-D input is a view; its own weight has its gradient all the same.
    view, (_, weight) = data["Functional.linear.1.backward"]["output"]
    assert (view["shape"], weight["shape"], weight["Max"]) == ([10, 4], [4, 3], 10.0)


def test_names_and_numbers_of_calls_are_those_of_msprobe(tmp_path: Path) -> None:
    program = """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
x = torch.full((2, 2), 4.0)
debugger.start()
x * 3; 2 / x; 9 // x; torch.linalg.norm(x); torch.norm(x); torch.linalg.eigvals(x)
debugger.stop(); debugger.step()
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    data = dumped(tmp_path)["data"]
    assert [name.removesuffix(".forward") for name in data] == [
        "Tensor.__mul__.0",
        "Tensor.reciprocal.0",
        "Tensor.__mul__.1",
        "Torch.floor_divide.0",
        "Torch.norm.0",
        "Torch.norm.1",
        "Torch.linalg_eigvals.0",
    ]
    assert data["Tensor.__mul__.1.forward"]["output"][0]["Max"] == 0.5
    frames = [
        frames for names, frames in dumped(tmp_path, "stack.json").values() if "Tensor.__mul__.1.forward" in names
    ]
    assert not any("ulpscope" in frame for frame in frames[0])


def test_004_010_an_operator_of_ones_own_is_recorded_without_a_list_of_names(tmp_path: Path) -> None:
    program = """
from msprobe.pytorch import PrecisionDebugger
library = torch.library.Library("mylib", "DEF")
library.define("fused_softmax(Tensor x, float scale) -> Tensor")
library.impl("fused_softmax", lambda x, scale: torch.softmax(x * scale, -1), "CPU")
debugger = PrecisionDebugger(config_path="config.json")
debugger.start()
torch.ops.mylib.fused_softmax(torch.zeros(4), 2.0)
debugger.stop(); debugger.step()
"""
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    entry = dumped(tmp_path)["data"]["mylib.fused_softmax.0.forward"]
    assert (entry["input_args"][1]["value"], entry["output"][0]["Max"]) == (2.0, 0.25)


def test_004_027_without_an_npu_kernels_are_dumped_all_the_same(tmp_path: Path) -> None:
    config = {
        "task": "tensor",
        "level": "L2",
        "step": [0],
        "acl_config": "acl_config.json",
        "tensor": {"scope": ["Functional.linear.0.backward"], "backward_input": ["gradient.pt"]},
    }
    done = run(tmp_path, LOOP, **config)
    assert done.returncode == 0, done.stderr
    assert "NameError" not in done.stderr
    assert any(name.startswith("Aten.mm") for name in dumped(tmp_path)["data"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_004_030_the_file_has_the_dtype_that_the_json_says(tmp_path: Path, dtype: str) -> None:
    program = f"""
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
debugger.start()
torch.sin(torch.ones(3, dtype=torch.{dtype}))
debugger.stop(); debugger.step()
"""
    done = run(tmp_path, program, task="tensor")
    assert done.returncode == 0, done.stderr
    leaf = dumped(tmp_path)["data"]["Torch.sin.0.forward"]["output"][0]
    folder = tmp_path / "dump" / "step0" / "rank0" / "dump_tensor_data"
    assert leaf["dtype"] == f"torch.{dtype}" == str(torch.load(folder / leaf["data_name"], weights_only=True).dtype)


def test_004_023_024_the_manual_says_what_the_vendors_errors_mean() -> None:
    text = (ROOT / "docs" / "msprobe.md").read_text(encoding="utf-8")
    assert "EI0006" in text
    assert "107002" in text
    assert "torch.npu.set_device" in text


def test_004_022_calls_that_only_one_side_has_are_told_and_no_error(tmp_path: Path) -> None:
    program = """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
debugger.start()
x = torch.sin(torch.ones(3)); {middle}; torch.cos(x)
debugger.stop(); debugger.step()
"""
    for side, middle in (("reference", "x = x + 0"), ("target", "x = torch.exp(x).log()")):
        (tmp_path / side).mkdir()
        assert run(tmp_path / side, program.format(middle=middle)).returncode == 0
    reference, target = (open_dump(tmp_path / side / "dump") for side in ("reference", "target"))
    found = {call_text(each.match.call.id): each.match.how for each in compare_dumps(reference, target)}
    assert found.pop("Torch.sin.0.forward") is found.pop("Torch.cos.0.forward") is not How.ALONE
    assert {name for name, how in found.items() if how is How.ALONE} == {
        "Tensor.__add__.0.forward",
        "Torch.exp.0.forward",
        "Tensor.log.0.forward",
    }


JOINING = """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
models = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]
for number, model in enumerate(models):
    debugger.start(model)
    for each in models[:number + 1]:
        each(torch.ones(1, 2))
    debugger.stop()
    debugger.step()
"""


def test_a_model_that_is_started_later_renames_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, JOINING, level="L0").returncode == 0
    first, second = (list(dumped(tmp_path, step=step)["data"]) for step in range(2))
    assert first == ["Module.Sequential.forward.0", "Module.0.Linear.forward.0"]
    assert second == [*first, "Module.1.Sequential.forward.0", "Module.1.0.Linear.forward.0"]


STRETCHES = """
import json, os
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
folder = "dump/step0/rank0"
model = Net(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizes, places = [], set()
for _ in range(5):
    debugger.start(model)
    step(model, optimizer)
    debugger.stop()
    for name in ("dump.json", "stack.json", "construct.json"):
        with open(f"{folder}/{name}") as file:
            content = json.load(file)
        if name == "dump.json":
            sizes.append(len(content["data"]))
            places.add(os.stat(file.name).st_ino)
print(sizes, len(places))
"""


@pytest.mark.parametrize("config", [{"task": "tensor", "level": "mix"}, {"statistics": {"summary_mode": "md5"}}])
def test_stretches_of_one_step_are_in_the_files_after_each_stop(tmp_path: Path, config: dict[str, Any]) -> None:
    done = run(tmp_path, STRETCHES, **config)
    assert done.returncode == 0, done.stderr
    sizes, places = json.loads(done.stdout.rpartition(" ")[0]), int(done.stdout.rpartition(" ")[2])
    assert sizes == [sizes[0] * number for number in range(1, 6)] and places == 2  # files that take turns
    content = dumped(tmp_path)["data"]
    assert len(content) == sizes[-1]
    stacks = dumped(tmp_path, "stack.json").values()
    assert {name for names, _ in stacks for name in names} == {
        name for name in content if "parameters_grad" not in name
    }
    assert [f"Torch.randn.{number}.forward" for number in range(5)] in [names for names, _ in stacks]
    if config.get("task") == "tensor":
        dump = open_dump(tmp_path / "dump")
        stored = [value for call in dump.calls() for value in call.values if value.payload is not None]
        assert len(stored) > 100 and all(dump.load(value).size for value in stored)
    left = [path.name for path in (tmp_path / "dump" / "step0").rglob(".*")]
    assert left == []


COMPILED = """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json", dropout="keep", seed=None)
model = torch.compile(nn.Linear(2, 2), backend="eager")
for _ in range(2):
    for _ in range(2):
        debugger.start(model)
        model(torch.ones(1, 2)).sum().backward()
        debugger.stop()
    debugger.step()
"""


def test_a_compiled_region_is_told_in_the_file_and_once_in_the_log(tmp_path: Path) -> None:
    done = run(tmp_path, COMPILED, level="mix")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a compiled region (torch.compile) is recorded at its boundary only") == 1
    for step in range(2):
        (note,) = dumped(tmp_path, step=step)["notes"]
        assert note == "a compiled region (torch.compile) is recorded at its boundary only (2 times)"
        assert open_dump(tmp_path / "dump", step=step).manifest.notes == (note,)
