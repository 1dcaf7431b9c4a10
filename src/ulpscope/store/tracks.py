"""Tracks on disk: what a run's loss and output were at each step, a line of JSON each. Run 0 is the one that was not nudged.

chaos/track.0.rank0.jsonl  {"step": 0, "loss": 3.84, "output": [sketch, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ulpscope.errors import DumpError


@dataclass(frozen=True, slots=True)
class Point:
    """One step of one rank: the sum of the losses that went backward, and a linear sketch of what the model returned."""

    step: int
    rank: int
    loss: float | None
    output: tuple[float, ...]


Track = dict[tuple[int, int], Point]  # step, rank -> point


def track_path(folder: Path, run: int, rank: int) -> Path:
    return folder / f"track.{run}.rank{rank}.jsonl"


def add_point(path: Path, point: Point) -> None:
    """Appends one step; what was written before a crash can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": point.step, "loss": point.loss, "output": point.output}) + "\n")


def read_tracks(folder: Path) -> dict[int, Track]:
    """All runs of a folder by their number. Raises DumpError where there is none."""
    found: dict[int, Track] = {}
    for path in sorted(folder.glob("track.*.rank*.jsonl")):
        _, run, rank, _ = path.name.split(".")
        found.setdefault(int(run), {}).update(
            {(point.step, point.rank): point for point in _points(path, int(rank.removeprefix("rank")))}
        )
    if not found:
        raise DumpError(f"{folder} holds no tracks; `ulpscope chaos -o {folder} -- CMD` makes them")
    return found


def _points(path: Path, rank: int) -> Iterator[Point]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            plain = json.loads(line)
            loss = plain["loss"]
            yield Point(int(plain["step"]), rank, None if loss is None else float(loss), tuple(plain["output"]))
        except (ValueError, KeyError, TypeError):
            return
