"""Backward passes that torch writes down and compiles before they run (compiled autograd).

It takes in every hook of the graph, so ours are put aside meanwhile: they would break what is compiled into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.nodes import graph_behind

_OURS = __name__.partition(".")[0] + "."
Table = MutableMapping[Any, Any]


def _nothing(*_: Any) -> None: ...


@contextmanager
def without_our_hooks(roots: Any) -> Iterator[None]:
    """Within, no node of the graph behind some tensors has a hook of ours. Afterwards those that the graph still has are as before."""
    aside: list[tuple[Table, list[tuple[Any, Any]]]] = []
    try:
        with internals.no_functions():
            for table in _tables(roots):
                before = list(table.items())
                for key, _ in [item for item in before if _is_ours(item[1])]:
                    if not aside or aside[-1][0] is not table:
                        aside.append((table, before))
                    del table[key]
        yield
    finally:
        for table, before in aside:
            now = dict(table)
            kept = {key: hook for key, hook in before if key in now or _is_ours(hook)}
            table.clear()
            table.update(kept | now)


def _tables(roots: Any) -> Iterator[Table]:
    """Where the nodes behind some tensors keep their hooks, and the parameters there theirs."""
    for node in graph_behind(roots):
        for register in (node.register_prehook, node.register_hook):
            try:
                handle = register(_nothing)
            except RuntimeError:  # a node of a kind that takes no such hooks
                continue
            handle.remove()
            yield handle.hooks_dict_ref()
        table = getattr(getattr(node, "variable", None), "_post_accumulate_grad_hooks", None)
        if table is not None:
            yield table


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None)).startswith(_OURS)
