"""Being told of every optimizer step of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerWatch:
    """Calls `after_step` behind each optimizer step, between `install` and `remove`."""

    def __init__(self, after_step: Callable[[], None]) -> None:
        self._after_step = after_step
        self._handle: Any = None

    def install(self) -> None:
        self._handle = register_optimizer_step_post_hook(lambda *_: self._after_step())

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
