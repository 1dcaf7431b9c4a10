"""Rows of the older tools' tables, from dumps made by hand; the numbers are those one sees in them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import DumpBuilder
from msprobe_files import call, floats, scalar, tensor, write_elements, write_json
from ulpscope.compare.align import Align
from ulpscope.compare.engine import Options, compare_dumps
from ulpscope.report.legacy import TABLES, Table, rows, table_for
from ulpscope.report.table import Cell, Colour
from ulpscope.store.registry import open_dump

NAN, INF = math.nan, math.inf
Shown = dict[str, dict[str, Cell]]


def shown(npu: Path, bench: Path, table: Table | None = None, **options: Any) -> Shown:
    """The rows by name, each by column; the colour of a row is under `colour`."""
    reference, target = open_dump(bench), open_dump(npu)
    table = table or table_for(reference, target)
    align = options.pop("align", Align.NAME)
    calls = compare_dumps(reference, target, Options(align=align, jobs=1))
    header = table.header(stacks=options.get("stacks", False))
    made = rows(calls, table, reference=reference, target=target, **options)
    return {str(cells[0]): dict(zip(header, cells, strict=True)) | {"colour": colour} for cells, colour in made}  # type: ignore[dict-item]


def of_one(tmp_path: Path, npu: Any, bench: Any, **options: Any) -> dict[str, Cell]:
    """The row of the only output of a call with such an output."""
    name = "Functional.add.0.forward"
    files = [write_json(tmp_path / side, {name: call([], [leaf])}) for side, leaf in (("npu", npu), ("bench", bench))]
    return shown(*files, **options)[f"{name}.output.0"]


def with_elements(tmp_path: Path, npu: Any, bench: Any, **options: Any) -> dict[str, Cell]:
    files = [
        write_elements(tmp_path / side, {"Functional.add.0": {("input", 0): floats(1, 2), ("output", 0): value}})
        for side, value in (("npu", npu), ("bench", bench))
    ]
    return shown(*files, **options)["Functional.add.0.forward.output.0"]


COMMON = "NPU Name,Bench Name,NPU Dtype,Bench Dtype,NPU Tensor Shape,Bench Tensor Shape,NPU Requires_grad,Bench Requires_grad"
STATISTICS = "NPU max,NPU min,NPU mean,NPU l2norm,Bench max,Bench min,Bench mean,Bench l2norm"
OLD = "NPU Name,Bench Name,NPU Tensor Dtype,Bench Tensor Dtype,NPU Tensor Shape,Bench Tensor Shape"
HEADERS = {
    "real data": f"{COMMON},Cosine,EucDist,MaxAbsErr,MaxRelativeErr,One Thousandth Err Ratio,Five Thousandths Err Ratio,"
    f"{STATISTICS},Requires_grad Consistent,Accuracy Reached or Not,Err_message,NPU_Stack_Info,Data_name",
    "statistics": f"{COMMON},Max diff,Min diff,Mean diff,L2norm diff,MaxRelativeErr,MinRelativeErr,MeanRelativeErr,"
    f"NormRelativeErr,{STATISTICS},Requires_grad Consistent,Result,Err_message,NPU_Stack_Info",
    "md5": f"{COMMON},NPU MD5,BENCH MD5,Requires_grad Consistent,Result,NPU_Stack_Info",
    "ptdbg": f"{OLD},Cosine,MaxAbsErr,MaxRelativeErr,One Thousandth Err Ratio,Five Thousandths Err Ratio,{STATISTICS},"
    "Accuracy Reached or Not,Err_message,NPU_Stack_Info",
    "ptdbg statistics": f"{OLD},Max diff,Min diff,Mean diff,L2norm diff,{STATISTICS},NPU_Stack_Info",
    "hooks": f"{OLD},Cosine,RMSE,MAPE",
}


def test_every_table_has_the_columns_of_its_tool() -> None:
    assert {name: ",".join(table.header(stacks=True)) for name, table in TABLES.items()} == HEADERS
    without = {name: ",".join(table.header(stacks=False)) for name, table in TABLES.items()}
    assert without == {name: header.replace(",NPU_Stack_Info", "") for name, header in HEADERS.items()}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_filled(tmp_path: Path, name: str) -> None:
    row = with_elements(tmp_path, floats(1, 2), floats(1, 4), table=TABLES[name], stacks=True, highlight=True)
    assert row["NPU Name"] == row["Bench Name"] == "Functional.add.0.forward.output.0"


# --- statistics -------------------------------------------------------------------------------------------------


def test_differences_and_relative_errors_in_percent(tmp_path: Path) -> None:
    row = of_one(tmp_path, tensor(3.0, -1.0, 0.25, 4.0), tensor(4.0, -2.0, 0.25, 2.0))
    assert [row[f"{name} diff"] for name in ("Max", "Min", "Mean", "L2norm")] == [-1.0, 1.0, 0.0, 2.0]
    assert [row[f"{name}RelativeErr"] for name in ("Max", "Min", "Mean", "Norm")] == [
        "25.0%",
        "50.0%",
        "0.0%",
        "100.0%",
    ]
    assert (row["Result"], row["Err_message"]) == ("Warning", "Need double check api accuracy.")
    assert (row["NPU Tensor Shape"], row["NPU Requires_grad"]) == ("[2, 3]", "False")


def test_what_is_not_a_number_is_said_in_words(tmp_path: Path) -> None:
    row = of_one(tmp_path, tensor(NAN, INF, None, 1.0), tensor(1.0, INF, 1.0, 0.0))
    assert [row["NPU max"], row["NPU min"], row["NPU mean"]] == ["Nan", INF, "None"]
    assert [row[f"{name} diff"] for name in ("Max", "Min", "Mean", "L2norm")] == ["Nan", "Nan", "N/A", 1.0]
    assert [row[f"{name}RelativeErr"] for name in ("Max", "Min", "Mean", "Norm")] == ["Nan", "Nan", "N/A", "N/A"]
    assert row["Result"] == "Warning"  # a norm of 1 where the reference has 0


def test_a_truth_value_has_no_difference(tmp_path: Path) -> None:
    leaves = [tensor(large, False, None, None, dtype="torch.bool") for large in (True, False)]
    row = of_one(tmp_path, *leaves)
    assert [row["NPU max"], row["NPU min"], row["NPU mean"], row["Bench max"]] == ["True", "False", "None", "False"]
    assert (row["Max diff"], row["Result"]) == ("N/A", "")


@pytest.mark.parametrize(
    ("leaf", "dtype", "shape", "content"),
    [
        (scalar(3), "<class 'int'>", "[]", 3),
        (scalar(2.5), "<class 'float'>", "[]", 2.5),
        (scalar(True), "<class 'bool'>", "[]", "True"),
        (scalar("sum"), "<class 'str'>", "[]", "sum"),
        ({"type": "slice", "value": [None, None, 2]}, "slice", "(3,)", "None"),
        ({"type": "torch.Size", "value": [2, 3]}, "torch.Size", "[2, 3]", "None"),
        ({"type": "torch.dtype", "value": "torch.float16"}, "<class 'str'>", "[]", "torch.float16"),
        ({"type": "torch.memory_format", "format": "x"}, "<class 'NoneType'>", "[]", "None"),
        ({"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "a"}, "torch.ProcessGroup", "[]", "[0, 1]"),
        (None, "None", "None", "None"),
    ],
)
def test_arguments_that_are_no_tensors_have_rows(
    tmp_path: Path, leaf: Any, dtype: str, shape: str, content: Cell
) -> None:
    row = of_one(tmp_path, leaf, leaf)
    assert [row[f"NPU {name}"] for name in ("Dtype", "Tensor Shape", "Requires_grad")] == [dtype, shape, "N/A"]
    assert [row[f"Bench {name}"] for name in ("max", "min", "mean", "l2norm")] == [content] * 4
    assert (row["Requires_grad Consistent"], row["Result"], row["Err_message"]) == ("True", "", "")


def test_an_empty_list_and_an_unknown_object_have_no_row(tmp_path: Path) -> None:
    file = write_json(tmp_path / "a", {"Torch.f.0.forward": call([[], {}, scalar(1)], [])})
    assert list(shown(file, file)) == ["Torch.f.0.forward.input.2"]


def test_another_shape_is_no_match_for_statistics(tmp_path: Path) -> None:
    row = of_one(tmp_path, tensor(shape=[3, 2]), tensor(shape=[2, 3]))
    assert (row["Bench Name"], row["Bench Tensor Shape"], row["Max diff"], row["Result"]) == ("N/A",) * 4
    assert row["Err_message"] == "No bench data matched. Requires_grad inconsistent."


def test_another_dtype_is_a_match(tmp_path: Path) -> None:
    row = of_one(tmp_path, tensor(dtype="torch.float64"), tensor(dtype="torch.float32"))
    assert (row["Bench Dtype"], row["Max diff"], row["Err_message"]) == ("torch.float32", 0.0, "")


def test_what_only_the_reference_has_is_not_in_the_table(tmp_path: Path) -> None:
    npu = write_json(tmp_path / "npu", {"Torch.a.0.forward": call([], [tensor()])})
    bench = write_json(tmp_path / "bench", {f"Torch.{name}.0.forward": call([], [tensor()]) for name in "ab"})
    assert list(shown(npu, bench)) == ["Torch.a.0.forward.output.0"]


def test_parameters_stand_between_inputs_and_outputs_and_gradients_have_the_name_of_the_file(tmp_path: Path) -> None:
    calls = {
        "Module.fc.Linear.forward.0": call([tensor()], [tensor()], parameters={"weight": tensor()}),
        "Module.fc.Linear.parameters_grad": {"weight": [tensor()]},
    }
    file = write_json(tmp_path / "a", calls)
    assert list(shown(file, file)) == [
        "Module.fc.Linear.forward.0.input.0",
        "Module.fc.Linear.forward.0.parameters.weight",
        "Module.fc.Linear.forward.0.output.0",
        "Module.fc.Linear.parameters_grad.weight",
    ]


# --- checksums --------------------------------------------------------------------------------------------------


def test_checksums_of_tensors_and_of_the_texts_of_arguments(tmp_path: Path) -> None:
    npu, bench = (
        write_json(tmp_path / side, {"Torch.f.0.forward": call([tensor(md5=md5), scalar(0), None], [tensor()])})
        for side, md5 in (("npu", "0000000a"), ("bench", "0000000b"))
    )
    found = shown(npu, bench)
    told = [(row["NPU MD5"], row["BENCH MD5"], row["Result"]) for row in found.values()]
    # f4dbdf21 is the CRC-32 of "0".
    assert told == [
        ("0000000a", "0000000b", "Different"),
        ("f4dbdf21", "f4dbdf21", "Pass"),
        ("N/A", "N/A", "Pass"),
        ("N/A", "N/A", "N/A"),
    ]


# --- elements ---------------------------------------------------------------------------------------------------

METRICS = ("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio")


def metrics(row: dict[str, Cell]) -> list[Cell]:
    return [row[name] for name in METRICS]


def test_metrics_of_elements(tmp_path: Path) -> None:
    row = with_elements(tmp_path, floats(3, 4), floats(4, 4))
    # 28 / (5 * sqrt(32)), a distance of 1, errors of 1 and 1/4, one of two elements equal.
    assert metrics(row) == [round(28 / (5 * math.sqrt(32)), 12), 1.0, 1.0, 0.25, 0.5, 0.5]
    assert (row["Accuracy Reached or Not"], row["Err_message"]) == (
        "No",
        "",
    )  # a cosine below 0.99, an error above 0.001
    name = "Functional.add.0.forward.output.0.pt"
    assert row["Data_name"] == f"['{name}', '{name}']"


def test_a_relative_error_over_zero_is_infinite(tmp_path: Path) -> None:
    assert metrics(with_elements(tmp_path, floats(1, 5), floats(1, 0)))[3] == INF


def test_a_tensor_of_zeros_has_no_cosine(tmp_path: Path) -> None:
    row = with_elements(tmp_path, floats(0, 0), floats(0, 1))
    assert (row["Cosine"], row["Accuracy Reached or Not"]) == ("Nan", "No")
    assert row["Err_message"] == "Cannot compare by Cosine Similarity, All the data is Zero in npu dump data."


def test_a_cosine_near_one_has_six_decimals(tmp_path: Path) -> None:
    assert with_elements(tmp_path, floats(1, 0.499), floats(1, 0.5))["Cosine"] == 1.0
    assert with_elements(tmp_path / "b", floats(1, 0.49), floats(1, 0.5))["Cosine"] == 0.999968


@pytest.mark.parametrize(
    ("npu", "bench", "verdict", "cells", "message"),
    [
        (
            np.float32(1.5),
            np.float32(1.25),
            "None",
            ["unsupported", "unsupported", 0.25, 0.2, "unsupported", "unsupported"],
            "This is type of 0-d tensor, can not calculate 'Cosine', 'EucDist', 'One Thousandth Err Ratio' and "
            "'Five Thousandths Err Ratio'.",
        ),
        (
            floats(1.5),
            floats(1.25),
            "None",
            ["unsupported", 0.25, 0.25, 0.2, 0.0, 0.0],
            "This is a 1-d tensor of length 1.",
        ),
        (
            floats(NAN, 1),
            floats(1, NAN),
            "No",
            ["N/A"] * 6,
            "The Position of inf or nan in NPU and bench Tensor do not match.",
        ),
        (
            floats(INF, 1),
            floats(-INF, 1),
            "No",
            ["N/A"] * 6,
            "The Position of inf or nan in NPU and bench Tensor do not match.",
        ),
        (floats(NAN, 1), floats(NAN, 1), "Yes", [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], ""),
        (
            floats(1, 2, 3),
            floats(1, 2),
            "Unmatched",
            ["shape unmatched"] * 6,
            "Shape of NPU and bench Tensor do not match. Skipped.",
        ),
        (
            floats(1, 2),
            np.array([1, 2], dtype=np.float64),
            "Yes",
            [1.0, 0.0, 0.0, 0.0, 1.0, 1.0],
            "Dtype of NPU and bench Tensor do not match.",
        ),
        (3, 3, "None", ["unsupported"] * 6, "NPU does not have data file."),
    ],
    ids=["0-d", "one element", "nan", "inf of both signs", "nan in both", "shape", "dtype", "scalar"],
)
def test_what_elements_cannot_be_compared_by_says_why(
    tmp_path: Path, npu: Any, bench: Any, verdict: str, cells: list[Cell], message: str
) -> None:
    npu, bench = (np.asarray(value) if isinstance(value, np.generic) else value for value in (npu, bench))
    row = with_elements(tmp_path, npu, bench)
    assert (metrics(row), row["Accuracy Reached or Not"], row["Err_message"]) == (cells, verdict, message)


def test_an_empty_tensor_with_a_file_is_empty(tmp_path: Path) -> None:
    row = with_elements(tmp_path, floats(), floats())
    assert (metrics(row), row["Accuracy Reached or Not"]) == (["unsupported"] * 6, "None")
    assert row["Err_message"] == "This is empty data, can not compare."


@pytest.mark.parametrize("side", ["npu", "bench"])
def test_a_file_that_is_gone_or_damaged_is_named(tmp_path: Path, side: str) -> None:
    calls = {"Functional.add.0": {("output", 0): floats(1, 2)}}
    files = {each: write_elements(tmp_path / each, calls) for each in ("npu", "bench")}
    stored = files[side].parent / "dump_tensor_data" / "Functional.add.0.forward.output.0.pt"
    names = "['Functional.add.0.forward.output.0.pt', 'Functional.add.0.forward.output.0.pt']"
    for spoil in (lambda: stored.write_bytes(b"no zip"), stored.unlink):
        spoil()
        (row,) = shown(files["npu"], files["bench"]).values()
        assert (metrics(row), row["Accuracy Reached or Not"]) == (["unsupported"] * 6, "None")
        assert row["Err_message"] == f"Dump file: {names} not found or read failed."


def test_a_tensor_without_a_file_says_on_which_side(tmp_path: Path) -> None:
    calls = {"Torch.f.0.forward": call([], [tensor()])}
    without = write_json(tmp_path / "a", calls, task="tensor")
    elements = write_elements(tmp_path / "b", {"Torch.f.0": {("output", 0): np.ones((2, 3), np.float32)}})
    (row,) = shown(without, elements).values()
    assert (row["Err_message"], row["Data_name"]) == (
        "NPU does not have data file.",
        "['-1', 'Torch.f.0.forward.output.0.pt']",
    )
    (row,) = shown(elements, without).values()
    assert row["Err_message"] == "Bench does not have data file."


def test_without_a_counterpart_both_messages_of_it(tmp_path: Path) -> None:
    npu = write_elements(tmp_path / "a", {"Torch.f.0": {("input", 0): 3, ("output", 0): floats(1, 2)}})
    bench = write_elements(tmp_path / "b", {"Torch.g.0": {("output", 0): floats(1, 2)}})
    of_scalar, of_tensor = shown(npu, bench).values()
    assert of_scalar["Err_message"] == "No bench data matched. NPU does not have data file."
    assert of_tensor["Err_message"] == "Requires_grad inconsistent. Bench api/module unmatched."
    assert of_tensor["Data_name"] == "['Torch.f.0.forward.output.0.pt', 'N/A']"


def test_a_keyword_argument_with_elements_has_the_name_of_its_file(tmp_path: Path) -> None:
    file = write_elements(tmp_path / "a", {"Torch.mul.0": {("input", "other"): floats(1, 2)}})
    assert list(shown(file, file)) == ["Torch.mul.0.forward.kwargs.other"]
    assert list(shown(file, file, table=TABLES["statistics"])) == ["Torch.mul.0.forward.input.other"]


def test_a_fuzzy_match_is_said(tmp_path: Path) -> None:
    npu, bench = (
        write_elements(tmp_path / side, {f"Torch.f.{number}": {("output", 0): floats(1, 2)}})
        for side, number in (("npu", 0), ("bench", 1))
    )
    (row,) = shown(npu, bench, align=Align.FUZZY).values()
    assert row["Bench Name"] == "Torch.f.1.forward.output.0"
    assert row["Err_message"] == "Fuzzy matching data, the comparison accuracy may be affected."


def test_a_native_dump_fills_the_same_table(tmp_path: Path) -> None:
    folders = []
    for side, value in (("npu", floats(3, 4)), ("bench", floats(4, 4))):
        builder = DumpBuilder(tmp_path / side)
        builder.call("Functional", "add", values={("output", 0): value})
        folders.append(builder.close())
    (row,) = shown(*folders).values()
    assert metrics(row)[1:] == [1.0, 1.0, 0.25, 0.5, 0.5]


# --- colours and stacks -----------------------------------------------------------------------------------------


def test_a_marked_row_has_its_colour_and_says_why(tmp_path: Path) -> None:
    row = of_one(tmp_path, tensor(3.0, -1.5), tensor(1.0, -1.5), highlight=True)
    assert row["colour"] is Colour.RED
    assert row["Err_message"] == "Need double check api accuracy.\nmaximum relative error exceeds 0.5"
    plain = of_one(tmp_path, tensor(3.0, -1.5), tensor(1.0, -1.5))
    assert (plain["colour"], plain["Err_message"]) == (None, "Need double check api accuracy.")


def test_inputs_and_outputs_are_told_apart(tmp_path: Path) -> None:
    row = with_elements(tmp_path, floats(1, 2), floats(1, 4), highlight=True)
    assert row["colour"] is Colour.RED
    assert (
        row["Err_message"]
        == "The input/parameter's one thousandth err ratio exceeds 0.9, while the output's is below 0.6"
    )


def test_a_difference_of_requires_grad_is_yellow(tmp_path: Path) -> None:
    row = of_one(tmp_path, tensor(requires_grad=True), tensor(), highlight=True)
    assert (row["colour"], row["Requires_grad Consistent"]) == (Colour.YELLOW, "False")
    assert row["Err_message"] == "Requires_grad inconsistent.\nrequires_grad is inconsistent"


def test_a_single_saved_value_is_no_output(tmp_path: Path) -> None:
    files = [
        write_json(tmp_path / side, {"x.0.debug": tensor(large)}, name="debug.json")
        for side, large in (("npu", 9.0), ("bench", 1.0))
    ]
    (row,) = shown(*files, highlight=True).values()
    assert (row["NPU Name"], row["Result"], row["colour"]) == ("x.0.debug", "Warning", None)


def test_the_stack_is_on_the_first_row_of_a_call(tmp_path: Path) -> None:
    frames = ["File a.py, line 3, in f, \n y = x('1')", 'File b.py, line 4, in g, \n "z"']
    calls = {"Torch.f.0.forward": call([tensor()], [tensor()]), "Torch.g.0.forward": call([], [tensor()])}
    file = write_json(tmp_path / "a", calls, stacks={"Torch.f.0.forward": frames})
    found = [row["NPU_Stack_Info"] for row in shown(file, file, stacks=True).values()]
    assert found == [str(frames), "N/A", "N/A"]


# --- which table ------------------------------------------------------------------------------------------------


def test_the_best_table_that_both_dumps_can_fill(tmp_path: Path) -> None:
    statistics = write_json(tmp_path / "s", {"Torch.f.0.forward": call([], [tensor()])})
    checksums = write_json(tmp_path / "c", {"Torch.f.0.forward": call([], [tensor(md5="0000000a")])})
    elements = write_elements(tmp_path / "e", {"Torch.f.0": {("output", 0): np.ones((2, 3), np.float32)}})
    found = {
        (a.parent.name, b.parent.name): next(
            name for name, table in TABLES.items() if table is table_for(open_dump(a), open_dump(b))
        )
        for a in (statistics, checksums, elements)
        for b in (statistics, checksums, elements)
    }
    assert {pair for pair, name in found.items() if name == "real data"} == {("e", "e")}
    assert {pair for pair, name in found.items() if name == "md5"} == {("c", "c")}
    assert len([name for name in found.values() if name == "statistics"]) == 7
