"""A value that is measured once and used again is the value that a second look would have found."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ulpscope
from integration.runs import Build, seed
from integration.test_models_unchanged import PROGRAMS
from ulpscope.model.names import call_text, slot_text


@pytest.fixture(autouse=True)
def filled_memory() -> Iterator[None]:
    """Fresh memory holds NaN instead of whatever was there: a call that reads it before it is written is comparable."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def recorded(build: Build, path: Path, level: str, *, reuse: bool) -> dict[str, dict[str, Any]]:
    """All three steps in one dump: name of the call and slot to what was measured there."""
    seed()
    program = build()
    with ulpscope.capture(path, model=program.model, level=level, reuse=reuse, checksum=True):
        for _ in range(3):
            program.step()
    return {
        call_text(call.id): {slot_text(value.slot): value.checksum for value in call.values}
        for call in ulpscope.open_dump(path).calls()
    }


@pytest.mark.parametrize("level", ["mix", "kernel"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_a_value_used_again_is_what_a_second_look_would_find(name: str, level: str, tmp_path: Path) -> None:
    PROGRAMS[name]().step()  # some things happen in the first run of a process only
    looked_once = recorded(PROGRAMS[name], tmp_path / "once", level, reuse=True)
    looked_always = recorded(PROGRAMS[name], tmp_path / "always", level, reuse=False)
    assert list(looked_once) == list(looked_always)
    wrong = [
        f"{call} {slot}"
        for call, slots in looked_once.items()
        for slot, checksum in slots.items()
        if checksum != looked_always[call][slot]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", list(PROGRAMS)[::12])
@pytest.mark.filterwarnings("ignore")
def test_modules_are_recorded_without_a_mode_where_every_value_is_looked_at(name: str, tmp_path: Path) -> None:
    PROGRAMS[name]().step()
    with_mode = recorded(PROGRAMS[name], tmp_path / "once", "module", reuse=True)
    assert with_mode == recorded(PROGRAMS[name], tmp_path / "always", "module", reuse=False)


def test_such_a_capture_leaves_the_modes_of_the_program_alone(tmp_path: Path) -> None:
    """Torch's attention takes its fast path where no mode is on; a mode of the program's counts as without us."""

    class Counting(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    seed()
    layer, value = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    counts = []
    for recording in (False, True):
        capture = ulpscope.Capture(tmp_path / "run", level="module", reuse=False)
        if recording:
            capture.start(layer)
            assert torch._C._len_torch_function_stack() == 0
        mode = Counting()
        with mode, torch.no_grad():
            layer(value)
        counts.append(mode.count)
        capture.close()
    assert counts[0] == counts[1]
    assert len(ulpscope.open_dump(tmp_path / "run")) > 1


@pytest.mark.parametrize("level", ["op", "module"])
def test_what_a_graph_of_a_device_wrote_is_measured_again(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay writes into tensors that exist, and raises no version; here a function stands for it that writes into memory."""
    value, layer = torch.zeros(4), nn.Identity()
    place = value.data_ptr()

    def replay(numbers: Any) -> None:
        ctypes.memmove(place, (ctypes.c_float * 4)(*numbers), 16)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    code = replay.__code__
    with ulpscope.capture(tmp_path / "run", model=layer, level=level):
        for number in range(3):
            torch.cuda.CUDAGraph.replay([number] * 4)  # type: ignore[arg-type]
            layer(value).neg()
            layer(value)
    assert replay.__code__ is code
    shown = [
        item.stats.max
        for call in ulpscope.open_dump(tmp_path / "run").calls()
        for item in call.values[:1]
        if item.stats
    ]
    assert shown == ([0, 1, 2] if level == "op" else [0, 0, 1, 1, 2, 2])
