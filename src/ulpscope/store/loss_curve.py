"""Tracks on disk: what a run's loss and output were at each step, a line of JSON each. Run 0 is the one that was not nudged.

chaos/track.0.rank0.jsonl  {"step": 0, "loss": 3.84, "output": [sketch, ...]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ulpscope.model.errors import DumpError
from ulpscope.store.json_fields import read_fields


@dataclass(frozen=True, slots=True)
class Point:
    """One step of one rank: the sum of the losses that went backward, and a linear sketch of what the model returned."""

    step: int
    rank: int
    loss: float | None
    output: tuple[float, ...]


_NAME = re.compile(r"track\.(\d{1,9})\.rank(\d{1,9})\.jsonl")
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
        parts = _NAME.fullmatch(path.name)
        if parts is not None:
            found.setdefault(int(parts[1]), {}).update(
                {(point.step, point.rank): point for point in _points(path, int(parts[2]))}
            )
    if not found:
        raise DumpError(f"{folder} holds no tracks; `ulpscope chaos -o {folder} -- CMD` makes them")
    return found


def _points(path: Path, rank: int) -> Iterator[Point]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from None
    for line in lines:
        try:
            yield read_fields(Point, json.loads(line), {"rank": rank})
        except (ValueError, RecursionError):
            return
