"""ptdbg_ascend's functions: set_dump_path, register_hook, set_dump_switch and what goes with them.

They can be called in any order; dumping begins when a hook is registered and the switch is on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.compat.ptdbg_ascend.dumping import ENVIRONMENT, TAG, Dumping, Target, acl_root, root_of, settle_dropout
from ulpscope.compat.ptdbg_ascend.overflow import OverflowCheck, Request, read_request
from ulpscope.compat.ptdbg_ascend.switch import (
    ArgumentError,
    Switch,
    is_on,
    read_acl_config,
    read_backward_input,
    read_switch,
)
from ulpscope.frameworks.torch import determinism
from ulpscope.model.errors import CaptureError

_log = logging.getLogger(__name__)
_PLAIN_TAG = re.compile(r"[a-zA-Z0-9_.-]+")
_ARGUMENTS = ("overflow_nums", "dump_mode", "dump_config", "rank", "filter_switch", "dropout")


def acc_cmp_dump(*_: Any) -> None:
    """The hook that dumps; give it to `register_hook`."""


def overflow_check(*_: Any) -> None:
    """The hook that looks for overflows; give it to `register_hook`."""


@dataclass(slots=True)
class _Session:
    """What the functions were told so far."""

    root: Path | None = None
    tag: str = TAG
    model: Any = None
    registered: bool = False
    acl_config: str | None = None
    rank: int | None = None
    switch: Switch | None = None
    backward_input: tuple[str, ...] = ()
    dumping: Dumping | None = None
    request: Request | None = None
    check: OverflowCheck | None = None

    def begin(self) -> None:
        """Starts as soon as everything needed has been said."""
        switch = self.switch
        if switch is None or not self.registered:
            return
        if switch.mode == "acl":
            if self.acl_config is None:
                raise ArgumentError("mode is 'acl': call register_hook with dump_mode='acl' and dump_config first")
            if "backward" in switch.scope[0] and not self.backward_input:
                return  # set_backward_input comes after the switch in the manual
            switch = dataclasses.replace(switch, acl_config=self.acl_config, backward_input=self.backward_input)
        if self.dumping is None or self.dumping is not Dumping.current or self.dumping.switch != switch:
            self.dumping = Dumping(self._target(switch), switch, model=self.model, rank=self.rank, adds=True)
        self.dumping.capture.start()

    def end(self) -> None:
        if self.dumping is not None:
            self.dumping.pause()

    def begin_check(self) -> None:
        """Starts looking for overflows. Without a path their files go where the program runs, as the manual says."""
        if self.request is None:
            return
        if self.check is None:
            known = self.root is not None or ENVIRONMENT in os.environ
            target = Target(root_of(self.root) if known else Path(), self.tag)
            self.check = OverflowCheck(target, self.request, model=self.model, rank=self.rank)
        self.check.capture.start()

    def _target(self, switch: Switch) -> Target:
        if self.root is None and switch.acl_config is not None:
            return Target(acl_root(switch.acl_config), self.tag)
        return Target(root_of(self.root), self.tag)


_session = _Session()


def seed_all(seed: int = 1234, mode: bool = False) -> None:
    """Fixes every random source; `mode` asks for deterministic algorithms."""
    if type(seed) is not int:
        raise ArgumentError("Seed must be integer.")
    if not 0 <= seed < 1 << 32:
        raise ArgumentError("Seed must be between 0 and 4294967295.")
    if not isinstance(mode, bool):
        raise ArgumentError("seed_all mode must be bool.")
    _log.info("Please disable dataloader shuffle before running the program.")
    determinism.seed_all(seed, mode)


def set_dump_path(fpath: str | None = None, dump_tag: str = TAG) -> None:
    """Where dumps go from now on: fpath/{dump_tag}_v2.0/rank{n}. Without a path, ASCEND_WORK_PATH/dump_data."""
    if not isinstance(dump_tag, str) or not _PLAIN_TAG.fullmatch(dump_tag):
        raise ArgumentError(f"The file path {dump_tag} contains special characters.")
    root = root_of(fpath)
    for work in (_session.dumping, _session.check):
        if work is not None:
            work.close()
    _session.dumping = _session.check = None
    _session.root, _session.tag = root, dump_tag


def register_hook(model: Any, hook: Any, **kwargs: Any) -> None:
    """Says which model is dumped; `overflow_nums`, `dump_mode` ("api", "acl"), `dump_config` (with "acl"), `rank`, `dropout`."""
    for name in kwargs:
        if name not in _ARGUMENTS:
            raise ArgumentError(f"{name} not a valid keyword arguments in register_hook.")
    if hook not in (acc_cmp_dump, overflow_check):
        raise ArgumentError("hook function must be set overflow_check or acc_cmp_dump")
    mode, config = kwargs.get("dump_mode", "api"), kwargs.get("dump_config")
    request = read_request(
        mode=mode if hook is overflow_check or mode != "acl" else "api",
        acl_config=config,
        overflow_nums=kwargs.get("overflow_nums", 1),
        filter_switch=kwargs.get("filter_switch", "OFF"),
    )
    settle_dropout(kwargs.get("dropout", "off"))
    _session.model = model
    _session.rank = kwargs.get("rank")
    if hook is overflow_check:
        if _session.check is not None:
            _session.check.close()
            _session.check = None
        _session.request = request
        _session.begin_check()
        return
    _session.acl_config = read_acl_config(config) if mode == "acl" else None
    _session.registered = True
    _session.begin()


def set_dump_switch(
    switch: str,
    mode: str = "all",
    scope: list[str] | None = None,
    api_list: list[str] | None = None,
    filter_switch: str = "OFF",
    dump_mode: list[str] | None = None,
    summary_only: bool = False,
) -> None:
    """ "ON" begins dumping, "OFF" ends it and writes the files; the other arguments say what is dumped."""
    if not is_on(switch):
        _session.end()
        _session.switch, _session.backward_input = None, ()
        return
    _session.switch = read_switch(
        "set_dump_switch",
        mode=mode,
        scope=scope,
        api_list=api_list,
        filter_switch=filter_switch,
        parts=dump_mode,
        summary_only=summary_only,
    )
    _session.begin()


def set_overflow_check_switch(switch: str, filter_switch: str = "OFF") -> None:
    """Limits overflow_check to a stretch of the program; without it everything behind `register_hook` is looked at."""
    on = is_on(switch)
    is_on(filter_switch)
    if _session.request is None:
        raise CaptureError("there is no overflow check to switch; call register_hook(model, overflow_check) first")
    if on:
        _session.begin_check()
    elif _session.check is not None:
        _session.check.pause()


def set_backward_input(backward_input: list[str]) -> None:
    """The .npy files with the gradients that a backward under mode="acl" begins with."""
    _session.backward_input = read_backward_input(backward_input)
    _session.begin()


def module_dump(module: Any, module_name: str) -> None:
    """Dumps one module as a whole from now on, and none of the APIs, until `module_dump_end`."""
    if isinstance(module, type) or not callable(getattr(module, "named_modules", None)):
        raise ArgumentError("The parameter:module in module_dump is not a Module subclass.")
    if not isinstance(module_name, str) or not module_name:
        raise ArgumentError("The parameter:dump_name in module_dump is not a str type.")
    _dumping().capture.watch_alone(module, module_name)


def module_dump_end() -> None:
    """Ends `module_dump`: APIs are dumped again."""
    _dumping().capture.watch_alone(None, "")


def _dumping() -> Dumping:
    if Dumping.current is None or not Dumping.current.capture.started:
        raise CaptureError("nothing is being dumped; start a PrecisionDebugger, or call set_dump_switch('ON') first")
    return Dumping.current
