"""The live ledger: every kernel is judged while its inputs are there; no tensor is stored.

    with ulpscope.ledger("runs/a", model=model) as ledger:
        for batch in data:
            train(batch)
            ledger.step()

or the long form: `Ledger(path).start() ... step() ... stop()`. Two ledgers are judged together by `ulpscope blame A B`.
"""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from ulpscope.errors import CaptureError
from ulpscope.frameworks.torch import devices
from ulpscope.frameworks.torch.replay_probe import ReplayProbe, in_torch, models_of
from ulpscope.frameworks.torch.step_watch import StepWatch
from ulpscope.replay.calls import CallNames
from ulpscope.store.ledger import LedgerWriter, ledger_path

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
        self._calls = CallNames(in_torch)
        self._probe: ReplayProbe | None = None
        self._writer: LedgerWriter | None = None
        self._steps: StepWatch | None = None
        self._seq = 0
        self._written_rank = 0
        # The file that this ledger has begun: an exception of a signal handler can hit while it is being opened.
        self._begun: Path | None = None

    def start(self, model: Any = None) -> Ledger:
        """Begins, or goes on with, judging. A second start changes nothing.

        Raises CaptureError where another run's ledger lies already."""
        if self.started:
            return self
        if self._probe is None:
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

    def wait_for_forward(self) -> None:
        """Begins with the first forward of any module, and finds the steps by itself."""
        self._steps = StepWatch(self.step, self._first_forward, self._calls.trouble)
        self._steps.install()

    def _first_forward(self) -> None:
        assert self._steps is not None
        self._steps.remove()
        self.start()

    def _add(self, fields: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # a fork: the file belongs to its parent
            self._calls.active = False
            log.warning("process %d is a fork, and its kernels are not judged: the ledger is its parent's", os.getpid())
            return
        if self._writer is None:
            self._writer = self._open()
        self._writer.add({"seq": self._seq, "step": self.current_step, "rank": self._written_rank, **fields})
        self._seq += 1

    def _refuse_taken(self, rank: int) -> Path:
        path = ledger_path(self.path, rank)
        if path.exists() and not self._overwrite:
            raise CaptureError(
                f"{path} exists and is never mixed with a new ledger; choose another folder or overwrite=True"
            )
        return path

    def _open(self) -> LedgerWriter:
        rank, world = self._place()
        path = ledger_path(self.path, rank)
        if path != self._begun:
            self._begun = self._refuse_taken(rank)
        about = {"rank": rank, "world_size": world, "environment": devices.environment()}
        self._written_rank = rank
        return LedgerWriter(path, about)

    def _place(self) -> tuple[int, int]:
        rank, world = devices.rank_and_world()
        return (rank if self._rank is None else self._rank), world


def ledger(path: str | Path, *, model: Any = None, rank: int | None = None, overwrite: bool = False) -> Ledger:
    """A ledger for a `with` block."""
    return Ledger(path, model=model, rank=rank, overwrite=overwrite)
