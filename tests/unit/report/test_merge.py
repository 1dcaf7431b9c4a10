"""Merging compare results of several ranks, on tables made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ulpscope.model.errors import ConfigError, DumpError
from ulpscope.report.csv import write_csv
from ulpscope.report.merge import chosen_indices, merged_order, merged_sheets, read_results
from ulpscope.report.relations import communications, relation_sheet
from ulpscope.report.table import Cell, Colour, Row, Sheet
from ulpscope.report.xlsx import write_xlsx

STATISTICS = (
    *("NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape"),
    *("Max diff", "Min diff", "Mean diff", "L2norm diff"),
    *("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr"),
    *("NPU max", "NPU min", "NPU mean", "NPU l2norm", "Bench max", "Bench min", "Bench mean", "Bench l2norm"),
    *("Requires_grad Consistent", "Result", "Err_message"),
)
REDUCE = "Distributed.all_reduce.{}.forward.{}"


def row(name: str, **cells: Cell) -> dict[str, Cell]:
    """A row of a statistics result; `npu` and `bench` give all four statistics of a side."""
    npu, bench = cells.pop("npu", 1.0), cells.pop("bench", 1.0)
    sides = {"NPU": npu, "Bench": bench}
    found: dict[str, Cell] = dict.fromkeys(STATISTICS, 0.0)
    for side, value in sides.items():
        found |= {f"{side} Name": name, f"{side} Dtype": "torch.float32", f"{side} Tensor Shape": "[2]"}
        found |= {f"{side} {each}": value for each in ("max", "min", "mean", "l2norm")}
    return (
        found
        | {"Requires_grad Consistent": True, "Result": "", "Err_message": ""}
        | {key.replace("_", " "): value for key, value in cells.items()}
    )


def group_row(name: str, group: str) -> dict[str, Cell]:
    return row(name, npu=group, bench=group, NPU_Dtype="torch.ProcessGroup", Max_diff="N/A")


def result(folder: Path, rank: int, *rows: dict[str, Cell], form: str = "xlsx") -> None:
    path = folder / f"compare_result_rank{rank}_20260101000000.{form}"
    table: list[Row] = [(tuple(each.values()), None) for each in rows]
    if form == "csv":
        write_csv(path, STATISTICS, table)
    else:
        write_xlsx(path, [Sheet("Sheet", STATISTICS, table)])


def merged(folder: Path, *apis: str, index: str = "Max diff") -> list[tuple[Cell, ...]]:
    results = read_results(folder, apis)
    sheets = {sheet.name: sheet for sheet in merged_sheets(results, [index])}
    return [tuple(sheets[index].columns), *(tuple(cells) for cells, _ in sheets[index].rows)]


def relations(**ranks: list[dict[str, Cell]]) -> list[tuple[Cell, ...]]:
    """Name, verdicts and detail of each relation; the ranks are r0, r1, ..."""
    found = relation_sheet({int(name[1:]): communications(rows) for name, rows in ranks.items()})
    assert found is not None
    return [(cells[0], *cells[3:]) for cells, _ in found.rows]


def test_each_rank_has_its_column_and_each_row_its_value(tmp_path: Path) -> None:
    result(tmp_path, 0, row("Distributed.a.0.forward.input.0", Max_diff=0.5))
    result(tmp_path, 11, row("Distributed.a.0.forward.input.0", Max_diff=0.25))
    assert merged(tmp_path, "Distributed") == [
        ("NPU Name", "rank0", "rank11"),
        ("Distributed.a.0.forward.input.0", 0.5, 0.25),
    ]


def test_csv_results_merge_with_xlsx_results(tmp_path: Path) -> None:
    result(tmp_path, 0, row("Distributed.a.0.forward.input.0", Max_diff=0.5))
    result(tmp_path, 1, row("Distributed.a.0.forward.input.0", Max_diff="N/A", npu=2.0), form="csv")
    assert merged(tmp_path, "Distributed")[1][1:] == (0.5, "NPU:2.0  Bench:1.0")


@pytest.mark.parametrize("value", ["N/A", "unsupported", "Nan", "nan"])
def test_an_index_without_a_value_shows_both_maxima(tmp_path: Path, value: str) -> None:
    for rank in (0, 1):
        result(tmp_path, rank, row("A.b.0", Max_diff=value, npu="inf", bench=3))
    assert merged(tmp_path, "A")[1] == ("A.b.0", "NPU:inf  Bench:3", "NPU:inf  Bench:3")


def test_other_texts_stay_as_they_are(tmp_path: Path) -> None:
    for rank in (0, 1):
        result(tmp_path, rank, row("A.b.0", Max_diff="12.5%"))
    assert merged(tmp_path, "A")[1] == ("A.b.0", "12.5%", "12.5%")


@pytest.mark.parametrize(
    ("api", "expected"),
    [
        ("Distributed", 4),
        ("Distributed.all_gather", 2),
        ("Distributed.all_gather.1", 1),
        ("Distributed.all_gather.1.forward", 1),
        ("Distributed.all_gather.1.backward", 0),
        ("Distributed.all_gather.1.forward.input.0", 1),
        ("Distributed.all", 0),
    ],
)
def test_a_call_is_chosen_by_whole_parts_of_its_name(tmp_path: Path, api: str, expected: int) -> None:
    names = ("all_gather.1", "all_gather.10", "all_gather_into_tensor.1", "all_reduce.1")
    for rank in (0, 1):
        result(tmp_path, rank, *(row(f"Distributed.{name}.forward.input.0") for name in names), row("Tensor.add.0"))
    assert len(merged(tmp_path, api, "Tensor")) == 1 + 1 + expected


def test_the_order_is_that_of_the_network_not_of_the_text() -> None:
    keys = [(f"n{number}", 0) for number in range(12)]
    assert merged_order([keys, keys]) == keys


def test_what_only_one_rank_has_stands_where_it_ran() -> None:
    first, second = ["a", "b", "send", "d"], ["start", "a", "b", "receive", "d", "end"]
    orders = [[(name, 0) for name in names] for names in (first, second)]
    assert [name for name, _ in merged_order(orders)] == ["start", "a", "b", "receive", "send", "d", "end"]


def test_orders_that_contradict_each_other_still_give_every_row_once() -> None:
    assert sorted(merged_order([[("a", 0), ("b", 0)], [("b", 0), ("c", 0), ("a", 0)]])) == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
    ]


def test_rows_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        result(tmp_path, rank, row("A.b.0", Max_diff=1.0), row("A.b.0", Max_diff=2.0))
    assert merged(tmp_path, "A")[1:] == [("A.b.0", 1, 1), ("A.b.0", 2, 2)]


def test_two_results_of_one_rank_are_an_error_that_names_them(tmp_path: Path) -> None:
    for rank in (0, 1):
        result(tmp_path, rank, row("A.b.0"))
    result(tmp_path, 1, row("A.b.0"), form="csv")
    with pytest.raises(DumpError, match=r"two results of rank 1: compare_result_rank1_20260101000000\.csv and .*xlsx"):
        read_results(tmp_path, ["A"])


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="is not a folder"):
        read_results(tmp_path / "nowhere", ["A"])


def test_calls_that_nobody_has_are_an_error(tmp_path: Path) -> None:
    for rank in (0, 1):
        result(tmp_path, rank, row("A.b.0"))
    with pytest.raises(DumpError, match="Nothing to merge"):
        read_results(tmp_path, ["Nope"])


def test_a_call_that_one_rank_does_not_have_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result(tmp_path, 0, row("A.b.0"))
    result(tmp_path, 1, row("B.b.0"))
    read_results(tmp_path, ["A"])
    assert "A not found in rank1 compare result." in caplog.text


def test_an_unknown_index_names_the_nearest(tmp_path: Path) -> None:
    for rank in (0, 1):
        result(tmp_path, rank, row("A.b.0"))
    results = read_results(tmp_path, ["A"])
    with pytest.raises(ConfigError, match=r"'Max dif' is no index of results of statistics\. Did you mean 'Max diff'"):
        chosen_indices(results, ["Max dif", "Min diff"])
    assert chosen_indices(results, ["Min diff", "Max diff", "Min diff"]) == ["Min diff", "Max diff"]


@pytest.mark.parametrize("api", ["all_reduce", "all_gather", "all_gather_into_tensor", "broadcast"])
def test_outputs_that_differ_within_a_group_violate_what_is_expected(api: str) -> None:
    name = f"Distributed.{api}.0.forward.output.0"
    found = relations(r0=[row(name, npu=1.0)], r1=[row(name, npu=1.5)])
    told = "NPU: output.0: rank0 and rank1 differ"
    assert found == [(f"Distributed.{api}.0.forward", "violated", "holds", told)]


def test_only_the_first_output_is_shared_the_others_are_the_ranks_own() -> None:
    names = ("output.0.0", "output.0.1", "output.1")
    rows = [[row(f"Distributed.all_gather.0.forward.{name}", npu=value) for name, value in zip(names, values, strict=True)]
            for values in ((1.0, 2.0, 3.0), (1.0, 2.0, 4.0))]  # fmt: skip
    assert relations(r0=rows[0], r1=rows[1]) == [("Distributed.all_gather.0.forward", "holds", "holds", "")]


def test_each_group_is_judged_alone_and_its_calls_are_counted_in_it() -> None:
    def calls(*numbered: tuple[int, str, float]) -> list[dict[str, Cell]]:
        return [
            each
            for number, group, value in numbered
            for each in (
                group_row(REDUCE.format(number, "input.group"), group),
                row(REDUCE.format(number, "output.0"), npu=value),
            )
        ]

    found = relations(
        r0=calls((0, "tp-0-1", 1.0)),
        r1=calls((0, "dp-1-2", 5.0), (1, "tp-0-1", 1.0)),
        r2=calls((0, "[1, 2]", 6.0)),
    )
    assert [(name, npu) for name, npu, _, _ in found] == [
        ("Distributed.all_reduce.0.forward", "holds"),
        ("Distributed.all_reduce.0.forward", "violated"),
    ]


def test_a_group_that_cannot_be_read_is_unknown_not_everyone() -> None:
    rows = [
        [group_row(REDUCE.format(0, "input.group"), "N/A"), row(REDUCE.format(0, "output.0"), npu=value)]
        for value in (1.0, 2.0)
    ]
    assert {npu for _, npu, _, _ in relations(r0=rows[0], r1=rows[1])} == {"unknown"}


def test_a_member_without_the_call_leaves_it_unknown() -> None:
    rows = [group_row(REDUCE.format(0, "input.group"), "[0, 1, 2]"), row(REDUCE.format(0, "output.0"))]
    ((_, npu, bench, detail),) = relations(r0=rows, r1=rows, r2=[])
    assert (npu, bench, detail) == ("unknown", "unknown", "no such row: rank2")


def test_a_value_that_was_not_measured_is_unknown_not_equal() -> None:
    rows = [row(REDUCE.format(0, "output.0"), bench="N/A", Bench_Dtype="N/A")]
    ((_, npu, bench, _),) = relations(r0=rows, r1=rows)
    assert (npu, bench) == ("holds", "unknown")


def test_nan_on_every_rank_is_the_same_output() -> None:
    rows = [row(REDUCE.format(0, "output.0"), npu="nan")]
    assert relations(r0=rows, r1=rows)[0][1] == "holds"


def sent(api: str, partner: int, value: float, after: float | None = None) -> list[dict[str, Cell]]:
    name = f"Distributed.{api}.0.forward"
    return [
        row(f"{name}.input.0", npu=value if api == "isend" else 0.0),
        row(f"{name}.input.1", npu=partner, bench=partner, NPU_Dtype="<class 'int'>", Bench_Dtype="<class 'int'>"),
        row(f"{name}.output.0", npu=value if after is None else after),
    ]


def test_what_is_received_is_what_was_sent() -> None:
    found = relations(r0=sent("isend", 1, 4.0), r1=sent("irecv", 0, 4.0))
    assert [(name, npu) for name, npu, _, _ in found] == [
        ("Distributed.isend.0.forward", "holds"),
        ("Distributed.irecv.0.forward", "holds"),
    ]
    found = relations(r0=sent("isend", 1, 4.0), r1=sent("irecv", 0, 5.0))
    assert found[1][1] == "violated"


def test_sending_changes_nothing() -> None:
    assert relations(r0=sent("isend", 1, 4.0, after=3.0))[0][1] == "violated"


def exchanged(before: float, after: float) -> list[dict[str, Cell]]:
    name = "Distributed.all_to_all_single.0.forward"
    return [row(f"{name}.input.1", npu=before), row(f"{name}.output.0", npu=after)]


def test_all_to_all_moves_elements_and_makes_none() -> None:
    assert relations(r0=exchanged(1.0, 2.0), r1=exchanged(2.0, 1.0))[0][1] == "holds"
    assert relations(r0=exchanged(1.0, 2.0), r1=exchanged(2.0, 3.0))[0][1] == "violated"


@pytest.mark.parametrize("api", ["reduce_scatter", "reduce_scatter_tensor"])
def test_the_parts_of_a_reduction_cannot_be_seen_in_statistics(api: str) -> None:
    rows = [row(f"Distributed.{api}.0.forward.output.0")]
    assert relations(r0=rows, r1=rows)[0][1] == "unknown"


def test_a_violated_relation_is_red_and_without_communication_there_is_no_sheet() -> None:
    ranks: Mapping[int, list[dict[str, Cell]]] = {
        rank: [row(REDUCE.format(0, "output.0"), npu=float(rank))] for rank in (0, 1)
    }
    sheet = relation_sheet({rank: communications(rows) for rank, rows in ranks.items()})
    assert sheet is not None
    assert [colour for _, colour in sheet.rows] == [Colour.RED]
    assert relation_sheet({0: communications([row("Tensor.add.0.forward.output.0")])}) is None
