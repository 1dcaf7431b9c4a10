"""How two programs correspond: modules by what they read and gave, values by what was measured of them."""

from __future__ import annotations

from pathlib import Path

from ulpscope.compare.correspondence import Correspondence, correspondence_of
from ulpscope.store.registry import open_dump


def correspondence(
    reference: str | Path, target: str | Path, *, step: int | None = None, rank: int | None = None
) -> Correspondence:
    """Of one step of one rank of two runs."""
    return correspondence_of(*(open_dump(run, step=step, rank=rank) for run in (reference, target)))
