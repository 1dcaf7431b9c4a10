"""ptdbg_ascend's PrecisionDebugger over a capture: same names, same arguments, same files."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from ulpscope.compat.ptdbg_ascend.dumping import Dumping, Target, root_of, settle_dropout
from ulpscope.compat.ptdbg_ascend.overflow import OverflowCheck, Request, read_request
from ulpscope.compat.ptdbg_ascend.switch import (
    ArgumentError,
    Switch,
    read_acl_config,
    read_backward_input,
    read_switch,
)
from ulpscope.frameworks.torch.loader_watch import LoaderWatch
from ulpscope.model.errors import CaptureError

_log = logging.getLogger(__name__)
_HOOKS = ["dump", "overflow_check"]
_NO_HOOK = "You must provide hook_name argument to PrecisionDebugger when config is not provided."


class PrecisionDebugger:
    """One per process. Its methods work on the class too: `PrecisionDebugger.start()`."""

    _current: PrecisionDebugger | None = None

    def __init__(
        self,
        dump_path: str | None = None,
        hook_name: str | None = None,
        rank: int | None = None,
        step: list[int] | None = None,
        enable_dataloader: bool = False,
        model: Any = None,
        *,
        dropout: str = "off",
    ) -> None:
        if model is not None:
            raise ArgumentError(
                "model: the dump of a model's modules alone is not in ptdbg_ascend's guide and not done; module_dump dumps "
                "one module, msprobe's PrecisionDebugger at level L0 all of them"
            )
        if hook_name is None:
            raise ArgumentError(_NO_HOOK)
        if hook_name not in _HOOKS:
            raise ArgumentError(f"hook_name should be in {_HOOKS}, got {hook_name}")
        if not isinstance(enable_dataloader, bool):
            raise ArgumentError("Params enable_dataloader only support True or False.")
        steps = _read_steps(step)
        if rank is not None:
            if type(rank) is not int or rank < 0:
                raise ArgumentError(f"rank {rank} must be a positive integer.")
            _log.warning("Rank argument is provided. Only rank %d data will be dumpped.", rank)
        root = root_of(dump_path)
        settle_dropout(dropout)
        if PrecisionDebugger._current is not None:
            PrecisionDebugger._current._close()
        self._target = Target(root, steps=steps)
        self._rank = rank
        self._asked: Switch | Request = Switch("api_stack") if hook_name == "dump" else Request()
        self._work: Dumping | OverflowCheck | None = None
        self._loader: LoaderWatch | None = None
        PrecisionDebugger._current = self
        if enable_dataloader:
            self._loader = LoaderWatch(self._next_batch)
            self._loader.install()

    def configure_hook(
        self,
        mode: str | None = None,
        scope: list[str] | None = None,
        api_list: list[str] | None = None,
        filter_switch: str = "OFF",
        acl_config: str | None = None,
        backward_input: list[str] | None = None,
        input_output_mode: list[str] | None = None,
        summary_only: bool = False,
        summary_mode: str | None = None,
        overflow_nums: int = 1,
        need_replicate: bool = False,
    ) -> None:
        """Says what is dumped. `overflow_nums` and `need_replicate` are for overflow_check, the others but mode for dump."""
        if isinstance(self._asked, Request):
            self._set(
                read_request(
                    mode=mode,
                    acl_config=acl_config,
                    overflow_nums=overflow_nums,
                    need_replicate=need_replicate,
                    filter_switch=filter_switch,
                )
            )
            return
        if summary_mode not in (None, "all", "summary"):
            raise ArgumentError(f"summary_mode is {summary_mode!r}; it must be 'all', or 'summary' for no .npy files")
        switch = read_switch(
            "configure_hook",
            mode="api_stack" if mode is None else mode,
            scope=scope,
            api_list=api_list,
            filter_switch=filter_switch,
            parts=input_output_mode,
            summary_only=summary_only or summary_mode == "summary",
        )
        if switch.mode == "acl":
            gradients = read_backward_input(backward_input or [])
            if "backward" in switch.scope[0] and not gradients:
                raise ArgumentError("backward_input must be configured when scope contains 'backward'")
            switch = dataclasses.replace(switch, acl_config=read_acl_config(acl_config), backward_input=gradients)
        self._set(switch)

    @classmethod
    def start(cls) -> None:
        """Begins, or goes on with, dumping. Ends the program after the last step that was asked for, as the tool did."""
        debugger = cls._get()
        if debugger._work is None:
            debugger._work = debugger._made()
        debugger._end_after(debugger._work.capture.current_step)
        debugger._work.capture.start()

    @classmethod
    def stop(cls) -> None:
        """Ends a stretch; its files are written."""
        work = cls._get()._work
        if work is not None:
            work.pause()

    @classmethod
    def step(cls) -> None:
        """Ends a step."""
        work = cls._get()._work
        if work is not None:
            work.capture.step()

    @classmethod
    def _get(cls) -> PrecisionDebugger:
        if PrecisionDebugger._current is None:
            raise CaptureError(
                "there is no debugger yet: make one first, PrecisionDebugger(dump_path, hook_name='dump')"
            )
        return PrecisionDebugger._current

    def _made(self) -> Dumping | OverflowCheck:
        if isinstance(self._asked, Request):
            return OverflowCheck(self._target, self._asked, rank=self._rank)
        return Dumping(self._target, self._asked, rank=self._rank)

    def _set(self, asked: Switch | Request) -> None:
        if self._work is not None:
            self._work.close()
            self._work = None
        self._asked = asked

    def _end_after(self, step: int) -> None:
        if self._target.steps and step > self._target.steps[-1]:
            self._close()
            raise Exception(f"ptdbg: exit after iteration {list(self._target.steps)}")

    def _close(self) -> None:
        if self._loader is not None:
            self._loader.remove()
        if self._work is not None:
            self._work.close()
        PrecisionDebugger._current = None

    def _next_batch(self, number: int) -> None:
        """A DataLoader is about to give batch `number`: that begins a step, and ends the one before."""
        if number and self._work is not None:
            self._work.pause()
            self._work.capture.step()
        self.start()


def _read_steps(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise ArgumentError(f"step {given} should be list")
    for item in given:
        if type(item) is not int or item < 0:
            raise ArgumentError(f"step element {item} should be int")
    return tuple(sorted(set(given)))
