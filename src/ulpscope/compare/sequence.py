"""Two sequences of calls put together in the order they ran, for dumps that tell nothing but names and sizes.

A call that the other side has not, such as one that is fused there, is skipped, and the alignment goes on behind it.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterator, Sequence

from ulpscope.store.dump import Dump


def paired_in_order(reference: Dump, target: Dump, *, sizes: bool) -> Iterator[tuple[int, int]]:
    """Places (reference, target) of calls of the same name, with `sizes` also of the same slots and shapes."""
    left, right = _keys(reference, sizes=sizes), _keys(target, sizes=sizes)
    begin = _same(left, right)
    end = _same(left[begin:][::-1], right[begin:][::-1])
    yield from zip(range(begin), range(begin), strict=True)
    # The calls between are matched by their longest common stretches, which costs more than their number.
    middle = difflib.SequenceMatcher(
        None, left[begin : len(left) - end], right[begin : len(right) - end], autojunk=False
    )
    for block in middle.get_matching_blocks():
        for step in range(block.size):
            yield begin + block.a + step, begin + block.b + step
    yield from zip(range(len(left) - end, len(left)), range(len(right) - end, len(right)), strict=True)


def _keys(dump: Dump, *, sizes: bool) -> list[Hashable]:
    names: list[Hashable] = [(call.kind, call.name, call.phase) for call in dump.ids()]
    if not sizes:
        return names
    return [
        (name, *((value.slot, value.shape) for value in dump.nth(place).values)) for place, name in enumerate(names)
    ]


def _same(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    """How many calls from the beginning are the same."""
    for place, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return place
    return min(len(left), len(right))
