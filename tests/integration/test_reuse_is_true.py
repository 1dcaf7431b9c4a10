"""A value that is measured once and used again is the value that a second look would have found."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from integration.runs import Build, seed
from integration.test_models_unchanged import PROGRAMS
from ulpscope.naming import call_text, slot_text


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
