"""A run in the files of another tool, or the other way round."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ulpscope.model.errors import CaptureError, ConfigError, DumpError, did_you_mean
from ulpscope.store.convert import write_native
from ulpscope.store.dump import Dump
from ulpscope.store.formats.cann import kernel_files, kernel_name
from ulpscope.store.formats.cann_npy import convert_kernel, kernel_dumps_at
from ulpscope.store.formats.msprobe_writer import LEVEL_NAMES, write_msprobe
from ulpscope.store.formats.ptdbg_writer import ptdbg_folder, write_ptdbg
from ulpscope.store.registry import find_dumps, find_folders, open_dump
from ulpscope.store.run_folder import DumpLocation, dump_folder

FORMATS = ("msprobe", "native", "ptdbg")


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. `cut`: sentences on dumps that do not end as they should; `missing`: files with elements that are not there
    or cut; `arrays`: of kernel dumps, which have no calls; `problems`: what of them could not be read."""

    dumps: int
    calls: int = 0
    missing: int = 0
    cut: tuple[str, ...] = ()
    arrays: int = 0
    problems: tuple[str, ...] = ()


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    to: str | None = None,
    task: str | None = None,
    summary_mode: str = "statistics",
    overwrite: bool = False,
) -> Converted:
    """Writes every dump of a run to DEST/step0/rank0: `to` is msprobe, native or ptdbg; msprobe for ours, native for others without.

    For msprobe, `task` is statistics or tensor (if it has any), and `summary_mode` md5 adds checksums. `overwrite` replaces the
    dumps that lie in `dest`, and nothing else.
    """
    if to not in (None, *FORMATS):
        raise ConfigError([f"to is {to!r}; it must be one of {', '.join(FORMATS)}.{did_you_mean(str(to), FORMATS)}"])
    found = find_dumps(Path(source))
    if not found:
        raise DumpError(f"{source} holds no dump; a dump is a folder step0/rank0")
    _clear(Path(dest), Path(source), overwrite)
    dumps = [_converted(each, Path(dest), to, task, summary_mode) for each in found]
    return Converted(
        dumps=len(dumps),
        calls=sum(map(len, dumps)),
        missing=sum(len(dump.missing) for dump in dumps),
        cut=tuple(f"{dump.folder}: {dump.ending}" for dump in dumps if dump.ending != "complete"),
    )


def _converted(location: DumpLocation, dest: Path, to: str | None, task: str | None, summary_mode: str) -> Dump:
    dump = open_dump(location.folder)
    folder = dump_folder(dest, location.step, location.rank, location.copy)
    to = to or ("msprobe" if dump.source.format == "native" else "native")
    if to == "native":
        write_native(dump, folder)
    elif to == "ptdbg":
        write_ptdbg(dump, ptdbg_folder(dest, step=location.step, rank=location.rank), mode="api_stack")
    else:
        level = LEVEL_NAMES.get(dump.manifest.level, dump.manifest.level)
        write_msprobe(dump, folder, task=task or _task_of(dump), level=level, summary_mode=summary_mode)
    return dump


def holds_kernels(source: str | Path) -> bool:
    """Whether a path is a kernel dump of CANN, or a folder of them."""
    path = Path(source)
    return bool(kernel_files(path)) if path.is_dir() else kernel_name(path) is not None


def convert_kernels(source: str | Path, dest: str | Path, *, layout: str | None = None) -> Converted:
    """Writes the tensors of kernel dumps of CANN as .npy, as they lay on the device or in a `layout`. Arrays of the same names are
    replaced, other files in `dest` stay."""
    files = kernel_dumps_at(Path(source))
    Path(dest).mkdir(parents=True, exist_ok=True)
    found = [convert_kernel(path, Path(dest), layout=layout) for path in files]
    return Converted(
        dumps=len(files),
        arrays=sum(len(each.written) for each in found),
        problems=tuple(problem for each in found for problem in each.problems),
    )


def _task_of(dump: Dump) -> str:
    stored = any(value.payload is not None for call in dump.calls() for value in call.values)
    return "tensor" if stored else "statistics"


def _clear(dest: Path, source: Path, overwrite: bool) -> None:
    if dest.exists() and not dest.is_dir():
        raise CaptureError(f"{dest} is a file; DEST needs a folder")
    if not dest.exists() or not any(dest.iterdir()):
        return
    if not overwrite:
        raise CaptureError(f"{dest} is not empty; choose another folder, or add --overwrite to replace the dumps in it")
    inside, outside = dest.resolve(), source.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise CaptureError(f"{source} and {dest} lie in each other; choose another folder")
    # Only dumps go: whatever else lies in the folder stays.
    for each in find_folders(dest):
        shutil.rmtree(each.folder)
