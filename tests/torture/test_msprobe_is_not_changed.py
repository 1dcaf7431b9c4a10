"""The same programs through the debuggers of msprobe and ptdbg_ascend: same bytes, and files that any JSON parser reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ulpscope
from integration.runs import STEPS, assert_same, frozen, run_bare, seed
from integration.runs import _whole as whole
from torture import cases_containers, cases_tensors
from torture.test_run_is_not_changed import CASES
from ulpscope.compat.msprobe.debugger import PrecisionDebugger
from ulpscope.compat.ptdbg_ascend.debugger import PrecisionDebugger as OlderDebugger

PROMISE = "the run is not changed"
# Programs that change what the debugger sets when it is made.
OTHERWISE = {"hooks_left", "deepcopy_after"}

# Odd values and names are what the files of msprobe differ in; the rest is long.
ALWAYS = (cases_tensors.__name__, cases_containers.__name__)


def run_debugged(case: str, path: Path) -> Any:
    """Three steps under msprobe's debugger. It sets seeds when it is made, so the program's come after."""
    debugger = PrecisionDebugger(dump_path=str(path), task="tensor", level="mix")
    try:
        seed()
        program = CASES[case]()
        results = []
        for _ in range(STEPS):
            debugger.start(program.model)
            results.append(frozen(program.step()))
            debugger.stop()
            debugger.step()
        return whole(program, results)
    finally:
        debugger._close()


def run_older(case: str, path: Path) -> Any:
    """Three steps under ptdbg_ascend's debugger, all elements stored."""
    debugger = OlderDebugger(dump_path=str(path), hook_name="dump", step=list(range(STEPS)))
    debugger.configure_hook(mode="all")
    try:
        seed()
        program = CASES[case]()
        results = []
        for _ in range(STEPS):
            debugger.start()
            results.append(frozen(program.step()))
            debugger.stop()
            debugger.step()
        return whole(program, results)
    finally:
        debugger._close()


def no_constant(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if build.__module__ in ALWAYS else pytest.mark.slow)
        for name, build in CASES.items()
        if name not in OTHERWISE
    ],
)


@each_case
@pytest.mark.filterwarnings("ignore")
def test_the_program_is_the_same_and_dump_json_is_json(case: str, tmp_path: Path) -> None:
    bare = run_bare(CASES[case])
    assert_same(bare, run_debugged(case, tmp_path / "run"))
    found = sorted((tmp_path / "run").glob("step*/rank*/*.json"))
    assert len({path.parent for path in found}) == STEPS
    for path in found:
        json.loads(path.read_text(encoding="utf-8"), parse_constant=no_constant)
    for dump in ulpscope.open_run(tmp_path / "run"):
        assert len(dump)
        for record in dump.calls():
            for value in record.values:
                if value.payload is not None:
                    dump.load(value)
    outside = [path for path in tmp_path.iterdir() if path.name != "run"]
    assert outside == []


@each_case
@pytest.mark.filterwarnings("ignore")
def test_the_program_is_the_same_and_the_lines_are_json(case: str, tmp_path: Path) -> None:
    bare = run_bare(CASES[case])
    assert_same(bare, run_older(case, tmp_path / "run"))
    for path in (tmp_path / "run").rglob("*.pkl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            json.loads(line)
    for dump in ulpscope.open_run(tmp_path / "run"):
        for record in dump.calls():
            for value in record.values:
                if value.payload is not None:
                    dump.load(value)
    assert [path for path in tmp_path.iterdir() if path.name != "run"] == []
