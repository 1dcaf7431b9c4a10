"""msprobe's PrecisionDebugger over a capture: same names, same configuration, same files."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from types import EllipsisType
from typing import Any

from ulpscope.capture.session import Capture
from ulpscope.compat.msprobe.config import READY, DebuggerConfig, load_config
from ulpscope.compat.msprobe.free_benchmark import FreeBenchmark
from ulpscope.compat.msprobe.online import OnlineCheck
from ulpscope.frameworks.torch import determinism
from ulpscope.frameworks.torch.custom_calls import CustomCalls
from ulpscope.frameworks.torch.loader_watch import LoaderWatch
from ulpscope.model.errors import CaptureError, ConfigError
from ulpscope.model.records import CallId
from ulpscope.store import registry
from ulpscope.store.formats.msprobe_writer import MsprobeFiles
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)
_INSTEAD = {
    "run_ut": "dump with task tensor or statistics first, then run "
    "`msprobe -f pytorch run_ut -api_info dump.json -config config.json`",
    "structure": "task statistics at level mix writes construct.json and stack.json too",
    "grad_probe": "task statistics at level L0 or mix dumps the gradients of all parameters, as parameters_grad",
    "nan_check": "task overflow_check ends the run at the first call that makes a NaN or an infinity",
    "diff_check": "dump both runs with task statistics or tensor, then run `msprobe compare`",
    "exception_dump": "a run that ends with an exception leaves the calls before it in its dump, whatever the task",
}


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Fixes every random source; `mode` asks for deterministic algorithms, `rm_dropout` for p = 0 from here on."""
    if not isinstance(rm_dropout, bool):
        raise ConfigError([f"rm_dropout = {rm_dropout!r}: must be True or False"], "seed_all")
    determinism.seed_all(seed, mode)
    if rm_dropout:
        determinism.dropout_off()


class PrecisionDebugger:
    """One per process. Its methods work on the class too: `PrecisionDebugger.start()`."""

    _current: PrecisionDebugger | None = None

    def __init__(
        self,
        config_path: str | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        model: Any = None,
        step: list[Any] | None = None,
        *,
        seed: int | EllipsisType | None = ...,
        dropout: str | None = None,
    ) -> None:
        asked = {"task": task, "dump_path": dump_path, "level": level, "step": step, "dropout": dropout}
        config = load_config(config_path, **asked, **({} if seed is ... else {"seed": seed}))
        if config.task not in READY:
            raise CaptureError(
                f"task {config.task!r} is not for a debugger, which has {', '.join(READY)}; {_INSTEAD[config.task]}"
            )
        if PrecisionDebugger._current is not None:
            PrecisionDebugger._current._close()
        self.config = config
        _settle_randomness(config)
        self._capture = self._make_capture(model) if config.task != "free_benchmark" else FreeBenchmark(config, model)
        # What was written in this run, and what more may come into.
        self._written: set[Path] = set()
        self._files: dict[Path, MsprobeFiles] = {}
        self._pid = os.getpid()
        self._loader: LoaderWatch | None = None
        self._last = config.last_step
        self._idle = ""
        self._custom = CustomCalls()
        PrecisionDebugger._current = self
        if config.enable_dataloader:
            self._loader = LoaderWatch(self._next_batch)
            self._loader.install()

    @classmethod
    def start(
        cls, model: Any = None, token_range: Any = None, rank_id: Any = None, scheduled_tokens: Any = None
    ) -> None:
        """Begins, or goes on with, dumping. What only 26.x can do with the other arguments is said, and not done."""
        debugger = cls._get()
        idle = {"token_range": token_range, "rank_id": rank_id, "scheduled_tokens": scheduled_tokens}
        given = ", ".join(f"{name} = {value!r}" for name, value in idle.items() if value is not None)
        if given and given != debugger._idle:
            _log.warning("start: %s: no effect here", given)
            debugger._idle = given
        if debugger._last is not None and debugger._capture.current_step > debugger._last:
            _log.info("msprobe ends successfully.")  # the words of 8.x and 26.x, where training goes on too
            debugger._last = None
        if debugger.config.level != "debug":
            debugger._capture.start(model)

    @classmethod
    def stop(cls) -> None:
        """Ends a stretch; its files are written."""
        cls._get()._capture.stop()

    @classmethod
    def step(cls) -> None:
        """Ends a step. Raises where a kernel dump is over and the call it names never came."""
        debugger = cls._get()
        debugger._capture.step()
        last = debugger.config.last_step
        if last is not None and debugger._capture.current_step == last + 1 and isinstance(debugger._capture, Capture):
            debugger._capture.require_below()

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Dumps one value under a name of your own into debug.json, and its gradient."""
        cls._get()._capture.save(name, variable, gradient=save_backward)

    @classmethod
    def forward_backward_dump_end(cls) -> None:
        """The same as `stop`, under its first name."""
        cls.stop()

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """The step that runs now, or begins next, has this number."""
        if type(step) is not int or step < 0:
            raise ConfigError([f"step = {step!r}: must be a whole number from 0 on"], "set_init_step")
        cls._get()._capture.step(step)

    @classmethod
    def register_custom_api(cls, module: Any, api: str, api_prefix: str | None = None) -> None:
        """From now on the function `api` of a module or class is recorded, as `{api_prefix}.{api}`."""
        cls._get()._custom.register(module, api, api_prefix)

    @classmethod
    def restore_custom_api(cls, module: Any, api: str) -> None:
        """Takes `register_custom_api` back."""
        cls._get()._custom.restore(module, api)

    @classmethod
    def _get(cls) -> PrecisionDebugger:
        if PrecisionDebugger._current is None:
            raise CaptureError("there is no debugger yet: make one first, PrecisionDebugger(config_path='config.json')")
        return PrecisionDebugger._current

    def _close(self) -> None:
        if self._loader is not None:
            self._loader.remove()
        self._custom.restore_all()
        self._capture.close()
        PrecisionDebugger._current = None

    def _make_capture(self, model: Any) -> Capture:
        capture = Capture(model=model, **self.config.capture_options())
        capture.on_dump = self._write
        if self.config.options.get("online_run_ut"):
            capture.on_dump = OnlineCheck(self.config.options).send
            return capture
        capture.as_msprobe = True
        if capture.sieve is not None:
            capture.sieve.ending = self._ending
        return capture

    def _ending(self, found: list[CallId]) -> BaseException:
        """What ends training at the last overflow that was allowed: the exception of msprobe, with what there is to see."""
        times = f"{len(found)} time{'s'[: len(found) > 1]}"
        return Exception(f"[msprobe] exit: [overflow {times}]: dump file is saved in {self.config.dump_path!r}.")

    def _next_batch(self, number: int) -> None:
        """A DataLoader is about to give batch `number`: that begins a step, and ends the one before."""
        if number:
            self._capture.stop()
            self._capture.step()
        last = self.config.last_step
        if last is not None and number > last:
            self._close()
            raise Exception(f"msprobe: exit after iteration {last}")
        self._capture.start()

    def _write(self, folder: Path, finished: bool) -> None:
        """Brings msprobe's files to the state of ours: what is new is added. Ours go when the step is over."""
        own = (
            folder.name if os.getpid() == self._pid else f"proc{os.getpid()}"
        )  # of a forked child, as msprobe names it
        target = Path(self.config.dump_path).absolute() / folder.parent.name / own
        # Taken out: whoever is interrupted, or fails, leaves nothing behind that could be added to.
        files = self._files.pop(target, None)
        if files is None or files.dump.folder != folder or not files.add():
            files = MsprobeFiles(
                open_dump(folder),
                target,
                task=self.config.task,
                level=self.config.level,
                summary_mode=self.config.summary_mode,
                below=self.config.capture_options().get("below"),
            )
            if target not in self._written:
                self._replace(files.dump.manifest.rank, target)
            files.write(replace=target in self._written)
            self._written.add(target)
        if not finished:
            self._files[target] = files
            return
        files.finish()
        if files.dump.ending == "complete":
            shutil.rmtree(folder)
            for above in (folder.parent, folder.parent.parent):
                with contextlib.suppress(OSError):
                    above.rmdir()

    def _replace(self, rank: int, target: Path) -> None:
        """A dump into the same folder replaces the one before, as the manual says: whole runs, never a mixture. A forked child
        is part of its parent's run."""
        earlier = (
            [target]
            if self._written or os.getpid() != self._pid
            else [place.folder for place in registry.find_folders(Path(self.config.dump_path)) if place.rank == rank]
        )
        for folder in earlier:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()


def _settle_randomness(config: DebuggerConfig) -> None:
    """Dropout and the generators as the configuration wants them; what is changed is said."""
    done = []
    if config.dropout == "off":
        determinism.dropout_off()
        done.append("dropout is off (p = 0)")
    else:
        determinism.dropout_as_written()
    if config.seed is not None:
        seed_all(config.seed, config.is_deterministic)
        done.append(f"the random generators are seeded with {config.seed} now")
    elif config.is_deterministic:
        determinism.deterministic_algorithms()
    if done:
        _log.warning(
            '%s, as msprobe\'s manual says; "dropout": "keep" and "seed": null in config.json, or as arguments of '
            'PrecisionDebugger (dropout="keep", seed=None), leave both alone',
            " and ".join(done),
        )


def module_dump(module: Any, dump_name: str) -> None:
    """Dumps one module as a whole from now on, and none of the APIs, until `module_dump_end`."""
    PrecisionDebugger._get()._capture.watch_alone(module, dump_name)


def module_dump_end() -> None:
    """Ends `module_dump`: APIs are dumped again."""
    PrecisionDebugger._get()._capture.watch_alone(None, "")


__all__ = ["DebuggerConfig", "PrecisionDebugger", "module_dump", "module_dump_end", "seed_all"]
