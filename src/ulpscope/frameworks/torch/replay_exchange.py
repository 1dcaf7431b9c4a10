"""Collectives: what a rank gave and got, as linear sketches, so that the judge can add up the ranks without communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch.replay_origins import sketch
from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_score import UNIT
from ulpscope.frameworks.torch.replay_values import items, tensors
from ulpscope.model.operators import WAYS_OF_COLLECTIVES, Way

_PARTS = 16
_ADDS = ("sum", "avg", "unknown")


class Exchanges:
    """Numbers the collectives of each group and measures what goes in and out."""

    def __init__(self) -> None:
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def before(self, plan: Plan, args: tuple[Any, ...]) -> tuple[float, ...]:
        way = _way(plan)
        if way is None:
            return ()
        return _sketches(way, _parts(args[way.given], len(_ranks(args)) if way.split_given else 1))

    def after(self, plan: Plan, args: tuple[Any, ...], given: tuple[float, ...], result: Any) -> dict[str, Any]:
        way = _way(plan)
        if way is None:
            return {"unknown": "what it exchanges is not judged"}
        _wait(plan, result)
        group = _ranks(args)
        number = self._numbers[group]
        self._numbers[group] = number + 1
        got = _parts(result if way.got is None else args[way.got], len(group) if way.split_got else 1)
        floats = [value for value in got if value.dtype in UNIT]
        how = _how(way, plan, args)
        if not floats:
            return {"unknown": "no floating point values are exchanged"}
        if "reduce" in way.kind and how.partition(".")[2] not in _ADDS:
            return {"unknown": f"{how} does not add: sketches cannot check it"}
        norm = float(torch.stack([value.double().norm() for value in floats]).norm())
        exchange = {
            "how": how,
            "group": group,
            "number": number,
            "given": given,
            "got": _sketches(way, got),
            "norm": norm,
        }
        about = {"place": 0, "dtype": str(floats[0].dtype)[6:], "shape": tuple(floats[0].shape), "terms": len(group)}
        return {"exchange": exchange, "measures": [{**about, "rms": 0.0, "worst": 0.0}]}


def _way(plan: Plan) -> Way | None:
    return WAYS_OF_COLLECTIVES.get(plan.op.rpartition(".")[0])


def _wait(plan: Plan, result: Any) -> None:
    """Until the values are there: a functional collective returns its tensors before."""
    for item in items(result) if isinstance(result, tuple | list) else (result,):
        if isinstance(item, Tensor) and plan.op.startswith("_c10d_functional."):
            torch.ops._c10d_functional.wait_tensor(item)
        elif hasattr(item, "wait") and not isinstance(item, Tensor):
            item.wait()


def _parts(value: Any, ranks: int) -> list[Tensor]:
    """The tensors, or the parts of each for the first rank, then for the second, ..."""
    found = tensors(tuple(items((value,))))
    if ranks == 1:
        return found
    split = [each.flatten().tensor_split(ranks) for each in found]
    return [each[rank] for rank in range(ranks) for each in split]


def _sketches(way: Way, parts: Iterable[Tensor]) -> tuple[float, ...]:
    wide = [part.detach().double().flatten() for part in parts if part.dtype in UNIT]
    if way.kind in ("allgather", "reduce_scatter"):
        return tuple(number for part in wide for number in sketch(part))
    return sketch(torch.cat(wide), _PARTS) if wide else ()


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    distributed = torch.distributed
    for value in args:
        try:
            if isinstance(value, str):
                group = distributed.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type, attr-defined]
            else:
                group = distributed.ProcessGroup.unbox(value)
            return tuple(distributed.get_process_group_ranks(group))
        except (TypeError, RuntimeError, ValueError, AttributeError):
            continue
    return tuple(range(distributed.get_world_size())) if distributed.is_initialized() else (0,)


def _how(way: Way, plan: Plan, args: tuple[Any, ...]) -> str:
    """`allreduce.sum`, `broadcast.0`: the group's rank that gives. In c10d the reduction is read from its text, since it
    comes in a box."""
    functional = plan.op.startswith("_c10d_functional.")
    if way.kind == "broadcast":
        return f"{way.kind}.{args[1 if functional else 2]}"
    if "reduce" not in way.kind:
        return way.kind
    if functional:
        return f"{way.kind}.{args[1]}"
    for value in args[1:]:
        try:
            op = torch.distributed.ReduceOp.unbox(value)  # type: ignore[attr-defined]
            return f"{way.kind}.{str(op).rpartition('.')[2].lower().rstrip('>')}"
        except (TypeError, RuntimeError, ValueError, AttributeError):
            continue
    return f"{way.kind}.unknown"
