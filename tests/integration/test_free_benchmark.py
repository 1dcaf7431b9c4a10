"""Calls run twice: faults are found, clean programs are not accused, and the program itself does not notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from device.fakenpu import run as run_on_npu
from integration.runs import STEPS, Build, assert_same, frozen, run_bare, seed
from integration.runs import _whole as whole
from integration.test_models_unchanged import PROGRAMS
from ulpscope.frameworks.torch.perturb import PERTURBATIONS
from ulpscope.replay.noise import Noise, NoiseConfig
from ulpscope.store.noise import NoiseRow

MODES = list(PERTURBATIONS)


def run_twice(build: Build, **options: Any) -> tuple[dict[str, Any], list[NoiseRow]]:
    """Three steps with every call run twice."""
    rows: list[NoiseRow] = []
    seed()
    program = build()
    results = []
    noise = Noise(NoiseConfig(**options), rows.append, model=program.model)
    noise.start()
    try:
        for _ in range(STEPS):
            results.append(frozen(program.step()))
            noise.step()
    finally:
        noise.close()
    return whole(program, results), rows


def rows_of(program: Any, **options: Any) -> list[NoiseRow]:
    rows: list[NoiseRow] = []
    noise = Noise(NoiseConfig(**options), rows.append)
    noise.start()
    try:
        program()
    finally:
        noise.close()
    return rows


def unexplained(rows: list[NoiseRow]) -> list[str]:
    return sorted({f"{row.api_name} {row.excess}" for row in rows if row.is_unexplained})


@pytest.mark.parametrize("mode", ["bit_noise", "improve_precision"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_the_program_is_not_changed_and_not_accused(name: str, mode: str) -> None:
    bare = run_bare(PROGRAMS[name])
    twice, rows = run_twice(PROGRAMS[name], mode=mode)
    assert_same(bare, twice)
    assert unexplained(rows) == []


def training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))
    running = nn.BatchNorm1d(4)
    x = torch.randn(6, 8)
    F.cross_entropy(running(model(x)), torch.arange(6) % 4).backward()
    x.mul_(2).clamp_(-1, 1)
    x[0] = 3
    x.sort()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_no_perturbation_accuses_a_clean_step(mode: str, backward: bool) -> None:
    assert unexplained(rows_of(training, mode=mode, backward=backward)) == []


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_go_on_as_they_would(mode: str, backward: bool) -> None:
    training()
    state = torch.get_rng_state()
    rows_of(training, mode=mode, backward=backward)
    assert torch.equal(torch.get_rng_state(), state)


def test_torch_is_untouched_afterwards() -> None:
    code = nn.Module.__call__.__code__
    rows_of(training)
    assert nn.Module.__call__.__code__ is code
    assert torch._C._len_torch_function_stack() == 0


# --- faults -------------------------------------------------------------------------------------------------------


def fault_on_npu(mode: str, fault: str, program: str, **options: Any) -> list[Any]:
    source = f"""
import fakenpu, json, torch, torch.nn.functional as F
from ulpscope.replay.noise import Noise, NoiseConfig
rows = []
noise = Noise(NoiseConfig(mode={mode!r}, **{options!r}), rows.append)
torch.manual_seed(0)
x = torch.randn(16, 16).npu().requires_grad_()
w = torch.randn(16, 16).npu()
with fakenpu.fault({fault}):
    noise.start()
    {program}
    noise.close()
print(json.dumps([[row.api_name, row.inconsistent, row.is_unexplained] for row in rows]))
"""
    found: list[Any] = run_on_npu(source)
    return found


LOW = "'aten::mm', lambda kernel, a, b: kernel(a, b).bfloat16().float()"
WRONG = "'aten::gelu', lambda kernel, x, **kwargs: kernel(x, **kwargs) * 1.01"
BACK = "'aten::gelu_backward', lambda kernel, *args, **kwargs: kernel(*args, **kwargs) * 1.05"


def test_a_kernel_of_lower_precision_is_found_by_the_cpu() -> None:
    assert fault_on_npu("to_cpu", LOW, "F.gelu(x @ w)") == [["Tensor.__matmul__.0.forward", True, True]]


def test_a_wrong_kernel_is_found_by_the_cpu_and_no_other_call() -> None:
    assert fault_on_npu("to_cpu", WRONG, "(F.gelu(x) + 1) @ w") == [["Functional.gelu.0.forward", True, True]]


def test_a_wrong_gradient_is_found_by_the_cpu() -> None:
    rows = fault_on_npu("to_cpu", BACK, "(F.gelu(x) * w).sum().backward()", backward=True)
    assert rows == [["Functional.gelu.0.backward", True, True]]


def test_a_device_without_a_fault_is_not_accused() -> None:
    assert fault_on_npu("to_cpu", "'aten::nothing', None", "F.gelu(x @ w).sum().backward()") == []


def test_a_result_that_does_not_repeat_itself_is_found() -> None:
    count = "'aten::relu', lambda kernel, x, calls=[0]: (calls.append(0), kernel(x) + len(calls))[1]"
    (row,) = fault_on_npu("no_change", count, "F.relu(x); F.gelu(x)")
    assert row == ["Functional.relu.0.forward", True, True]


def test_rounding_that_a_kernel_magnifies_is_found_by_noise() -> None:
    steep = "'aten::relu', lambda kernel, x: kernel(x) + (x.view(torch.int32) & 1)"
    (row,) = fault_on_npu("bit_noise", steep, "F.relu(x) + 1")
    assert row == ["Functional.relu.0.forward", True, True]


# --- fix ----------------------------------------------------------------------------------------------------------


def test_fix_replaces_the_result_and_training_goes_on() -> None:
    source = """
import fakenpu, json, torch, torch.nn.functional as F
from ulpscope.replay.noise import Noise, NoiseConfig
torch.manual_seed(0)
x = torch.randn(8, 8)
def train(device, fix):
    weight = torch.ones(8, 8).to(device).requires_grad_()
    noise = Noise(NoiseConfig(mode="to_cpu", parts=("sigmoid",), fix=True), lambda row: None)
    if fix: noise.start()
    losses = []
    for _ in range(3):
        loss = (torch.sigmoid(x.to(device) @ weight)).square().sum()
        loss.backward()
        with torch.no_grad(): weight -= 0.1 * weight.grad; weight.grad = None
        losses.append(loss.item())
    noise.close()
    return losses
true = train("cpu", False)
with fakenpu.fault('aten::sigmoid', lambda kernel, x: kernel(x) * 1.1):
    print(json.dumps([true, train("npu", False), train("npu", True)]))
"""
    true, wrong, fixed = run_on_npu(source)
    assert wrong != true
    assert fixed == pytest.approx(true, rel=1e-6)


# --- the command --------------------------------------------------------------------------------------------------

PROGRAM = """
import sys; sys.path.insert(0, {folder!r}); import fakenpu; fakenpu.install()
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).to("npu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "bad" in sys.argv: fakenpu.fault("aten::gelu", lambda kernel, x, **kwargs: kernel(x, **kwargs) * 1.01)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 8).to("npu")).sum().backward()
    optimizer.step()
print("trained")
"""


def test_the_command_names_the_faulty_function_and_its_line(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(folder=str(Path(__file__).parent.parent / "device")))
    command = [sys.executable, "-m", "ulpscope", "check", "noise", "--mode", "to_cpu"]
    done = subprocess.run([*command, "--", sys.executable, program, "bad"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.startswith("Functional.gelu.0.forward  changes ")
    assert f"at {program}:10 in <module>" in done.stdout
    clean = subprocess.run(
        [*command, "--format", "json", "--", sys.executable, program], capture_output=True, text=True
    )
    assert (clean.returncode, json.loads(clean.stdout)) == (0, [])
    assert "trained" in clean.stderr


def test_one_tensor_given_thrice_has_three_gradients_and_running_statistics_have_none() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)

    def program() -> None:
        x = norm(torch.randn(4, 8)).view(1, 4, 8)
        F.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum().backward()

    for mode in MODES:
        assert unexplained(rows_of(program, mode=mode, backward=True)) == []
    judged: list[str] = []

    class Seen(Noise):
        def judge(self, twice: Any) -> None:
            judged.append(twice.call.name)
            super().judge(twice)

    noise = Seen(NoiseConfig(mode="no_change", backward=True), lambda row: None)
    noise.start()
    try:
        program()
    finally:
        noise.close()
    assert {"scaled_dot_product_attention", "batch_norm"} <= set(judged)


def test_sums_that_cancel_are_explained_in_any_order() -> None:
    """The gradient of a bias before a normalisation is 0 but for rounding: a thousand terms that cancel, one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8))

    def program() -> None:
        model(torch.randn(16, 1, 8, 8)).relu().square().sum().backward()

    assert unexplained(rows_of(program, mode="improve_precision", backward=True)) == []


@pytest.mark.parametrize("mode", ["add_noise", "bit_noise"])
@pytest.mark.parametrize("values", [[0.0, 1.0, 0.5, 1.0, float("inf")], [1.0, 1.0, 1.0, 1.0], [-2.0, -2.0, -2.0, -2.0]])
def test_no_element_leaves_the_range_of_its_tensor(mode: str, values: list[float]) -> None:
    value = torch.tensor(values)
    changed = PERTURBATIONS[mode](((value,), {}))
    assert changed is not None
    moved = changed[0][0]
    assert bool((moved.abs() <= value.abs().max()).all())
    assert not torch.equal(moved, value)
    assert torch.equal(torch.isinf(moved), torch.isinf(value))
