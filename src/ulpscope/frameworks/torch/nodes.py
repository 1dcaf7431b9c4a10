"""Questions to the nodes of torch's autograd graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals, tensors
from ulpscope.frameworks.torch.tensors import Path

_LEAF = (1 << 64) - 1
_SOME = 8
Edges = dict[Any, list[Path]]
Roots = dict[Any, dict[int, Path]]
Leaving = dict[Any, list[tuple[int, Path]]]
Parts = dict[Path, int]


@functools.cache
def accumulator() -> type:
    """The class of the nodes that stand for leaves."""
    with internals.no_functions(), internals.no_dispatch(), torch.inference_mode(False), torch.enable_grad():
        made = torch.zeros(1, requires_grad=True).view(1)
        assert made.grad_fn is not None
        return type(made.grad_fn.next_functions[0][0])


def graph_behind(roots: Any) -> Iterator[Any]:
    """Every node of the graph behind a tensor, or several tensors or edges, once each."""
    ends = [roots] if isinstance(roots, Tensor) else roots
    seen = {end.grad_fn if isinstance(end, Tensor) else getattr(end, "node", None) for end in ends} - {None}
    todo: list[Any] = list(seen)
    while todo:
        node = todo.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)


def made_since(node: Any, sequence: int) -> bool:
    """Whether a node was created since `sequence`; those of leaves belong to no call."""
    return bool(sequence <= node._sequence_nr() < _LEAF)


def nodes_of(result: Any, sequence: int) -> tuple[Roots, Roots]:
    """The nodes that made a result, each with the path of its outputs: those created since `sequence`, and older ones."""
    own: Roots = {}
    older: Roots = {}
    for path, leaf in tensors.leaves(result):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            node = leaf.grad_fn
            if node is not None:
                found = own if node._sequence_nr() >= sequence else older
                found.setdefault(node, {})[leaf.output_nr] = path or (0,)
    return own, older


def numbered(node: Any, outputs: Iterable[int]) -> dict[int, Path]:
    """Its outputs by their numbers: of those that are seen, where an older torch does not say how many it has, and some more."""
    told = getattr(node, "_input_metadata", None)
    count = max(_SOME, max(outputs, default=0) + 1) if told is None else len(told)
    return {number: (number,) for number in range(count)}


def in_node_order(first: Any, roots: Roots, leaving: Leaving, parts: Parts) -> tuple[Roots, Leaving, Parts]:
    """The same with the places of the first node, and behind them what it does not show: the other results, and the
    arguments that other nodes have to do with."""
    inner = {path for node, places in leaving.items() if node is not first for _, path in places}
    behind = {
        node: [(place, ("argument", *path)) for place, path in places if path in inner]
        for node, places in leaving.items()
    }
    here: list[tuple[int, Path]] = [(place, (place,)) for place in range(len(first.next_functions))]
    return (
        {
            node: numbered(node, outputs) if node is first else {n: ("result", *path) for n, path in outputs.items()}
            for node, outputs in roots.items()
        },
        {first: here + behind.pop(first, []), **{node: places for node, places in behind.items() if places}},
        {
            **{path: 1 for _, path in here},
            **{("argument", *path): count for path, count in parts.items() if path in inner},
        },
    )


def all_older(children: Any, sequence: int) -> bool:
    """Whether no child of a node was created since `sequence`: then the call is this node alone."""
    return not any(child is not None and made_since(child, sequence) for child, _ in children)


def edge_of(value: Tensor) -> Any:
    node = value.grad_fn
    return id(value) if node is None else (node, value.output_nr)


def key_of(node: Any, number: int) -> Any:
    if node is None:
        return None
    if node._sequence_nr() == _LEAF and hasattr(node, "variable"):  # others only say that there is no gradient
        return id(node.variable)
    return (node, number)
