"""The answer for one tensor by torch operators alone: where there is no Triton, and for types that its kernels lack.

The same numbers as `cuda_kernels.py` gives, slower: about twenty operators a tensor, still nothing waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ulpscope.frameworks.torch.cuda_rows import BOOLEAN, BUCKETS, DOUBLE, HEAD, SIGNED, UNSIGNED
from ulpscope.frameworks.torch.cuda_tables import SketchTables

_PIECE = 1 << 20
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_NARROW = ("torch.float8", "torch.complex32")


def answer(value: Tensor, kind: int, tables: SketchTables | None, out: Tensor) -> None:
    """Fills `out`, an answer of zeros on the device of `value`. With `tables`, the sketch too."""
    flat = value.detach().reshape(-1)
    totals = torch.zeros(BUCKETS, dtype=torch.float64, device=value.device)
    high: list[Tensor] = []
    low: list[Tensor] = []
    floats = out.view(torch.float64)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        wide, keys, parts = _widened(piece, kind)
        kept = torch.isfinite(wide)
        if kind <= DOUBLE:
            out[4] += torch.isnan(wide).sum()
            out[5] += (wide == float("inf")).sum()
            out[6] += (wide == float("-inf")).sum()
            wide = torch.where(kept, wide, 0.0)
        high.append(torch.where(kept, keys, _LOWEST).amax())
        low.append(torch.where(kept, keys, _HIGHEST).amin())
        floats[2] += wide.sum()
        floats[3] += (wide * wide).sum()
        out[7] += (kept & (wide == 0)).sum()
        if kind == DOUBLE:
            floats[8] += (wide * 2.0**-600).square().sum()
            floats[9] += (wide * 2.0**600).square().sum()
        if tables is not None:
            scale = parts.numel() // max(1, piece.numel())
            _add_to_sketch(totals, torch.where(torch.isfinite(parts), parts, 0.0), start * scale, tables)
    out[0] = torch.stack(high).amax()
    out[1] = torch.stack(low).amin()
    if tables is not None:
        out[HEAD:].view(torch.float32).copy_(totals)


def _widened(piece: Tensor, kind: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values as float64 (moduli of complex ones), their keys, and the elements that the sketch takes."""
    if piece.is_complex():
        parts = torch.view_as_real(piece.to(torch.complex128)).reshape(-1)
        real, imaginary = parts[0::2], parts[1::2]
        # The squares of complex64 are exact in float64; those of complex128 may leave its range.
        narrow = piece.dtype is not torch.complex128
        wide = (real * real + imaginary * imaginary).sqrt() if narrow else torch.hypot(real, imaginary)
        wide = torch.where(torch.isnan(real) | torch.isnan(imaginary), float("nan"), wide)
        finite = torch.isfinite(real) & torch.isfinite(imaginary)
        wide = torch.where(finite & torch.isinf(wide), torch.finfo(torch.float64).max, wide)
        return wide, _keys(wide), parts
    if kind == BOOLEAN:
        ones = piece != 0
        return ones.to(torch.float64), ones.to(torch.int64), ones.to(torch.float64)
    if str(piece.dtype).startswith(_NARROW):
        piece = piece.to(torch.float32)
    if kind == SIGNED:
        wide = piece.to(torch.float64)
        return wide, piece.to(torch.int64), wide
    if kind == UNSIGNED:
        bits = piece.view(torch.int64) if piece.dtype is torch.uint64 else piece.to(torch.int64)
        wide = bits.to(torch.float64)
        if piece.dtype is torch.uint64:
            # In halves: torch converts no uint64, and both halves and their sum are what a conversion gives.
            wide = ((bits >> 32) & 0xFFFFFFFF).to(torch.float64) * 2.0**32 + (bits & 0xFFFFFFFF).to(torch.float64)
        return wide, bits ^ _LOWEST, wide
    wide = piece.to(torch.float64)
    return wide, _keys(wide), wide


def _keys(wide: Tensor) -> Tensor:
    bits = wide.view(torch.int64)
    return bits ^ ((bits >> 63) & _HIGHEST)


def _add_to_sketch(totals: Tensor, parts: Tensor, start: int, tables: SketchTables) -> None:
    first, blocks = start // BUCKETS, -(-parts.numel() // BUCKETS)
    turn, flip = tables.turns(first, blocks)
    padded = torch.nn.functional.pad(parts, (0, blocks * BUCKETS - parts.numel())).view(blocks, BUCKETS)
    at = (torch.arange(BUCKETS, device=parts.device) - turn[:, None]) & 255
    minus = ((tables.masks[turn].gather(1, at >> 5) >> (at & 31)) & 1) ^ flip[:, None]
    turned = padded.gather(1, at)
    totals += torch.where(minus == 1, -turned, turned).sum(dim=0)
