"""What the judge does not see it says: it never calls a run clean of which it saw less than ran."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ulpscope
from ulpscope.frameworks.torch import internals
from ulpscope.store.ledger_file import LedgerWriter, find_ledgers, ledger_path, process_path, read_ledger, settle

BEGIN = """
import os, sys, threading, torch
from torch import nn
torch.manual_seed(0)
"""
MODEL = """
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def step(model=net):
    loss = model(torch.randn(3, 4)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""


def blame(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(BEGIN + program, encoding="utf-8")
    command = [sys.executable, "-m", "ulpscope", "blame", *options, "--", sys.executable, "program.py"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=240)


def unseen(folder: Path) -> dict[str, int]:
    found: dict[str, int] = read_ledger(ledger_path(folder, 0))[0]["unseen"]
    return found


def take_off() -> None:
    torch._C._pop_torch_dispatch_stack(None)


def modes() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("how", ["ledger", "capture"])
def test_a_mode_of_the_program_that_ends_later_than_we_begin_ends_and_ours_stays(how: str, tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    counter = FlopCounterMode(display=False)
    watch: Any = ulpscope.Ledger(tmp_path) if how == "ledger" else ulpscope.Capture(tmp_path, level="kernel")
    with counter:
        watch.start()
        net(torch.ones(2, 4))
    counted = counter.get_total_flops()
    assert modes() == 1
    net(torch.ones(2, 4)).log()
    watch.stop()
    watch.close()
    assert modes() == 0
    assert counter.get_total_flops() == counted
    if how == "ledger":
        ops = [row.op for row in read_ledger(ledger_path(tmp_path, 0))[1]]
        assert (ops.count("aten.addmm.default"), ops.count("aten.log.default")) == (2, 1)
        assert unseen(tmp_path) == {}


def test_modes_that_are_nested_around_our_start_end_in_their_order(tmp_path: Path) -> None:
    class Seen(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    outer, inner, later = Seen(), Seen(), Seen()
    watch = ulpscope.Ledger(tmp_path)
    with outer:
        with inner:
            watch.start()
            with later:
                torch.ones(2).exp()
        torch.ones(2).exp()
    torch.ones(2).exp()
    watch.close()
    assert (later.count, inner.count, outer.count) == (2, 2, 4)
    assert len(read_ledger(ledger_path(tmp_path, 0))[1]) == 6


def test_calls_that_ran_while_our_mode_was_off_are_counted_and_the_next_module_call_puts_it_back(
    tmp_path: Path,
) -> None:
    net = nn.Linear(4, 4)
    with ulpscope.ledger(tmp_path):
        net(torch.ones(2, 4))
        take_off()
        for _ in range(3):
            torch.cos(torch.tensor(2.0))
        net(torch.ones(2, 4))
        assert modes() == 1
    assert max(unseen(tmp_path).values()) >= 4
    ops = [row.op for row in read_ledger(ledger_path(tmp_path, 0))[1]]
    assert (ops.count("aten.addmm.default"), "aten.cos.default" in ops) == (2, False)


def test_calls_below_a_guard_that_switches_modes_off_are_counted(tmp_path: Path) -> None:
    with ulpscope.ledger(tmp_path):
        x = torch.ones(2)
        with torch._C._DisableTorchDispatch():
            x.exp()
        x.cos()
    assert list(unseen(tmp_path).values()) == [1]


def test_a_thread_that_ends_without_our_mode_and_an_end_without_it_are_noticed(tmp_path: Path) -> None:
    with ulpscope.ledger(tmp_path / "thread"):
        torch.ones(2).exp()
        thread = threading.Thread(target=take_off)
        thread.start()
        thread.join()
    assert len(unseen(tmp_path / "thread")) == 1
    with ulpscope.ledger(tmp_path / "end"):
        torch.ones(2).exp()
        take_off()
    assert "at the end torch's stack of dispatch modes held ours 0 times, not once" in unseen(tmp_path / "end")


def test_what_we_take_off_ourselves_is_not_missing_but_a_row_that_is_unknown(tmp_path: Path) -> None:
    x = torch.rand(3, requires_grad=True)
    with ulpscope.ledger(tmp_path):
        x.prod().backward()
        torch.linalg.svdvals(torch.eye(3))
        modes_off = [type(node).__name__ for node in [x.prod().grad_fn]]
    assert modes_off == ["ProdBackward0"]
    rows = read_ledger(ledger_path(tmp_path, 0))[1]
    assert [row.op for row in rows if row.kind == "unwatched"] == [
        "Autograd.ProdBackward0",
        "Torch.linalg_svdvals",
    ]
    assert all(row.unknown for row in rows if row.kind == "unwatched")
    assert unseen(tmp_path) == {}


def test_an_error_of_ours_is_a_call_that_was_not_judged(tmp_path: Path) -> None:
    with ulpscope.ledger(tmp_path) as ledger:
        torch.ones(2).exp()
        ledger._calls.trouble("aten.exp.default", ValueError("ours"))
    assert unseen(tmp_path) == {"could not judge aten.exp.default: ValueError: ours": 1}


SEEN_LESS = {
    "a mode popped": "step()\ntorch._C._pop_torch_dispatch_stack(None)\n(torch.ones(3) * 2).log()",
    "a fork": """step()
child = os.fork()
if not child:
    torch.ones(3).exp()
    os._exit(0)
os.waitpid(child, 0)
""",
    "a compiled region": "compiled = torch.compile(net, backend='eager')\nstep(compiled)",
}


@pytest.mark.parametrize("how", SEEN_LESS)
def test_a_run_of_which_less_was_seen_than_ran_is_never_called_clean(how: str, tmp_path: Path) -> None:
    done = blame(tmp_path, MODEL + SEEN_LESS[how], "-o", "run")
    assert (done.returncode, "nothing is wrong" in done.stdout) == (3, False), done.stdout + done.stderr
    assert "cannot tell: not everything that ran was seen" in done.stdout
    assert "not seen    " in done.stdout
    again = subprocess.run(
        [sys.executable, "-m", "ulpscope", "blame", "run"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (again.returncode, "cannot tell" in again.stdout) == (3, True)


CLEAN = {
    "workers that load data": """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, at): return torch.randn(4) * 2
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
    net(batch)
step()
""",
    "a later mode": """
from torch.utils.flop_counter import FlopCounterMode
step()
with FlopCounterMode(display=False):
    step()
step()
""",
    "threads": "step()\nt = threading.Thread(target=step)\nt.start()\nt.join()\nstep()",
    "a trace": "step()\ntorch.jit.trace(net, (torch.randn(3, 4),))\nstep()",
}


@pytest.mark.parametrize("what", CLEAN)
def test_a_run_that_was_seen_whole_is_called_clean(what: str, tmp_path: Path) -> None:
    done = blame(tmp_path, MODEL + CLEAN[what])
    assert (done.returncode, "nothing is wrong: rounding explains every call" in done.stdout) == (0, True), (
        done.stdout + done.stderr
    )


def test_a_program_without_models_is_judged_from_its_start(tmp_path: Path) -> None:
    clean = blame(tmp_path, "x = torch.randn(4, requires_grad=True)\nx.exp().sum().backward()")
    assert (clean.returncode, "nothing is wrong" in clean.stdout) == (0, True), clean.stdout + clean.stderr
    # A loss has no weights: it is no model.
    faulty = blame(
        tmp_path,
        "w = torch.randn(4, 2, requires_grad=True)\ny = (torch.ones(3, 4) - 2).log() @ w\n"
        "nn.CrossEntropyLoss()(y, torch.zeros(3, dtype=torch.long)).backward()",
        "-o",
        "run",
    )
    assert (faulty.returncode, "no number by definition at (outside of any module), Tensor.log.0" in faulty.stdout) == (
        1,
        True,
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ledger.rank0.jsonl"]


def test_what_runs_before_the_first_model_is_not_accused_and_building_one_is_never_judged(tmp_path: Path) -> None:
    before = "torch.log(torch.zeros(3) - 1)\n"
    done = blame(tmp_path, before + MODEL + "step()\nstep()")
    assert done.returncode == 0, done.stdout
    assert "before      " in done.stdout
    assert " 2 steps," in done.stdout
    assert blame(tmp_path, before + MODEL + "step()", "--from-start").returncode == 1
    building = """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.log(torch.zeros(3) - 1))
        self.reset_parameters()
    def reset_parameters(self):
        nn.init.normal_(self.weight.data.log_())
Odd().weight.detach().fill_(1.0).exp()
"""
    built = blame(tmp_path, building, "--format", "json")
    assert (built.returncode, '"nothing is wrong"' in built.stdout) == (0, True), built.stdout


def test_large_preparation_is_not_judged_until_a_model_or_a_backward_runs(tmp_path: Path) -> None:
    large = "x = torch.ones(1 << 21) * 2\n"
    prepared = blame(tmp_path, large + "torch.ones(3).exp()", "--format", "json")
    assert prepared.returncode == 0, prepared.stderr
    assert "aten.mul.Tensor: it is large, and neither a model nor a backward had run" in prepared.stdout
    trained = "w = torch.ones(3, requires_grad=True)\nw.exp().sum().backward()\n" + large
    assert '"not_judged": {}' in blame(tmp_path, trained, "--format", "json").stdout


def test_of_spawned_processes_those_with_models_are_judged_each_for_its_rank(tmp_path: Path) -> None:
    program = """
import torch.distributed as dist
def work(rank):
    torch.ones(2) * 2
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"), rank=rank, world_size=2)
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    net(torch.randn(2, 4)).sum().backward()
    dist.destroy_process_group()
if __name__ == "__main__":
    torch.ones(3) * 3
    torch.multiprocessing.spawn(work, nprocs=2)
"""
    done = blame(tmp_path, program, "-o", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks" in done.stdout
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["ledger.rank0.jsonl", "ledger.rank1.jsonl"]


@pytest.mark.skipif(internals.version() < (2, 6), reason="this torch has no public fully_shard")
def test_distributed_tensors_are_judged_by_what_is_inside_and_their_shapes_worked_out(tmp_path: Path) -> None:
    program = """
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.fsdp import fully_shard
def work(rank):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(2):
        net(torch.randn(4, 8)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step(); optimizer.zero_grad()
    a = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    assert isinstance(a @ a.t(), DTensor)
    (a.softmax(-1) @ a.t()).redistribute(mesh, [Replicate()]).sum().full_tensor().item()
    dist.destroy_process_group()
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
    print("fine")
"""
    done = blame(tmp_path, program)
    assert (done.returncode, "nothing is wrong" in done.stdout) == (0, True), done.stdout + done.stderr
    assert "fine" in done.stderr
    assert "2 steps, 2 ranks" in done.stdout


def row(rank: int, seq: int) -> dict[str, Any]:
    plain = {
        "seq": seq,
        "step": 0,
        "rank": rank,
        "phase": "forward",
        "op": "aten.exp.default",
        "dtypes": "",
        "index": seq,
    }
    return {**plain, "kind": "map"}


def early(folder: Path, process: int, *rows: dict[str, Any]) -> None:
    writer = LedgerWriter(process_path(folder, process), {"rank": 0, "early": True})
    for each in rows:
        writer.add(each)
    writer.close()


def test_a_process_without_a_model_is_judged_for_the_rank_that_it_came_to_have(tmp_path: Path) -> None:
    early(tmp_path, 11, row(0, 0), row(1, 1), row(0, 2))
    early(tmp_path, 12, row(0, 0))
    early(tmp_path, 13, row(0, 0), row(0, 1))
    settle(tmp_path)
    assert [path.name for path in find_ledgers(tmp_path)] == ["ledger.rank0.jsonl", "ledger.rank1.jsonl"]
    assert [(each.rank, each.seq) for each in read_ledger(ledger_path(tmp_path, 1))[1]] == [(1, 0), (1, 1), (1, 2)]
    assert len(read_ledger(ledger_path(tmp_path, 0))[1]) == 2
    left = [path for path in tmp_path.iterdir() if path.name.startswith("ledger.process")]
    assert [read_ledger(path)[0]["unseen"] for path in left] == [{"calls of one more process of rank 0": 1}]


def test_a_process_without_a_model_is_left_out_where_another_has_one(tmp_path: Path) -> None:
    early(tmp_path, 11, row(0, 0))
    own = LedgerWriter(ledger_path(tmp_path, 3), {"rank": 3})
    own.add(row(3, 0))
    own.close()
    settle(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.rank3.jsonl"]


@pytest.mark.parametrize("line", ['{"unseen": 3, "count": 1}', '{"unseen": "x", "count": "1"}', '{"unseen": "x"}'])
def test_what_was_not_seen_is_a_text_and_a_number_or_the_ledger_is_refused(line: str, tmp_path: Path) -> None:
    path = ledger_path(tmp_path, 0)
    path.write_text('{"format": 2}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ulpscope.DumpError, match="line 2 is no row"):
        read_ledger(path)


@pytest.mark.parametrize("lazy", [lambda: torch.nn.LazyLinear(4), lambda: torch.nn.LazyConv1d(4, 3)])
def test_a_parameter_without_a_shape_is_asked_nothing(tmp_path: Path, lazy: Any) -> None:
    def program() -> list[Any]:
        torch.manual_seed(0)
        layer, data = lazy(), torch.randn(2, 3, 8)
        layer(data).square().sum().backward()
        return [value.grad.tolist() for value in layer.parameters()]

    bare = program()
    with ulpscope.ledger(tmp_path) as ledger:
        judged = program()
    assert judged == bare
    assert [note for note in ledger.notes if note.startswith("could not")] == []
