"""What surrounds a run and is no business of the framework: command, folder, commit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def surroundings() -> dict[str, Any]:
    """Command, working folder, process and the commit of the working folder, for the manifest."""
    try:
        folder: Path | None = Path.cwd()
    except OSError:  # it was deleted under the program, which may well go on
        folder = None
    return {
        "command": [sys.executable, *map(str, getattr(sys, "argv", ()))],
        "folder": None if folder is None else str(folder),
        "pid": os.getpid(),
        "commit": None if folder is None else commit_of(folder),
    }


def commit_of(folder: Path) -> str | None:
    """The commit that HEAD names in the repository around a folder, read from its files; None when there is none."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        try:
            if git.is_file():
                git = place / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
            if git.is_dir():
                return _head(git)
        except (OSError, UnicodeDecodeError):
            return None
    return None


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head or None
    name = head.removeprefix("ref:").strip()
    if (git / name).is_file():
        return (git / name).read_text(encoding="utf-8").strip()
    packed = git / "packed-refs"
    for line in packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else ():
        commit, _, reference = line.partition(" ")
        if reference == name:
            return commit
    return None
