"""Which kernels of a capture are wanted, and who writes them: on an NPU with an acl_config the vendor, elsewhere we."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ulpscope.capture.recorder import Recorder
from ulpscope.capture.sieve import OverflowSieve
from ulpscope.frameworks.base import OpenCall
from ulpscope.frameworks.torch import npu
from ulpscope.model.dtypes import DType
from ulpscope.model.names import call_text
from ulpscope.model.options import CaptureConfig
from ulpscope.model.records import CallId, Phase
from ulpscope.store.files.npy import read_npy
from ulpscope.store.files.pt import read_pt


def is_below(asked: str) -> Callable[[OpenCall], bool]:
    """Whether a call is the one below which kernels are wanted."""

    def is_asked(call: OpenCall) -> bool:
        name = call_text(CallId(call.kind, call.name, call.index, Phase.FORWARD))
        return asked in (name, name.removesuffix(".forward"), name.replace(".forward", ".backward"))

    return is_asked


def vendor_dump(config: CaptureConfig, recorder: Recorder, sieve: OverflowSieve | None) -> npu.Around | None:
    """What switches the vendor's dump on around calls, or None where the kernels are ours."""
    if config.acl_config is None or npu.npu_of_process() is None:
        return None
    dump = npu.VendorKernelDump(Path(config.acl_config))
    if sieve is not None:
        sieve.kernels = npu.KernelsOfOverflows(dump, sieve)
        return sieve.kernels
    assert config.below is not None
    gradients = {path: _stored_tensor(Path(path)) for path in config.backward_input}
    return npu.KernelsBelow(dump, recorder, config.below, is_below(config.below), gradients)


def _stored_tensor(path: Path) -> tuple[DType, tuple[int, ...], bytes | memoryview]:
    return read_npy(path) if path.suffix == ".npy" else read_pt(path)
