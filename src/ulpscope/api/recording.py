"""A program recorded without an edit: any command, with capture on in every Python process below it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ulpscope.api.launch import run
from ulpscope.capture.watch import OPTIONS_VARIABLE
from ulpscope.model.errors import CaptureError
from ulpscope.model.options import CaptureConfig, capture_config
from ulpscope.store.registry import find_folders
from ulpscope.store.ring import require_room
from ulpscope.store.writer import DumpWriter


def record(
    command: Sequence[str], path: str | Path, *, overwrite: bool = False, told_in: str = "record", **options: Any
) -> int:
    """Records a command into the folder `path`; returns its exit code, negative for a signal. The options are those of `Capture`;
    what is wrong with them is said to be in `told_in`. `open_run(path)` has what was recorded."""
    config = capture_config({**options, "path": str(Path(path).resolve())}, told_in)
    _clear(Path(path), overwrite)
    _refuse_unusable(Path(path), config)
    return run(command, OPTIONS_VARIABLE, config.as_json())


def _clear(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise CaptureError(f"{path} is a file; -o needs a folder")
    found = find_folders(path)
    if found and not overwrite:
        raise CaptureError(f"{path} holds an earlier capture; choose another folder, or add --overwrite to replace it")
    for each in found:
        shutil.rmtree(each.folder)
        if not any(each.folder.parent.iterdir()):
            each.folder.parent.rmdir()


def _refuse_unusable(path: Path, config: CaptureConfig) -> None:
    """Before the command runs for hours."""
    folder = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CaptureError(f"cannot write into {path}: {folder} is not writable; choose another folder with -o")
    if config.strict:
        require_room(folder, *DumpWriter(payload_bytes=config.queue_mb << 20 if config.tensors else 0).capacities)
