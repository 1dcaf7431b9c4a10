"""Task free_benchmark: what its section of config.json means to a noise check, and its csv."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.model.errors import CaptureError
from ulpscope.replay.noise import Noise, NoiseConfig
from ulpscope.store.noise import NoiseRow, own_file, own_line, seed_file, seed_line

_log = logging.getLogger(__name__)
_NO_DUMP = "task 'free_benchmark' dumps nothing; save and module_dump work with the tasks statistics and tensor"


class FreeBenchmark:
    """A noise check where the debugger has a capture for other tasks."""

    def __init__(self, config: DebuggerConfig, model: Any) -> None:
        noise = Noise(noise_config(config), self._write, model=model)
        self.stop, self.step = noise.stop, noise.step
        self._noise = noise
        folder = Path(config.dump_path)
        self._seed_file, self._own_file = seed_file(folder), own_file(folder)
        self._pid, self._began = os.getpid(), False

    def start(self, model: Any = None) -> None:
        self._noise.start(model)
        if self._noise.started and not self._began:
            self._began = True
            atexit.register(self.close)

    def close(self) -> None:
        """Ends it. A run without findings leaves its csv too, and says so."""
        self._noise.close()
        atexit.unregister(self.close)
        if self._began and os.getpid() == self._pid and self._seed_file.finish():
            _log.warning(
                "free_benchmark found nothing: no result changed more than its limit; %s", self._seed_file.path
            )
        self._began = False

    @property
    def current_step(self) -> int:
        return self._noise.current_step

    def save(self, name: str, value: Any, *, gradient: bool = True) -> None:
        raise CaptureError(_NO_DUMP)

    def watch_alone(self, module: Any, name: str) -> None:
        raise CaptureError(_NO_DUMP)

    def _write(self, row: NoiseRow) -> None:
        self._own_file.add(own_line(row))
        if row.inconsistent:
            self._seed_file.add(seed_line(row))


def noise_config(config: DebuggerConfig) -> NoiseConfig:
    """The section free_benchmark, with the manual's defaults."""
    options = config.options
    mode = options.get("pert_mode", "improve_precision")
    return NoiseConfig(
        mode="to_cpu" if options.get("fuzz_device") == "cpu" else mode,
        exact=tuple(options.get("scope", ())),
        parts=tuple(options.get("list", ())),
        fix=options.get("handler_type") == "fix",
        backward=options.get("fuzz_stage") == "backward",
        explain=False,
        preheat_steps=options.get("preheat_step", 15) if options.get("if_preheat") else 0,
        max_samples=options.get("max_sample", 20),
        steps=_among(config.step),
        ranks=_among(config.rank),
    )


def _among(numbers: tuple[Any, ...]) -> Callable[[int], bool]:
    return lambda number: (
        not numbers
        or any(item == number if isinstance(item, int) else item[0] <= number <= item[1] for item in numbers)
    )
