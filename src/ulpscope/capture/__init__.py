"""Recording a running program: sessions, what is wanted, what is stored.

`ulpscope.capture` is this package and a function at once, since importing a package's module sets the package's name in
its parent: calling the package makes a capture.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulpscope.capture.session import Capture


class _Package(ModuleType):
    def __call__(
        self, path: str | Path | None = None, *, model: Any = None, rank: int | None = None, **options: Any
    ) -> Capture:
        """A capture for a `with` block: recording begins with the block and ends with it."""
        from ulpscope.capture.session import Capture

        return Capture(path, model=model, rank=rank, **options)


sys.modules[__name__].__class__ = _Package
