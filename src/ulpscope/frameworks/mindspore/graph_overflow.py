"""Overflows of kernels in static graphs: MindSpore's own dump is asked for them, and looked through where it gives everything.

Devices with a flag dump only the kernels that raised it. A CPU has none: there every kernel is dumped, and those that were
given finite numbers and returned others are kept.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.frameworks.mindspore.process import WHOLE_GRAPH, execution_mode, mindspore
from ulpscope.model.errors import CaptureError

_log = logging.getLogger(__name__)
_VARIABLE = "MINDSPORE_DUMP_CONFIG"
_FILE = "kernel_graph_overflow_check.json"
_NET = "Net"
_DEVICES = tuple(range(8))
MODES = {"aicore": 1, "atomic": 2, "all": 3}
_NAME = re.compile(r"(?P<kernel>.+)\.\d+\.\d+\.\d{10,20}\.(?P<side>input|output)\.\d+\..*npy")


class GraphOverflows:
    """One check of this process, from before its first graph is compiled."""

    def __init__(self, folder: Path, *, mode: str = "all", ranks: Sequence[int] = ()) -> None:
        self._folder, self._mode, self._ranks = folder.absolute(), mode, ranks
        self.found: list[str] = []

    def start(self) -> None:
        """Asks for the dump. CaptureError where graphs do not run as a whole."""
        module = mindspore()
        running = execution_mode(module)
        if running != WHOLE_GRAPH:
            raise CaptureError(
                f"Overflow check is not supported in {running} mode when level is kernel; run static graphs with "
                "jit_level O2: mindspore.set_context(mode=mindspore.GRAPH_MODE, jit_config={'jit_level': 'O2'})"
            )
        settings: dict[str, Any] = {
            "dump_mode": 0,
            "path": str(self._folder),
            "net_name": _NET,
            "iteration": "all",
            "saved_data": "tensor" if self._sees_all(module) else "full",
            "input_output": 0,
            "kernels": [],
            "support_device": list(self._ranks or _DEVICES),
            "op_debug_mode": MODES[self._mode],
            "file_format": "npy",
        }
        path = self._folder / _FILE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            whole = {"common_dump_settings": settings, "e2e_dump_settings": {"enable": True, "trans_flag": True}}
            path.write_text(json.dumps(whole), encoding="utf-8")
        except OSError as error:
            raise CaptureError(f"cannot write {path}: {error.strerror}; choose another folder") from error
        os.environ[_VARIABLE] = str(path)
        os.environ.pop("MS_ACL_DUMP_CFG_PATH", None)

    def stop(self) -> None:
        """Looks through what was dumped, where that is everything."""
        if os.environ.pop(_VARIABLE, None) is None or not self._sees_all(mindspore()):
            return
        for folder in sorted({path.parent for path in self._folder.glob(f"rank_*/{_NET}/*/*/*.npy")}):
            self._sift(folder)

    def _sift(self, folder: Path) -> None:
        kernels: dict[str, list[tuple[str, Path]]] = defaultdict(list)
        for path in sorted(folder.glob("*.npy")):
            match = _NAME.fullmatch(path.name)
            if match is None:
                path.unlink()
            else:
                kernels[match["kernel"]].append((match["side"], path))
        for kernel, files in kernels.items():
            finite = {path: _is_finite(path) for _, path in files}
            if all(finite[path] for side, path in files if side == "input") and not all(finite.values()):
                self.found.append(kernel)
                _log.warning("%s overflows; its data are in %s", kernel, folder)
            else:
                for _, path in files:
                    path.unlink()

    def _sees_all(self, module: Any) -> bool:
        return bool(module.get_context("device_target") == "CPU")


def _is_finite(path: Path) -> bool:
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    return found.dtype.kind not in "fc" or bool(np.isfinite(found).all())
