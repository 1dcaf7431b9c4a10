"""What an overflow that was recorded means: must the result overflow in its dtype, or did only this device's overflow?"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ulpscope.frameworks.torch.api_arguments import UnrunnableError
from ulpscope.frameworks.torch.overflow_replay import has_pole, overflows_wide, recorded_call, result_dtypes
from ulpscope.model.records import CallRecord, Frame
from ulpscope.store.dump import Dump


class Nature(enum.Enum):
    """Normal: float64 on the same inputs does not fit into the dtype either. Abnormal: it does. Pole: the function is infinite there."""

    NORMAL = "normal"
    ABNORMAL = "abnormal"
    POLE = "pole"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Overflow:
    """One call that was given finite values and returned others. `reason` says why its nature is unknown."""

    call: CallRecord
    step: int
    rank: int
    source: Frame | None
    nature: Nature
    reason: str = ""


def overflow_of(dump: Dump, call: CallRecord) -> Overflow:
    """A recorded overflow with its place in the program and its nature."""
    frames = dump.stack(call)
    source = next((frame for frame in frames if not frame.library), frames[0] if frames else None)
    nature, reason = Nature.UNKNOWN, ""
    try:
        given = *recorded_call(call, dump.load_bits), result_dtypes(call)
        if has_pole(*given):
            nature = Nature.POLE
        else:
            nature = Nature.NORMAL if overflows_wide(*given) else Nature.ABNORMAL
    except UnrunnableError as error:
        reason = str(error)
    return Overflow(call, dump.manifest.step, dump.manifest.rank, source, nature, reason)
