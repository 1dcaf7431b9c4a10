"""What a dump of ptdbg_ascend is asked for: modes, names and filters, checked with the tool's own words, and as a capture.

Which calls are wanted is decided again by name when the files are written: the tool's names have `_` where ours have dots.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.model.errors import ConfigError
from ulpscope.model.names import MODULE
from ulpscope.store.formats.pkl_lines import call_parts

_log = logging.getLogger(__name__)
MODES = ("all", "list", "range", "stack", "acl", "api_list", "api_stack")
_PARTS = ("forward", "backward", "input", "output")
_NAME = re.compile(r"(?P<head>.+)_(?P<index>\d{1,9})(?:_(?P<phase>forward|backward))?")
_NOT_ONE_WORD = re.compile(r"\d$|_forward|_backward|\d_")


class ArgumentError(ConfigError, ValueError):
    """A mistake in an argument. A ValueError too: scripts written for the tool may wait for one."""

    def __init__(self, *problems: str) -> None:
        super().__init__(problems)


@dataclass(frozen=True, slots=True)
class Switch:
    """A checked request for a dump."""

    mode: str = "all"
    scope: tuple[str, ...] = ()
    api_list: tuple[str, ...] = ()
    floats_only: bool = False
    parts: tuple[str, ...] = ()
    summary_only: bool = False
    acl_config: str | None = None
    backward_input: tuple[str, ...] = ()

    @property
    def arrays(self) -> bool:
        return not self.summary_only and self.mode != "stack"

    def capture_options(self) -> dict[str, Any]:
        """The same as options of a capture, which may see more than is wanted."""
        options: dict[str, Any] = {
            "phases": [part for part in self.parts if part in _PARTS[:2]],
            "roles": [part for part in self.parts if part in _PARTS[2:]],
            "tensors": self.arrays,
            "statistics": self.mode != "stack",
            "sketch": False,
            "stacks": self.mode in ("stack", "api_stack"),
            "overwrite": True,
        }
        if self.mode == "acl":
            below = {"level": "kernel", "below": _dotted(self.scope[0]) or self.scope[0], "acl_config": self.acl_config}
            return {**options, **below, "backward_input": self.backward_input or None}
        if len(self.scope) == 2 and self.mode in ("range", "stack"):
            ends = [_dotted(name) for name in self.scope]
            if all(end is not None and end.endswith(".forward") for end in ends):
                options["scope"] = ends
        elif self.scope:
            options["only"] = _all_or_nothing(map(_dotted, self.scope))
        if self.mode == "api_list":
            options["only"] = _all_or_nothing(
                None if _NOT_ONE_WORD.search(api) else _spelt(api) for api in self.api_list
            )
        return options


class Chooser:
    """Which calls are wanted, told by their names in the order they ran, as many at a time as there are."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._inside = self._over = False

    def chosen(self, names: Sequence[str]) -> list[int]:
        """The places of the wanted ones among the next calls."""
        switch = self._switch
        if switch.mode == "api_list":
            apis = [api.lower() for api in switch.api_list]
            return [at for at, name in enumerate(names) if any(api in name.lower() for api in apis)]
        if switch.mode == "acl":
            return [at for at, name in enumerate(names) if not _is_named(switch.scope[0], name)]
        if not switch.scope:
            return list(range(len(names)))
        if len(switch.scope) == 2 and switch.mode in ("range", "stack"):
            return [at for at, name in enumerate(names) if self._in_span(name)]
        found = [at for at, name in enumerate(names) if any(_is_named(entry, name) for entry in switch.scope)]
        _log.info("The number of matched dump is %d", len(found))
        return found

    def _in_span(self, name: str) -> bool:
        first, last = self._switch.scope
        self._inside = not self._over and (self._inside or _is_named(first, name))
        self._over = self._over or (self._inside and _is_named(last, name))
        return self._inside


def read_switch(
    where: str,
    *,
    mode: Any = "all",
    scope: Any = None,
    api_list: Any = None,
    filter_switch: Any = "OFF",
    parts: Any = None,
    summary_only: Any = False,
) -> Switch:
    """A request from the arguments of `where`; ArgumentError with the first mistake, in the tool's words."""
    scope = [] if scope is None else scope
    api_list = [] if api_list is None else api_list
    if mode not in MODES:
        raise ArgumentError(f"Current mode '{mode}' is not supported. Please use the field in {list(MODES)}")
    for name, value in (("scope", scope), ("api_list", api_list)):
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ArgumentError(f"{where}, {name} param set invalid, it's must be a list.")
    if summary_only not in (True, False):
        raise ArgumentError("Params summary_only only support True or False.")
    problem = _scope_problem(mode, scope, api_list)
    if problem:
        raise ArgumentError(problem if mode in ("acl", "api_list") else f"{where}, {problem}")
    floats_only = is_on(filter_switch)
    return Switch(mode, tuple(scope), tuple(api_list), floats_only, read_parts(parts), bool(summary_only))


def is_on(switch: Any) -> bool:
    """Whether "ON" was given, and not "OFF"; ArgumentError for anything else."""
    if switch not in ("ON", "OFF"):
        raise ArgumentError("Please set switch with 'ON' or 'OFF'.")
    return bool(switch == "ON")


def read_parts(given: Any) -> tuple[str, ...]:
    """Which parts are wanted; nothing stands for all. One that is alone of its kind does not exclude the other kind."""
    if isinstance(given, str):
        _log.warning("dump_mode is %r; it should be a list, as [%r]", given, given)
        given = [given]
    items = ["all"] if given is None else given
    if not isinstance(items, list | tuple) or not items or any(item not in ("all", *_PARTS) for item in items):
        known = ", ".join(f'"{part}"' for part in ("all", *_PARTS))
        raise ArgumentError(f"Please set dump_mode as a list containing one or more of {known}.")
    return () if "all" in items else tuple(items)


def read_acl_config(path: Any) -> str:
    """The path of a dump.json; ArgumentError if it is not there."""
    if not path:
        raise ArgumentError("acl_config must be configured when mode is 'acl'")
    if not isinstance(path, str) or not path.endswith(".json") or not Path(path).is_file():
        raise ArgumentError(f"acl_config is {path!r}; it must be a .json file that exists")
    return path


def read_backward_input(paths: Any) -> tuple[str, ...]:
    """The .npy files with the gradients that a first dump recorded."""
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        raise ArgumentError(f"backward_input is {paths!r}; it must be a list of .npy files of a first dump")
    return tuple(paths)


def _scope_problem(mode: str, scope: Sequence[str], api_list: Sequence[str]) -> str | None:
    wrong = "scope param set invalid, it's"
    match mode:
        case "list" if not scope:
            return f"{wrong} should not be an empty list."
        case "range" if len(scope) != 2:
            return f"{wrong} must be [start, end]."
        case "stack" if len(scope) > 2:
            return f"{wrong} must be [start, end] or []."
        case "acl" if len(scope) != 1:
            return "scope must be congfigured as a list with one api name"
        case "api_list" if not api_list:
            return "Current dump mode is 'api_list', but the content of api_list parameter is empty or valid."
    return None


# --- names ------------------------------------------------------------------------------------------------------


def _dotted(name: str) -> str | None:
    """`Tensor.permute.1.forward` for `Tensor_permute_1_forward`; None for what is no name of an API call."""
    found = _NAME.fullmatch(name)
    kind, api = call_parts(found["head"] if found else name)
    if kind == MODULE:
        return None
    return ".".join(
        [kind, api, *([found["index"]] if found else []), *([found["phase"]] if found and found["phase"] else [])]
    )


def _spelt(api: str) -> str:
    kind, name = call_parts(api[:1].upper() + api[1:])
    return api if kind == MODULE else f"{kind}.{name}"


def _all_or_nothing(names: Iterable[str | None]) -> tuple[str, ...]:
    """Names for a capture to look for; none, which is all calls, where one of them cannot be said there."""
    found = list(names)
    return () if None in found else tuple(name for name in found if name is not None)


def _is_named(entry: str, name: str) -> bool:
    """Whether a name begins with an entry: with all of it, so that `Tensor_abs_1` is not `Tensor_abs_10_forward`."""
    return name == entry or name.startswith(f"{entry}_")
