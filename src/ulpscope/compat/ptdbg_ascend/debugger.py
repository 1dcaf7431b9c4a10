"""ptdbg_ascend's PrecisionDebugger over a capture: same names, same arguments, same files."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from ulpscope.compat.ptdbg_ascend.dumping import Dumping, Target, check_overflow_support, root_of
from ulpscope.compat.ptdbg_ascend.switch import (
    ArgumentError,
    Switch,
    is_on,
    read_acl_config,
    read_backward_input,
    read_switch,
)
from ulpscope.errors import CaptureError
from ulpscope.frameworks.torch.loader_watch import LoaderWatch

_log = logging.getLogger(__name__)
_HOOKS = ["dump", "overflow_check"]
_NO_HOOK = "You must provide hook_name argument to PrecisionDebugger when config is not provided."
NO_OVERFLOW_CHECK = "Overflow detection is not supported in the GPU environment."


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
    ) -> None:
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
        if PrecisionDebugger._current is not None:
            PrecisionDebugger._current._close()
        self._is_dump = hook_name == "dump"
        self._target = Target(root, steps=steps)
        self._rank = rank
        self._model = model
        self._switch = Switch("api_stack")
        self._dumping: Dumping | None = None
        self._loader: LoaderWatch | None = None
        self._can_check = self._is_dump or check_overflow_support()
        if not self._can_check:
            _log.warning(NO_OVERFLOW_CHECK)
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
        if not self._is_dump:
            read_overflow(mode, acl_config, overflow_nums, need_replicate)
            is_on(filter_switch)
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
        if self._dumping is not None:
            self._dumping.close()
            self._dumping = None
        self._switch = switch

    @classmethod
    def start(cls) -> None:
        """Begins, or goes on with, dumping. Ends the program after the last step that was asked for, as the tool did."""
        debugger = cls._get()
        if not debugger._can_check:
            return
        if debugger._dumping is None:
            debugger._dumping = Dumping(debugger._target, debugger._switch, model=debugger._model, rank=debugger._rank)
        debugger._end_after(debugger._dumping.capture.current_step)
        debugger._dumping.capture.start()

    @classmethod
    def stop(cls) -> None:
        """Ends a stretch; its files are written."""
        dumping = cls._get()._dumping
        if dumping is not None:
            dumping.capture.stop()

    @classmethod
    def step(cls) -> None:
        """Ends a step."""
        dumping = cls._get()._dumping
        if dumping is not None:
            dumping.capture.step()

    @classmethod
    def _get(cls) -> PrecisionDebugger:
        if PrecisionDebugger._current is None:
            raise CaptureError(
                "there is no debugger yet: make one first, PrecisionDebugger(dump_path, hook_name='dump')"
            )
        return PrecisionDebugger._current

    def _end_after(self, step: int) -> None:
        if self._target.steps and step > self._target.steps[-1]:
            self._close()
            raise Exception(f"ptdbg: exit after iteration {list(self._target.steps)}")

    def _close(self) -> None:
        if self._loader is not None:
            self._loader.remove()
        if self._dumping is not None:
            self._dumping.close()
        PrecisionDebugger._current = None

    def _next_batch(self, number: int) -> None:
        """A DataLoader is about to give batch `number`: that begins a step, and ends the one before."""
        if number and self._dumping is not None:
            self._dumping.capture.stop()
            self._dumping.capture.step()
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


def read_overflow(mode: Any, acl_config: Any, overflow_nums: Any, need_replicate: Any = False) -> None:
    """Checks what overflow_check is asked for; ArgumentError with the first mistake."""
    if mode not in (None, "api", "acl"):
        raise ArgumentError(f"Current mode '{mode}' is not supported. Please use the field in ['api', 'acl']")
    if type(overflow_nums) is not int or (overflow_nums < 1 and overflow_nums != -1):
        raise ArgumentError("overflow_nums must be an integer greater than 0 or set -1.")
    if not isinstance(need_replicate, bool):
        raise ArgumentError("Params need_replicate only support True or False.")
    if mode == "acl":
        read_acl_config(acl_config)
