"""Everything ulpscope raises on purpose.

UlpscopeError     (exit code 70)
├── ConfigError    the options or the configuration file are wrong (exit code 2)
├── CaptureError   a capture was asked for that cannot be made (exit code 2)
│   ├── FolderTakenError
│   └── NoRoomError
├── OverflowStop   as many calls overflowed as were to end the program (exit code 1)
└── DumpError      a dump cannot be read, or does not hold what was asked (exit code 3)

A message says what is wrong, shows the value and says what to do. Exit code 1 is an answer, "they differ", so nothing else ends with
it: what nobody expected is one line and exit code 70.
"""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable, Sequence

CRASHED = 70
TRACEBACK_VARIABLE = "ULPSCOPE_TRACEBACK"


class UlpscopeError(Exception):
    """Base of all errors that ulpscope raises on purpose."""

    exit_code = CRASHED


class ConfigError(UlpscopeError):
    """One or more mistakes in the configuration, all of them at once."""

    exit_code = 2

    def __init__(self, problems: Sequence[str], where: str = "") -> None:
        self.problems = list(problems)
        place = f"{where}: " if where else ""
        lines = [place + problem for problem in self.problems]
        if len(lines) > 1:
            lines.append(f"{len(lines)} problems, nothing was done")
        super().__init__("\n".join(lines))


class CaptureError(UlpscopeError):
    """A capture that cannot be made as asked."""

    exit_code = 2


class FolderTakenError(CaptureError):
    """The folder for a dump exists already."""


class NoRoomError(CaptureError):
    """The place is as it should be, but the disk is full, a limit is reached, or something else has run out."""


# What the program could go on without; another place would not be asked for.
RUN_OUT = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO}
)


def cannot(what: str, error: OSError) -> CaptureError:
    """What to raise where the system refused something that a capture needs."""
    advice = "free some, or choose another folder" if error.errno in RUN_OUT else "choose another folder"
    kind = NoRoomError if error.errno in RUN_OUT else CaptureError
    return kind(f"cannot {what}: {error.strerror}; {advice}")


class OverflowStop(UlpscopeError):
    """The program is ended because as many calls overflowed as were allowed."""

    exit_code = 1


class DumpError(UlpscopeError):
    """A dump that cannot be read, or does not hold what was asked for."""

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence naming the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def crash_text(error: BaseException) -> str:
    """One line about an error that nobody expected, and how to see where it was; with the variable set, its traceback."""
    if os.environ.get(TRACEBACK_VARIABLE):
        return "".join(traceback.format_exception(error)).rstrip()
    what = " ".join(str(error).split())[:500]
    return (
        f"a mistake in ulpscope, nothing is known: {type(error).__name__}{': ' if what else ''}{what}; "
        f"{TRACEBACK_VARIABLE}=1 shows where, please report it"
    )
