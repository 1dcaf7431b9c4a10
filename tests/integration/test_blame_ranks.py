"""Collectives of two processes: what moves between ranks is judged from the ledgers alone."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as processes

import ulpscope
from ulpscope.analyze.ledger import judge
from ulpscope.store.ledger_file import Row, find_ledgers, read_ledger

NAMES = ["broadcast_", "allgather_", "_allgather_base_", "allreduce_", "_reduce_scatter_base_", "reduce_scatter_"]
COALESCED = ["allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"]
FUNCTIONAL = [
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce_coalesced",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
]
NAMES += COALESCED + FUNCTIONAL


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # newer releases of torch have other names for some of these
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(rank)
    x, y = torch.randn(10), torch.randn(6)
    with ulpscope.ledger(f"{folder}/run", rank=rank) as ledger:
        dist.broadcast(x, 1)
        dist.all_gather([torch.empty(6), torch.empty(6)], y)
        dist.all_gather_into_tensor(torch.empty(12), y)
        dist.all_reduce(y)
        dist.reduce_scatter_tensor(torch.empty(5), torch.randn(10))
        dist.reduce_scatter(torch.empty(5), [torch.randn(5), torch.randn(5)])
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(y)
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(torch.empty(20), x)
            dist.all_gather_into_tensor(torch.empty(12), y)
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(torch.empty(5), torch.randn(10))
            dist.reduce_scatter_tensor(torch.empty(3), torch.randn(6))
        ranks = [0, 1]
        summed = functional.all_reduce(torch.randn(7), "sum", ranks) * 2
        assert summed.sum().isfinite()
        (functional.broadcast(torch.randn(4), 1, ranks) + 1).sum()
        (functional.all_gather_tensor(y, 0, ranks) + 1).sum()
        (functional.reduce_scatter_tensor(torch.randn(8), "sum", 0, ranks) + 1).sum()
        for found in (
            functional.all_reduce_coalesced([torch.randn(3), torch.randn(5)], "sum", ranks),
            functional.all_gather_into_tensor_coalesced([torch.randn(3), torch.randn(5)], ranks),
            functional.reduce_scatter_tensor_coalesced([torch.randn(4), torch.randn(6)], "sum", [0, 0], ranks),
        ):
            sum(each.sum() for each in found)
        functional.all_reduce(torch.ones(3), "max", ranks).sum()
        assert ledger.notes == []
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("ranks")
    processes.spawn(work, (str(folder),), nprocs=2)
    return [row for path in find_ledgers(folder / "run") for row in read_ledger(path)[1]]


def test_all_exchanges_of_a_clean_run_are_judged(rows: list[Row]) -> None:
    seen = [row.name for row in rows if row.exchange is not None and row.rank == 0]
    assert seen == NAMES
    judgement = judge(rows)
    assert judgement.findings == ()
    assert judgement.unknown == {
        "_c10d_functional.all_reduce.default: allreduce.max does not add: sketches cannot check it": 2
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_got_other_values_is_named(rows: list[Row], name: str, rank: int) -> None:
    def spoiled(row: Row) -> Row:
        if row.exchange is None or (row.name, row.rank) != (name, rank):
            return row
        first, *rest = row.exchange.got
        return replace(row, exchange=replace(row.exchange, got=(first + 0.01, *rest)))

    findings = judge([spoiled(row) for row in rows]).findings
    assert [(found.row.name, found.row.rank) for found in findings] == [(name, rank)]
