"""Every program computes the same bytes, raises nothing new and behaves as before, at every level."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ulpscope
from integration.runs import LEVELS, STEPS, Build, Program, assert_same, run_bare, run_captured, whole_dumps
from torture import (
    cases_autograd,
    cases_compilers,
    cases_containers,
    cases_layers,
    cases_more,
    cases_objects,
    cases_state,
    cases_tensors,
)

PROMISE = "the run is not changed"
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {level: (level, {}) for level in LEVELS}
SETTINGS["md5"] = ("mix", {"tensors": True, "checksum": True})
MODULES = (
    cases_tensors,
    cases_containers,
    cases_autograd,
    cases_objects,
    cases_layers,
    cases_compilers,
    cases_more,
    cases_state,
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


# Cases that do not hold yet, and why.
KNOWN = {
    ("zero_tensors", "kernel"): "torch fails with any dispatch mode on: a number reaches aten::expand as no tensor",
}
RUNS = [
    pytest.param(
        name,
        setting,
        marks=pytest.mark.xfail(strict=True, reason=KNOWN[name, setting]) if (name, setting) in KNOWN else (),
        id=f"{name}-{setting}",
    )
    for name in CASES
    for setting in SETTINGS
]


def without_versions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_versions(item) for key, item in value.items() if key != "version"}
    return [without_versions(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def bare() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("case", "setting"), RUNS)
@pytest.mark.filterwarnings("ignore")
def test_the_program_is_the_same_and_its_dump_is_whole(
    case: str, setting: str, tmp_path: Path, bare: dict[str, Any]
) -> None:
    level, options = SETTINGS[setting]
    if case not in bare:
        bare[case] = run_bare(CASES[case])
    captured = run_captured(CASES[case], tmp_path / "run", level, **options)
    if level == "kernel":
        # Under any dispatch mode the autograd engine adds gradients out of place: same bytes, another version.
        assert_same(without_versions(bare[case]), without_versions(captured))
    else:
        assert_same(bare[case], captured)
    dumps = ulpscope.open_run(tmp_path / "run")
    for dump in whole_dumps(tmp_path / "run", len(dumps)):
        if case in HOLDS:
            HOLDS[case](dump, level)
    assert level == "module" or len(dumps) == STEPS
