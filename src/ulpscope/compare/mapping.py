"""Names that the user puts together: a YAML file of `name in the target: name in the reference`, one value a line.

    NPU.npu_fusion_attention.4.forward.input.0: Functional.scaled_dot_product_attention.4.forward.input.0

A name is that of a value as dump.json spells it, with or without the `.pt` of its file; keyword arguments may be spelt `kwargs` or `input`.
"""

from __future__ import annotations

from collections.abc import Mapping as Items
from dataclasses import dataclass, field
from pathlib import Path

from ulpscope.model.errors import ConfigError
from ulpscope.model.names import call_of_value, call_text, value_text
from ulpscope.model.records import CallId, Slot
from ulpscope.store.files.yaml_file import read_yaml

_MOST_BYTES = 64 << 20
_MOST_PROBLEMS = 50
_SUFFIXES = (".pt", ".npy")


@dataclass(frozen=True, slots=True)
class Mapping:
    """For each named value of the target the call and the name of its counterpart."""

    names: Items[str, tuple[CallId, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.names)

    def source(self, call: CallId, slot: Slot) -> tuple[CallId, str] | None:
        """The counterpart of a value, if the file names one."""
        return self.names.get(value_text(call, slot))


def read_mapping(path: str | Path) -> Mapping:
    """The mapping in a YAML file. Raises ConfigError with every problem in it."""
    path = Path(path)
    content = read_yaml(path, most_bytes=_MOST_BYTES)
    if not isinstance(content, dict) or not content:
        raise ConfigError(["is no mapping; write lines `name in the target: name in the reference`"], str(path))
    names: dict[str, tuple[CallId, str]] = {}
    problems = []
    for target, reference in content.items():
        try:
            names[_spelt(target)] = call_of_value(_spelt(reference)), _spelt(reference)
        except ValueError as error:
            problems.append(f"{target!s:.200}: {error}")
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"and {len(problems) - _MOST_PROBLEMS} more"]
    if problems:
        raise ConfigError(problems, str(path))
    return Mapping(names)


def _spelt(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r:.80} is not the name of a value")
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    call = call_text(call_of_value(name))
    return name.replace(f"{call}.kwargs.", f"{call}.input.", 1)
