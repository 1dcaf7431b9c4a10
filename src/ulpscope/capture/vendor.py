"""On an NPU with an acl_config the vendor writes the kernels of a capture; elsewhere they are ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ulpscope.capture.recorder import Recorder
from ulpscope.capture.sieve import OverflowSieve
from ulpscope.config import CaptureConfig
from ulpscope.dtypes import DType
from ulpscope.frameworks.base import OpenCall
from ulpscope.frameworks.torch import npu
from ulpscope.store.formats.npy import read_npy
from ulpscope.store.formats.pt import read_pt


def vendor_dump(
    config: CaptureConfig, recorder: Recorder, sieve: OverflowSieve | None, is_below: Callable[[OpenCall], bool]
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
    return npu.KernelsBelow(dump, recorder, config.below, is_below, gradients)


def _stored_tensor(path: Path) -> tuple[DType, tuple[int, ...], bytes | memoryview]:
    return read_npy(path) if path.suffix == ".npy" else read_pt(path)
