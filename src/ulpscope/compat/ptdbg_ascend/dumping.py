"""A capture that becomes the files of ptdbg_ascend: where they go, when they are written, and the script that compares them."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.capture.session import Capture
from ulpscope.compat.ptdbg_ascend.switch import ArgumentError, Chooser, Switch
from ulpscope.frameworks.torch import determinism, npu
from ulpscope.model.options import read_config_file
from ulpscope.report.table import replacing
from ulpscope.store.dump import Dump
from ulpscope.store.formats.pkl_names import call_name
from ulpscope.store.formats.ptdbg_writer import append_ptdbg, ptdbg_folder, write_ptdbg
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)
OWN_FOLDER = ".ulpscope"  # our own store of a run that is under way, or was killed
TAG = "ptdbg_dump"
ENVIRONMENT = "ASCEND_WORK_PATH"
_IN_ENVIRONMENT = "dump_data"
_NO_PATH = (
    "no folder for the dump is known: give dump_path to PrecisionDebugger or fpath to set_dump_path, "
    f"or set the environment variable {ENVIRONMENT}"
)
_QUEUE = "TASK_QUEUE_ENABLE"
_COMPARED = ("all", "api_stack")
_SCRIPT = """from ptdbg_ascend import compare

pkl_path = {pkl}
dump_data_dir = {data}

dump_path_param = {{
    "npu_pkl_path": ,
    "bench_pkl_path": ,
    "npu_dump_data_dir": ,
    "bench_dump_data_dir": ,
    "is_print_compare_log": True
}}

compare(dump_path_param, output_path="", stack_mode="{stacks}")
"""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the files go: below `root`, in the folder of the tag, with folders for the steps if they were asked for."""

    root: Path
    tag: str = TAG
    steps: tuple[int, ...] = ()


def root_of(path: Any) -> Path:
    """The folder for dumps: the given one, or that of the environment. ArgumentError without either."""
    if path is None:
        work = os.environ.get(ENVIRONMENT)
        if not work:
            raise ArgumentError(_NO_PATH)
        path = os.path.join(work, _IN_ENVIRONMENT)
    if not isinstance(path, str | Path) or not str(path):
        raise ArgumentError(f"the path of the dump is {path!r}; it must be a text")
    if Path(path).exists() and not Path(path).is_dir():
        raise ArgumentError(f"{path} is a file; the dump needs a folder")
    return Path(path)


class Dumping:
    """One dump of this process. `current` is the one that was started last; a new one ends it."""

    current: Dumping | None = None

    def __init__(
        self, target: Target, switch: Switch, *, model: Any = None, rank: int | None = None, adds: bool = False
    ) -> None:
        if Dumping.current is not None:
            Dumping.current.close()
        self.switch = switch
        self._target = target
        # Kernels that the vendor writes lie where its configuration says; none of them pass through our files.
        self._by_vendor = switch.mode == "acl" and npu.npu_of_process() is not None
        if self._by_vendor and os.environ.get(_QUEUE) != "0":
            _log.warning("kernels may run after their call is over: export %s=0 before a kernel dump", _QUEUE)
        self.capture = Capture(
            str(target.root / OWN_FOLDER),
            model=model,
            steps=target.steps,
            ranks=() if rank is None else (rank,),
            **switch.capture_options(),
        )
        self.capture.on_dump = self._write
        self.capture.as_msprobe = True
        # Without steps, all stretches go into one file; each is a dump of ours, which is gone when it is written.
        self.capture.counts_on = adds
        self._written: dict[Path, int] = {}
        self._files: dict[Path, Chooser] = {}
        Dumping.current = self
        atexit.register(self.close)

    def pause(self) -> None:
        """Ends a stretch; its files are written. One that follows is added to them."""
        self.capture.stop()
        if self.capture.counts_on:
            self.capture.step()

    def close(self) -> None:
        """Ends it; its files are written. Called at exit too."""
        self.capture.close()
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            (self._target.root / OWN_FOLDER).rmdir()
        if Dumping.current is self:
            Dumping.current = None

    def _write(self, folder: Path, finished: bool) -> None:
        """Adds what is new to the tool's files; ours go when the step is over."""
        if self.capture.counts_on and not finished:
            return
        dump = open_dump(folder)
        if not self._by_vendor:
            self._write_files(dump, self._written.get(folder, 0))
            self._written[folder] = len(dump)
        if finished and dump.ending == "complete":
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()

    def _write_files(self, dump: Dump, first: int) -> None:
        target, switch, told = self._target, self.switch, dump.manifest
        step = told.step if target.steps else None
        folder = ptdbg_folder(target.root, rank=told.rank, step=step, tag=target.tag)
        goes_on = folder in self._files and (first > 0 or self.capture.counts_on)
        chooser = self._files[folder] if goes_on else Chooser(switch)
        self._files[folder] = chooser
        names = [call_name(dump, dump.nth(place).id) for place in range(first, len(dump))]
        places = [first + at for at in chooser.chosen(names)]
        what: dict[str, Any] = {"mode": switch.mode, "arrays": switch.arrays, "floats_only": switch.floats_only}
        if goes_on:
            append_ptdbg(dump, folder, **what, places=places)
        else:
            path = write_ptdbg(dump, folder, **what, places=places)
            if switch.mode in _COMPARED:
                _write_script(path.absolute(), switch.mode)


def _write_script(path: Path, mode: str) -> None:
    script = _SCRIPT.format(
        pkl=json.dumps(str(path)),
        data=json.dumps(str(path.with_suffix(""))),
        stacks=mode == "api_stack",
    )
    with replacing(path.with_name("compare_data.py")) as draft:
        draft.write_text(script, encoding="utf-8")


def settle_dropout(given: Any) -> None:
    """Dropout stays off, which is said, or comes back with "keep"; ArgumentError for anything else."""
    if given not in ("off", "keep"):
        raise ArgumentError(f"dropout is {given!r}; it must be 'off' or 'keep'")
    if given == "keep":
        determinism.dropout_as_written()
        return
    determinism.dropout_off()
    _log.warning("dropout is off (p = 0), as ptdbg_ascend's guide says; dropout='keep' here leaves it alone")


def acl_root(acl_config: str) -> Path:
    """The folder that a dump.json names. ConfigError if it names none."""
    content = read_config_file(acl_config).get("dump")
    path = content.get("dump_path") if isinstance(content, dict) else None
    if not isinstance(path, str) or not path:
        raise ArgumentError(f"{acl_config} names no folder: dump.dump_path is missing")
    return Path(path)
