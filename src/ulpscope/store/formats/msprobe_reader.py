"""Reading a dump of msprobe: dump.json, debug.json, stack.json, construct.json and the tensors beside them.

Versions 1.0.3, 8.2.1 and 26.2, and what `msprobe_writer` writes. Calls are in the order of the file. What the files do
not say stays unknown: statistics are `ToldStats`, null is None.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ulpscope.dtypes import DTYPES, DType
from ulpscope.errors import DumpError
from ulpscope.naming import MODULE, OPTIMIZER, SAVED, parse_call
from ulpscope.records import (
    CallId,
    CallRecord,
    Frame,
    Manifest,
    PathStep,
    Payload,
    Phase,
    Role,
    Slot,
    Stats,
    Value,
    told_stats,
)
from ulpscope.store import layout
from ulpscope.store.formats.json_entries import JsonEntries
from ulpscope.store.formats.pt import read_pt
from ulpscope.store.reader import Dump

LEVELS = {"L0": "module", "L1": "op", "mix": "mix", "L2": "kernel"}
STATISTICS = ("Max", "Min", "Mean", "Norm")
# The sections of a call, the role of their values, and whether positions or keys are expected there.
# msprobe wraps a dictionary that a module returns into a list; ours says so, to read it back as it was.
DICT_OUTPUT = "dict_output"
# What a call that returns nothing wrote; ours calls it the output.
WRITTEN = "written"
# A device without a number is cpu:None there.
DEVICE, NO_INDEX = "torch.device", ":None"
_SECTIONS = {
    "input_args": Role.INPUT,
    "input_kwargs": Role.INPUT,
    "input": Role.INPUT,
    "output": Role.OUTPUT,
    WRITTEN: Role.OUTPUT,
    "parameters": Role.PARAMETERS,
}
_LEAF_KEYS = frozenset(
    {"type", "dtype", "shape", "value", "requires_grad", "md5", "data_name", "error", "slot", *STATISTICS}
)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FRAME = re.compile(r"File (.*), line (\d+), in (.*?), ?\n ?(.*)", re.DOTALL)
_CRC = re.compile(r"[0-9a-fA-F]{8}")
_PHASES = {phase.value: phase for phase in Phase}
_MAX_JSON = 2 << 30
_MAX_DEPTH = 64


class MsprobeDump(Dump):
    """One step of one rank in the files of msprobe, with the face of a native dump. Open it with `open_dump`."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.recovered = 0
        self._files = [
            JsonEntries(self.folder / name, "data") for name in layout.MSPROBE if (self.folder / name).is_file()
        ]
        if not self._files:
            raise DumpError(f"{folder} is not a dump of msprobe: it has no {layout.MSPROBE[0]}")
        self._names = [name for file in self._files for name in file.names]
        self._ids = [self._parsed_id(file.path.name, name) for file in self._files for name in file.names]
        self._parents = self._texts("construct.json")
        self._stacks, self._stack_of = self._read_stacks()
        self._tensors, self._tensor_bytes = self._list_tensors()
        self._payload_names: list[str] = []
        self._payload_numbers: dict[tuple[int, str], int] = {}
        self.manifest = self._manifest(self._files[0].header)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def ending(self) -> str:
        """Always "complete": msprobe does not say whether a step was finished."""
        return "complete"

    def calls(self) -> Iterator[CallRecord]:
        for number in range(len(self)):
            yield self._record(number)

    def ids(self) -> list[CallId]:
        return list(self._ids)

    def modules(self) -> list[str]:
        above = (self._id_named(self._parents.get(name)) for name in self._names)
        return [_module_of(call) for call in above]

    def nth(self, place: int) -> CallRecord:
        return self._record(range(len(self))[place])

    @cached_property
    def value_count(self) -> int:
        return sum(len(call.values) for call in self.calls())

    def parent(self, call: CallRecord) -> CallId | None:
        """Who called it, as construct.json says; None for the root, and below the optimizer, which has no name there."""
        return self._id_named(self._parents.get(self._names[call.seq]))

    def stack(self, call: CallRecord) -> list[Frame]:
        return [] if call.stack is None else [_frame(text) for text in self._stacks[call.stack]]

    def sketch(self, value: Value) -> NDArray[np.float32] | None:
        """None: msprobe has no sketches."""
        return None

    # --- files --------------------------------------------------------------------------------------------------

    def _entry(self, number: int) -> tuple[str, Any]:
        """The file of a call, and what it says of the call."""
        for file in self._files:
            if number < len(file):
                return file.path.name, file[number]
            number -= len(file)
        raise IndexError(number)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if path.is_symlink():
            raise DumpError(f"{path} is a symbolic link; a dump holds plain files only")
        try:
            size = path.stat().st_size
            if size > _MAX_JSON:
                raise DumpError(f"{path} has {size} bytes; at most {_MAX_JSON} are read")
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DumpError(f"{path} cannot be read: {error}") from error
        except RecursionError:
            raise DumpError(f"{path} cannot be read: it is nested too deep") from None
        if not isinstance(content, dict):
            raise DumpError(f"{path} is not a file of msprobe: it holds no object")
        return content

    def _texts(self, name: str) -> dict[str, str]:
        """The texts of a JSON object whose items are texts or null; nothing where there is no such file."""
        if not (self.folder / name).exists():
            return {}
        content = self._json(name)
        for key, item in content.items():
            if item is not None and not isinstance(item, str):
                self._refuse(name, key, "is neither a text nor null")
        return {key: item for key, item in content.items() if item is not None}

    def _read_stacks(self) -> tuple[list[list[str]], dict[str, int]]:
        """The stacks, and which call has which. One for each call in 1.0.3; later shared by the calls in a list."""
        name = "stack.json"
        stacks: list[list[str]] = []
        found: dict[str, int] = {}
        for key, item in (self._json(name) if (self.folder / name).exists() else {}).items():
            shared = isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)
            names, frames = item if shared else ([key], item)
            if isinstance(frames, str):
                frames = [frames] if frames else []
            if not isinstance(frames, list) or not all(isinstance(text, str) for text in [*names, *frames]):
                self._refuse(name, key, "is not a stack")
            found.update(dict.fromkeys(names, len(stacks)))
            stacks.append(frames)
        return stacks, found

    def _list_tensors(self) -> tuple[dict[str, tuple[int, bool]], int]:
        """The files with elements: their inode (equal ones are linked), whether each is a plain file; and their size."""
        folder = self.folder / layout.MSPROBE_TENSORS
        if folder.is_symlink():
            raise DumpError(f"{folder} is a symbolic link; a dump holds plain folders only")
        if not folder.is_dir():
            return {}, 0
        found: dict[str, tuple[int, bool]] = {}
        sizes: dict[int, int] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                plain = entry.is_file(follow_symlinks=False)
                found[entry.name] = entry.inode(), plain
                if plain:
                    sizes[entry.inode()] = entry.stat(follow_symlinks=False).st_size
        return found, sum(sizes.values())

    def _manifest(self, header: dict[str, Any]) -> Manifest:
        place = layout.find_places(self.folder)[0]
        level = header.get("level")
        return Manifest(
            format=layout.FORMAT_VERSION,
            framework=str(header.get("framework", "pytorch")),
            level=LEVELS.get(level, level) if isinstance(level, str) else "op",
            step=place.step,
            rank=place.rank,
            world_size=1,
            state="complete",
            config={"source": "msprobe", "task": header.get("task"), "tensors": bool(self._tensors)},
            environment={},
            counts={"calls": len(self), "payload_bytes": self._tensor_bytes},
        )

    def _refuse(self, file: str, place: str, why: str) -> NoReturn:
        raise DumpError(f"{self.folder / file}: {place} {why}")

    # --- names --------------------------------------------------------------------------------------------------

    def _parsed_id(self, file: str, name: str) -> CallId:
        found = call_named(name)
        if found is None or (found.index | found.again) >> 32:
            self._refuse(file, name[:200], "is not the name of a call; a name looks like Functional.conv2d.0.forward")
        return found

    def _id_named(self, name: str | None) -> CallId | None:
        return None if name is None or name == OPTIMIZER.lower() else call_named(name)

    @cached_property
    def _by_id(self) -> dict[CallId, int]:
        return {call: number for number, call in reversed(list(enumerate(self._ids)))}

    @cached_property
    def _by_seq(self) -> dict[int, int]:
        return {number: number for number in range(len(self))}

    # --- records ------------------------------------------------------------------------------------------------

    def _record(self, number: int) -> CallRecord:
        file, entry = self._entry(number)
        name, call = self._names[number], self._ids[number]
        facts = entry if isinstance(entry, dict) and call.kind != SAVED else {}
        origin = None
        if call.phase is Phase.BACKWARD:
            origin = self._by_id.get(CallId(call.kind, call.name, call.index, Phase.FORWARD))
        above = self._id_named(self._parents.get(name))
        if above is not None and origin is not None:
            # As in a native dump, a backward call points at the forward of its parent.
            above = CallId(above.kind, above.name, above.index, Phase.FORWARD)
        error = facts.get("error")
        return CallRecord(
            id=call,
            seq=number,
            parent=None if above is None else self._by_id.get(above),
            origin=origin,
            module=_module_of(above),
            values=tuple(self._values_of(file, name, call, entry)),
            stack=self._stack_of.get(name),
            thread=0,
            recomputed=facts.get("is_recompute") is True,
            error=error if isinstance(error, str) else None,
        )

    def _values_of(self, file: str, name: str, call: CallId, entry: Any) -> Iterator[Value]:
        if call.kind == SAVED:
            yield from self._walk(file, name, Role.OUTPUT, (0,) if _is_leaf(entry) else (), entry)
            return
        if not isinstance(entry, dict):
            self._refuse(file, name, "is not an object")
        if call.phase is Phase.PARAMETERS_GRAD:
            for key, item in entry.items():
                # Each gradient is a list of one; null is a place that was kept for it and never filled.
                alone = item[0] if isinstance(item, list) and len(item) == 1 else item
                if alone is not None:
                    yield from self._walk(file, f"{name}.{key}", Role.PARAMETERS, (key,), alone)
            return
        backward = call.phase is Phase.BACKWARD
        for section, role in _SECTIONS.items():
            node = entry.get(section)
            if node is None or (section == "output" and WRITTEN in entry):
                continue
            if section == "output" and entry.get(DICT_OUTPUT) is True and isinstance(node, list) and len(node) == 1:
                node = node[0]
            for value in self._walk(file, f"{name}.{section}", role, (0,) if _is_leaf(node) else (), node):
                if not (backward and value.type == "NoneType"):
                    yield value

    def _walk(self, file: str, place: str, role: Role, path: tuple[PathStep, ...], node: Any) -> Iterator[Value]:
        if len(path) > _MAX_DEPTH:
            self._refuse(file, place, f"is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(node, list | dict) and not _is_leaf(node):
            items: Any = enumerate(node) if isinstance(node, list) else node.items()
            for step, item in items:
                yield from self._walk(file, f"{place}.{step}", role, (*path, step), item)
            if not node and path:
                # An object that msprobe does not know is {}, as is an empty dictionary.
                yield Value(Slot(role, path), "list" if isinstance(node, list) else "object", scalar=node or None)
            return
        if isinstance(node, dict):
            yield self._leaf(file, place, role, path, node)
        else:
            yield Value(Slot(role, path), type(node).__name__, scalar=_plain(node))

    def _leaf(self, file: str, place: str, role: Role, path: tuple[PathStep, ...], leaf: dict[str, Any]) -> Value:
        own = leaf.get("slot")
        if own is not None:
            if not isinstance(own, list) or not all(type(step) in (int, str) for step in own):
                self._refuse(file, f"{place}.slot", f"is {_shown(own)}, not a list of keys and positions")
            path = tuple(own) or path
        slot, error = Slot(role, path), leaf.get("error")
        if error is not None and not isinstance(error, str):
            self._refuse(file, f"{place}.error", "is not a text")
        extra = {key: _plain(item) for key, item in leaf.items() if key not in _LEAF_KEYS}
        if "shape" not in leaf:
            scalar = _plain(leaf["value"]) if "value" in leaf else extra or None
            if leaf.get("type") == DEVICE and isinstance(scalar, str):
                scalar = scalar.removesuffix(NO_INDEX)
            return Value(slot, leaf["type"], scalar=scalar, error=error)
        shape, dtype, gradient = leaf["shape"], leaf.get("dtype"), leaf.get("requires_grad")
        for key, sizes in (("shape", shape), ("stored_shape", extra.get("stored_shape", []))):
            if not isinstance(sizes, list) or not all(type(size) is int and -1 <= size < 1 << 63 for size in sizes):
                self._refuse(file, f"{place}.{key}", f"is {_shown(sizes)}, not a list of sizes")
        if not (dtype is None or isinstance(dtype, str)) or not (gradient is None or isinstance(gradient, bool)):
            self._refuse(file, place, "has a dtype that is no text or a requires_grad that is no truth value")
        checksum = leaf.get("md5")
        if isinstance(checksum, str) and _CRC.fullmatch(checksum):
            checksum = int(checksum, 16)
        elif checksum is not None:
            extra, checksum = {**extra, "md5": _plain(checksum)}, None
        payload = self._payload(file, place, leaf, extra)
        return Value(
            slot=slot,
            type=leaf["type"],
            dtype=dtype,
            shape=tuple(shape),
            requires_grad=gradient,
            stats=self._stats(file, place, leaf, shape, dtype),
            checksum=checksum,
            payload=payload,
            error=error,
            extra=extra,
        )

    def _stats(self, file: str, place: str, leaf: dict[str, Any], shape: list[int], dtype: str | None) -> Stats | None:
        numel = math.prod(shape)
        if numel >= 1 << 63:
            self._refuse(file, f"{place}.shape", f"is {_shown(shape)}, more elements than can be")
        element = DTYPES.get((dtype or "").removeprefix("torch."))
        floating = element is not None and "float" in element.name
        numbers = []
        for key in STATISTICS:
            found = leaf.get(key)
            number = _FLOATS.get(found, found) if isinstance(found, str) else found
            if number is not None and not isinstance(number, int | float):
                self._refuse(file, f"{place}.{key}", f"is {_shown(found)}, not a number")
            if isinstance(number, int) and (floating or not -(1 << 63) <= number < 1 << 64):
                number = float(number) if abs(number) < 1 << 1023 else math.inf
            if key == "Norm" and not shape and number is not None:
                number = abs(float(number))  # msprobe writes the element itself
            numbers.append(int(number) if isinstance(number, bool) else number)
        unknown = all(number is None for number in numbers)
        if numel == 0 and "error" not in leaf:
            return Stats(0, 0, 0, 0.0, 0.0)
        return None if unknown else told_stats(max(numel, 0), *numbers)

    # --- payloads -----------------------------------------------------------------------------------------------

    def _payload(self, file: str, place: str, leaf: dict[str, Any], extra: dict[str, Any]) -> Payload | None:
        name = leaf.get("data_name")
        if name is None or name == "-1":
            return None
        if not isinstance(name, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
            self._refuse(file, f"{place}.data_name", f"is {_shown(name)}, not the name of a file beside it")
        inode, _ = self._tensors.get(name, (None, False))
        if inode is None:
            extra["missing"] = name
            return None
        key = (inode, "") if inode else (0, name)
        number = self._payload_numbers.get(key)
        if number is None:
            number = self._payload_numbers[key] = len(self._payload_names)
            self._payload_names.append(name)
        element = DTYPES.get(str(leaf.get("dtype")).removeprefix("torch."))
        return Payload(number, math.prod(leaf["shape"]) * element.itemsize if element is not None else 0)

    def raw(self, value: Value) -> tuple[DType, memoryview, tuple[int, ...]]:
        if value.payload is None:
            raise DumpError("this value was recorded without its elements; msprobe stores them with task tensor")
        name = self._payload_names[value.payload.offset]
        path = self.folder / layout.MSPROBE_TENSORS / name
        if not self._tensors[name][1]:
            raise DumpError(f"{path} is a symbolic link or no file; a dump holds plain files only")
        dtype, shape, raw = read_pt(path)
        told = tuple(value.extra.get("stored_shape", value.shape or ()))
        if shape != told or dtype.name != str(value.extra.get("stored_dtype", value.dtype)).removeprefix("torch."):
            raise DumpError(
                f"{path} holds a {dtype.name} of shape {shape}; its dump says {value.dtype} of shape {told}"
            )
        return dtype, memoryview(raw), shape


def call_named(name: str) -> CallId | None:
    """The call a name in a file of msprobe stands for; None when it is no such name."""
    try:
        return parse_call(name)
    except ValueError:
        parts = name.split(".")
    if len(parts) >= 3 and parts[-1] == Phase.PARAMETERS_GRAD.value:
        return CallId(parts[0], ".".join(parts[1:-1]), 0, Phase.PARAMETERS_GRAD)  # before 26: without a number
    if len(parts) >= 4 and parts[-1].isdecimal() and len(parts[-1]) < 10 and parts[-2] in _PHASES:
        return CallId(parts[0], ".".join(parts[1:-2]), int(parts[-1]), _PHASES[parts[-2]])  # cells of MindSpore
    return None


def _module_of(call: CallId | None) -> str:
    """The path of a module from the name of its call, which ends with its class."""
    return call.name.rpartition(".")[0] if call is not None and call.kind == MODULE else ""


def _shown(item: Any) -> str:
    """A few characters of a value of any size and depth."""
    if isinstance(item, list):
        parts = ["a list" if isinstance(part, list) else _shown(part) for part in item[:8]]
        return f"[{', '.join(parts)}{', ...' if len(item) > 8 else ''}]"
    return "an object" if isinstance(item, dict) else repr(item)[:80]


def _is_leaf(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("type"), str)


def _plain(item: Any, depth: int = 0) -> Any:
    """A value as native dumps hold it: floats that JSON lacks are texts."""
    if isinstance(item, float) and not math.isfinite(item):
        return repr(item)
    if isinstance(item, list | dict) and depth > _MAX_DEPTH:
        return None
    if isinstance(item, list):
        return [_plain(each, depth + 1) for each in item]
    return {key: _plain(each, depth + 1) for key, each in item.items()} if isinstance(item, dict) else item


def _frame(text: str) -> Frame:
    match = _FRAME.fullmatch(text)
    if match is None:
        return Frame(text, 0, "", "", False)
    file, line, function, code = match.groups()
    library = any(part in file for part in ("site-packages", "dist-packages", "/lib/python", "<frozen"))
    return Frame(file, int(line[:9]), function, code.strip(), library)
