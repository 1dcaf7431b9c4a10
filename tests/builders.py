"""Dumps made by hand, for tests that need no framework."""

from __future__ import annotations

import ctypes
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.model.dtypes import DTYPES
from ulpscope.model.records import Phase
from ulpscope.native import measuring
from ulpscope.native.schema import CALL, FORMAT_VERSION, NONE32, NONE64, PHASE_NUMBER, VALUE
from ulpscope.store.run_folder import dump_folder
from ulpscope.store.writer import DumpWriter


def manifest(step: int = 0, rank: int = 0, state: str = "complete", **more: Any) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "framework": "pytorch",
        "level": "op",
        "step": step,
        "rank": rank,
        "world_size": 1,
        "state": state,
        "config": {"tensors": True},
        "environment": {},
        "notes": [],
        **more,
    }


class DumpBuilder:
    """Writes calls with numpy arrays as values, through the real writer."""

    def __init__(self, run: Path, *, step: int = 0, rank: int = 0, payload_mb: int = 1) -> None:
        self.folder = dump_folder(run, step, rank)
        self.manifest = manifest(step, rank)
        self.writer = DumpWriter(payload_bytes=payload_mb << 20)
        self.writer.open(self.folder, {**self.manifest, "state": "open"})
        self.seq = 0
        self._texts: dict[str, int] = {}

    def text(self, content: Any) -> int:
        key = json.dumps(content)
        if key not in self._texts:
            self._texts[key] = self.writer.add_string(key)
        return self._texts[key]

    def call(
        self,
        kind: str,
        name: str,
        index: int = 0,
        phase: Phase = Phase.FORWARD,
        values: dict[tuple[Any, ...], Any] | None = None,
        **fields: int,
    ) -> int:
        """Adds one call; `values` maps (role, *path) to an array, or to a plain value."""
        row: list[int] = []
        for slot, value in (values or {}).items():
            row += [self.text(list(slot)), *self._value(value)]
        seq = self.seq
        self.seq += 1
        self.writer.commit(
            CALL.pack(
                seq=seq,
                kind=self.text(kind),
                name=self.text(name),
                index=index,
                values=len(row) // 4,
                phase=PHASE_NUMBER[phase],
                **{"parent": NONE64, "origin": NONE64, "stack": NONE32, "note": NONE32, "module": NONE32, **fields},
            ),
            np.array(row, dtype="<u4").tobytes(),
        )
        assert not len(row) * 4 % VALUE.size
        return seq

    def standing_still(self) -> AbstractContextManager[Any]:
        """Within it nothing goes from the rings into the files: a copy is what is found if the process dies at that moment."""
        return self.writer._drain_lock

    def close(self) -> Path:
        self.writer.close(self.manifest)
        self.writer.shutdown()
        return self.folder

    def _value(self, value: Any) -> tuple[int, int, int]:
        if not isinstance(value, np.ndarray):
            return self.text({"type": type(value).__name__}), NONE32, self.text({"value": value})
        dtype = DTYPES[str(value.dtype)]
        array = np.ascontiguousarray(value)
        meta = {
            "type": "torch.Tensor",
            "dtype": f"torch.{value.dtype}",
            "shape": list(value.shape),
            "stride": [step // array.itemsize for step in array.strides],
            "device": "cpu",
            "requires_grad": False,
        }
        pointer = array.ctypes.data_as(ctypes.c_void_p).value or 0
        payload = self.writer.add_payload(pointer, dtype.itemsize, value.shape, None, array.nbytes)
        flags = measuring.STATS | measuring.CRC | measuring.SKETCH
        return self.text(meta), self.writer.add_measure(pointer, dtype.code, value.shape, None, flags, payload), NONE32
