"""msprobe's config.json: every key of its manuals, checked all at once, and translated into a capture.

A key is a row in a table with the function that reads it; unknown keys are errors that name the nearest one. The tool ships one file
with the sections of all tasks, so only the section of the chosen task is judged; what is odd elsewhere, or has no effect, is said in one line.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulpscope.model.errors import ConfigError, did_you_mean
from ulpscope.model.names import KINDS
from ulpscope.model.options import numbers, read_config_file

_log = logging.getLogger(__name__)
DEFAULT_CONFIG = Path(__file__).with_name("config.json")
OWN_FOLDER = ".ulpscope"  # our own store of a run that is under way, or was killed
LEVELS = {"L0": "module", "L1": "op", "L2": "kernel", "mix": "mix", "debug": "module"}
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
    seed: int | None = 1234
    dropout: str = "off"
    is_deterministic: bool = False
    enable_dataloader: bool = False
    extra_info: bool = True
    async_dump: bool = False
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
            "checksum": self.summary_mode != "statistics",
            "sketch": False,
            "stacks": self.extra_info,
            "overwrite": True,
        }
        if self.task == "overflow_check":
            options["overflows"] = self.options.get("overflow_nums", 1)
            options["poles"] = True
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
        mode = str(self.options.get("summary_mode", "statistics"))
        return "md5" if mode == "xor" else mode


def load_config(path: str | Path | None = None, **arguments: Any) -> DebuggerConfig:
    """The configuration of a file (the package's own where none is given) with arguments over it. Raises ConfigError."""
    where = str(path) if path is not None else "config.json"
    content = read_config_file(DEFAULT_CONFIG if path is None else path)
    given = {key: value for key, value in arguments.items() if value is not None or key == "seed"}
    return read_config({**content, **given}, where)


def read_config(content: Mapping[str, Any], where: str = "config.json") -> DebuggerConfig:
    """Checks a whole configuration. Raises ConfigError with every problem, each with its place; the rest is one warning."""
    problems: list[str] = []
    notes: list[str] = []
    # 26.x seeds nothing and leaves dropout alone.
    values: dict[str, Any] = {"seed": None, "dropout": "keep"} if _is_of_26(content) else {}
    sections: dict[str, Any] = {}
    for key, value in content.items():
        name = _OLD_NAMES.get(key, key)
        if name in SECTIONS:
            sections[name] = value
        elif name in COMMON:
            if value is not None or name == "seed":
                _read(COMMON[name], value, name, values, problems, notes)
        elif name in _IDLE:
            _read_idle(name, value, name, problems, notes)
        else:
            near = did_you_mean(key, (*COMMON, *_OLD_NAMES, *SECTIONS))
            if isinstance(value, Mapping) and not near:
                notes.append(f"{key} is the section of no task, and not read")
            else:
                problems.append(f"unknown key {key!r}.{near}")
    task = values.get("task", "statistics")
    if not values.get("dump_path") and task != "run_ut":
        problems.append("dump_path is missing: give the folder that the dump shall go to")
    options = _section(task, sections.pop(task, None), problems, notes)
    for name, value in sections.items():
        wrong: list[str] = []
        _section(name, value, wrong, [])
        notes += [f"{problem.rstrip('.')} (not read: the task is {task!r})" for problem in wrong]
    problems += _together(values, task, options)
    _tell(problems, notes, where)
    return DebuggerConfig(options=options, **values)


def read_options(name: str, value: Any, where: str) -> dict[str, Any]:
    """The options of one section alone. Raises ConfigError."""
    problems: list[str] = []
    notes: list[str] = []
    found = _section(name, value, problems, notes)
    _tell(problems, notes, where)
    return found


def _tell(problems: list[str], notes: list[str], where: str) -> None:
    if problems:
        raise ConfigError(problems, where)
    if notes:
        _log.warning("%s: %s", where, "; ".join(notes))


def _section(name: str, value: Any, problems: list[str], notes: list[str]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"{name} must be a table of options, not {type(value).__name__}")
        return {}
    found: dict[str, Any] = {}
    known = SECTIONS[name]
    for key, item in value.items():
        place = f"{name}.{key}"
        if key in known:
            if item is not None:
                _read(known[key], item, place, found, problems, notes)
        elif key in _IDLE:
            _read_idle(key, item, place, problems, notes)
        elif any(key in others for others in SECTIONS.values()) and item not in (None, *_EMPTY):
            notes.append(f"{place} has no effect: it belongs to another task")
        else:
            problems.append(f"{name}: unknown key {key!r}.{did_you_mean(key, known)}")
    if found.get("summary_mode") == "xor":
        notes.append(f"{name}.summary_mode = 'xor': the checksum is that of md5, a CRC-32")
    return found


def _read_idle(key: str, value: Any, place: str, problems: list[str], notes: list[str]) -> None:
    """A key that is known and does nothing here: nothing is lost where it asks for nothing."""
    reader, usual = _IDLE[key]
    if value is not None:
        _read(reader, value, place, {}, problems, notes)
        if key in _REFUSED and value not in (usual, *_EMPTY) and not any(each.startswith(place) for each in problems):
            problems.append(f"{place} = {value!r}: {_REFUSED[key]}")
        elif value not in (usual, *_EMPTY):
            notes.append(f"{place} = {value!r} has no effect here")


def _is_of_26(content: Mapping[str, Any]) -> bool:
    """Whether there is a key, a task or a word that no msprobe before 26.0 reads."""
    if str(content.get("task")) in _SINCE_26 or not _SINCE_26.isdisjoint(content):
        return True
    sections = [value for key, value in content.items() if key in SECTIONS and isinstance(value, Mapping)]
    return any(section.get("summary_mode") == "xor" or not _SINCE_26.isdisjoint(section) for section in sections)


def _read(reader: Reader, value: Any, place: str, into: dict[str, Any], problems: list[str], notes: list[str]) -> None:
    key = place.rpartition(".")[2]
    try:
        into[key] = reader(value)
    except ValueError as error:
        if value in _EMPTY:
            notes.append(f"{place} is empty and not used")
        else:
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
        mode = options.get("pert_mode", "improve_precision")
        if options.get("handler_type") == "fix" and mode not in _FIXING:
            # The second sentence is MindSpore's own.
            problems.append(
                f"free_benchmark.pert_mode = {mode!r}: handler_type 'fix' works with {' and '.join(_FIXING)}; of MindSpore, "
                f"pert_mode must be improve_precision or empty when handler_type is fix, but got {mode}."
            )
        if options.get("handler_type") == "fix" and options.get("if_preheat"):
            problems.append("free_benchmark.if_preheat: handler_type 'fix' knows no preheating")
        if options.get("handler_type") == "fix" and options.get("fuzz_stage") == "backward":
            problems.append("free_benchmark.fuzz_stage: handler_type 'fix' works on forward only")
    elif level == "L2" and task != "overflow_check":
        if task != "tensor":
            problems.append(f"task = {task!r}: level L2 goes with task tensor")
        if len(scope or names) != 1:
            problems.append(f"{task}.scope: level L2 needs exactly one API name, such as Tensor.__mul__.10.forward")
    elif scope and len(scope) != 2:
        problems.append(f"{task}.scope = {list(scope)!r}: must be two names, the first and the last call")
    elif level in _SPELT:
        shape, example = _SPELT[level]
        problems += [
            f"{task}.scope: {name!r} names no call of level {level}; {example}" for name in scope if not shape(name)
        ]
    return problems


# --- readers: a value of the right type, or a ValueError that says what is right ---------------------------------


def _one_of(*words: str) -> Reader:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"must be one of {', '.join(words)}.{did_you_mean(str(value), words)}")
        return value

    return read


def _task(value: Any) -> str:
    return str(_one_of(*SECTIONS)(_OLD_NAMES.get(value, value) if isinstance(value, str) else value))


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


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise ValueError("must be a whole number from 0 to 4294967295, or null to leave the generators alone")
    return value


def _list(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list")
    return tuple(value)


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("must be a table of options")
    return value


def _slices(value: Any) -> tuple[Any, ...]:
    if any(type(number) is not int for item in _list(value) for number in _table(item).values()):
        raise ValueError("must be a list of tables of whole numbers, such as {'dim': 0, 'begin': 0, 'end': 8}")
    return tuple(value)


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
    "seed": _seed,
    "dropout": _one_of("off", "keep"),
    "is_deterministic": _strict_flag,
    "enable_dataloader": _strict_flag,
    "extra_info": _strict_flag,
    "async_dump": _strict_flag,
}
_SELECT: dict[str, Reader] = {"scope": _names, "list": _names, "data_mode": _data_mode}
_ONLINE: dict[str, Reader] = {"nfs_path": _text, "host": _text, "port": _whole(0, -1), "tls_path": _text}
SECTIONS: dict[str, dict[str, Reader]] = {
    "statistics": {**_SELECT, "summary_mode": _one_of("statistics", "md5", "xor")},
    "tensor": {
        **_SELECT,
        **_ONLINE,
        "summary_mode": _one_of("statistics", "md5", "xor"),
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
    "structure": _SELECT,
    "grad_probe": {"grad_level": _one_of("L0", "L1", "L2"), "param_list": _names, "bounds": _list},
    "exception_dump": _SELECT,
    "diff_check": {},
    "nan_check": _SELECT,
}
# Keys that msprobe reads and nothing here does: how they are read, and the word that asks for what is done anyway.
_IDLE: dict[str, tuple[Reader, Any]] = {
    "risk_level": (_one_of("ALL", "CORE", "FOCUS"), "ALL"),
    "precision": (_one_of("low", "high"), "high"),
    "device": (_one_of("host", "device"), "host"),
    "dump_enable": (_strict_flag, None),
    "custom_op_namespaces": (_names, None),
    "load": (_table, None),
    "tensor_list": (_names, None),
    "slice": (_slices, None),
    "request_id": (_text, None),
    "bench_path": (_text, None),
    "diff_nums": (_whole(1, -1), None),
    "online_run_ut_recompute": (_strict_flag, False),
}
# Of those, what would be another dump than the one asked for.
_REFUSED = {
    "risk_level": "APIs are not graded here; name those that are wanted in list, or leave the key out to record all",
    "precision": "statistics are always exact, and cost no more; leave the key out",
}
_FIXING = ("improve_precision", "to_cpu")
_API_NAME = re.compile(r"[A-Za-z_]\w*\..+\.\d+(\.(forward|backward))?")
# How an end of scope is spelt, where that can be known: a module may have any name.
_SPELT: dict[str, tuple[Callable[[str], object], str]] = {
    "L1": (
        lambda name: _API_NAME.fullmatch(name) and not name.startswith(("Module.", "Cell.")),
        "a name looks like Functional.conv2d.1.forward",
    ),
    "L0": (
        lambda name: not (_API_NAME.fullmatch(name) and name.partition(".")[0] in KINDS),
        "a name looks like Module.layer1.Conv2d.forward.0",
    ),
}
_EMPTY: tuple[Any, ...] = ("", [], {}, ())
_SINCE_26 = frozenset(
    {"extra_info", "dump_enable", "risk_level", "custom_op_namespaces", "load", "acc_check", "diff_check", "nan_check"}
    | {"bench_path", "diff_nums", "slice", "request_id"}
)
assert {field.name for field in dataclasses.fields(DebuggerConfig)} == {*COMMON, "options"}
