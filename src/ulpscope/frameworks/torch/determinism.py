"""Fixing every source of randomness that the seeds name."""

from __future__ import annotations

import ast
import gc
import inspect
import logging
import os
import random
import textwrap
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.modules.dropout import Dropout, Dropout2d, Dropout3d

from ulpscope.frameworks.torch.codeswap import CodeSwap
from ulpscope.model.errors import ConfigError

log = logging.getLogger(__name__)

_FUNCTIONS = (F.dropout, F.dropout2d, F.dropout3d)
_LAYERS = (Dropout, Dropout2d, Dropout3d)
_LINE = "p = 0.0"
_WRITTEN = "_p_as_written"  # in a layer that was made while dropout was off: the p that the program gave it


def dropout_off() -> None:
    """Sets p of dropout, dropout2d and dropout3d, functions and layers, to zero for this process. Twice is once.

    Only code is exchanged: the functions stay the same objects, and torch.compile can still read them.
    """
    for function in _FUNCTIONS:
        _begin_with(function, _LINE)
    _NEW_LAYER.install()


def dropout_as_written() -> None:
    """Takes `dropout_off` back, also for the layers that were made meanwhile, and for copies of them."""
    if _own_code(F.dropout) is None:
        return
    for function in _FUNCTIONS:
        function.__code__ = _own_code(function) or function.__code__
    _NEW_LAYER.remove()
    for layer in gc.get_objects():
        if type(layer) in _LAYERS and _WRITTEN in layer.__dict__:
            written = layer.__dict__.pop(_WRITTEN)
            layer.p = layer.p or written


def _without_dropout(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The constructor of a dropout layer: the three that the seeds name get p = 0."""
    original(*args, **kwargs)
    layer = args[0]
    if type(layer) in _LAYERS:
        layer.__dict__[_WRITTEN], layer.p = layer.p, 0.0


_BASE: Any = Dropout.__base__  # has the constructor of all of them
_NEW_LAYER = CodeSwap(_BASE.__init__, _without_dropout)


def _begin_with(function: Any, line: str) -> None:
    """Puts one line before the body of a function, behind its docstring. Its own code is kept among the constants."""
    if _own_code(function) is not None:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.body[1:1] = ast.parse(line).body
    scope: dict[str, Any] = dict(function.__globals__)
    exec(compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec"), scope)
    code = scope[function.__name__].__code__
    function.__code__ = code.replace(co_consts=(*code.co_consts, function.__code__))


def _own_code(function: Any) -> types.CodeType | None:
    """The code that a function had before `_begin_with`; None where it has it."""
    last = function.__code__.co_consts[-1]
    return last if isinstance(last, types.CodeType) and last.co_name == function.__name__ else None


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
    for name, value in (("deterministic", True), ("benchmark", False), ("enabled", False)):
        try:
            setattr(torch.backends.cudnn, name, value)
        except RuntimeError as error:  # the program has frozen them
            log.warning("torch.backends.cudnn.%s stays as it is: %s", name, error)
    if deterministic:
        deterministic_algorithms()


def deterministic_algorithms() -> None:
    """Asks torch for algorithms that give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["HCCL_DETERMINISTIC"] = "true"
    torch.use_deterministic_algorithms(True)
