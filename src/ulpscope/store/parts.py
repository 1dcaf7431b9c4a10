"""What belongs to the elements of an odd tensor: the parts of its value, and how it is quantized."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from ulpscope.model.records import Payload, Slot, Summary, Value
from ulpscope.native.schema import NONE32

Measured = tuple[Summary | None, int | None, Payload | None]

_SCALING = ("scale", "zero_point", "axis")


def parts_of(told: dict[str, Any], slot: Slot, measured: Callable[[int], Measured]) -> tuple[tuple[str, Value], ...]:
    """The parts that a text of a dump names; `measured` reads the row of one."""
    found = []
    for name, about in told.items():
        number, dtype, shape = about["measure"], str(about["dtype"]), tuple(about["shape"])
        stats, checksum, payload = (None, None, None) if number == NONE32 else measured(number)
        known = None if stats is None and checksum is None and payload is None else number
        value = Value(
            slot, "torch.Tensor", dtype, shape, stats=stats, checksum=checksum, payload=payload, measure=known
        )
        found.append((name, value))
    return tuple(found)


def with_parts(checksum: int | None, parts: tuple[tuple[str, Value], ...], extra: dict[str, Any]) -> int | None:
    """The checksum of a value and all that belongs to it; done twice, it is that of the value alone again."""
    about = [(name, part.checksum) for name, part in parts]
    about += [(key, extra[key]) for key in _SCALING if key in extra]
    if checksum is None or not about:
        return checksum
    if any(told is None for _, told in about):
        return None
    return checksum ^ int.from_bytes(hashlib.blake2b(repr(about).encode(), digest_size=4).digest(), "little")
