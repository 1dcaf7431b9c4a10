"""The live ledger: every kernel is judged while its inputs are there; no tensor is stored.

    with ulpscope.ledger("runs/a", model=model) as ledger:
        for batch in data:
            train(batch)
            ledger.step()

or the long form: `Ledger(path).start() ... step() ... stop()`. Two ledgers are judged together by `ulpscope blame A B`.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ulpscope.frameworks.torch import devices
from ulpscope.frameworks.torch.replay_probe import (
    ReplayProbe,
    in_torch,
    is_data_worker,
    models_of,
)
from ulpscope.frameworks.torch.step_watch import StepWatch
from ulpscope.model.errors import CaptureError
from ulpscope.replay.calls import CallNames
from ulpscope.store.ledger_file import LedgerWriter, ledger_path, process_path

log = logging.getLogger(__name__)


class Ledger:
    """Judges the kernels of this process into `path`, one file for each rank."""

    def __init__(
        self, path: str | Path, *, model: Any = None, rank: int | None = None, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.current_step = 0
        self.started = False
        self._rank = rank
        self._overwrite = overwrite
        self._pid = os.getpid()
        self._models = models_of(model)
        self._calls = CallNames(in_torch, self._missed)
        self._probe: ReplayProbe | None = None
        self._writer: LedgerWriter | None = None
        self._steps: StepWatch | None = None
        self._seq = 0
        self._written_rank = 0
        # Of a program that was not edited: no model has run yet; and how many calls were made before one did.
        self._early = False
        self._before = 0
        # The file that this ledger has begun: an exception of a signal handler can hit while it is being opened.
        self._begun: Path | None = None

    def start(self, model: Any = None) -> Ledger:
        """Begins, or goes on with, judging. A second start changes nothing.

        Raises CaptureError where another run's ledger lies already."""
        if self.started:
            return self
        if self._probe is None:
            if self._steps is None:
                self._refuse_taken(self._place()[0])
            self._models += [item for item in models_of(model) if not any(item is known for known in self._models)]
            self._probe = ReplayProbe(self._calls, self._add, self._calls.source, models=self._models)
            if self._steps is not None:
                self._probe.modules.steps = self._steps
        self._calls.active = True
        self._probe.install()
        self.started = True
        atexit.register(self.close)
        return self

    def step(self) -> None:
        """Ends the current step; what follows belongs to the next."""
        with self._calls.gate:
            self.current_step += 1
            self._calls.begin_step()
            if self._probe is not None:
                self._probe.begin_step()
        if self.started and self._probe is not None:
            self._probe.tidy(sys._getframe(1))

    def stop(self) -> None:
        """Ends judging and leaves torch as it was; start may follow."""
        if self.started and self._probe is not None and os.getpid() == self._pid:
            self._calls.active = False
            self._probe.remove()
            self.started = False

    def close(self) -> None:
        """Stops and closes the file. Called at exit too."""
        if os.getpid() != self._pid:
            return
        self.stop()
        if self._writer is not None:
            for text, count in self._calls.unseen.items():
                self._writer.add_unseen(text, count)
            self._writer.close()
            self._writer = None
        atexit.unregister(self.close)

    def __enter__(self) -> Ledger:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def notes(self) -> list[str]:
        """What could not be judged, and why."""
        return list(self._calls.notes)

    def watch(self, ignored: Callable[[FrameType], bool] | None) -> None:
        """Judges a program that was not edited from now on, and finds its steps.

        What runs before the first forward of a model is preparation: where a model runs it is not judged, and what `ignored`
        frames call, which build one, never is. None: all of it is judged."""
        self._early = ignored is not None
        self._steps = StepWatch(self.step, None, self._calls.trouble, first_model=self._begin_anew)
        self.start()
        assert self._probe is not None
        self._probe.ignore(ignored)

    def _begin_anew(self) -> None:
        assert self._probe is not None
        if not self._early:
            return
        with self._calls.gate:
            self._early = False
            self._probe.ignore(None)
            self._probe.forget()
            self._calls.begin_step()
            self._calls.unseen.clear()
            self._before = self._seq
            self.current_step = self._seq = 0
            if self._writer is not None:
                self._writer.close()
                self._writer.path.unlink()
                self._writer = None

    def _add(self, fields: dict[str, Any]) -> None:
        writer = self._writing()
        if writer is None:
            return
        if self._early:  # a process may come to know its rank
            self._written_rank = self._place()[0]
        writer.add({"seq": self._seq, "step": self.current_step, "rank": self._written_rank, **fields})
        self._seq += 1

    def _missed(self, text: str) -> None:
        """Said at once, and again with its number at the end."""
        writer = self._writing()
        if writer is not None:
            writer.add_unseen(text, 1)

    def _writing(self) -> LedgerWriter | None:
        """None where this process has nothing to write to, which is said."""
        process = os.getpid()
        if process != self._pid:
            self._lose(f"calls of process {process}, a fork: the ledger is its parent's")
            return None
        if self._writer is None and self._calls.active:
            try:
                self._writer = self._open()
            except FileExistsError as error:
                self._lose(f"calls of process {process}: {error.filename} is another's, of the same rank")
        return self._writer

    def _lose(self, text: str) -> None:
        """Nothing more is judged in this process, and a file of its own says so. Workers that load data are not judged anyway."""
        self._calls.active = False
        log.log(logging.INFO if is_data_worker() else logging.WARNING, "not judged: %s", text)
        if not is_data_worker():
            own = LedgerWriter(process_path(self.path, os.getpid()), {})
            own.add_unseen(text, 1)
            own.close()

    def _refuse_taken(self, rank: int) -> Path:
        path = ledger_path(self.path, rank)
        if path.exists() and not self._overwrite:
            raise CaptureError(
                f"{path} exists and is never mixed with a new ledger; choose another folder or overwrite=True"
            )
        return path

    def _open(self) -> LedgerWriter:
        rank, world = self._place()
        path = process_path(self.path, self._pid) if self._early else ledger_path(self.path, rank)
        replace = self._overwrite or self._early or path == self._begun
        about = {"rank": rank, "world_size": world, "environment": devices.environment()}
        about |= {"early": self._early, "before": self._before}
        self._written_rank = rank
        if not replace and path.exists():
            raise FileExistsError(errno.EEXIST, "a ledger", str(path))
        self._begun = path
        return LedgerWriter(path, about, replace=replace)

    def _place(self) -> tuple[int, int]:
        rank, world = devices.rank_and_world()
        return (rank if self._rank is None else self._rank), world


def ledger(path: str | Path, *, model: Any = None, rank: int | None = None, overwrite: bool = False) -> Ledger:
    """A ledger for a `with` block."""
    return Ledger(path, model=model, rank=rank, overwrite=overwrite)
