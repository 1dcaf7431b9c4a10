"""Our merge_result against that of the real mindstudio-probe 8.2.1, on its own compare results of two ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import openpyxl
import pytest

from interop.peers import OLDER, python
from ulpscope.compat.msprobe.merge import merge_result

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.distributed]

PEER = OLDER[0]
HERE = Path(__file__).resolve().parent
CONFIG = """
api:
- Distributed.broadcast
- Distributed.all_reduce
- Distributed.all_gather
- Distributed.isend
- Distributed.irecv
- Functional.linear.3.forward
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def peer_runs(*arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [str(python(PEER)), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def sheets(path: Path) -> dict[str, list[tuple[object, ...]]]:
    return {sheet.title: list(sheet.iter_rows(values_only=True)) for sheet in openpyxl.load_workbook(path)}


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_every_cell_of_the_peers_merged_workbook_is_in_ours(tmp_path: Path, task: str) -> None:
    python(PEER)
    for side, scale in (("target", "1.001"), ("golden", "1")):
        peer_runs(str(HERE / "merge_worker.py"), str(tmp_path / side), task, scale, str(free_port()))
    paths = {"npu_path": str(tmp_path / "target" / "step0"), "bench_path": str(tmp_path / "golden" / "step0")}
    (tmp_path / "compare.json").write_text(json.dumps({**paths, "is_print_compare_log": False}))
    (tmp_path / "config.yaml").write_text(CONFIG)
    results, theirs = tmp_path / "results", tmp_path / "theirs"
    for folder in (results, theirs):
        folder.mkdir()
    command = ["-m", "msprobe.msprobe", "-f", "pytorch"]
    peer_runs(*command, "compare", "-i", str(tmp_path / "compare.json"), "-o", str(results))
    peer_runs(*command, "merge_result", "-i", str(results), "-o", str(theirs), "-config", str(tmp_path / "config.yaml"))
    ours = sheets(merge_result(results, tmp_path / "ours", tmp_path / "config.yaml"))
    expected = sheets(next(theirs.glob("multi_ranks_compare_merge_*.xlsx")))
    assert list(ours) == [*expected, "Expected relations"]
    for name, (header, *rows) in expected.items():
        assert ours[name][0] == header
        # The peer puts the rows in the order of the yaml file, we in that of the network.
        assert sorted(ours[name][1:], key=str) == sorted(rows, key=str)
    names = [row[0] for row in next(iter(ours.values()))[1:]]
    assert names.index("Distributed.all_reduce.10.forward.input.0") < names.index(
        "Distributed.broadcast.0.forward.input.0"
    )
    assert {row[3] for row in ours["Expected relations"][1:]} == {"holds"}
