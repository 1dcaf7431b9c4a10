"""The shares of a loss gap, as text and as JSON."""

from __future__ import annotations

import math
from typing import Any

from ulpscope.analyze.attribution import Attribution, Share

_MOST = 5
_MOST_JSON = 10
_LITTLE = 0.01


def attribution_json(found: Attribution) -> dict[str, Any]:
    return {
        "step": found.step,
        "rank": found.rank,
        "loss": {
            "reference": _plain(found.reference),
            "target": _plain(found.target),
            "gap": _plain(found.gap),
        },
        "explained": _plain(found.explained),
        "explained_share": _plain(found.share),
        "of_weights": _plain(found.of_weights),
        "first_order": not found.doubt,
        "doubt": found.doubt or None,
        "calls": len(found.shares),
        "without_gradient": found.without,
        "shares": [_share_json(share, found.gap) for share in found.shares[:_MOST_JSON]],
    }


def _share_json(share: Share, gap: float) -> dict[str, Any]:
    return {
        "call": share.call,
        "module": share.module or None,
        "what": share.what,
        "amount": _plain(share.amount),
        "share": _plain(share.amount / gap) if gap else None,
    }


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None


def attribution_lines(found: Attribution) -> list[str]:
    """The gap, who explains it, and whether the sum is to be believed."""
    lines = [
        f"loss gap    {found.gap:+.4g} at step {found.step} ({found.reference:.8g} -> {found.target:.8g}), "
        f"first order explains {found.share:.1%} of it",
    ]
    if found.gap and abs(found.of_weights / found.gap) >= _LITTLE:
        lines.append(f"  {found.of_weights / found.gap:>8.1%}  weights that differed before this step, all together")
    for share in found.shares[:_MOST]:
        part = share.amount / found.gap if found.gap else math.nan
        if abs(part) >= _LITTLE:
            lines.append(f"  {part:>8.1%}  {share.call}" + _where(share))
    if found.doubt:
        lines.append(f"  do not rely on it: {found.doubt}")
    return lines


def _where(share: Share) -> str:
    place = f" in {share.module}" if share.module else ""
    return place + (", its weights differ" if share.what == "weights" else "")
