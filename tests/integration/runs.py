"""Running a program bare and under capture, and comparing every byte of what it returned.

A program is built afresh for each run, from the same seeds, and makes three steps. Its results are read as raw memory,
by no torch call at all: equal numbers are not enough (-0.0, NaN), and a call of the test's own would be recorded too.
"""

import ctypes
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ulpscope
from ulpscope.model.names import call_text

STEPS = 3
LEVELS = ("module", "op", "mix", "kernel")
# What a level may hold besides calls of the torch API.
KINDS_OF_MODULE_LEVEL = {"Module", "Optimizer", "Distributed"}


@dataclass
class Program:
    """`step` does one step and returns whatever should be the same; the state of `model` is compared as well."""

    step: Callable[[], Any]
    model: nn.Module | None = None
    extras: Callable[[], Any] = field(default=lambda: None)


Build = Callable[[], Program]


def run_bare(build: Build) -> dict[str, Any]:
    """Three steps without the tool."""
    seed()
    program = build()
    results = []
    for _ in range(STEPS):
        results.append(frozen(program.step()))
    return _whole(program, results)


def run_captured(build: Build, path: Path, level: str, **options: Any) -> dict[str, Any]:
    """Three steps under capture, a dump for each."""
    seed()
    program = build()
    results = []
    with ulpscope.capture(path, model=program.model, level=level, **options) as cap:
        for _ in range(STEPS):
            results.append(frozen(program.step()))
            cap.step()
    return _whole(program, results)


def assert_unchanged(build: Build, tmp_path: Path, level: str, *, has_modules: bool = True, **options: Any) -> None:
    """The program computes the same bytes and warns of the same things with and without the tool; its dumps are whole."""
    with warnings.catch_warnings(record=True) as bare_warnings:
        warnings.simplefilter("always")
        bare = run_bare(build)
    with warnings.catch_warnings(record=True) as captured_warnings:
        warnings.simplefilter("always")
        captured = run_captured(build, tmp_path / "run", level, **options)
    assert_same(bare, captured)
    known = {str(warning.message) for warning in bare_warnings}
    assert [str(item.message) for item in captured_warnings if str(item.message) not in known] == []
    if level == "module" and not has_modules:
        return
    for dump in whole_dumps(tmp_path / "run", STEPS):
        kinds = {call.kind for call in dump.ids()}
        if level == "module":
            assert kinds <= KINDS_OF_MODULE_LEVEL
            assert "Module" in kinds
        elif level == "op":
            assert kinds - KINDS_OF_MODULE_LEVEL and "Module" not in kinds
        elif level == "mix":
            assert kinds - KINDS_OF_MODULE_LEVEL and ("Module" in kinds or not has_modules)
        else:
            assert "Aten" in kinds


def whole_dumps(path: Path, count: int) -> list[ulpscope.Dump]:
    """The dumps of a run, each complete and readable to its last value, with nothing that could not be recorded."""
    dumps = ulpscope.open_run(path)
    assert len(dumps) == count
    for dump in dumps:
        assert dump.ending == "complete"
        assert [note for note in dump.manifest.notes if note.startswith("could not record")] == []
        calls = list(dump.calls())
        assert len(calls) == len(dump) == dump.manifest.counts["calls"]
        assert len({call.seq for call in calls}) == len(calls)
        names = [call_text(call.id) for call in calls]
        assert len(set(names)) == len(names), sorted(name for name in set(names) if names.count(name) > 1)[:5]
        for call in calls:
            assert call.parent is None or call.parent < call.seq
            for value in call.values:
                if value.payload is not None:
                    dump.load(value)
    return dumps


# --- bytes ------------------------------------------------------------------------------------------------------


def frozen(value: Any) -> Any:
    """Everything that can be told of a nested value, as plain data that no later step can change."""
    with torch._C.DisableTorchFunction():
        return _frozen(value)


def assert_same(first: Any, second: Any, where: str = "result") -> None:
    """Two frozen values are the same; the message names the first place where they differ."""
    places = list(_differences(first, second, where))
    assert not places, f"{len(places)} differences: " + "; ".join(places[:5])


def seed() -> None:
    torch.manual_seed(1234)
    np.random.seed(1234)
    random.seed(1234)


def _whole(program: Program, results: list[Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"steps": results, "extras": frozen(program.extras())}
    if program.model is not None:
        state["parameters"] = frozen(dict(program.model.named_parameters()))
        gradients = frozen({name: value.grad for name, value in program.model.named_parameters()})
        for facts in gradients.values():
            # Under any dispatch mode the autograd engine adds gradients out of place: same bytes, another version.
            if facts is not None:
                facts.pop("version", None)
        state["gradients"] = gradients
        state["buffers"] = frozen(dict(program.model.named_buffers()))
    state["random"] = frozen([torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()])
    return state


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _frozen_tensor(value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(_frozen(item) for item in value)]
    if is_dataclass(value):
        return {item.name: _frozen(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, float):
        return value.hex()
    return value


def _frozen_tensor(value: Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "class": type(value).__name__,
        "dtype": str(value.dtype),
        "shape": tuple(value.shape),
        "requires_grad": value.requires_grad,
        "leaf": value.is_leaf,
        "node": type(value.grad_fn).__name__,
    }
    if value.layout is torch.sparse_coo:
        return {**facts, "indices": _frozen_tensor(value._indices()), "values": _frozen_tensor(value._values())}
    facts |= {"stride": value.stride(), "conj": value.is_conj(), "neg": value.is_neg(), "version": value._version}
    return {**facts, "bytes": _memory(value)}


def _memory(value: Tensor) -> bytes:
    """The elements in row-major order, read straight from memory."""
    if not value.numel():
        return b""
    size = value.element_size()
    extent = 1 + sum((length - 1) * step for length, step in zip(value.shape, value.stride(), strict=True))
    raw = np.frombuffer(ctypes.string_at(value.data_ptr(), extent * size), dtype=np.uint8)
    strides = (*(step * size for step in value.stride()), 1)
    return np.lib.stride_tricks.as_strided(raw, (*value.shape, size), strides).tobytes()


def _differences(first: Any, second: Any, where: str) -> Iterator[str]:
    if type(first) is not type(second):
        yield f"{where}: {type(first).__name__} became {type(second).__name__}"
    elif isinstance(first, dict):
        if first.keys() != second.keys():
            yield f"{where}: keys {list(first)} became {list(second)}"
        for key in first.keys() & second.keys():
            yield from _differences(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list):
        if len(first) != len(second):
            yield f"{where}: {len(first)} elements became {len(second)}"
        for at, (one, two) in enumerate(zip(first, second, strict=False)):
            yield from _differences(one, two, f"{where}.{at}")
    elif first != second:
        shown = "other bytes" if isinstance(first, bytes) else f"{first!r:.200} became {second!r:.200}"
        yield f"{where}: {shown}"
