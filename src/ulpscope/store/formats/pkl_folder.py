"""Where files of JSON lines lie: `TAG_v3.0/step0/rank0/dump.pkl` of ptdbg_ascend, one file of any name of torch_npu.hooks."""

from __future__ import annotations

import re
from pathlib import Path

from ulpscope.model.errors import DumpError
from ulpscope.store.dump import Source
from ulpscope.store.registry import Format, beginning
from ulpscope.store.run_folder import RANK, STEP, DumpLocation, children

SUFFIX = ".pkl"

_STEP_OR_RANK = re.compile(r"(?:step|rank)\d+")
_TAG = re.compile(r".+_v\d+(?:\.\d+)*")
_BEGIN = b'["'


def find(path: Path) -> list[DumpLocation]:
    """The file that is named, or those of a folder: beside it, in it, in its ranks and steps, or in the one run it holds."""
    if not path.is_file():
        return _below(path)
    return [locate(path)] if is_lines(path) else []


def is_lines(path: Path) -> bool:
    """Whether a path is a file that an older tool may have written."""
    return path.is_file() and (path.suffix == SUFFIX or beginning(path).startswith(_BEGIN))


def locate(file: Path, copy: int = 0) -> DumpLocation:
    """Step and rank are in the names above; the manual has the folder of the run between them, real runs have it on top."""
    folder, *above = file.resolve().parents[:3]
    rank = RANK.fullmatch(folder.name)
    step = next((found for each in above if (found := STEP.fullmatch(each.name))), None)
    return DumpLocation(int(step[1]) if step else 0, int(rank[1]) if rank else 0, copy, file)


def _below(folder: Path, depth: int = 0) -> list[DumpLocation]:
    beside = folder.parent / f"{folder.name}{SUFFIX}"
    files = [beside] if _is_dump(beside) else sorted(filter(_is_dump, folder.iterdir()))
    if files or depth > 3:
        return [locate(file, copy) for copy, file in enumerate(files)]
    found = [place for each in children(folder, _STEP_OR_RANK) for place in _below(each, depth + 1)]
    if found:
        return found
    runs = {each.name: places for each in children(folder, _TAG) if (places := _below(each, depth + 1))}
    if len(runs) > 1:
        raise DumpError(f"{folder} holds several runs, {', '.join(sorted(runs))}; give one of them")
    return next(iter(runs.values()), [])


def _is_dump(path: Path) -> bool:
    # A folder may hold pickles of anybody; they are no dumps, and not worth an error.
    return path.suffix == SUFFIX and path.is_file() and beginning(path).startswith(_BEGIN)


def _open(location: DumpLocation) -> Source:
    from ulpscope.store.formats.hooks_reader import HooksDump
    from ulpscope.store.formats.pkl_lines import is_ptdbg
    from ulpscope.store.formats.ptdbg_reader import PtdbgDump

    return PtdbgDump(location) if is_ptdbg(location.folder) else HooksDump(location)


FORMAT = Format("pkl", find, _open)
