"""What belongs to the elements of an odd tensor: the parts of its value, and how it is quantized."""

from __future__ import annotations

import hashlib
from typing import Any

from ulpscope.records import Value

_SCALING = ("scale", "zero_point", "axis")


def with_parts(checksum: int | None, parts: tuple[tuple[str, Value], ...], extra: dict[str, Any]) -> int | None:
    """The checksum of a value and all that belongs to it; done twice, it is that of the value alone again."""
    about = [(name, part.checksum) for name, part in parts]
    about += [(key, extra[key]) for key in _SCALING if key in extra]
    if checksum is None or not about:
        return checksum
    if any(told is None for _, told in about):
        return None
    return checksum ^ int.from_bytes(hashlib.blake2b(repr(about).encode(), digest_size=4).digest(), "little")
