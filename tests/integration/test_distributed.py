"""Two processes over gloo: the same numbers with and without capture, one dump per rank, true values of communication."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ulpscope
from integration.runs import LEVELS, assert_same, whole_dumps
from ulpscope.model.names import call_text, slot_text

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("distributed_worker.py")


PROGRAMS = ("data_parallel", "sharded", "collectives", "tensor_parallel", "functional_collectives")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every job of this file, run one after the other by one pair of processes: most of their time is the start."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs: list[dict[str, Any]] = []
    for program in PROGRAMS:
        jobs.append({"name": f"{program}-bare", "program": program, "level": None, "options": {}})
        jobs += [
            {"name": f"{program}-{level}", "program": program, "level": level, "options": {"tensors": level == "op"}}
            for level in LEVELS
        ]
        jobs += [
            {
                "name": f"{program}-{word}",
                "program": program,
                "level": "mix",
                "options": {"checksum": True, "reuse": reuse},
            }
            for word, reuse in (("reusing", True), ("measuring", False))
        ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    start_two_ranks(folder)
    return folder


def start_two_ranks(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(WORKER.parent.parent),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
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


def results(folder: Path, name: str) -> list[Any]:
    return [pickle.loads((folder / f"results{rank}.pickle").read_bytes())[name] for rank in range(2)]


def without_versions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_versions(item) for key, item in value.items() if key != "version"}
    return [without_versions(item) for item in value] if isinstance(value, list) else value


def numbers(dump: ulpscope.Dump, name: str, slot: str) -> list[float]:
    """The elements that a call had in one slot."""
    (value,) = [value for value in dump.call(name).values if slot_text(value.slot) == slot]
    return dump.load(value).reshape(-1).tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_two_ranks_compute_the_same_bytes(program: str, level: str, folder: Path) -> None:
    if program == "functional_collectives" and level == "module":
        pytest.skip("calls no module")
    bare, captured = results(folder, f"{program}-bare"), results(folder, f"{program}-{level}")
    if program == "collectives" and level == "kernel":
        # Below a dispatch mode the copies inside an all_gather raise no version: same bytes, another version.
        bare, captured = without_versions(bare), without_versions(captured)
    assert_same(bare, captured)
    steps = 1 if "collectives" in program else 3
    dumps = whole_dumps(folder / f"{program}-{level}", 2 * steps)
    assert [(dump.manifest.step, dump.manifest.rank, dump.manifest.world_size) for dump in dumps] == [
        (step, rank, 2) for step in range(steps) for rank in range(2)
    ]
    for dump in dumps:
        assert len(dump) > 0
        place = folder / f"{program}-{level}" / f"step{dump.manifest.step}" / f"rank{dump.manifest.rank}"
        assert dump.folder == place


@pytest.fixture
def collectives(folder: Path) -> list[ulpscope.Dump]:
    return ulpscope.open_run(folder / "collectives-op")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_all_reduce_has_its_input_and_its_sum(rank: int, collectives: list[ulpscope.Dump]) -> None:
    dump = collectives[rank]
    assert numbers(dump, "Distributed.all_reduce.0.forward", "input.0") == [rank + 1.0] * 3
    assert numbers(dump, "Distributed.all_reduce.0.forward", "output.0") == [3.0] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_an_asynchronous_all_reduce_has_its_sum_once_it_was_waited_for(
    rank: int, collectives: list[ulpscope.Dump]
) -> None:
    dump = collectives[rank]
    for number in (1, 2):
        name = f"Distributed.all_reduce.{number}.forward"
        assert numbers(dump, name, "input.0") == [(rank + 1.0) * number * 10] * 2
        assert numbers(dump, name, "output.0") == [number * 30.0] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_gathered_and_scattered_values_are_recorded_after_they_came(
    rank: int, collectives: list[ulpscope.Dump]
) -> None:
    dump = collectives[rank]
    assert numbers(dump, "Distributed.all_gather.0.forward", "output.0") == [0.0, 0.0]
    assert numbers(dump, "Distributed.all_gather.0.forward", "output.1") == [1.0, 1.0]
    assert numbers(dump, "Distributed.all_gather_into_tensor.0.forward", "output.0") == [5.0, 5.0, 6.0, 6.0]
    assert (
        numbers(dump, "Distributed.reduce_scatter_tensor.0.forward", "output.0")
        == [
            [0.0 + 0.0, 1.0 + 10.0],
            [2.0 + 20.0, 3.0 + 30.0],
        ][rank]
    )
    assert numbers(dump, "Distributed.broadcast.0.forward", "output.0") == [7.0]
    assert numbers(dump, "Distributed.all_to_all_single.0.forward", "output.0") == [[0.0, 10.0], [1.0, 11.0]][rank]


def test_a_message_is_recorded_at_both_ends(collectives: list[ulpscope.Dump]) -> None:
    sender, receiver = collectives
    assert numbers(sender, "Distributed.isend.0.forward", "input.0") == [42.0, 43.0]
    assert numbers(receiver, "Distributed.irecv.0.forward", "output.0") == [42.0, 43.0]
    assert numbers(sender, "Distributed.send.0.forward", "input.0") == [9.0]
    assert numbers(receiver, "Distributed.recv.0.forward", "output.0") == [9.0]
    assert numbers(receiver, "Distributed.batch_isend_irecv.0.forward", "output.0") == [77.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_nobody_waited_for_is_recorded_with_its_sum_or_without_an_output(
    rank: int, collectives: list[ulpscope.Dump]
) -> None:
    name = "Distributed.all_reduce.3.forward"
    assert numbers(collectives[rank], name, "input.0") == [1.0]
    if "output" in {value.slot.role.value for value in collectives[rank].call(name).values}:
        assert numbers(collectives[rank], name, "output.0") == [2.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_value_read_after_communication_is_the_one_that_came(rank: int, collectives: list[ulpscope.Dump]) -> None:
    assert numbers(collectives[rank], "Tensor.cos.0.forward", "input.0") == [3.0] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kernel_that_communicates_shows_what_came_or_nothing(rank: int, folder: Path) -> None:
    """The kernel returns before the communication has ended: a value read then would be a guess."""
    dump = ulpscope.open_dump(folder / "collectives-kernel", rank=rank)
    truth = {
        "c10d.allreduce_.default.0.forward": 3.0,
        "c10d.allreduce_.default.1.forward": 30.0,
        "c10d.allreduce_.default.2.forward": 60.0,
        "c10d.allreduce_.default.3.forward": 2.0,
        "c10d._allgather_base_.default.0.forward": 6.0,
        "c10d._reduce_scatter_base_.default.0.forward": [11.0, 33.0][rank],
    }
    shown = {
        name: [value.stats.max for value in dump.call(name).values if value.slot.role.value == "output" and value.stats]
        for name in truth
    }
    assert {name: values for name, values in shown.items() if values and values != [truth[name]]} == {}


@pytest.mark.parametrize("level", ["op", "mix", "kernel"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_functional_collective_shows_what_came_or_nothing(rank: int, level: str, folder: Path) -> None:
    dump = ulpscope.open_dump(folder / f"functional_collectives-{level}", rank=rank)
    shown = {
        name: [value.stats.max for value in dump.call(name).values if value.slot.role.value == role and value.stats]
        for name, role in (
            ("_c10d_functional.all_reduce.0.forward", "output"),
            ("_c10d_functional.all_gather_into_tensor.0.forward", "output"),
            ("_c10d_functional.wait_tensor.0.forward", "input"),
        )
    }
    truth = {"all_reduce": [3.0], "all_gather_into_tensor": [2.0], "wait_tensor": [2.0]}
    assert {name: values for name, values in shown.items() if values and values != truth[name.split(".")[1]]} == {}
    (came,) = [
        value.stats.max
        for value in dump.call("_c10d_functional.wait_tensor.0.forward").values
        if value.slot.role.value == "output" and value.stats
    ]
    assert came == 2.0


@pytest.mark.parametrize("program", PROGRAMS)
def test_reuse_is_true_where_c_plus_plus_communicates(program: str, folder: Path) -> None:
    """DDP reduces gradients and FSDP gathers parameters below Python: what is recorded must still be what is there."""

    def checksums(name: str) -> dict[Any, int | None]:
        return {
            (dump.manifest.step, dump.manifest.rank, call_text(call.id), slot_text(value.slot)): value.checksum
            for dump in ulpscope.open_run(folder / name)
            for call in dump.calls()
            # FSDP hands buffers around that nobody has written yet; what they hold is another thing in each run.
            if program != "sharded" or call.id.kind in ("Module", "Functional")
            # Whether an output that nobody waited for was there in time is a matter of luck.
            if call_text(call.id) != "Distributed.all_reduce.3.forward"
            for value in call.values
        }

    reusing, measuring = checksums(f"{program}-reusing"), checksums(f"{program}-measuring")
    assert reusing.keys() == measuring.keys()
    assert [key for key, checksum in reusing.items() if checksum != measuring[key]] == []


def test_what_ddp_reduced_is_what_the_optimizer_is_shown_to_read(folder: Path) -> None:
    """Parameters and reduced gradients are the same on both ranks; so is all that the optimizer reads and writes."""
    seen = []
    for rank in range(2):
        dump = ulpscope.open_dump(folder / "data_parallel-op", step=0, rank=rank)
        (step,) = [call for call in dump.calls() if call.id.kind == "Optimizer"]
        seen.append(
            [
                (call_text(call.id), slot_text(value.slot), dump.load_bits(value).tolist())
                for call in dump.calls()
                if call.parent == step.seq
                for value in call.values
                if value.payload is not None
            ]
        )
    assert seen[0] == seen[1] != []


def test_processes_that_join_while_a_capture_is_on_are_watched_from_then_on(tmp_path: Path) -> None:
    program = """
import sys, torch, torch.distributed as dist, ulpscope
code = dist.all_reduce.__code__, dist.init_process_group.__code__, dist.Work.wait
for turn in range(2):
    with ulpscope.capture(f"{sys.argv[1]}/run{turn}"):
        assert (dist.all_reduce.__code__ is code[0]) == (turn == 0)
        if turn == 0:
            dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
        dist.all_reduce(torch.full((2,), 3.0))
        dist.all_reduce(torch.full((2,), 4.0), async_op=True).wait()
    assert (dist.all_reduce.__code__, dist.init_process_group.__code__, dist.Work.wait) == code
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for turn in range(2):
        dump = ulpscope.open_dump(tmp_path / f"run{turn}")
        found = [dump.call(f"Distributed.all_reduce.{number}.forward") for number in range(2)]
        assert [[value.stats.max for value in call.values if value.stats] for call in found] == [[3, 3], [4, 4]]
