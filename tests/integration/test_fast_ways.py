"""Every fast way of the C part is one that a user's command comes to; one that none comes to should go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ulpscope.frameworks.torch import internals
from ulpscope.native import taps

pytestmark = pytest.mark.skipif(
    taps.C is None or internals.native() != "full", reason="the C part is not there or asks Python"
)

# What only a CUDA device comes to: tests/device/test_cuda_capture.py.
ON_CUDA = {"queued", "launches", "device_rows", "copies_back"}
# What only a program with a C++ extension comes to: test_foreign_writes.py.
OF_EXTENSIONS = {"foreign_calls"}

MODEL = """
import atexit, json, os, sys, torch
from torch import nn
from ulpscope.native import taps
atexit.register(lambda: open(os.environ["WAYS"], "w").write(json.dumps(taps.C.ways())))
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        left, right = self.norm(x).chunk(2, dim=-1)
        x = self.down(torch.relu(self.up(torch.cat((left, right), -1))))
        x += left.contiguous()
        return torch.cat((x, x * 2.0 + x[:, :2].sum()), -1)
model = nn.Sequential(Block(), nn.Sequential(Block(), nn.Identity(), Block()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLAIN = MODEL + "for _ in range(3): train()\n"
MSPROBE = (
    MODEL
    + """
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(task="statistics", level=sys.argv[1], dump_path=sys.argv[2])
for _ in range(2):
    debugger.start(model)
    train()
    debugger.stop()
    debugger.step()
"""
)
COMMANDS = {
    "capture op": ["capture", "--level", "op"],
    "capture mix": ["capture", "--level", "mix"],
    "capture module": ["capture", "--level", "module"],
    "capture only": ["capture", "--level", "op", "--only", "relu"],
    "blame": ["blame"],
}
# What each is expected to come to, beside others.
CALLS = {
    "calls",
    "signs",
    "known_stacks",
    "known_scalars",
    "direct_tensors",
    "known_forms",
    "known_tensors",
    "measured",
}
GRADIENTS = {"single_nodes", "several_nodes", "entered", "hooks", "parts"}
MODULES = {"modules", "known_modules", "arrivals"}
EXPECTED: dict[str, set[str]] = {
    "capture op": CALLS | GRADIENTS | {"native_attributes", "silent_calls", "known_parts"},
    "capture mix": CALLS | GRADIENTS | MODULES,
    "capture module": GRADIENTS | MODULES | {"calls_of_modules_only", "measured", "older_nodes"},
    "capture only": {"left_out_calls", "calls"},
    "blame": set(),  # the judge's observer is written in Python
    "msprobe L1": CALLS,
    "msprobe mix": CALLS | MODULES,
}


def gone(folder: Path, name: str) -> Counter[str]:
    """How often a command went each way."""
    program, path, words = folder / "program.py", folder / "ways.json", COMMANDS.get(name)
    program.write_text(PLAIN if words else MSPROBE, encoding="utf-8")
    out = str(folder / "run")
    if words:
        command = [sys.executable, "-m", "ulpscope", *words, "-o", out, "--", sys.executable, str(program)]
    else:
        command = [sys.executable, str(program), name.split()[1], out]
    root = Path(__file__).resolve().parents[2]
    places = [str(root / "dropin"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "WAYS": str(path), "PYTHONPATH": os.pathsep.join(filter(None, places))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert path.exists(), done.stdout + done.stderr
    return Counter(json.loads(path.read_text(encoding="utf-8")))


def test_every_fast_way_is_gone_by_a_command_of_a_user(tmp_path: Path) -> None:
    assert taps.C is not None
    every: Counter[str] = Counter()
    for number, (name, expected) in enumerate(EXPECTED.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = gone(folder, name)
        assert {way for way in expected if not found[way]} == set(), name
        every += found
    assert set(taps.C.ways()) - set(every) == ON_CUDA | OF_EXTENSIONS
