"""Every program computes the same bytes, raises nothing new and behaves as before, at every level."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ulpscope
from integration.runs import LEVELS, STEPS, Build, Program, assert_same, run_bare, run_captured, whole_dumps
from torture import (
    cases_autograd,
    cases_compilers,
    cases_containers,
    cases_layers,
    cases_modules,
    cases_more,
    cases_objects,
    cases_state,
    cases_tensors,
    cases_training,
    cases_transforms,
    cases_values,
)

PROMISE = "the run is not changed"
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {level: (level, {}) for level in LEVELS}
SETTINGS["md5"] = ("mix", {"tensors": True, "checksum": True})
# Only the calls that overflow are kept; every value is looked at all the same.
SETTINGS["overflows"] = ("mix", {"overflows": 100_000})
MODULES = (
    cases_tensors,
    cases_containers,
    cases_autograd,
    cases_objects,
    cases_layers,
    cases_compilers,
    cases_more,
    cases_state,
    cases_transforms,
    cases_modules,
    cases_values,
    cases_training,
)


def functions_of(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if inspect.isfunction(value)}


CASES: dict[str, Build] = {
    name: function
    for module in MODULES
    for name, function in functions_of(module).items()
    if function.__module__ == module.__name__
    and not name.startswith("_")
    and inspect.signature(function).return_annotation is Program
}
HOLDS: dict[str, Callable[[ulpscope.Dump, str], None]] = {
    name.removeprefix("holds_"): function
    for module in MODULES
    for name, function in functions_of(module).items()
    if name.startswith("holds_")
}
assert HOLDS.keys() <= CASES.keys(), HOLDS.keys() - CASES.keys()


# Where a value may be odd; the rest differs from other levels in nothing.
LOOKED_AT = (cases_tensors, cases_containers, cases_more, cases_transforms, cases_modules, cases_values)
RUNS = [
    pytest.param(name, setting, id=f"{name}-{setting}")
    for name, build in CASES.items()
    for setting in SETTINGS
    if setting != "overflows" or build.__module__ in {module.__name__ for module in LOOKED_AT}
]


def without_versions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_versions(item) for key, item in value.items() if key != "version"}
    return [without_versions(item) for item in value] if isinstance(value, list) else value


@dataclass
class Bare:
    """What a program does by itself."""

    result: Any
    warned: Counter[str]


@pytest.fixture(scope="module")
def bare() -> dict[str, Bare]:
    return {}


@pytest.fixture(scope="module")
def models() -> list[tuple[str, str, weakref.ref[nn.Module]]]:
    """The models of all captured programs."""
    return []


def watched(build: Build, found: list[weakref.ref[nn.Module]]) -> Build:
    def build_watched() -> Program:
        program = build()
        if program.model is not None:
            found.append(weakref.ref(program.model))
        return program

    return build_watched


def warned_by(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = run()
    return result, Counter(f"{item.category.__name__}: {item.message}".splitlines()[0] for item in found)


PLACES: tuple[Any, ...] = (
    torch, F, torch.Tensor, nn.Module, torch.overrides, torch.autograd, torch.autograd.graph, torch.distributed, torch.jit,
    torch.optim.Optimizer, torch.utils, threading.Thread, sys, os, signal,
)  # fmt: skip


def attributes() -> dict[tuple[str, str], tuple[Any, Any]]:
    """What torch and Python consist of, and the code of what can be called."""
    return {
        (place.__name__, name): (value, value.__code__ if type(value) is FunctionType else None)
        for place in PLACES
        for name, value in vars(place).items()
        if name not in ("last_type", "last_value", "last_traceback", "last_exc")
    }


def changed(before: dict[tuple[str, str], tuple[Any, Any]]) -> list[str]:
    now = attributes()
    return [
        ".".join(key)
        for key, (value, code) in before.items()
        if key in now and not (now[key][0] is value and now[key][1] is code)
    ]


@pytest.mark.parametrize(("case", "setting"), RUNS)
def test_the_program_is_the_same_and_its_dump_is_whole(
    case: str,
    setting: str,
    tmp_path: Path,
    bare: dict[str, Bare],
    models: list[tuple[str, str, weakref.ref[nn.Module]]],
) -> None:
    level, options = SETTINGS[setting]
    if case not in bare:
        bare[case] = Bare(*warned_by(lambda: run_bare(CASES[case])))
    alone = bare[case]
    alive: list[weakref.ref[nn.Module]] = []
    before = attributes()
    captured, warned = warned_by(lambda: run_captured(watched(CASES[case], alive), tmp_path / "run", level, **options))
    assert changed(before) == []
    if level == "kernel":
        # Under any dispatch mode the autograd engine adds gradients out of place: same bytes, another version.
        assert_same(without_versions(alone.result), without_versions(captured))
    else:
        assert_same(alone.result, captured)
    assert not warned - alone.warned, f"new warnings: {warned - alone.warned}"
    models += [(case, setting, model) for model in alive]
    dumps = ulpscope.open_run(tmp_path / "run")
    for dump in whole_dumps(tmp_path / "run", len(dumps)):
        if case in HOLDS and setting != "overflows":
            HOLDS[case](dump, level)
    assert level == "module" or len(dumps) == STEPS


@pytest.mark.case("nothing is held: models of all programs")
def test_no_model_outlives_its_program(models: list[tuple[str, str, weakref.ref[nn.Module]]]) -> None:
    gc.collect()
    left = [(case, setting) for case, setting, model in models if model() is not None]
    # A few live on by themselves: in a cache of dynamo, in a graph that nobody freed.
    for case in {case for case, _ in left}:
        found: list[weakref.ref[nn.Module]] = []
        run_bare(watched(CASES[case], found))
        gc.collect()
        if any(model() is not None for model in found):
            left = [each for each in left if each[0] != case]
    assert left == []
