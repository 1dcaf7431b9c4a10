"""Counting steps by the batches that a DataLoader gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.codeswap import CodeSwap


class LoaderWatch:
    """Calls `next_batch(n)` before the n-th batch of any DataLoader of this process is taken."""

    def __init__(self, next_batch: Callable[[int], None]) -> None:
        self._next_batch = next_batch
        self._count = 0
        next_batch = internals.next_batch
        self._swaps = [] if next_batch is None else [CodeSwap(next_batch, self._around)]

    def install(self) -> None:
        for swap in self._swaps:
            swap.install()

    def remove(self) -> None:
        for swap in self._swaps:
            swap.remove()

    def _around(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, self._count = self._count, self._count + 1
        self._next_batch(number)
        return original(*args, **kwargs)
