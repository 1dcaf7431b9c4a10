"""The doors of torch: where calls of its library reach our mode sooner than by torch's own way; `_taps_doors.c` says how."""

from __future__ import annotations

import functools
import logging
import types
from pathlib import Path
from typing import Any

import torch

from ulpscope import taps
from ulpscope.frameworks.torch import direct, internals

log = logging.getLogger(__name__)
_MAPS = Path("/proc/self/maps")
# Which are open: a call that finds its door closed goes torch's way.
NONE, LEARNT, ALL = range(3)
_SPACES = ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")


def are_there() -> bool:
    """Without them calls go torch's way."""
    return taps.C is not None and direct.learn() and _build(taps.C)


@functools.cache
def _build(extension: Any) -> bool:
    """Once a process. Whether there are any."""
    try:
        return bool(extension.build_doors(_functions(), writable())[0])
    except Exception as error:  # another torch, or another Python
        log.debug("calls go torch's own way: %s", error)
        return False


def _functions() -> list[Any]:
    """Methods and attributes of tensors that torch's Python has left as they are, and functions."""
    tensor = vars(internals.core.TensorBase)
    kinds = (types.MethodDescriptorType, types.GetSetDescriptorType)
    found = [
        value for name, value in tensor.items() if isinstance(value, kinds) and vars(torch.Tensor).get(name) is None
    ]
    for space in (getattr(internals.core, name, None) for name in _SPACES):
        found += [getattr(space, name) for name in dir(space) if not name.startswith("__")]
    return found


def writable() -> list[tuple[int, int]]:
    """Where memory may be written, as far as the system tells."""
    try:
        text = _MAPS.read_text()
    except OSError as error:
        log.debug("attributes go torch's own way: %s", error)
        return []
    ranges = (line.split(maxsplit=2) for line in text.splitlines())
    places = (place.partition("-") for place, rights, _ in ranges if rights.startswith("rw"))
    return [(int(begin, 16), int(end, 16)) for begin, _, end in places]


def open_doors(which: int) -> None:
    """Opens these and closes all others, where there are any."""
    if taps.C is not None and (which == NONE or are_there()):
        taps.C.open_doors(which)
