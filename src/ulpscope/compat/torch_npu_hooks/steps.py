"""Which steps are dumped, and the count of steps. `schedule` and `step_schedule` are spelt as torch_npu.hooks spells them."""

from __future__ import annotations

import sys
from typing import Protocol

from ulpscope.model.errors import ConfigError


class ArgumentError(ConfigError, RuntimeError):
    """A mistake in an argument. A RuntimeError too: scripts written for the tool may wait for one."""

    def __init__(self, *problems: str) -> None:
        super().__init__(problems)


class schedule:
    """Every `stride`-th step from `begin` to `end`, both included."""

    def __init__(self, begin: int = 0, end: int = sys.maxsize, stride: int = 1) -> None:
        numbers = (begin, end, stride)
        if any(type(number) is not int for number in numbers) or begin < 0 or end < begin or stride <= 0:
            raise ArgumentError(f"Illegal Argument: schedule(begin={begin}, end={end}, stride={stride})")
        self._steps = range(begin, min(end, sys.maxsize - 1) + 1, stride)

    def __contains__(self, step: int) -> bool:
        return step in self._steps


class Follower(Protocol):
    """What a dump does when the count of steps changes, and when its files are needed."""

    def follow(self) -> None: ...
    def settle(self) -> None: ...


class StepSchedule:
    """The count of steps, and the dump that goes by it."""

    def __init__(self) -> None:
        self.step_num = 0
        self.follower: Follower | None = None

    def step(self) -> None:
        """One step more."""
        self._set(self.step_num + 1)

    def reset_step(self) -> None:
        """Counts from 0 again."""
        self._set(0)

    def settle(self) -> None:
        """Everything that was dumped so far is in its file."""
        if self.follower is not None:
            self.follower.settle()

    def _set(self, number: int) -> None:
        self.step_num = number
        if self.follower is not None:
            self.follower.follow()


step_schedule = StepSchedule()
