"""Where dumps of msprobe lie: in a tree as ours, as `rank0`, `rank` (one process) or `proc1234` (by process number), or as one file
of any name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ulpscope.store.dump import Source
from ulpscope.store.registry import Format, beginning
from ulpscope.store.run_folder import MANIFEST, STEP, DumpLocation, children, location_of

FILES = ("dump.json", "debug.json")
TENSORS = "dump_tensor_data"
STACKS, PARENTS = "stack.json", "construct.json"

_RANK = re.compile(r"rank(?:\d+(?:\.\d+)?)?|proc\d+")
_KIND = re.compile(r"(.*)(?:dump|debug)")
_ENTRIES = re.compile(rb'"data"\s*:\s*\{')


def is_msprobe(folder: Path) -> bool:
    """Whether a folder holds a dump of msprobe and none of ours."""
    return not (folder / MANIFEST).is_file() and any((folder / name).is_file() for name in FILES)


def find(path: Path) -> list[DumpLocation]:
    """Every dump of msprobe at or below a folder, or the one that a named file is."""
    if path.is_file():
        own = path.name in FILES or _ENTRIES.search(beginning(path))
        return [replace(location_of(path.parent), folder=path)] if own else []
    if path.name == TENSORS and is_msprobe(path.parent):
        path = path.parent
    if is_msprobe(path):
        return [location_of(path)]
    return [found for step in children(path, STEP) or [path] for found in _in_step(step)]


def beside(dump: Path, name: str) -> Path:
    """Where `name` (stack.json, construct.json, dump_tensor_data) of a dump of msprobe lies, by its folder or its file.

    A dump.json under another name has what is named as it is: gpu_dump.json has gpu_stack.json and gpu_dump_tensor_data. It has
    the plain names only where no other dump lies there that they may belong to.
    """
    if not dump.is_file():
        return dump / name
    plain = dump.with_name(name)
    if dump.name in FILES:
        return plain
    kind, dot, suffix = name.partition(".")
    found = _KIND.match(dump.stem)
    own = dump.with_name(
        (dump.stem[: found.end(1)] + kind + dump.stem[found.end() :] if found else f"{dump.stem}_{kind}") + dot + suffix
    )
    alone = not any(
        each != dump and _ENTRIES.search(beginning(each)) for each in dump.parent.glob("*.json") if each.is_file()
    )
    return plain if alone and not own.exists() else own


def _in_step(step: Path) -> list[DumpLocation]:
    """The dumps in a step. Processes without a rank are rank 0, one after the other."""
    found: list[DumpLocation] = []
    procs: list[DumpLocation] = []
    for folder in children(step, _RANK):
        if is_msprobe(folder):
            (procs if folder.name.startswith("proc") else found).append(location_of(folder))
    taken = sum(each.rank == 0 for each in found)
    procs.sort(key=lambda each: int(each.folder.name.removeprefix("proc")))
    return found + [DumpLocation(each.step, 0, taken + number, each.folder) for number, each in enumerate(procs)]


def _open(location: DumpLocation) -> Source:
    from ulpscope.store.formats.msprobe_reader import MsprobeDump

    return MsprobeDump(location)


FORMAT = Format("msprobe", find, _open)
