"""What an entry of dump.json or debug.json says of the values of a call. Called for every value of a dump: short ways first.

What the files do not say stays unknown: statistics are `ToldStats`, null is None.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from ulpscope.model.dtypes import DTYPES
from ulpscope.model.errors import DumpError
from ulpscope.model.names import SAVED
from ulpscope.model.records import CallId, PathStep, Payload, Phase, Role, Slot, Stats, Summary, ToldStats, Value

STATISTICS = ("Max", "Min", "Mean", "Norm")
# msprobe wraps a dictionary that a module returns into a list; ours says so, to read it back as it was.
DICT_OUTPUT = "dict_output"
# What a call that returns nothing wrote; ours calls it the output.
WRITTEN = "written"
# A device without a number is cpu:None there.
DEVICE, NO_INDEX = "torch.device", ":None"
# The sections of a call and the role of their values.
_SECTIONS = (
    ("input_args", Role.INPUT),
    ("input_kwargs", Role.INPUT),
    ("input", Role.INPUT),
    ("output", Role.OUTPUT),
    (WRITTEN, Role.OUTPUT),
    ("parameters", Role.PARAMETERS),
)
_EMPTY = Stats(0, 0, 0, 0.0, 0.0)
_TENSOR_KEYS = frozenset({"type", "dtype", "shape", "requires_grad", "md5", *STATISTICS})
_LEAF_KEYS = _TENSOR_KEYS | {"value", "data_name", "error", "slot", "parts"}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_CRC = re.compile(r"[0-9a-fA-F]{8}")
_MAX_DEPTH = 64
_ENDLESS = 1 << 63

_Place = tuple[PathStep, ...]


class MsprobeValues:
    """Reads the values of calls. Payloads are numbered as they are met; equal files (hard links) have one number."""

    def __init__(self, folder: Path, tensors: dict[str, tuple[int, bool]]) -> None:
        self._folder = folder
        self._tensors = tensors
        self._payload_numbers: dict[tuple[int, str], int] = {}
        self.payload_names: list[str] = []
        self.missing: set[str] = set()

    def of(self, file: str, name: str, call: CallId, entry: Any) -> list[Value]:
        """The values of a call from its entry. Raises DumpError naming the place of what cannot be read."""
        walk = _Walk(self, file, name)
        if call.kind == SAVED:
            walk.node("", Role.OUTPUT, (0,) if _is_leaf(entry) else (), entry)
            return walk.found
        if not isinstance(entry, dict):
            walk.refuse("", (), "is not an object")
        if call.phase is Phase.PARAMETERS_GRAD:
            for key, item in entry.items():
                # Each gradient is a list of one; null is a place that was kept for it and never filled.
                alone = item[0] if isinstance(item, list) and len(item) == 1 else item
                if alone is not None:
                    walk.node("", Role.PARAMETERS, (key,), alone)
            return walk.found
        for section, role in _SECTIONS:
            node = entry.get(section)
            if node is None or (section == "output" and WRITTEN in entry):
                continue
            if section == "output" and entry.get(DICT_OUTPUT) is True and isinstance(node, list) and len(node) == 1:
                node = node[0]
            walk.node(section, role, (0,) if _is_leaf(node) else (), node)
        if call.phase is Phase.BACKWARD:
            return [value for value in walk.found if value.type != "NoneType"]
        return walk.found

    def payload(self, name: str, dtype: str | None, numel: int) -> Payload | None:
        """The payload in a file beside the dump; None where there is no such file."""
        inode, _ = self._tensors.get(name, (None, False))
        if inode is None:
            self.missing.add(name)
            return None
        key = (inode, "") if inode else (0, name)
        number = self._payload_numbers.get(key)
        if number is None:
            number = self._payload_numbers[key] = len(self.payload_names)
            self.payload_names.append(name)
        element = DTYPES.get((dtype or "").removeprefix("torch."))
        return Payload(number, max(numel, 0) * element.itemsize if element is not None else 0)

    def refuse(self, file: str, place: str, why: str) -> NoReturn:
        raise DumpError(f"{self._folder / file}: {place} {why}")


class _Walk:
    """Walks through one entry."""

    __slots__ = ("_file", "_name", "_values", "found")

    def __init__(self, values: MsprobeValues, file: str, name: str) -> None:
        self._values, self._file, self._name = values, file, name
        self.found: list[Value] = []

    def refuse(self, section: str, path: _Place, why: str) -> NoReturn:
        place = ".".join(filter(None, (self._name, section, *map(str, path))))
        self._values.refuse(self._file, place, why)

    def node(self, section: str, role: Role, path: _Place, node: Any) -> None:
        """Adds the values at and below a node."""
        if type(node) is dict and type(node.get("type")) is str:
            self.found.append(self._leaf(section, role, path, node))
        elif isinstance(node, list | dict):
            if len(path) > _MAX_DEPTH:
                self.refuse(section, path, f"is nested deeper than {_MAX_DEPTH} levels")
            steps: Any = enumerate(node) if isinstance(node, list) else node.items()
            for step, item in steps:
                self.node(section, role, (*path, step), item)
            if not node and path:
                # An object that msprobe does not know is {}, as is an empty dictionary.
                kind = "list" if isinstance(node, list) else "object"
                self.found.append(Value(Slot(role, path), kind, scalar=node or None))
        else:
            self.found.append(Value(Slot(role, path), type(node).__name__, scalar=_plain(node)))

    def _leaf(self, section: str, role: Role, path: _Place, leaf: dict[str, Any]) -> Value:
        shape = leaf.get("shape")
        if shape is None and len(leaf) == 2 and type(leaf.get("value")) in (int, bool, str):
            scalar = leaf["value"]
            if leaf["type"] == DEVICE and isinstance(scalar, str):
                scalar = scalar.removesuffix(NO_INDEX)
            return Value(Slot(role, path), leaf["type"], scalar=scalar)
        own = leaf.get("slot")
        if own is not None:
            if not isinstance(own, list) or not all(type(step) in (int, str) for step in own):
                self.refuse(section, (*path, "slot"), f"is {_shown(own)}, not a list of keys and positions")
            path = tuple(own) or path
        error = leaf.get("error")
        if error is not None and not isinstance(error, str):
            self.refuse(section, (*path, "error"), "is not a text")
        extra: dict[str, Any] = {}
        if not leaf.keys() <= _LEAF_KEYS:
            extra = {key: _plain(item) for key, item in leaf.items() if key not in _LEAF_KEYS}
        if "shape" not in leaf:
            return Value(Slot(role, path), leaf["type"], scalar=_scalar(leaf, extra), error=error)
        return self._tensor(section, role, path, leaf, extra, error)

    def _tensor(
        self, section: str, role: Role, path: _Place, leaf: dict[str, Any], extra: dict[str, Any], error: str | None
    ) -> Value:
        dtype, gradient, checksum = leaf.get("dtype"), leaf.get("requires_grad"), leaf.get("md5")
        shape = self._shape(section, path, leaf["shape"])
        if "stored_shape" in extra:
            self._shape(section, path, extra["stored_shape"])
        if not (dtype is None or isinstance(dtype, str)) or not (gradient is None or isinstance(gradient, bool)):
            self.refuse(section, path, "has a dtype that is no text or a requires_grad that is no truth value")
        if checksum is not None:
            if isinstance(checksum, str) and _CRC.fullmatch(checksum):
                checksum = int(checksum, 16)
            else:
                extra, checksum = {**extra, "md5": _plain(checksum)}, None
        # A ragged tensor has sizes of -1: nobody says how many elements that makes.
        numel = -1 if any(size < 0 for size in shape) else math.prod(shape)
        if numel >= _ENDLESS:
            self.refuse(section, (*path, "shape"), f"is {_shown(leaf['shape'])}, more elements than can be")
        name, payload = leaf.get("data_name"), None
        if name is not None and name != "-1":
            if not isinstance(name, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
                self.refuse(section, (*path, "data_name"), f"is {_shown(name)}, not the name of a file beside it")
            payload = self._values.payload(name, dtype, numel)
            if payload is None:
                extra["missing"] = name
        stats = self._stats(section, path, leaf, numel, dtype)
        return Value(
            Slot(role, path),
            leaf["type"],
            dtype,
            shape,
            None,
            None,
            gradient,
            stats,
            checksum,
            None,
            payload,
            None,
            error,
            extra,
            self._parts(section, role, path, leaf["parts"]) if "parts" in leaf else (),
        )

    def _parts(self, section: str, role: Role, path: _Place, told: Any) -> tuple[tuple[str, Value], ...]:
        """The indices, offsets or scales of an odd tensor, as we write them."""
        if not isinstance(told, dict) or not all(_is_leaf(part) and "shape" in part for part in told.values()):
            self.refuse(section, (*path, "parts"), "are not tensors by their names")
        if len(path) > _MAX_DEPTH:
            self.refuse(section, path, f"is nested deeper than {_MAX_DEPTH} levels")
        return tuple((name, self._leaf(section, role, (*path, name), part)) for name, part in told.items())

    def _shape(self, section: str, path: _Place, sizes: Any) -> tuple[int, ...]:
        if type(sizes) is list:
            for size in sizes:
                if type(size) is not int or not -1 <= size < _ENDLESS:
                    break
            else:
                return tuple(sizes)
        self.refuse(section, (*path, "shape"), f"is {_shown(sizes)}, not a list of sizes")

    def _stats(self, section: str, path: _Place, leaf: dict[str, Any], numel: int, dtype: str | None) -> Summary | None:
        if numel == 0 and "error" not in leaf:
            return _EMPTY
        largest, smallest, mean, norm = leaf.get("Max"), leaf.get("Min"), leaf.get("Mean"), leaf.get("Norm")
        if type(largest) is float and type(smallest) is float and type(mean) is float and type(norm) is float:
            # The Norm of a tensor without dimensions is its element there, sign and all.
            return ToldStats(max(numel, 0), largest, smallest, mean, abs(norm))
        if largest is smallest is mean is norm is None:
            return None
        element = DTYPES.get((dtype or "").removeprefix("torch."))
        floating = element is not None and "float" in element.name
        numbers = []
        for key, found in zip(STATISTICS, (largest, smallest, mean, norm), strict=True):
            number = _FLOATS.get(found, found) if isinstance(found, str) else found
            if number is not None and not isinstance(number, int | float):
                self.refuse(section, (*path, key), f"is {_shown(found)}, not a number")
            if isinstance(number, int) and (floating or not -(1 << 63) <= number < 1 << 64):
                number = float(number) if abs(number) < 1 << 1023 else math.inf
            if key == "Norm" and number is not None:
                number = abs(float(number))
            numbers.append(int(number) if isinstance(number, bool) else number)
        return ToldStats(max(numel, 0), *numbers)


@functools.lru_cache(1 << 14)
def _slot(role: Role, path: _Place) -> Slot:
    """The same object for the same slot, of whatever dump: two that are compared need no second look."""
    return Slot(role, path)


def _scalar(leaf: dict[str, Any], extra: dict[str, Any]) -> Any:
    if "value" not in leaf:
        return extra or None
    scalar = _plain(leaf["value"])
    return scalar.removesuffix(NO_INDEX) if leaf.get("type") == DEVICE and isinstance(scalar, str) else scalar


def _is_leaf(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("type"), str)


def _shown(item: Any) -> str:
    """A few characters of a value of any size and depth."""
    if isinstance(item, list):
        parts = ["a list" if isinstance(part, list) else _shown(part) for part in item[:8]]
        return f"[{', '.join(parts)}{', ...' if len(item) > 8 else ''}]"
    return "an object" if isinstance(item, dict) else repr(item)[:80]


def _plain(item: Any, depth: int = 0) -> Any:
    """A value as native dumps hold it: floats that JSON lacks are texts."""
    if isinstance(item, float) and not math.isfinite(item):
        return repr(item)
    if isinstance(item, list | dict) and depth > _MAX_DEPTH:
        return None
    if isinstance(item, list):
        return [_plain(each, depth + 1) for each in item]
    return {key: _plain(each, depth + 1) for key, each in item.items()} if isinstance(item, dict) else item
