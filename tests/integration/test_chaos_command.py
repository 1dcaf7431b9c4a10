"""`ulpscope chaos` on a small program: drift is learned, a benign change stays inside, a fault does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ulpscope.frameworks.torch.nudge import DriftWatch, nudged

PROGRAM = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
if "other order" in sys.argv:  # the same sums in another order, as on another device
    with torch.no_grad():
        order = torch.arange(32).flip(0)
        model[0].weight.copy_(model[0].weight[order]), model[0].bias.copy_(model[0].bias[order])
        model[2].weight.copy_(model[2].weight[:, order])
if "fault" in sys.argv:
    model[1].register_forward_hook(lambda module, args, result: result * 1.001)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
sys.exit(9 if "cut" in sys.argv else 0)
"""


def ulp(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ulpscope", "chaos", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=300,
    )


def test_a_benign_change_is_chaos_and_a_fault_is_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = ("--", sys.executable, "program.py")
    learned = ulp("-n", "3", "-o", "learned", "--format", "json", *command, cwd=tmp_path)
    assert learned.returncode == 0, learned.stderr
    drift = json.loads(learned.stdout)["drift"]
    assert {(each["step"], each["what"]) for each in drift} == {(s, w) for s in range(3) for w in ("loss", "output")}
    assert all(0 < each["largest"] < 1e-5 for each in drift if each["what"] == "output")
    benign = ulp("learned", *command, "other order", cwd=tmp_path)
    assert (benign.returncode, "verdict     not chaos" in benign.stdout) == (0, False), benign.stdout
    fault = ulp("learned", *command, "fault", cwd=tmp_path)
    assert fault.returncode == 1, fault.stdout
    assert "verdict     not chaos" in fault.stdout
    cut = ulp("learned", *command, "cut", cwd=tmp_path)
    assert (cut.returncode, "the command ended with exit code 9" in cut.stderr) == (3, True), cut.stderr
    assert ulp("learned", cwd=tmp_path).returncode == 2
    assert ulp("nowhere", *command, cwd=tmp_path).returncode == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_nudge_moves_every_normal_number_to_its_neighbour(dtype: torch.dtype) -> None:
    value = torch.tensor([1.5, -1.5, 3.0, 0.0, float("inf"), float("nan"), torch.finfo(dtype).max], dtype=dtype)
    moved = nudged(value, torch.Generator().manual_seed(0))
    step = torch.finfo(dtype).eps
    assert ((moved[:3].double() - value[:3].double()).abs() / torch.tensor([step, step, 2 * step])).tolist() == [
        1,
        1,
        1,
    ]
    torch.testing.assert_close(moved[3:], value[3:], rtol=0, atol=0, equal_nan=True)


def test_a_watched_run_is_the_same_and_torch_is_left_as_it_was() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(2):
            loss = model(torch.randn(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    bare, code, points = losses(), torch.autograd.backward.__code__, []
    watch = DriftWatch(lambda step, rank, loss, output: points.append((step, loss)), None)
    watch.install()
    assert losses() == bare
    watch.remove()
    assert points == list(enumerate(bare))
    assert torch.autograd.backward.__code__ is code
    losses()
    assert len(points) == 2
