"""Collectives: what a rank gave and got, as linear sketches, so that the judge can add up the ranks without communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch.replay_origins import sketch
from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_score import UNIT
from ulpscope.frameworks.torch.replay_values import items, tensors

_PARTS = 16
# Where what a rank gives stands, and what it gets, and whether that is one tensor with the parts of all ranks.
_Where = dict[str, tuple[int, bool]]
_GIVEN: _Where = {
    "allgather_": (1, False),
    "_allgather_base_": (1, False),
    "reduce_scatter_": (1, False),
    "_reduce_scatter_base_": (1, True),
}
_GOT: _Where = {
    "allgather_": (0, False),
    "_allgather_base_": (0, True),
    "reduce_scatter_": (0, False),
    "_reduce_scatter_base_": (0, False),
}


class Exchanges:
    """Numbers the collectives of each group and measures what goes in and out."""

    def __init__(self) -> None:
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def before(self, plan: Plan, args: tuple[Any, ...]) -> tuple[float, ...]:
        return _sketches(plan, _parts(plan, args, _GIVEN)) if args else ()

    def after(self, plan: Plan, args: tuple[Any, ...], given: tuple[float, ...], result: Any) -> dict[str, Any]:
        for item in result if isinstance(result, tuple | list) else (result,):
            if hasattr(item, "wait"):
                item.wait()
        group = _ranks(args)
        number = self._numbers[group]
        self._numbers[group] = number + 1
        got = _parts(plan, args, _GOT)
        floats = [value for value in got if value.dtype in UNIT]
        if not floats:
            return {"unknown": "no floating point values are exchanged"}
        norm = float(torch.stack([value.double().norm() for value in floats]).norm())
        exchange = {
            "how": _how(plan, args),
            "group": group,
            "number": number,
            "given": given,
            "got": _sketches(plan, got),
            "norm": norm,
        }
        about = {"place": 0, "dtype": str(floats[0].dtype)[6:], "shape": tuple(floats[0].shape), "terms": len(group)}
        return {"exchange": exchange, "measures": [{**about, "rms": 0.0, "worst": 0.0}]}


def _parts(plan: Plan, args: tuple[Any, ...], where: _Where) -> list[Tensor]:
    """What a rank gives or gets: where ranks give or get different parts, one tensor for each of these."""
    place, joined = where.get(plan.op.split(".")[1], (0, False))
    found = tensors(tuple(items(args[place : place + 1])))
    return list(found[0].flatten().tensor_split(len(_ranks(args)))) if joined else found


def _sketches(plan: Plan, parts: list[Tensor]) -> tuple[float, ...]:
    wide = [part.detach().double().flatten() for part in parts if part.dtype in UNIT]
    if plan.op.split(".")[1] in _GIVEN:
        return tuple(number for part in wide for number in sketch(part))
    return sketch(torch.cat(wide), _PARTS) if wide else ()


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    distributed = torch.distributed
    for value in args:
        try:
            group = distributed.ProcessGroup.unbox(value)
            return tuple(distributed.get_process_group_ranks(group))
        except (TypeError, RuntimeError, ValueError, AttributeError):
            continue
    return tuple(range(distributed.get_world_size())) if distributed.is_initialized() else (0,)


def _how(plan: Plan, args: tuple[Any, ...]) -> str:
    """`allreduce.sum`, `broadcast.0`: the group's rank that gives. The reduction is read from its text, since it comes in a box."""
    name = plan.op.split(".")[1].strip("_")
    if name == "broadcast":
        return f"{name}.{args[2]}"
    if "reduce" not in name:
        return name
    for value in args[1:]:
        try:
            op = torch.distributed.ReduceOp.unbox(value)  # type: ignore[attr-defined]
            return f"{name}.{str(op).rpartition('.')[2].lower().rstrip('>')}"
        except (TypeError, RuntimeError, ValueError, AttributeError):
            continue
    return f"{name}.unknown"
