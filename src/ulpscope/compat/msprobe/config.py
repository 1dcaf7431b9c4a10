"""msprobe's config.json: every key of its manual, checked all at once, and translated into a capture.

A key is a row in a table with the function that reads it; unknown keys are errors that name the nearest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulpscope.config import numbers, read_config_file
from ulpscope.errors import ConfigError, did_you_mean

DEFAULT_CONFIG = Path(__file__).with_name("config.json")
OWN_FOLDER = ".ulpscope"  # our own store of a run that is under way, or was killed
LEVELS = {"L0": "module", "L1": "op", "L2": "kernel", "mix": "mix", "debug": "module"}
TASKS = ("statistics", "tensor", "overflow_check", "free_benchmark", "run_ut")
READY = ("statistics", "tensor", "overflow_check", "free_benchmark")
_OLD_NAMES = {"acc_check": "run_ut"}
Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class DebuggerConfig:
    """A checked configuration, with the manual's defaults."""

    task: str = "statistics"
    dump_path: str = ""
    rank: tuple[Any, ...] = ()
    step: tuple[Any, ...] = ()
    level: str = "L1"
    acl_config: str = ""
    seed: int = 1234
    is_deterministic: bool = False
    enable_dataloader: bool = False
    extra_info: bool = True
    async_dump: bool = False
    risk_level: str = "ALL"
    precision: str = "high"
    options: Mapping[str, Any] = field(default_factory=dict)

    def capture_options(self) -> dict[str, Any]:
        """The same as options of a capture."""
        modes = set(self.options.get("data_mode", ("all",)))
        names = tuple(self.options.get("list", ()))
        scope = tuple(self.options.get("scope", ()))
        options: dict[str, Any] = {
            "path": str(Path(self.dump_path) / OWN_FOLDER),
            "level": LEVELS[self.level],
            "steps": self.step,
            "ranks": self.rank,
            "phases": [mode for mode in ("forward", "backward") if mode in modes],
            "roles": [mode for mode in ("input", "output") if mode in modes],
            "tensors": self.task == "tensor",
            "checksum": self.summary_mode == "md5",
            "sketch": False,
            "stacks": self.extra_info,
            "overwrite": True,
        }
        if self.task == "overflow_check":
            options["overflows"] = self.options.get("overflow_nums", 1)
            options["acl_config"] = self.acl_config or None
        elif self.level == "L2":
            options["below"] = (scope or names)[0]
            options["acl_config"] = self.acl_config or None
            options["backward_input"] = self.options.get("backward_input", ()) or None
        else:
            options["only"] = names
            options["scope"] = scope or None
        return options

    @property
    def last_step(self) -> int | None:
        """The last step that is asked for; None when all are."""
        return max((item if isinstance(item, int) else item[1] for item in self.step), default=None)

    @property
    def summary_mode(self) -> str:
        return str(self.options.get("summary_mode", "statistics"))


def load_config(path: str | Path | None = None, **arguments: Any) -> DebuggerConfig:
    """The configuration of a file (the package's own where none is given) with arguments over it. Raises ConfigError."""
    where = str(path) if path is not None else "config.json"
    content = read_config_file(DEFAULT_CONFIG if path is None else path)
    given = {key: value for key, value in arguments.items() if value is not None}
    return read_config({**content, **given}, where)


def read_config(content: Mapping[str, Any], where: str = "config.json") -> DebuggerConfig:
    """Checks a whole configuration. Raises ConfigError with every problem, each with its place."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in content.items():
        name = _OLD_NAMES.get(key, key)
        if name in SECTIONS:
            sections[name] = _section(name, value, problems)
        elif name not in COMMON:
            problems.append(f"unknown key {key!r}.{did_you_mean(key, (*COMMON, *SECTIONS))}")
        elif value is not None:
            _read(COMMON[name], value, name, values, name, problems)
    if not values.get("dump_path"):
        problems.append("dump_path is missing: give the folder that the dump shall go to")
    task = values.get("task", "statistics")
    options = sections.get(task, {})
    problems += _together(values, task, options)
    if problems:
        raise ConfigError(problems, where)
    return DebuggerConfig(options=options, **values)


def _section(name: str, value: Any, problems: list[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"{name} must be a table of options, not {type(value).__name__}")
        return {}
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key not in SECTIONS[name]:
            problems.append(f"{name}: unknown key {key!r}.{did_you_mean(key, SECTIONS[name])}")
        elif item is not None:
            _read(SECTIONS[name][key], item, f"{name}.{key}", found, key, problems)
    return found


def _read(reader: Reader, value: Any, place: str, into: dict[str, Any], key: str, problems: list[str]) -> None:
    try:
        into[key] = reader(value)
    except ValueError as error:
        problems.append(f"{place} = {value!r}: {error}")


def _together(values: Mapping[str, Any], task: str, options: Mapping[str, Any]) -> list[str]:
    """Rules about keys that belong together."""
    problems = []
    level = values.get("level", "L1")
    scope, names = options.get("scope", ()), options.get("list", ())
    if task == "free_benchmark":
        if scope and names:
            problems.append("free_benchmark: scope and list exclude each other; keep one of them")
        if level != "L1":
            problems.append(f"level = {level!r}: free_benchmark works at level L1 only")
        if options.get("fuzz_device") == "cpu" and options.get("pert_mode") != "to_cpu":
            problems.append("free_benchmark.fuzz_device = 'cpu' goes with pert_mode 'to_cpu' only")
        if options.get("handler_type") == "fix" and options.get("if_preheat"):
            problems.append("free_benchmark.if_preheat: handler_type 'fix' knows no preheating")
        if options.get("handler_type") == "fix" and options.get("fuzz_stage") == "backward":
            problems.append("free_benchmark.fuzz_stage: handler_type 'fix' works on forward only")
    elif level == "L2" and task != "overflow_check":
        if task != "tensor":
            problems.append(f"task = {task!r}: level L2 goes with task tensor")
        if len(scope or names) != 1:
            problems.append(f"{task}.scope: level L2 needs exactly one API name, such as Tensor.__mul__.10.forward")
        elif (scope or names)[0].endswith(".backward") and not options.get("backward_input"):
            problems.append(f"{task}.backward_input must be configured when scope names a backward")
    elif scope and len(scope) != 2:
        problems.append(f"{task}.scope = {list(scope)!r}: must be two names, the first and the last call")
    return problems


# --- readers: a value of the right type, or a ValueError that says what is right ---------------------------------


def _one_of(*words: str) -> Reader:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"must be one of {', '.join(words)}.{did_you_mean(str(value), words)}")
        return value

    return read


def _task(value: Any) -> str:
    return str(_one_of(*TASKS)(_OLD_NAMES.get(value, value) if isinstance(value, str) else value))


def _flag(value: Any) -> bool:
    if isinstance(value, str) and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _strict_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("must be a text")
    return value


def _whole(least: int, *others: int) -> Reader:
    def read(value: Any) -> int:
        if type(value) is not int or (value < least and value not in others):
            raise ValueError(f"must be a whole number from {least} on{' or ' + str(others[0]) if others else ''}")
        return value

    return read


def _number_list(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple | range):
        raise ValueError("must be a list of whole numbers from 0 on, or ranges such as '2-4'")
    return numbers(value)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of names")
    return tuple(item for item in value if item)


def _paths(value: Any) -> tuple[str, ...]:
    return _names([value] if isinstance(value, str) else value)


def _data_mode(value: Any) -> tuple[str, ...]:
    modes = ("all", "forward", "backward", "input", "output")
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("must be a list")
    for place, item in enumerate(items):
        if item not in modes:
            raise ValueError(f"element {place} must be one of {', '.join(modes)}.{did_you_mean(str(item), modes)}")
    if "all" in items and len(items) > 1:
        raise ValueError("'all' stands alone")
    return tuple(items)


COMMON: dict[str, Reader] = {
    "task": _task,
    "dump_path": _text,
    "rank": _number_list,
    "step": _number_list,
    "level": _one_of(*LEVELS),
    "acl_config": _text,
    "seed": _whole(0),
    "is_deterministic": _strict_flag,
    "enable_dataloader": _strict_flag,
    "extra_info": _strict_flag,
    "async_dump": _strict_flag,
    "risk_level": _one_of("ALL", "CORE", "FOCUS"),
    "precision": _one_of("low", "high"),
}
_SELECT: dict[str, Reader] = {"scope": _names, "list": _names, "data_mode": _data_mode}
_ONLINE: dict[str, Reader] = {"nfs_path": _text, "host": _text, "port": _whole(0), "tls_path": _text}
SECTIONS: dict[str, dict[str, Reader]] = {
    "statistics": {**_SELECT, "summary_mode": _one_of("statistics", "md5")},
    "tensor": {
        **_SELECT,
        **_ONLINE,
        "summary_mode": _one_of("statistics", "md5"),
        "backward_input": _paths,
        "file_format": _one_of("npy", "bin"),
        "online_run_ut": _strict_flag,
    },
    "overflow_check": {"overflow_nums": _whole(1, -1), "check_mode": _one_of("aicore", "atomic", "all")},
    "free_benchmark": {
        "scope": _names,
        "list": _names,
        "fuzz_device": _one_of("npu", "cpu"),
        "pert_mode": _one_of("improve_precision", "add_noise", "no_change", "bit_noise", "change_value", "to_cpu"),
        "handler_type": _one_of("check", "fix"),
        "fuzz_level": _one_of("L1"),
        "fuzz_stage": _one_of("forward", "backward"),
        "if_preheat": _flag,
        "preheat_step": _whole(1),
        "max_sample": _whole(1),
    },
    "run_ut": {
        **_ONLINE,
        "white_list": _names,
        "black_list": _names,
        "error_data_path": _text,
        "is_online": _strict_flag,
        "rank_list": _number_list,
    },
}
assert {field.name for field in dataclasses.fields(DebuggerConfig)} == {*COMMON, "options"}
