"""The fixed-width rows of a dump. Each table is a file of such rows, so reading one is one numpy call."""

from __future__ import annotations

import struct

import numpy as np

from ulpscope.model.records import Phase
from ulpscope.native import measuring

NONE32 = 0xFFFFFFFF
NONE64 = 0xFFFFFFFFFFFFFFFF
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.PARAMETERS_GRAD, Phase.STEP, Phase.DEBUG)
PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}

RECOMPUTED = 1
RAISED = 2

CALL = np.dtype(
    [
        ("seq", "<u8"),
        ("parent", "<u8"),
        ("origin", "<u8"),
        ("first_value", "<u8"),
        ("kind", "<u4"),
        ("name", "<u4"),
        ("index", "<u4"),
        ("again", "<u4"),
        ("values", "<u4"),
        ("stack", "<u4"),
        ("note", "<u4"),
        ("module", "<u4"),
        ("thread", "<u4"),
        ("phase", "u1"),
        ("flags", "u1"),
        ("pad", "<u2"),
    ]
)
CALL_ROW = struct.Struct("<4Q9I2BH")

VALUE = np.dtype([("slot", "<u4"), ("meta", "<u4"), ("measure", "<u4"), ("text", "<u4")])
VALUE_FIELDS = 4
VALUE_BYTES = VALUE.itemsize

# In `kind` of a measure: the numbers are another tool's, `sum` is the mean, and bits 0 to 3 of `reserved` say which of
# max, min, mean and norm it gave.
TOLD = 32
# The row was reserved and a device was to fill it in.
PENDING = 64

# A journal frame: magic, body length, where each table's bytes belong, how many there are.
FRAME = struct.Struct("<4sI5Q5I4x")
FRAME_MAGIC = b"ulpF"


def _unknown() -> bytes:
    row = np.zeros((), dtype=measuring.ROW)
    row["kind"], row["payload_offset"] = PENDING, NONE64
    return row.tobytes()


# A measure that is not known yet.
UNKNOWN = _unknown()
