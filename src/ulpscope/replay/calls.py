"""The observer of a live ledger: gives every call its name, index, module and line, and records nothing."""

from __future__ import annotations

import itertools
import sysconfig
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ulpscope.frameworks.base import Forward, OpenCall, ThreadState
from ulpscope.frameworks.threads import Threads
from ulpscope.model.names import MODULE
from ulpscope.model.records import PathStep, Phase, Role

_OWN = str(Path(__file__).resolve().parent.parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
Source = tuple[str, int, str]


class CallNames(Threads):
    """Counts calls as a capture does, so that both call them the same."""

    aim = "judge"

    def __init__(self, in_torch: Callable[[str], bool], on_missed: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        self.active = False
        # What ran and was not judged, and how often.
        self.unseen: dict[str, int] = {}
        self._on_missed = on_missed
        self.ignored: Callable[[FrameType], bool] | None = None
        self._in_torch = in_torch
        self._sources: dict[tuple[CodeType, int], int] = {}
        self._lines: list[Source] = []
        self._outside: dict[str, bool] = {}
        self._outermost: dict[int, str] = {}
        self.begin_step()

    def missed(self, text: str) -> None:
        count = self.unseen[text] = self.unseen.get(text, 0) + 1
        if count == 1:
            self.note(text)
            self._on_missed(text)

    def trouble(self, where: str, error: BaseException) -> None:
        super().trouble(where, error)
        self.missed(self.lost or "a call")

    def begin_step(self) -> None:
        self._counters: defaultdict[tuple[str, str, Phase], itertools.count[int]] = defaultdict(itertools.count)

    def source(self, number: int) -> Source | None:
        return self._lines[number] if number >= 0 else None

    def open_call(
        self, state: ThreadState, kind: str, name: str, frame: FrameType | None, *, phase: Phase = Phase.FORWARD
    ) -> OpenCall:
        call = OpenCall(kind, name, next(self._counters[kind, name, phase]), phase)
        call.wanted = False
        if kind == MODULE and not state.modules:
            self._outermost[state.number] = name.rpartition(".")[2]
        if frame is not None:
            call.stack = self._line(frame)
        return call

    def outermost(self, state: ThreadState) -> str:
        """The class of the module that runs on this thread, the outermost one."""
        return self._outermost.get(state.number, "")

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

    def _line(self, frame: FrameType) -> int:
        """The innermost line outside of torch, the standard library and us."""
        walk: FrameType | None = frame
        while walk is not None and not self._is_outside(walk.f_code.co_filename):
            walk = walk.f_back
        walk = walk or frame
        key = (walk.f_code, walk.f_lasti)
        found = self._sources.get(key)
        if found is None:
            code = walk.f_code
            self._lines.append((code.co_filename, walk.f_lineno or 0, getattr(code, "co_qualname", code.co_name)))
            found = self._sources[key] = len(self._lines) - 1  # after it: a signal handler may raise between the two
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
