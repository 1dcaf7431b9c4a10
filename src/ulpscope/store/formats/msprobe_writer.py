"""Writing a dump in the files of msprobe 26.2, so that its own tools read it.

Everything is written into a folder beside the asked one, which then takes its name: no half-written file is ever seen.
Where the format lacks a place for something, a key that msprobe ignores holds it: `slot` of a gradient that stands in another
place than ours, `written` of a call that returns nothing, `error`, `is_recompute`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ulpscope.dtypes import dtype_named
from ulpscope.errors import DumpError
from ulpscope.naming import MODULE, OPTIMIZER, SAVED, call_text
from ulpscope.records import CallId, CallRecord, PathStep, Phase, Role, Value
from ulpscope.store import layout
from ulpscope.store.formats.msprobe_reader import LEVELS
from ulpscope.store.formats.msprobe_values import DEVICE, DICT_OUTPUT, NO_INDEX, STATISTICS, WRITTEN
from ulpscope.store.formats.pt import write_pt
from ulpscope.store.reader import Dump

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
    if task not in _TASKS or summary_mode not in _SUMMARY_MODES or level not in (*LEVELS, "debug"):
        raise DumpError(f"no msprobe dump has task {task!r}, level {level!r} and summary_mode {summary_mode!r}")
    folder = Path(folder).absolute()
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir(mode=0o750)
        draft.chmod(0o750)
        try:
            _Files(dump, draft, folder, task, summary_mode).write(level)
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise DumpError(f"cannot write {folder}: {error.strerror}; choose a new folder") from error


class _Files:
    """One dump on its way into a folder."""

    def __init__(self, dump: Dump, draft: Path, folder: Path, task: str, summary_mode: str) -> None:
        self._dump = dump
        self._draft = draft
        self._folder = folder
        self._task = task
        self._tensors = task in _WITH_TENSORS
        self._checksums = summary_mode == "md5"
        self._names: set[str] = set()
        self._first: dict[tuple[Any, ...], str] = {}

    def write(self, level: str) -> None:
        if self._tensors:
            (self._draft / layout.MSPROBE_TENSORS).mkdir(mode=0o750)
            (self._draft / layout.MSPROBE_TENSORS).chmod(0o750)
        ids = self._dump.ids()
        places = [number for number, call in enumerate(ids) if call.kind not in (OPTIMIZER, SAVED)]
        saved = [number for number, call in enumerate(ids) if call.kind == SAVED]
        if places or not saved:
            self._write_data(layout.MSPROBE[0], level, places)
        if saved:
            self._write_data(layout.MSPROBE[1], "debug", saved)
        self._write_json("stack.json", _stacks(self._dump))
        self._write_json("construct.json", {} if level == "L1" else _construct(self._dump))

    def _write_data(self, name: str, level: str, places: Iterable[int]) -> None:
        tensors = str(self._folder / layout.MSPROBE_TENSORS) if self._tensors else None
        header = {"task": self._task, "level": level, "framework": "pytorch", "dump_data_dir": tensors}
        with self._new(name) as file:
            # Call after call: a dump may be larger than memory.
            file.write(_text(header)[:-1] + ', "data": {')
            separator = "\n"
            for place in places:
                call = self._dump.nth(place)
                file.write(f"{separator}{_text(call_text(call.id))}: {_text(self._entry(call))}")
                separator = ",\n"
            file.write("\n}}\n")

    def _write_json(self, name: str, content: Any) -> None:
        with self._new(name) as file:
            file.write(_text(content) + "\n")

    def _new(self, name: str) -> TextIO:
        descriptor = os.open(self._draft / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        os.fchmod(descriptor, 0o640)
        return os.fdopen(descriptor, "w", encoding="utf-8")

    # --- one call -----------------------------------------------------------------------------------------------

    def _entry(self, call: CallRecord) -> Any:
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
        forward = None if call.origin is None or call.id.kind != MODULE else self._dump.by_seq(call.origin)
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
        more = {
            key: _plain(item) for key, item in value.extra.items() if key not in _RESERVED and key not in STATISTICS
        }
        return {**more, **leaf} if more else leaf

    def _store(self, call: CallId, value: Value, place: tuple[PathStep, ...]) -> str:
        """Writes the elements of a value, or a link to an equal one; returns the name of the file."""
        name = self._file_name(".".join([call_text(call), *map(str, place)]))
        path = self._draft / layout.MSPROBE_TENSORS / name
        element = str(value.extra.get("stored_dtype", value.dtype))
        shape = tuple(value.extra.get("stored_shape", value.shape or ()))
        key = (value.payload, element, shape)
        first = self._first.get(key)
        if first is not None:
            with contextlib.suppress(OSError):  # a file system without links, or too many of them
                os.link(path.with_name(first), path)
                return name
        bits = np.ascontiguousarray(self._dump.load_bits(value)).reshape(-1)
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


# --- stacks and parents -----------------------------------------------------------------------------------------


def _stacks(dump: Dump) -> dict[str, Any]:
    names: dict[int, list[str]] = {}
    samples: dict[int, CallRecord] = {}
    for call in dump.calls():
        if call.stack is not None and call.id.kind != OPTIMIZER:
            names.setdefault(call.stack, []).append(call_text(call.id))
            samples.setdefault(call.stack, call)
    return {
        str(number): [calls, list(_frames(dump, samples[stack]))] for number, (stack, calls) in enumerate(names.items())
    }


def _frames(dump: Dump, call: CallRecord) -> Iterator[str]:
    for frame in dump.stack(call):
        yield f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.text}"


def _construct(dump: Dump) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for call in dump.calls():
        if call.id.kind == OPTIMIZER:
            found[OPTIMIZER.lower()] = None
        elif call.id.kind != SAVED and call.id.phase is not Phase.PARAMETERS_GRAD:
            above = dump.parent(call)
            inside = above is not None and above.kind == OPTIMIZER
            if inside:
                found.setdefault(OPTIMIZER.lower(), None)
            found[call_text(call.id)] = None if above is None else OPTIMIZER.lower() if inside else call_text(above)
    return found
