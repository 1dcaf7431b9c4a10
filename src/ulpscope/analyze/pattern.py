"""The shape of an error inside a tensor names the bug: a block, a tail, one channel, a scale, truncation, saturation.

Works on the profile that a ledger row carries: for each dimension, how many indices are off and which is the first and the
last, the share of elements that are off, and how the error leans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ulpscope.analyze.limits import UNITS
from ulpscope.store.ledger_file import Measure

_ALL = 0.9
_FEW = 0.01
_CLIPPED = 4
_MANY = 0.05


@dataclass(frozen=True, slots=True)
class Pattern:
    """`kind` is one word of the list in docs/judge.md, `text` says where and how much."""

    kind: str
    text: str
    ranges: tuple[tuple[int, int, int], ...] = ()  # dimension, first, one past the last


def pattern(measure: Measure) -> Pattern:
    """What the error of one result looks like."""
    profile = measure.profile
    leaning = _leaning(measure)
    count = measure.lost or measure.undefined or measure.infinite
    if count:
        where = f", one at {profile['worst_at']}" if profile is not None and measure.lost else ""
        return Pattern("not finite", f"{count} elements are not finite{where}")
    if profile is None:
        return leaning or Pattern("uniform", "spread evenly, below what single elements show")
    dims: list[dict[str, Any]] = profile["dims"]
    share = profile["share"]
    off = round(share * math.prod(measure.shape))
    clipped = profile.get("clipped", 0)
    if clipped >= max(_CLIPPED, _ALL * off):
        return Pattern("saturation", f"{clipped} elements stand at the same largest value and should be larger")
    if off < _CLIPPED:
        return Pattern("sparse outliers", f"{off} elements, the worst at {profile['worst_at']}")
    whole = all(dim["bad"] >= _ALL * dim["length"] for dim in dims)
    if whole and share > _MANY:
        return leaning or Pattern("uniform", f"{share:.0%} of the elements are off, everywhere")
    ranges = tuple(
        (place, dim["first"], dim["last"] + 1)
        for place, dim in enumerate(dims)
        if dim["first"] is not None and (dim["first"] > 0 or dim["last"] + 1 < dim["length"])
    )
    text = ", ".join(f"dimension {place} [{first}:{last}]" for place, first, last in ranges)
    solid = [(place, first, last) for place, first, last in ranges if dims[place]["bad"] >= _ALL * (last - first)]
    for place, dim in enumerate(dims):
        step = dim["step"]
        if dim["bad"] > 2 and step > 1 and (dim["bad"] - 1) * step == dim["last"] - dim["first"]:
            stretch = (place, dim["first"], dim["last"] + 1)
            return Pattern("stride", f"every {step}th index of dimension {place} from {dim['first']} on", (stretch,))
    if solid and share > _FEW / 10:
        if len(solid) == 1 and solid[0][2] - solid[0][1] == 1:
            return Pattern("one channel", f"only index {solid[0][1]} of dimension {solid[0][0]}", ranges)
        if all(last == dims[place]["length"] for place, _, last in solid):
            return Pattern("tail", f"only the end: {text}", ranges)
        return Pattern("block", f"only {text}", ranges)
    if share < _FEW:
        return Pattern("sparse outliers", f"{share:.2%} of the elements, the worst at {profile['worst_at']}", ranges)
    return leaning or Pattern(
        "uneven", f"{share:.0%} of the elements are off, the worst at {profile['worst_at']}", ranges
    )


def _leaning(measure: Measure) -> Pattern | None:
    """A common factor, or rounding toward zero."""
    size = abs(measure.toward)
    if size < 0.25 or size < 8 * measure.spread:
        return None
    if measure.toward < 0 and size < 1.2 and measure.rms < 16:
        return Pattern("truncation", f"rounds toward zero: {size:.2g} units on average")
    unit = UNITS.get(measure.dtype, 2.0**-24)
    if size > 0.5 * measure.rms:
        return Pattern("scale", f"a common factor of {1 + measure.toward * unit:.7g}")
    return None
