"""Run by a peer's Python: two ranks with communication calls, each dumped by the peer's own PrecisionDebugger.

    python merge_worker.py OUT TASK SCALE PORT

SCALE multiplies the data, so that two runs differ.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def step(rank: int, scale: float) -> None:
    """Most communication calls of the manual, some with a group, one with values that are not finite."""
    group = dist.new_group([0, 1])
    layer = torch.nn.Linear(4, 4)
    for _ in range(11):
        dist.all_reduce(layer(torch.randn(3, 4) * scale).detach(), group=group)
    dist.all_reduce(torch.full((3,), torch.nan if scale > 1 else torch.inf))
    dist.broadcast(torch.ones(3) * scale if rank == 0 else torch.zeros(3), src=0)
    dist.all_gather([torch.zeros(3) for _ in range(2)], torch.randn(3) * scale, group=group)
    dist.all_gather_into_tensor(torch.zeros(6), torch.randn(3) * scale)
    if rank == 0:
        dist.isend(torch.ones(2) * scale, 1).wait()
    else:
        dist.irecv(torch.zeros(2), 0).wait()


def main(rank: int, out: str, task: str, scale: float, port: str) -> None:
    from msprobe.pytorch import PrecisionDebugger, seed_all

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    seed_all(1234 + rank)
    options = {"scope": [], "list": [], "data_mode": ["all"]}
    config = {"task": task, "dump_path": out, "rank": [], "step": [], "level": "L1", task: options}
    path = Path(f"{out}.rank{rank}.json")
    path.write_text(json.dumps(config))
    debugger = PrecisionDebugger(config_path=str(path))
    debugger.start()
    step(rank, scale)
    debugger.stop()
    debugger.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, folder, kind, factor, free_port = sys.argv
    torch.set_num_threads(1)
    mp.spawn(main, (folder, kind, float(factor), free_port), 2)
