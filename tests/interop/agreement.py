"""What it means that two dumps agree: every tensor the peer has is in ours, and their numbers are the same."""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from interop.exceptions import Exempt, InOurs, exemptions
from interop.rows import Key, Row

# The peer computes Mean and Norm in the tensor's own dtype and rounds once; we sum in float64.
_UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}
RELATIVE = 1e-6
_UNDERFLOW = 1e-17
# Where the peer changed the gradients itself (see `disturbed` in test_interop.py).
ROUGH = 1e-3

Rows = dict[Key, Row]
Differs = Callable[[Row, Row], str | None]


def missing(ours: Rows, peer: Rows, differs: Differs, level: str) -> tuple[list[str], Counter[str]]:
    """What the peer has and we have not, or otherwise; and how often each exemption was needed, by its pattern."""
    problems: list[str] = []
    used: Counter[str] = Counter()
    by_call: defaultdict[str, list[tuple[str, Row]]] = defaultdict(list)
    for (call, slot), row in ours.items():
        by_call[call].append((slot, row))
    for (call, slot), row in peer.items():
        found = ours.get((call, slot))
        problem = "is not in ours" if found is None else _as(row, found) or differs(row, found)
        if problem is None:
            continue
        exempt = next(
            (each for each in exemptions(call, slot, level) if _excused(each, slot, row, by_call[call])), None
        )
        if exempt is not None:
            used[exempt.pattern] += 1
        else:
            problems.append(f"{call} {slot} {row.dtype}{list(row.shape)}: {problem}")
    return problems, used


def _excused(exempt: Exempt, slot: str, row: Row, ours: Iterable[tuple[str, Row]]) -> bool:
    """Whether ours has what the exemption demands in place of the tensor."""
    if exempt.in_ours is InOurs.SLOT:
        return any(other == slot and _as(row, candidate) is None for other, candidate in ours)
    role = slot.partition(".")[0]
    return any(other.partition(".")[0] == role for other, _ in ours)


def _as(peer: Row, ours: Row) -> str | None:
    if (peer.dtype, peer.shape) != (ours.dtype, ours.shape):
        return f"is {ours.dtype}{list(ours.shape)} in ours"
    return None


def shape_differs(peer: Row, ours: Row) -> str | None:
    """Nothing but dtype and shape."""
    return _as(peer, ours)


def statistics_differ(peer: Row, ours: Row) -> str | None:
    """Whether a number that the peer gives is another in ours."""
    for key, number in peer.statistics.items():
        if key not in ours.statistics:
            return f"{key} is {number!r}, ours has none"
        if not _near(key, float(number), float(ours.statistics[key]), peer, ours):
            return f"{key} is {number!r}, {ours.statistics[key]!r} in ours"
    return None


def _near(key: str, peer: float, ours: float, row: Row, our_row: Row) -> bool:
    if math.isinf(peer) and math.isfinite(ours):
        # The sum, or the sum of squares, overflowed in the tensor's own dtype.
        total = abs(ours) * math.prod(row.shape) if key == "Mean" else ours**2
        return key in ("Mean", "Norm") and total > LARGEST.get(row.dtype, math.inf)
    if math.isnan(peer) or math.isnan(ours) or math.isinf(peer) or math.isinf(ours):
        return peer == ours or (math.isnan(peer) and math.isnan(ours))
    if key in ("Max", "Min"):
        return peer == ours
    if key == "Norm" and row.dtype == "float32" and peer < _UNDERFLOW:
        return ours < _UNDERFLOW  # squares that small are nothing in float32
    # A mean near zero is what is left of large terms: the rounding of its sum is relative to their size.
    size = max(abs(peer), abs(ours))
    norm = our_row.statistics.get("Norm")
    if key == "Mean" and norm is not None and math.isfinite(float(norm)):
        size = max(size, float(norm) / math.sqrt(max(1, math.prod(row.shape))))
    return abs(peer - ours) <= unit(row.dtype) * size


def roughly_differ(peer: Row, ours: Row) -> str | None:
    """Max and Min of a tensor that the peer computed in another order, relative to the larger of the two."""
    if any(isinstance(number, bool) for number in peer.statistics.values()):
        return None
    known = [key for key in ("Max", "Min") if key in peer.statistics and key in ours.statistics]
    size = max((abs(peer.statistics[key]) for key in known), default=0.0)
    for key in known:
        if abs(peer.statistics[key] - ours.statistics[key]) > ROUGH * size + 1e-9:
            return f"{key} is {peer.statistics[key]!r}, {ours.statistics[key]!r} in ours"
    return None


def unit(dtype: str) -> float:
    """How far two Norms of this dtype may be apart, relatively."""
    return _UNIT.get(dtype.removeprefix("torch."), RELATIVE)


def checksums_differ(peer: Row, ours: Row) -> str | None:
    """CRC-32, exactly."""
    return None if peer.md5 == ours.md5 else f"md5 is {peer.md5}, {ours.md5} in ours"


def tensors_differ(peer: Row, ours: Row) -> str | None:
    """The saved elements, bit for bit."""
    if peer.file is None or not peer.file.is_file():
        return None
    if ours.file is None or not ours.file.is_file():
        return f"has no file {ours.file} in ours"
    left, right = _bits(peer.file), _bits(ours.file)
    return None if left == right else "has other bits in ours"


def saved_checksum(row: Row) -> str | None:
    """CRC-32 of the elements in a row's file."""
    return None if row.file is None or not row.file.is_file() else f"{zlib.crc32(_bits(row.file)[2]):08x}"


def _bits(path: Path) -> tuple[Any, ...]:
    import torch

    tensor = torch.load(path, weights_only=True, map_location="cpu").detach()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    raw = flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), raw
