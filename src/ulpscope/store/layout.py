"""Where things lie in a run folder: run/step0/rank0/<files>. Finding dumps from any level of it.

Dumps of msprobe lie in the same tree, as `rank0`, `rank` (one process) or `proc1234` (by process number).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.errors import DumpError

MANIFEST = "manifest.json"
STRINGS = "strings.jsonl"
MEASURES = "measures.bin"
SKETCHES = "sketches.bin"
VALUES = "values.bin"
CALLS = "calls.bin"
TABLES = (STRINGS, MEASURES, SKETCHES, VALUES, CALLS)
PAYLOAD = "payload.bin"
JOURNAL = "journal.ring"
PAYLOAD_JOURNAL = "payload.ring"
FORMAT_VERSION = 1
MSPROBE = ("dump.json", "debug.json")
MSPROBE_TENSORS = "dump_tensor_data"

_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"rank(\d+)(?:\.(\d+))?")
_MSPROBE_RANK = re.compile(r"rank(?:\d+(?:\.\d+)?)?|proc\d+")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One dump of a run: a step, a rank, and a number where several processes had the same rank."""

    step: int
    rank: int
    copy: int
    folder: Path


def dump_folder(run: Path, step: int, rank: int, copy: int = 0) -> Path:
    """run/step0/rank0, or run/step0/rank0.1 for a second process of the same rank."""
    return run / f"step{step}" / (f"rank{rank}.{copy}" if copy else f"rank{rank}")


def find_places(path: Path) -> list[Place]:
    """Every dump at or below a path: a run, a step, a rank folder, or a file in one. Sorted by step and rank."""
    path = Path(path)
    if path.is_file():
        path = path.parent
    if not path.is_dir():
        raise DumpError(f"{path} does not exist; give the folder that a capture wrote")
    if path.name == MSPROBE_TENSORS and is_msprobe(path.parent):
        path = path.parent
    if (path / MANIFEST).is_file() or is_msprobe(path):
        return [_place_of(path)]
    found = []
    for step in _children(path, _STEP) or [path]:
        found += [_place_of(rank) for rank in _children(step, _RANK) if (rank / MANIFEST).is_file()]
        found += _msprobe_places(step)
    return sorted(found)


def is_msprobe(folder: Path) -> bool:
    """Whether a folder holds a dump of msprobe and none of ours."""
    return not (folder / MANIFEST).is_file() and any((folder / name).is_file() for name in MSPROBE)


def _msprobe_places(step: Path) -> list[Place]:
    """The dumps of msprobe in a step. Processes without a rank are rank 0, one after the other."""
    places: list[Place] = []
    procs: list[Place] = []
    for folder in _children(step, _MSPROBE_RANK):
        if is_msprobe(folder):
            (procs if folder.name.startswith("proc") else places).append(_place_of(folder))
    taken = sum(place.rank == 0 for place in places)
    procs.sort(key=lambda place: int(place.folder.name.removeprefix("proc")))
    places += [Place(place.step, 0, taken + number, place.folder) for number, place in enumerate(procs)]
    return places


def _children(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir()]


def _place_of(folder: Path) -> Place:
    resolved = folder.resolve()
    step, rank = _STEP.fullmatch(resolved.parent.name), _RANK.fullmatch(resolved.name)
    return Place(int(step[1]) if step else 0, int(rank[1]) if rank else 0, int(rank[2] or 0) if rank else 0, folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a small JSON file so that a reader sees the old one or the new one, never half."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # A line for each key: readable, and quicker than an indented dump, which Python writes without its C encoder.
    lines = [
        f"{json.dumps(key)}: {json.dumps(content[key], sort_keys=True, ensure_ascii=False)}" for key in sorted(content)
    ]
    text = "{\n" + ",\n".join(lines) + "\n}"
    draft.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    draft.replace(path)
