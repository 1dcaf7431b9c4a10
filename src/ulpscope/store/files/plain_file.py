"""A file of another tool, mapped into memory: never a link, a pipe or a device."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from ulpscope.model.errors import DumpError

# A pipe that nobody writes to must not hold the reader up, and Windows has neither flag.
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def mapped(path: Path) -> mmap.mmap | bytes:
    """The content of a plain file, read as it is touched. Raises DumpError when it is anything else."""
    if path.is_symlink():
        raise DumpError(f"{path} is a symbolic link; a dump holds plain files only")
    try:
        descriptor = os.open(path, _FLAGS)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise DumpError(f"{path} is no plain file; a dump holds plain files only")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if facts.st_size else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error
