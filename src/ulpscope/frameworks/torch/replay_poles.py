"""Where values went that are infinite or not a number by definition, from the call that made them to those that read them.

`log 0` may be masked in the next line, and then it is nobody's fault; or it may reach a loss or a weight. Nothing is looked
at unless a call has made such a value: then by whom memory was made is remembered, and who reads it is asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.replay_reference import Plan
from ulpscope.frameworks.torch.replay_score import UNIT
from ulpscope.frameworks.torch.replay_values import memory_of, tensors
from ulpscope.model.operators import Trait, traits

Source = tuple[str, str, int]  # kernel, dtypes, index: what a row is known by
_MADE = ("overflowed", "undefined", "infinite")
LOSS, GRADIENT, WEIGHT, RESULT = "loss", "gradient", "weight", "result"
FOLLOWED = frozenset({LOSS, RESULT})  # what may still be masked


class Poles:
    """Remembers which memory holds such values."""

    def __init__(self) -> None:
        self._made: dict[int, Source] = {}

    def read(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Source]:
        """The calls that made what is not finite among these arguments; what is only overwritten is not read."""
        if not self._made:
            return []
        found: dict[Source, None] = {}
        overwritten = plan.written and (plan.kind == "random" or Trait.FILLS in traits(plan.name))
        for leaf in tensors(args[1:] if overwritten else args, kwargs):
            source = self._made.get(memory_of(leaf))
            if source is not None and _is_not_finite(leaf):
                found[source] = None
        return list(found)

    def wrote(self, row: dict[str, Any], reads: list[Source], found: list[Any]) -> None:
        """Marks the results of a call, and says in its row where its values came from and whether it passes them on."""
        makes = any(score.get(name) for score in row.get("measures", ()) for name in _MADE)
        if not (makes or reads or self._made):
            return
        source = (row["op"], row["dtypes"], row["index"]) if makes else reads[0] if reads else None
        passed = False
        for item in found:
            if not isinstance(item, Tensor) or item.dtype not in UNIT:
                continue
            memory = memory_of(item)
            if source is not None and _is_not_finite(item):
                self._made[memory] = source
                passed = True
            elif memory in self._made and not _is_not_finite(item):
                del self._made[memory]
        if makes or reads:
            row["poles"] = [list(each) for each in reads]
            row["passes"] = passed

    def reached(self, row: dict[str, Any], found: list[Any]) -> None:
        """From a loss or a result on it is that which is followed: whether it is masked is then known of this path alone."""
        for item in found:
            if isinstance(item, Tensor) and _is_not_finite(item):
                self._made[memory_of(item)] = (row["op"], row["dtypes"], row["index"])


def ends_in(row: dict[str, Any], in_module: bool, grad: bool, given: tuple[Any, Any], found: list[Any]) -> str:
    """What a value that is not finite has reached with this call: a weight that is written, the gradient of one, or, outside of
    all modules, a number of which a gradient can be taken (`grad`), which may be a loss, or what may be the program's result.
    `given`: arguments and keywords."""
    wrong = [item for item in found if isinstance(item, Tensor) and _is_not_finite(item)]
    if any(item.requires_grad and item.is_leaf for item in wrong):
        return WEIGHT if row["phase"] != "backward" else ""
    if in_module or not wrong or row["phase"] == "optimizer":
        return ""
    if row["phase"] == "backward":
        node: Any = internals.current_node()
        return GRADIENT if isinstance(getattr(node, "variable", None), torch.nn.Parameter) else ""
    if grad and any(leaf.requires_grad for leaf in tensors(*given)) and found[0] is wrong[0] and wrong[0].numel() == 1:
        return LOSS
    overflowed = any(score.get("overflowed") for score in row.get("measures", ()))
    return RESULT if overflowed or any(bool(item.isnan().any()) for item in wrong) else ""


def _is_not_finite(value: Tensor) -> bool:
    return value.dtype in UNIT and value.layout is torch.strided and not bool(torch.isfinite(value).all())
