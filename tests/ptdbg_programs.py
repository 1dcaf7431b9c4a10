"""A small net for the examples of ptdbg_ascend's guide, and its programs, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ulpscope import open_dump
from ulpscope.model.names import call_text

ROOT = Path(__file__).parents[1]
# The names that the guide's examples ask for are calls of this net: permute, abs, relu and transpose four times, conv2d twice.
NET = """
import torch, torch.nn as nn, torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 1, 2), nn.Conv2d(1, 1, 2)
        self.drop = nn.Dropout(0.5)
    def forward(self, x):
        for _ in range(4):
            x = torch.relu(x.permute(0, 1, 3, 2).abs() - 0.125).transpose(2, 3)
        x = self.drop(self.conv2(self.conv1(x)))
        return x * (x > 0), x.argmax(dim=3)
def train(model):
    model(torch.randn(2, 1, 4, 4, requires_grad=True))[0].sum().backward()
"""


def run(folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(ROOT / "dropin"), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", NET + program]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)


def names(folder: Path) -> list[str]:
    """The calls of the one .pkl in a rank folder, in order."""
    return [call_text(call) for call in open_dump(folder).ids()]
