"""Signs and turns of the sketch as tables on a device. `ulpscope/native.py` has the definition.

Hashing on the fly would cost more than all statistics together; a table is 40 bytes for each block of 256 elements, and
stays in the cache of the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SEED = 0x756C7073636F7065
_SLICE = 1 << 15
_FIRST = 1 << 16
# A kernel reads the signs and turns of whole groups of blocks, also where a tensor ends inside one.
_SPARE = 64


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def hashes(first: int, count: int, device: torch.device) -> Tensor:
    """H(b, w) of blocks `first` and on, w = 0 to 8, as int32 bits."""
    block = torch.arange(first, first + count, dtype=torch.int64, device=device)[:, None]
    z = (block * 16 + torch.arange(9, dtype=torch.int64, device=device)) ^ _signed(_SEED)
    z = z + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return (z >> 32).to(torch.int32)


class SketchTables:
    """`signs` has eight words of 32 signs for each block, `turns` one number; they grow with the largest tensor seen.
    `order` has the blocks sorted by turn, each turn from `starts` on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks = 0
        self.signs = self.turns = self.order = self.starts = torch.empty(0, dtype=torch.int32, device=device)
        # Kernels that were queued may still read a table that has been replaced.
        self._replaced: list[Tensor] = []

    def reach(self, blocks: int) -> None:
        """Makes sure that the tables hold this many blocks."""
        if blocks <= self.blocks:
            return
        self._replaced += [self.signs, self.turns, self.order, self.starts]
        size = _FIRST
        while size < blocks:
            size *= 2
        self.signs = torch.empty(size + _SPARE, 8, dtype=torch.int32, device=self.device)
        self.turns = torch.empty(size + _SPARE, dtype=torch.int32, device=self.device)
        for first in range(0, size + _SPARE, _SLICE):
            part = hashes(first, min(_SLICE, size + _SPARE - first), self.device)
            self.signs[first : first + len(part)] = part[:, :8]
            self.turns[first : first + len(part)] = part[:, 8] & 255
        self.turns[0] = 0
        self.order = torch.argsort(self.turns[:size], stable=True).to(torch.int32)
        counts = torch.bincount(self.turns[:size], minlength=256)
        self.starts = (counts.cumsum(0) - counts).to(torch.int32)
        if self.device.type == "cuda":
            # Once in a while, so that every stream may read them.
            torch.cuda.current_stream(self.device).synchronize()
        self.blocks = size

    def counts(self, blocks: int) -> Tensor:
        """How many of the first blocks have each turn."""
        return torch.bincount(self.turns[:blocks], minlength=256).to(torch.int32)
