"""Room on the stack for frames of ours.

Each module call that is watched takes a few frames more than a bare one, so a deeply nested model would meet Python's limit
of recursion where it did not before. Below some depth the limit is raised by as many frames as are ours, and is the
program's own again when the deep call returns. A program that recurses without end still meets it.
"""

from __future__ import annotations

import sys
import threading

# Looked at every so many nested modules.
STRETCH = 16
_FRAMES_A_MODULE = 4
_FRAMES_AT_THE_END = 200


class Room:
    """The limit of recursion, and what we added to it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may call a model in here
        self._threads = 0
        self._own = 0
        self._raised = 0

    def make(self, depth: int) -> None:
        """This thread is `depth` modules deep."""
        with self._lock:
            if depth == STRETCH:
                self._threads += 1
            limit = sys.getrecursionlimit()
            if limit != self._raised:
                self._own = limit  # the program's, or what it has set since
            wanted = self._own + depth * _FRAMES_A_MODULE + _FRAMES_AT_THE_END
            if wanted > limit:
                self._raised = wanted
                sys.setrecursionlimit(wanted)

    def give_back(self) -> None:
        """The deep call of this thread is over."""
        with self._lock:
            self._threads -= 1
            if self._threads == 0 and sys.getrecursionlimit() == self._raised:
                try:
                    sys.setrecursionlimit(self._own)
                except RecursionError:
                    return  # this thread is deeper than the limit by other ways; the next return will do
                self._raised = 0
