"""Values made of several: what a fused call writes at once and another writes one after the other, micro-batches, partial sums.

Statistics that do not depend on order add up over parts: of values put together the counts, sums and sums of squares are sums, max
and min are max and min. Sketches are linear: of a sum the sketch is the sum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ulpscope.compare.value_graph import ValueGraph
from ulpscope.model.names import MODULE
from ulpscope.model.records import Role

# Of siblings, which read one value, so many that follow each other are put together; of a place, and of a weight, all.
_SIZES = (2, 3)
_SMALL = 1e-30


@dataclass(frozen=True, slots=True)
class Made:
    """What some values are together: one after the other, told by `numbers` (max, min, mean, norm), or summed, told by a sketch."""

    nodes: tuple[int, ...]
    numel: int
    phase: int
    told: NDArray[np.float64]
    is_sum: bool

    @property
    def size(self) -> float:
        return float(np.linalg.norm(self.told)) if self.is_sum else float(self.told[3])

    def apart(self, other: Made) -> float:
        """The relative error of `other`."""
        if self.is_sum:
            return float(np.linalg.norm(other.told - self.told)) / max(self.size, _SMALL)
        ends = max(abs(self.told[0]), abs(self.told[1]), _SMALL)
        norm = max(self.size, _SMALL)
        scale = np.array([ends, ends, norm / self.numel**0.5, norm])
        return float((np.abs(self.told - other.told) / scale).max())


class _Table:
    """What can be looked up by its kind and, within a tolerance, by its size."""

    def __init__(self, items: Iterable[Made]) -> None:
        found: defaultdict[tuple[int, int, bool, int], list[tuple[float, int, Made]]] = defaultdict(list)
        for number, each in enumerate(items):
            found[_kind(each)].append((each.size, number, each))
        self._found = {kind: sorted(each) for kind, each in found.items()}

    def nearest(self, made: Made, most: float) -> tuple[float, Made] | None:
        near = self._found.get(_kind(made), ())
        low, high = (bisect(near, made.size * (1 + sign * most)) for bisect, sign in ((_low, -1), (_high, 1)))
        apart = [(each.apart(made), number, each) for _, number, each in near[low:high]]
        best = min(apart, default=None)
        return None if best is None or best[0] > most else (best[0], best[2])


def _low(items: list[tuple[float, int, Made]] | tuple[()], size: float) -> int:
    return bisect_left(items, size, key=lambda each: each[0])


def _high(items: list[tuple[float, int, Made]] | tuple[()], size: float) -> int:
    return bisect_right(items, size, key=lambda each: each[0])


def _kind(made: Made) -> tuple[int, int, bool, int]:
    return made.phase, made.numel, made.is_sum, len(made.told)


def pooled(
    reference: ValueGraph,
    target: ValueGraph,
    known: NDArray[np.bool_],
    taken: NDArray[np.bool_],
    limits: tuple[float, float],
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """Values of the target, of the reference, and how far apart, where one side has at once what the other has in parts.

    `known` values of the target and `taken` ones of the reference need no more; `limits`: by sketch, by statistics."""
    mine, theirs = target.is_telling & ~known, reference.is_telling & ~taken
    parts, others = list(_pools(target, mine)), list(_pools(reference, theirs))
    rows = ((parts, [*_alone(reference, reference.is_telling, parts), *others]), (_alone(target, mine, others), others))
    for wanted, given in rows:
        table = _Table(given) if wanted else None
        for each in wanted if table is not None else ():
            found = table.nearest(each, limits[0 if each.is_sum else 1])  # type: ignore[union-attr]
            if found is not None:
                yield each.nodes, found[1].nodes, found[0]


def _alone(graph: ValueGraph, some: NDArray[np.bool_], fitting: Iterable[Made]) -> list[Made]:
    """Single values of the sizes that others have."""
    wanted = {_kind(each)[:3] for each in fitting}
    sizes = {numel for _, numel, _ in wanted}
    found = []
    for node in np.flatnonzero(some).tolist():
        numel, phase = int(graph.numel[node]), int(graph.phase[node])
        if numel not in sizes:
            continue
        if (phase, numel, False) in wanted:
            found.append(Made((node,), numel, phase, graph.numbers[node], is_sum=False))
        sketch = graph.sketch(node) if (phase, numel, True) in wanted else None
        if sketch is not None:
            found.append(Made((node,), numel, phase, sketch.astype(np.float64), is_sum=True))
    return found


def _pools(graph: ValueGraph, some: NDArray[np.bool_]) -> Iterator[Made]:
    seen = set()
    for nodes, sizes in _groups(graph, some):
        for size in sizes:
            for at in range(len(nodes) - size + 1 if size > 1 else 0):
                chosen = nodes[at : at + size]
                if chosen not in seen:
                    seen.add(chosen)
                    yield from _together(graph, chosen)


def _together(graph: ValueGraph, nodes: tuple[int, ...]) -> Iterator[Made]:
    chosen = list(nodes)
    numel, numbers, phase = graph.numel[chosen], graph.numbers[chosen], int(graph.phase[nodes[0]])
    count = int(numel.sum())
    mean, norm = float((numbers[:, 2] * numel).sum()) / count, float(np.sqrt((numbers[:, 3] ** 2).sum()))
    told = np.array([numbers[:, 0].max(), numbers[:, 1].min(), mean, norm])
    yield Made(nodes, count, phase, told, is_sum=False)
    if (numel == numel[0]).all():
        sketches = [graph.sketch(node) for node in nodes]
        known = [each.astype(np.float64) for each in sketches if each is not None]
        if len(known) == len(nodes) and len({len(each) for each in known}) == 1:
            yield Made(nodes, int(numel[0]), phase, np.sum(known, axis=0), is_sum=True)


def _groups(graph: ValueGraph, some: NDArray[np.bool_]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Values that may belong together, in order, and how many of them at a time: those of one place, of one weight, of siblings."""
    whole: defaultdict[object, dict[int, None]] = defaultdict(dict)
    siblings: defaultdict[object, dict[int, None]] = defaultdict(dict)
    ids, nth = graph.dump.ids(), _numbers_of_place(graph)
    for position in range(len(graph.seqs)):
        outs = set(graph.outputs[position])
        if not any(some[node] for node in outs):
            continue
        call = graph.dump.nth(position)
        forward = position if call.origin is None else graph.position(call.origin)
        forward = position if forward is None else forward
        name = ids[forward].name if call.id.kind == MODULE else ids[forward].name.split(".")[0]
        ins = list(graph.inputs[forward])
        read, leaf = set(graph.inputs[position]), graph.is_leaf(position)
        for value in call.values:
            node = graph.node(value)
            made = value.slot.role is Role.OUTPUT or graph.is_sum(position)
            if node is None or not made or not some[node] or node in read:
                continue
            slot = call.id.phase, value.slot
            whole["place", call.module, call.id.kind, name, nth[forward], slot][node] = None
            if leaf and len(ins) > 1:
                whole["weight", ins[1], name, slot][node] = None
            if ins and (leaf or graph.is_sum(position)):
                siblings[ins[0], name if leaf else "", slot][node] = None
    for nodes in whole.values():
        yield tuple(nodes), (len(nodes),)
    for nodes in siblings.values():
        yield tuple(nodes), _SIZES


def _numbers_of_place(graph: ValueGraph) -> list[int]:
    """Of each call how many of its name came before it inside the call around it: else the products of q and k are one place."""
    count: Counter[tuple[int, str, str]] = Counter()
    found = []
    for position, call in enumerate(graph.dump.ids()):
        key = graph.parents[position], call.kind, call.name
        found.append(count[key])
        if graph.origins[position] < 0:
            count[key] += 1
    return found
