"""The speeds that ptdbg_ascend's guide names, of one core: a machine with 192 of them was measured there.

CPU seconds, not those of a clock: other programs on the machine take nothing from them. Clocks are in `benchmarks/`.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ulpscope.compat import ptdbg_ascend

GIGABYTE = 1e9
_ELEMENTS = 4 << 20
_CALLS = 6


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Path], float]]:
    """Two dumps with other numbers in each, and the CPU seconds that the first took."""
    folders: list[Path] = []
    seconds: list[float] = []
    for seed in range(2):
        torch.manual_seed(seed)
        values = [torch.randn(_ELEMENTS) for _ in range(_CALLS)]
        folder = tmp_path_factory.mktemp("dump")
        ptdbg_ascend.set_dump_path(str(folder))
        ptdbg_ascend.register_hook(nn.ReLU(), ptdbg_ascend.acc_cmp_dump)
        start = time.process_time()
        ptdbg_ascend.set_dump_switch("ON", mode="all")
        for value in values:
            value.neg()
        ptdbg_ascend.set_dump_switch("OFF")
        seconds.append(time.process_time() - start)
        folders.append(folder / "ptdbg_dump_v2.0" / "rank0")
    yield folders, min(seconds)
    ptdbg_ascend.set_dump_path(str(folder))  # ends the dump


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.npy"))


def test_000_063_a_dump_is_written_at_a_tenth_of_a_gigabyte_a_second(dumps: tuple[list[Path], float]) -> None:
    (folder, _), seconds = dumps
    assert size(folder) > 2 * _CALLS * 4 * _ELEMENTS
    first = np.load(next((folder / "dump").glob("Tensor_neg_0_forward_input.0.npy")))
    assert np.array_equal(np.load(folder / "dump" / "Tensor_neg_0_forward_output.npy"), -first)
    assert size(folder) / seconds > 0.1 * GIGABYTE


def test_000_126_two_dumps_are_compared_at_a_tenth_of_a_gigabyte_a_second(
    dumps: tuple[list[Path], float], tmp_path: Path
) -> None:
    npu, bench = dumps[0]
    paths = {
        "npu_pkl_path": str(npu / "dump.pkl"),
        "bench_pkl_path": str(bench / "dump.pkl"),
        "npu_dump_data_dir": str(npu / "dump"),
        "bench_dump_data_dir": str(bench / "dump"),
        "is_print_compare_log": False,
    }
    start = time.process_time()
    ptdbg_ascend.compare(paths, str(tmp_path), auto_analyze=False)
    seconds = time.process_time() - start
    (result,) = tmp_path.glob("compare_result_*.csv")
    with result.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * _CALLS
    assert {row["Accuracy Reached or Not"] for row in rows} == {"No"}
    assert (size(npu) + size(bench)) / seconds > 0.1 * GIGABYTE
