"""Collectives: what a rank gave and got, as linear sketches, so that the judge can add up the ranks without communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ulpscope.frameworks.torch.replay_origins import sketch
from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_score import UNIT
from ulpscope.frameworks.torch.replay_values import tensors

_PARTS = 16
_REDUCTIONS = {"0": "sum", "1": "avg", "2": "product", "3": "min", "4": "max"}


class Exchanges:
    """Numbers the collectives of each group and measures what goes in and out."""

    def __init__(self) -> None:
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def before(self, plan: Plan, args: tuple[Any, ...]) -> tuple[float, ...]:
        return _sketches(args[0]) if args else ()

    def after(self, plan: Plan, args: tuple[Any, ...], given: tuple[float, ...], result: Any) -> dict[str, Any]:
        for item in result if isinstance(result, tuple | list) else (result,):
            if hasattr(item, "wait"):
                item.wait()
        group = _ranks(args)
        number = self._numbers[group]
        self._numbers[group] = number + 1
        floats = [value for value in tensors(args[:1]) if value.dtype in UNIT]
        if not floats:
            return {"unknown": "no floating point values are exchanged"}
        norm = float(torch.stack([value.double().norm() for value in floats]).norm())
        exchange = {
            "how": _how(plan, args),
            "group": group,
            "number": number,
            "given": given,
            "got": _sketches(args[0]),
            "norm": norm,
        }
        about = {"place": 0, "dtype": str(floats[0].dtype)[6:], "shape": tuple(floats[0].shape), "terms": len(group)}
        return {"exchange": exchange, "measures": [{**about, "rms": 0.0, "worst": 0.0}]}


def _sketches(value: Any) -> tuple[float, ...]:
    wide = [leaf.detach().double().flatten() for leaf in tensors((value,)) if leaf.dtype in UNIT]
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
    """`allreduce.sum`; the reduction is read from its text, since it comes in a box."""
    name = plan.op.split(".")[1].strip("_")
    if "reduce" not in name:
        return name
    for value in args[1:]:
        try:
            op = torch.distributed.ReduceOp.unbox(value)  # type: ignore[attr-defined]
            return f"{name}.{str(op).rpartition('.')[2].lower().rstrip('>')}"
        except (TypeError, RuntimeError, ValueError, AttributeError):
            continue
    return f"{name}.unknown"
