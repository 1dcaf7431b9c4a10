"""Files of msprobe made by hand: dump.json with numbers of one's own, stack.json, and dumps with elements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from builders import DumpBuilder
from ulpscope.store.formats.msprobe_writer import write_msprobe
from ulpscope.store.registry import open_dump

Leaf = dict[str, Any]


def tensor(
    largest: Any = 1.5,
    smallest: Any = -1.5,
    mean: Any = 0.25,
    norm: Any = 3.0,
    *,
    dtype: str = "torch.float32",
    shape: Sequence[int] = (2, 3),
    requires_grad: bool = False,
    **more: Any,
) -> Leaf:
    """A tensor in dump.json."""
    numbers = {"Max": largest, "Min": smallest, "Mean": mean, "Norm": norm}
    leaf = {"type": "torch.Tensor", "dtype": dtype, "shape": list(shape), **numbers}
    return leaf | {"requires_grad": requires_grad} | more


def scalar(value: Any) -> Leaf:
    """An argument that is no tensor."""
    return {"type": type(value).__name__, "value": value}


def call(inputs: Sequence[Any], outputs: Sequence[Any], keywords: Mapping[str, Any] | None = None, **more: Any) -> Leaf:
    """A forward call in dump.json."""
    return {"input_args": list(inputs), "input_kwargs": dict(keywords or {}), "output": list(outputs), **more}


def write_json(
    folder: Path,
    calls: Mapping[str, Any],
    *,
    name: str = "dump.json",
    task: str = "statistics",
    stacks: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """A dump as one file with these calls, and stack.json where there are stacks; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {"task": task, "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (folder / name).write_text(json.dumps({**header, "data": calls}))
    if stacks is not None:
        content = {str(number): [[call], list(frames)] for number, (call, frames) in enumerate(stacks.items())}
        (folder / "stack.json").write_text(json.dumps(content))
    return folder / name


def write_elements(folder: Path, calls: Mapping[str, Mapping[tuple[Any, ...], Any]]) -> Path:
    """A dump of task tensor in `folder`; calls are `Functional.add.0`, their values (role, *path): array. Returns dump.json."""
    builder = DumpBuilder(folder.with_name(f"{folder.name}-native"))
    for name, values in calls.items():
        kind, api, index = name.split(".")
        builder.call(kind, api, int(index), values=dict(values))
    write_msprobe(open_dump(builder.close()), folder, task="tensor", level="L1", summary_mode="statistics")
    return folder / "dump.json"


def floats(*numbers: float) -> np.ndarray:
    """A vector of float32."""
    return np.array(numbers, dtype=np.float32)
