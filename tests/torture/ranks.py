"""Programs of several ranks, each a fork of the test: torch is there already, so a world is up in a moment."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ulpscope
from integration.runs import frozen

RankProgram = Callable[["ulpscope.Capture | None"], Any]


def run_world(size: int, folder: Path, programs: dict[str, RankProgram], level: str | None) -> list[dict[str, Any]]:
    """Runs programs one after the other on `size` ranks, each recorded into `folder`/name; what each rank returned."""
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            code = 1
            try:
                _one_rank(rank, size, folder, programs, level)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * size
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(size)]


def _one_rank(rank: int, size: int, folder: Path, programs: dict[str, RankProgram], level: str | None) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    results = {}
    for name, program in programs.items():
        torch.manual_seed(7)
        capture = None if level is None else ulpscope.Capture(folder / name, level=level, tensors=True)
        results[name] = program(capture)
        if capture is not None:
            capture.close()
        assert torch._C._len_torch_function_stack() == 0
    (folder / f"result{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()


def _train(model: nn.Module, capture: ulpscope.Capture | None, *, quiet: bool = False) -> Any:
    if capture is not None:
        capture.start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        if quiet:
            with model.no_sync():
                model(torch.randn(3, 4)).square().sum().backward()
        loss = model(torch.randn(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(frozen(_local(loss)))
        if capture is not None:
            capture.step()
    return [losses, [frozen(_local(value.detach())) for value in model.parameters()]]


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Tanh())


def dist_ddp_2p(capture: ulpscope.Capture | None) -> Any:
    return _train(DistributedDataParallel(_net()), capture)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, data: Tensor) -> Tensor:
        return self.used(data)


def dist_ddp_nosync_2p(capture: ulpscope.Capture | None) -> Any:
    return _train(DistributedDataParallel(Unused(), find_unused_parameters=True), capture, quiet=True)


def _half(_: Any, bucket: Any) -> Any:
    """Compresses to bfloat16 for the way; torch's own hook for that wants a GPU."""
    short = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    coming = dist.all_reduce(short, async_op=True).get_future()
    return coming.then(lambda future: bucket.buffer().copy_(future.value()[0]))


_half.__annotations__.clear()  # torch reads them, and wants classes, not texts


def dist_ddp_comm_hook_2p(capture: ulpscope.Capture | None) -> Any:
    model = DistributedDataParallel(_net())
    model.register_comm_hook(None, _half)
    return _train(model, capture)


def dist_fsdp2_2p(capture: ulpscope.Capture | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _net(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model, capture)


def dist_tp_dtensor_2p(capture: ulpscope.Capture | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = _net(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _train(model, capture)


def dist_collectives_2p(capture: ulpscope.Capture | None) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    if capture is not None:
        capture.start()
    total = torch.full((3,), rank + 1.0)
    answer = dist.all_reduce(total)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    news = torch.full((1,), 7.0 if rank == 0 else -1.0)
    dist.broadcast(news, src=0)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    if capture is not None:
        capture.step()
    return [answer, frozen([total, parts, news]), objects]


def dist_async_grad_overlap_2p(capture: ulpscope.Capture | None) -> Any:
    model = _net()
    if capture is not None:
        capture.start(model)
    handles: list[Any] = []
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(lambda each: handles.append(dist.all_reduce(each.grad, async_op=True)))
    torch.manual_seed(dist.get_rank())
    model(torch.randn(3, 4)).sum().backward()
    fine = all(handle.wait() for handle in handles)
    if capture is not None:
        capture.step()
    return [
        fine,
        all(handle.is_completed() for handle in handles),
        frozen([value.grad for value in model.parameters()]),
    ]


def dist_subgroup_4p(capture: ulpscope.Capture | None) -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    if capture is not None:
        capture.start()
    data = torch.full((2,), dist.get_rank() + 1.0)
    dist.all_reduce(data, group=groups[dist.get_rank() % 2])
    if capture is not None:
        capture.step()
    return frozen(data)


PAIRS: dict[str, RankProgram] = {
    program.__name__: program
    for program in (
        dist_ddp_2p, dist_ddp_nosync_2p, dist_ddp_comm_hook_2p, dist_fsdp2_2p, dist_tp_dtensor_2p,
        dist_collectives_2p, dist_async_grad_overlap_2p,
    )
}  # fmt: skip
FOURS: dict[str, RankProgram] = {"dist_subgroup_4p": dist_subgroup_4p}
