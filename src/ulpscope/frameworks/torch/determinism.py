"""Fixing every source of randomness that the seeds name."""

from __future__ import annotations

import ast
import inspect
import os
import random
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.modules.dropout import Dropout, Dropout2d, Dropout3d

from ulpscope.errors import ConfigError
from ulpscope.frameworks.torch.codeswap import CodeSwap


def dropout_off() -> None:
    """Sets p of dropout, dropout2d and dropout3d, functions and layers, to zero for this process. Twice is once.

    Only code is exchanged: the functions stay the same objects, and torch.compile can still read them.
    """
    for function in (F.dropout, F.dropout2d, F.dropout3d):
        _begin_with(function, "p = 0.0")
    layer: Any = Dropout.__base__  # has the constructor of all of them
    if layer.__init__.__code__.co_filename == inspect.getfile(layer):
        CodeSwap(layer.__init__, _without_dropout).install()


def _without_dropout(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The constructor of a dropout layer: the three that the seeds name get p = 0."""
    layer, *rest = args
    if type(layer) in (Dropout, Dropout2d, Dropout3d):
        return original(layer, 0.0, *rest[1:], **{key: value for key, value in kwargs.items() if key != "p"})
    return original(*args, **kwargs)


def _begin_with(function: Any, line: str) -> None:
    """Puts one line before the body of a function, behind its docstring."""
    if line in function.__code__.co_consts:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    # The line stands there as a text too, to be known again.
    definition.body[1:1] = ast.parse(f"_done = {line!r}\n{line}").body
    scope: dict[str, Any] = dict(function.__globals__)
    exec(compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec"), scope)
    function.__code__ = scope[function.__name__].__code__


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
