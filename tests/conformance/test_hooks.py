"""The examples of the guide of torch_npu.hooks, on the stand-in device, and its compare on files written by hand."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device.fakenpu import run
from ulpscope import open_dump
from ulpscope.compat.torch_npu_hooks import register_hook, schedule, set_dump_path, wrap_acc_cmp_hook
from ulpscope.compat.torch_npu_hooks.tools import compare
from ulpscope.model.names import call_text

INSTALL = "import ulpscope.compat.torch_npu_hooks\nulpscope.compat.torch_npu_hooks.install()\n"
COLUMNS = "Name,Npu Tensor Dtype,Bench Tensor Dtype,Npu Tensor Shape,Bench Tensor Shape,Cosine,RMSE,MAPE"

# "快速上手样例参考", the first example; `model_cpu`, which it never made, is `module`.
FIRST = (
    INSTALL
    + """
import os, json
import torch
import torch.nn as nn

from torch_npu.hooks import set_dump_path, seed_all, register_hook, wrap_acc_cmp_hook
from torch_npu.hooks.tools import compare


class ModuleOP(nn.Module):

    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features=2, out_features=2)
        self.linear_2 = nn.Linear(in_features=2, out_features=1)
        self.relu = nn.ReLU()

    def forward(self, x):
        x1 = self.linear_1(x)
        x2 = self.linear_2(x1)
        r1 = self.relu(x2)
        return r1

module = ModuleOP()
register_hook(module, wrap_acc_cmp_hook)
seed_all()
x = torch.randn(2, 2)

set_dump_path("./cpu_module_op.pkl")
out = module(x)
loss = out.sum()
loss.backward()

module.npu()
x = x.npu()
set_dump_path("./npu_module_op.pkl")
out = module(x)
loss = out.sum()
loss.backward()

compare("./npu_module_op.pkl", "./cpu_module_op.pkl", "./module_result.csv")
"""
)
# The second, with a small net where torchvision has resnet50, then the lines that read the file.
SECOND = (
    INSTALL
    + """
import sys, types
import torch.nn as nn
torchvision = sys.modules["torchvision"] = types.ModuleType("torchvision")
class models:
    resnet50 = lambda: nn.Sequential(nn.Conv2d(3, 2, 7, stride=8), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 5))
torchvision.models, torchvision.datasets, torchvision.transforms = models, None, None

import os
import copy
import torch
import torch.nn as nn
from torchvision import models, datasets, transforms

from torch_npu.hooks import set_dump_path, seed_all, register_hook, wrap_acc_cmp_hook
from torch_npu.hooks.tools import compare

model_cpu = models.resnet50()
model_cpu.eval()
model_npu = copy.deepcopy(model_cpu)
model_npu.eval()

seed_all()
register_hook(model_cpu, wrap_acc_cmp_hook)
register_hook(model_npu, wrap_acc_cmp_hook)

inputs = torch.randn(1, 3, 244, 244)
labels = torch.randn(1).long()
criterion = nn.CrossEntropyLoss()

set_dump_path("./cpu_resnet50_op.pkl")
output = model_cpu(inputs)
loss = criterion(output, labels)
loss.backward()

set_dump_path("./npu_resnet50_op.pkl")
model_npu.npu()
inputs = inputs.npu()
labels = labels.npu()
output = model_npu(inputs)
loss = criterion(output, labels)
loss.backward()

compare("./npu_resnet50_op.pkl", "./cpu_resnet50_op.pkl", "./resnet50_result.csv")

import json

pkl_file=open("./cpu_resnet50_op.pkl",'r')
tensor_line=pkl_file.readline()
tensor_data=json.loads(tensor_line)

print(json.dumps([tensor_data[0], len(tensor_data[1]), tensor_data[2], tensor_data[3]]))
"""
)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lines(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_001_002_003_004_005_006_008_the_first_example(here: Path) -> None:
    run(FIRST)
    assert sorted(path.name for path in here.iterdir()) == [
        "cpu_module_op.pkl",
        "module_result.csv",
        "npu_module_op.pkl",
    ]
    names = [row[0] for row in lines(here / "cpu_module_op.pkl")]
    assert names[:8] == [
        "0_Functional_linear_forward_input.0",
        "1_Functional_linear_forward_input.1",
        "2_Functional_linear_forward_input.2",
        "3_Functional_linear_forward_output",
        "4_Functional_linear_forward_input.0",
        "5_Functional_linear_forward_input.1",
        "6_Functional_linear_forward_input.2",
        "7_Functional_linear_forward_output",
    ]
    values = lines(here / "cpu_module_op.pkl")[0][1]
    assert values[4:] == pytest.approx([max(values[:4]), min(values[:4]), sum(values[:4]) / 4])
    assert (here / "module_result.csv").read_text().splitlines()[0] == COLUMNS
    rows = table(here / "module_result.csv")
    forward = [row["Name"] for row in rows if "forward" in row["Name"]]
    # The first file goes on until the second is named, with the calls that move the model.
    assert forward == [name for name in names if "forward" in name][: len(forward)]
    assert {"8_Functional_relu_forward_input.0", "10_Tensor_sum_forward_input.0"} <= set(forward)
    assert all(float(row["Cosine"]) == pytest.approx(1) and float(row["RMSE"]) == pytest.approx(0) for row in rows)


def test_001_006_012_the_second_example_and_reading_its_file(here: Path) -> None:
    name, length, dtype, shape = run(SECOND)
    assert (name, length, dtype, shape) == (
        "0_Functional_conv2d_forward_input.0",
        13,
        "torch.float32",
        [1, 3, 244, 244],
    )
    rows = table(here / "resnet50_result.csv")
    assert {"Functional_conv2d", "Functional_linear", "Functional_relu"} <= {
        row["Name"].partition("_")[2].partition("_forward")[0] for row in rows
    }


# "基于step粒度控制精度对比数据导出" and "异步算子数据导出".
STEPS = (
    INSTALL
    + """
import json, pathlib, numpy, torch, torch_npu, torch.nn as nn
from torch_npu.hooks import register_hook, set_dump_path, wrap_acc_cmp_hook, schedule, step_schedule
model = nn.Sequential(nn.Linear(2, 1), nn.ReLU()).npu()
num_train_epochs = 2
dataloader = torch.utils.data.DataLoader(torch.ones(12, 2).npu(), batch_size=1, num_workers=0)
set_dump_path("./steps.pkl")

# add step schedule, begin=4 end=10 stride=2
register_hook(model, wrap_acc_cmp_hook, schedule=schedule(4, 10, 2))

for epoch in range(num_train_epochs):
    # init step_num as 0
    step_schedule.reset_step()
    for step, inputs in enumerate(dataloader):
        output = model(inputs * step)
        loss = output.sum()
        loss.backward()
        # step_num increase 1
        step_schedule.step()
print(json.dumps(step_schedule.step_num))
"""
)
EXPORT = (
    INSTALL
    + """
import json, pathlib, numpy, torch, torch_npu, torch.nn as nn
from torch_npu.hooks import register_hook, wrap_async_datadump_hook, schedule, step_schedule
module = nn.Sequential(nn.Linear(2, 1), nn.ReLU()).npu()
# register wrap_async_datadump_hook and add datadump path
register_hook(module, wrap_async_datadump_hook, path='./output', schedule=schedule(1, 2))
for step in range(4):
    module(torch.full((2, 2), 1.0 + step).npu()).sum().backward()
    step_schedule.step()
names = sorted(path.name for path in pathlib.Path("output").iterdir())
# load datadump data by numpy
(name,) = [name for name in names if "Functional_relu_backward_input0" in name and name.startswith("1")][:1]
print(json.dumps([names, name, numpy.load('./output/' + name).shape]))
"""
)


def test_001_014_015_016_021_only_the_asked_steps_are_dumped(here: Path) -> None:
    assert run(STEPS) == 12
    inputs = [row[1][0] for row in lines(here / "steps.pkl") if row[0].endswith("Functional_linear_forward_input.0")]
    assert inputs == [4.0, 6.0, 8.0, 10.0] * 2
    numbers = [int(row[0].partition("_")[0]) for row in lines(here / "steps.pkl")]
    assert numbers == list(range(len(numbers)))


def test_001_017_018_019_tensors_are_exported_one_by_one_without_the_work_around(here: Path) -> None:
    names, name, shape = run(EXPORT)
    assert name.endswith("_Functional_relu_backward_input0_shape[2,1]_stride[1,1]_offset[0]_format[2].npy")
    assert shape == [2, 1]
    files = [each for each in names if each.endswith(".npy")]
    assert sorted(int(each.partition("_")[0]) for each in files) == list(range(len(files)))
    inputs = [np.load(here / "output" / each) for each in files if "linear_forward_input0" in each]
    assert sorted(float(array[0, 0]) for array in inputs) == [2.0, 3.0]


def test_001_004_what_was_dumped_is_in_the_file_behind_each_optimizer_step(here: Path) -> None:
    counts, left = run(
        INSTALL
        + """
import json, os, pathlib, torch
from torch_npu.hooks import *
model = torch.nn.Linear(2, 1)
register_hook(model, wrap_acc_cmp_hook)
set_dump_path("op.pkl")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
counts = []
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    lines = [line for line in open("op.pkl") if "Functional_linear_forward_output" in line]
    counts.append(len(lines))
print(json.dumps([counts, [path.suffix for path in pathlib.Path(".op.pkl.ulpscope").rglob("*") if path.is_file()]]))
"""
    )
    assert counts == [1, 2, 3]
    assert set(left) <= {".ring"}
    numbers = [int(row[0].partition("_")[0]) for row in lines(here / "op.pkl")]
    assert numbers == list(range(len(numbers)))
    assert len(list(here.iterdir())) == 1


@pytest.mark.parametrize(
    ("made", "steps"),
    [
        (schedule(), [0, 1, 2, 3]),
        (schedule(4, 10, 2), [4, 6, 8, 10]),
        (schedule(begin=5, stride=3), [5, 8, 11, 14]),
        (schedule(end=10, stride=3), [0, 3, 6, 9]),
    ],
)
def test_001_013_a_schedule_holds_the_steps_of_the_guide(made: schedule, steps: list[int]) -> None:
    assert [step for step in range(steps[-1] + 1) if step in made] == steps


@pytest.mark.parametrize("arguments", [(-1,), (0, -1), (0, 9, 0), (5, 4), (0.5,)])
def test_001_013_a_schedule_that_is_none_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match="Illegal Argument"):
        schedule(*arguments)


def test_001_002_003_017_mistakes_are_told(tmp_path: Path) -> None:
    for path in (None, str(tmp_path), str(tmp_path / "no" / "op.pkl")):
        with pytest.raises(RuntimeError, match=f"set_dump_path '{path}' error, please set a valid filename"):
            set_dump_path(path)
    with pytest.raises(RuntimeError, match=r"Please register hooks to nn.Module\."):
        register_hook(3, wrap_acc_cmp_hook)
    module = type("Module", (), {"named_modules": lambda self: []})()
    with pytest.raises(RuntimeError, match=r"capacity range \[3, 2048\]\."):
        register_hook(module, wrap_acc_cmp_hook, capacity=2)
    with pytest.raises(RuntimeError, match="Did you mean 'sample'"):
        register_hook(module, wrap_acc_cmp_hook, samples=True)
    with pytest.raises(RuntimeError, match="hook is"):
        register_hook(module, print)


FULL = (
    INSTALL
    + """
import json, torch
from torch_npu.hooks import *
register_hook(torch.nn.ReLU(), wrap_acc_cmp_hook, sample=False)
set_dump_path("whole.pkl")
seed_all(1234); first = torch.rand(20)
seed_all(); second = torch.rand(20)
torch.nn.functional.relu(first)
print(json.dumps([first.tolist(), bool((first == second).all())]))
"""
)


def test_001_001_004_whole_tensors_and_seeds(here: Path) -> None:
    drawn, same = run(FULL)
    assert same
    row = next(row for row in lines(here / "whole.pkl") if row[0].endswith("Functional_relu_forward_input.0"))
    assert row[1:] == [drawn, "torch.float32", [20]]
    dump = open_dump(here / "whole.pkl")
    assert dump.load(dump.call("Functional.relu.0.forward").values[0]).tolist() == drawn


SEED = (
    INSTALL
    + """
import json, logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from torch_npu.hooks import *
torch.manual_seed(7); state = torch.get_rng_state()
register_hook(torch.nn.ReLU(), wrap_acc_cmp_hook, seed=None)
assert torch.equal(torch.get_rng_state(), state)
"""
)


def test_the_generators_are_left_alone_where_the_seed_is_none(here: Path) -> None:
    assert subprocess.run([sys.executable, "-c", SEED], cwd=here, capture_output=True, check=True).stdout == b""
    told = SEED.replace(", seed=None", "").partition("assert")[0]
    done = subprocess.run([sys.executable, "-c", told], cwd=here, capture_output=True, check=True, text=True)
    assert done.stdout == "register_hook seeds the generators with 1234, as the tool did; seed=None leaves them alone\n"


def test_001_022_gradients_are_named_as_torch_names_them_for_hooks(here: Path) -> None:
    run(
        INSTALL
        + """
import torch
from torch_npu.hooks import *
register_hook(torch.nn.ReLU(), wrap_acc_cmp_hook)
set_dump_path("op.pkl")
x = torch.tensor([-1.0, 2.0], requires_grad=True)
(torch.nn.functional.relu(x) * torch.tensor([3.0, 5.0])).sum().backward()
"""
    )
    rows = {row[0].partition("_")[2]: row[1][:2] for row in lines(here / "op.pkl")}
    assert rows["Functional_relu_backward_output.0"] == [3.0, 5.0]  # grad_output
    assert rows["Functional_relu_backward_input.0"] == [0.0, 5.0]  # grad_input


# "PyTorch溢出检测工具使用指南", its example with a net that overflows; `model_npu`, which it never made, is `model`.
OVERFLOW = (
    INSTALL
    + """
import json, torch, torch_npu
import torch.nn as nn
from torch_npu.hooks import register_hook, wrap_checkoverflow_hook
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 60000.0))
    def forward(self, x):
        return nn.functional.relu(x * self.scale)
model = Net()
model.half().npu()

register_hook(model,wrap_checkoverflow_hook)

inputs = torch.full((1, 3), 2.0, dtype=torch.float16)
inputs = inputs.npu()
try:
    output = model(inputs)
    loss = output.sum()
    loss.backward()
except ValueError as error:
    print(json.dumps(str(error)))
"""
)


def test_001_020_the_first_call_that_overflows_is_named_and_its_values_are_kept(here: Path) -> None:
    said = run(OVERFLOW)
    (path,) = here.iterdir()
    assert re.fullmatch(r"Overflow_info_\d{8}_\d{6}\.pkl", path.name)
    name = "Tensor___mul___forward"
    assert said == f"[check overflow]: module name :'{name}' is overflow and dump file is saved in '{path.name}'."
    rows = lines(path)
    assert rows[0][0] == f"{name}_stack_info.0" and "function='Net.forward'" in rows[0][1]
    assert rows[-1] == [f"{name}_output", [math.inf] * 3, "torch.float16", [1, 3]]
    dump = open_dump(path)
    (call,) = dump.calls()
    assert call_text(call.id) == "Tensor.__mul__.0.forward"
    assert [dump.load(value).reshape(-1).tolist() for value in call.values] == [[2.0] * 3, [60000.0], [math.inf] * 3]
    assert dump.stack(call)[0].function == "Net.forward"


# --- compare ----------------------------------------------------------------------------------------------------


def written(path: Path, *rows: tuple[str, list[float], list[int]]) -> str:
    path.write_text(
        "".join(
            json.dumps([f"{number}_{name}", values, "torch.float32", shape]) + "\n"
            for number, (name, values, shape) in enumerate(rows)
        )
    )
    return str(path)


def test_001_009_010_011_the_three_metrics_are_those_of_the_formulas(tmp_path: Path) -> None:
    name = "Functional_linear_forward_output"
    npu = written(tmp_path / "npu.pkl", (name, [3.0, 4.0], [2]), (name, [1.0, 1.0], [2]))
    cpu = written(tmp_path / "cpu.pkl", (name, [4.0, 3.0], [2]), (name, [0.0, 1.0], [2]))
    compare(npu, cpu, str(tmp_path / "result.csv"))
    first, second = table(tmp_path / "result.csv")
    assert float(first["Cosine"]) == pytest.approx(24 / 25)
    assert float(first["RMSE"]) == pytest.approx(1.0)
    assert float(first["MAPE"]) == pytest.approx((1 / 4 + 1 / 3) / 2)
    assert float(second["Cosine"]) == pytest.approx(math.sqrt(0.5))
    assert second["MAPE"] == "inf"


def test_001_009_a_side_that_is_all_zero_has_no_cosine(tmp_path: Path) -> None:
    name = "Functional_linear_forward_output"
    npu = written(tmp_path / "npu.pkl", (name, [0.0, 0.0], [2]))
    cpu = written(tmp_path / "cpu.pkl", (name, [4.0, 3.0], [2]))
    compare(npu, cpu, str(tmp_path / "result.csv"))
    assert table(tmp_path / "result.csv")[0]["Cosine"] == "nan"


def test_001_007_fused_operators_are_skipped_and_the_alignment_resumes(tmp_path: Path) -> None:
    """Figure 2 of the guide: two operators of the NPU stand for one of the CPU."""

    def op(name: str, value: float) -> tuple[str, list[float], list[int]]:
        return f"{name}_forward_output", [value, 1.0], [2]

    npu = written(
        tmp_path / "npu.pkl", op("Torch_a", 1), op("NPU_one", 2), op("NPU_two", 3), op("Torch_c", 4), op("Torch_a", 5)
    )
    cpu = written(tmp_path / "cpu.pkl", op("Torch_a", 1), op("Torch_k", 2), op("Torch_c", 4), op("Torch_a", 5))
    compare(npu, cpu, str(tmp_path / "result.csv"))
    rows = table(tmp_path / "result.csv")
    assert [row["Name"] for row in rows] == [
        "0_Torch_a_forward_output",
        "3_Torch_c_forward_output",
        "4_Torch_a_forward_output",
    ]
    assert all(float(row["RMSE"]) == 0 for row in rows)


def test_001_006_007_024_sizes_count_when_asked_for(tmp_path: Path) -> None:
    name = "Torch_mm_forward_output"
    npu = written(tmp_path / "npu.pkl", (name, [1.0, 2.0], [2]), (name, [3.0], [1]))
    cpu = written(tmp_path / "cpu.pkl", (name, [3.0], [1]))
    compare(npu, cpu, str(tmp_path / "names.csv"))
    (row,) = table(tmp_path / "names.csv")
    assert (row["Cosine"], row["RMSE"], row["MAPE"]) == ("cannot be calculated",) * 3
    compare(npu, cpu, str(tmp_path / "sizes.csv"), shape_flag=True)
    (row,) = table(tmp_path / "sizes.csv")
    assert (row["Name"], float(row["RMSE"])) == ("1_Torch_mm_forward_output", 0.0)


def test_001_023_every_output_is_compared(tmp_path: Path) -> None:
    rows = [("Torch_max_forward_output.0", [1.0], [1]), ("Torch_max_forward_output.1", [2.0], [1])]
    npu = written(tmp_path / "npu.pkl", *rows)
    cpu = written(tmp_path / "cpu.pkl", rows[0], ("Torch_max_forward_output.1", [5.0], [1]))
    compare(npu, cpu, str(tmp_path / "result.csv"))
    assert [float(row["RMSE"]) for row in table(tmp_path / "result.csv")] == [0.0, 3.0]


def test_001_006_comparing_needs_no_framework(tmp_path: Path) -> None:
    path = written(tmp_path / "npu.pkl", ("Torch_mm_forward_output", [1.0], [1]))
    program = f"import sys; sys.modules['torch'] = None\n{INSTALL}from torch_npu.hooks.tools import compare\ncompare({path!r}, {path!r}, {str(tmp_path / 'r.csv')!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(table(tmp_path / "r.csv")) == 1
    with pytest.raises(RuntimeError, match="does not exist"):
        compare("no.pkl", path, "r.csv")


def test_001_012_lines_open_as_any_other_dump(tmp_path: Path) -> None:
    path = written(tmp_path / "npu.pkl", ("Torch_mm_forward_output", [1.0], [1]))
    assert [call_text(call) for call in open_dump(path).ids()] == ["Torch.mm.0.forward"]
