"""merge_result as its manual says: results of two ranks on disk, a yaml file, one workbook, read by openpyxl."""

from __future__ import annotations

import re
from pathlib import Path

import openpyxl
import pytest

from ulpscope.compat.msprobe.merge import merge_result
from ulpscope.model.errors import ConfigError, DumpError, UlpscopeError
from ulpscope.report.table import Cell, Row, Sheet
from ulpscope.report.xlsx import write_xlsx

COMMON = (
    *("NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape"),
    *("NPU Requires_grad", "Bench Requires_grad"),
)
STATS = ("NPU max", "NPU min", "NPU mean", "NPU l2norm", "Bench max", "Bench min", "Bench mean", "Bench l2norm")
STATISTICS_INDICES = (
    *("Max diff", "Min diff", "Mean diff", "L2norm diff"),
    *("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr", "Requires_grad Consistent"),
)
REAL_INDICES = (
    *("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio"),
    "Requires_grad Consistent",
)
HEADERS = {
    "statistics": (*COMMON, *STATISTICS_INDICES[:-1], *STATS, "Requires_grad Consistent", "Result", "Err_message"),
    "real": (
        *(*COMMON, *REAL_INDICES[:-1], *STATS, "Requires_grad Consistent"),
        *("Accuracy Reached or Not", "Err_message", "Data_name"),
    ),
    "md5": (*COMMON, "NPU MD5", "BENCH MD5", "Requires_grad Consistent", "Result"),
}
INPUT, GROUP, OUTPUT = (f"Distributed.all_reduce.0.forward.{slot}" for slot in ("input.0", "input.group", "output.0"))
API = "api:\n- Distributed.all_reduce\n"


def result(folder: Path, rank: int, kind: str, *rows: tuple[str, dict[str, Cell]], name: str = "") -> Path:
    """A compare result; a row is its name and the columns that are not 0."""
    folder.mkdir(exist_ok=True)
    table: list[Row] = []
    for title, cells in rows:
        known = {"NPU Name": title, "Bench Name": title, "Requires_grad Consistent": True, **cells}
        table.append((tuple(known.get(column, 0) for column in HEADERS[kind]), None))
    path = folder / (name or f"compare_result_rank{rank}_2026010100000{rank}.xlsx")
    write_xlsx(path, [Sheet("Sheet1", HEADERS[kind], table)])
    return path


def merged(folder: Path, config: str = API) -> dict[str, list[tuple[object, ...]]]:
    """The sheets of the merged workbook."""
    (folder / "config.yaml").write_text(config)
    path = merge_result(folder / "in", folder / "out", folder / "config.yaml")
    return {sheet.title: list(sheet.iter_rows(values_only=True)) for sheet in openpyxl.load_workbook(path)}


def two_ranks(folder: Path, kind: str = "statistics", *names: str) -> None:
    for rank in (0, 1):
        result(folder / "in", rank, kind, *((name, {}) for name in names or (INPUT, OUTPUT)))


def error(folder: Path, config: str = API, kind: type[UlpscopeError] = ConfigError) -> str:
    with pytest.raises(kind) as raised:
        merged(folder, config)
    assert not (folder / "out").exists()
    return str(raised.value)


def test_003_080_082_083_results_of_a_folder_become_one_workbook_named_by_the_time(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    (tmp_path / "my.yaml").write_text(API)
    path = merge_result(str(tmp_path / "in"), str(tmp_path / "new" / "out"), str(tmp_path / "my.yaml"))
    assert path.parent == tmp_path / "new" / "out"
    assert re.fullmatch(r"multi_ranks_compare_merge_\d{14}\.xlsx", path.name)


def test_003_082_a_file_of_the_same_name_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260101000000")
    two_ranks(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "multi_ranks_compare_merge_20260101000000.xlsx").write_text("old")
    assert "Max diff" in merged(tmp_path)
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_003_081_one_result_has_nothing_to_be_merged_with(tmp_path: Path) -> None:
    result(tmp_path / "in", 0, "statistics", (INPUT, {}))
    result(tmp_path / "in", 1, "statistics", (INPUT, {}), name="compare_result_20260101000000.xlsx")
    assert "Number of compare result is no more than 1, no need to merge." in error(tmp_path, kind=DumpError)


def test_003_081_results_of_both_kinds_are_not_merged(tmp_path: Path) -> None:
    result(tmp_path / "in", 0, "statistics", (INPUT, {}))
    result(tmp_path / "in", 1, "real", (INPUT, {}))
    message = error(tmp_path, kind=DumpError)
    assert "not all real data or all statistics (rank0: statistics, rank1: real data)" in message


def test_003_083_a_configuration_that_is_not_there_or_no_yaml_is_said(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        merge_result(tmp_path / "in", tmp_path / "out", tmp_path / "nowhere.yaml")
    assert "is not yaml" in error(tmp_path, "api: [")
    assert "is not yaml" in error(tmp_path, "api: " + "[" * 5000)
    assert "is not yaml" in error(tmp_path, "api: !!python/object/apply:os.getcwd []")
    assert "is larger than" in error(tmp_path, "#" * 300_000)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "config.yaml is empty, please check."),
        ("compare_index:\n- Max diff\n", "The APIs required to merge data were not found."),
        ("api:\n", "The APIs required to merge data were not found."),
        ("api: Distributed\n", "The config format of 'api' is incorrect, please check."),
        ("api:\n- 1\n", "The config format of 'api' is incorrect, please check."),
        (API + "compare_indx:\n- Max diff\n", "unknown key 'compare_indx'. Did you mean 'compare_index'?"),
        ("- Distributed\n", "it must be a table"),
    ],
)
def test_003_084_what_is_wrong_with_api_is_said(tmp_path: Path, config: str, message: str) -> None:
    two_ranks(tmp_path)
    assert message in error(tmp_path, config)


@pytest.mark.parametrize(
    ("api", "expected"),
    [
        ("Distributed", 3),
        ("Distributed.all_reduce", 2),
        ("Distributed.all_reduce.1", 1),
        ("Distributed.all_reduce.1.forward", 1),
        ("Module.fc", 1),
    ],
)
def test_003_084_calls_are_named_by_type_name_number_and_direction(tmp_path: Path, api: str, expected: int) -> None:
    names = ("Distributed.all_reduce.1", "Distributed.all_reduce.10", "Distributed.all_reduce_coalesced.1")
    names = (*(f"{name}.forward.input.0" for name in names), "Module.fc.Linear.forward.0.input.0")
    two_ranks(tmp_path, "statistics", *names)
    assert len(merged(tmp_path, f"api:\n- {api}\n")["Max diff"]) == 1 + expected


def test_003_085_the_chosen_indices_have_sheets(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    config = API + "compare_index:\n- Max diff\n- L2norm diff\n- MeanRelativeErr\n"
    assert [name for name in merged(tmp_path, config) if name != "Expected relations"] == [
        "Max diff",
        "L2norm diff",
        "MeanRelativeErr",
    ]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("compare_index: Max diff\n", "The config format of 'compare_index' is incorrect, please check."),
        ("compare_index:\n- [Max diff]\n", "The config format of 'compare_index' is incorrect, please check."),
        ("compare_index:\n- Foo\n", "No compare index recognized, please check!"),
        ("compare_index:\n- Cosine\n", "No compare index recognized, please check!"),
        ("compare_index:\n- Max diff\n- Cosine\n", "'Cosine' is no index of results of statistics"),
    ],
)
def test_003_085_what_is_wrong_with_compare_index_is_said(tmp_path: Path, index: str, message: str) -> None:
    two_ranks(tmp_path)
    assert message in error(tmp_path, API + index)


@pytest.mark.parametrize("empty", ["", "compare_index:\n"])
def test_003_085_086_without_compare_index_all_of_statistics_are_merged(tmp_path: Path, empty: str) -> None:
    two_ranks(tmp_path)
    assert [name for name in merged(tmp_path, API + empty) if name != "Expected relations"] == list(STATISTICS_INDICES)


def test_003_085_087_without_compare_index_all_of_real_data_are_merged(tmp_path: Path) -> None:
    two_ranks(tmp_path, "real")
    assert [name for name in merged(tmp_path) if name != "Expected relations"] == list(REAL_INDICES)


def test_003_088_md5_results_are_refused(tmp_path: Path) -> None:
    two_ranks(tmp_path, "md5")
    message = error(tmp_path, kind=DumpError)
    assert "Rank0 compare result is 'md5' dump task and does not support merging result, please check!" in message


def test_003_089_a_sheet_has_the_names_and_a_column_for_each_rank_by_number(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        result(
            tmp_path / "in",
            rank,
            "statistics",
            (INPUT, {"Max diff": rank / 4}),
            name=f"compare_result_rank{rank}_20260101000000.xlsx",
        )
    assert merged(tmp_path)["Max diff"] == [("NPU Name", "rank0", "rank2", "rank10"), (INPUT, 0, 0.5, 2.5)]


def test_003_090_a_rank_without_the_row_has_a_blank_cell(tmp_path: Path) -> None:
    result(tmp_path / "in", 0, "statistics", (INPUT, {"Max diff": 0.5}))
    result(tmp_path / "in", 1, "statistics", (OUTPUT, {"Max diff": 0.25}))
    assert merged(tmp_path)["Max diff"][1:] == [(OUTPUT, None, 0.25), (INPUT, 0.5, None)]


@pytest.mark.parametrize("value", ["N/A", "unsupported", "Nan"])
def test_003_091_a_value_that_is_no_number_shows_both_maxima(tmp_path: Path, value: str) -> None:
    for rank in (0, 1):
        row = {"Cosine": value, "EucDist": 0.5, "NPU max": "N/A", "Bench max": "N/A"}
        result(tmp_path / "in", rank, "real", (OUTPUT, row))
    sheets = merged(tmp_path)
    assert sheets["Cosine"][1] == (OUTPUT, "NPU:N/A  Bench:N/A", "NPU:N/A  Bench:N/A")
    assert sheets["EucDist"][1] == (OUTPUT, 0.5, 0.5)


@pytest.mark.parametrize("group", ["tp-0-1", "[0, 1]"])
def test_003_092_the_group_of_a_call_is_shown(tmp_path: Path, group: str) -> None:
    row = {"Max diff": "N/A", "NPU Dtype": "torch.ProcessGroup", "NPU max": group, "Bench max": group}
    for rank in (0, 1):
        result(tmp_path / "in", rank, "statistics", (INPUT, {}), (GROUP, row), (OUTPUT, {}))
    shown = f"NPU:{group}  Bench:{group}"
    assert merged(tmp_path)["Max diff"][2] == (GROUP, shown, shown)


def test_003_093_rows_stand_in_the_order_of_the_network(tmp_path: Path) -> None:
    names = [f"Distributed.all_reduce.{number}.forward.input.0" for number in range(12)]
    result(tmp_path / "in", 0, "statistics", *((name, {}) for name in names if not name.endswith(".5.forward.input.0")))
    result(tmp_path / "in", 1, "statistics", *((name, {}) for name in names[1:]))
    assert [row[0] for row in merged(tmp_path)["Max diff"][1:]] == names


def communication(slot: str, values: tuple[float, float], **cells: Cell) -> tuple[tuple[str, dict[str, Cell]], ...]:
    """The row of one slot for rank 0 and rank 1, with all four statistics of both sides."""
    return tuple(
        (
            f"Distributed.{slot}",
            {**dict.fromkeys(STATS, value), "NPU Tensor Shape": "[2]", "Bench Tensor Shape": "[2]", **cells},
        )
        for value in values
    )


@pytest.mark.parametrize(
    ("slots", "verdict"),
    [
        ([("all_gather.0.forward.output.0.0", (1.0, 2.0))], "violated"),
        ([("all_gather.0.forward.output.0.0", (1.0, 1.0)), ("all_gather.0.forward.output.1", (3.0, 4.0))], "holds"),
        ([("all_gather_into_tensor.0.forward.output.0", (1.0, 2.0))], "violated"),
        ([("all_reduce.0.forward.output.0", (1.0, 1.0))], "holds"),
        ([("all_reduce.0.forward.output.0", (1.0, 1.1))], "violated"),
        ([("reduce_scatter.0.forward.output.0", (1.0, 2.0))], "unknown"),
        ([("reduce_scatter_tensor.0.forward.output.0", (1.0, 2.0))], "unknown"),
        ([("broadcast.0.forward.output.0", (1.0, 2.0))], "violated"),
        ([("isend.0.forward.input.0", (1.0, 2.0)), ("isend.0.forward.output.0", (9.0, 2.0))], "violated"),
        ([("irecv.0.forward.input.0", (1.0, 2.0)), ("irecv.0.forward.output.0", (9.0, 2.0))], "unknown"),
        ([("all_to_all_single.0.forward.input.1", (1.0, 2.0)), ("all_to_all_single.0.forward.output.0", (2.0, 1.0))], "holds"),
    ],
)  # fmt: skip
def test_003_094_what_is_expected_of_communication_calls_is_checked(
    tmp_path: Path, slots: list[tuple[str, tuple[float, float]]], verdict: str
) -> None:
    rows = [communication(slot, values) for slot, values in slots]
    for rank in (0, 1):
        result(tmp_path / "in", rank, "statistics", *(row[rank] for row in rows))
    sheet = merged(tmp_path, "api:\n- Distributed\n")["Expected relations"]
    assert sheet[0] == ("NPU Name", "group", "expected", "NPU", "Bench", "detail")
    assert sheet[1][3:5] == (verdict, verdict)
