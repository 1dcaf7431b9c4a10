"""What each thread is doing, the lock it holds while our own code runs on it, and what becomes of errors of ours there."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ulpscope.frameworks.base import ThreadState
from ulpscope.frameworks.interruption import freed, is_meant_for_the_program, new_gate, release
from ulpscope.model.background import is_own

log = logging.getLogger(__name__)
# Seconds that a thread waits for another before it asks whether that one still needs the gate.
_PATIENCE = 2.0
# Above this are the numbers of threads that nobody numbered where they were begun: of torch's engine, say.
UNNUMBERED = 1_000_000


@contextlib.contextmanager
def at_work(state: ThreadState) -> Iterator[None]:
    """Our own code runs on a thread, and what happens there meanwhile is not the program's. Unlike `enter` this takes no lock,
    which would be held while a thread of a device runs that may wait for it."""
    busy, state.busy = state.busy, True
    try:
        yield
    finally:
        state.busy = busy


class Threads:
    """The part of an observer that is the same for all of them. `aim` is what it was going to do with a call."""

    aim = "record"

    def __init__(self) -> None:
        self.fast: Any = None
        self.notes: dict[str, int] = {}
        self._told: set[str] = set()
        # Whether calls that are not recorded are a warning: the files of the older tools have nobody who shows notes.
        self.warns = False
        # What could not be recorded first: then the dump is not complete.
        self.lost: str | None = None
        # Held by every thread while our code runs on it, and while a step ends: numbers belong to one dump.
        self.gate = new_gate()
        self._local = threading.local()
        self._threads = itertools.count()

    def state(self) -> ThreadState:
        try:
            found: ThreadState = self._local.state
        except AttributeError:
            number = next(self._threads)
            found = self._local.state = ThreadState(UNNUMBERED + number if number else 0)
            found.free, found.busy = self.freeing(), is_own()
        return found

    def enter(self, state: ThreadState) -> bool:
        if state.busy:
            return False
        state.busy = True
        self.wait_for_gate()
        return True

    def wait_for_gate(self) -> None:
        while not self.gate.acquire(True, _PATIENCE):
            if self.fast is not None and self.fast.in_c:
                continue  # no frame tells of C
            self.gate = freed(self.gate)
            if self.fast is not None:
                self.fast.give(gate=self.gate)

    def leave_to_parent(self) -> None:
        """In a forked child: nobody is left who would give up the gate."""
        self.gate = new_gate()
        if self.fast is not None:
            self.fast.give(gate=self.gate)

    def leave(self, state: ThreadState) -> None:
        state.busy = False
        self.gate.release()

    def freeing(self) -> Callable[[], None]:
        """What gives up the gate, if there still is one: a thread keeps its state longer."""
        reference = weakref.ref(self)

        def free() -> None:
            found = reference()
            if found is not None:
                release(found.gate)

        return free

    def note(self, text: str, level: int = logging.INFO) -> None:
        """Something the reader should know, told to the user once."""
        self.notes[text] = self.notes.get(text, 0) + 1
        if text not in self._told:
            self._told.add(text)
            log.log(level, "%s", text)

    def missed(self, text: str) -> None:
        """Something ran here that was not seen."""
        self.note(text, logging.WARNING if self.warns else logging.INFO)

    def trouble(self, where: str, error: BaseException) -> None:
        """Our code failed inside a hook: the program goes on, and what is missing is said. What a signal handler of the
        program raised, or another thread put here, is raised again: it is meant for the program."""
        if is_meant_for_the_program(error):
            raise error
        try:
            text = f"could not {self.aim} {where}: {type(error).__name__}: {error}"[:500]
            self.lost = self.lost or text
            count = self.notes[text] = self.notes.get(text, 0) + 1
            if count == 1:
                log.warning("%s", text, exc_info=log.isEnabledFor(logging.DEBUG))
        except (
            RecursionError,
            MemoryError,
        ):  # the hook border: even telling may fail, where the stack has no room for it
            self._lose_untold()
        except Exception as untold:
            if is_meant_for_the_program(untold):
                raise
            self._lose_untold()

    def _lose_untold(self) -> None:
        self.lost = f"could not {self.aim} a call, nor say why"
        self.notes[self.lost] = 1
