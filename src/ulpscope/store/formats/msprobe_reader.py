"""Reading a dump of msprobe: dump.json, debug.json, stack.json, construct.json and the tensors beside them.

Versions 1.0.3, 8.2.1 and 26.2, and what `msprobe_writer` writes. Calls are in the order of the file. What the files do
not say stays unknown: statistics are `ToldStats`, null is None.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ulpscope.model.errors import DumpError
from ulpscope.model.names import MODULE, OPTIMIZER, SAVED, parse_call
from ulpscope.model.records import (
    CallId,
    CallRecord,
    Frame,
    Manifest,
    Phase,
    Value,
)
from ulpscope.native.schema import FORMAT_VERSION
from ulpscope.store.files.plain_file import mapped
from ulpscope.store.files.pt import map_pt
from ulpscope.store.formats.json_entries import JsonEntries
from ulpscope.store.formats.msprobe_folder import FILES, PARENTS, STACKS, TENSORS, beside
from ulpscope.store.formats.msprobe_values import MsprobeValues
from ulpscope.store.mapped import StoredBits
from ulpscope.store.registry import not_a_dump
from ulpscope.store.run_folder import DumpLocation

_log = logging.getLogger(__name__)
LEVELS = {"L0": "module", "L1": "op", "mix": "mix", "L2": "kernel"}
_FRAME = re.compile(r"File (.*), line (\d+), in (.*?), ?\n ?(.*)", re.DOTALL)
_PHASES = {phase.value: phase for phase in Phase}
_MAX_JSON = 2 << 30
_Read = TypeVar("_Read")
_Stacks = tuple[list[list[str]], dict[str, int]]


class MsprobeDump:
    """One step of one rank in the files of msprobe. Open it with `open_dump`.

    Its folder is that of the dump, or one file of dump.json's form, which is then read alone, whatever its name."""

    format = "msprobe"

    def __init__(self, location: DumpLocation) -> None:
        self.folder = location.folder
        self._at = self.folder.parent if self.folder.is_file() else self.folder
        self._files: list[JsonEntries] = []
        self._names: list[str] = []
        self._ids: list[CallId] = []
        self._notes: list[str] = []
        ending = self._read_files()
        self._parents: dict[str, str] = self._comfort(PARENTS, _read_parents, {})
        no_stacks: _Stacks = ([], {})
        self._stacks, self._stack_of = self._comfort(STACKS, _read_stacks, no_stacks)
        self._tensor_folder = os.fspath(beside(self.folder, TENSORS))
        self._tensors, self._tensor_bytes = self._list_tensors()
        self._leaf_values = MsprobeValues(self._at, self._tensors)
        self.manifest = self._manifest(self._files[0].header, location, ending)

    @property
    def files(self) -> list[Path]:
        """What its calls are read from."""
        return [file.path for file in self._files]

    @property
    def missing(self) -> set[str]:
        return self._leaf_values.missing

    def ids(self) -> list[CallId]:
        return self._ids

    def modules(self) -> list[str]:
        above = (self._id_named(self._parents.get(name)) for name in self._names)
        return [_module_of(call) for call in above]

    def parent(self, call: CallRecord) -> CallId | None:
        """Who called it, as construct.json says; None for the root, and below the optimizer, which has no name there."""
        return self._id_named(self._parents.get(self._names[call.seq]))

    def spelled(self, call: CallRecord) -> str:
        return self._names[call.seq]

    def stack(self, call: CallRecord) -> list[Frame]:
        return [] if call.stack is None else [_frame(text) for text in self._stacks[call.stack]]

    # --- files --------------------------------------------------------------------------------------------------

    def _read_files(self) -> str | None:
        """Finds the calls; returns what could not be read of it. Saved values that cannot be read do not take the calls with them."""
        named = self.folder.is_file()
        paths = [self.folder] if named else [self.folder / name for name in FILES]
        ending = None
        for path in paths:
            if not path.is_file():
                continue
            try:
                file = JsonEntries(path, "data")
                if not file.has_entries:
                    raise DumpError(not_a_dump(path, "it has no object 'data'"))
                ids = [self._parsed_id(file, name) for name in file.names]
            except DumpError as error:
                if not self._files:
                    raise
                ending = str(error)
                continue
            self._files.append(file)
            told = file.header.get("notes")
            self._notes += [note for note in told if isinstance(note, str)] if isinstance(told, list) else []
            self._names += file.names
            self._ids += ids
        if not self._files:
            raise DumpError(f"{self.folder} is not a dump of msprobe: it has no {FILES[0]}")
        return ending

    def _comfort(self, name: str, read: Callable[[Path], _Read], nothing: _Read) -> _Read:
        """What a file says that only helps to read the others: where it cannot be read, that is said, and done without."""
        path = beside(self.folder, name)
        if not os.path.lexists(path):
            return nothing
        try:
            return read(path)
        except DumpError as error:
            self._notes.append(f"{error}; it is left out")
            _log.warning("%s", self._notes[-1])
            return nothing

    def _place(self, number: int) -> tuple[JsonEntries, int]:
        """The file of a call, and its number there."""
        for file in self._files:
            if number < len(file.names):
                return file, number
            number -= len(file.names)
        raise IndexError(number)

    def _list_tensors(self) -> tuple[dict[str, tuple[int, bool]], int]:
        """The files with elements: their inode (equal ones are linked), whether each is a plain file; and their size."""
        folder = Path(self._tensor_folder)
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

    def _manifest(self, header: dict[str, Any], location: DumpLocation, ending: str | None) -> Manifest:
        """msprobe does not say whether a step was finished: what could not be read beside dump.json is what is known."""
        level = header.get("level")
        return Manifest(
            format=FORMAT_VERSION,
            framework=str(header.get("framework", "pytorch")),
            level=LEVELS.get(level, level) if isinstance(level, str) else "op",
            step=location.step,
            rank=location.rank,
            world_size=1,
            state="complete" if ending is None else "incomplete",
            config={"source": "msprobe", "task": header.get("task"), "tensors": bool(self._tensors)},
            environment={},
            notes=(*self._notes, *(() if ending is None else (ending,))),
            counts={"calls": len(self._names), "payload_bytes": self._tensor_bytes},
        )

    def _refuse(self, file: str, place: str, why: str) -> NoReturn:
        raise DumpError(f"{self._at / file}: {place} {why}")

    # --- names --------------------------------------------------------------------------------------------------

    def _parsed_id(self, file: JsonEntries, name: str) -> CallId:
        found = call_named(name)
        if found is None and any(map(call_named, file.names)):
            found = CallId(_UNNAMED, name, 0, Phase.FORWARD)
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

    # --- records ------------------------------------------------------------------------------------------------

    def record(self, position: int) -> CallRecord:
        file, place = self._place(position)
        name, call = self._names[position], self._ids[position]
        entry = file[place]
        facts = entry if type(entry) is dict and call.kind != SAVED else {}
        values = tuple(self._leaf_values.of(file.path.name, name, call, entry))
        origin = above = None
        if call.phase is Phase.BACKWARD:
            origin = self._by_id.get(CallId(call.kind, call.name, call.index, Phase.FORWARD, 0))
        if self._parents:
            above = self._id_named(self._parents.get(name))
            if above is not None and origin is not None:
                # As in a native dump, a backward call points at the forward of its parent.
                above = CallId(above.kind, above.name, above.index, Phase.FORWARD)
        error = facts.get("error")
        return CallRecord(
            call,
            position,
            None if above is None else self._by_id.get(above),
            origin,
            _module_of(above),
            values,
            self._stack_of.get(name),
            0,
            facts.get("is_recompute") is True,
            error if isinstance(error, str) else None,
        )

    def stored(self, value: Value) -> StoredBits:
        if value.payload is None:
            raise DumpError("this value was recorded without its elements; msprobe stores them with task tensor")
        name = self._leaf_values.payload_names[value.payload.offset]
        # Joining paths as texts: there are as many as tensors.
        path = f"{self._tensor_folder}{os.sep}{name}"
        if not self._tensors[name][1]:
            raise DumpError(f"{path} is a symbolic link or no file; a dump holds plain files only")
        try:
            found = map_pt(path)
        except DumpError:
            self._leaf_values.missing.add(name)
            raise
        told = tuple(value.extra.get("stored_shape", value.shape or ()))
        name = found.dtype.name
        if found.shape != told or name != str(value.extra.get("stored_dtype", value.dtype)).removeprefix("torch."):
            raise DumpError(
                f"{path} holds a {name} of shape {found.shape}; its dump says {value.dtype} of shape {told}"
            )
        return found


def _read_parents(path: Path) -> dict[str, str]:
    """The texts of a JSON object whose items are texts or null."""
    content = _read_json(path)
    for key, item in content.items():
        if item is not None and not isinstance(item, str):
            raise DumpError(f"{path}: {key[:200]} is neither a text nor null")
    return {key: item for key, item in content.items() if item is not None}


def _read_stacks(path: Path) -> _Stacks:
    """The stacks, and which call has which. One for each call in 1.0.3; later shared by the calls in a list."""
    stacks: list[list[str]] = []
    found: dict[str, int] = {}
    for key, item in _read_json(path).items():
        shared = isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)
        names, frames = item if shared else ([key], item)
        if isinstance(frames, str):
            frames = [frames] if frames else []
        if not isinstance(frames, list) or not all(isinstance(text, str) for text in [*names, *frames]):
            raise DumpError(f"{path}: {key[:200]} is not a stack")
        found.update(dict.fromkeys(names, len(stacks)))
        stacks.append(frames)
    return stacks, found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = mapped(path)
        if len(raw) > _MAX_JSON:
            raise DumpError(f"{path} has {len(raw)} bytes; at most {_MAX_JSON} are read")
        content = json.loads(bytes(raw))
    except ValueError as error:
        raise DumpError(f"{path} cannot be read: {error}") from error
    except RecursionError:
        raise DumpError(f"{path} cannot be read: it is nested too deep") from None
    if not isinstance(content, dict):
        raise DumpError(f"{path} cannot be read: it holds no object")
    return content


# The kind of an entry whose name is no name of a call: among others that are, it is read like them.
_UNNAMED = "Unnamed"


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
