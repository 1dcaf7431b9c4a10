"""torch's two stacks of modes on this thread: putting a mode of ours on, and taking it off whatever lies above it.

Never by `with mode`: torch then also notes in globals that modes are on, and it would go on to believe so once ours is taken from
below those of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ulpscope.frameworks.torch import internals


class Stack:
    """One of the two, the mode that is asked last at the bottom."""

    def __init__(
        self,
        name: str,
        length: Callable[[], int],
        at: Callable[[int], Any],
        pop: Callable[[], Any],
        push: Callable[[Any], None],
    ) -> None:
        self.name = name
        self.length = length
        self.at = at
        self.pop = pop
        self.push = push

    def count(self, mode: Any) -> int:
        return sum(self.at(place) is mode for place in range(self.length()))

    def holds_only(self, mode: Any) -> bool:
        return self.length() == 1 and self.at(0) is mode

    def is_on_top(self, mode: Any) -> bool:
        length = self.length()
        return length > 0 and self.at(length - 1) is mode

    def insert(self, mode: Any, place: int) -> None:
        """Puts a mode on top of so many others."""
        above = [self.pop() for _ in range(self.length() - place)]
        self.push(mode)
        for other in reversed(above):
            self.push(other)

    def remove(self, mode: Any) -> list[int]:
        """Takes a mode off; returns where it was."""
        places = [place for place in range(self.length()) if self.at(place) is mode]
        if places:
            modes = [self.pop() for _ in range(self.length() - places[0])]
            for other in reversed(modes):
                if other is not mode:
                    self.push(other)
        return places

    def drop_dead(self) -> None:
        """Takes off what a capture that has ended left on a thread it could not reach."""
        for mode in [self.at(place) for place in range(self.length())]:
            if getattr(mode, "is_dead", bool)():
                self.remove(mode)


FUNCTION = Stack(
    "function modes",
    internals.count_function_modes,
    internals.function_mode_at,
    internals.pop_function_mode,
    internals.push_function_mode,
)
DISPATCH = Stack(
    "dispatch modes",
    internals.count_dispatch_modes,
    internals.dispatch_mode_at,
    internals.pop_dispatch_mode,
    internals.push_dispatch_mode,
)


_PYTHON = internals.dispatch_key("Python")
GONE = "calls of torch while our dispatch mode was off: something took it from its thread, or modes are disabled there"


def is_blind(mode: Any) -> bool:
    """Whether the dispatch mode of this thread is not told of its kernels, though we have not taken it off ourselves."""
    return not mode.away and (not DISPATCH.count(mode) or (_PYTHON is not None and internals.is_excluded(_PYTHON)))


@contextmanager
def off(mode: Any) -> Iterator[None]:
    """Takes a dispatch mode off where it is the only one: beside one of the program's, torch computes the same without ours."""
    alone = DISPATCH.holds_only(mode)
    if alone:
        mode.away += 1
        DISPATCH.pop()
    try:
        yield
    finally:
        if alone:
            if not DISPATCH.count(mode):
                DISPATCH.insert(mode, 0)
            mode.away -= 1
