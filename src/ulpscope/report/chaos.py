"""Where a run stands among runs that drift by themselves, as text and as JSON."""

from __future__ import annotations

import math
import statistics
from typing import Any

from ulpscope.analyze.chaos import Drift, Origin, Placement

_MOST = 8


def chaos_json(found: Placement, *, runs: list[str]) -> dict[str, Any]:
    """The placement and every drift."""
    first = found.first_beyond
    return {
        "schema": 1,
        "runs": runs,
        "nudged": len(found.scores),
        "verdict": None if found.origin is None else found.origin.value,
        "quantile": found.quantile,
        "score": _plain(found.observed),
        "largest_score": _plain(max(found.scores)),
        "first_beyond": None if first is None else {"step": first.step, "rank": first.rank, "what": first.what},
        "drift": [
            {
                "step": drift.step,
                "rank": drift.rank,
                "what": drift.what,
                "median": _plain(statistics.median(drift.nudged)),
                "largest": _plain(drift.nudged[-1]),
                "observed": _plain(drift.observed),
                "quantile": drift.quantile,
            }
            for drift in found.drifts
        ],
    }


def chaos_lines(found: Placement, *, runs: list[str]) -> list[str]:
    """A table of some steps, then the verdict."""
    count = len(found.scores)
    lines = [
        " -> ".join(runs),
        f"{count} runs with all weights moved by one unit in the last place, beside the one that was not",
        "",
        f"  {'step':>6}  {'':<8}{'drift, median':>16}{'largest':>12}"
        + (f"{'observed':>12}{'quantile':>10}" if found.observed is not None else ""),
    ]
    shown = [drift for drift in found.drifts if drift.rank == 0]
    steps = sorted({drift.step for drift in shown})
    if len(steps) > _MOST:
        steps = [steps[at * (len(steps) - 1) // (_MOST - 1)] for at in range(_MOST)]
    lines += [_row(drift) for drift in shown if drift.step in steps]
    if found.origin is not None:
        lines += ["", f"verdict     {found.origin.value}: {_because(found)}"]
    return lines


def _row(drift: Drift) -> str:
    text = f"  {drift.step:>6}  {drift.what:<8}{statistics.median(drift.nudged):>16.3g}{drift.nudged[-1]:>12.3g}"
    return text if drift.observed is None else f"{text}{drift.observed:>12.3g}{drift.quantile:>10.0%}"


def _because(found: Placement) -> str:
    assert found.observed is not None
    count = len(found.scores)
    if not found.observed:
        return "nothing differs at any step"
    if found.origin is Origin.CHAOS:
        return f"{found.quantile:.0%} of {count} nudged runs are less far off, the others as far or further"
    times = found.observed / max(found.scores)
    if found.origin is Origin.UNSURE:
        return f"{times:.2g} times further off than any of {count} nudged runs; ask for more with -n"
    first = found.first_beyond
    where = "" if first is None else f", the {first.what} from step {first.step} on"
    return f"{times:.3g} times further off than any of {count} nudged runs{where}; `ulpscope blame` names the call"


def _plain(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
