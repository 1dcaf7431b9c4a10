"""Calls that changed too much as text: the worst of each function, with its line."""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.store.noise import NoiseRow


def noise_lines(rows: Sequence[NoiseRow]) -> list[str]:
    """The answer, worst functions first; a function is told once."""
    if not rows:
        return ["every result changed as little as its input and rounding explain"]
    functions: dict[str, list[NoiseRow]] = {}
    for row in rows:
        functions.setdefault(row.api_name.rsplit(".", 2)[0], []).append(row)
    lines = []
    for found in sorted(functions.values(), key=lambda each: -max(row.excess or 0.0 for row in each)):
        worst = max(found, key=lambda row: row.excess or 0.0)
        more = f", and {len(found) - 1} more of its results" if len(found) > 1 else ""
        lines.append(f"{worst.api_name}  changes {worst.excess:.3g} times as much as is explained{more}")
        lines.append(f"  {worst.pert_mode}, step {worst.step}, rank {worst.rank}, input {worst.dtype} {worst.shape}")
        if worst.source is not None:
            lines.append(f"  at {worst.source}")
    return [*lines, "", f"{len(functions)} function{'s'[: len(functions) > 1]} not explained"]
