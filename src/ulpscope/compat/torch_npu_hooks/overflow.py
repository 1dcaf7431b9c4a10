"""torch_npu.hooks' overflow check over a capture that keeps only calls that overflow: the first one ends the program."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from ulpscope.capture.session import Capture
from ulpscope.model.records import CallId
from ulpscope.store.formats.hooks_writer import write_overflow
from ulpscope.store.formats.pkl_names import api_name
from ulpscope.store.registry import open_dump


class OverflowCheck:
    """Looks at every call from now on. ValueError behind the first that overflows; its file lies where the program runs."""

    def __init__(self, model: Any) -> None:
        self._own = Path(tempfile.mkdtemp(prefix="ulpscope-"))
        self._said = ""
        self._capture = Capture(str(self._own / "run"), model=model, overflows=1, poles=True, sketch=False)
        self._capture.on_dump = self._write
        self._capture.as_msprobe = True
        assert self._capture.sieve is not None
        self._capture.sieve.ending = self._ending
        self._capture.start()

    def watch(self, model: Any) -> None:
        """One model more."""
        self._capture.start(model)

    def _write(self, folder: Path, finished: bool) -> None:
        dump = open_dump(folder)
        if len(dump) and not self._said:
            call = dump.nth(0)
            name = f"{api_name(dump, call.id)}_{call.id.phase.value}"
            path = Path(time.strftime("Overflow_info_%Y%m%d_%H%M%S.pkl", time.gmtime()))
            write_overflow(dump, call, path)
            self._said = f"[check overflow]: module name :'{name}' is overflow and dump file is saved in '{path}'."
        if finished:
            shutil.rmtree(self._own, ignore_errors=True)

    def _ending(self, found: list[CallId]) -> BaseException:
        return ValueError(self._said)
