"""Keeps only the calls that overflow: those that were given finite values and returned others.

Stands between the taps and the recorder. What a call was given is held until its results are known, not copied, unless a
call is about to overwrite it; a call without fault costs one reading of its results. What a call inside found is not counted
again for the calls around it.

On the CPU a call is judged when it ends. Another device answers later: its calls wait in a queue with what they hold, and are
judged in the order they ended, without anybody waiting for the device, except before an optimizer writes the weights, at the
end of a step, and where more is held than there is room for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from ulpscope.capture.recorder import Recorder
from ulpscope.frameworks.base import Forward, OpenCall, ThreadState
from ulpscope.frameworks.torch.finiteness import TorchFiniteness
from ulpscope.frameworks.torch.npu import KernelsOfOverflows
from ulpscope.frameworks.torch.overflow_answers import FINITE, HAS_NAN, Answer
from ulpscope.frameworks.torch.overflow_flag import OverflowFlag
from ulpscope.model.errors import OverflowStop
from ulpscope.model.names import MODULE, OPTIMIZER, call_text
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import CallId, PathStep, Phase, Role

Path = tuple[PathStep, ...]
_COMMUNICATION, _KERNEL = "Distributed", "Aten"
# Where running statistics are given to batch and instance norms, which write them behind torch's back.
_FIRST, _STATISTICS = (0,), ((3, 4), (1, 2))
_PLAIN = frozenset({int, float, bool, str, type(None)})
_IN_PLACE: Path = ("inplace",)
_MADE = 4096
_OVERWRITTEN = "overwritten before the call was known to overflow"


class _Held:
    """One leaf that a call was shown: by place, with what was known of it before the call."""

    __slots__ = ("before", "path", "place", "produced", "role", "unread", "value", "version")

    def __init__(self, role: Role, path: Path, value: Any, unread: str | None, produced: bool) -> None:
        self.role = role
        self.path = path
        self.value = value
        self.unread = unread
        self.produced = produced
        self.version: int | None = None
        self.before: int | Answer | None = None
        self.place: tuple[int, int] | None = None  # while it waits: the memory it has in common with the program


class _Watched:
    """A call that is under way, or waits to be judged."""

    __slots__ = ("bad", "closed", "fills", "harmless", "held", "mutates", "opened", "takes_notes", "waits", "written")

    def __init__(self, opened: int, call: OpenCall) -> None:
        self.held: list[_Held] = []
        self.opened = opened
        self.closed = -1
        self.bad = FINITE
        self.waits = False
        name, plain = call.name, call.name.partition(".")[0]  # a kernel has its overload behind a dot
        # Gradients are not overwritten, whatever the forward call did; kernels of a backward are calls of their own.
        self.mutates = (call.phase is Phase.FORWARD or call.kind == _KERNEL) and (
            (plain.endswith("_") and not plain.endswith("__")) or name.startswith("__i") or name == "__setitem__"
        )
        known = traits(plain)
        self.fills = Trait.FILLS in known
        self.harmless = Trait.MOVES in known
        self.takes_notes = Trait.NOTES in known
        self.written: tuple[PathStep, ...] = _FIRST if self.mutates else ()
        if call.phase is Phase.FORWARD and ("batch_norm" in plain or "instance_norm" in plain):
            self.written = _STATISTICS[call.kind == "Functional"]


class OverflowSieve:
    """An observer for the taps; `found` are the calls that overflowed, in the order they ended.

    `limit` ends the program at that overflow with the exception that `ending` makes; -1 never does. It is raised where the
    call that made the number full is left, or where its device is heard. `finish` is called before, so that the files are
    complete. With `patient` nothing is raised until `end_if_full`.
    """

    def __init__(
        self,
        recorder: Recorder,
        finiteness: TorchFiniteness,
        *,
        limit: int,
        flag: OverflowFlag | None,
        finish: Callable[[], None],
        poles: bool = False,
    ) -> None:
        self.fast = None
        self.found: list[CallId] = []
        self.ending: Callable[[list[CallId]], BaseException] = _stop
        self.patient = False
        self.kernels: KernelsOfOverflows | None = None
        self.state = recorder.state
        self.note = recorder.note
        self.missed = recorder.missed
        self.trouble = recorder.trouble
        self.enter = recorder.enter
        self.leave = recorder.leave
        self.wants_backward = recorder.wants_backward
        self._recorder = recorder
        self._finiteness = finiteness
        self._limit = limit
        self._flag = flag
        self._finish = finish
        self._counts_poles = poles
        self._over = False
        self._clock = 0
        self._found_at: dict[int, int] = {}  # by thread: when the last call that overflowed ended
        self._watched: dict[int, _Watched] = {}
        self._waiting: deque[tuple[OpenCall, _Watched]] = deque()
        self._lent: dict[int, deque[_Held]] = {}  # by memory: what waiting calls hold of it
        self._bytes = 0
        # By identity: tensors that calls made, with their version and what is known of them, or will be.
        self._made: dict[int, tuple[weakref.ref[Any], int | None, int | Answer]] = {}
        # Of this step: forward calls with results that are not finite; those whose backward was found already.
        self._spoilt: set[int] = set()
        self._blamed: set[int] = set()
        # Forward calls of this step that are infinite at a pole; when the last call of a thread that is so ended; names that were told.
        self._at_pole: set[int] = set()
        self._pole_at: dict[int, int] = {}
        self._poles_told: set[str] = set()
        self._epoch = -1
        self._told = False

    @property
    def active(self) -> bool:
        return self._recorder.active and not self._over

    @property
    def full(self) -> bool:
        return len(self.found) == self._limit

    def end_if_full(self) -> None:
        """Ends the program if as many calls overflowed as were allowed, and it was not ended before."""
        if self.full and not self._over:
            self._over = True
            self._waiting.clear()
            self._lent.clear()
            self._finish()
            raise self.ending(self.found)

    def open_call(
        self, state: ThreadState, kind: str, name: str, frame: FrameType | None, *, phase: Phase = Phase.FORWARD
    ) -> OpenCall:
        if kind == OPTIMIZER:
            self._judge(wait=True)  # it is about to write what they hold
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
        self._clock += 1
        watched.closed = self._clock
        if watched.waits:
            self._queue(call, watched)
            # A call whose kernels are wanted must be run again before anything else is.
            self._judge(wait=self.kernels is not None)
        else:
            if watched.bad:
                self._judge(wait=True)  # those before it come first
            if not self.full and self._overflows(call, watched):
                self._keep(call, watched)
        call.values = []

    def close_raised(self, call: OpenCall, error: BaseException) -> None:
        self._watched.pop(call.seq, None)

    def release(self, value: Any) -> None:
        """Lets go of a tensor that torch is about to exchange for another, which it does only if nobody refers to it."""
        self._judge(wait=True)
        self._made.pop(id(value), None)

    # --- waiting ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for every device and judges what is left."""
        state = self.state()
        entered = self._recorder.enter(state)
        try:
            self._judge(wait=True)
        finally:
            if entered:
                self._recorder.leave(state)

    def _judge(self, *, wait: bool) -> None:
        """Judges the calls whose devices have answered; with `wait`, all."""
        waiting = self._waiting
        while waiting and not self.full:
            call, watched = waiting[0]
            over = wait or self._bytes > self._finiteness.room
            for held in watched.held:
                if isinstance(held.before, Answer):
                    bits = held.before.bits(wait=over)
                    if bits is None:
                        return
                    held.before = bits
                    if held.role is Role.OUTPUT:
                        watched.bad |= bits
            waiting.popleft()
            for held in watched.held:
                self._give_back(held)
            if self._overflows(call, watched):
                self._keep(call, watched)

    def _queue(self, call: OpenCall, watched: _Watched) -> None:
        for held in watched.held:
            held.place = self._finiteness.place(held.value)
            if held.place is not None:
                self._bytes += held.place[1]
                if held.role is Role.OUTPUT:
                    held.version = self._finiteness.version(held.value)
                self._lent.setdefault(held.place[0], deque()).append(held)
        self._waiting.append((call, watched))

    def _give_back(self, held: _Held) -> None:
        if held.place is not None:
            self._bytes -= held.place[1]
            lent = self._lent.get(held.place[0])
            if lent and lent[0] is held:
                lent.popleft()
                if not lent:
                    del self._lent[held.place[0]]

    def _copied(self, value: Any) -> Any:
        """A copy of what a call is about to overwrite, for it and for the waiting calls that hold the same memory."""
        finiteness = self._finiteness
        copy = finiteness.copy(value)
        place = finiteness.place(value) if self._lent else None
        for held in self._lent.pop(place[0], ()) if place is not None else ():
            same = finiteness.same(held.value, value)
            held.value, held.version = (copy if same else finiteness.copy(held.value)), None
        return copy

    def _is_changed(self, held: _Held) -> bool:
        """Whether somebody has written to what is held, or taken its memory away."""
        if held.version is None:
            return False
        finiteness = self._finiteness
        return held.version != finiteness.version(held.value) or (
            held.place is not None and held.place != finiteness.place(held.value)
        )

    # --- judging ------------------------------------------------------------------------------------------------

    def _watch(self, call: OpenCall) -> None:
        if call.epoch != self._epoch:
            self._epoch = call.epoch
            self._watched.clear()
            self._made.clear()
            self._spoilt.clear()
            self._blamed.clear()
            self._at_pole.clear()
            if self._flag is not None:
                self._flag.clear_npu_overflow_flag()
        self._clock += 1
        self._watched[call.seq] = _Watched(self._clock, call)

    def _hold(self, call: OpenCall, watched: _Watched, held: _Held) -> None:
        finiteness = self._finiteness
        if held.role is Role.OUTPUT:
            counts = not watched.takes_notes or not any(held.path)
            if counts and held.unread is None and type(held.value) not in _PLAIN and self._flag is None:
                self._ask(watched, held, known=call.phase is Phase.FORWARD and self._stays_finite(watched, held))
        elif held.unread is None and finiteness.is_tensor(held.value):
            self._recall(held)
            if held.path[0] in watched.written and not self._is_harmless(watched, held):
                held.value = self._copied(held.value)
            else:
                if held.path[0] == "out":
                    self._copy_target(watched, held.value)
                held.version = finiteness.version(held.value)
                # Something inside a module may overwrite what it was given.
                if call.kind == MODULE and held.before is None and self._flag is None:
                    self._ask(watched, held)
        if call.phase is Phase.BACKWARD:
            # A gradient that somebody else refers to would be copied, not moved, into its parameter.
            held.value = finiteness.alias(held.value)
        watched.held.append(held)

    def _stays_finite(self, watched: _Watched, held: _Held) -> bool:
        """Whether a result needs no reading: a CPU has only moved what is known to be finite. Devices are not trusted."""
        finiteness = self._finiteness
        return (
            watched.harmless
            and finiteness.is_on_cpu(held.value)
            and all(
                given.before == FINITE or finiteness.is_always_finite(given.value)
                for given in watched.held
                if given.role is not Role.OUTPUT
            )
        )

    def _ask(self, watched: _Watched, held: _Held, *, known: bool = False) -> None:
        held.before = answer = FINITE if known else self._finiteness.ask(held.value)
        if isinstance(answer, Answer):
            watched.waits = True
        elif held.role is Role.OUTPUT:
            watched.bad |= answer
        if held.role is Role.OUTPUT and self._finiteness.is_tensor(held.value):
            if len(self._made) > _MADE:
                self._made.clear()
            self._made[id(held.value)] = (weakref.ref(held.value), self._finiteness.version(held.value), answer)

    def _is_harmless(self, watched: _Watched, held: _Held) -> bool:
        """Whether a call that overwrites this need not be given a copy of it: nobody waits for it, and what is made of it
        cannot overflow, being whole numbers, or cannot unless the kernel is wrong, and it is known."""
        if self._lent:
            return False
        return (watched.harmless and held.before is not None) or self._finiteness.is_always_finite(held.value)

    def _recall(self, held: _Held) -> None:
        """What is known of an input because it was the result of a call, and nobody wrote to it since."""
        made = self._made.get(id(held.value)) if self._made else None
        if made is not None and made[0]() is held.value and made[1] == self._finiteness.version(held.value):
            held.before = made[2]

    def _copy_target(self, watched: _Watched, target: Any) -> None:
        """The call writes its result over `target`, which may be an argument too."""
        if self._lent:
            self._copied(target)
        for held in watched.held:
            if held.value is target:
                held.value, held.version = self._copied(target), None

    def _copy_first(self, watched: _Watched) -> None:
        """The call was asked to overwrite its first argument."""
        for held in watched.held:
            if (
                held.path[0] == 0
                and held.role is Role.INPUT
                and held.version is not None
                and not self._is_harmless(watched, held)
            ):
                held.value, held.version = self._copied(held.value), None

    def _overflows(self, call: OpenCall, watched: _Watched) -> bool:
        if self._flag is not None:  # values saturate there, and reading them could raise the flag
            return self._raised_flag() and not self._found_inside(call, watched)
        if not watched.bad:
            return False
        self._spoilt.add(call.seq)
        if self._found_inside(call, watched):
            return False
        given = [held for held in watched.held if held.role is not Role.OUTPUT and not _is_target(held, watched)]
        if any(held.unread is not None for held in given) and watched.mutates and not watched.fills:
            return False  # part of it may still be as `empty` left it
        tensors = [held for held in given if self._finiteness.is_tensor(held.value)]
        if not tensors or (call.phase is Phase.BACKWARD and call.origin in self._spoilt | self._blamed):
            return False
        inputs = FINITE
        for held in sorted(given, key=lambda held: held.before is None):
            if not inputs & HAS_NAN:  # else it is clear already
                inputs |= self._given(held)
        if inputs:
            self._tell_source(call)
            # Masks are made of inf on purpose; nan from them is an overflow like any other.
            return not self.found and not inputs & HAS_NAN and bool(watched.bad & HAS_NAN)
        if not self._counts_poles and not watched.bad & HAS_NAN and self._is_pole(call, watched, given):
            self._spoilt.discard(call.seq)
            self._at_pole.add(call.seq)
            self._pole_at[call.thread] = watched.closed
            return False
        if call.kind == _COMMUNICATION:
            self.note(
                f"{_name(call)} brought values that are not finite; another rank gave them, or the sum overflowed"
            )
            return False
        return watched.mutates or not self._is_view(watched, tensors)

    def _is_pole(self, call: OpenCall, watched: _Watched, given: list[_Held]) -> bool:
        """Whether infinity is the exact answer: harmless, if nothing comes of it. Told once for each function."""
        if self._pole_at.get(call.thread, -1) > watched.opened:
            return True  # told of a call inside
        finiteness, forward = self._finiteness, call.phase is Phase.FORWARD
        if any(self._is_changed(held) for held in given):
            return False
        if forward or call.kind == _KERNEL:
            read = [(held.path, held.value) for held in watched.held if held.role is Role.INPUT]
            made = [held.value for held in watched.held if held.role is Role.OUTPUT]
            found = finiteness.has_pole(call.kind, call.name, read, made)
        else:
            found = call.origin in self._at_pole or finiteness.slope_has_pole(call.name, [held.value for held in given])
        told = f"{call.kind}.{call.name}.{call.phase.value}"
        if found and told not in self._poles_told:
            self._poles_told.add(told)
            self.note(f"{_name(call)} is infinite at a pole, as 1/0 is: that is exact, and counts if nan comes of it")
        return found

    def _found_inside(self, call: OpenCall, watched: _Watched) -> bool:
        return self._found_at.get(call.thread, -1) > watched.opened

    def _given(self, held: _Held) -> int:
        """What an input held before the call."""
        if held.unread is not None:
            return FINITE
        if isinstance(held.before, int):
            return held.before
        # Nobody is accused of what is not known.
        return HAS_NAN if self._is_changed(held) else self._finiteness.of(held.value)

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
        self._found_at[call.thread] = watched.closed
        if call.phase is Phase.BACKWARD and call.origin >= 0:
            self._blamed.add(call.origin)
        for held in watched.held:
            unread = _OVERWRITTEN if held.unread is None and self._is_changed(held) else held.unread
            recorder.show(call, held.role, held.path, held.value, unread=unread, produced=held.produced)
        recorder.close_call(call)
        if self.kernels is not None and call.phase is Phase.FORWARD:
            self.kernels.repeat(call, _name(call))
        if self._flag is not None:
            self._flag.clear_npu_overflow_flag()
        if self.full:
            self.leave = self._leave_for_good

    def _leave_for_good(self, state: ThreadState) -> None:
        self._recorder.leave(state)
        if not self.patient:
            self.end_if_full()


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
