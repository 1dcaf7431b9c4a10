"""The examples of ptdbg_ascend's guide about dumping, through the names-only distribution in dropin/.

A program runs in a process of its own, and holds as many examples as fit: starting one takes longer than an example.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from device.fakenpu import run as run_on_npu
from ptdbg_programs import ROOT, names, run
from ulpscope import open_dump, open_run
from ulpscope.compat import ptdbg_ascend
from ulpscope.model.names import call_text

# --- PrecisionDebugger and configure_hook -----------------------------------------------------------------------

# "configure_hook函数", examples 1 to 9, each with a debugger of its own.
CONFIGURED = {
    "list": 'mode="list", scope=["Tensor_permute_1_forward", "Tensor_transpose_2_forward", "Torch_relu_3_backward"]',
    "range": 'mode="range", scope=["Tensor_abs_1_forward", "Tensor_transpose_3_forward"]',
    "stack": 'mode="stack", scope=["Tensor_abs_1_forward", "Tensor_transpose_3_forward"]',
    "api_list": 'mode="api_list", api_list=["relu"]',
    "api_stack": 'mode="api_stack"',
    "off": 'filter_switch="OFF"',
    "on": 'filter_switch="ON"',
    "backward": 'input_output_mode=["backward"]',
    "summary": "summary_only=True",
}


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configured")
    program = "from ptdbg_ascend import *\nseed_all()\nmodel = Net()\n"
    for name, arguments in CONFIGURED.items():
        program += f"""
debugger = PrecisionDebugger(dump_path="./{name}", hook_name="dump")
debugger.configure_hook({arguments})
debugger.start(); train(model); debugger.stop(); debugger.step()
"""
    done = run(folder, program)
    assert done.returncode == 0, done.stderr
    return folder


def rank0(folder: Path) -> Path:
    return folder / "ptdbg_dump_v2.0" / "rank0"


def test_000_008_011_configure_hook_example_1_a_list_of_calls(configured: Path) -> None:
    assert names(rank0(configured / "list")) == [
        "Tensor.permute.1.forward",
        "Tensor.transpose.2.forward",
        "Torch.relu.3.backward",
    ]
    assert (rank0(configured / "list") / "list_dump" / "Tensor_permute_1_forward_output.npy").is_file()


def test_000_012_configure_hook_example_2_a_range_of_calls(configured: Path) -> None:
    found = names(rank0(configured / "range"))
    assert (found[0], found[-1]) == ("Tensor.abs.1.forward", "Tensor.transpose.3.forward")
    assert found.count("Torch.relu.1.forward") == 1 and not any(name.endswith("backward") for name in found)
    assert (rank0(configured / "range") / "range_dump.pkl").is_file()


def test_000_013_configure_hook_example_3_stacks_alone(configured: Path) -> None:
    assert [path.name for path in rank0(configured / "stack").iterdir()] == ["stack_dump.pkl"]
    rows = [json.loads(line) for line in (rank0(configured / "stack") / "stack_dump.pkl").read_text().splitlines()]
    assert rows[0][0] == "Tensor_abs_1_forward_stack_info"
    assert all(row[0].endswith("stack_info") for row in rows)


def test_000_015_019_configure_hook_example_5_a_kind_of_api(configured: Path) -> None:
    found = names(rank0(configured / "api_list"))
    assert set(found) == {f"Torch.relu.{n}.{phase}" for n in range(4) for phase in ("forward", "backward")}


def test_000_008_016_092_configure_hook_example_6_everything_with_stacks_is_the_default(configured: Path) -> None:
    dump = open_dump(rank0(configured / "api_stack") / "api_stack_dump.pkl")
    call = dump.call("Functional.conv2d.1.forward")
    assert call.stack is not None and any(frame.function.endswith("forward") for frame in dump.stack(call))
    assert {path.name for path in rank0(configured / "off").iterdir()} == {
        "api_stack_dump.pkl",
        "api_stack_dump",
        "compare_data.py",
    }


def test_000_020_configure_hook_example_7_whole_numbers_and_truth_values_are_filtered(configured: Path) -> None:
    kinds = {}
    for name in ("off", "on"):
        rows = [json.loads(line) for line in (rank0(configured / name) / "api_stack_dump.pkl").read_text().splitlines()]
        kinds[name] = {row[3] for row in rows if len(row) > 3}
    assert {"torch.float32", "torch.bool", "torch.int64", "<class 'int'>", "<class 'float'>"} <= kinds["off"]
    assert kinds["on"] == {"torch.float32"}


def test_000_023_configure_hook_example_8_backward_alone(configured: Path) -> None:
    files = list((rank0(configured / "backward") / "api_stack_dump").iterdir())
    assert files and all("backward" in path.name for path in files)


def test_000_024_configure_hook_example_9_no_arrays(configured: Path) -> None:
    assert {path.name for path in rank0(configured / "summary").iterdir()} == {"api_stack_dump.pkl", "compare_data.py"}


# "示例代码（手动模式）" example 1, with a second stretch, and steps that are not asked for.
MANUAL = """
from ptdbg_ascend import *
seed_all()
model = Net()
debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="dump", step=[0, 2])
try:
    while True:
        debugger.start()
        torch.sin(torch.ones(2))
        debugger.stop()
        torch.tan(torch.ones(2))
        PrecisionDebugger.start()
        torch.cos(torch.ones(2))
        PrecisionDebugger.stop()
        debugger.step()
except Exception as error:
    print(error)
"""


def test_000_002_006_027_028_029_030_091_steps_and_stretches_of_the_manual_mode(tmp_path: Path) -> None:
    done = run(tmp_path, MANUAL)
    assert done.stdout == "ptdbg: exit after iteration [0, 2]\n", done.stderr
    assert sorted(path.name for path in (tmp_path / "dump_path").iterdir()) == ["step0", "step2"]
    for step in (0, 2):
        rank = tmp_path / "dump_path" / f"step{step}" / "ptdbg_dump_v2.0" / "rank0"
        assert [name for name in names(rank) if "ones" not in name] == ["Torch.sin.0.forward", "Torch.cos.0.forward"]
    assert [dump.manifest.step for dump in open_run(tmp_path / "dump_path")] == [0, 2]


# "示例代码（自动模式）" example 1.
LOADER = """
from ptdbg_ascend import *
debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="dump", step=[0,2], enable_dataloader=True)
for number, batch in enumerate(torch.utils.data.DataLoader(list(range(10)), batch_size=1)):
    print(number, flush=True)
    torch.sin(batch.float())
"""


def test_000_007_the_automatic_mode_counts_batches_and_ends_the_training(tmp_path: Path) -> None:
    done = run(tmp_path, LOADER)
    assert done.stdout.split() == ["0", "1", "2"]
    assert done.stderr.splitlines()[-1] == "Exception: ptdbg: exit after iteration [0, 2]"
    assert sorted(path.name for path in (tmp_path / "dump_path").iterdir()) == ["step0", "step2"]


# --- functions --------------------------------------------------------------------------------------------------

# "场景化示例 > 单卡场景精度比对" 1, then "set_dump_switch" examples 1 to 9, and "通信API的数据dump".
SWITCHED = {
    "all": 'mode="api_stack", filter_switch="OFF"',
    "list": 'mode="list", scope=["Tensor_permute_1_forward", "Tensor_transpose_2_forward", "Torch_relu_3_backward"]',
    "range": 'mode="range", scope=["Tensor_abs_1_forward", "Tensor_transpose_3_forward"]',
    "stack": 'mode="stack", scope=["Tensor_abs_1_forward", "Tensor_transpose_3_forward"]',
    "api_list": 'mode="api_list", api_list=["relu"]',
    "filter": 'filter_switch="OFF"',
    "backward": 'dump_mode=["backward"]',
    "summary": "summary_only=True",
    "distributed": 'mode="api_list", api_list=["distributed"]',
}


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("switched")
    program = """
from ptdbg_ascend import *
import torch.distributed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
seed_all()
model = Net()
"""
    for name, arguments in SWITCHED.items():
        program += f"""
set_dump_path("./npu_dump", dump_tag='{name}')
register_hook(model, acc_cmp_dump)
set_dump_switch("ON", {arguments})
train(model); torch.distributed.all_reduce(torch.ones(2))
set_dump_switch("OFF")
torch.tan(torch.ones(2))
"""
    done = run(folder, program)
    assert done.returncode == 0, done.stderr
    return folder / "npu_dump"


def test_000_048_049_050_054_055_056_090_the_whole_net_of_the_first_example(switched: Path) -> None:
    rank = switched / "all_v2.0" / "rank0"
    assert {path.name for path in rank.iterdir()} == {"api_stack_dump.pkl", "api_stack_dump", "compare_data.py"}
    found = names(rank)
    assert {"Functional.conv2d.1.backward", "Tensor.__sub__.0.forward", "Torch.relu.3.forward"} <= set(found)
    assert not any("tan" in name for name in found)
    assert not list(switched.glob("*/.ulpscope")) and not (switched / ".ulpscope").exists()


def test_000_010_095_mode_all_has_no_prefix_and_no_stacks(switched: Path) -> None:
    rank = switched / "filter_v2.0" / "rank0"
    rows = [json.loads(line) for line in (rank / "dump.pkl").read_text().splitlines()]
    assert not any(row[0].endswith("stack_info") for row in rows)
    row = next(row for row in rows if row[0] == "Functional_conv2d_0_forward_output")
    assert (len(row), row[1:5]) == (6, [0, [], "torch.float32", [2, 1, 3, 3]])
    array = np.load(rank / "dump" / "Functional_conv2d_0_forward_output.npy")
    assert row[5] == pytest.approx([array.max(), array.min(), array.mean(), np.linalg.norm(array)], rel=1e-6)


def test_000_011_012_013_015_set_dump_switch_examples_1_2_3_and_5(switched: Path) -> None:
    assert names(switched / "list_v2.0")[-1] == "Torch.relu.3.backward"
    assert names(switched / "range_v2.0")[0] == "Tensor.abs.1.forward"
    assert [path.name for path in (switched / "stack_v2.0" / "rank0").iterdir()] == ["stack_dump.pkl"]
    assert all("relu" in name for name in names(switched / "api_list_v2.0"))


def test_000_023_024_set_dump_switch_examples_8_and_9(switched: Path) -> None:
    assert all("backward" in path.name for path in (switched / "backward_v2.0" / "rank0" / "dump").iterdir())
    assert not (switched / "summary_v2.0" / "rank0" / "dump").exists()


def test_000_069_communication_alone(switched: Path) -> None:
    assert names(switched / "distributed_v2.0") == ["Distributed.all_reduce.0.forward"]


def test_000_093_094_arrays_have_the_names_of_the_guide(switched: Path) -> None:
    form = re.compile(r"(Tensor|Torch|Functional|Distributed)_\w+_\d+_(forward|backward)_(input|output)(\.\w+)*\.npy")
    files = [path.name for path in (switched / "filter_v2.0" / "rank0" / "dump").iterdir()]
    assert "Tensor_permute_1_forward_output.npy" in files and "Functional_conv2d_1_backward_input.0.npy" in files
    assert [name for name in files if not form.fullmatch(name)] == []


def test_000_057_the_script_for_comparing_is_written_beside_the_dump(switched: Path) -> None:
    rank = switched / "all_v2.0" / "rank0"
    text = (rank / "compare_data.py").read_text()
    filled = text.replace('_pkl_path": ,', '_pkl_path": pkl_path,').replace(
        '_data_dir": ,', '_data_dir": dump_data_dir,'
    )
    values = {node.targets[0].id: node.value for node in ast.parse(filled).body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    assert ast.literal_eval(values["pkl_path"]) == str(rank / "api_stack_dump.pkl")
    assert ast.literal_eval(values["dump_data_dir"]) == str(rank / "api_stack_dump")
    assert text.endswith('compare(dump_path_param, output_path="", stack_mode="True")\n')
    for tag, there in {"filter": True, "list": False, "stack": False}.items():
        assert (switched / f"{tag}_v2.0" / "rank0" / "compare_data.py").exists() is there


# "模块级精度数据dump > 示例代码", its misprints (nnLinear, Relu, x2, bachward, the missing brackets) repaired.
MODULE_DUMP = """
from ptdbg_ascend import *
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

if __name__ == "__main__":
    module = ModuleOP()
    set_dump_path("./dump_data/npu")
    set_dump_switch("ON")
    register_hook(module, acc_cmp_dump)
    x = torch.randn(2, 2)
    module_dump(module, "MyModule")
    out = module(x)
    module_dump_end()
    loss = out.sum()
    loss.backward()
    set_dump_switch("OFF")
    for arguments in ((3, "name"), (ModuleOP, "name"), (module, 3)):
        try:
            module_dump(*arguments)
        except ValueError as error:
            print(error)
"""


def test_000_061_062_the_example_of_module_dump(tmp_path: Path) -> None:
    done = run(tmp_path, MODULE_DUMP)
    assert done.returncode == 0, done.stderr
    rank = tmp_path / "dump_data/npu/ptdbg_dump_v2.0/rank0"
    rows = [json.loads(line) for line in (rank / "dump.pkl").read_text().splitlines()]
    steps = {row[0]: row[1] for row in rows}
    assert steps["MyModule_0_forward_input.0"] == steps["MyModule_0_forward_output"] == 1
    assert steps["Tensor_sum_0_forward_output"] == 0
    assert "MyModule_0_backward_input.0" in steps
    assert not any("linear" in name or "relu" in name for name in steps)
    assert (rank / "dump" / "MyModule_0_forward_input.0.npy").is_file()
    not_a_module = "The parameter:module in module_dump is not a Module subclass."
    assert done.stdout.splitlines() == [
        not_a_module,
        not_a_module,
        "The parameter:dump_name in module_dump is not a str type.",
    ]


SEEDS = """
from ptdbg_ascend import *
import json, os, random, numpy as np
def drawn():
    return [random.random(), float(np.random.rand()), float(torch.rand(1)), os.environ["PYTHONHASHSEED"]]
seed_all(); first = drawn()
seed_all(1234, False); second = drawn()
seed_all(seed=1000, mode=True); third = drawn()
cudnn = torch.backends.cudnn
x = torch.ones(64)
kept = [float(f(x.reshape(1, 1, 8, 8), 0.9).min()) for f in (F.dropout, F.dropout2d)] + [float(F.dropout3d(x.reshape(1, 1, 4, 4, 4), 0.9).min())]
kept += [layer(0.9).p for layer in (nn.Dropout, nn.Dropout2d, nn.Dropout3d)]
print(json.dumps([first == second, second == third, third[3], torch.are_deterministic_algorithms_enabled(),
                  [cudnn.enabled, cudnn.benchmark, cudnn.deterministic], kept]))
for arguments in (("1",), (-1,), (2**32,), (1, "yes")):
    try:
        seed_all(*arguments)
    except ValueError as error:
        print(error)
"""


def test_000_040_041_042_045_046_seed_all_and_dropout(tmp_path: Path) -> None:
    first, *errors = run(tmp_path, SEEDS).stdout.splitlines()
    assert json.loads(first) == [True, False, "1000", True, [False, False, True], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]
    out_of_range = "Seed must be between 0 and 4294967295."
    assert errors == ["Seed must be integer.", out_of_range, out_of_range, "seed_all mode must be bool."]


KEEP = """
from ptdbg_ascend import *
import ptdbg_ascend
x, made = torch.ones(1000), nn.Dropout(0.5)
for keep in (lambda: PrecisionDebugger("./dump", hook_name="dump", dropout="keep"),
             lambda: register_hook(made, acc_cmp_dump, dropout="keep")):
    PrecisionDebugger("./dump", hook_name="dump")
    assert (F.dropout(x, 0.5) == 1).all()
    keep()
    ptdbg_ascend.set_dump_path("./dump")
    assert (F.dropout(x, 0.5) == 0).any() and made.p == nn.Dropout(0.5).p == 0.5
try:
    register_hook(made, acc_cmp_dump, dropout="no")
except ValueError as error:
    print(error)
"""


def test_000_046_dropout_is_off_which_is_said_and_comes_back_where_it_is_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, KEEP)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "dropout is 'no'; it must be 'off' or 'keep'\n"
    assert done.stderr.count("dropout is off (p = 0)") == 2


PLACES = """
from ptdbg_ascend import *
set_dump_path(dump_tag="dump_conv2d")
register_hook(Net(), acc_cmp_dump, rank=3)
set_dump_switch("ON"); torch.sin(torch.ones(2)); set_dump_switch("OFF")
debugger = PrecisionDebugger(dump_path="./given", hook_name="dump", rank=3)
debugger.start(); torch.sin(torch.ones(2)); debugger.stop()
"""


def test_000_003_005_048_067_the_environment_names_the_folder_and_a_rank_dumps_alone(tmp_path: Path) -> None:
    for rank in (3, 4):
        done = run(tmp_path, PLACES, ASCEND_WORK_PATH=str(tmp_path / "work"), RANK=str(rank), WORLD_SIZE="8")
        assert done.returncode == 0, done.stderr
        assert "Rank argument is provided. Only rank 3 data will be dumpped." in done.stderr
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pkl")}
    assert found == {
        "work/dump_data/dump_conv2d_v2.0/rank3/dump.pkl",
        "given/ptdbg_dump_v2.0/rank3/api_stack_dump.pkl",
    }


DEVICES = """
from ptdbg_ascend import *
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
seen = []
torch.cuda.is_available = lambda: True
for name, module in {"cuda": torch.cuda, "npu": getattr(torch, "npu", None)}.items():
    for function in ("manual_seed", "manual_seed_all"):
        if module is not None:
            setattr(module, function, lambda seed, which=f"{name}.{function}": seen.append((which, seed)))
seed_all(7)
print(json.dumps(sorted(set(map(tuple, seen)))))
"""
CUDA_SEEDS = [["cuda.manual_seed", 7], ["cuda.manual_seed_all", 7]]


def test_000_043_047_cuda_is_seeded_and_shuffling_is_left_to_the_user(tmp_path: Path) -> None:
    said, seeds = run(tmp_path, DEVICES).stdout.splitlines()
    assert json.loads(seeds) == CUDA_SEEDS
    assert said == "Please disable dataloader shuffle before running the program."


def test_000_044_an_npu_is_seeded(tmp_path: Path) -> None:
    seeds = run_on_npu("import torch, torch_npu" + DEVICES, PYTHONPATH=str(ROOT / "dropin"))
    assert seeds == [*CUDA_SEEDS, ["npu.manual_seed", 7], ["npu.manual_seed_all", 7]]


AGAIN = """
from ptdbg_ascend import *
import json, pathlib
model = Net()
set_dump_path("./dump_path")
register_hook(model, acc_cmp_dump)
sizes = []
for iteration in range(3):
    set_dump_switch("ON", mode="api_stack")
    train(model)
    set_dump_switch("OFF")
    torch.sin(torch.ones(2))
    sizes.append(len(open("dump_path/ptdbg_dump_v2.0/rank0/api_stack_dump.pkl").readlines()))
    held = [path.name for path in pathlib.Path("dump_path/.ulpscope").rglob("*") if path.suffix != ".ring"]
print(json.dumps([sizes, held]))
"""


def test_000_030_054_the_iterations_of_a_loop_are_added_to_one_file(tmp_path: Path) -> None:
    sizes, held = json.loads(run(tmp_path, AGAIN).stdout)
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]
    assert held == []
    dump = open_dump(tmp_path / "dump_path")
    found = [call_text(call) for call in dump.ids()]
    assert len(set(found)) == len(found) and not any("sin" in name for name in found)
    assert [name for name in found if name.startswith("Functional.conv2d") and "forward" in name] == [
        f"Functional.conv2d.{number}.forward" for number in range(6)
    ]
    assert {f"Functional.conv2d.{number}.backward" for number in range(6)} <= set(found)
    assert all(value.payload is not None for call in dump.calls() for value in call.values if value.is_tensor)


SELECTED = """
from ptdbg_ascend import *
import json, os
x = torch.ones(2)
set_dump_path("./dump_path")
register_hook(nn.ReLU(), acc_cmp_dump)
folder = "dump_path/ptdbg_dump_v2.0/rank0/"
seen = []
for iteration in range(4):
    set_dump_switch("ON", SWITCH)
    x.abs(); x.neg(); x.sqrt()
    set_dump_switch("OFF")
    (pkl,) = [name for name in os.listdir(folder) if name.endswith(".pkl")]
    arrays = folder + pkl.removesuffix(".pkl")
    seen.append([os.stat(folder + pkl).st_ino, {name: os.stat(f"{arrays}/{name}").st_ino for name in os.listdir(arrays)}])
    names = [json.loads(line)[0] for line in open(folder + pkl)]
print(json.dumps([seen, names]))
"""


@pytest.mark.parametrize(("switch", "calls"), [
    ('mode="api_list", api_list=["neg"]', ["neg_0", "neg_1", "neg_2", "neg_3"]),
    ('mode="list", scope=["Tensor_abs_0_forward", "Tensor_sqrt_2_forward"]', ["abs_0", "sqrt_2"]),
    ('mode="range", scope=["Tensor_sqrt_1_forward", "Tensor_neg_2_forward"]', ["sqrt_1", "abs_2", "neg_2"]),
    ('mode="all", dump_mode=["forward", "output"]', [f"{name}_{at}" for at in range(4) for name in ("abs", "neg", "sqrt")]),
])  # fmt: skip
def test_000_011_013_030_054_a_selection_is_added_to_one_file_and_nothing_is_written_twice(
    tmp_path: Path, switch: str, calls: list[str]
) -> None:
    seen, names = json.loads(run(tmp_path, SELECTED.replace("SWITCH", switch)).stdout)
    assert [name for name in names if "output" in name] == [f"Tensor_{call}_forward_output" for call in calls]
    assert len({file for file, _ in seen}) == 1
    for (_, before), (_, after) in itertools.pairwise(seen):
        assert before.items() <= after.items()


def test_000_048_a_second_dump_into_the_same_folder_replaces_the_first(tmp_path: Path) -> None:
    program = """
from ptdbg_ascend import *
for name in ("sin", "cos"):
    set_dump_path('./dump_path', dump_tag='dump_conv2d')
    register_hook(Net(), acc_cmp_dump)
    set_dump_switch("ON"); getattr(torch, name)(torch.ones(2)); set_dump_switch("OFF")
"""
    assert run(tmp_path, program).returncode == 0
    assert "Torch.cos.0.forward" in names(tmp_path / "dump_path")
    assert "Torch.sin.0.forward" not in names(tmp_path / "dump_path")


def test_000_001_all_names_are_there(tmp_path: Path) -> None:
    done = run(
        tmp_path, "from ptdbg_ascend import *\nprint(*sorted(set(globals()) & set(__import__('ptdbg_ascend').__all__)))"
    )
    assert done.stdout.split() == sorted(ptdbg_ascend.__all__)
