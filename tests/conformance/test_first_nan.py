"""The first nan of a dump that is there already: `ulpscope check overflow DUMP`, msprobe's `nan_analyze` and `overflow_check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from msprobe_files import call, scalar, tensor, write_json
from ulpscope.cli.check_overflow import overflow
from ulpscope.compat.msprobe.command import main as msprobe

GOOD, NAN = tensor(), tensor("nan", "nan", "nan", "nan")
GROUP = {"type": "torch.ProcessGroup", "group_ranks": [0, 1]}


def two_ranks(folder: Path) -> Path:
    """Rank 1 makes a nan, and both add it up."""
    reduced = {"Distributed.all_reduce.0.forward": call([NAN], [NAN], {"group": GROUP})}
    came = {"Distributed.all_reduce.0.forward": call([GOOD], [NAN], {"group": GROUP})}
    made = {"Torch.sqrt.0.forward": call([GOOD], [NAN])}
    last = {"Tensor.mul.0.forward": call([NAN, scalar(2)], [NAN])}
    stacks = {"Torch.sqrt.0.forward": ["File train.py, line 7, in loss, \n y = torch.sqrt(x)"]}
    write_json(folder / "step0" / "rank0", {**came, **last})
    write_json(folder / "step0" / "rank1", {**made, **reduced, **last}, stacks=stacks)
    return folder / "step0"


def test_check_overflow_reads_a_recording_of_any_tool(tmp_path: Path) -> None:
    step = two_ranks(tmp_path)
    done = CliRunner().invoke(overflow, [str(step)])
    assert done.exit_code == 1, done.output
    lines = done.output.splitlines()
    assert lines[0] == "Torch.sqrt.0.forward  makes the first nan  (step 0, rank 1)"
    assert "  at train.py:7 in loss: y = torch.sqrt(x)" in lines
    assert "  rank 0 got it by Distributed.all_reduce.0.forward" in lines
    assert lines[-1] == "it begins at Torch.sqrt.0.forward on rank 1"
    (first,) = json.loads(CliRunner().invoke(overflow, [str(step), "--format", "json"]).output)["first"]
    assert (first["call"], first["rank"], first["nature"]) == ("Torch.sqrt.0.forward", 1, "made")
    assert first["reached"] == [{"rank": 0, "call": "Distributed.all_reduce.0.forward"}]


def test_a_recording_without_one_is_clean(tmp_path: Path) -> None:
    write_json(tmp_path / "step0" / "rank0", {"Torch.sqrt.0.forward": call([GOOD], [GOOD])})
    done = CliRunner().invoke(overflow, [str(tmp_path)])
    assert (done.exit_code, done.output) == (
        0,
        "no nan, and no infinity that a call made of finite values, in what is recorded\n",
    )


@pytest.mark.parametrize("verb", ["nan_analyze", "overflow_check"])
def test_nan_analyze_leaves_the_tools_file(tmp_path: Path, verb: str) -> None:
    step, out = two_ranks(tmp_path), tmp_path / "out"
    assert msprobe(["-f", "pytorch", verb, "-i", str(step), "-o", str(out)]) == 0
    (path,) = out.glob("anomaly_analyze_*.json")
    content = json.loads(path.read_text())
    assert list(content) == ["rank_1"]
    (node,) = content["rank_1"]
    assert (node["op_name"], node["construct_info"]) == ("Torch.sqrt.0.forward", ["Torch.sqrt.0.forward"])
    assert node["data_info"]["output"][0]["Max"] == "nan"
    assert "train.py, line 7" in node["stack_info"][0]
    assert msprobe(["-f", "pytorch", verb, "-i", str(tmp_path / "none")]) == 2
