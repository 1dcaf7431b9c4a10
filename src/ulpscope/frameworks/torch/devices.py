"""What the process runs on: rank, world size, versions and devices."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from typing import Any

import numpy as np
import torch

from ulpscope.frameworks.torch.settings import settings, told, variables


def rank_and_world() -> tuple[int, int]:
    """Rank and world size from the process group, else from the environment, else 0 of 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


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
            "cpu": told(lambda: torch.backends.cpu.get_cpu_capability()),
        },
        "devices": devices,
        "flags": settings(),
        "seeds": seeds(),
        "variables": variables(),
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
