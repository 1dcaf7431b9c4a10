"""A capture: from start to stop, step by step.

    with ulpscope.capture("runs/a", model=model) as cap:
        for batch in data:
            train(batch)
            cap.step()

or the long form for loops that start and stop by themselves: `Capture(path).start() ... stop() ... step()`.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ulpscope.capture.folder import RUN_VARIABLE, absolute, claim, make_folder, token_of
from ulpscope.capture.recorder import Recorder
from ulpscope.capture.selection import Selection
from ulpscope.capture.sieve import OverflowSieve
from ulpscope.capture.surroundings import Environment
from ulpscope.capture.vendor import is_below, vendor_dump
from ulpscope.frameworks.interruption import is_meant_for_the_program
from ulpscope.frameworks.threads import at_work
from ulpscope.frameworks.torch import devices, internals, probe
from ulpscope.frameworks.torch.finiteness import TorchFiniteness
from ulpscope.frameworks.torch.module_tap import ModuleNames
from ulpscope.frameworks.torch.overflow_flag import overflow_flag
from ulpscope.frameworks.torch.step_watch import StepWatch
from ulpscope.model.errors import CaptureError, FolderTakenError, NoRoomError, OverflowStop
from ulpscope.model.names import SAVED
from ulpscope.model.options import CaptureConfig, capture_config
from ulpscope.model.records import Phase, Role
from ulpscope.native import parts, taps
from ulpscope.native.schema import FORMAT_VERSION
from ulpscope.store import run_folder
from ulpscope.store.ring import require_room
from ulpscope.store.writer import DumpWriter

log = logging.getLogger(__name__)
# torch is one per process, so only one capture can be on; the list holds it while it is.
_on: list[weakref.ref[Capture]] = []
_on_lock = threading.Lock()
_NO_BELOW = (
    "there was no call %s, so there are no kernels of it; a capture at level op, and `ulpscope show`, list the names"
)


class Capture:
    """Records this process into `path`. Options are those of CaptureConfig."""

    def __init__(
        self, path: str | Path | None = None, *, model: Any = None, rank: int | None = None, **options: Any
    ) -> None:
        if path is not None:
            options["path"] = path
        self.config: CaptureConfig = capture_config(options, "capture")
        self._config_json = run_folder.Fixed(self.config.as_json())
        # The program may change its working folder; a run stays where it began.
        self.path = absolute(self.config.path)
        self.current_step = 0
        self.started = False
        self.dumps: list[Path] = []
        self._models = probe.models_of(model)
        # One for the run: what has been named keeps its name when another model joins.
        self._names = ModuleNames()
        self._rank = rank
        self._run = os.environ.get(RUN_VARIABLE) or uuid.uuid4().hex
        self._steps: StepWatch | None = None
        # Told about each dump: its folder, and whether it is finished (a stop may be followed by a start).
        self.on_dump: Callable[[Path, bool], None] | None = None
        # Names of calls and order of gradients as msprobe has them, for dumps that its own tools are to compare.
        self.as_msprobe = False
        # Calls are counted on from step to step: together they are one dump of another tool.
        self.counts_on = False
        # In a forked child that has not started it again.
        self._is_inherited = False
        self._environment = Environment()
        self._was_on = False
        self._claimed = False
        # Names that matched nothing, which is said once.
        self._missed: set[str] = set()
        self._copy = 0
        # A child of multiprocessing ends without the functions of atexit.
        multiprocessing.util.register_after_fork(
            self, lambda own: multiprocessing.util.Finalize(own, own.close, exitpriority=100)
        )
        self._build()

    def _build(self) -> None:
        config = self.config
        payloads = config.tensors or config.overflows is not None
        self._pid = os.getpid()
        self._selection = Selection(config)
        self._writer = DumpWriter(payload_bytes=config.queue_mb << 20 if payloads else 0)
        self._recorder = Recorder(self._writer, self._selection, stacks=config.stacks, in_backward=probe.in_backward)
        self._writer.on_failure = self._recorder.failed
        self._recorder.measurer = probe.make_measurer(
            self._writer,
            statistics=config.statistics,
            checksum=config.checksum,
            sketch=config.sketch and config.statistics,
            rows=config.rows and config.statistics,
            payloads=payloads,
            reuse=config.reuse,
        )
        parts.say_missing("recording")
        if config.overflows is None and taps.C is not None:
            self._recorder.use(taps.C.Fast())
        self.sieve = None if config.overflows is None else self._make_sieve(config.overflows)
        self._recorder.measurer.note = self._recorder.note
        self._probe: probe.TorchProbe | None = None

    def _make_sieve(self, limit: int) -> OverflowSieve:
        finiteness, flag = TorchFiniteness(), overflow_flag()
        return OverflowSieve(
            self._recorder, finiteness, limit=limit, flag=flag, finish=_weakly(self._complete), poles=self.config.poles
        )

    def _complete(self) -> None:
        """Everything found so far is on disk as a dump that reads as complete."""
        if self._writer.is_open:
            with self._at_work():
                self._writer.flush(self._manifest("complete"))
                self._tell(finished=False)

    def _at_work(self) -> AbstractContextManager[None]:
        return at_work(self._recorder.state())

    # --- the loop -----------------------------------------------------------------------------------------------

    def start(self, model: Any = None) -> Capture:
        """Begins, or goes on with, recording. A second start changes nothing."""
        self._is_inherited = False
        return self._start(model)

    def _start(self, model: Any = None) -> Capture:
        if os.getpid() != self._pid:
            self._after_fork()
        if model is not None:
            for item in probe.models_of(model):
                if not any(item is known for known in self._models):
                    self._models.append(item)
                    self._probe = None if not self.started else self._probe
            if self._probe is not None:
                with self._recorder.gate:
                    self._names.join(self._models)
        if self._probe is not None:
            self._probe.tidy(sys._getframe(2))
        if self.started:
            if not self._recorder.active:  # a stop that a signal handler interrupted
                self._switch_on(eager=False)
            return self
        with _on_lock:
            other = _on[0]() if _on else None
            if other is not None and other is not self and not other._is_inherited:
                raise CaptureError(f"a capture into {other.path} is on already; stop it before you start another")
            _on[:] = [weakref.ref(self)]
        if other is not None and other is not self:
            other.close()  # a forked child that starts one of its own means that one
        self.started = self._was_on = True
        try:
            self._switch_on(eager=self._steps is None and not self._is_inherited)
        except BaseException:
            self._release()
            self._switch_off()
            self._was_on = False
            raise
        atexit.register(self._at_exit)
        return self

    def stop(self) -> None:
        """Ends recording and leaves torch as it was. The step's dump is complete on disk; start may follow."""
        self._stop()
        self._end_if_full()

    def _stop(self) -> None:
        if not self.started or os.getpid() != self._pid:
            return
        self._switch_off()
        self._release()
        if self._writer.is_open:
            with self._at_work():
                self._recorder.measurer.finish_step()
            self._complete()

    def _end_if_full(self) -> None:
        """A device may have told only now that as many calls overflowed as were allowed."""
        if self.sieve is not None:
            self.sieve.end_if_full()

    def step(self, number: int | None = None) -> None:
        """Ends the current step. While started, the next one is recorded from here on; it has this number, or the next."""
        if os.getpid() != self._pid:
            return
        if self._probe is not None and self._recorder.active:
            self._probe.tidy(sys._getframe(1))
        with self._recorder.gate:
            self._finish_dump("complete")
            self.current_step = self.current_step + 1 if number is None else number
            if self.started:
                self._switch_on(eager=False)
        self._end_if_full()

    def watch_alone(self, module: Any, name: str) -> None:
        """Records this one module as a whole under a name, and no call inside or outside of it; None ends that."""
        models = probe.models_of(module)
        if module is not None and (not isinstance(name, str) or not name):
            raise CaptureError(f"the name of the module must be a text, not {name!r}")
        if self._probe is not None:
            self._probe.watch_alone(models[0] if models else None, name)

    def save(self, name: str, value: Any, *, gradient: bool = True) -> None:
        """Records one value under a name of your own (`x.0.debug`), and its gradient (`x_grad.0.debug`) when it comes."""
        if not isinstance(name, str) or not name:
            raise CaptureError(f"save needs a name, not {name!r}")
        if os.getpid() != self._pid or not self._wanted():
            return
        if not self._writer.is_open and not self._writer.failure:
            self._open(eager=True)
            atexit.register(self._at_exit)
        self._record_saved(name, value)
        if gradient:
            for path, leaf in self._recorder.measurer.leaves(value):
                probe.watch_gradient(leaf, lambda grad, path=path: self._record_saved(f"{name}_grad", grad, path))  # type: ignore[misc]

    def close(self) -> None:
        """Stops, ends the step and gives everything back. Called at exit too."""
        self._close(None)

    def _at_exit(self) -> None:
        """What ended the program has ended the step too; at a prompt it has not."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        self._close(error if self.started else None)

    def _close(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid:
            return
        self._stop()
        self._finish_dump("complete", error)
        self._recorder.measurer.give_back()
        self._writer.shutdown()
        atexit.unregister(self._at_exit)
        if self._lacks_below():
            log.error(_NO_BELOW, self.config.below)
        if self._was_on and not self.dumps and self.config.steps and not self._writer.failure:
            log.warning("nothing was recorded: the run ended at step %d, before the first asked one", self.current_step)

    def __enter__(self) -> Capture:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)
        if error is None:
            self._end_if_full()
            self.require_below()

    def require_below(self) -> None:
        """Raises CaptureError where `below` names a call that never came, though something was recorded."""
        if self._lacks_below():
            raise CaptureError(_NO_BELOW % self.config.below)

    def _lacks_below(self) -> bool:
        below = self.config.below
        return below is not None and bool(self.dumps) and below not in self._selection.matched

    def watch_steps(self, ignored: Callable[[FrameType], bool]) -> None:
        """Finds the steps by itself, and leaves out calls made from `ignored` frames before the first forward."""
        self._recorder.ignored = ignored
        self._steps = StepWatch(self.step, self._first_forward, lambda *told: self._recorder.trouble(*told))

    def _first_forward(self) -> None:
        self._recorder.ignored = None

    # --- switching ----------------------------------------------------------------------------------------------

    def _wanted(self) -> bool:
        rank, _ = self._place()
        return self._selection.wants_step(self.current_step) and self._selection.wants_rank(rank)

    def _switch_on(self, *, eager: bool) -> None:
        if not self._wanted():
            self._switch_off()
            return
        if self._probe is None:
            self._recorder.warns = self.as_msprobe
            self._probe = probe.TorchProbe(
                self.sieve or self._recorder,
                self._recorder.measurer,  # type: ignore[arg-type]
                level=self.config.level,
                models=self._models,
                names=self._names,
                below=is_below(self.config, self._selection),
                vendor=vendor_dump(self.config, self._recorder, self.sieve, self._selection),
                as_msprobe=self.as_msprobe,
                released=None if self.sieve is None else self.sieve.release,
            )
        if not self._writer.is_open and not self._writer.failure:
            self._probe.modules.first_forward = self._environment.see_forward
            if eager:
                self._open(eager=True)
            else:
                self._recorder.before_first = _weakly(self._open_late)
        if self._writer.failure:
            self._switch_off()
        elif not self._recorder.active:
            if self._steps is not None:
                self._steps.remove()
                self._probe.modules.steps = self._steps
            # While we were off nobody looked: a value may have been written without a trace.
            self._recorder.measurer.begin_window()
            self._probe.install()
            self._recorder.active = True

    def _switch_off(self) -> None:
        if self._probe is not None:
            if self._recorder.active:
                with self._recorder.gate:
                    self._finish_calls(self._probe)
                    self._recorder.active = False
            self._probe.remove()
        if self._steps is not None and self.started:
            self._steps.install()

    def _finish_calls(self, taps: probe.TorchProbe) -> None:
        """Everything that was under way is closed and judged."""
        if self.sieve is None:
            taps.finish_step()
            return
        self.sieve.patient = True
        try:
            taps.finish_step()
            self.sieve.settle()
        finally:
            self.sieve.patient = False

    def _release(self) -> None:
        self.started = False
        with _on_lock:
            if _on and _on[0]() is self:
                _on.clear()

    def _open(self, *, eager: bool) -> None:
        """Raises what is wrong with the folder before anything was recorded, where the program has just asked for it. Later, or
        where no more than room is missing, it goes on without us."""
        may_raise, strict = eager and not self.dumps, self.config.strict
        try:
            if may_raise and strict:
                make_folder(self.path)
                require_room(self.path, *self._writer.capacities)
            self._open_dump()
        except CaptureError as error:
            self._recorder.before_first = None
            if may_raise and (strict or not isinstance(error, NoRoomError)):
                raise
            self._writer._fail(f"{error}. The program goes on, from here on nothing is recorded")

    def _open_late(self) -> None:
        # Files of another tool have one name for parent and child.
        goes_on, loads = self.on_dump is None or not self._is_inherited, probe.is_data_worker()
        if goes_on and not loads:
            return self._open(eager=False)
        self._recorder.active, self._recorder.before_first = False, None
        if not loads:
            log.warning("process %d is a fork and is not recorded; call start() in it to record it", os.getpid())

    def _open_dump(self) -> None:
        self._recorder.before_first = None
        rank, _ = self._place()
        make_folder(self.path)
        if not self._claimed:
            self._copy = claim(self.path, rank, self._run, overwrite=self.config.overwrite)
            self._claimed = True
        self._recorder.begin_step(anew=not self.counts_on)
        self._recorder.measurer.begin_step()
        while True:
            folder = run_folder.dump_folder(self.path, self.current_step, rank, self._copy)
            if folder not in self.dumps[-1:]:
                self.dumps.append(folder)
            try:
                self._writer.open(folder, self._manifest("open"))
                return
            except CaptureError as error:
                self.dumps.pop()
                # Another process of this run, of the same rank, was quicker; a folder just made has no manifest yet.
                if not isinstance(error, FolderTakenError) or token_of(folder) not in (self._run, None):
                    raise
                self._copy += 1

    def _finish_dump(self, state: str, error: BaseException | None = None) -> None:
        if not self._writer.is_open:
            return
        if self._probe is not None and self._recorder.active:
            self._finish_calls(self._probe)
        for name in self._selection.unmatched():
            self._recorder.note(f"nothing matched {name!r}")
            if name not in self._missed:
                self._missed.add(name)
                log.warning("step %d: nothing matched %r; `ulpscope show` lists names", self.current_step, name)
        if error is not None:
            state = state if isinstance(error, OverflowStop) else "incomplete"
            self._recorder.note(f"the program raised {type(error).__name__}: {error}"[:500])
        with self._at_work():
            self._recorder.measurer.finish_step()
            self._writer.close(self._manifest(state))
            self._environment.end_step()
            self._tell(finished=True)

    def _tell(self, *, finished: bool) -> None:
        if self.on_dump is not None and self.dumps:
            try:
                self.on_dump(self.dumps[-1], finished)
            except Exception as error:  # the hook border: files in another format fail, the program goes on
                if is_meant_for_the_program(error):
                    raise
                self._writer._fail(
                    f"recording ended: {error}; the program goes on, our own files are in {self.dumps[-1]}"
                )

    def _manifest(self, state: str) -> dict[str, Any]:
        rank, world = self._place()
        lost = self._recorder.lost
        told = sorted(self._recorder.notes.items(), key=lambda note: note[0] == lost)  # why it is incomplete comes last
        notes = [text if count == 1 else f"{text} ({count} times)" for text, count in told]
        return {
            "format": FORMAT_VERSION,
            "framework": probe.NAME,
            "level": self.config.level.value,
            "step": self.current_step,
            "rank": rank,
            "world_size": world,
            "state": "incomplete" if lost is not None and state == "complete" else state,
            "run": self._run,
            "config": self._config_json,
            "environment": self._environment.told(at_end=state != "open"),
            "notes": [*internals.LACKING, *notes],
            "counts": self._writer.counts,
            **({} if self._steps is None else {"stretches": self._steps.stretches}),
        }

    def _place(self) -> tuple[int, int]:
        rank, world = devices.rank_and_world()
        return (rank if self._rank is None else self._rank), world

    def _record_saved(self, name: str, value: Any, path: tuple[Any, ...] = ()) -> None:
        recorder = self._recorder
        if os.getpid() != self._pid or not self._writer.is_open:
            return
        state = recorder.state()
        entered = recorder.enter(state)
        try:
            call = recorder.open_call(state, SAVED, name, None, phase=Phase.DEBUG)
            recorder.show(call, Role.OUTPUT, path, value)
            recorder.close_call(call)
        except Exception as error:  # the hook border
            recorder.trouble(f"saved value {name}", error)
        finally:
            if entered:
                recorder.leave(state)

    def _after_fork(self) -> None:
        """A forked child writes a dump of its own; the parent's files and rings are not its business."""
        if self._probe is not None:
            self._probe.remove()
        self._recorder.leave_to_parent()
        self._writer.leave_to_parent()
        # To let go of them could ask a device, which a child may not.
        self._of_parent = self._recorder, self._writer, self._probe
        self.started = False
        self._environment = Environment()
        self._claimed = False
        self.dumps = []
        ignored, sieve = self._recorder.ignored, self.sieve
        self._build()
        self._recorder.ignored = ignored
        if self.sieve is not None and sieve is not None:
            self.sieve.ending = sieve.ending

    def _in_child(self) -> None:
        """Right after a fork. What the child calls is recorded too; its dump begins with the first call."""
        self._recorder.active = False
        _on.clear()
        if self.started:
            self._after_fork()
            self._is_inherited = True
            self._start()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a method while its object lives. Hooks on the graph hold the recorder; a model may hold its own graph, and the
    collector cannot see through a graph: if the recorder held the capture, and so the model, all three would stay for ever."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _in_child() -> None:
    """After a fork the child must not write into its parent's dump."""
    other = _on[0]() if _on else None
    if other is not None:
        other._in_child()


os.register_at_fork(after_in_child=_in_child)
