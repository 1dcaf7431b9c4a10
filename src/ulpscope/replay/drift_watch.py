"""Watching the drift of a program that was not edited. Imports torch only when the program has."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from ulpscope.store.loss_curve import Point, add_point, track_path

DRIFT_VARIABLE = "ULPSCOPE_DRIFT"


def begin_drift(options: dict[str, Any]) -> None:
    """Writes the track of this process until it ends; run 0 is not nudged."""
    from ulpscope.frameworks.torch.nudge import DriftWatch

    folder, run, process = Path(options["path"]), int(options["run"]), os.getpid()

    def emit(step: int, rank: int, loss: float | None, output: tuple[float, ...]) -> None:
        if os.getpid() == process:
            add_point(track_path(folder, run, rank), Point(step, rank, loss, output))

    watch = DriftWatch(emit, options["seed"])
    watch.install()
    atexit.register(watch.remove)
