"""`ulpscope compare` as a person runs it: exit codes, what is printed, what is written."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
from click.testing import CliRunner, Result

from builders import DumpBuilder
from ulpscope.cli.main import cli
from ulpscope.model.records import Phase
from ulpscope.store.formats.msprobe_writer import write_msprobe
from ulpscope.store.registry import open_dump

GENERATOR = np.random.default_rng(3)
X = GENERATOR.standard_normal((16, 32)).astype(np.float32)
W = GENERATOR.standard_normal((32, 32)).astype(np.float32)


def record(
    run: Path, *, fault: int | None = None, eps: float = 1e-5, weight: Any = W, calls: int = 6, step: int = 0
) -> Path:
    """A chain of matrix products; `fault` is the one that scales eight columns of its output."""
    builder = DumpBuilder(run, step=step)
    x = X
    for index in range(calls):
        y = (x @ weight / np.float32(5.6)).astype(np.float32)
        if index == fault:
            y[:, :8] *= np.float32(0.9)
        values = {("input", 0): x, ("input", 1): weight, ("input", "eps"): eps, ("output", 0): y}
        builder.call("Functional", "linear", index, Phase.FORWARD, values, module=builder.text(f"layers.{index}"))
        x = y
    return builder.close()


def compare(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def test_runs_that_agree_exit_with_0_and_say_so(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t")
    result = compare(tmp_path / "r", tmp_path / "t")
    assert result.exit_code == 0, result.output
    assert "The runs agree" in result.output


def test_a_fault_is_named_with_its_module_and_exits_with_1(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t", fault=3)
    result = compare(tmp_path / "r", tmp_path / "t")
    assert result.exit_code == 1
    assert "First divergence: layers.3, linear, forward" in result.output
    assert "Functional.linear.3.forward" in result.output
    assert "1 introduce error · 2 inherit it" in result.output


def test_the_document_says_the_same_and_is_the_same_each_time(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t", fault=3)
    compare(tmp_path / "r", tmp_path / "t", "-o", tmp_path / "out")
    first = (tmp_path / "out" / "result.json").read_bytes()
    compare(tmp_path / "r", tmp_path / "t", "-o", tmp_path / "out")
    assert (tmp_path / "out" / "result.json").read_bytes() == first
    document = json.loads(first)
    assert document["verdict"] == "differs"
    assert document["first"]["call"] == "Functional.linear.3.forward"
    assert document["first"]["module"] == "layers.3"
    assert document["first"]["times_expected"] > 10
    assert document["counts"]["statuses"] == {"identical": 3, "introduced": 1, "inherited": 2}


def test_another_argument_is_a_finding_of_its_own(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t", eps=1e-3)
    result = compare(tmp_path / "r", tmp_path / "t")
    assert "input.eps is 1e-05 in the reference, 0.001 in the target" in result.output


def test_other_weights_are_said_to_come_from_outside(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t", weight=W * np.float32(1.01))
    result = compare(tmp_path / "r", tmp_path / "t")
    assert "input.1 differs, and no recorded call wrote it" in result.output


def test_a_call_more_on_one_side_is_listed_and_is_a_difference(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t", calls=7)
    result = compare(tmp_path / "r", tmp_path / "t")
    assert result.exit_code == 1
    assert "1 only in the target" in result.output
    assert "Functional.linear.6.forward: the reference has no such call" in result.output


@pytest.mark.parametrize("form", ["text", "json", "md", "github", "junit"])
def test_every_format_names_the_call(tmp_path: Path, form: str) -> None:
    record(tmp_path / "r"), record(tmp_path / "t", fault=2)
    result = compare(tmp_path / "r", tmp_path / "t", "--format", form)
    assert result.exit_code == 1
    assert "Functional.linear.2.forward" in result.output
    if form == "json":
        json.loads(result.output)
    if form == "junit":
        assert ElementTree.fromstring(result.output).attrib["failures"] == "1"


def test_every_row_goes_into_a_workbook_or_a_csv(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t", fault=2)
    compare(tmp_path / "r", tmp_path / "t", "-o", tmp_path / "out", "--xlsx")
    compare(tmp_path / "r", tmp_path / "t", "-o", tmp_path / "out", "--csv")
    sheet = openpyxl.load_workbook(tmp_path / "out" / "compare_step0_rank0.xlsx").active
    cells = [[cell.value for cell in row] for row in sheet.iter_rows()]
    with (tmp_path / "out" / "compare_step0_rank0.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    assert cells[0] == lines[0]
    assert len(cells) == len(lines) == 1 + 6 * 4
    verdict = cells[0].index("verdict")
    assert [row[verdict] for row in cells[1:]].count("fail") == 1 + 2 * 3


def test_a_killed_run_is_compared_as_far_as_it_goes_and_exits_with_3(tmp_path: Path) -> None:
    record(tmp_path / "r")
    folder = record(tmp_path / "t")
    text = (folder / "manifest.json").read_text().replace('"complete"', '"open"')
    (folder / "manifest.json").write_text(text)
    result = compare(tmp_path / "r", tmp_path / "t")
    assert result.exit_code == 3
    assert "before the step was closed" in result.output


def test_runs_with_nothing_in_common_exit_with_4(tmp_path: Path) -> None:
    record(tmp_path / "r", calls=0), record(tmp_path / "t", calls=0)
    assert compare(tmp_path / "r", tmp_path / "t").exit_code == 4


def test_what_is_no_run_is_one_clear_error(tmp_path: Path) -> None:
    record(tmp_path / "r")
    result = compare(tmp_path / "r", tmp_path / "nowhere")
    assert "does not exist" in str(result.exception)


def test_exit_zero_leaves_the_answer_to_the_reader(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t", fault=2)
    assert compare(tmp_path / "r", tmp_path / "t", "--exit-zero").exit_code == 0


def test_many_steps_are_worked_on_by_several_processes(tmp_path: Path) -> None:
    for step in range(3):
        record(tmp_path / "r", step=step), record(tmp_path / "t", step=step, fault=3 if step == 1 else None)
    result = compare(tmp_path / "r", tmp_path / "t", "-j", "2")
    assert "step 1, rank 0" in result.output
    assert "18 of 18 calls in 3 dumps" in result.output


def test_a_native_run_is_compared_with_one_of_msprobe(tmp_path: Path) -> None:
    record(tmp_path / "r")
    target = record(tmp_path / "t", fault=4)
    for task in ("statistics", "tensor"):
        write_msprobe(open_dump(target), tmp_path / task / "step0" / "rank0", task=task, level="L1")
        result = compare(tmp_path / "r", tmp_path / task)
        assert "Functional.linear.4.forward" in result.output
    assert "by elements" in result.output


def test_a_folder_that_cannot_be_written_is_said_and_the_answer_printed(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t")
    (tmp_path / "file").write_text("")
    result = compare(tmp_path / "r", tmp_path / "t", "-o", tmp_path / "file")
    assert "cannot write" in result.output
    assert "The runs agree" in result.output


def test_junit_passes_no_step_that_is_not_known_to_agree(tmp_path: Path) -> None:
    record(tmp_path / "r"), record(tmp_path / "t")
    payload = next((tmp_path / "t").rglob("payload.bin"))
    payload.write_bytes(payload.read_bytes()[:100])
    found = compare(tmp_path / "r", tmp_path / "t", "--format", "junit")
    assert found.exit_code == 3
    (case,) = ElementTree.fromstring(found.stdout).iter("testcase")
    (skipped,) = case
    assert skipped.tag == "skipped" and "could not be compared" in skipped.attrib["message"]
    empty = [DumpBuilder(tmp_path / side).close() for side in "ab"]
    found = compare(*empty, "--format", "junit")
    assert found.exit_code == 4 and "nothing to compare" in found.stdout and "skipped" in found.stdout
