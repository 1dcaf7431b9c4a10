"""forward_info_{pid}.json and backward_info_{pid}.json: what overflowing calls were given, where the program runs.

forward    {"Tensor*mul*1": {"args": [{"type": "torch.Tensor", "dtype": ..., "shape": ..., "Max": ..., "Min": ...,
           "requires_grad": ..., "datapath": ...}, {"type": "int", "value": 2}], "kwargs": {}}}
backward   {"Tensor*sqrt*0": [{"type": "torch.Tensor", ...}]}

With `need_replicate` the tensors lie in folders of their own, forward_real_data/Tensor*mul*1.0.pt, as torch saves them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.model.dtypes import dtype_named
from ulpscope.model.records import CallRecord, Phase, Role, Value
from ulpscope.report.table import replacing
from ulpscope.store.dump import Dump
from ulpscope.store.files.pt import write_pt

_FILES = {Phase.FORWARD: "forward_info", Phase.BACKWARD: "backward_info"}
_REPLICAS = {Phase.FORWARD: "forward_real_data", Phase.BACKWARD: "backward_real_data"}


class OverflowInfo:
    """The two files of this process; each is written anew with every call that is added."""

    def __init__(self, replicas: Path | None = None) -> None:
        self._folder = Path.cwd()
        self._replicas = replicas
        self._content: dict[Phase, dict[str, Any]] = {phase: {} for phase in _FILES}

    def add(self, dump: Dump, call: CallRecord, name: str, data: Path) -> None:
        """Adds a call; `name` begins its files of numbers in the folder `data`."""
        phase = call.id.phase
        if phase not in _FILES:
            return
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        title = f"{call.id.kind}*{call.id.name}*{call.id.index}"
        for value in call.values:
            if value.slot.role is Role.INPUT:
                key = ".".join(map(str, value.slot.path))
                path = data / f"{name}_input.{key}.npy"
                if self._replicas is not None and value.payload is not None:
                    path = self._replicas / _REPLICAS[phase] / f"{title}.{key}.pt"
                    _replicate(dump, value, path)
                told = _told(value, path)
                if isinstance(value.slot.path[0], int):
                    args.append(told)
                else:
                    kwargs[key] = told
        content = {"args": args, "kwargs": kwargs} if phase is Phase.FORWARD else args
        self._content[phase][title] = content
        with replacing(self._folder / f"{_FILES[phase]}_{os.getpid()}.json") as draft:
            draft.write_text(json.dumps(self._content[phase], indent=2), encoding="utf-8")


def _replicate(dump: Dump, value: Value, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bits = np.ascontiguousarray(dump.load_bits(value)).reshape(-1)
    raw = bits.view(np.uint8).data if bits.size else b""
    path.unlink(missing_ok=True)
    write_pt(path, raw, dtype_named(str(value.dtype)), value.shape or ())


def _told(value: Value, path: Path) -> dict[str, Any]:
    if not value.is_tensor:
        return {"type": value.type, "value": value.scalar}
    told: dict[str, Any] = {"type": value.type, "dtype": value.dtype, "shape": list(value.shape or ())}
    if value.stats is not None:
        told |= {"Max": value.stats.max, "Min": value.stats.min}
    told["requires_grad"] = bool(value.requires_grad)
    if path.is_file():
        told["datapath"] = str(path.absolute())
    return told
