"""Which kernels of a capture are wanted, and who writes them: on an NPU with an acl_config the vendor, elsewhere we."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ulpscope.capture.recorder import Recorder
from ulpscope.capture.selection import Selection
from ulpscope.capture.sieve import OverflowSieve
from ulpscope.frameworks.base import OpenCall
from ulpscope.frameworks.torch import npu
from ulpscope.model.dtypes import DType
from ulpscope.model.names import is_asked
from ulpscope.model.options import CaptureConfig
from ulpscope.model.records import CallId, Phase
from ulpscope.store.files.npy import read_npy
from ulpscope.store.files.pt import read_pt


def is_below(config: CaptureConfig, selection: Selection) -> Callable[[OpenCall, Phase], bool] | None:
    """Whether a call, or its backward, is the one below which kernels are wanted; None where all are."""
    asked = config.below
    if asked is None:
        return None

    def runs(call: OpenCall, phase: Phase) -> bool:
        found = is_asked(asked, CallId(call.kind, call.name, call.index, phase)) and (
            selection.forward if phase is Phase.FORWARD else selection.backward
        )
        if found:
            selection.matched.add(asked)
        return found

    return runs


def vendor_dump(
    config: CaptureConfig, recorder: Recorder, sieve: OverflowSieve | None, selection: Selection
) -> npu.Around | None:
    """What switches the vendor's dump on around calls, or None where the kernels are ours."""
    if config.acl_config is None or npu.npu_of_process() is None:
        return None
    dump = npu.VendorKernelDump(Path(config.acl_config))
    if sieve is not None:
        sieve.kernels = npu.KernelsOfOverflows(dump, sieve)
        return sieve.kernels
    assert config.below is not None
    gradients = {path: _stored_tensor(Path(path)) for path in config.backward_input}
    asked = config.below

    def is_named(call: OpenCall) -> bool:
        phases = Phase.FORWARD, Phase.BACKWARD
        found = any(is_asked(asked, CallId(call.kind, call.name, call.index, phase)) for phase in phases)
        if found:
            selection.matched.add(asked)
        return found

    return npu.KernelsBelow(dump, recorder, asked, is_named, gradients)


def _stored_tensor(path: Path) -> tuple[DType, tuple[int, ...], bytes | memoryview]:
    return read_npy(path) if path.suffix == ".npy" else read_pt(path)
