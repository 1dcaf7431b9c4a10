"""ptdbg_ascend's overflow_check over a capture that keeps only the calls that overflow; each has files of its own.

ptdbg_dump_v2.0/rank0/Tensor___add___1_forward_1.pkl      and a folder of that name: the first overflow
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.capture.session import Capture
from ulpscope.compat.ptdbg_ascend.dumping import OWN_FOLDER, Target
from ulpscope.compat.ptdbg_ascend.overflow_info import OverflowInfo
from ulpscope.compat.ptdbg_ascend.switch import ArgumentError, is_on, read_acl_config
from ulpscope.frameworks.torch.devices import rank_and_world
from ulpscope.frameworks.torch.npu import npu_of_process
from ulpscope.model.errors import CaptureError
from ulpscope.model.records import CallId
from ulpscope.store.formats.pkl_names import call_name
from ulpscope.store.formats.ptdbg_writer import ptdbg_folder, write_ptdbg
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)
_DUMP_STEP = 101  # what the tool writes into the lines of an overflow
_NAME = re.compile(r".+_(?:forward|backward)_\d+\.pkl")


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request for overflow_check."""

    limit: int = 1
    floats_only: bool = False
    acl_config: str | None = None
    replicas: bool = False


def read_request(
    *,
    mode: Any = None,
    acl_config: Any = None,
    overflow_nums: Any = 1,
    need_replicate: Any = False,
    filter_switch: Any = "OFF",
) -> Request:
    """What overflow_check is asked for; ArgumentError with the first mistake."""
    if mode not in (None, "api", "acl"):
        raise ArgumentError(f"Current mode '{mode}' is not supported. Please use the field in ['api', 'acl']")
    if type(overflow_nums) is not int or (overflow_nums < 1 and overflow_nums != -1):
        raise ArgumentError("overflow_nums must be an integer greater than 0 or set -1.")
    if not isinstance(need_replicate, bool):
        raise ArgumentError("Params need_replicate only support True or False.")
    path = read_acl_config(acl_config) if mode == "acl" else None
    if path is not None and npu_of_process() is None:
        _log.warning("mode='acl' dumps no kernels: there is no NPU in this process")
    return Request(overflow_nums, is_on(filter_switch), path, need_replicate)


class OverflowCheck:
    """One check of this process."""

    def __init__(self, target: Target, request: Request, *, model: Any = None, rank: int | None = None) -> None:
        self._target = target
        self._request = request
        self._refuse_earlier()
        self.capture = Capture(
            str(target.root / OWN_FOLDER),
            model=model,
            steps=target.steps,
            ranks=() if rank is None else (rank,),
            overflows=request.limit,
            poles=True,
            acl_config=request.acl_config,
            sketch=False,
            overwrite=True,
        )
        self.capture.on_dump = self._write
        self.capture.as_msprobe = True
        if self.capture.sieve is not None:
            self.capture.sieve.ending = self._ending
        self._written: dict[Path, int] = {}
        self._info = OverflowInfo(target.root if request.replicas else None)
        self._count = 0
        self._last = target.root
        atexit.register(self.close)

    def pause(self) -> None:
        """Ends a stretch. ValueError where its last call made the number full."""
        self.capture.stop()

    def close(self) -> None:
        """Ends it. Called at exit too."""
        self.capture.close()
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            (self._target.root / OWN_FOLDER).rmdir()

    def _ending(self, found: list[CallId]) -> BaseException:
        return ValueError(f"[overflow {len(found)} times]: dump file is saved in '{self._last}'.")

    def _folder(self, rank: int, step: int) -> Path:
        target = self._target
        return ptdbg_folder(target.root, rank=rank, step=step if target.steps else None, tag=target.tag)

    def _refuse_earlier(self) -> None:
        """Files of an earlier check would have the same names."""
        for step in self._target.steps or (0,):
            folder = self._folder(rank_and_world()[0], step)
            if folder.is_dir() and any(_NAME.fullmatch(path.name) for path in folder.iterdir()):
                raise CaptureError(
                    f"{folder} holds the overflows of an earlier run; delete them, or choose another folder"
                )

    def _write(self, folder: Path, finished: bool) -> None:
        dump = open_dump(folder)
        for place in range(self._written.get(folder, 0), len(dump)):
            self._count += 1
            call = dump.nth(place)
            self._last = write_ptdbg(
                dump,
                self._folder(dump.manifest.rank, dump.manifest.step),
                mode="api_stack",
                name=f"{call_name(dump, call.id)}_{self._count}",
                floats_only=self._request.floats_only,
                places=[place],
                dump_step=_DUMP_STEP,
            )
            self._info.add(dump, call, call_name(dump, call.id), self._last.with_suffix(""))
            _log.warning("%s overflows; its data are in %s", call_name(dump, call.id), self._last)
        self._written[folder] = len(dump)
        if finished and dump.ending == "complete":
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
