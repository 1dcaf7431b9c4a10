"""Any dump as a native one: values with their elements are measured anew, the others keep the numbers they have."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.model.dtypes import dtype_named
from ulpscope.model.errors import DumpError
from ulpscope.model.records import CallRecord, Summary, Value
from ulpscope.native import measuring
from ulpscope.native.schema import CALL, FORMAT_VERSION, NONE32, NONE64, PHASE_NUMBER, RAISED, RECOMPUTED, TOLD
from ulpscope.store.dump import Dump
from ulpscope.store.parts import with_parts
from ulpscope.store.writer import DumpWriter

_RING = 16 << 20
_FLAGS = measuring.STATS | measuring.CRC | measuring.SKETCH


def write_native(dump: Dump, folder: Path) -> None:
    """Writes a dump into a new folder in the native format. Raises CaptureError when the folder exists."""
    told = dump.manifest
    manifest = {
        "format": FORMAT_VERSION,
        "framework": told.framework,
        "level": told.level,
        "step": told.step,
        "rank": told.rank,
        "world_size": told.world_size,
        "state": told.state,
        "config": told.config if dump.recorded_by == "native" else {**told.config, "source": dump.recorded_by},
        "environment": told.environment,
        "notes": list(told.notes),
    }
    # A dump that was cut stays "open" in what it says of itself: the copy ends where the original does.
    if told.state == "open":
        manifest |= {"state": "incomplete", "notes": [*told.notes, dump.ending]}
    writer = DumpWriter(payload_bytes=_RING if told.config.get("tensors") else 0)
    writer.on_failure = lambda _: None  # told below
    writer.open(folder, {**manifest, "state": "open"})
    try:
        copy = _Copy(dump, writer)
        for call in dump.calls():
            copy.add(call)
        counts = {"calls": len(dump), "measures": copy.measures, "payload_bytes": copy.payload_bytes}
        writer.close({**manifest, "counts": counts})
    finally:
        writer.shutdown()
    if writer.failure is not None:
        raise DumpError(writer.failure)


class _Copy:
    def __init__(self, dump: Dump, writer: DumpWriter) -> None:
        self.measures = 0
        self.payload_bytes = 0
        self._dump = dump
        self._writer = writer
        self._texts: dict[str, int] = {}
        self._stacks: dict[int, int] = {}
        self._measured: dict[tuple[Any, ...], int] = {}

    def add(self, call: CallRecord) -> None:
        row = [number for value in call.values for number in self._value(value)]
        self._writer.commit(
            CALL.pack(
                seq=call.seq,
                parent=NONE64 if call.parent is None else call.parent,
                origin=NONE64 if call.origin is None else call.origin,
                kind=self._text(call.id.kind),
                name=self._text(call.id.name),
                index=call.id.index,
                again=call.id.again,
                values=len(call.values),
                stack=self._stack(call),
                note=NONE32 if call.error is None else self._text(call.error),
                module=self._text(call.module) if call.module else NONE32,
                thread=call.thread,
                phase=PHASE_NUMBER[call.id.phase],
                flags=(RECOMPUTED if call.recomputed else 0) | (RAISED if call.error is not None else 0),
            ),
            np.array(row, dtype="<u4").tobytes(),
        )

    def _text(self, content: Any) -> int:
        text = json.dumps(content, allow_nan=False)
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = self._writer.add_string(text)
        return found

    def _stack(self, call: CallRecord) -> int:
        if call.stack is None:
            return NONE32
        found = self._stacks.get(call.stack)
        if found is None:
            rows = [
                [frame.file, frame.line, frame.function, frame.text, frame.library] for frame in self._dump.stack(call)
            ]
            found = self._stacks[call.stack] = self._text({"frames": rows, "parent": None})
        return found

    def _value(self, value: Value) -> tuple[int, int, int, int]:
        meta: dict[str, Any] = {"type": value.type}
        for key in ("dtype", "shape", "stride", "device", "requires_grad"):
            item = getattr(value, key)
            if item is not None:
                meta[key] = list(item) if isinstance(item, tuple) else item
        text: dict[str, Any] = {} if value.error is None else {"error": value.error}
        if not value.is_tensor and (value.scalar is not None or value.type == "NoneType"):
            text["value"] = value.scalar
        meta |= {key: item for key, item in value.extra.items() if key not in meta}
        if value.parts:
            text["parts"] = {
                name: {"dtype": part.dtype, "shape": list(part.shape or ()), "measure": self._measure(part)}
                for name, part in value.parts
            }
        slot = self._text([value.slot.role.value, *value.slot.path])
        return slot, self._text(meta), self._measure(value), self._text(text) if text else NONE32

    def _measure(self, value: Value) -> int:
        if value.payload is not None:
            key: tuple[Any, ...] = (value.payload, value.dtype, value.shape)
        elif value.stats is not None or value.checksum is not None:
            key = (repr(value.stats), value.checksum)  # 1, 1.0 and True are equal, and not the same
        else:
            return NONE32
        found = self._measured.get(key)
        if found is None:
            number = self._anew(value) if value.payload is not None else self._told(value)
            found = self._measured[key] = number
            self.measures += 1
        return found

    def _anew(self, value: Value) -> int:
        bits = np.ascontiguousarray(self._dump.load_bits(value))
        dtype = dtype_named(str(value.extra.get("stored_dtype", value.dtype)))
        shape = tuple(value.extra.get("stored_shape", value.shape or ()))
        place = self._writer.add_payload(bits.ctypes.data, dtype.itemsize, shape, None, bits.nbytes)
        self.payload_bytes += bits.nbytes
        return self._writer.add_measure(bits.ctypes.data, dtype.code, shape, None, _FLAGS, place)

    def _told(self, value: Value) -> int:
        row = np.zeros((), dtype=measuring.ROW)
        row["payload_offset"] = NONE64
        if value.stats is not None:
            _fill(row, value.stats)
        if value.checksum is not None:
            row["crc"] = with_parts(value.checksum, value.parts, value.extra)
            row["kind"] |= measuring.CRC
        return self._writer.add_measured(row.tobytes())


def _fill(row: Any, stats: Summary) -> None:
    row["numel"] = stats.numel
    if stats.counted:
        numbers: list[float | int | None] = [stats.finite_max, stats.finite_min, stats.finite_sum, stats.finite_norm]
        for field, count in (("nan", "nan_count"), ("posinf", "posinf_count"), ("neginf", "neginf_count")):
            row[field] = getattr(stats, count)
        row["zero"] = stats.zero_count
        kind = measuring.STATS
    else:
        numbers = [stats.max, stats.min, stats.mean, stats.norm]
        kind = TOLD
        row["known"] = sum(1 << bit for bit, number in enumerate(numbers) if number is not None)
    extremes = [0 if number is None else number for number in numbers[:2]]
    unsigned = max(extremes) >= 1 << 63
    if all(isinstance(number, int) for number in extremes) and not (unsigned and min(extremes) < 0):
        kind |= measuring.KIND_UNSIGNED if unsigned else measuring.KIND_SIGNED
        form = "<Q" if unsigned else "<q"
    else:
        form = "<d"
    (row["max_bits"],) = struct.unpack("<Q", struct.pack(form, extremes[0]))
    (row["min_bits"],) = struct.unpack("<Q", struct.pack(form, extremes[1]))
    row["sum"], row["norm"] = (0.0 if number is None else number for number in numbers[2:])
    row["kind"] = kind
