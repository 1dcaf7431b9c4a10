"""Reading a dump of msprobe: dump.json, debug.json, stack.json, construct.json and the tensors beside them.

Versions 1.0.3, 8.2.1 and 26.2, and what `msprobe_writer` writes. Calls are in the order of the file. What the files do
not say stays unknown: statistics are `ToldStats`, null is None.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ulpscope.dtypes import DType
from ulpscope.errors import DumpError
from ulpscope.making import maker
from ulpscope.naming import MODULE, OPTIMIZER, SAVED, parse_call
from ulpscope.records import (
    CallId,
    CallRecord,
    Frame,
    Manifest,
    Phase,
    Value,
)
from ulpscope.store import layout
from ulpscope.store.formats.json_entries import JsonEntries
from ulpscope.store.formats.msprobe_values import MsprobeValues
from ulpscope.store.formats.pt import map_pt
from ulpscope.store.mapped import StoredBits
from ulpscope.store.reader import Dump

LEVELS = {"L0": "module", "L1": "op", "mix": "mix", "L2": "kernel"}
_FRAME = re.compile(r"File (.*), line (\d+), in (.*?), ?\n ?(.*)", re.DOTALL)
_PHASES = {phase.value: phase for phase in Phase}
_MAX_JSON = 2 << 30
_call, _call_record = maker(CallId), maker(CallRecord)


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
        self._ids = [self._parsed_id(file, name) for file in self._files for name in file.names]
        self._parents = self._texts("construct.json")
        self._stacks, self._stack_of = self._read_stacks()
        self._tensor_folder = os.fspath(self.folder / layout.MSPROBE_TENSORS)
        self._tensors, self._tensor_bytes = self._list_tensors()
        self._leaves = MsprobeValues(self.folder, self._tensors)
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
        return self._record(place if 0 <= place < len(self._names) else range(len(self))[place])

    @cached_property
    def value_count(self) -> int:
        return sum(len(call.values) for call in self.calls())

    def parent(self, call: CallRecord) -> CallId | None:
        """Who called it, as construct.json says; None for the root, and below the optimizer, which has no name there."""
        return self._id_named(self._parents.get(self._names[call.seq]))

    def name_of(self, call: CallRecord) -> str:
        return self._names[call.seq]

    def stack(self, call: CallRecord) -> list[Frame]:
        return [] if call.stack is None else [_frame(text) for text in self._stacks[call.stack]]

    def sketch(self, value: Value) -> NDArray[np.float32] | None:
        """None: msprobe has no sketches."""
        return None

    # --- files --------------------------------------------------------------------------------------------------

    def _place(self, number: int) -> tuple[JsonEntries, int]:
        """The file of a call, and its number there."""
        for file in self._files:
            if number < len(file.names):
                return file, number
            number -= len(file.names)
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

    def _parsed_id(self, file: JsonEntries, name: str) -> CallId:
        found = call_named(name)
        if found is None or (found.index | found.again) >> 32:
            self._refuse(
                file.path.name, name[:200], "is not the name of a call; a name looks like Functional.conv2d.0.forward"
            )
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
        file, place = self._place(number)
        name, call = self._names[number], self._ids[number]
        facts: dict[str, Any] = {}
        values = self._leaves.short(file, place, call)
        if values is None:
            entry = file[place]
            facts = entry if type(entry) is dict and call.kind != SAVED else {}
            values = tuple(self._leaves.of(file.path.name, name, call, entry))
        origin = above = None
        if call.phase is Phase.BACKWARD:
            origin = self._by_id.get(_call(call.kind, call.name, call.index, Phase.FORWARD, 0))
        if self._parents:
            above = self._id_named(self._parents.get(name))
            if above is not None and origin is not None:
                # As in a native dump, a backward call points at the forward of its parent.
                above = CallId(above.kind, above.name, above.index, Phase.FORWARD)
        error = facts.get("error")
        return _call_record(
            call,
            number,
            None if above is None else self._by_id.get(above),
            origin,
            _module_of(above),
            values,
            self._stack_of.get(name),
            0,
            facts.get("is_recompute") is True,
            error if isinstance(error, str) else None,
        )

    def raw(self, value: Value) -> tuple[DType, memoryview, tuple[int, ...]]:
        found = self.stored(value)
        found.check()
        return found.dtype, found.raw, found.shape

    def stored(self, value: Value) -> StoredBits:
        if value.payload is None:
            raise DumpError("this value was recorded without its elements; msprobe stores them with task tensor")
        name = self._leaves.payload_names[value.payload.offset]
        # Joining paths as texts: there are as many as tensors.
        path = f"{self._tensor_folder}{os.sep}{name}"
        if not self._tensors[name][1]:
            raise DumpError(f"{path} is a symbolic link or no file; a dump holds plain files only")
        found = map_pt(path)
        told = tuple(value.extra.get("stored_shape", value.shape or ()))
        name = found.dtype.name
        if found.shape != told or name != str(value.extra.get("stored_dtype", value.dtype)).removeprefix("torch."):
            raise DumpError(
                f"{path} holds a {name} of shape {found.shape}; its dump says {value.dtype} of shape {told}"
            )
        return found


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


def _frame(text: str) -> Frame:
    match = _FRAME.fullmatch(text)
    if match is None:
        return Frame(text, 0, "", "", False)
    file, line, function, code = match.groups()
    library = any(part in file for part in ("site-packages", "dist-packages", "/lib/python", "<frozen"))
    return Frame(file, int(line[:9]), function, code.strip(), library)
