"""Signs and turns of the sketch on a device. `ulpscope/native.py` has the definition; kernels compute turns and flips themselves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ulpscope.native import measuring

_FLIP_SEED = 0x6F706521
_WORD = 0xFFFFFFFF
# Blocks whose turns are kept, from the first on, for torch operators: those of most tensors.
_KEPT = 1 << 14


class SketchTables:
    """`masks` has eight words of 32 signs for each turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.masks = torch.from_numpy(measuring.sketch_masks().astype(np.uint32).view(np.int32)).to(device)
        self._first: tuple[Tensor, Tensor] | None = None

    def turns(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Of each block its turn, and 1 where all its signs are flipped."""
        if first + count > _KEPT:
            return _turns(first, count, self._device)
        if self._first is None:
            made = _turns(0, _KEPT, self._device)
            if self._device.type == "cuda":
                # Once, so that every stream may read them.
                torch.cuda.current_stream(self._device).synchronize()
            self._first = made
        turn, flip = self._first
        return turn[first : first + count], flip[first : first + count]


def _turns(first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    block = torch.arange(first, first + count, dtype=torch.int64, device=device)
    place, group = block & 255, block >> 8
    turn = (53 * (place ^ (place >> 4)) + (((group * 0x9E3779B1) & _WORD) >> 24)) & 255
    word = _FLIP_SEED ^ ((turn + 256 * (group >> 5)) & _WORD)
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _WORD
    return turn, ((word ^ (word >> 16)) >> (group & 31)) & 1
