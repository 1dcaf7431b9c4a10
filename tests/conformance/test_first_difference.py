"""The first difference and the advice of msprobe's compare, through its command line, on dumps of one and two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest

from builders import DumpBuilder
from ulpscope.compat.msprobe.command import main
from ulpscope.compat.msprobe.comparing import compare
from ulpscope.model.records import Phase
from ulpscope.store.formats.msprobe_writer import write_msprobe
from ulpscope.store.registry import open_dump
from ulpscope.store.run_folder import dump_folder

MODES = {"statistics": ("statistics", "statistics"), "md5": ("statistics", "md5"), "tensor": ("tensor", "statistics")}
MUL, REDUCE, RELU = "Torch.mul.0.forward", "Distributed.all_reduce.0.forward", "Torch.relu.0.forward"


def dump(folder: Path, mode: str, factors: list[float]) -> Path:
    """A step in msprobe's files; rank r multiplies by factors[r] in secret, then all ranks add up what they have."""
    inputs = [np.linspace(-1.0, 2.0, 64, dtype=np.float32) * (rank + 1) for rank in range(len(factors))]
    given = [each * np.float32(factor) for each, factor in zip(inputs, factors, strict=True)]
    total = np.sum(given, axis=0, dtype=np.float32)
    task, summary = MODES[mode]
    for rank, (x, y) in enumerate(zip(inputs, given, strict=True)):
        builder = DumpBuilder(folder / "native", rank=rank)
        builder.call("Torch", "mul", values={("input", 0): x, ("input", 1): 1.0, ("output", 0): y})
        builder.call("Distributed", "all_reduce", values={("input", 0): y, ("output", 0): total})
        builder.call("Torch", "relu", values={("input", 0): total, ("output", 0): np.maximum(total, 0)})
        builder.call("Torch", "relu", phase=Phase.BACKWARD, values={("input", 0): x, ("output", 0): x})
        native = open_dump(builder.close())
        write_msprobe(native, dump_folder(folder, 0, rank), task=task, level="L1", summary_mode=summary)
    return folder / "step0"


def run(folder: Path, npu: Path, bench: Path, *flags: str) -> dict[str, Path]:
    """The files of `msprobe -f pytorch compare`, by their names without the digits of their times."""
    asked = {"npu_path": str(npu), "bench_path": str(bench), "is_print_compare_log": False}
    (folder / "compare.json").write_text(json.dumps(asked))
    arguments = ["-f", "pytorch", "compare", "-i", str(folder / "compare.json"), "-o", str(folder / "output"), *flags]
    assert main(arguments) == 0
    return {re.sub(r"\d{14,}", "T", path.name): path for path in (folder / "output").iterdir()}


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_003_010_014_the_first_difference_of_two_ranks(mode: str, tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", mode, [1.0, 1.0]), dump(tmp_path / "npu", mode, [1.0, 1.01])
    files = run(tmp_path, npu, bench, "-da")
    assert sorted(files) == ["compare_result_rank0_T.json", "compare_result_rank1_T.json", "diff_analyze_T.json"]
    assert re.fullmatch(r"diff_analyze_\d{19}\.json", files["diff_analyze_T.json"].name)
    assert re.fullmatch(r"compare_result_rank0_\d{14}\.json", files["compare_result_rank0_T.json"].name)
    zero, one = (content(files[f"compare_result_rank{rank}_T.json"]) for rank in range(2))
    assert list(zero) == [MUL, REDUCE, RELU, "Torch.relu.0.backward"]
    assert [zero[name]["is_same"] for name in (MUL, REDUCE, RELU)] == [True, False, False]
    assert [one[name]["is_same"] for name in (MUL, REDUCE, RELU)] == [False, False, False]
    analysis = content(files["diff_analyze_T.json"])
    assert {rank: [each["op_name"] for each in found] for rank, found in analysis.items()} == {"rank_1": [MUL]}


@pytest.mark.parametrize("mode", MODES)
def test_003_010_014_the_first_difference_of_one_rank(mode: str, tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", mode, [1.0]), dump(tmp_path / "npu", mode, [1.5])
    files = run(tmp_path, npu, bench, "-da")
    assert sorted(files) == ["compare_result_rank0_T.json", "diff_analyze_T.json"]
    assert [each["op_name"] for each in content(files["diff_analyze_T.json"])["rank_0"]] == [MUL]


def test_003_014_a_row_has_the_columns_of_the_table_and_where_it_belongs(tmp_path: Path) -> None:
    """The keys, in this order, of a file that msprobe 8.2.1 wrote."""
    bench, npu = dump(tmp_path / "bench", "statistics", [1.0]), dump(tmp_path / "npu", "statistics", [1.5])
    files = run(tmp_path, npu, bench, "-da")
    first, _, last = content(files["compare_result_rank0_T.json"])[MUL]["op_items"]
    assert " | ".join(first) == (
        "NPU Name | Bench Name | NPU Dtype | Bench Dtype | NPU Tensor Shape | Bench Tensor Shape | NPU Requires_grad | "
        "Bench Requires_grad | Max diff | Min diff | Mean diff | L2norm diff | MaxRelativeErr | MinRelativeErr | "
        "MeanRelativeErr | NormRelativeErr | NPU max | NPU min | NPU mean | NPU l2norm | Bench max | Bench min | "
        "Bench mean | Bench l2norm | Requires_grad Consistent | Result | Err_message | NPU_Stack_Info | state | "
        "api_origin_name | NPU P2POp op | Bench P2POp op | NPU P2POp peer | Bench P2POp peer"
    )
    assert (first["NPU Name"], first["state"], first["api_origin_name"]) == (f"{MUL}.input.0", "input", MUL)
    assert (last["NPU Name"], last["state"], last["Max diff"]) == (f"{MUL}.output.0", "output", 1.0)
    assert (first["Requires_grad Consistent"], first["NPU P2POp peer"]) == (True, "None")
    (found,) = content(files["diff_analyze_T.json"])["rank_0"]
    assert list(found) == ["op_name", "data_info", "stack_info"]
    assert list(found["data_info"]) == ["input", "output"]
    assert found["data_info"]["output"] == {
        f"{MUL}.output.0": {
            "NPU max": 3.0,
            "NPU min": -1.5,
            "NPU mean": pytest.approx(0.75),
            "NPU l2norm": last["NPU l2norm"],
            "NPU P2POp peer": "None",
        }
    }


def test_003_014_checksums_have_their_own_columns(tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", "md5", [1.0]), dump(tmp_path / "npu", "md5", [1.5])
    files = run(tmp_path, npu, bench, "-da")
    *_, output = content(files["compare_result_rank0_T.json"])[MUL]["op_items"]
    assert output["NPU MD5"] != output["BENCH MD5"] and output["Result"] == "Different"
    (found,) = content(files["diff_analyze_T.json"])["rank_0"]
    assert found["data_info"]["output"][f"{MUL}.output.0"] == {"NPU MD5": output["NPU MD5"], "NPU P2POp peer": "None"}


@pytest.mark.parametrize("mode", MODES)
def test_003_010_runs_that_agree_leave_no_analysis(mode: str, tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", mode, [1.0, 1.0]), dump(tmp_path / "npu", mode, [1.0, 1.0])
    files = run(tmp_path, npu, bench, "-da")
    assert sorted(files) == ["compare_result_rank0_T.json", "compare_result_rank1_T.json"]


@pytest.mark.parametrize("mode", ["statistics", "tensor"])
def test_003_010_the_rounding_of_a_dtype_is_no_difference(mode: str, tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", mode, [1.0]), dump(tmp_path / "npu", mode, [1.0 + 2.0**-23])
    assert sorted(run(tmp_path, npu, bench, "-da")) == ["compare_result_rank0_T.json"]


# Half of every element is not seen by the cosine; a sign is.
WRONG = -1.0


def test_003_071_the_advice_names_the_first_row_that_is_not_accurate(tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", "tensor", [1.0]), dump(tmp_path / "npu", "tensor", [WRONG])
    files = run(tmp_path, npu / "rank0" / "dump.json", bench / "rank0" / "dump.json")
    assert sorted(files) == ["advisor_T.txt", "compare_result_T.xlsx"]
    line, node, advice = files["advisor_T.txt"].read_text().splitlines()
    assert node == f"Suspect Nodes: {MUL}.output.0"
    assert advice == "Expert Advice: This is a forward API computation error. Check the computation implementation."
    sheet = openpyxl.load_workbook(files["compare_result_T.xlsx"]).active
    assert sheet is not None
    assert sheet.cell(int(line.removeprefix("Line: ")), 1).value == f"{MUL}.output.0"


def test_003_071_several_ranks_have_a_file_each(tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", "tensor", [1.0, 1.0]), dump(tmp_path / "npu", "tensor", [1.0, WRONG])
    files = run(tmp_path, npu, bench)
    assert {name for name in files if "advisor" in name} == {"advisor_rank0_T.txt", "advisor_rank1_T.txt"}
    assert f"Suspect Nodes: {REDUCE}.output.0" in files["advisor_rank0_T.txt"].read_text()
    assert f"Suspect Nodes: {MUL}.output.0" in files["advisor_rank1_T.txt"].read_text()


def test_003_071_when_all_is_accurate_the_advice_says_so(tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", "tensor", [1.0]), dump(tmp_path / "npu", "tensor", [1.0])
    files = run(tmp_path, npu / "rank0" / "dump.json", bench / "rank0" / "dump.json")
    assert files["advisor_T.txt"].read_text() == (
        "Line: NA\nSuspect Nodes: NA\nExpert Advice: All data in comparison result meets the accuracy requirements.\n"
    )


@pytest.mark.parametrize("flag", ["-c", "--compare_only"])
def test_003_006_compare_only_leaves_the_advice_out(flag: str, tmp_path: Path) -> None:
    bench, npu = dump(tmp_path / "bench", "tensor", [1.0]), dump(tmp_path / "npu", "tensor", [WRONG])
    files = run(tmp_path, npu / "rank0" / "dump.json", bench / "rank0" / "dump.json", flag)
    assert sorted(files) == ["compare_result_T.xlsx"]


@pytest.mark.parametrize("auto_analyze", [True, False])
def test_000_116_auto_analyze_writes_the_advice(
    auto_analyze: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench, npu = dump(tmp_path / "bench", "tensor", [1.0]), dump(tmp_path / "npu", "tensor", [WRONG])
    asked = {"npu_json_path": str(npu / "rank0" / "dump.json"), "bench_json_path": str(bench / "rank0" / "dump.json")}
    caplog.set_level("INFO")
    compare(asked, str(tmp_path / "output"), auto_analyze=auto_analyze)
    assert bool(list((tmp_path / "output").glob("advisor_*.txt"))) is auto_analyze
    assert (f"Suspect Nodes: {MUL}.output.0" in caplog.text) is auto_analyze
