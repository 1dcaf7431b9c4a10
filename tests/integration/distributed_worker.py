"""One rank of the tests: distributed_worker.py FOLDER. Runs each job of FOLDER/jobs.json, leaves what it returned there."""

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ulpscope
from integration.runs import frozen, seed


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


def train(model: nn.Module, cap: ulpscope.Capture | None) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results = []
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        results.append(frozen(loss))
        if cap is not None:
            cap.step()
    return results


def local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def data_parallel(cap: ulpscope.Capture | None) -> Any:
    model = nn.parallel.DistributedDataParallel(small_model(), gradient_as_bucket_view=True, bucket_cap_mb=1)
    if cap is not None:
        cap.start(model)
    results = train(model, cap)
    if cap is not None:
        cap.stop()
    return [results, [frozen([value.detach(), value.grad]) for value in model.parameters()]]


def sharded(cap: ulpscope.Capture | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = small_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if cap is not None:
        cap.start(model)
    results = train(model, cap)
    if cap is not None:
        cap.stop()
    return [results, [frozen(local(value.detach())) for value in model.parameters()]]


def collectives(cap: ulpscope.Capture | None) -> Any:
    rank = dist.get_rank()
    if cap is not None:
        cap.start()
    total = torch.full((3,), rank + 1.0)
    assert dist.all_reduce(total) is None
    total.cos()
    one, two = torch.full((2,), (rank + 1.0) * 10), torch.full((2,), (rank + 1.0) * 20)
    handles = [dist.all_reduce(one, async_op=True), dist.all_reduce(two, async_op=True)]
    assert all(handle.wait() for handle in handles)
    assert all(handle.is_completed() for handle in handles)
    parts = [torch.empty(2), torch.empty(2)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    whole = torch.empty(4)
    dist.all_gather_into_tensor(whole, torch.full((2,), rank + 5.0))
    piece = torch.empty(2)
    dist.reduce_scatter_tensor(piece, torch.arange(4.0) * (1 if rank == 0 else 10))
    news = torch.full((1,), 7.0 if rank == 0 else -1.0)
    dist.broadcast(news, src=0)
    swapped = torch.empty(2)
    dist.all_to_all_single(swapped, torch.tensor([0.0, 1.0]) + 10 * rank)
    message = torch.tensor([42.0, 43.0]) if rank == 0 else torch.zeros(2)
    work = dist.isend(message, dst=1) if rank == 0 else dist.irecv(message, src=0)
    work.wait()
    late = torch.tensor([9.0]) if rank == 0 else torch.zeros(1)
    if rank == 0:
        dist.send(late, dst=1)
    else:
        assert dist.recv(late, src=0) == 0
    pair = torch.tensor([77.0]) if rank == 0 else torch.zeros(1)
    operation = dist.P2POp(dist.isend if rank == 0 else dist.irecv, pair, 1 - rank)
    for work in dist.batch_isend_irecv([operation]):
        work.wait()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    forgotten = torch.ones(1)
    pending = dist.all_reduce(forgotten, async_op=True)
    if cap is not None:
        cap.step()
    pending.wait()
    results = [total, one, two, parts, whole, piece, news, swapped, message, late, pair, forgotten]
    return [frozen(results), objects]


def tensor_parallel(cap: ulpscope.Capture | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if cap is not None:
        cap.start(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    results = []
    torch.manual_seed(7)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        results.append(frozen(local(loss)))
        if cap is not None:
            cap.step()
    if cap is not None:
        cap.stop()
    return [results, [frozen(local(value.detach())) for value in model.parameters()]]


def functional_collectives(cap: ulpscope.Capture | None) -> Any:
    """Collectives that return a tensor which waits for itself when it is used, and have a gradient."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_reduce, wait_tensor

    rank = dist.get_rank()
    if cap is not None:
        cap.start()
    weight = torch.full((2,), rank + 1.0, requires_grad=True)
    total = all_reduce(torch.full((2,), rank + 1.0), "sum", group=dist.group.WORLD)
    used = total * 2
    waited = wait_tensor(all_reduce(torch.ones(2), "sum", group=dist.group.WORLD))
    whole = all_gather_tensor_autograd(weight * 1, gather_dim=0, group=dist.group.WORLD)
    (whole * torch.arange(4.0)).sum().backward()
    if cap is not None:
        cap.stop()
    return [frozen([used, weight.grad]), waited.tolist()]


PROGRAMS: dict[str, Callable[[ulpscope.Capture | None], Any]] = {
    "data_parallel": data_parallel,
    "sharded": sharded,
    "collectives": collectives,
    "tensor_parallel": tensor_parallel,
    "functional_collectives": functional_collectives,
}


def run(job: dict[str, Any], folder: Path) -> Any:
    seed()
    options = job["options"]
    # Fresh memory holds NaN instead of whatever was there, so that two runs read the same even before it is written.
    torch.use_deterministic_algorithms(bool(options.get("checksum")), warn_only=True)
    path = folder / job["name"]
    cap = ulpscope.Capture(path, level=job["level"], **options) if job["level"] else None
    result = PROGRAMS[job["program"]](cap)
    if cap is not None:
        cap.close()
    dist.barrier()
    return result


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    jobs = json.loads((folder / "jobs.json").read_text())
    results = {job["name"]: run(job, folder) for job in jobs}
    (folder / f"results{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
