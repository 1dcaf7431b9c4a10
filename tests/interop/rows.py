"""A dump as a table of tensors, whoever wrote it: (call name, slot) -> Row. Reads dump.json with nothing but json, so that the
comparison of two dumps does not lean on the reader it is to prove; native dumps come through ulpscope's reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = tuple[str, str]
_SECTIONS = {"input_args": "input", "input_kwargs": "input", "input": "input", "output": "output"}
STATISTICS = ("Max", "Min", "Mean", "Norm")


@dataclass(frozen=True)
class Row:
    """One tensor of a dump: what it is, its four statistics as far as given, its checksum, its file."""

    dtype: str
    shape: tuple[int, ...]
    statistics: dict[str, Any]
    md5: str | None = None
    file: Path | None = None
    requires_grad: bool | None = None


def dump_folder(out: Path) -> Path:
    """The one folder of a run that holds the files of a step and a rank."""
    found = [path.parent for path in out.rglob("dump.json")] or [path.parent for path in out.rglob("manifest.json")]
    if len(found) != 1:
        raise AssertionError(f"{out} should hold one dump, found {[str(path) for path in found]}")
    return found[0]


def rows(out: Path) -> dict[Key, Row]:
    """Every tensor of the one dump below `out`."""
    folder = dump_folder(out)
    if (folder / "dump.json").is_file():
        return dict(_legacy_rows(folder))
    return dict(_native_rows(folder))


def _legacy_rows(folder: Path) -> Iterator[tuple[Key, Row]]:
    content = json.loads((folder / "dump.json").read_text())
    for call, sections in content["data"].items():
        gradients = ".parameters_grad" in call
        for section, value in sections.items():
            if gradients:  # {"weight": [leaf]}
                yield from _leaves(folder, call, section, value[0])
            elif section in _SECTIONS or section == "parameters":
                yield from _leaves(folder, call, _SECTIONS.get(section, section), value)


def _leaves(folder: Path, call: str, slot: str, value: Any) -> Iterator[tuple[Key, Row]]:
    if isinstance(value, list):
        for at, item in enumerate(value):
            yield from _leaves(folder, call, f"{slot}.{at}", item)
    elif isinstance(value, dict):
        if isinstance(value.get("shape"), list) and str(value.get("dtype", "")).startswith("torch."):
            name = value.get("data_name")
            yield (
                (call, slot),
                Row(
                    dtype=value["dtype"].removeprefix("torch."),
                    shape=tuple(value["shape"]),
                    statistics={key: value[key] for key in STATISTICS if value.get(key) is not None},
                    md5=value.get("md5"),
                    file=folder / "dump_tensor_data" / name if name else None,
                    requires_grad=value.get("requires_grad"),
                ),
            )
        elif "type" not in value:
            for key, item in value.items():
                yield from _leaves(folder, call, f"{slot}.{key}", item)


def _native_rows(folder: Path) -> Iterator[tuple[Key, Row]]:
    from ulpscope.model.names import call_text, slot_text
    from ulpscope.store.registry import open_dump

    for call in open_dump(folder).calls():
        for value in call.values:
            if value.is_tensor and value.dtype is not None and value.shape is not None:
                slot = slot_text(value.slot)
                if call.id.phase.value == "parameters_grad":
                    slot = slot.partition(".")[2]
                found = {} if value.stats is None else dict(zip(STATISTICS, _four(value.stats), strict=True))
                yield (
                    (call_text(call.id), slot),
                    Row(
                        dtype=value.dtype.removeprefix("torch."),
                        shape=value.shape,
                        statistics={key: number for key, number in found.items() if number is not None},
                        md5=None if value.checksum is None else f"{value.checksum:08x}",
                        requires_grad=value.requires_grad,
                    ),
                )


def _four(stats: Any) -> tuple[Any, ...]:
    return stats.max, stats.min, stats.mean, stats.norm
