"""The examples of ptdbg_ascend's guide about comparing and parsing, on dumps written by hand; no framework."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ulpscope.compat.ptdbg_ascend import compare, compare_distributed, parse

ROOT = Path(__file__).parents[2]
OLD = "NPU Name,Bench Name,NPU Tensor Dtype,Bench Tensor Dtype,NPU Tensor Shape,Bench Tensor Shape"
STATISTICS = "NPU max,NPU min,NPU mean,NPU l2norm,Bench max,Bench min,Bench mean,Bench l2norm"
METRICS = "Cosine,MaxAbsErr,MaxRelativeErr,One Thousandth Err Ratio,Five Thousandths Err Ratio"
OUT = "Torch_norm_0_forward_output"
GOOD = np.array([3.0, 4.0], dtype=np.float32)
STACK = [
    "Torch_norm_1_forward_stack_info",
    [["net.py", "7", "forward", "return norm(x)"], ["run.py", "3", "main", "net(x)"]],
]
Arrays = dict[str, Any]


def dumped(folder: Path, arrays: Arrays, *, name: str = "api_stack_dump", more: tuple[Any, ...] = ()) -> Path:
    """A rank folder as ptdbg_ascend leaves it."""
    (folder / name).mkdir(parents=True)
    rows: list[Any] = []
    for value, array in arrays.items():
        numbers = [float(array.max()), float(array.min()), float(array.mean()), float(np.linalg.norm(array))]
        rows.append([value, 0, [], f"torch.{array.dtype}", list(array.shape), numbers])
        np.save(folder / name / f"{value}.npy", array)
    (folder / f"{name}.pkl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, *more)))
    return folder / f"{name}.pkl"


def param(npu: Path, bench: Path, **more: Any) -> dict[str, Any]:
    return {
        "npu_pkl_path": str(npu),
        "bench_pkl_path": str(bench),
        "npu_dump_data_dir": str(npu.with_suffix("")),
        "bench_dump_data_dir": str(bench.with_suffix("")),
        **more,
    }


def result(folder: Path, pattern: str = "compare_result_*.csv") -> list[dict[str, str]]:
    (path,) = folder.glob(pattern)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def compared(folder: Path, npu: Arrays, bench: Arrays, **options: Any) -> list[dict[str, str]]:
    output = folder / "output"
    output.mkdir(parents=True)
    compare(param(dumped(folder / "npu", npu), dumped(folder / "bench", bench)), str(output), **options)
    return result(output)


# "函数示例" of compare and the second step of "单卡场景精度比对", as a script of its own.
SCRIPT = """
from ptdbg_ascend import *
dump_result_param={
"npu_pkl_path": "./npu_dump/all_v2.0/rank0/api_stack_dump.pkl",
"bench_pkl_path": "./gpu_dump/all_v2.0/rank0/api_stack_dump.pkl",
"npu_dump_data_dir": "./npu_dump/all_v2.0/rank0/api_stack_dump",
"bench_dump_data_dir": "./gpu_dump/all_v2.0/rank0/api_stack_dump",
"is_print_compare_log": True
}
compare(dump_result_param, "./output")
compare(dump_result_param, "./output_with_stacks", stack_mode=True)
parse("./npu_dump/all_v2.0/rank0/api_stack_dump.pkl", "Torch_norm_1_forward")
"""


def test_000_110_111_112_113_114_115_116_121_the_scripts_of_the_guide(tmp_path: Path) -> None:
    name = "Torch_norm_1_forward_output"
    dumped(tmp_path / "npu_dump/all_v2.0/rank0", {name: GOOD * 2}, more=(STACK,))
    dumped(tmp_path / "gpu_dump/all_v2.0/rank0", {name: GOOD}, more=(STACK,))
    for folder in ("output", "output_with_stacks"):
        (tmp_path / folder).mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "dropin")}
    # The guide's functions for comparing are used where no framework is installed, too.
    program = "import sys; sys.modules['torch'] = None\n" + SCRIPT.replace("import *", "import compare, parse")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "output").glob("compare_result_*.csv")
    assert re.fullmatch(r"compare_result_\d{14}\.csv", path.name)
    header, row = path.read_text().splitlines()
    assert header == f"{OLD},{METRICS},{STATISTICS},Accuracy Reached or Not,Err_message"
    assert row.split(",")[:2] == [name, name]
    (with_stacks,) = result(tmp_path / "output_with_stacks")
    assert "File net.py, line 7, in forward" in with_stacks["NPU_Stack_Info"]
    (advisor,) = (tmp_path / "output").glob("advisor_*.txt")
    said = f"Line: 2\nSuspect Nodes: {name}\nExpert Advice: This is a forward API computation error."
    assert advisor.read_text().startswith(said) and said in done.stdout
    assert f"[{name}] Compare result: cosine 1.0, max_abs_err 4.0, max_relative_err 1.0" in done.stdout
    told = done.stdout[done.stdout.index("Statistic Info:") :].splitlines()
    assert told == [
        "Statistic Info:",
        f"  [{name}][dtype: torch.float32][shape: [2]][max: 8.0][min: 6.0][mean: 7.0]",
        "Trace back(Torch_norm_1_forward):",
        '  File "run.py", line 3, in main',
        "    net(x)",
        '  File "net.py", line 7, in forward',
        "    return norm(x)",
    ]


def test_000_057_the_generated_script_runs_when_it_is_filled_in(tmp_path: Path) -> None:
    pkl = dumped(tmp_path / "rank0", {"Torch_norm_1_forward_output": GOOD})
    compare(param(pkl, pkl), str(tmp_path), stack_mode="True")  # type: ignore[arg-type]
    assert "NPU_Stack_Info" in result(tmp_path)[0]


def test_000_112_without_the_folders_statistics_are_compared(tmp_path: Path) -> None:
    name = "Torch_norm_1_forward_output"
    npu, bench = (dumped(tmp_path / side, {name: GOOD * times}) for side, times in (("npu", 2), ("bench", 1)))
    compare({"npu_pkl_path": str(npu), "bench_pkl_path": str(bench)}, str(tmp_path))
    (row,) = result(tmp_path)
    assert list(row) == f"{OLD},Max diff,Min diff,Mean diff,L2norm diff,{STATISTICS}".split(",")
    assert [float(row[key]) for key in ("Max diff", "Min diff", "Mean diff", "L2norm diff")] == [4.0, 3.0, 3.5, 5.0]
    assert list(tmp_path.glob("advisor*")) == []


def test_000_116_nothing_wrong_is_said_too_and_advice_can_be_left_out(tmp_path: Path) -> None:
    pkl = dumped(tmp_path / "rank0", {"Torch_norm_1_forward_output": GOOD})
    compare(param(pkl, pkl), str(tmp_path), auto_analyze=False)
    assert list(tmp_path.glob("advisor*")) == []
    compare(param(pkl, pkl), str(tmp_path))
    (advisor,) = tmp_path.glob("advisor*")
    assert advisor.read_text().startswith("Line: NA\nSuspect Nodes: NA\n")


@pytest.mark.parametrize(
    ("npu", "bench", "verdict"),
    [
        # cosine of (1, 0) and (0.995, 0.0999): 0.995; of (1, 0) and (0.98, 0.199): 0.98; of (1, 0) and (0.8, 0.6): 0.8
        ([1.0, 0.0], [1.0, 0.0], "Yes"),
        ([0.98, 0.199], [1.0, 0.0], "No"),  # cosine < 0.99 and an error > 0.001
        ([0.00098, 0.000199], [0.001, 0.0], "Yes"),  # the same cosine, and an error of 0.0002
        ([0.0008, 0.0006], [0.001, 0.0], "No"),  # cosine < 0.9
        ([3.0, 4.0], [1.9, 2.5], "No"),  # an error > 1
    ],
)
def test_000_122_123_125_the_rule_of_accuracy(
    tmp_path: Path, npu: list[float], bench: list[float], verdict: str
) -> None:
    name = "Torch_norm_1_forward_output"
    sides = [{name: np.array(side, dtype=np.float32)} for side in (npu, bench)]
    (row,) = compared(tmp_path, *sides)
    assert row["Accuracy Reached or Not"] == verdict


def test_000_122_124_zeros_give_nan_and_inf(tmp_path: Path) -> None:
    name = "Torch_norm_1_forward_output"
    (row,) = compared(tmp_path, {name: GOOD}, {name: GOOD * 0})
    assert (row["Cosine"], row["MaxRelativeErr"], row["MaxAbsErr"]) == ("Nan", "inf", "4.0")


def test_000_113_numbers_that_are_no_tensors_show_their_error(tmp_path: Path) -> None:
    def eps(value: Any) -> list[Any]:
        kind = type(value).__name__
        return ["Torch_norm_1_forward_input.2", 0, [], f"<class '{kind}'>", "[]", [value] * 4]

    for number, (ours, theirs, error) in enumerate([(1e-6, 1e-5, 9e-6), (3, 3, 0.0), (True, False, 1.0)]):
        folder = tmp_path / str(number)
        npu, bench = (
            dumped(folder / name, {}, more=(eps(value),)) for name, value in (("npu", ours), ("bench", theirs))
        )
        compare(param(npu, bench), str(folder))
        (row,) = result(folder)
        assert float(row["MaxAbsErr"]) == pytest.approx(error)
        assert row["Err_message"].startswith("This is type of 0-d tensor")


def test_000_117_names_that_differ_in_the_number_match_when_asked(tmp_path: Path) -> None:
    npu, bench = {"Torch_norm_3_forward_output": GOOD}, {"Torch_norm_1_forward_output": GOOD}
    (row,) = compared(tmp_path / "exact", npu, bench)
    assert row["Bench Name"] == "N/A"
    (row,) = compared(tmp_path / "fuzzy", npu, bench, fuzzy_match=True)
    assert row["Bench Name"] == "Torch_norm_1_forward_output"
    assert "Fuzzy matching data, the comparison accuracy may be affected." in row["Err_message"]


def test_000_119_127_what_has_no_counterpart_is_not_compared(tmp_path: Path) -> None:
    npu = {
        "NPU_npu_linear_0_forward_output": GOOD,
        "Torch_norm_0_forward_output": GOOD,
        "Torch_abs_0_forward_output": GOOD,
    }
    bench = {"Torch_norm_0_forward_output": GOOD[:1], "Torch_abs_0_forward_output": GOOD.astype(np.float16)}
    own, shape, dtype = compared(tmp_path, npu, bench)
    assert (own["Bench Name"], own["Cosine"], own["Accuracy Reached or Not"]) == ("N/A", "unsupported", "None")
    assert (shape["Cosine"], shape["Accuracy Reached or Not"]) == ("shape unmatched", "Unmatched")
    assert (dtype["Cosine"], dtype["Accuracy Reached or Not"]) == ("1.0", "Yes")


def test_000_115_the_stack_mode_goes_with_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrays = {"Torch_norm_1_forward_output": GOOD}
    plain, stacked = dumped(tmp_path / "a", arrays, name="dump"), dumped(tmp_path / "b", arrays)
    with pytest.raises(ValueError, match="does not contain stack information, please turn off the stack_mode"):
        compare(param(plain, plain), str(tmp_path), stack_mode=True)
    with pytest.raises(ValueError, match="The dump mode of the two files is not same, please check the dump files"):
        compare(param(plain, stacked), str(tmp_path))
    assert "Compare failed. Please check the arguments and do it again!" in caplog.messages


# The FAQ's fifth question: the text it quotes, and its answer.
def test_004_026_a_file_with_stacks_asks_for_the_stack_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stacked = dumped(tmp_path / "b", {"Torch_norm_1_forward_output": GOOD})
    said = "The current file contains stack information, please turn on the stack_mode"
    compare(param(stacked, stacked), str(tmp_path))
    assert said in caplog.messages
    caplog.clear()
    compare(param(stacked, stacked), str(tmp_path), stack_mode=True)
    assert said not in caplog.messages


def test_000_110_111_112_114_118_mistakes_are_told(tmp_path: Path) -> None:
    pkl = dumped(tmp_path / "rank0", {"Torch_norm_1_forward_output": GOOD})
    good = param(pkl, pkl)
    mistakes: list[tuple[Any, str, dict[str, Any], str]] = [
        ([], ".", {}, "input_param should be dict"),
        ({**good, "npu_pkl_path": "no.pkl"}, ".", {}, "Please check the pkl path is valid."),
        ({**good, "bench_pkl_path": None}, ".", {}, "Please check the pkl path is valid."),
        ({**good, "bench_dump_data_dir": "no"}, ".", {}, "bench_dump_data_dir is 'no', which is no folder"),
        (good, "no", {}, "output_path 'no' is not a folder"),
        (good, ".", {"stack_mode": 1}, "Invalid input parameters which should be only bool type."),
        (good, ".", {"auto_analyze": "yes"}, "Invalid input parameters which should be only bool type."),
        (good, ".", {"fuzzy_match": None}, "Invalid input parameters which should be only bool type."),
        ({**good, "is_print_compare_log": 1}, ".", {}, "Invalid input parameters which should be only bool type."),
    ]
    for given, output, options, said in mistakes:
        with pytest.raises(ValueError, match=re.escape(said)):
            compare(given, output, **options)


# "多卡场景精度比对" and "compare_distributed".
def test_000_120_ranks_are_paired_in_numeric_order(tmp_path: Path) -> None:
    name = "Torch_norm_1_forward_output"
    for rank in (0, 2, 10):
        dumped(tmp_path / f"npu_dump/ptdbg_dump_v2.0/rank{rank}", {name: GOOD + rank})
        dumped(tmp_path / f"gpu_dump/ptdbg_dump_v2.0/rank{rank + 1}", {name: GOOD})
    (tmp_path / "output").mkdir()
    folders = [str(tmp_path / side / "ptdbg_dump_v2.0") for side in ("npu_dump", "gpu_dump")]
    compare_distributed(*folders, str(tmp_path / "output"), auto_analyze=False)
    for rank in (0, 2, 10):
        (row,) = result(tmp_path / "output", f"compare_result_rank{rank}-rank{rank + 1}_*.csv")
        assert float(row["MaxAbsErr"]) == rank
    assert len(list((tmp_path / "output").iterdir())) == 3


def test_000_120_folders_that_do_not_fit_are_told(tmp_path: Path) -> None:
    arrays = {"Torch_norm_1_forward_output": GOOD}
    for rank in (0, 1):
        dumped(tmp_path / "two" / f"rank{rank}", arrays)
    dumped(tmp_path / "one" / "rank0", arrays)
    shutil.copytree(tmp_path / "one", tmp_path / "more")
    (tmp_path / "more" / "notes.txt").write_text("")
    shutil.copytree(tmp_path / "one", tmp_path / "renamed")
    (tmp_path / "renamed" / "rank0" / "api_stack_dump").rename(tmp_path / "renamed" / "rank0" / "dump")
    (tmp_path / "empty" / "rank0").mkdir(parents=True)
    mistakes = {
        "two": "The number of ranks in the two runs are different.",
        "more": "dump_dir contains 'notes.txt'. Expected 'rank'",
        "renamed": "The names of pkl and directory do not match!",
        "empty": "No file is found in dump dir",
        "absent": "is not a folder",
    }
    for folder, said in mistakes.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            compare_distributed(str(tmp_path / folder), str(tmp_path / "one"), str(tmp_path))
    with pytest.raises(ValueError, match="compare has no argument 'suffix'"):
        compare_distributed(str(tmp_path / "one"), str(tmp_path / "one"), str(tmp_path), suffix="x")


def test_000_121_a_name_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pkl = dumped(tmp_path, {"Torch_norm_1_forward_output": GOOD})
    parse(str(pkl), "Torch_norm_10_forward")
    assert capsys.readouterr().out == f"{pkl} has no call whose name begins with 'Torch_norm_10_forward'\n"
    with pytest.raises(ValueError, match="Please check the pkl path is valid"):
        parse("no.pkl", "Torch_norm_1_forward")


def test_000_110_116_results_of_one_second_are_kept_and_what_was_not_compared_is_not_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20260101000000")
    npu, bench = dumped(tmp_path / "npu", {OUT: GOOD}), dumped(tmp_path / "bench", {OUT: GOOD})
    other = dumped(tmp_path / "other", {"Torch_sin_0_forward_output": GOOD})
    nan = dumped(tmp_path / "nan", {OUT: np.array(np.nan, dtype=np.float32)})
    number = dumped(tmp_path / "number", {OUT: np.array(1.0, dtype=np.float32)})
    for left, right in ((npu, bench), (npu, other), (nan, number)):
        compare(param(left, right), str(tmp_path))
    texts = [(tmp_path / f"advisor_20260101000000{more}.txt").read_text() for more in ("", "_1", "_2")]
    assert "All data in comparison result meets" in texts[0]
    assert "Nothing was compared" in texts[1] and "meets" not in texts[1]
    assert f"Suspect Nodes: {OUT}" in texts[2]
    assert caplog.text.count("Nothing was compared") == 1
    assert len(list(tmp_path.glob("compare_result_*.csv"))) == 3
    assert result(tmp_path, "compare_result_*_2.csv")[0]["Accuracy Reached or Not"] == "No"
