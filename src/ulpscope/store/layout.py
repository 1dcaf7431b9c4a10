"""Where things lie in a run folder: run/step0/rank0/<files>. Finding dumps from any level of it.

Dumps of msprobe lie in the same tree, as `rank0`, `rank` (one process) or `proc1234` (by process number). Those of the older
tools are files: `TAG_v3.0/step0/rank0/dump.pkl` of ptdbg_ascend, one file of any name of torch_npu.hooks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ulpscope.model.errors import DumpError

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
# 2: sketches as `measuring.py` has them now; those of the two cannot be compared.
FORMAT_VERSION = 2
MSPROBE = ("dump.json", "debug.json")
MSPROBE_TENSORS = "dump_tensor_data"
STACKS, PARENTS = "stack.json", "construct.json"
LINES = ".pkl"
_NATIVE = frozenset({MANIFEST, *TABLES, PAYLOAD, JOURNAL, PAYLOAD_JOURNAL})

_STEP = re.compile(r"step(\d+)")
_RANK = re.compile(r"rank(\d+)(?:\.(\d+))?")
_MSPROBE_RANK = re.compile(r"rank(?:\d+(?:\.\d+)?)?|proc\d+")
_STEP_OR_RANK = re.compile(r"(?:step|rank)\d+")
_TAG = re.compile(r".+_v\d+(?:\.\d+)*")
_LINES_BEGIN = b'["'
_KIND = re.compile(r"(.*)(?:dump|debug)")
_ENTRIES = re.compile(rb'"data"\s*:\s*\{')
_HEADER = 1 << 16
# What lies beside a dump and is none, by its name: what it is, and the word in the name of the dump that stands there for its own.
_NO_DUMPS = {"stack": "the stacks of a dump", "construct": "what called what in a dump"}


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One dump of a run: a step, a rank, and a number where several processes had the same rank.

    `folder` is the file itself for a dump of msprobe that was named as a file, and for those of the older tools."""

    step: int
    rank: int
    copy: int
    folder: Path


def dump_folder(run: Path, step: int, rank: int, copy: int = 0) -> Path:
    """run/step0/rank0, or run/step0/rank0.1 for a second process of the same rank."""
    return run / f"step{step}" / (f"rank{rank}.{copy}" if copy else f"rank{rank}")


def find_places(path: Path) -> list[Place]:
    """Every dump at or below a folder: a run, a step, a rank folder. Sorted by step and rank.

    Only folders that a capture may replace: those of ulpscope and msprobe. For reading there is `find_dumps`.
    """
    path = Path(path)
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


def find_dumps(path: Path) -> list[Place]:
    """As `find_places`, the files of the older tools where there is nothing else, and the dump that a named file is.

    A file stands for itself: only the tables of a native dump stand for their folder. Raises DumpError for one that is no dump.
    """
    path = Path(path)
    if path.is_file():
        return [_named(path)]
    return find_places(path) or sorted(_lines_places(path))


def _named(path: Path) -> Place:
    if is_native(path):
        return _place_of(path.parent)
    if is_lines(path):
        return _lines_place(path)
    if path.suffix == ".json" or _beginning(path).lstrip().startswith(b"{"):
        return replace(_place_of(path.parent), folder=path)
    raise DumpError(not_a_dump(path, "it holds no JSON"))


def not_a_dump(path: Path, why: str) -> str:
    """What is said of a named file that is no dump: what it is, and what to name instead."""
    for word, what in _NO_DUMPS.items():
        if path.suffix == ".json" and word in path.stem:
            own = path.with_name(path.name.replace(word, "dump"))
            named = f"name {own}" if own.is_file() else f"name the {MSPROBE[0]} that it belongs to"
            return f"{path} is no dump, it is {what}; {named}"
    if path.suffix in (".pt", ".npy", ".bin"):
        return f"{path} is no dump, it is one tensor; name the dump, or look at the tensor with `ulpscope tensor`"
    return f"{path} is no dump: {why}; name a {MSPROBE[0]}, the {LINES} of an older tool, or the folder of a run"


def is_native(path: Path) -> bool:
    """Whether a file is one of those that make a native dump."""
    return path.name in _NATIVE and (path.parent / MANIFEST).is_file()


def is_lines(path: Path) -> bool:
    """Whether a path is a file that an older tool may have written."""
    return path.is_file() and (path.suffix == LINES or _beginning(path).startswith(_LINES_BEGIN))


def beside(dump: Path, name: str) -> Path:
    """Where `name` (stack.json, construct.json, dump_tensor_data) of a dump of msprobe lies, by its folder or its file.

    A dump.json under another name has what is named as it is: gpu_dump.json has gpu_stack.json and gpu_dump_tensor_data. It has
    the plain names only where no other dump lies there that they may belong to.
    """
    if not dump.is_file():
        return dump / name
    plain = dump.with_name(name)
    if dump.name in MSPROBE:
        return plain
    kind, dot, suffix = name.partition(".")
    found = _KIND.match(dump.stem)
    own = dump.with_name(
        (dump.stem[: found.end(1)] + kind + dump.stem[found.end() :] if found else f"{dump.stem}_{kind}") + dot + suffix
    )
    alone = not any(
        each != dump and _ENTRIES.search(_beginning(each)) for each in dump.parent.glob("*.json") if each.is_file()
    )
    return plain if alone and not own.exists() else own


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


def _lines_places(folder: Path, depth: int = 0) -> list[Place]:
    """The files of the older tools in a folder: beside it, in it, in its ranks and steps, or in the one run it holds."""
    beside = folder.parent / f"{folder.name}{LINES}"
    files = [beside] if _begins_as_lines(beside) else sorted(filter(_begins_as_lines, folder.iterdir()))
    if files or depth > 3:
        return [_lines_place(file, copy) for copy, file in enumerate(files)]
    found = [place for each in _children(folder, _STEP_OR_RANK) for place in _lines_places(each, depth + 1)]
    if found:
        return found
    runs = {each.name: places for each in _children(folder, _TAG) if (places := _lines_places(each, depth + 1))}
    if len(runs) > 1:
        raise DumpError(f"{folder} holds several runs, {', '.join(sorted(runs))}; give one of them")
    return next(iter(runs.values()), [])


def _begins_as_lines(path: Path) -> bool:
    # A folder may hold pickles of anybody; they are no dumps, and not worth an error.
    return path.suffix == LINES and path.is_file() and _beginning(path).startswith(_LINES_BEGIN)


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEADER)
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error


def _lines_place(file: Path, copy: int = 0) -> Place:
    # Step and rank are in the names above; the manual has the folder of the run between them, real runs have it on top.
    folder, *above = file.resolve().parents[:3]
    rank = _RANK.fullmatch(folder.name)
    step = next((found for each in above if (found := _STEP.fullmatch(each.name))), None)
    return Place(int(step[1]) if step else 0, int(rank[1]) if rank else 0, copy, file)


def _children(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir()]


def _place_of(folder: Path) -> Place:
    resolved = folder.resolve()
    step, rank = _STEP.fullmatch(resolved.parent.name), _RANK.fullmatch(resolved.name)
    return Place(int(step[1]) if step else 0, int(rank[1]) if rank else 0, int(rank[2] or 0) if rank else 0, folder)


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
