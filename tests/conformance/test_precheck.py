"""The accuracy pre-check of msprobe: `run_ut`, `multi_run_ut`, `api_precision_compare`, and what the FAQ says of it."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msprobe_files import call, scalar, tensor, write_json
from ulpscope.compat.msprobe import command, precheck
from ulpscope.compat.msprobe.precheck_files import (
    COMPARED_COLUMNS,
    COMPARED_DETAIL_COLUMNS,
    DETAIL_COLUMNS,
    RESULT_COLUMNS,
)
from ulpscope.frameworks.torch import api_runner
from ulpscope.frameworks.torch.api_runner import ApiRunner
from ulpscope.replay.standards import judge
from ulpscope.store.registry import open_dump

HALF = {"dtype": "torch.bfloat16"}
CALLS: dict[str, Any] = {
    "Functional.linear.0.forward": call(
        [tensor(requires_grad=True), tensor(shape=(4, 3), requires_grad=True)], [tensor(shape=(2, 4))]
    ),
    "Functional.relu.0.forward": call([tensor(requires_grad=True)], [tensor()]),
    "Tensor.add.0.forward": call([tensor(**HALF), tensor(**HALF)], [tensor(**HALF)]),
    "Functional.linear.0.backward": {"input": [tensor(shape=(2, 4))], "output": [tensor(), tensor(shape=(4, 3))]},
}


def run(*arguments: object) -> int:
    return command.main(["-f", "pytorch", *map(str, arguments)])


def table(folder: Path, start: str) -> list[list[str]]:
    (path,) = folder.glob(f"{start}_*.csv")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


def checked(folder: Path, *arguments: object, calls: Mapping[str, Any] = CALLS, **section: Any) -> list[str]:
    """The calls that run_ut has run."""
    dump = write_json(folder / "dump", calls)
    config = folder / "config.json"
    config.write_text(json.dumps({"task": "run_ut", "dump_path": "x", "run_ut": section}))
    assert run("run_ut", "-api_info", dump, "-o", folder / "out", "-config", config, *arguments) == 0
    header, *rows = table(folder / "out", "accuracy_checking_result")
    assert header == RESULT_COLUMNS
    return [row[0] for row in rows]


def test_002_080_only_what_is_on_the_white_list_is_run(tmp_path: Path) -> None:
    assert checked(tmp_path, white_list=["linear"]) == ["Functional.linear.0"]


def test_002_080_081_names_that_no_operator_has_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump, config = write_json(tmp_path, CALLS), tmp_path / "config.json"
    config.write_text(json.dumps({"run_ut": {"white_list": ["linearr"], "black_list": "relu"}}))
    assert run("run_ut", "-api_info", dump, "-o", tmp_path, "-config", config) == 2
    assert "black_list" in caplog.text
    config.write_text(json.dumps({"run_ut": {"white_list": ["linearr"]}}))
    assert run("run_ut", "-api_info", dump, "-o", tmp_path, "-config", config) == 2
    assert "Invalid api in white_list: ['linearr']" in caplog.text


def test_002_081_what_is_on_the_black_list_is_not_run(tmp_path: Path) -> None:
    assert checked(tmp_path, black_list=["linear"]) == ["Functional.relu.0", "Tensor.add.0"]


@pytest.mark.parametrize(
    ("white", "black", "found"),
    [
        (["linear"], ["relu"], ["Functional.linear.0"]),
        (["linear", "relu"], ["relu", "add"], ["Functional.linear.0"]),
        (["relu"], ["relu"], []),
    ],
)
def test_002_082_with_both_lists_the_overlap_is_excluded_too(
    tmp_path: Path, white: list[str], black: list[str], found: list[str]
) -> None:
    assert checked(tmp_path, white_list=white, black_list=black) == found


@pytest.fixture
def wrong_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    right = api_runner.function_of

    def wrong(kind: str, name: str) -> Any:
        function = right(kind, name)
        if name != "relu":
            return function
        return lambda x: function(x) * (1.5 if x.dtype is torch.float32 else 1)

    monkeypatch.setattr(api_runner, "function_of", wrong)


@pytest.mark.usefixtures("wrong_relu")
def test_002_083_what_does_not_pass_is_kept_below_error_data_path(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    errors.mkdir()
    checked(tmp_path, "-save_error_data", error_data_path=str(errors))
    (folder,) = errors.iterdir()
    assert folder.name.startswith("ut_error_data")
    assert sorted(path.name for path in folder.iterdir()) == [
        "Functional.relu.0.forward.bench_output.0.pt",
        "Functional.relu.0.forward.input.0.pt",
        "Functional.relu.0.forward.output.0.pt",
    ]
    kept = {path.name.split(".")[-3]: torch.load(path, weights_only=True) for path in folder.iterdir()}
    assert torch.equal(kept["output"], torch.relu(kept["input"]) * 1.5)


def test_002_083_a_folder_that_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump, config = write_json(tmp_path, CALLS), tmp_path / "config.json"
    config.write_text(json.dumps({"run_ut": {"error_data_path": str(tmp_path / "none")}}))
    assert run("run_ut", "-api_info", dump, "-save_error_data", "-config", config) == 2
    assert f"error_data_path: {tmp_path / 'none'} does not exist" in caplog.text


@pytest.mark.usefixtures("wrong_relu")
def test_002_088_run_ut_writes_results_and_details_with_the_columns_of_the_original(tmp_path: Path) -> None:
    checked(tmp_path)
    _, *results = table(tmp_path / "out", "accuracy_checking_result")
    assert [row[:3] for row in results] == [
        ["Functional.linear.0", "pass", "pass"],
        ["Functional.relu.0", "error", " "],
        ["Tensor.add.0", "pass", " "],
    ]
    header, *details = table(tmp_path / "out", "accuracy_checking_details")
    assert header == DETAIL_COLUMNS
    rows = {row[0]: dict(zip(header, row, strict=True)) for row in details}
    assert list(rows) == [
        "Functional.linear.0.forward.output.0",
        "Functional.linear.0.backward.output.0",
        "Functional.linear.0.backward.output.1",
        "Functional.relu.0.forward.output.0",
        "Tensor.add.0.forward.output.0",
    ]
    linear = rows["Functional.linear.0.forward.output.0"]
    assert (linear["Bench Dtype"], linear["DEVICE Dtype"], linear["Shape"]) == (
        "torch.float64",
        "torch.float32",
        "(2, 4)",
    )
    assert linear["ULP误差大于阈值占比"] != " " == linear["均方根误差"]
    assert float(rows["Functional.relu.0.forward.output.0"]["二进制一致错误率"]) > 0


def test_002_088_a_run_that_ended_early_is_gone_on_with(tmp_path: Path) -> None:
    checked(tmp_path)
    (result,) = (tmp_path / "out").glob("accuracy_checking_result_*")
    (details,) = (tmp_path / "out").glob("accuracy_checking_details_*")
    whole = result.read_bytes(), details.read_bytes()
    # Killed while the second result was written: its details are there, its line is cut.
    lines = whole[0].split(b"\n")
    result.write_bytes(b"\n".join([*lines[:2], lines[2][:12]]))
    assert run("run_ut", "-api_info", tmp_path / "dump" / "dump.json", "-csv_path", result) == 0
    assert (result.read_bytes(), details.read_bytes()) == whole


def test_002_088_filter_runs_calls_of_the_same_kind_once(tmp_path: Path) -> None:
    twice = {"Functional.relu.0.forward": CALLS["Functional.relu.0.forward"]}
    twice["Functional.relu.1.forward"] = twice["Functional.relu.0.forward"]
    twice["Functional.relu.2.forward"] = call([tensor(shape=(5,))], [tensor(shape=(5,))])
    assert checked(tmp_path, "-f", calls=twice) == ["Functional.relu.0", "Functional.relu.2"]


def test_002_088_acc_check_is_the_later_name(tmp_path: Path) -> None:
    assert run("acc_check", "-api_info", write_json(tmp_path / "dump", CALLS), "-o", tmp_path) == 0
    assert len(table(tmp_path, "accuracy_checking_result")) == 4


def test_002_089_many_processes_write_the_same_tables(tmp_path: Path) -> None:
    dump = write_json(tmp_path / "dump", CALLS)
    assert run("run_ut", "-api_info", dump, "-o", tmp_path / "one") == 0
    assert run("multi_run_ut", "-api_info", dump, "-o", tmp_path / "two", "-n", 2, "-d", 0, 1) == 0
    for start in ("accuracy_checking_result", "accuracy_checking_details"):
        assert table(tmp_path / "two", start) == table(tmp_path / "one", start)


@pytest.mark.parametrize("count", ["0", "65", "many"])
def test_002_089_the_number_of_processes_is_1_to_64(tmp_path: Path, count: str) -> None:
    with pytest.raises(SystemExit):
        run("multi_run_ut", "-api_info", tmp_path, "-n", count)


def details(path: Path, **changed: dict[str, float]) -> Path:
    """A details file with three outputs; numbers of each may be changed."""
    given: dict[str, dict[str, float]] = {
        "Tensor.softmax.0": dict.fromkeys(
            ["误差均衡性", "均方根误差", "小值域错误占比", "相对误差最大值", "相对误差平均值"], 1e-6
        ),
        "Functional.linear.0": {"ULP误差最大值": 90, "ULP误差平均值": 70, "ULP误差大于阈值占比": 0.25},
        "Functional.conv2d.0": {"双千指标": 1.0},
    }
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(DETAIL_COLUMNS)
        for name, numbers in given.items():
            row = {"API Name": f"{name}.forward.output.0", "DEVICE Dtype": "torch.float32", "Status": "pass"}
            row |= {key: str(number) for key, number in {**numbers, **changed.get(name, {})}.items()}
            writer.writerow([row.get(title, " ") for title in DETAIL_COLUMNS])
    return path


def test_002_090_two_details_beside_each_other(tmp_path: Path) -> None:
    changed = {"Tensor.softmax.0": {"均方根误差": 3e-6}, "Functional.linear.0": {"ULP误差大于阈值占比": 0.5}}
    npu, gpu = details(tmp_path / "npu.csv", **changed), details(tmp_path / "gpu.csv")
    assert run("api_precision_compare", "-npu", npu, "-gpu", gpu, "-o", tmp_path / "out") == 0
    header, *rows = table(tmp_path / "out", "api_precision_compare_result")
    assert header == COMPARED_COLUMNS
    assert [row[:3] for row in rows] == [
        ["Tensor.softmax.0", "error", " "],
        ["Functional.linear.0", "error", " "],
        ["Functional.conv2d.0", "pass", " "],
    ]
    header, *rows = table(tmp_path / "out", "api_precision_compare_details")
    assert header == COMPARED_DETAIL_COLUMNS
    softmax, linear, conv = (dict(zip(header, row, strict=True)) for row in rows)
    assert (softmax["均方根误差比值"], softmax["均方根误差判定结果"]) == ("3.00000000000000", "error")
    assert (softmax["小值域错误比值"], softmax["小值域判定结果"]) == ("1.00000000000000", "pass")
    assert (softmax["比对算法"], linear["比对算法"], conv["比对算法"]) == ("标杆比对法", "ULP误差比对法", "双千指标法")
    assert (linear["ULP误差大于阈值占比比值"], linear["ULP误差判定结果"]) == ("2.00000000000000", "error")
    assert (conv["双千指标"], conv["双千指标判定结果"]) == ("1.00000000000000", "pass")


@pytest.mark.parametrize(
    ("dtype", "shape", "says"),
    [
        ("torch.float64", "(2, 3)", "no standard for torch.float64"),
        ("torch.complex64", "(2, 3)", "no standard for torch.complex64"),
        (" ", "(2, 3)", "no dtype"),
        ("", "", "no dtype"),
        ("torch.float32", "(0,)", "no elements"),
        ("torch.float16", "(4, 0, 2)", "no elements"),
        ("torch.int64", "torch.Size([0])", "no elements"),
    ],
)
def test_002_090_what_cannot_be_compared_is_skipped(tmp_path: Path, dtype: str, shape: str, says: str) -> None:
    about = {"DEVICE Dtype": dtype, "Shape": shape}
    for more in ({}, {"均方根误差": 3e-6}, {"二进制一致错误率": 0.0}):
        changed = {
            name: {**about, **more} for name in ("Tensor.softmax.0", "Functional.linear.0", "Functional.conv2d.0")
        }
        npu, gpu = details(tmp_path / "npu.csv", **changed), details(tmp_path / "gpu.csv", **changed)
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        assert run("api_precision_compare", "-npu", npu, "-gpu", gpu, "-o", out) == 0
        assert [row[1] for row in table(out, "api_precision_compare_result")[1:]] == ["SKIP"] * 3
        header, *rows = table(out, "api_precision_compare_details")
        for row in (dict(zip(header, row, strict=True)) for row in rows):
            assert row["比对结果"] == "SKIP" and says in row["Message"]
            assert {row[title] for title in header if title.endswith("判定结果")} == {" "}


def test_002_090_what_is_held_to_equality_has_a_standard_in_every_dtype(tmp_path: Path) -> None:
    def named(side: str, rate: float) -> Path:
        path = details(
            tmp_path / f"{side}.csv",
            **{"Tensor.softmax.0": {"DEVICE Dtype": "torch.float64", "二进制一致错误率": rate}},
        )
        path.write_text(
            path.read_text(encoding="utf-8-sig").replace("Tensor.softmax", "Tensor.abs"), encoding="utf-8-sig"
        )
        return path

    for rate, status in ((0.0, "pass"), (0.5, "error")):
        out = tmp_path / status
        assert run("api_precision_compare", "-npu", named("npu", rate), "-gpu", named("gpu", 0.0), "-o", out) == 0
        assert table(out, "api_precision_compare_result")[1][:2] == ["Tensor.abs.0", status]


def test_002_090_another_file_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert run("api_precision_compare", "-npu", tmp_path / "x.csv", "-gpu", tmp_path / "x.csv", "-o", tmp_path) == 2
    assert "not one of our tables" in caplog.text


def test_004_001_jit_compile_is_told_to_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    monkeypatch.setattr(api_runner, "set_jit_compile", lambda on: told.append(on) or True)
    dump = write_json(tmp_path, {})
    assert run("run_ut", "-api_info", dump, "-o", tmp_path, "-j") == 0
    assert run("run_ut", "-api_info", dump, "-o", tmp_path) == 0
    assert told == [True, False]
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING):
        assert run("run_ut", "-api_info", dump, "-o", tmp_path, "-j") == 0
    assert "-j has no effect" in caplog.text


def outputs(folder: Path, name: str, calls: Mapping[str, Any], *, whole: bool = False) -> Any:
    write_json(folder, calls)
    dump = open_dump(folder)
    found = ApiRunner(whole=whole).run(dump.call(f"{name}.forward"), None, dump.load_bits)
    assert not found.forward_trouble, found.forward_trouble
    return found.forward


def test_004_002_type_as_is_not_raised(tmp_path: Path) -> None:
    cast = {"Tensor.type_as.0.forward": call([tensor(), tensor(**HALF)], [tensor(**HALF)])}
    (found,) = outputs(tmp_path, "Tensor.type_as.0", cast)
    assert (found.reference_dtype, found.dtype) == ("bfloat16", "bfloat16")
    assert np.array_equal(found.reference, found.target)


def test_004_003_bfloat16_is_readable(tmp_path: Path) -> None:
    (found,) = outputs(tmp_path, "Tensor.add.0", CALLS)
    assert found.target.dtype == np.float32
    assert found.dtype == "bfloat16"


def test_004_004_dropout_is_judged_by_its_share_of_zeros(tmp_path: Path) -> None:
    big = tensor(2.0, 1.0, shape=(1000,))
    drop = {"Functional.dropout.0.forward": call([big, scalar(0.5), scalar(True)], [big])}
    (found,) = outputs(tmp_path, "Functional.dropout.0", drop)
    assert judge(found.reference, found.rounded, found.target, op="dropout", dtype="float32").status.value == "pass"
    kept = np.ones_like(found.target)
    assert judge(found.reference, found.rounded, kept, op="dropout", dtype="float32").status.value == "error"


@pytest.mark.parametrize(
    ("dtype", "up"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64"), ("float64", "float64")]
)
def test_004_005_the_reference_runs_one_precision_up(tmp_path: Path, dtype: str, up: str) -> None:
    leaf = tensor(dtype=f"torch.{dtype}")
    (found,) = outputs(tmp_path, "Tensor.mul.0", {"Tensor.mul.0.forward": call([leaf, leaf], [leaf])})
    assert (found.dtype, found.reference_dtype) == (dtype, up)
    (found,) = outputs(tmp_path, "Tensor.mul.0", {"Tensor.mul.0.forward": call([leaf, leaf], [leaf])}, whole=True)
    assert found.reference_dtype == "float64"


def test_004_005_made_inputs_have_the_recorded_range(tmp_path: Path) -> None:
    ends = tensor(2.0, -3.0, shape=(100,))
    whole = tensor(9, 4, dtype="torch.int64", shape=(100,))
    calls = {
        "Tensor.clone.0.forward": call([ends], [ends]),
        "Tensor.clone.1.forward": call([whole], [whole]),
    }
    (floats,) = outputs(tmp_path, "Tensor.clone.0", calls)
    (integers,) = outputs(tmp_path, "Tensor.clone.1", calls)
    assert (floats.target[0], floats.target[-1], floats.target.min(), floats.target.max()) == (-3, 2, -3, 2)
    assert (integers.target[0], integers.target[-1], set(integers.target.tolist())) == (4, 9, {4, 5, 6, 7, 8, 9})


def test_002_084_without_is_online_the_keys_of_the_online_check_do_nothing(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"run_ut": {"host": "127.0.0.1", "port": 7777, "white_list": ["relu"]}}))
    assert precheck.read_section(str(config)) == {"white_list": ("relu",)}
