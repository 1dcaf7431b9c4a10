"""How two programs correspond, without a judgement: which modules are which, and how many values both have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ulpscope.compare.value_graph import BACKWARD, FORWARD
from ulpscope.compare.values import Values, module_paths
from ulpscope.store.dump import Dump


@dataclass(frozen=True, slots=True)
class Pass:
    """Of the values of a pass that say something: how many the target has, and how many of them the reference has too."""

    name: str
    values: int
    found: int


@dataclass(frozen=True, slots=True)
class Correspondence:
    """`modules`: of each module of the target its name in the reference. The others are of one side alone."""

    modules: dict[str, str]
    only_reference: tuple[str, ...]
    only_target: tuple[str, ...]
    calls: tuple[int, int]
    passes: tuple[Pass, ...]


def correspondence_of(reference: Dump, target: Dump) -> Correspondence:
    """Of two dumps."""
    values = Values(reference, target)
    values.is_apart = True
    modules = {mine: theirs for mine, theirs in values.modules.items() if mine or theirs}
    taken, graph = set(modules.values()), values.target
    passes = []
    for name, phase in (("forward", FORWARD), ("backward", BACKWARD)):
        telling = graph.is_telling & (graph.phase == phase) & (graph.maker >= 0)
        found = telling & (values.anchors.kind > 0)
        passes.append(Pass(name, int(np.count_nonzero(telling)), int(np.count_nonzero(found))))
    return Correspondence(
        modules,
        tuple(name for name in module_paths(reference) if name and name not in taken),
        tuple(name for name in module_paths(target) if name and name not in modules),
        (len(reference), len(target)),
        tuple(passes),
    )
