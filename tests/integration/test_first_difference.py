"""Two processes over gloo, one of which computes something else before an all_reduce: found on its rank, in both layouts."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ulpscope.compare.engine import compare_dumps
from ulpscope.compare.runs import pair_runs
from ulpscope.findings.divergence import diverge
from ulpscope.findings.exchange import Direction, Side
from ulpscope.findings.model import Divergence, Status
from ulpscope.findings.ranks import origin
from ulpscope.model.names import call_text
from ulpscope.report.first_difference import write_first_difference
from ulpscope.store.formats.msprobe_writer import write_msprobe
from ulpscope.store.registry import find_dumps, open_dump
from ulpscope.store.run_folder import dump_folder

pytestmark = pytest.mark.distributed
LAYOUTS = (("statistics", "statistics", "statistics"), ("md5", "statistics", "md5"), ("tensor", "tensor", "statistics"))
FAULTY = "test.scale.0.forward"


def program(folder: Path) -> None:
    """One rank: the same program recorded with and without a fault inside one call of rank 1."""
    import torch
    import torch.distributed as dist

    import ulpscope

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    factor = 1.0

    @torch.library.custom_op("test::scale", mutates_args=())
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    def step() -> None:
        torch.manual_seed(rank)
        y = torch.nn.functional.gelu(torch.randn(16, 16) @ torch.ones(16, 16))
        z = torch.ops.test.scale(y)
        unrelated = torch.ones(4)
        dist.all_reduce(unrelated, group=pair)
        dist.all_reduce(z)
        kept = torch.relu(z)
        came = torch.empty(16, 16)
        if rank == 0:
            dist.send(kept, 1)
        else:
            dist.recv(came, 0)
        parts = [torch.empty(4), torch.empty(4)]
        dist.all_gather(parts, unrelated)
        message = torch.full((2,), float(rank))
        way = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(way, message, 1 - rank)]):
            work.wait()

    for name, tensors, faulty in (
        ("stats-clean", False, 1.0),
        ("stats-fault", False, 1.01),
        ("tensors-clean", True, 1.0),
        ("tensors-fault", True, 1.01),
    ):
        factor = faulty if rank == 1 else 1.0
        with ulpscope.Capture(folder / name, tensors=tensors, checksum=True) as cap:
            step()
            cap.step()
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first-difference")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=180)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    for name in ("clean", "fault"):
        for kind, task, summary in LAYOUTS:
            for place in find_dumps(folder / f"tensors-{name}"):
                into = dump_folder(folder / f"{kind}-{name}", place.step, place.rank)
                write_msprobe(open_dump(place.folder), into, task=task, level="L1", summary_mode=summary)
    return folder


KINDS = ("stats", "tensors", "statistics", "md5", "tensor")


def divergences(runs: Path, kind: str) -> list[Divergence]:
    return [
        diverge(compare_dumps(open_dump(unit.reference), open_dump(unit.target)), step=unit.step, rank=unit.rank)
        for unit in pair_runs(runs / f"{kind}-clean", runs / f"{kind}-fault").units
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_fault_is_found_on_its_rank_and_followed_over_the_all_reduce(kind: str, runs: Path) -> None:
    found = origin(divergences(runs, kind))
    assert found.first is not None
    assert (call_text(found.first.call), found.first.rank) == (FAULTY, 1)
    assert found.first.status is Status.INTRODUCED
    assert found.also == ()
    assert found.sentences == ("rank 1 -> rank 0 at Distributed.all_reduce.1.forward",)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_peers_are_read(kind: str, runs: Path) -> None:
    zero, one = (list(each.passings) for each in divergences(runs, kind))
    told = [(each.call.name, each.group, each.way.direction, each.gave, each.got) for each in zero]
    meeting, sending, same, other = Direction.MEETING, Direction.SEND, Side.AGREES, Side.DIFFERS
    assert told == [
        ("all_reduce", (0, 1), meeting, same, same),
        ("all_reduce", (), meeting, same, other),
        ("send", (0, 1), sending, other, same),
        ("all_gather", (), meeting, same, same),
        ("batch_isend_irecv", (0, 1), sending, same, same),
    ]
    assert [each.way.key for each in zero] == [each.way.key for each in one]
    assert [each.nth for each in zero] == [each.nth for each in one] == [0, 0, 0, 0, 1]
    assert [(each.gave, each.got) for each in one][1:3] == [(other, other), (same, other)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_name_it(kind: str, runs: Path, tmp_path: Path) -> None:
    units = pair_runs(runs / f"{kind}-clean", runs / f"{kind}-fault").units
    written = write_first_difference(units, tmp_path, timestamp="20240102030405")
    assert [path.name for path in written.ranks] == [
        f"compare_result_rank{rank}_20240102030405.json" for rank in range(2)
    ]
    zero, one = (json.loads(path.read_text()) for path in written.ranks)
    assert (zero[FAULTY]["is_same"], one[FAULTY]["is_same"]) == (True, False)
    assert zero["Distributed.all_reduce.1.forward"]["is_same"] is False
    (message,) = [
        item for item in one["Distributed.batch_isend_irecv.0.forward"]["op_items"] if item["state"] == "input"
    ]
    assert (message["NPU Name"], message["NPU P2POp op"], message["NPU P2POp peer"]) == (
        "Distributed.batch_isend_irecv.0.forward.input.0.0",
        "irecv",
        0,
    )
    assert written.analysis is not None
    analysis = json.loads(written.analysis.read_text())
    assert {rank: [each["op_name"] for each in calls] for rank, calls in analysis.items()} == {"rank_1": [FAULTY]}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in (*written.ranks, written.analysis)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_agree_have_no_analysis(kind: str, runs: Path, tmp_path: Path) -> None:
    units = pair_runs(runs / f"{kind}-clean", runs / f"{kind}-clean").units
    written = write_first_difference(units, tmp_path, timestamp="1")
    assert (written.origin.first, written.analysis) == (None, None)
    assert all(call["is_same"] for path in written.ranks for call in json.loads(path.read_text()).values())


if __name__ == "__main__":
    program(Path(sys.argv[1]))
