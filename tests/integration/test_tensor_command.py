"""`ulpscope tensor` and `ulpscope convert` on files a person has: arrays, torch files, kernel dumps, values of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builders import DumpBuilder
from cann_files import MOMENT, Stored, file_name, to_nc1hwc0, write_kernel
from ulpscope.cli.main import main
from ulpscope.model.records import Phase

VALUE = "Functional.linear.0.forward.output.0"


class Terminal:
    """Runs a command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> str:
        """What it prints on stdout, or on stderr if it must end with a code above 1."""
        with pytest.raises(SystemExit) as leaving:
            main([*map(str, words)])
        out, err = self._capsys.readouterr()
        assert leaving.value.code == code, out + err
        return err if code > 1 else out


@pytest.fixture
def ulpscope(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def saved(path: Path, values: Any, dtype: str = "float32") -> Path:
    np.save(path, np.asarray(values, dtype=dtype))
    return path


def test_a_tensor_is_shown_with_its_statistics_and_elements(tmp_path: Path, ulpscope: Terminal) -> None:
    text = ulpscope("tensor", saved(tmp_path / "a.npy", [[3, 0], [np.nan, -4]]))
    assert "float32 [2, 2], 4 elements" in text
    assert "max nan" in text and "1 nan, 1 zero" in text
    assert "[[ 3.  0.]\n [nan -4.]]" in text


def test_a_large_tensor_is_shown_by_its_ends(tmp_path: Path, ulpscope: Terminal) -> None:
    text = ulpscope("tensor", saved(tmp_path / "a.npy", np.arange(40_000).reshape(2, 50, 400), "int64"))
    assert "..." in text and "39999" in text
    assert len(text.splitlines()) < 15


def test_bfloat16_in_a_torch_file_is_compared_without_torch(tmp_path: Path, ulpscope: Terminal) -> None:
    torch.save(torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16), tmp_path / "a.pt")
    torch.save(torch.tensor([1.0, 2.0, 4.03125], dtype=torch.bfloat16), tmp_path / "b.pt")
    text = ulpscope("tensor", tmp_path / "a.pt", tmp_path / "b.pt", code=1)
    assert "1 of 3 elements differ" in text
    assert "[2]                 4.0               4.03125           0.03125      0.007812     1" in text
    assert "only index 2" in text


def test_equal_tensors_end_with_0_and_tolerated_ones_too(tmp_path: Path, ulpscope: Terminal) -> None:
    a, b = saved(tmp_path / "a.npy", [1, 2, 0]), saved(tmp_path / "b.npy", [1, 2.5, 0])
    assert "all 3 elements are equal" in ulpscope("tensor", a, a)
    assert "1 of 3 elements differ, 0 by more than is tolerated" in ulpscope("tensor", a, b, "--rtol", 0.25)
    ulpscope("tensor", a, b, "--atol", 0.25, code=1)


def test_the_map_shows_the_block_that_is_off(tmp_path: Path, ulpscope: Terminal) -> None:
    values = np.ones((8, 8))
    a = saved(tmp_path / "a.npy", values)
    values[2:4, 4:6], values[7, 7] = 2.0, np.inf
    text = ulpscope("tensor", a, saved(tmp_path / "b.npy", values), code=1)
    rows = [line.strip() for line in text.splitlines() if line.startswith("  |")]
    assert rows == ["|        |"] * 2 + ["|    ##  |"] * 2 + ["|        |"] * 3 + ["|       !|"]
    assert "dimension 0 (of 8): 2 to 7, 3 of them" in text
    assert "infinite in the target only" in text


def test_json_has_the_same(tmp_path: Path, ulpscope: Terminal) -> None:
    a, b = saved(tmp_path / "a.npy", [[0, 2]]), saved(tmp_path / "b.npy", [[1, np.inf]])
    found = json.loads(ulpscope("tensor", a, b, "--format", "json", code=1))
    assert (found["differing"], found["off"], found["count"]) == (2, 2, 2)
    assert [(each["index"], each["error"]) for each in found["worst"]] == [([0, 1], "inf"), ([0, 0], 1.0)]
    assert found["metrics"]["max_relative_error"] == "inf"
    assert json.loads(ulpscope("tensor", a, "--format", "json"))["shape"] == [1, 2]


def test_values_of_runs_are_compared_by_name(tmp_path: Path, ulpscope: Terminal) -> None:
    for side, last in (("a", 3.0), ("b", 4.0)):
        builder = DumpBuilder(tmp_path / side)
        builder.call("Functional", "linear", 0, Phase.FORWARD, {("output", 0): np.array([1.0, last], np.float32)})
        builder.close()
    a, b = (f"{tmp_path / side}::{VALUE}" for side in "ab")
    text = ulpscope("tensor", a, b, "-n", 1, code=1)
    assert "1 of 2 elements differ" in text
    assert "Did you mean 'Functional.linear.0.forward.output.0'" in ulpscope("tensor", a[:-1] + "1", b, code=3)
    assert "no tensor; name one" in ulpscope("tensor", tmp_path / "a", code=3)
    # A value of a run against a file of the same elements.
    assert "all 2 elements are equal" in ulpscope("tensor", a, saved(tmp_path / "a.npy", [1, 3]))


def test_kernel_dumps_are_shown_in_the_shape_of_the_program(tmp_path: Path, ulpscope: Terminal) -> None:
    x = np.arange(12, dtype=np.float16).reshape(1, 3, 2, 2)
    folded = Stored(to_nc1hwc0(x), "NC1HWC0", origin=x.shape)
    dump = write_kernel(tmp_path / "k", [folded], [folded])
    assert "float16 [1, 3, 2, 2], 12 elements" in ulpscope("tensor", dump)
    assert "all 12 elements are equal" in ulpscope("tensor", f"{dump}::input.0", f"{dump}::output.0")
    assert "it has input.0, output.0" in ulpscope("tensor", f"{dump}::output.9", code=3)
    several = write_kernel(tmp_path / "k", [], [folded, folded], op_name="two")
    assert "name one" in ulpscope("tensor", several, code=3)
    assert "two                                       output.1" in ulpscope("tensor", tmp_path / "k")


def test_folders_are_compared_pair_by_pair_and_a_corrupt_file_is_named(tmp_path: Path, ulpscope: Terminal) -> None:
    for side, number in (("a", 1.0), ("b", 2.0)):
        write_kernel(tmp_path / side, [], [Stored(np.full(4, 1.0, np.float32))], op_name="same")
        write_kernel(tmp_path / side, [], [Stored(np.full(4, number, np.float32))], op_name="off", moment=MOMENT + 1)
    (tmp_path / "b" / file_name(op_name="cut")).write_bytes(b"x" * 20)
    text = ulpscope("tensor", tmp_path / "a", tmp_path / "b", "--csv", tmp_path / "pairs.csv", code=1)
    assert "3 tensors: 1 equal, 1 differ, 1 not compared" in text
    assert f"not compared: cut: {tmp_path / 'b' / file_name(op_name='cut')}" in text
    assert len((tmp_path / "pairs.csv").read_text().splitlines()) == 4


def test_kernel_dumps_are_converted_to_arrays(tmp_path: Path, ulpscope: Terminal) -> None:
    x = np.arange(12, dtype=np.float16).reshape(1, 3, 2, 2)
    dump = write_kernel(tmp_path / "k", [], [Stored(to_nc1hwc0(x), "NC1HWC0", origin=x.shape)])
    ulpscope("convert", tmp_path / "k", tmp_path / "out", "--layout", "NHWC")
    ulpscope("convert", dump, tmp_path / "out")
    ulpscope("convert", dump, tmp_path / "out")
    turned = np.load(tmp_path / "out" / f"{dump.name}.output.0.1x2x2x3.npy")
    assert np.array_equal(turned, x.transpose(0, 2, 3, 1))
    assert np.array_equal(np.load(tmp_path / "out" / f"{dump.name}.output.0.npy"), to_nc1hwc0(x))
    (tmp_path / "k" / file_name(op_name="cut")).write_bytes(b"x")
    assert "skipped: " in ulpscope("convert", tmp_path / "k", tmp_path / "again", code=3)
    assert len(list((tmp_path / "again").iterdir())) == 1
    DumpBuilder(tmp_path / "run").close()
    assert "--layout is for kernel dumps" in ulpscope(
        "convert", tmp_path / "run", tmp_path / "x", "--layout", "ND", code=2
    )


def test_elements_go_to_a_text_file(tmp_path: Path, ulpscope: Terminal) -> None:
    ulpscope("tensor", saved(tmp_path / "a.npy", [[0.1, 2], [3, 4]]), "--text", tmp_path / "a.txt")
    assert np.array_equal(np.loadtxt(tmp_path / "a.txt", dtype=np.float32), np.array([[0.1, 2], [3, 4]], np.float32))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no kernel dump"),
        (b"\x93NUMPY\x01\x00", "a.npy"),
        (b"PK\x03\x04 and nothing", "not a tensor that can be read"),
    ],
)
def test_a_damaged_file_is_one_message(tmp_path: Path, ulpscope: Terminal, content: bytes, why: str) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    text = ulpscope("tensor", tmp_path / "a.npy", code=3)
    assert why in text and len(text.splitlines()) == 1


def test_what_cannot_be_paired_is_said(tmp_path: Path, ulpscope: Terminal) -> None:
    a, b = saved(tmp_path / "a.npy", np.zeros((2, 3))), saved(tmp_path / "b.npy", np.zeros((2, 4)))
    assert "6 and 8 elements cannot be paired" in ulpscope("tensor", a, b, code=3)
    flat = saved(tmp_path / "c.npy", np.zeros(6))
    assert "the shapes differ; elements are paired in row-major order" in ulpscope("tensor", a, flat)
    empty = saved(tmp_path / "e.npy", np.zeros((0, 3)))
    ulpscope("tensor", empty, empty, code=4)
    assert "does not exist" in ulpscope("tensor", tmp_path / "no.npy", code=3)
