"""The folder of a run: where it is, whether it can be written, and whether another run has it already."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ulpscope.frameworks.interruption import is_meant_for_the_program
from ulpscope.model.errors import CaptureError, cannot
from ulpscope.store import registry, run_folder

RUN_VARIABLE = "ULPSCOPE_RUN"  # the same in all processes of one run


def absolute(path: str | Path) -> Path:
    """Where a path is now: the program may change its working folder later. Raises CaptureError where it has none."""
    try:
        return Path(os.path.abspath(path))
    except FileNotFoundError:
        raise CaptureError(
            f"cannot write into {path}: the working folder of the program was deleted; give an absolute path"
        ) from None


def claim(run: Path, rank: int, token: str, *, overwrite: bool) -> int:
    """Makes sure that this process mixes with no earlier run; returns its copy number among processes of the same rank."""
    copies = -1
    for place in _existing(run):
        if place.rank != rank:
            continue
        if token_of(place.folder) == token:
            copies = max(copies, place.copy)
        elif overwrite:
            shutil.rmtree(place.folder)
            with contextlib.suppress(OSError):
                place.folder.parent.rmdir()
        else:
            raise CaptureError(
                f"{place.folder} holds an earlier capture, which is never mixed with a new one; choose another folder, "
                "or ask for it to be replaced (overwrite=True, --overwrite)"
            )
    return copies + 1


def make_folder(path: Path) -> None:
    try:
        if (
            not path.is_dir()
        ):  # asked first: `mkdir` forgives every error where the folder is there, a signal handler's too
            path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CaptureError(f"cannot write into {path}: it exists and is no folder; choose another") from None
    except OSError as error:
        if is_meant_for_the_program(error):
            raise
        raise cannot(f"write into {path}", error) from error


def _existing(run: Path) -> Iterator[run_folder.DumpLocation]:
    try:
        if run.is_dir():
            yield from registry.find_folders(run)
    except OSError as error:
        if is_meant_for_the_program(error):
            raise
        raise cannot(f"look into {run}", error) from error


def token_of(folder: Path) -> str | None:
    try:
        found = json.loads((folder / run_folder.MANIFEST).read_text(encoding="utf-8"))
        return found.get("run") if isinstance(found, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        if is_meant_for_the_program(error):
            raise
        return None
