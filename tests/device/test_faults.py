"""Every kind of fault that the stand-in NPU can have is found by the checks that fit it, and a clean device is not accused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from device.fakenpu import run

PROGRAM = """
import json, pathlib, sys, torch, torch_npu, ulpscope
import torch.nn.functional as F
from torch import nn
from ulpscope.frameworks.torch.api_runner import ApiRunner
from ulpscope.model.names import call_text
from ulpscope.replay.noise import Noise, NoiseConfig
from ulpscope.replay.precheck import Plan, check_dump
from ulpscope.replay.standards import Status

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
    def forward(self, x):
        return self.last(F.relu(self.norm(F.gelu(self.first(x))))).softmax(-1)

def train():
    torch.manual_seed(0)
    net, x = Net().to("npu"), torch.randn(8, 16).to("npu")
    (net(x) * torch.arange(4.0).to("npu")).square().sum().backward()

def fresh(number=iter(range(1000))):
    return pathlib.Path(sys.argv[1]) / str(next(number))

def overflow():
    folder = fresh()
    with ulpscope.capture(folder, overflows=-1):
        train()
    return [call_text(call.id) for call in ulpscope.open_dump(folder).calls()]

def noise(mode, backward):
    rows = []
    check = Noise(NoiseConfig(mode=mode, backward=backward), rows.append)
    check.start()
    try:
        train()
    finally:
        check.close()
    return [row.api_name for row in rows if row.is_unexplained]

def ops():
    folder = fresh()
    with ulpscope.capture(folder, level="op", tensors=True):
        train()
    found = []
    for result in check_dump(ulpscope.open_dump(folder), Plan(ApiRunner(recorded=True))):
        phases = {"forward": result.forward, "backward": result.backward}
        found += [f"{result.name}.{phase}" for phase, status in phases.items() if status is Status.ERROR]
    return found

CHECKS = {
    "overflow": overflow,
    "noise no_change": lambda: noise("no_change", False),
    "noise to_cpu": lambda: noise("to_cpu", False) + noise("to_cpu", True),
    "ops": ops,
}

def nan_at(place):
    def wrong(kernel, *args, **kwargs):
        result = kernel(*args, **kwargs)
        result.view(-1)[place] = torch.nan
        return result
    return wrong

def low_precision(kernel, *args, **kwargs):
    narrow = [item.bfloat16().to(item.dtype) if isinstance(item, torch.Tensor) else item for item in args]
    return kernel(*narrow, **kwargs)

def scaled(factor):
    return lambda kernel, *args, **kwargs: kernel(*args, **kwargs) * factor

def by_chance(kernel, *args, **kwargs):
    result = kernel(*args, **kwargs)
    return result * (1 + 0.01 * torch.rand((), generator=torch.Generator().manual_seed(by_chance.count)))
by_chance.count = 0

def counted(kernel, *args, **kwargs):
    by_chance.count += 1
    return by_chance(kernel, *args, **kwargs)

FAULTS = {
    "none": (None, None),
    "nan, forward": ("aten::relu", nan_at(5)),
    "inf, forward": ("aten::_softmax", scaled(torch.inf)),
    "nan, backward": ("aten::threshold_backward", nan_at(5)),
    "scaled, forward": ("aten::gelu", scaled(1.01)),
    "scaled, backward": ("aten::gelu_backward", scaled(1.01)),
    "low precision, forward": ("aten::addmm", low_precision),
    "low precision, backward": ("aten::_softmax_backward_data", low_precision),
    "by chance, forward": ("aten::_softmax", counted),
}
table = {}
for name, (operator, function) in FAULTS.items():
    if operator is None:
        table[name] = {check: look() for check, look in CHECKS.items()}
    else:
        with fakenpu.fault(operator, function):
            table[name] = {check: look() for check, look in CHECKS.items()}
print(json.dumps(table))
"""

# The fault -> the call it is in, and the checks that must name it. A check that does not fit may name it too.
EXPECTED: dict[str, tuple[str, list[str]]] = {
    "nan, forward": ("Functional.relu.0.forward", ["overflow", "noise to_cpu", "ops"]),
    "inf, forward": ("Tensor.softmax.0.forward", ["overflow", "noise to_cpu", "ops"]),
    "nan, backward": ("Functional.relu.0.backward", ["overflow", "noise to_cpu", "ops"]),
    "scaled, forward": ("Functional.gelu.0.forward", ["noise to_cpu", "ops"]),
    "scaled, backward": ("Functional.gelu.0.backward", ["noise to_cpu", "ops"]),
    "low precision, forward": ("Functional.linear.0.forward", ["noise to_cpu", "ops"]),
    "low precision, backward": ("Tensor.softmax.0.backward", ["noise to_cpu", "ops"]),
    "by chance, forward": ("Tensor.softmax.0.forward", ["noise no_change", "noise to_cpu", "ops"]),
}
# Calls of the same kernel have the fault too, and a backward that works with the wrong result.
TWINS = {
    "Functional.relu.0.forward": {"Functional.relu.0.backward"},
    "Tensor.softmax.0.forward": {"Tensor.softmax.0.backward"},
    "Functional.linear.0.forward": {"Functional.linear.1.forward"},
    "Functional.linear.1.forward": {"Functional.linear.0.forward"},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    found: Any = run(PROGRAM, tmp_path_factory.mktemp("faults"))
    assert found.keys() == {"none", *EXPECTED}
    return dict(found)


def test_a_clean_device_is_accused_by_no_check(table: dict[str, dict[str, list[str]]]) -> None:
    assert table["none"] == {check: [] for check in table["none"]}


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_is_named_by_every_check_that_fits_it_and_nothing_else_is(
    table: dict[str, dict[str, list[str]]], fault: str
) -> None:
    call, checks = EXPECTED[fault]
    for check in checks:
        assert call in table[fault][check], (check, table[fault][check])
    named = {name for names in table[fault].values() for name in names}
    assert named <= {call, *TWINS.get(call, ())}, table[fault]


def test_an_overflow_that_leaves_no_inf_is_named_by_the_flag(tmp_path: Path) -> None:
    program = PROGRAM.partition("FAULTS = {")[0] + (
        "fakenpu.saturate()\n"
        "x = torch.full((2, 2), 60000.0, dtype=torch.float16).npu()\n"
        "with ulpscope.capture(sys.argv[1], overflows=-1):\n    y = x + 1; z = x * 2; w = z - 1\n"
        "print(json.dumps([call_text(call.id) for call in ulpscope.open_dump(sys.argv[1]).calls()]))"
    )
    assert run(program, tmp_path) == ["Tensor.__mul__.0.forward"]
