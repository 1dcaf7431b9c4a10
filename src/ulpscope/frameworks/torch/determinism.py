"""Fixing every source of randomness that the seeds name."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

from ulpscope.errors import ConfigError


def seed_all(seed: Any = 1234, deterministic: Any = False) -> None:
    """Seeds Python, numpy and torch on every device; with `deterministic`, asks torch for deterministic algorithms.

    PYTHONHASHSEED is set for child processes; the running interpreter read it when it started.
    """
    problems = []
    if isinstance(seed, bool) or not isinstance(seed, int):
        problems.append(f"seed = {seed!r}: must be an integer")
    elif not 0 <= seed < 2**32:
        problems.append(f"seed = {seed}: must be between 0 and 4294967295")
    if not isinstance(deterministic, bool):
        problems.append(f"deterministic = {deterministic!r}: must be True or False")
    if problems:
        raise ConfigError(problems, "seed_all")
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        npu.manual_seed(seed)
        npu.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.enabled = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["HCCL_DETERMINISTIC"] = "true"
        torch.use_deterministic_algorithms(True)
