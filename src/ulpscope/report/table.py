"""What every table on disk is made of: cells, rows, sheets, and a file that is there whole or not at all.

The writers (xlsx.py, csv.py) take rows as they come and hold a few hundred of them; they judge nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
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
