"""Options of a capture: one frozen dataclass, its defaults in one place, read from keywords, TOML or JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.model.errors import ConfigError, did_you_mean
from ulpscope.model.records import Level, Phase, Role

_PHASES = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD}
_ROLES = {"input": Role.INPUT, "output": Role.OUTPUT}
_MAX_STEP = 10**9


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """What to capture, and how.

    steps and ranks   numbers or ranges "10:12" (end included); empty: all
    only, skip        names: an exact call (`Functional.conv2d.1.forward`; without its phase, both), a name without its
                      number (`Functional.conv2d`), the path of a module (`model.layers.1`, `Module.fc`: itself, and the calls
                      inside it; at level mix also the full name of a module's call), or any part of a name (`relu`)
    scope             first and last call of a span, both included, a module with all inside it
    below             kernel level: this one call, and the kernels inside it
    acl_config        with below or overflows, on an NPU: the vendor's dump writes the kernels, as this acl_config.json says
    backward_input    with acl_config and a backward: .pt or .npy files with the gradients of the call's outputs
    phases, roles     forward, backward; input, output; empty: both
    tensors           store the exact bits of every tensor, each distinct value once
    checksum          CRC-32 of every tensor's bytes
    rows              two floats for each row of the last dimension, by which parts of tensors are found in others
    sketch            256 floats per tensor from which two captures tell a relative error without the tensors
    reuse             measure a value once while torch says that nobody wrote to it
    overflows         keep only calls that overflow, with their tensors, and end the program at this one; -1: never end it
    poles             with overflows: count also what is infinite because the function is, as 1/0 and log 0
    queue_mb          memory for payloads that wait for the disk
    overwrite         replace an earlier capture in the same folder
    strict            refuse to begin where there is not the room for the queues in full; without, what fits is recorded
    """

    path: str = "ulpscope-run"
    level: Level = Level.OP
    steps: tuple[int | tuple[int, int], ...] = ()
    ranks: tuple[int | tuple[int, int], ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    scope: tuple[str, str] | None = None
    below: str | None = None
    acl_config: str | None = None
    backward_input: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    roles: tuple[Role, ...] = ()
    statistics: bool = True
    tensors: bool = False
    checksum: bool = False
    sketch: bool = True
    rows: bool = False
    stacks: bool = True
    reuse: bool = True
    overflows: int | None = None
    poles: bool = False
    queue_mb: int = 64
    overwrite: bool = False
    strict: bool = False

    def as_json(self) -> dict[str, Any]:
        """The options as plain JSON, for the manifest."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def capture_config(options: Mapping[str, Any], where: str = "") -> CaptureConfig:
    """A checked configuration. Raises ConfigError with every problem at once."""
    problems: list[str] = []
    known = {field.name for field in dataclasses.fields(CaptureConfig)}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            problems.append(f"unknown key {key!r}.{did_you_mean(str(key), known)}")
        elif value is not None:
            try:
                values[key] = _READERS[key](value)
            except ValueError as error:
                problems.append(f"{key} = {_shown(value)}: {error}")
    if values.get("below") and values.get("level", Level.OP) is not Level.KERNEL:
        problems.append("below: works at level kernel only")
    for key, others in (("acl_config", ("below", "overflows")), ("backward_input", ("below",))):
        if values.get(key) and not any(values.get(other) for other in others):
            problems.append(f"{key}: works with {' or '.join(others)} only, which names the call")
    if problems:
        raise ConfigError(problems, where)
    return CaptureConfig(**values)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The options in a .toml or .json file, unchecked. Raises ConfigError when the file cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            import tomllib

            content: Any = tomllib.loads(text)
        else:
            content = json.loads(text, object_pairs_hook=_no_twins)
    except FileNotFoundError:
        raise ConfigError([f"{path} does not exist"]) from None
    except ImportError:
        raise ConfigError([f"{path}: TOML needs Python 3.11; write the same options as JSON"]) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: {error}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: the top level must be a table of options, not {type(content).__name__}"])
    return content


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twin!r} is there twice")
    return found


def numbers(value: Any) -> tuple[int | tuple[int, int], ...]:
    """Numbers and closed ranges from 3, "3", "0,10:12" or a list of such. Raises ValueError."""
    items: Iterable[Any]
    if isinstance(value, str):
        items = [item.strip() for item in value.split(",") if item.strip()]
    else:
        items = value if isinstance(value, Sequence | range) else [value]
    found: list[int | tuple[int, int]] = []
    for item in items:
        if isinstance(item, tuple | list) and len(item) == 2 and all(type(part) is int for part in item):
            found.append(_ordered(*item))
        elif isinstance(item, str):
            match = re.fullmatch(r"(\d{1,9})(?:\s*[:-]\s*(\d{1,9}))?", item)
            if match is None:
                raise ValueError(f"{item!r} is neither a number nor a range such as 10:12")
            found.append(_ordered(int(match[1]), int(match[2])) if match[2] else int(match[1]))
        elif type(item) is int and 0 <= item <= _MAX_STEP:
            found.append(item)
        else:
            raise ValueError(f"{_shown(item)} must be a whole number from 0 on, or a range such as '10:12'")
    return tuple(found)


def _ordered(first: int, last: int) -> tuple[int, int]:
    if first > last:
        raise ValueError(f"the range {first}:{last} ends before it begins")
    return first, last


def _level(value: Any) -> Level:
    try:
        return value if isinstance(value, Level) else Level(value)
    except ValueError:
        words = [level.value for level in Level]
        raise ValueError(f"must be one of {', '.join(words)}.{did_you_mean(str(value), words)}") from None


def _words(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise ValueError("must be a name or a list of names")
    return tuple(items)


def _span(value: Any) -> tuple[str, str]:
    items = _words(value)
    if len(items) != 2:
        raise ValueError("must be two names, the first and the last call")
    return items[0], items[1]


def _choices(table: Mapping[str, Any]) -> Any:
    def read(value: Any) -> tuple[Any, ...]:
        items = [value] if isinstance(value, str) or not isinstance(value, list | tuple) else value
        found = []
        for item in items:
            if item in table.values():
                found.append(item)
            elif isinstance(item, str) and item in table:
                found.append(table[item])
            else:
                raise ValueError(f"must be one of {', '.join(table)}")
        return tuple(found)

    return read


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> str:
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("must be a text")
    return text


def _paths(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_text(item) for item in items)


def _megabytes(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise ValueError("must be a whole number of megabytes, 1 or more")
    return value


def _limit(value: Any) -> int:
    if type(value) is not int or (value < 1 and value != -1):
        raise ValueError("must be a whole number from 1 on, or -1 for no end")
    return value


_READERS: dict[str, Any] = {
    "path": _text,
    "level": _level,
    "steps": numbers,
    "ranks": numbers,
    "only": _words,
    "skip": _words,
    "scope": _span,
    "below": _text,
    "acl_config": _text,
    "backward_input": _paths,
    "phases": _choices(_PHASES),
    "roles": _choices(_ROLES),
    "overflows": _limit,
    "queue_mb": _megabytes,
    **{
        name: _flag
        for name in (
            "statistics",
            "tensors",
            "checksum",
            "sketch",
            "rows",
            "stacks",
            "reuse",
            "overwrite",
            "poles",
            "strict",
        )
    },
}


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)[:80]


def _plain(value: Any) -> Any:
    if isinstance(value, Level | Phase | Role):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
