"""Two dumps put together: which calls belong to each other, and how their values differ.

`ulpscope.compare` is this package and a function at once: calling it compares two runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ulpscope.compare.comparison import Comparison
    from ulpscope.compare.engine import Options


class _Package(ModuleType):
    def __call__(
        self,
        reference: str | Path,
        target: str | Path,
        options: Options | None = None,
        *,
        step: int | None = None,
        rank: int | None = None,
    ) -> Iterator[Comparison]:
        """Every value of two runs compared, in the target's execution order, step by step and rank by rank."""
        from ulpscope.compare.engine import compare_runs

        return compare_runs(reference, target, options, step=step, rank=rank)


sys.modules[__name__].__class__ = _Package
