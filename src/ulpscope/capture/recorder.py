"""The observer of all taps: turns what they show into rows of a dump. Holds no tensor, raises nothing."""

from __future__ import annotations

import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable
from struct import Struct
from types import FrameType
from typing import Any

from ulpscope.capture.selection import Selection
from ulpscope.capture.stacks import Stacks
from ulpscope.frameworks.base import Forward, Measurer, OpenCall, PathOfCode, Shared, ThreadState
from ulpscope.frameworks.threads import Threads
from ulpscope.model.background import is_own
from ulpscope.model.records import PathStep, Phase, Role
from ulpscope.native.schema import CALL, NONE32, NONE64, PHASE_NUMBER, PHASES, RAISED, RECOMPUTED, ROLES, VALUE
from ulpscope.store.writer import DumpWriter

log = logging.getLogger(__name__)
_FIRST: tuple[PathStep, ...] = (0,)
_CLOSED: list[int] = []
_ROLE_NAMES = {role: role.value for role in Role}


class Recorder(Threads):
    """Records one process. `active` is False outside of start and stop, and in a forked child.

    Where the C extension is there, `use` puts its functions in the place of those here: they do the same, quicker."""

    active = Shared(False)
    before_first: Shared[Callable[[], None] | None] = Shared(None)
    ignored: Shared[Callable[[FrameType], bool] | None] = Shared(None)

    def __init__(
        self, writer: DumpWriter, selection: Selection, *, stacks: bool, in_backward: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.measurer: Measurer = None  # type: ignore[assignment]  # set by the session, which builds both
        self._writer = writer
        self._selection = selection
        self._in_backward = in_backward
        self._some_roles = not all(selection.wants_role(role) for role in Role)
        self._stacks = Stacks(self._text) if stacks else None
        self._packers: dict[int, Struct] = {}
        self._epoch = 0
        self.begin_step()

    def use(self, fast: Any) -> None:
        """Lets C do what is done for each call."""
        self.fast = fast
        fast.give(
            recorder=self,
            gate=self.gate,
            free=self.freeing(),
            own=is_own,
            measurer=self.measurer,
            stacks=self._stacks,
            selection=self._selection,
            frames=self._writer.frames,
            roles=ROLES,
            role_bits=sum(self._selection.wants_role(role) << place for place, role in enumerate(Role)),
            phases=PHASES,
            in_backward=self._in_backward,
            dumps=json.dumps,
            all_free=self._selection.is_free,
            forward=self._selection.forward,
            backward_wanted=self._selection.backward,
            follows_backward=self._selection.follows_backward,
        )
        for name in ("state", "enter", "leave", "open_call", "open_backward", "show", "close_call"):
            setattr(self, name, getattr(fast, name))
        self.measurer.use(fast)

    def begin_step(self, *, anew: bool = True) -> None:
        """Fresh numbers for a new dump. Counters restart: names are per step, unless a dump only goes on with another."""
        self._texts: dict[str, int] = {}
        self._slots: dict[tuple[Role, tuple[PathStep, ...]], int] = {}
        self._sequence = itertools.count()
        self.notes, self.lost = {}, None
        self._epoch = self._epoch + 1 if self.fast is None else self.fast.begin_step(anew)
        if anew:
            self._counters: defaultdict[tuple[str, str, Phase], itertools.count[int]] = defaultdict(itertools.count)
            self._selection.begin_step()
        if self._stacks is not None:
            self._stacks.begin_step()

    # --- what taps call -----------------------------------------------------------------------------------------

    def open_call(
        self, state: ThreadState, kind: str, name: str, frame: FrameType | None, *, phase: Phase = Phase.FORWARD
    ) -> OpenCall:
        if self.ignored is not None and frame is not None and self.ignored(frame):
            call = OpenCall(kind, name, 0, phase)
            call.wanted = False
            return call
        if self.before_first is not None:
            self.before_first()
        if state.guard is not None and frame is not None:
            self._drop_left_over(state, frame)
        call = OpenCall(kind, name, next(self._counters[kind, name, phase]), phase)
        call.epoch = self._epoch
        call.seq = next(self._sequence)
        call.thread = state.number
        if state.calls:
            call.parent = state.calls[-1].seq
        modules = state.modules
        above, stop = -1, None
        if modules:
            path = modules[-1][0]
            call.module = path.inside(frame) if isinstance(path, PathOfCode) else path
            stop, above = modules[-1][2], modules[-1][3]
        if phase in (Phase.FORWARD, Phase.BACKWARD, Phase.PARAMETERS_GRAD):
            selection = self._selection
            call.chosen = selection.wants(kind, name, call.index, phase, call.module)
            call.wanted = call.chosen and (selection.forward if phase is Phase.FORWARD else selection.backward)
        if self._stacks is not None:
            if frame is not None:
                call.stack = self._stacks.number(frame, stop, above)
                if self._in_backward() and self._stacks.is_recomputing(call.stack):
                    call.flags |= RECOMPUTED
            elif state.calls:
                call.stack = state.calls[-1].stack
        return call

    def _drop_left_over(self, state: ThreadState, frame: FrameType) -> None:
        """An optimizer step that raised is told by nobody: its frame is gone from the stack."""
        guard = state.guard
        walk: FrameType | None = frame
        while walk is not None and guard is not None and walk is not guard[1]:
            walk = walk.f_back
        if guard is not None and walk is None:
            state.guard = None
            if guard[0] in state.calls:
                del state.calls[state.calls.index(guard[0]) :]
            guard[0].flags |= RAISED
            guard[0].note = "ended with an exception"
            self.close_call(guard[0])

    def open_backward(self, state: ThreadState, forward: Forward, again: int) -> OpenCall:
        if self.before_first is not None:
            self.before_first()
        kind, name, index, epoch, seq, parent, module, stack = forward
        call = OpenCall(kind, name, index, Phase.BACKWARD)
        call.epoch = self._epoch
        call.seq = next(self._sequence)
        call.thread = state.number
        call.module = module
        if epoch == self._epoch:
            call.parent = parent
            call.origin = seq
            call.stack = stack
        else:
            self.note("a backward pass reached calls of an earlier step")
        call.again = again
        selection = self._selection
        if selection.follows_backward and not selection.wants_now(kind, name, index, module):
            call.wanted, call.epoch = False, 0
        return call

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
        if call.epoch != self._epoch or (self._some_roles and not self._selection.wants_role(role)):
            return
        values, measurer = call.values, self.measurer
        if unread is not None:
            for sub, leaf in measurer.leaves(value):
                values += (self._slot(role, (*path, *sub) or _FIRST), *measurer.unread(leaf, unread))
        elif type(value) in measurer.leaf_types:
            values += (self._slot(role, path or _FIRST), *measurer.row(value, produced))
        else:
            for sub, leaf in measurer.leaves(value):
                values += (self._slot(role, (*path, *sub) or _FIRST), *measurer.row(leaf, produced))

    def close_call(self, call: OpenCall) -> None:
        if not call.wanted:
            return
        if call.epoch != self._epoch:
            self.note("calls that were under way when a step ended are not recorded")
            return
        values = call.values
        count = len(values)
        packer = self._packers.get(count)
        if packer is None:
            packer = self._packers[count] = Struct(f"<{count}I")
        text = self._text
        self._writer.commit(
            CALL.pack(
                seq=call.seq,
                parent=call.parent if call.parent >= 0 else NONE64,
                origin=call.origin if call.origin >= 0 else NONE64,
                kind=text(call.kind),
                name=text(call.name),
                index=call.index,
                again=call.again,
                values=count // len(VALUE.fields),
                stack=call.stack if call.stack >= 0 else NONE32,
                note=text(call.note) if call.note else NONE32,
                module=text(call.module) if call.module else NONE32,
                thread=call.thread,
                phase=PHASE_NUMBER[call.phase],
                flags=call.flags,
            ),
            packer.pack(*values),
        )
        call.values = _CLOSED  # one list for all: a closed call may live until its backward has run

    def close_raised(self, call: OpenCall, error: BaseException) -> None:
        """The call ended with an exception: what is known of it is stored, and the exception goes on."""
        if not call.wanted or not self.active:
            return
        try:
            with self.gate:
                call.flags |= RAISED
                call.note = f"{type(error).__name__}: {error}"[:1000]
                self.close_call(call)
        except Exception as trouble:  # the hook border
            self.trouble(call.name, trouble)

    def wants_backward(self, call: OpenCall) -> bool:
        return call.epoch > 0 and self._selection.wants_backward(call.kind, call.name, call.index, call.chosen)

    def failed(self, why: str) -> None:
        """The writer has given up: the program goes on without it."""
        self.notes[why] = 1
        log.warning("%s", why)

    # --- interning ----------------------------------------------------------------------------------------------

    def _slot(self, role: Role, path: tuple[PathStep, ...]) -> int:
        key = (role, path)
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = self._text([_ROLE_NAMES[role], *path])
        return found

    def _text(self, content: Any) -> int:
        if type(content) is str:
            found = self._texts.get(content)
            if found is None:
                found = self._texts[content] = self._writer.add_string(json.dumps(content))
            return found
        return self._writer.add_string(json.dumps(content))
