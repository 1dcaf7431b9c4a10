"""Two runs of a small model, recorded and compared: `make demo`.

The second run is on a device with a fault: one matrix product leaves the last columns of a tile unfinished. Nothing in the model
is edited. The loss moves by little, three calls later every number differs, and the comparison names the call.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class FaultyDevice(TorchDispatchMode):
    """A device whose `number`-th matrix product scales its last eight columns by 0.98."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = kernel(*args, **(kwargs or {}))
        if kernel is torch.ops.aten.addmm.default:
            self.left -= 1
            if self.left == 0:
                out[..., -8:] *= 0.98
        return out


def train(device: AbstractContextManager[Any], watch: Callable[[nn.Module], Any]) -> float:
    """Two training steps on a device, watched; returns the last loss."""
    ulpscope.seed_all(1234)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 100, (4, 16))
    with device, watch(model) as watched:
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            watched.step()
    return loss.item()


def recorded(folder: Path) -> Callable[[nn.Module], Any]:
    return lambda model: ulpscope.capture(folder, model=model, level="mix", overwrite=True)


def judged(folder: Path) -> Callable[[nn.Module], Any]:
    return lambda model: ulpscope.ledger(folder, model=model, overwrite=True)


def run(*arguments: str) -> None:
    print(f"\n$ ulpscope {' '.join(arguments)}")
    with suppress(SystemExit):
        cli.main([*arguments], standalone_mode=False)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="ulpscope-demo-"))
    reference, target, ledger = folder / "reference", folder / "target", folder / "ledger"
    losses = train(nullcontext(), recorded(reference)), train(FaultyDevice(4), recorded(target))
    print(f"loss after two steps: {losses[0]:.6f} on the reference, {losses[1]:.6f} on the target")
    run("show", str(reference), "--limit", "6")
    print("\nTwo runs, side by side:")
    run("compare", str(reference), str(target), "--exit-zero")
    print("\nThe target alone, every kernel beside its own float64 replay:")
    train(FaultyDevice(4), judged(ledger))
    run("blame", str(ledger), "--exit-zero")


if __name__ == "__main__":
    main()
