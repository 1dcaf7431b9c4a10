"""Threads of our own, on which nothing is observed.

A finalizer of the program's runs on whichever thread collects garbage. If one that calls a model could be recorded on the
thread that writes the dump, that thread would wait for whoever waits for it.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

_here = threading.local()
# Seconds.
_BEGINS_WITHIN = 5


class NoThreadError(RuntimeError):
    """This process may not have another thread."""


class OwnThread:
    """Does `work(*args)`. The program does not wait for it at its end.

    No `threading.Thread`: where a signal handler raises, that one can lose a thread that it has just started, or take one
    that is at work for ended. Here each answer is one step."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        self._work, self._args = work, args
        self._process: int | None = None
        self._called_at = 0.0
        self._has_begun = self._is_over = False
        self._end: SimpleQueue[None] = SimpleQueue()

    def start(self) -> None:
        """Raises NoThreadError where none is to be had."""
        self._called_at, self._process = time.monotonic(), os.getpid()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # a signal handler's, from a frame of its own
            raise NoThreadError(str(error)) from None

    def is_working(self) -> bool:
        """In a forked child it is not. One that was called but has not come was interrupted before."""
        here = self._process == os.getpid() and not self._is_over
        return here and (self._has_begun or time.monotonic() < self._called_at + _BEGINS_WITHIN)

    def join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.is_working() and time.monotonic() < until:
            with suppress(Empty):
                self._end.get(timeout=0.1)

    def _run(self) -> None:
        _here.thread, self._has_begun = self, True
        try:
            self._work(*self._args)
        finally:
            self._is_over = True
            self._end.put(None)


def here() -> OwnThread | None:
    """The one that this code runs on."""
    return getattr(_here, "thread", None)


def is_own() -> bool:
    """Whether this code runs on such a thread."""
    return here() is not None


class Job:
    """Something for a thread to do, and what it raised. Waits by a SimpleQueue, which is C: an exception of a handler cannot
    leave the lock of an Event behind."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self._work, self._args = work, args
        self._bell: SimpleQueue[None] = SimpleQueue()
        self.is_done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """Once, however often it is asked for."""
        if self.is_done:
            return
        try:
            self._work(*self._args)
        except BaseException as error:  # the border of a thread: whoever waits gets it
            self.error = error
        self.is_done = True
        self._bell.put(None)

    def wait(self) -> None:
        """For a moment, or until it is done."""
        with suppress(Empty):
            self._bell.get(timeout=0.1)
