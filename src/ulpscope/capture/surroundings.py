"""What surrounds a run, for the manifest: command, folder, commit, and the settings of each step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ulpscope.frameworks.torch import devices
from ulpscope.frameworks.torch.settings import OF_BLOCKS, settings
from ulpscope.store.run_folder import Fixed


class Environment:
    """The environment of a process, asked once, with the settings of the step that is under way.

    A program may change a setting after its first call: what counts is what held when the first module of the step ran, or at
    its first call where no module runs. What another value has when the step ends is told beside it."""

    def __init__(self) -> None:
        self._text: Fixed | None = None
        self._flags: dict[str, Any] | None = None

    def end_step(self) -> None:
        """The next step has settings of its own."""
        self._flags = None

    def see_forward(self) -> None:
        """The first module of a step is about to run."""
        self._flags = settings()

    def told(self, *, at_end: bool) -> Fixed:
        """All of it, as the manifest has it when a step begins, and at its end."""
        if self._flags is None:
            self._flags = settings()
        told: dict[str, Any] = {"flags": self._flags, "seeds": devices.seeds()}
        if at_end:
            now = settings()
            changed = {name: now[name] for name in now if now[name] != self._flags[name] and name not in OF_BLOCKS}
            told |= {"flags_at_end": changed} if changed else {}
        before = self._text
        if before is None or any(before.get(name) != told.get(name) for name in (*told, "flags_at_end")):
            known = {**devices.environment(), **surroundings()} if before is None else before
            self._text = Fixed({name: part for name, part in known.items() if name != "flags_at_end"} | told)
        assert self._text is not None
        return self._text


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
