"""What C records of a program is what Python would have recorded."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from integration.runs import Build, seed
from integration.test_models_unchanged import PROGRAMS
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Value
from ulpscope.native import taps

pytestmark = pytest.mark.skipif(taps.C is None, reason="the extension was not built")


def recorded(build: Build, path: Path, level: str, **options: Any) -> list[tuple[Any, ...]]:
    """Every call of three steps, with everything that is told of it but places in files."""
    seed()
    program = build()
    with ulpscope.capture(path, model=program.model, level=level, checksum=True, **options):
        for _ in range(3):
            program.step()
    dump = ulpscope.open_dump(path)
    return [
        (
            call_text(call.id),
            dataclasses.replace(call, values=(), stack=None),
            [(frame.line, frame.function) for frame in dump.stack(call)],
            [
                (slot_text(value.slot), *(without_places(each) for each in (value, *(part for _, part in value.parts))))
                for value in call.values
            ],
        )
        for call in dump.calls()
    ]


def without_places(value: Value) -> Value:
    return dataclasses.replace(value, measure=None, payload=None, extra={}, parts=())


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_c_records_what_python_records(name: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    try:
        PROGRAMS[name]().step()  # some things happen in the first run of a process only
        for number, module in enumerate((taps.C, None)):
            monkeypatch.setattr(taps, "C", module)
            found.append(recorded(PROGRAMS[name], tmp_path / str(number), level))
    finally:
        torch.use_deterministic_algorithms(False)
    by_c, by_python = found
    assert [call[0] for call in by_c] == [call[0] for call in by_python]
    for one, other in zip(by_c, by_python, strict=True):
        assert repr(one) == repr(other)


def test_empty_lists_and_tuples_are_told_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Program:
        model = None

        def step(self) -> None:
            torch.tensor([]), torch.zeros(()), torch.ones(2, 2).sum([]), torch.ones(2).view(2, *()).tile(())

    found = []
    for number, module in enumerate((taps.C, None)):
        monkeypatch.setattr(taps, "C", module)
        found.append(recorded(Program, tmp_path / str(number), "op"))  # type: ignore[arg-type]
    assert repr(found[0]) == repr(found[1])
    values = dict(pair for call in found[0] if call[0] == "Torch.tensor.0.forward" for pair in call[3])
    assert (values["input.0"].type, values["input.0"].scalar) == ("list", [])


@pytest.mark.parametrize(
    "options",
    [
        {"skip": ["linear", "Tensor.__", "Functional.relu.1.backward"]},
        {"only": ["linear", "Module"], "skip": ["LayerNorm", "Functional.linear.2"]},
        {"skip": ["NormLayer", "Linear"], "phases": ["backward"]},
        {"only": ["Functional.linear.1.backward"]},
        {"scope": ["Functional.linear.1", "Functional.linear.3"], "skip": ["dropout"]},
        {"skip": ["Functional.linear.1"], "phases": ["backward"]},
        {"scope": ["Functional.linear.1", "Functional.linear.3"], "only": ["linear"]},
        {"only": ["Module.encoder"], "skip": ["Module.encoder.layers.0"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["op", "mix"])
def test_c_selects_as_python_does(
    options: dict[str, Any], level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number, module in enumerate((taps.C, None)):
        monkeypatch.setattr(taps, "C", module)
        found.append(recorded(PROGRAMS["encoder_decoder_in_training"], tmp_path / str(number), level, **options))
    assert found[0]
    assert repr(found[0]) == repr(found[1])
