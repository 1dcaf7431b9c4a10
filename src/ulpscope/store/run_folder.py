"""Where things lie in a run folder of ours: run/step0/rank0/<files>, and how its small JSON files are written."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
STEP = re.compile(r"step(\d+)")
RANK = re.compile(r"rank(\d+)(?:\.(\d+))?")
_FILES = frozenset({MANIFEST, *TABLES, PAYLOAD, JOURNAL, PAYLOAD_JOURNAL})


@dataclass(frozen=True, slots=True, order=True)
class DumpLocation:
    """One dump of a run: a step, a rank, and a number where several processes had the same rank.

    `folder` is the file itself for a dump of msprobe that was named as a file, and for those of the older tools."""

    step: int
    rank: int
    copy: int
    folder: Path


def dump_folder(run: Path, step: int, rank: int, copy: int = 0) -> Path:
    """run/step0/rank0, or run/step0/rank0.1 for a second process of the same rank."""
    return run / f"step{step}" / (f"rank{rank}.{copy}" if copy else f"rank{rank}")


def find_own(path: Path) -> list[DumpLocation]:
    """Every dump of ours at or below a folder, or the one that a named file is a table of."""
    if not path.is_dir():
        return [location_of(path.parent)] if path.name in _FILES and (path.parent / MANIFEST).is_file() else []
    if (path / MANIFEST).is_file():
        return [location_of(path)]
    steps = children(path, STEP) or [path]
    return sorted(location_of(rank) for step in steps for rank in children(step, RANK) if (rank / MANIFEST).is_file())


def children(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The folders in a folder whose names have a form."""
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir()]


def location_of(folder: Path) -> DumpLocation:
    """Step, rank and copy, as the names of a folder say."""
    resolved = folder.resolve()
    step, rank = STEP.fullmatch(resolved.parent.name), RANK.fullmatch(resolved.name)
    return DumpLocation(
        int(step[1]) if step else 0, int(rank[1]) if rank else 0, int(rank[2] or 0) if rank else 0, folder
    )


_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


class Fixed(dict[str, Any]):
    """A part of a JSON file that never changes: its text is made once."""

    _text: str | None = None

    @property
    def text(self) -> str:
        if self._text is None:  # `cached_property` has a lock in Python 3.11, which a fork may find taken
            self._text = _json(self)
        return self._text


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a small JSON file so that a reader sees the old one or the new one, never half."""
    draft = os.path.join(path.parent, f".{path.name}.{os.getpid()}")
    # A line for each key: readable, and quicker than an indented dump, which Python writes without its C encoder.
    texts = ((key, value.text if isinstance(value, Fixed) else _json(value)) for key, value in sorted(content.items()))
    text = "{\n" + ",\n".join(f"{_json(key)}: {value}" for key, value in texts) + "\n}\n"
    rest = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
