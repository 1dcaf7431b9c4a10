"""msprobe's PrecisionDebugger for MindSpore: free_benchmark of dynamic graphs, overflow_check of static ones. Nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

from ulpscope.compat.msprobe.config import DebuggerConfig, load_config
from ulpscope.frameworks.mindspore.graph_overflow import GraphOverflows
from ulpscope.frameworks.mindspore.process import PYNATIVE, execution_mode, mindspore
from ulpscope.frameworks.mindspore.twice import PERTURBATIONS, Difference, Twice
from ulpscope.model.errors import CaptureError, ConfigError
from ulpscope.store.noise import NoiseRow, seed_file, seed_line

_log = logging.getLogger(__name__)
_PREHEATING = ("if_preheat", "preheat_step", "max_sample")


def problems(config: DebuggerConfig) -> list[str]:
    """What MindSpore cannot do of a configuration, in the tool's words."""
    options = config.options
    if config.task == "overflow_check" and config.level == "L2":
        return []
    if config.task != "free_benchmark":
        return [
            f"task = {config.task!r} at level {config.level}: of MindSpore there are free_benchmark, and overflow_check at "
            "level L2; ulpscope records PyTorch"
        ]
    mode, is_fix = options.get("pert_mode", "improve_precision"), options.get("handler_type") == "fix"
    found = []
    if options.get("fuzz_device", "npu") != "npu":
        found.append("fuzz_device must be npu or empty")
    if mode not in PERTURBATIONS:
        found.append("pert_mode must be improve_precision, add_noise, bit_noise, no_change or empty")
    if options.get("fuzz_stage", "forward") != "forward":
        found.append("fuzz_stage must be forward or empty")
    if is_fix and mode != "improve_precision":
        found.append(f"pert_mode must be improve_precision or empty when handler_type is fix, but got {mode}.")
    if options.get("scope"):
        found.append("free_benchmark.scope: is for PyTorch; name functions in list, as mindspore.ops.add")
    return found


class PrecisionDebugger:
    """One per process. Its methods work on the class too: `PrecisionDebugger.start()`."""

    _current: PrecisionDebugger | None = None

    def __init__(self, config_path: str | None = None) -> None:
        config = load_config(config_path)
        found = problems(config)
        if found:
            raise ConfigError(found, str(config_path or "config.json"))
        if PrecisionDebugger._current is not None:
            PrecisionDebugger._current._work.stop()
        self.config = config
        self._step = 0
        options = config.options
        self._work: GraphOverflows | Twice
        if config.task == "overflow_check":
            self._work = GraphOverflows(
                Path(config.dump_path), mode=options.get("check_mode", "all"), ranks=_plain(config.rank)
            )
        else:
            if any(options.get(key) for key in _PREHEATING):
                _log.warning("%s settings are not supported for MindSpore's free_benchmark", ", ".join(_PREHEATING))
            self._file = seed_file(Path(config.dump_path))
            self._work = Twice(
                options.get("list", ()),
                options.get("pert_mode", "improve_precision"),
                fix=options.get("handler_type") == "fix",
                tell=self._tell,
            )
        PrecisionDebugger._current = self

    @classmethod
    def start(cls, model: object = None) -> None:
        """Begins, or goes on with, the check. CaptureError in a mode of MindSpore that it does not work in."""
        debugger = cls._get()
        wanted = not debugger.config.step or debugger._step in _plain(debugger.config.step)
        if debugger.config.task == "free_benchmark":
            if execution_mode(mindspore()) != PYNATIVE:
                raise CaptureError("free_benchmark needs dynamic graphs: mindspore.set_context(mode=PYNATIVE_MODE)")
            if not wanted:
                return
        debugger._work.start()

    @classmethod
    def stop(cls) -> None:
        """Ends a stretch."""
        cls._get()._work.stop()

    @classmethod
    def step(cls) -> None:
        """Ends a step."""
        debugger = cls._get()
        debugger._step += 1
        if isinstance(debugger._work, Twice):
            debugger._work.step()

    @classmethod
    def _get(cls) -> PrecisionDebugger:
        if PrecisionDebugger._current is None:
            raise CaptureError("there is no debugger yet: make one first, PrecisionDebugger(config_path='config.json')")
        return PrecisionDebugger._current

    def _tell(self, found: Difference) -> None:
        row = NoiseRow(
            rank=0,
            pert_mode=self.config.options.get("pert_mode", "improve_precision"),
            stage="forward",
            step=self._step,
            api_name=found.name,
            max_rel=found.ratio if isinstance(found.ratio, str) else found.ratio - 1.0,
            dtype=found.dtype,
            shape=found.shape,
            output_index=found.output,
            inconsistent=True,
            excess=None,
            reason="",
            source=None,
        )
        self._file.add(seed_line(row))


def _plain(numbers: tuple[int | tuple[int, int], ...]) -> list[int]:
    return [number for item in numbers for number in ([item] if isinstance(item, int) else range(item[0], item[1] + 1))]
