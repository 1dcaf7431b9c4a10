"""The observer of a live ledger: gives every call its name, index, module and line, and records nothing."""

from __future__ import annotations

import itertools
import logging
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ulpscope.frameworks.base import Forward, OpenCall, ThreadState
from ulpscope.records import PathStep, Phase, Role

log = logging.getLogger(__name__)
_OWN = str(Path(__file__).resolve().parent.parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
Source = tuple[str, int, str]


class CallNames:
    """Counts calls as a capture does, so that both call them the same."""

    def __init__(self, in_torch: Callable[[str], bool]) -> None:
        self.active = False
        self.fast = None
        self.notes: dict[str, int] = {}
        self.gate = threading.RLock()
        self.ignored: Callable[[FrameType], bool] | None = None
        self._in_torch = in_torch
        self._local = threading.local()
        self._threads = itertools.count()
        self._sources: dict[tuple[CodeType, int], int] = {}
        self._lines: list[Source] = []
        self._outside: dict[str, bool] = {}
        self.begin_step()

    def begin_step(self) -> None:
        self._counters: defaultdict[tuple[str, str, Phase], itertools.count[int]] = defaultdict(itertools.count)

    def source(self, number: int) -> Source | None:
        return self._lines[number] if number >= 0 else None

    def state(self) -> ThreadState:
        try:
            found: ThreadState = self._local.state
        except AttributeError:
            found = self._local.state = ThreadState(next(self._threads))
        return found

    def enter(self, state: ThreadState) -> bool:
        if state.busy:
            return False
        self.gate.acquire()
        state.busy = True
        return True

    def leave(self, state: ThreadState) -> None:
        state.busy = False
        self.gate.release()

    def open_call(
        self, state: ThreadState, kind: str, name: str, frame: FrameType | None, *, phase: Phase = Phase.FORWARD
    ) -> OpenCall:
        call = OpenCall(kind, name, next(self._counters[kind, name, phase]), phase)
        call.wanted = False
        if frame is not None:
            call.stack = self._line(frame)
        return call

    def open_backward(self, state: ThreadState, forward: Forward, again: int) -> OpenCall:
        return OpenCall(forward[0], forward[1], forward[2], Phase.BACKWARD)

    def show(
        self,
        call: OpenCall,
        role: Role,
        path: tuple[PathStep, ...],
        value: Any,
        *,
        unread: str | None = None,
        produced: bool = False,
    ) -> None:
        pass

    def close_call(self, call: OpenCall) -> None:
        pass

    def close_raised(self, call: OpenCall, error: BaseException) -> None:
        pass

    def wants_backward(self, call: OpenCall) -> bool:
        return False

    def note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1

    def trouble(self, where: str, error: BaseException) -> None:
        text = f"could not judge {where}: {type(error).__name__}: {error}"[:500]
        self.note(text)
        if self.notes[text] == 1:
            log.warning("%s", text, exc_info=log.isEnabledFor(logging.DEBUG))

    def _line(self, frame: FrameType) -> int:
        """The innermost line outside of torch, the standard library and us."""
        walk: FrameType | None = frame
        while walk is not None and not self._is_outside(walk.f_code.co_filename):
            walk = walk.f_back
        walk = walk or frame
        key = (walk.f_code, walk.f_lasti)
        found = self._sources.get(key)
        if found is None:
            found = self._sources[key] = len(self._lines)
            code = walk.f_code
            self._lines.append((code.co_filename, walk.f_lineno or 0, getattr(code, "co_qualname", code.co_name)))
        return found

    def _is_outside(self, file: str) -> bool:
        found = self._outside.get(file)
        if found is None:
            found = not (
                file.startswith(_OWN)
                or self._in_torch(file)
                or (file.startswith(_STDLIB) and "site-packages" not in file)
                or file.startswith("<")
            )
            self._outside[file] = found
        return found
