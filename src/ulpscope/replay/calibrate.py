"""Measures what the kernels of a device do in right programs: `ulpscope calibrate`, and the table that ships."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ulpscope.frameworks.torch import devices
from ulpscope.frameworks.torch.kernel_programs import DTYPES, is_there, programs, run_program
from ulpscope.model.errors import CaptureError
from ulpscope.replay.session import Ledger
from ulpscope.store.ledger_file import Row, find_ledgers, read_ledger


def measured_rows(device: str, seconds: float) -> list[Row]:
    """The rows of all programs in all dtypes, with other numbers again and again until the time is up; once at least.

    Raises CaptureError where the device is not there."""
    if not is_there(device):
        raise CaptureError(f"there is no device {device!r} here")
    with tempfile.TemporaryDirectory(prefix="ulpscope-calibrate-") as scratch:
        with Ledger(scratch):
            for _ in _turns(device, seconds):
                pass
        return [row for path in find_ledgers(Path(scratch)) for row in read_ledger(path)[1]]


def _turns(device: str, seconds: float) -> Iterator[None]:
    begun, turn = time.monotonic(), 0
    while not turn or time.monotonic() - begun < seconds:
        for program in programs():
            for dtype in DTYPES:
                run_program(program, dtype, device, turn)
            if turn and time.monotonic() - begun >= seconds:
                return
            yield
        turn += 1


def where(device: str) -> list[str]:
    """Where it was measured: device, versions, processor."""
    told = devices.environment()
    return [
        f"device: {device}; {', '.join(told['devices'])}; {told['host']['machine']} {told['host']['cpu']}",
        f"torch {told['versions']['torch']}, cuda {told['versions']['cuda']}",
    ]
