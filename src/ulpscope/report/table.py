"""What every table on disk is made of: cells, rows, sheets, and a file that is there whole or not at all.

The writers (xlsx.py, csv.py) take rows as they come and hold a few hundred of them; they judge nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path

Cell = str | int | float | bool | None


class Colour(Enum):
    """The fill of a whole row; the values are those of the older tools' workbooks."""

    RED = "FFFF0000"
    YELLOW = "00FFFF00"


Row = tuple[Sequence[Cell], Colour | None]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table with a name; its rows are taken once, in order."""

    name: str
    columns: Sequence[str]
    rows: Iterable[Row]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside `path` to write to; it takes the place of `path` when the block ends well, and is gone if not.

    Missing folders are made. A file of the same name is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk names no file
        raise


@contextlib.contextmanager
def stamped(folder: Path, name: str) -> Iterator[str]:
    """The time for the names of results, which is `{}` in `name`; with _1, _2 ... behind it where another result has it.

    Two results of one second are two results, also of two processes: while the block runs, the name is this one's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y%m%d%H%M%S")
    for number in count():
        stamp = f"{now}_{number}" if number else now
        claim = folder / f".{name.format(stamp)}.claim"
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        try:
            if not (folder / name.format(stamp)).exists():
                yield stamp
                return
        finally:
            claim.unlink(missing_ok=True)
