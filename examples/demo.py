"""Two runs of a small model, recorded and listed: `make demo`.

The second run computes with one wrong number on purpose: the epsilon of the second layer norm. Both runs are recorded
without an edit to the model, then listed, and the first call whose recorded output differs is shown.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ulpscope
from ulpscope.cli.main import cli


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(folder: Path, *, eps: float) -> None:
    """Two training steps, recorded into a folder."""
    ulpscope.seed_all(1234)
    model = Net()
    model.blocks[1].norm.eps = eps
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 100, (4, 16))
    with ulpscope.capture(folder, model=model, level="mix", overwrite=True) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            capture.step()


def first_difference(reference: Path, target: Path) -> str | None:
    """The first operator, in execution order, whose output has other statistics in the other run."""
    runs = ulpscope.open_dump(reference), ulpscope.open_dump(target)
    for one, two in zip(runs[0].calls(), runs[1].calls(), strict=True):
        if one.id.kind == "Module":
            continue  # a module ends after the operators inside it
        for left, right in zip(one.values, two.values, strict=True):
            if left.slot.role.value == "output" and left.stats != right.stats:
                return ulpscope.call_text(one.id)
    return None


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="ulpscope-demo-"))
    train(folder / "reference", eps=1e-5)
    train(folder / "target", eps=1e-3)
    for name in ("reference", "target"):
        print(f"$ ulpscope show {folder / name} --limit 12")
        cli.main(["show", str(folder / name), "--limit", "12"], standalone_mode=False)
        print()
    call = first_difference(folder / "reference", folder / "target")
    print(f"The first output that differs is that of {call}.\n")
    print(f"$ ulpscope show {folder / 'target'} {call}")
    cli.main(["show", str(folder / "target"), str(call)], standalone_mode=False)


if __name__ == "__main__":
    main()
