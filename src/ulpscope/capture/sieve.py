"""Keeps only the calls that overflow: those that were given finite values and returned others.

Stands between the taps and the recorder. What a call was given is held until its results are known, not copied, unless the
call is about to overwrite it; a call without fault costs one reading of its results. What a call inside found is not counted
again for the calls around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from ulpscope.capture.recorder import Recorder
from ulpscope.errors import OverflowStop
from ulpscope.frameworks.base import Forward, OpenCall, ThreadState
from ulpscope.frameworks.torch.finiteness import FINITE, HAS_NAN, TorchFiniteness
from ulpscope.frameworks.torch.overflow_flag import OverflowFlag
from ulpscope.naming import MODULE, call_text
from ulpscope.records import CallId, PathStep, Phase, Role

Path = tuple[PathStep, ...]
_COMMUNICATION = "Distributed"
# In-place calls whose target is only written: what was there before has no part in the result.
_FILLS = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_", "trunc_normal_", "set_"}
)
# Functions that are -inf at 0 and never overflow: the answer is exact, and harmless if nothing comes of it.
_POLES = frozenset(
    {"log", "log2", "log10", "log1p", "logit", "log.default", "log2.default", "log10.default", "log1p.default"}
)
_PLAIN = frozenset({int, float, bool, str, type(None)})
_IN_PLACE: Path = ("inplace",)
_OVERWRITTEN = "overwritten by the call before it was known to overflow"


class _Held:
    """One leaf that a call was shown: by place, with what was known of it before the call."""

    __slots__ = ("before", "path", "produced", "role", "unread", "value", "version")

    def __init__(self, role: Role, path: Path, value: Any, unread: str | None, produced: bool) -> None:
        self.role = role
        self.path = path
        self.value = value
        self.unread = unread
        self.produced = produced
        self.version: int | None = None
        self.before: int | None = None


class _Watched:
    """A call that is under way."""

    __slots__ = ("bad", "fills", "found", "held", "mutates")

    def __init__(self, found: int, name: str) -> None:
        self.held: list[_Held] = []
        self.found = found
        self.bad = FINITE
        self.mutates = (
            (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
        )
        self.fills = name in _FILLS


class OverflowSieve:
    """An observer for the taps; `found` are the calls that overflowed, in the order they were seen.

    `limit` ends the program at that overflow with the exception that `ending` makes; -1 never does. `finish` is called
    before, so that the files are complete.
    """

    def __init__(
        self,
        recorder: Recorder,
        finiteness: TorchFiniteness,
        *,
        limit: int,
        flag: OverflowFlag | None,
        finish: Callable[[], None],
    ) -> None:
        self.found: list[CallId] = []
        self.ending: Callable[[list[CallId]], BaseException] = _stop
        self.state = recorder.state
        self.note = recorder.note
        self.trouble = recorder.trouble
        self.leave = recorder.leave
        self.wants_backward = recorder.wants_backward
        self._recorder = recorder
        self._finiteness = finiteness
        self._limit = limit
        self._flag = flag
        self._finish = finish
        self._over = False
        self._found_by_thread: Counter[int] = Counter()
        self._watched: dict[int, _Watched] = {}
        # Of this step: forward calls with results that are not finite; those whose backward was found already.
        self._spoilt: set[int] = set()
        self._blamed: set[int] = set()
        self._epoch = -1
        self._told = False

    @property
    def active(self) -> bool:
        return self._recorder.active and not self._over

    def enter(self, state: ThreadState) -> bool:
        """As the recorder's. Here the program ends: between two calls, where an exception unwinds like any other."""
        if len(self.found) == self._limit and not self._over and not state.busy:
            self._over = True
            self._finish()
            raise self.ending(self.found)
        return self._recorder.enter(state)

    def open_call(
        self, state: ThreadState, kind: str, name: str, frame: FrameType | None, *, phase: Phase = Phase.FORWARD
    ) -> OpenCall:
        call = self._recorder.open_call(state, kind, name, frame, phase=phase)
        if call.wanted:
            self._watch(call)
        return call

    def open_backward(self, state: ThreadState, forward: Forward, again: int) -> OpenCall:
        call = self._recorder.open_backward(state, forward, again)
        self._watch(call)
        return call

    def show(
        self,
        call: OpenCall,
        role: Role,
        path: Path,
        value: Any,
        *,
        unread: str | None = None,
        produced: bool = False,
    ) -> None:
        watched = self._watched.get(call.seq)
        if watched is None:
            return
        measurer = self._recorder.measurer
        if value is True and path == _IN_PLACE:
            self._copy_first(watched)
        if type(value) in measurer.leaf_types and unread is None:
            self._hold(call, watched, _Held(role, path, value, None, produced))
            return
        for sub, leaf in measurer.leaves(value):
            if unread is not None:
                measurer.unread(leaf, unread)
            self._hold(call, watched, _Held(role, (*path, *sub), leaf, unread, produced))

    def close_call(self, call: OpenCall) -> None:
        watched = self._watched.pop(call.seq, None)
        if watched is None:
            return
        if self._overflows(call, watched):
            self._keep(call, watched)
        call.values = []

    def close_raised(self, call: OpenCall, error: BaseException) -> None:
        self._watched.pop(call.seq, None)

    # --- judging ------------------------------------------------------------------------------------------------

    def _watch(self, call: OpenCall) -> None:
        if call.epoch != self._epoch:
            self._epoch = call.epoch
            self._watched.clear()
            self._spoilt.clear()
            self._blamed.clear()
            if self._flag is not None:
                self._flag.clear_npu_overflow_flag()
        self._watched[call.seq] = _Watched(self._found_by_thread[call.thread], call.name)

    def _hold(self, call: OpenCall, watched: _Watched, held: _Held) -> None:
        finiteness = self._finiteness
        if held.role is Role.OUTPUT:
            if held.unread is None and type(held.value) not in _PLAIN and self._flag is None:
                held.before = finiteness.of(held.value)
                watched.bad |= held.before
        elif held.unread is None and finiteness.is_tensor(held.value):
            if watched.mutates and held.path[0] == 0:
                held.value = finiteness.copy(held.value)
            else:
                held.version = finiteness.version(held.value)
                if call.kind == MODULE:  # something inside may overwrite it
                    held.before = finiteness.of(held.value)
        if call.phase is Phase.BACKWARD:
            # A gradient that somebody else refers to would be copied, not moved, into its parameter.
            held.value = finiteness.alias(held.value)
        watched.held.append(held)

    def _copy_first(self, watched: _Watched) -> None:
        """The call was asked to overwrite its first argument."""
        for held in watched.held:
            if held.path[0] == 0 and held.role is Role.INPUT and held.version is not None:
                held.value, held.version = self._finiteness.copy(held.value), None

    def _overflows(self, call: OpenCall, watched: _Watched) -> bool:
        if self._flag is not None:  # values saturate there, and reading them could raise the flag
            return self._raised_flag() and self._found_by_thread[call.thread] == watched.found
        if not watched.bad:
            return False
        self._spoilt.add(call.seq)
        if self._found_by_thread[call.thread] != watched.found:
            return False
        given = [held for held in watched.held if held.role is not Role.OUTPUT and not _is_target(held, watched)]
        if any(held.unread is not None for held in given) and watched.mutates and not watched.fills:
            return False  # part of it may still be as `empty` left it
        tensors = [held for held in given if self._finiteness.is_tensor(held.value)]
        if not tensors or (call.phase is Phase.BACKWARD and call.origin in self._spoilt | self._blamed):
            return False
        inputs = FINITE
        for held in given:
            inputs |= self._given(held)
        if inputs:
            self._tell_source(call)
            # Masks are made of inf on purpose; nan from them is an overflow like any other.
            return not self.found and not inputs & HAS_NAN and bool(watched.bad & HAS_NAN)
        if call.name in _POLES and call.phase is Phase.FORWARD and not watched.bad & HAS_NAN:
            self._spoilt.discard(call.seq)
            self.note(f"{_name(call)} is infinite where its input is 0; that is exact, and counts if nan comes of it")
            return False
        if call.kind == _COMMUNICATION:
            self.note(
                f"{_name(call)} brought values that are not finite; another rank gave them, or the sum overflowed"
            )
            return False
        return watched.mutates or not self._is_view(watched, tensors)

    def _given(self, held: _Held) -> int:
        """What an input held before the call."""
        if held.unread is not None:
            return FINITE
        if held.version is not None and held.version != self._finiteness.version(held.value):
            return HAS_NAN if held.before is None else held.before  # nobody is accused of what is not known
        return self._finiteness.of(held.value)

    def _is_view(self, watched: _Watched, tensors: list[_Held]) -> bool:
        """Whether what is wrong lies in the memory of an input, and so was not computed here."""
        wrong = [held.value for held in watched.held if held.role is Role.OUTPUT and held.before]
        others = [held.value for held in tensors if held.version == self._finiteness.version(held.value)]
        return all(self._finiteness.shares(value, others) for value in wrong)

    def _raised_flag(self) -> bool:
        assert self._flag is not None
        if not self._flag.get_npu_overflow_flag():
            return False
        self._flag.clear_npu_overflow_flag()
        return True

    def _tell_source(self, call: OpenCall) -> None:
        if not self.found and not self._spoilt - {call.seq} and not self._told:
            self._told = True
            self.note(f"{_name(call)} was given values that are not finite, and no recorded call had made them")

    # --- keeping ------------------------------------------------------------------------------------------------

    def _keep(self, call: OpenCall, watched: _Watched) -> None:
        recorder = self._recorder
        self.found.append(CallId(call.kind, call.name, call.index, call.phase, call.again))
        self._found_by_thread[call.thread] += 1
        if call.phase is Phase.BACKWARD and call.origin >= 0:
            self._blamed.add(call.origin)
        for held in watched.held:
            unread = held.unread
            if held.version is not None and held.version != self._finiteness.version(held.value):
                unread = _OVERWRITTEN
            recorder.show(call, held.role, held.path, held.value, unread=unread, produced=held.produced)
        recorder.close_call(call)
        if self._flag is not None:
            self._flag.clear_npu_overflow_flag()


def _is_target(held: _Held, watched: _Watched) -> bool:
    first = next(iter(held.path), None)
    return first == "out" or (watched.fills and first == 0)


def _name(call: OpenCall) -> str:
    return call_text(CallId(call.kind, call.name, call.index, call.phase))


def _stop(found: list[CallId]) -> BaseException:
    times = f"{len(found)} time{'s'[: len(found) > 1]}"
    return OverflowStop(
        f"[overflow {times}]: the program ends here, as it was asked to; the last was {call_text(found[-1])}"
    )
