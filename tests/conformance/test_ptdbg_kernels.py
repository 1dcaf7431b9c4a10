"""ptdbg_ascend's mode="acl", which dumps the kernels of one call, on the stand-in device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from device.fakenpu import run as run_on_npu
from ptdbg_programs import NET, ROOT, names, run

# "场景化示例" 5, "set_dump_switch" example 4 and "set_backward_input", on the stand-in device, where a permute runs no kernel.
ACL = (
    NET
    + """
import json, logging, pathlib, sys, torch_npu
from ptdbg_ascend import *
model = Net().npu()
def train(model):
    model(torch.randn(2, 1, 4, 4).npu())[0].sum().backward()
def kernels():
    found = sorted(str(path.relative_to("kernels")) for path in pathlib.Path("kernels").rglob("*") if path.is_file())
    for path in found:
        pathlib.Path("kernels", path).unlink()
    return [path.rpartition("/")[2].partition(".")[0] for path in found]
told, said = {}, []
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("ulpscope").addHandler(Said(logging.WARNING))
seed_all(mode=True)
set_dump_path("./npu_dump", dump_tag='all')
register_hook(model, acc_cmp_dump)
set_dump_switch("ON"); train(model); set_dump_switch("OFF")
told["before"] = kernels()
set_dump_path("./dump_path", dump_tag='forward')
register_hook(model, acc_cmp_dump, dump_mode='acl', dump_config='./dump.json')
set_dump_switch("ON", mode="acl", scope=["Torch_relu_1_forward"], filter_switch="OFF")
train(model)
set_dump_switch("OFF")
told["forward"] = kernels()
set_dump_switch("ON", mode="acl", scope=["Functional_conv2d_1_backward"], filter_switch="OFF")
set_backward_input(["./npu_dump/all_v2.0/rank0/dump/Functional_conv2d_1_backward_input.0.npy"])
train(model)
set_dump_switch("OFF")
told["backward"] = kernels()
debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="dump")
debugger.configure_hook(mode="acl", scope=["Torch_relu_1_forward"], acl_config="./dump.json")
debugger.start(); train(model); debugger.stop()
told["debugger"] = kernels()
gradient = "./npu_dump/all_v2.0/rank0/dump/Functional_conv2d_1_backward_input.0.npy"
debugger.configure_hook(mode="acl", scope=["Tensor_tolist_0_backward"], acl_config="./dump.json", backward_input=[gradient])
debugger.start(); torch.ones(2).npu().tolist(); debugger.stop()
told["said"] = said
told["pkl"] = sorted(str(path) for path in pathlib.Path("dump_path").rglob("*.pkl"))
print(json.dumps(told))
"""
)


def test_000_014_021_022_052_053_059_060_065_kernels_of_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir()
    acl = {"dump": {"dump_list": [], "dump_path": "./kernels", "dump_mode": "all", "dump_op_switch": "on"}}
    (tmp_path / "dump.json").write_text(json.dumps(acl))
    monkeypatch.chdir(tmp_path)
    told = run_on_npu(ACL, PYTHONPATH=str(ROOT / "dropin"))
    assert told["before"] == []
    assert told["forward"] == told["debugger"] == ["Relu"]
    assert told["backward"] == ["ConvolutionBackwardOverrideable"]
    assert told["pkl"] == []
    queue = "kernels may run after their call is over: export TASK_QUEUE_ENABLE=0 before a kernel dump"
    assert told["said"].count(queue) == 4
    (derived,) = {text for text in told["said"] if text != queue and not text.startswith("dropout is off")}
    assert derived.endswith("its result, a list, is not of tensor type and cannot be automatically derived")


def test_000_064_the_same_script_dumps_the_same_calls_with_and_without_an_npu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
from ptdbg_ascend import *
set_dump_path("./dump"); register_hook(None, acc_cmp_dump)
set_dump_switch("ON", api_list=["relu"], mode="api_list")
torch.relu(torch.ones(2, device=DEVICE))
set_dump_switch("OFF")
"""
    assert run(tmp_path, "DEVICE = 'cpu'" + program).returncode == 0
    (tmp_path / "npu").mkdir()
    monkeypatch.chdir(tmp_path / "npu")
    run_on_npu("import torch, torch_npu\nDEVICE = 'npu'" + program, PYTHONPATH=str(ROOT / "dropin"))
    assert names(tmp_path / "dump") == names(tmp_path / "npu" / "dump") == ["Torch.relu.0.forward"]
