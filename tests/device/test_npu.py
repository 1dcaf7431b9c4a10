"""Capture on an NPU: the stand-in is a device, capture changes nothing on it, and the vendor's dump is on around one call."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ulpscope
from device.fakenpu import run
from ulpscope.frameworks.torch.npu import VendorKernelDump, npu_of_process
from ulpscope.model.errors import CaptureError, ConfigError

AclConfig = Callable[..., Path]

COMMON = """
import json, os, pathlib, random, torch, torch_npu, ulpscope
import torch.nn.functional as F
from torch import nn
torch.set_num_threads(1)

def names(folder):
    return sorted(path.name.split(".")[0] for path in pathlib.Path(folder).rglob("*") if path.is_file())

def bits(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()

def calls(folder):
    return [ulpscope.model.names.call_text(call.id) for call in ulpscope.open_dump(folder).calls()]
"""

DEVICE = (
    COMMON
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(36, 5)
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1)
        x[:, 0] = x[:, 1] * 2          # a write into a view
        return self.fc(F.dropout(x, 0.2))

def train(device):
    torch.manual_seed(3)
    net, x, t = Net().to(device), torch.randn(4, 3, 8, 8).to(device), torch.tensor([0, 1, 2, 3]).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), t)
        loss.backward()
        optimizer.step()
    return [loss, *(p for p in net.parameters()), *(p.grad for p in net.parameters()), *net.buffers()]

"""
)


def test_a_convolution_net_trains_on_the_stand_in_as_on_the_cpu() -> None:
    found = run(
        DEVICE
        + """
there, here = train("npu"), train("cpu")
print(json.dumps([
    [bool(torch.allclose(a.cpu(), b, rtol=1e-5, atol=1e-7)) for a, b in zip(there, here)],
    sorted({str(a.device) for a in there})]))
"""
    )
    assert found == [[True] * 16, ["npu:0"]]


def test_a_fault_changes_its_operator_and_ends() -> None:
    found = run(
        COMMON
        + """
x = torch.full((2, 2), 3.0, device="npu")
results = []
with fakenpu.fault("aten::mm", lambda kernel, *args: kernel(*args) + 1), fakenpu.fault("aten::mul", lambda kernel, a, b: a):
    results += [torch.mm(x, x)[0, 0].item(), x.clone().mul_(2)[0, 0].item(), (x + x)[0, 0].item()]
results += [torch.mm(x, x)[0, 0].item(), x.clone().mul_(2)[0, 0].item()]
print(json.dumps(results))
"""
    )
    assert found == [19.0, 3.0, 6.0, 18.0, 6.0]


def test_the_custom_operators_have_the_gradients_of_what_they_stand_for() -> None:
    found = run(
        COMMON
        + """
def both(function, reference, *shapes):
    torch.manual_seed(0)
    here = [torch.randn(shape, requires_grad=True) for shape in shapes]
    there = [x.detach().to("npu").requires_grad_() for x in here]
    function(*there).square().sum().backward()
    reference(*here).square().sum().backward()
    return all(torch.allclose(a.grad.cpu(), b.grad, atol=1e-6) for a, b in zip(there, here))

mask = torch.tensor([True, False, False])
print(json.dumps([
    both(lambda x: torch_npu.npu_scaled_masked_softmax(x, mask.to("npu"), 0.5),
         lambda x: (x * 0.5).masked_fill(mask, -10000.0).softmax(-1), (2, 3)),
    both(lambda *qkv: torch_npu.npu_fusion_attention(*qkv, 2, "BNSD", scale=0.5)[0],
         lambda *qkv: F.scaled_dot_product_attention(*qkv, scale=0.5), *[(1, 2, 3, 4)] * 3),
]))
"""
    )
    assert found == [True, True]


def test_capture_changes_no_bit_on_the_device(tmp_path: Path) -> None:
    found = run(
        DEVICE
        + """
plain = [bits(x) for x in train("npu")]
same = {}
for level in ("op", "mix", "kernel"):
    with ulpscope.capture(pathlib.Path(sys.argv[1]) / level, level=level):
        watched = train("npu")
    same[level] = [bits(x) for x in watched] == plain
print(json.dumps(same))
""",
        tmp_path,
    )
    assert found == {"op": True, "mix": True, "kernel": True}
    for level in found:
        dump = ulpscope.open_dump(tmp_path / level)
        tensors = [value for call in dump.calls() for value in call.values if value.is_tensor]
        assert {value.device for value in tensors} == {"cpu", "npu:0"}
        unmeasured = {value.error for value in tensors if value.stats is None}
        assert all("uninitialised" in error for error in unmeasured)


ENDS_AT_ONCE = """
import atexit, json, os, sys, time
ended = []
atexit.register(lambda: print(json.dumps(time.monotonic() - ended[0])))  # the last to run
import torch, ulpscope
model = torch.nn.Linear(3, 3).to("npu")
with ulpscope.capture(sys.argv[1], model=model):
    model(torch.ones(2, 3, device="npu")).sum().backward()
    ended.append(time.monotonic())
"""


def test_the_program_ends_after_the_engines_threads_are_done_with_our_hooks(tmp_path: Path) -> None:
    assert run(ENDS_AT_ONCE, tmp_path / "run") >= 0.05


def test_a_tensor_of_the_device_is_stored_bit_for_bit(tmp_path: Path) -> None:
    found = run(
        COMMON
        + """
with ulpscope.capture(sys.argv[1], tensors=True):
    x = torch.randn(3, 4).to("npu").t()
    y = F.silu(x)
dump = ulpscope.open_dump(sys.argv[1])
(call,) = [call for call in dump.calls() if call.id.name == "silu"]
print(json.dumps([[dump.load(value).tobytes().hex() for value in call.values if value.is_tensor], [bits(x), bits(y)]]))
""",
        tmp_path,
    )
    assert found[0] == found[1]


def test_the_vendors_dump_holds_the_kernels_of_the_named_call_alone(tmp_path: Path, acl_config: AclConfig) -> None:
    path = acl_config()
    found = run(
        COMMON
        + """
with ulpscope.capture(sys.argv[1], level="kernel", below="Functional.silu.1.forward", acl_config=sys.argv[2]):
    x = torch.ones(2, device="npu")
    F.silu(F.silu(x)) + 1
print(json.dumps([torch_npu.npu.dump_calls, names(sys.argv[3]), calls(sys.argv[1]),
                  ulpscope.open_dump(sys.argv[1]).manifest.notes]))
""",
        tmp_path / "run",
        path,
        tmp_path / "kernels",
    )
    log, files, calls, notes = found
    assert log == ["init_dump", f"set_dump {path}", "finalize_dump"]
    assert files == ["Silu"]
    assert calls == ["Functional.silu.1.forward"]
    assert notes == [
        f"the kernels of Functional.silu.1.forward are in {tmp_path / 'kernels'}, written by the vendor's dump"
    ]


def test_the_vendors_dump_ends_with_a_call_that_raises(tmp_path: Path, acl_config: AclConfig) -> None:
    found = run(
        COMMON
        + """
x = torch.ones(2, 3, device="npu")
with ulpscope.capture(sys.argv[1], level="kernel", below="Torch.mm.0", acl_config=sys.argv[2]):
    try:
        torch.mm(x, x)
    except RuntimeError as error:
        raised = "cannot be multiplied" in str(error)
    torch.neg(x)
print(json.dumps([raised, [call.split()[0] for call in torch_npu.npu.dump_calls], names(sys.argv[3])]))
""",
        tmp_path / "run",
        acl_config(),
        tmp_path / "kernels",
    )
    assert found == [True, ["init_dump", "set_dump", "finalize_dump"], []]


def test_a_dump_that_cannot_be_switched_on_does_not_stop_the_program(tmp_path: Path, acl_config: AclConfig) -> None:
    found = run(
        COMMON
        + """
torch_npu.npu.init_dump()              # so that the next one fails
with ulpscope.capture(sys.argv[1], level="kernel", below="Torch.neg.0", acl_config=sys.argv[2]):
    result = torch.neg(torch.ones(1, device="npu")).item()
print(json.dumps([result, ulpscope.open_dump(sys.argv[1]).manifest.notes]))
""",
        tmp_path / "run",
        acl_config(),
    )
    assert found[0] == -1.0
    assert "could not record the kernels of Torch.neg.0: RuntimeError: aclmdlInitDump" in found[1][0]


def test_the_dump_is_initialised_once_when_entered_again(acl_config: AclConfig) -> None:
    log = run(
        COMMON
        + """
from ulpscope.frameworks.torch.npu import VendorKernelDump
dump = VendorKernelDump(pathlib.Path(sys.argv[1]))
with dump, dump:
    pass
try:
    with dump:
        raise KeyError
except KeyError:
    print(json.dumps([call.split()[0] for call in torch_npu.npu.dump_calls]))
""",
        acl_config(),
    )
    assert log == ["init_dump", "set_dump", "finalize_dump"] * 2


BACKWARD = (
    COMMON
    + """
def train():
    torch.manual_seed(5)
    x = torch.randn(3, 4).to("npu").requires_grad_()
    w = torch.randn(2, 4).to("npu").requires_grad_()
    hooked = []
    x.register_hook(lambda grad: hooked.append(bits(grad)))
    h = F.dropout(F.linear(x, w), 0.5)
    h = h * 1.5
    h.mul_(2)
    a, b = torch.var_mean(h, 1)
    (a.sum() + b.square().sum() + F.dropout(h, 0.5).sum()).backward()
    return [bits(h), bits(x.grad), bits(w.grad), hooked, torch.get_rng_state().tolist()]

def gradient(name, shape):
    path = pathlib.Path(sys.argv[1]) / name
    torch.save(torch.full(shape, 2.0), path)
    return str(path)

def dumped(below, *gradients):
    run = pathlib.Path(sys.argv[1]) / below
    with ulpscope.capture(run, level="kernel", below=below, acl_config=sys.argv[2], backward_input=gradients):
        result = train()
    found = names(sys.argv[3])
    for path in pathlib.Path(sys.argv[3]).rglob("*.*"):
        path.unlink()
    return result, found, calls(run), ulpscope.open_dump(run).manifest.notes

"""
)


def test_a_backward_is_dumped_on_copies_and_the_programs_numbers_stay(tmp_path: Path, acl_config: AclConfig) -> None:
    found = run(
        BACKWARD
        + """
plain = train()
asked = {
    "Functional.linear.0.backward": [gradient("Functional.linear.0.backward.input.0.pt", (3, 2))],
    "Functional.dropout.0.backward": [gradient("g.pt", (3, 2))],
    "Tensor.mul_.0.backward": [gradient("Tensor.mul_.0.backward.input.0.pt", (3, 2))],
    "Torch.var_mean.0.backward": [gradient("Torch.var_mean.0.backward.input.1.pt", (3,))],
}
results = {}
for below, files in asked.items():
    result, kernels, called, notes = dumped(below, *files)
    results[below] = [result == plain, called == [below], kernels, notes]
print(json.dumps([results, [call.split()[0] for call in torch_npu.npu.dump_calls]]))
""",
        tmp_path,
        acl_config(),
        tmp_path / "kernels",
    )
    results, log = found
    for below, (same_numbers, same_calls, _, notes) in results.items():
        assert same_numbers, below
        assert same_calls, below
        assert "are in" in notes[-1], notes
    kernels = {below: result[2] for below, result in results.items()}
    assert kernels["Functional.linear.0.backward"] == ["Mm", "Mm"]
    assert kernels["Functional.dropout.0.backward"] in (["Mul"], ["NativeDropoutBackward"])
    assert kernels["Tensor.mul_.0.backward"] == ["Mul"]
    assert set(kernels["Torch.var_mean.0.backward"]) <= {"Div", "Expand", "Mul"}
    assert log == ["init_dump", "set_dump", "finalize_dump"] * 4


def test_the_second_run_of_a_call_is_not_recorded(tmp_path: Path, acl_config: AclConfig) -> None:
    """A function that calls a module, and random numbers of a generator of the program's own."""
    found = run(
        BACKWARD
        + """
from torch.overrides import handle_torch_function, has_torch_function
layer = nn.Linear(2, 2).to("npu")
own = torch.Generator()

def noisy(x, generator):
    if has_torch_function((x,)):
        return handle_torch_function(noisy, (x,), x, generator)
    return layer(x) + torch.rand(2, generator=generator).to("npu")

def train():
    own.manual_seed(1)
    x = torch.ones(1, 2, device="npu", requires_grad=True)
    y = noisy(x, own)
    y.sum().backward()
    return [bits(y), bits(x.grad), own.get_state().tolist()]

plain = train()
result, kernels, called, _ = dumped("Torch.noisy.0.backward", gradient("g.pt", (1, 2)))
print(json.dumps([result == plain, kernels, called]))
""",
        tmp_path,
        acl_config(),
        tmp_path / "kernels",
    )
    assert found == [True, ["Mm"], ["Torch.noisy.0.backward"]]


def test_wrong_gradients_are_told_and_change_nothing(tmp_path: Path, acl_config: AclConfig) -> None:
    found = run(
        BACKWARD
        + """
plain = train()
results = [dumped("Functional.linear.0.backward", gradient("g.pt", (7, 7))),
           dumped("Torch.var_mean.0.backward", gradient("g.pt", (3,)))]
print(json.dumps([[result == plain, kernels, notes[-1]] for result, kernels, _, notes in results]))
""",
        tmp_path,
        acl_config(),
        tmp_path / "kernels",
    )
    assert [result[:2] for result in found] == [[True, []], [True, []]]
    assert "could not record the kernels of Functional.linear.0.backward" in found[0][2]
    assert "1 gradients were given for its 2 outputs" in found[1][2]


def test_what_the_vendor_cannot_do_is_said_at_the_start(tmp_path: Path, acl_config: AclConfig) -> None:
    found = run(
        COMMON
        + """
texts = []
for below in ("Functional.linear.0.backward", "Module.fc.Linear.forward.0"):
    try:
        ulpscope.Capture(sys.argv[1], level="kernel", below=below, acl_config=sys.argv[2]).start()
    except ulpscope.model.errors.ConfigError as error:
        texts.append(str(error))
print(json.dumps([texts, os.path.exists(sys.argv[1])]))
""",
        tmp_path / "run",
        acl_config(),
    )
    assert "backward_input: give the recorded gradients" in found[0][0]
    assert "for one function, not for a module" in found[0][1]
    assert found[1] is False


def test_without_an_npu_the_kernels_are_recorded_here(tmp_path: Path) -> None:
    assert npu_of_process() is None
    options: dict[str, Any] = {"acl_config": "not/looked/at.json", "backward_input": ["nor/this.pt"]}
    with ulpscope.capture(tmp_path, level="kernel", below="Functional.silu.0.backward", **options):
        F.silu(torch.ones(2, requires_grad=True)).sum().backward()
    kernels = [call.id.name for call in ulpscope.open_dump(tmp_path).calls() if call.id.kind == "Aten"]
    assert kernels == ["silu_backward.default"]
    assert "torch_npu" not in sys.modules


def test_a_vendors_dump_needs_an_npu(acl_config: AclConfig) -> None:
    with pytest.raises(CaptureError, match="import torch_npu"):
        VendorKernelDump(acl_config())


def test_every_mistake_in_an_acl_config_is_told_at_once_with_its_place(acl_config: AclConfig) -> None:
    path = acl_config(dump_path="no/such", dump_mode="outputs", dump_op_switch=True, dump_list="all", dump_pat="x")
    with pytest.raises(ConfigError) as caught:
        VendorKernelDump(path)
    text = str(caught.value)
    assert text.count(f"{path}: dump") == 5
    assert "dump.dump_path = 'no/such': is not an existing folder" in text
    assert "dump.dump_mode = 'outputs': must be one of output, input, all. Did you mean 'output'?" in text
    assert "unknown key 'dump_pat'. Did you mean 'dump_path'?" in text


@pytest.mark.parametrize("content", [{}, {"dump": []}, [], 3])
def test_an_acl_config_without_its_table_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "acl.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError):
        VendorKernelDump(path)
