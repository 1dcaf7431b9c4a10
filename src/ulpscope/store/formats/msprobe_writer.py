"""Writing a dump in the files of msprobe 26.2, so that its own tools read it.

Everything is written into a folder beside the asked one, which then takes its name: no half-written file is ever seen. While a
dump is being made, what it has more goes into the same files (`store/growing.py`): they are whole all the time.
Where the format lacks a place for something, a key that msprobe ignores holds it: `slot` of a gradient that stands in another
place than ours, `written` of a call that returns nothing, `error`, `is_recompute`; `notes` of the dump stand behind `data`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.model.dtypes import dtype_named
from ulpscope.model.errors import DumpError
from ulpscope.model.names import MODULE, OPTIMIZER, SAVED, call_text, is_asked
from ulpscope.model.records import CallId, CallRecord, Frame, PathStep, Phase, Role, Value
from ulpscope.store.dump import Dump
from ulpscope.store.files.pt import write_pt
from ulpscope.store.formats import msprobe_folder
from ulpscope.store.formats.msprobe_reader import LEVELS
from ulpscope.store.formats.msprobe_values import DEVICE, DICT_OUTPUT, NO_INDEX, STATISTICS, WRITTEN
from ulpscope.store.growing import GrowingJson, drop_spare

LEVEL_NAMES = {ours: theirs for theirs, ours in LEVELS.items()}
_WITH_TENSORS = ("tensor", "overflow_check")
_TASKS = ("statistics", *_WITH_TENSORS)
_SUMMARY_MODES = ("statistics", "md5")
_RESERVED = frozenset({"type", "dtype", "shape", "value", "requires_grad", "md5", "data_name", "error", "slot"})
_RETURNS_NOTHING = frozenset({"__setitem__"})
_MAX_NAME = 255
# A position this far behind its neighbours is a key, not a place in a list that would have to be filled.
_MAX_GAP = 4096
# msprobe refuses a dump with any text that begins with "-". A number too small for a float is JSON, and read as -inf.
_MINUS_INFINITY = "\0-inf"
_MINUS_INFINITY_NUMBER = "-1e999"


@dataclass(frozen=True, slots=True)
class _Leaf:
    content: Any


Tree = dict[PathStep, Any]  # of trees and leaves


def write_msprobe(
    dump: Dump, folder: Path, *, task: str = "statistics", level: str = "L1", summary_mode: str = "statistics"
) -> None:
    """Writes a dump into a new or empty folder. Raises DumpError when there is something in it already."""
    MsprobeFiles(dump, folder, task=task, level=level, summary_mode=summary_mode).write()


class MsprobeFiles:
    """The files of one dump: written as a whole, and while the dump is still being made, what it has more by then."""

    def __init__(
        self, dump: Dump, folder: Path, *, task: str, level: str, summary_mode: str, below: str | None = None
    ) -> None:
        if task not in _TASKS or summary_mode not in _SUMMARY_MODES or level not in (*LEVELS, "debug"):
            raise DumpError(f"no msprobe dump has task {task!r}, level {level!r} and summary_mode {summary_mode!r}")
        self.dump = dump
        self._folder = Path(folder).absolute()
        self._into = self._folder
        self._task = task
        self._level = level
        self._tensors = task in _WITH_TENSORS
        # The call of which only the kernels are wanted, not itself.
        self._below = below
        self._checksums = summary_mode == "md5"
        self._files: dict[str, GrowingJson] = {}
        self._kinds: set[bool] = set()  # whether there are saved values, and whether there are others
        self._names: set[str] = set()
        self._first: dict[tuple[Any, ...], str] = {}
        self._stacks: Counter[int] = Counter()
        self._has_optimizer = False

    def write(self, *, replace: bool = False) -> None:
        """Writes everything. With `replace` an earlier state of the files may be there, and is so until each of them is replaced."""
        draft = self._folder.with_name(f".{self._folder.name}.{os.getpid()}")
        with self._telling():
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            draft.mkdir(mode=0o750)
            draft.chmod(0o750)
            self._into = draft
            try:
                if self._tensors:
                    (draft / msprobe_folder.TENSORS).mkdir(mode=0o750)
                    (draft / msprobe_folder.TENSORS).chmod(0o750)
                for name, head, entries, tail in self._contents(0):
                    self._files[name] = GrowingJson(*head)
                    self._files[name].create(draft / name, entries, tail)
                if replace and self._folder.is_dir() and not self._folder.is_symlink():
                    self._move_over(draft)
                else:
                    draft.rename(self._folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            self._into = self._folder

    def add(self) -> bool:
        """Adds what the dump has more since it was read. False where all has to be written anew, from a dump that is opened anew."""
        first = len(self.dump)
        if not self.dump.follow():
            return False
        with self._telling():
            contents = list(self._contents(first))
            same = self._files.keys() == {name for name, *_ in contents}
            silent = same and all(self._files[name].says(tail) for name, *_, tail in contents)
            # Whoever has taken the files away meanwhile does not want them again.
            if len(self.dump) == first and (silent or not self._folder.is_dir()):
                return True
            there = all(file.is_at(self._folder / name) for name, file in self._files.items())
            if not there or not same:
                return False
            if self._tensors and not (self._folder / msprobe_folder.TENSORS).is_dir():
                return False
            for name, _, entries, tail in contents:
                if len(self.dump) > first or not self._files[name].says(tail):
                    self._files[name].add(self._folder / name, self._spare(name), entries, tail)
        return True

    def finish(self) -> None:
        """Nothing more comes. Stacks that came again in what was added are one entry then, as in files that were written at once."""
        with self._telling():
            for name in self._files:
                drop_spare(self._spare(name))
            if (
                self._stacks
                and max(self._stacks.values()) > 1
                and self._files[msprobe_folder.STACKS].is_at(self._folder / msprobe_folder.STACKS)
            ):
                self._stacks.clear()
                GrowingJson("{").create(self._spare(msprobe_folder.STACKS), self._stack_entries(0), "}\n")
                os.replace(self._spare(msprobe_folder.STACKS), self._folder / msprobe_folder.STACKS)

    def _spare(self, name: str) -> Path:
        return self._folder / f".{name}.{os.getpid()}"

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DumpError(f"cannot write {self._folder}: {error.strerror or error}; choose a new folder") from error

    def _move_over(self, draft: Path) -> None:
        """Puts new files in the places of earlier ones. What names others comes last, and what nobody names any more goes."""
        tensors = msprobe_folder.TENSORS
        kept = {tensors, *self._files}
        if self._tensors:
            (self._folder / tensors).mkdir(mode=0o750, exist_ok=True)
            kept |= {f"{tensors}/{name}" for name in os.listdir(draft / tensors)}
        for name in sorted(kept - {tensors, *self._files}) + list(self._files):
            os.replace(draft / name, self._folder / name)
        shutil.rmtree(draft)
        for path in [*self._folder.iterdir(), *(self._folder / tensors).glob("*")]:
            if str(path.relative_to(self._folder)) not in kept:
                path.unlink()

    def _contents(self, first: int) -> Iterator[tuple[str, tuple[str, ...], Iterator[str], str]]:
        """The files for the calls from `first` on: name, how it begins, entries, how it ends. What names others comes last."""
        ids = [self.dump.nth(place).id for place in range(first, len(self.dump))] if first else self.dump.ids()
        saved = [place for place, call in enumerate(ids, first) if call.kind == SAVED]
        places = [
            place
            for place, call in enumerate(ids, first)
            if call.kind not in (OPTIMIZER, SAVED) and not self._skips(call)
        ]
        self._kinds |= {True for _ in saved[:1]} | {False for _ in places[:1]}
        yield msprobe_folder.STACKS, ("{",), self._stack_entries(first), "}\n"
        yield msprobe_folder.PARENTS, ("{",), self._parent_entries(first), "}\n"
        notes = f', "notes": {_text(list(self.dump.manifest.notes))}' if self.dump.manifest.notes else ""
        if False in self._kinds or not self._kinds:
            yield msprobe_folder.FILES[0], self._head(self._level), self._call_entries(places), f"\n}}{notes}}}\n"
            notes = ""
        if True in self._kinds:
            yield msprobe_folder.FILES[1], self._head("debug"), self._call_entries(saved), f"\n}}{notes}}}\n"

    def _head(self, level: str) -> tuple[str, ...]:
        tensors = str(self._folder / msprobe_folder.TENSORS) if self._tensors else None
        header = {"task": self._task, "level": level, "framework": "pytorch", "dump_data_dir": tensors}
        return _text(header)[:-1] + ', "data": {', "\n", ",\n"

    def _call_entries(self, places: list[int]) -> Iterator[str]:
        # Call after call: a dump may be larger than memory.
        for place in places:
            call = self.dump.nth(place)
            yield f"{_text(call_text(call.id))}: {_text(self.entry(call))}"

    def _stack_entries(self, first: int) -> Iterator[str]:
        names: dict[int, list[str]] = {}
        samples: dict[int, CallRecord] = {}
        for call in self._calls(first):
            if call.stack is not None and call.id.kind != OPTIMIZER:
                names.setdefault(call.stack, []).append(call_text(call.id))
                samples.setdefault(call.stack, call)
        for stack, calls in names.items():
            frames = [_frame(frame) for frame in self.dump.stack(samples[stack])]
            yield f"{_text(str(self._stacks.total()))}: {_text([calls, frames])}"
            self._stacks[stack] += 1

    def _parent_entries(self, first: int) -> Iterator[str]:
        if self._level == "L1":
            return
        found: dict[str, str | None] = {}
        for call in self._calls(first):
            if call.id.kind == OPTIMIZER:
                found[OPTIMIZER.lower()] = None
            elif call.id.kind != SAVED and call.id.phase is not Phase.PARAMETERS_GRAD:
                above = None if self._below is not None else self.dump.parent(call)
                inside = above is not None and above.kind == OPTIMIZER
                if inside:
                    found.setdefault(OPTIMIZER.lower(), None)
                found[call_text(call.id)] = None if above is None else OPTIMIZER.lower() if inside else call_text(above)
        if self._has_optimizer:
            found.pop(OPTIMIZER.lower(), None)
        self._has_optimizer |= OPTIMIZER.lower() in found
        for name, above_name in found.items():
            yield f"{_text(name)}: {_text(above_name)}"

    def _calls(self, first: int) -> Iterator[CallRecord]:
        return (call for call in map(self.dump.nth, range(first, len(self.dump))) if not self._skips(call.id))

    def _skips(self, call: CallId) -> bool:
        return self._below is not None and is_asked(self._below, call)

    # --- one call -----------------------------------------------------------------------------------------------

    def entry(self, call: CallRecord) -> Any:
        """What dump.json says of a call."""
        if call.id.kind == SAVED:
            return self._saved(call)
        if call.id.phase is Phase.PARAMETERS_GRAD:
            return {".".join(map(str, _path(value))): [self._leaf(call, value, _path(value))] for value in call.values}
        entry = self._backward(call) if call.id.phase is Phase.BACKWARD else self._forward(call)
        if call.recomputed:
            entry["is_recompute"] = True
        if call.error is not None:
            entry["error"] = call.error
        return entry

    def _forward(self, call: CallRecord) -> dict[str, Any]:
        trees: dict[str, Tree] = {"input_args": {}, "input_kwargs": {}, "output": {}, "parameters": {}}
        wrapped = False
        for value in call.values:
            path = _path(value)
            if value.slot.role is Role.INPUT:
                section = "input_args" if isinstance(path[0], int) else "input_kwargs"
                prefix: tuple[PathStep, ...] = ("input" if section == "input_args" else "kwargs",)
            else:
                section = value.slot.role.value
                prefix = (section,)
            if section == "output" and isinstance(path[0], str):
                path, wrapped = (0, *path), True
            _plant(trees[section], path, self._leaf(call, value, (*prefix, *path)))
        entry: dict[str, Any] = {
            "input_args": _grown(trees["input_args"], empty=[]),
            "input_kwargs": _grown(trees["input_kwargs"], empty={}),
            "output": _grown(trees["output"], empty=[]),
        }
        if call.id.kind == MODULE or trees["parameters"]:
            entry["parameters"] = _grown(trees["parameters"], empty={})
        if wrapped:
            entry[DICT_OUTPUT] = True
        if call.id.name in _RETURNS_NOTHING and entry["output"]:
            entry[WRITTEN], entry["output"] = entry["output"], [None]
        return entry

    def _backward(self, call: CallRecord) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        for role in (Role.INPUT, Role.OUTPUT):
            values = [value for value in call.values if value.slot.role is role]
            numbers = self._numbers(call, role)
            tree: Tree = {place: _Leaf(None) for place in numbers.values()}
            # What has no position follows behind, such as the gradients of keyword arguments.
            positions = [step for value in values if isinstance(step := _path(value)[0], int)]
            end = 1 + max([*numbers.values(), *positions], default=-1)
            behind: dict[PathStep, int] = {}
            for value in values:
                path = place = _path(value)
                if path in numbers:
                    place = (numbers[path],)
                elif isinstance(path[0], str):
                    place = (end + behind.setdefault(path[0], len(behind)), *path[1:])
                leaf = self._leaf(call, value, (role.value, *place))
                if place != path and leaf is not None:
                    leaf["slot"] = list(path)
                _plant(tree, place, leaf)
            entry[role.value] = _grown(tree, empty=[])
        return entry

    def _numbers(self, call: CallRecord, role: Role) -> dict[tuple[PathStep, ...], int]:
        """msprobe counts the tensors of a module that need a gradient, however nested: positional arguments, or results."""
        forward = None if call.origin is None or call.id.kind != MODULE else self.dump.by_seq(call.origin)
        if forward is None:
            return {}
        side = Role.OUTPUT if role is Role.INPUT else Role.INPUT
        paths = [_path(value) for value in forward.values if value.slot.role is side and value.requires_grad]
        return {path: n for n, path in enumerate(p for p in paths if side is Role.OUTPUT or isinstance(p[0], int))}

    def _saved(self, call: CallRecord) -> Any:
        if len(call.values) == 1 and _path(call.values[0]) == (0,):
            return self._leaf(call, call.values[0], ())
        tree: Tree = {}
        for value in call.values:
            _plant(tree, _path(value), self._leaf(call, value, _path(value)))
        return _grown(tree, empty=[])

    # --- one value ----------------------------------------------------------------------------------------------

    def _leaf(self, call: CallRecord, value: Value, place: tuple[PathStep, ...]) -> dict[str, Any] | None:
        if not value.is_tensor:
            if value.type == "NoneType":
                return None
            scalar = -math.inf if value.type == "float" and value.scalar == "-inf" else value.scalar
            if value.type == DEVICE and isinstance(scalar, str) and ":" not in scalar:
                scalar += NO_INDEX
            leaf = {"type": value.type, "value": _plain(scalar)}
            return leaf if value.error is None else {**leaf, "error": value.error}
        stats, is_bool = value.stats, value.dtype == "torch.bool"
        known: list[float | int | None] = [None] * 4
        if stats is not None:
            # The Norm of a tensor without dimensions is its element there, sign and all.
            known = [stats.max, stats.min, stats.mean, stats.norm if value.shape else stats.max]
        if is_bool:
            known = [*(None if number is None else bool(number) for number in known[:2]), None, None]
        leaf = {"type": value.type, "dtype": value.dtype, "shape": list(value.shape or ())}
        leaf |= {key: _plain(number) for key, number in zip(STATISTICS, known, strict=True)}
        if value.requires_grad is not None:
            leaf["requires_grad"] = value.requires_grad
        if self._checksums and value.checksum is not None:
            leaf["md5"] = f"{value.checksum:08x}"
        if self._tensors and value.payload is not None:
            leaf["data_name"] = self._store(call.id, value, place)
        if value.error is not None:
            leaf["error"] = value.error
        if value.parts:  # a key that msprobe's own readers pass over
            leaf["parts"] = {name: self._leaf(call, part, (*place, name)) for name, part in value.parts}
        more = {
            key: _plain(item) for key, item in value.extra.items() if key not in _RESERVED and key not in STATISTICS
        }
        return {**more, **leaf} if more else leaf

    def _store(self, call: CallId, value: Value, place: tuple[PathStep, ...]) -> str:
        """Writes the elements of a value, or a link to an equal one; returns the name of the file."""
        name = self._file_name(".".join([call_text(call), *map(str, place)]))
        path = self._into / msprobe_folder.TENSORS / name
        element = str(value.extra.get("stored_dtype", value.dtype))
        shape = tuple(value.extra.get("stored_shape", value.shape or ()))
        key = (value.payload, element, shape)
        first = self._first.get(key)
        if first is not None:
            with contextlib.suppress(OSError):  # a file system without links, or too many of them
                os.link(path.with_name(first), path)
                return name
        bits = np.ascontiguousarray(self.dump.load_bits(value)).reshape(-1)
        write_pt(path, bits.view(np.uint8).data if bits.size else b"", dtype_named(element), shape)
        self._first[key] = name
        return name

    def _file_name(self, name: str) -> str:
        """A name that any file system takes, used once: changed and long ones end in a hash of the whole."""
        plain = "".join("_" if letter in "/\\" or not letter.isprintable() else letter for letter in name)
        plain = plain.replace("..", "._")
        if plain != name or len(plain.encode()) + len(".pt") > _MAX_NAME or f"{plain}.pt" in self._names:
            tag = hashlib.sha256(f"{len(self._names)} {name!r}".encode()).hexdigest()[:12]
            plain = plain.encode()[: _MAX_NAME - 20].decode(errors="ignore") + f".{tag}"
        self._names.add(f"{plain}.pt")
        return f"{plain}.pt"


# --- trees of slots into nested JSON ----------------------------------------------------------------------------


def _path(value: Value) -> tuple[PathStep, ...]:
    """The path of a value; a damaged dump may have none, or steps of any kind."""
    return tuple(step if isinstance(step, int | str) else str(step) for step in value.slot.path) or (0,)


def _plant(tree: Tree, path: tuple[PathStep, ...], leaf: Any) -> None:
    for depth, step in enumerate(path[:-1]):
        below = tree.setdefault(step, {})
        if isinstance(below, _Leaf):
            # A value and something inside of it: no JSON has both, so the inner one stands beside it.
            path = (*path[:depth], ".".join(map(str, path[depth:])))
            break
        tree = below
    tree[path[-1]] = _Leaf(leaf)


def _grown(tree: Tree | _Leaf, *, empty: Any) -> Any:
    """Nested lists and dictionaries: positions make a list, with null in its gaps; anything else makes a dictionary."""
    if isinstance(tree, _Leaf):
        return tree.content
    if not tree:
        return empty
    steps = [step for step in tree if isinstance(step, int)]
    if len(steps) == len(tree) and min(steps) >= 0 and max(steps) < len(steps) + _MAX_GAP:
        return [_grown(tree[step], empty=None) if step in tree else None for step in range(max(steps) + 1)]
    return {str(step): _grown(below, empty=None) for step, below in tree.items()}


def _plain(item: Any) -> Any:
    """JSON has no nan and no infinities: they are texts, and -inf what `_text` makes a number."""
    if isinstance(item, float):
        return item if math.isfinite(item) else "nan" if math.isnan(item) else "inf" if item > 0 else _MINUS_INFINITY
    if isinstance(item, list | tuple):
        return [_plain(each) for each in item]
    return {key: _plain(each) for key, each in item.items()} if isinstance(item, dict) else item


def _text(content: Any) -> str:
    # Inside of a longer text the quotes would be escaped, so only the whole word is found.
    return json.dumps(content, allow_nan=False).replace(json.dumps(_MINUS_INFINITY), _MINUS_INFINITY_NUMBER)


def _frame(frame: Frame) -> str:
    return f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.text}"
