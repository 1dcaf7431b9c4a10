"""CRC-32 as zlib has it, taken apart so that a device can compute it in pieces: arithmetic and tables, and a way by
torch operators.

A remainder is a 32-bit number with reflected bits: 0x80000000 is 1, 0x40000000 is x. The CRC of a message is its
remainder times x^32, exclusive-or the CRC of as many zero bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000
_PIECE = 1 << 20


def times(left: int, right: int) -> int:
    """The product of two remainders."""
    product = 0
    for bit in range(32):
        if right >> (31 - bit) & 1:
            product ^= left
        left = (left >> 1) ^ (_POLYNOMIAL if left & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def power(bits: int) -> int:
    """x to the power of `bits`."""
    result, factor = _ONE, 0x40000000
    while bits:
        if bits & 1:
            result = times(result, factor)
        factor = times(factor, factor)
        bits >>= 1
    return result


@lru_cache(maxsize=4096)
def of_zeros(nbytes: int) -> int:
    """The CRC of so many zero bytes."""
    return times(0xFFFFFFFF, power(8 * nbytes)) ^ 0xFFFFFFFF


def lane_weights(lanes: int) -> list[int]:
    """What the remainder of each lane is to be multiplied with, and then the products of one step of all lanes with each byte
    at each place."""
    step = _table(power(32 * lanes))
    return [power(32 * (lanes - 1 - lane)) for lane in range(lanes)] + [product for place in step for product in place]


def doublings() -> list[int]:
    """x to the powers of 1, 2, 4, ..."""
    return [power(1 << bit) for bit in range(32)]


@lru_cache(maxsize=64)
def _table(factor: int) -> list[list[int]]:
    """Products of a factor with each byte at each of the four places of a word."""
    return [[times(byte << (8 * place), factor) for byte in range(256)] for place in range(4)]


def remainder(raw: Tensor) -> Tensor:
    """The remainder times x^32 of a tensor of bytes, as a number on its device; by torch operators."""
    tables: dict[int, Tensor] = {}

    def moved(words: Tensor, bits: int) -> Tensor:
        table = tables.get(bits)
        if table is None:
            table = tables[bits] = torch.tensor(_table(power(bits)), dtype=torch.int64, device=raw.device)
        parts = [table[place][(words >> (8 * place)) & 255] for place in range(4)]
        return parts[0] ^ parts[1] ^ parts[2] ^ parts[3]

    result = torch.zeros(1, dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), _PIECE):
        piece = raw[start : start + _PIECE]
        size = max(4, 1 << (piece.numel() - 1).bit_length())
        # Zeros in front change nothing.
        padded = torch.nn.functional.pad(piece, (size - piece.numel(), 0)).view(-1, 4).to(torch.int64)
        words = padded[:, 0] | padded[:, 1] << 8 | padded[:, 2] << 16 | padded[:, 3] << 24
        bits = 32
        while words.numel() > 1:
            words = moved(words[0::2], bits) ^ words[1::2]
            bits *= 2
        result = moved(result, 8 * piece.numel()) ^ words
    return moved(result, 32)[0]
