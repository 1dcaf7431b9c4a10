"""What the process runs on: rank, world size, versions, devices and every flag that changes numbers."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ulpscope.frameworks.torch import internals

_VARIABLES = [
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "HCCL_DETERMINISTIC",
    "TASK_QUEUE_ENABLE",
    "ASCEND_LAUNCH_BLOCKING",
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_COMPILE_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "XLA_FLAGS",
]


def rank_and_world() -> tuple[int, int]:
    """Rank and world size from the process group, else from the environment, else 0 of 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


def float32_products() -> dict[str, str]:
    """What factors of products of float32 are rounded to, by device and kind: `ieee` (not at all), `tf32` or `bf16`.

    The older switches raise where a program uses the newer ones, so they are asked only where there are no newer ones."""
    backends: Any = torch.backends
    kinds = {
        "cuda matmul": (backends.cuda, "matmul"),
        "cuda conv": (backends.cudnn, "conv"),
        "cuda rnn": (backends.cudnn, "rnn"),
        "cpu matmul": (backends.mkldnn, "matmul"),
        "cpu conv": (backends.mkldnn, "conv"),
        "cpu rnn": (backends.mkldnn, "rnn"),
    }
    found = {}
    for name, (backend, kind) in kinds.items():
        try:
            newer = getattr(getattr(backend, kind, None), "fp32_precision", None)
        except AssertionError:  # as older versions say that they have no such switch
            newer = None
        if newer is None:
            older = backends.cuda.matmul if name == "cuda matmul" else backends.cudnn if "cuda" in name else None
            newer = "tf32" if older is not None and older.allow_tf32 else "ieee"
        found[name] = "ieee" if newer == "none" else newer
    return found


_cuda: Any = torch.backends.cuda
_FLAGS: dict[str, Callable[[], Any]] = {
    "float32_products": float32_products,
    "cudnn_enabled": lambda: bool(torch.backends.cudnn.enabled),
    "cudnn_benchmark": lambda: bool(torch.backends.cudnn.benchmark),
    "cudnn_deterministic": lambda: bool(torch.backends.cudnn.deterministic),
    "fp16_reduced_precision_reduction": lambda: str(_cuda.matmul.allow_fp16_reduced_precision_reduction),
    "bf16_reduced_precision_reduction": lambda: str(_cuda.matmul.allow_bf16_reduced_precision_reduction),
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "default_dtype": lambda: str(torch.get_default_dtype()),
    "autocast": internals.autocast,
    "sdpa": lambda: {
        "flash": _told(lambda: _cuda.flash_sdp_enabled()),
        "memory_efficient": _told(lambda: _cuda.mem_efficient_sdp_enabled()),
        "math": _told(lambda: _cuda.math_sdp_enabled()),
        "cudnn": _told(lambda: _cuda.cudnn_sdp_enabled()),
    },
    "num_threads": torch.get_num_threads,
    "grad_enabled": torch.is_grad_enabled,
}


def _told(ask: Callable[[], Any]) -> Any:
    """An answer of torch; a text where this version cannot say."""
    try:
        return ask()
    except Exception as error:  # a border: each version says in its own way that it does not know
        return f"unknown ({type(error).__name__})"


def environment() -> dict[str, Any]:
    """The environment of the run, for the manifest."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # a forked child may not ask for the devices that its parent uses
            devices += [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
            **{
                name: getattr(sys.modules[name], "__version__", "?")
                for name in ("transformers", "torch_npu", "triton", "torchvision", "apex", "deepspeed")
                if name in sys.modules
            },
        },
        "host": {
            "system": _system(),
            "machine": platform.machine(),
            "cpu": _told(lambda: torch.backends.cpu.get_cpu_capability()),
        },
        "devices": devices,
        "flags": {name: _told(ask) for name, ask in _FLAGS.items()},
        "seeds": seeds(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def seeds() -> dict[str, int]:
    """What random numbers begin with; programs set it after they have first called torch."""
    return {"torch": torch.initial_seed()}


def _system() -> str:
    """As `platform.platform()` says it, which starts a process to find out."""
    if not sys.platform.startswith("linux"):
        return platform.platform()
    about = os.uname()
    return "-".join([about.sysname, about.release, about.machine, "with", "".join(platform.libc_ver())])


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default
