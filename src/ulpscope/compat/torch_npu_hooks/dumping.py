"""torch_npu.hooks' register_hook over a capture: one .pkl of the user's name, or a folder of .npy files.

What was dumped is added to the file behind each optimizer step and each `step_schedule.step()`, when another file is named, when files
are compared, and at exit; until then it lies whole in a hidden folder beside the file.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from ulpscope.capture.session import Capture
from ulpscope.compat.torch_npu_hooks.overflow import OverflowCheck
from ulpscope.compat.torch_npu_hooks.steps import ArgumentError, schedule, step_schedule
from ulpscope.frameworks.torch import determinism
from ulpscope.frameworks.torch.optimizer_watch import OptimizerWatch
from ulpscope.model.errors import did_you_mean
from ulpscope.store.formats.hooks_writer import append_hooks, export_arrays
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)
_ARGUMENTS = ("sample", "schedule", "path", "capacity", "seed")
_CAPACITY = range(3, 2049)


def wrap_acc_cmp_hook(*_: Any) -> None:
    """The hook that dumps into the file of `set_dump_path`; give it to `register_hook`."""


def wrap_async_datadump_hook(*_: Any) -> None:
    """The hook that dumps every tensor into a .npy file of its own; give it to `register_hook`."""


def wrap_checkoverflow_hook(*_: Any) -> None:
    """The hook that looks for overflows; give it to `register_hook`."""


class _Session:
    """What was asked for, and the capture that is on."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.folder: Path | None = None
        self.models: list[Any] = []
        self.sample = True
        self.steps = schedule()
        self._capture: Capture | None = None
        self._own: Path | None = None
        self._optimizers = OptimizerWatch(self._file)
        self._count = 0
        self._pid = 0
        self._check: OverflowCheck | None = None

    def follow(self) -> None:
        """Dumps, or does not, as the step and what has been said so far tell."""
        self._file()
        if self._place is not None and self.models and step_schedule.step_num in self.steps:
            self._start(self._place)
        elif self._capture is not None:
            self._capture.stop()

    def settle(self) -> None:
        self._file()

    def close(self) -> None:
        """Ends the dump. Called at exit too."""
        if self._capture is not None and self._own is not None:
            self._optimizers.remove()
            self._capture.close()
            with contextlib.suppress(OSError):
                self._own.rmdir()
        self._capture = None
        atexit.unregister(self.close)

    def check_overflows(self, model: Any) -> None:
        if self._check is None:
            self._check = OverflowCheck(model)
        else:
            self._check.watch(model)

    @property
    def _place(self) -> Path | None:
        return self.file if self.folder is None else self.folder

    def _start(self, place: Path) -> None:
        if self._capture is None:
            self._own = place.with_name(f".{place.name}.ulpscope") if self.folder is None else place / ".ulpscope"
            self._capture = Capture(str(self._own), tensors=True, sketch=False, stacks=False, overwrite=True)
            self._capture.as_msprobe = True
            self._capture.on_dump = self._add
            self._count = 0
            self._pid = os.getpid()
            self._optimizers.install()
            atexit.register(self.close)
        for model in self.models:
            self._capture.start(model)

    def _file(self) -> None:
        """What was dumped so far goes into the file: nothing is held longer than for a step."""
        if self._capture is not None and self._capture.dumps:
            self._capture.step()

    def _add(self, folder: Path, finished: bool) -> None:
        # A forked process has no file of its own.
        if not finished or os.getpid() != self._pid:
            return
        dump = open_dump(folder)
        if self.folder is not None:
            self._count = export_arrays(dump, self.folder, first=self._count)
        elif self.file is not None:
            self._count = append_hooks(dump, self.file, sample=self.sample, first=self._count)
        if dump.ending == "complete":
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()


_session = _Session()


def seed_all(seed: int = 1234) -> None:
    """Fixes every random source."""
    determinism.seed_all(seed)


def set_dump_path(fpath: str | None = None) -> None:
    """The file that lines go to from now on; one that is there is removed. ArgumentError if it cannot be a file."""
    if not isinstance(fpath, str) or not fpath:
        raise ArgumentError(f"set_dump_path '{fpath}' error, please set a valid filename")
    path = Path(fpath)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentError(f"set_dump_path '{fpath}' error, please set a valid filename.")
    _session.close()
    path.unlink(missing_ok=True)
    _session.file = path
    _session.follow()


def register_hook(model: Any, hook: Any, **kwargs: Any) -> None:
    """Says that a model is dumped. `sample`, `schedule`, `seed`; `path` and `capacity` for the asynchronous export.

    The random sources are fixed, as the tool did, with `seed` (1234); None leaves them alone.
    """
    if not callable(getattr(model, "named_modules", None)):
        raise ArgumentError("Please register hooks to nn.Module.")
    for name in kwargs:
        if name not in _ARGUMENTS:
            raise ArgumentError(f"register_hook has no argument {name!r}.{did_you_mean(name, _ARGUMENTS)}")
    if hook not in (wrap_acc_cmp_hook, wrap_async_datadump_hook, wrap_checkoverflow_hook):
        raise ArgumentError(
            f"hook is {hook!r}; it must be wrap_acc_cmp_hook, wrap_async_datadump_hook or wrap_checkoverflow_hook"
        )
    sample, steps, capacity = kwargs.get("sample", True), kwargs.get("schedule", schedule()), kwargs.get("capacity", 3)
    if not isinstance(sample, bool):
        raise ArgumentError(f"sample is {sample!r}; it must be True or False")
    if not isinstance(steps, schedule):
        raise ArgumentError(f"schedule is {steps!r}; it must be made with schedule(begin, end, stride)")
    if type(capacity) is not int or capacity not in _CAPACITY:
        raise ArgumentError("capacity range [3, 2048].")
    if hook is wrap_checkoverflow_hook:
        _session.check_overflows(model)
        return
    folder = Path(kwargs.get("path", "./")) if hook is wrap_async_datadump_hook else None
    if (folder, sample) != (_session.folder, _session.sample):
        _session.close()
    _session.folder, _session.sample, _session.steps = folder, sample, steps
    if not any(known is model for known in _session.models):
        _session.models.append(model)
    seed = kwargs.get("seed", 1234)
    if seed is not None:
        seed_all(seed)
        if len(_session.models) == 1:
            _log.warning(
                "register_hook seeds the generators with %d, as the tool did; seed=None leaves them alone", seed
            )
    step_schedule.follower = _session
    if folder is None and _session.file is None:
        _log.info("nothing is dumped before set_dump_path names a file")
    _session.follow()
