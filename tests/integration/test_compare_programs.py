"""Two real programs, one with a mistake that people make, through `ulpscope compare`: the place of the mistake is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

import ulpscope
from ulpscope.cli.main import cli

Change = Callable[[nn.Module], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def record(folder: Path, change: Change | None = None, **options: Any) -> Path:
    """Two steps of three blocks, the second of which is changed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    if change is not None:
        change(model[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.Generator().manual_seed(1)
    with ulpscope.capture(folder, model=model, **options) as capture:
        for _ in range(2):
            x = torch.randn(8, 16, generator=batches)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return folder


def compared(reference: Path, target: Path) -> tuple[int, str]:
    found = CliRunner().invoke(cli, ["compare", str(reference), str(target)])
    return found.exit_code, found.output


def under_autocast(block: nn.Module) -> None:
    forward = block.forward

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x)

    block.forward = run


def converted(block: nn.Module) -> None:
    block.down.forward = lambda x: F.linear(
        x.bfloat16(), block.down.weight.bfloat16(), block.down.bias.bfloat16()
    ).float()


def with_a_call_more(block: nn.Module) -> None:
    forward = block.down.forward
    block.down.forward = lambda x: forward(x * 1.5)


def with_a_call_less(block: nn.Module) -> None:
    block.forward = lambda x: x + block.down(block.up(block.norm(x)))


@pytest.mark.parametrize(
    ("change", "headline", "sentence"),
    [
        (with_a_call_more, "Only in the target: 1.down, __mul__, forward, step 0", "takes what it gives as input.0"),
        (with_a_call_less, "Only in the reference: 1, gelu, forward, step 0", "return x + self.down(F.gelu("),
    ],
)
def test_a_change_that_no_call_introduces_is_named(
    change: Change, headline: str, sentence: str, tmp_path: Path
) -> None:
    code, said = compared(record(tmp_path / "r"), record(tmp_path / "t", change))
    assert code == 1
    assert headline in said
    assert sentence in said


@pytest.mark.parametrize(("change", "level"), [(under_autocast, "mix"), (under_autocast, "module"), (converted, "mix")])
def test_another_dtype_agrees_as_far_as_its_rounding_goes(change: Change, level: str, tmp_path: Path) -> None:
    code, said = compared(record(tmp_path / "r", level=level), record(tmp_path / "t", change, level=level))
    assert (code, "The runs agree" in said) == (0, True)
    assert level == "module" or "compute in other dtypes" in said


def test_the_same_program_agrees_though_an_argument_cannot_be_compared(tmp_path: Path) -> None:
    code, said = compared(record(tmp_path / "r"), record(tmp_path / "t"))
    assert (code, "The runs agree" in said) == (0, True)


def test_the_path_of_a_module_records_what_is_inside_it(tmp_path: Path) -> None:
    record(tmp_path / "r", only="Module.1", skip="Module.1.norm")
    calls = ulpscope.open_dump(tmp_path / "r" / "step0").ids()
    names = {f"{call.kind}.{call.name}" for call in calls if call.kind != "Optimizer"}
    assert names == {"Functional.linear", "Functional.gelu", "Tensor.__add__"}


def test_show_lists_what_is_inside_a_module(tmp_path: Path) -> None:
    record(tmp_path / "r")
    said = CliRunner().invoke(cli, ["show", str(tmp_path / "r"), "1.down"]).output
    assert [line.split()[1] for line in said.splitlines()] == [
        "Functional.linear.3.forward",
        "Functional.linear.3.backward",
    ]


def test_a_program_that_raised_is_compared_as_far_as_it_went(tmp_path: Path) -> None:
    def fails(block: nn.Module) -> None:
        def raises(x: Tensor) -> Tensor:
            raise RuntimeError("boom")

        block.down.forward = raises

    record(tmp_path / "r")
    with pytest.raises(RuntimeError, match="boom"):
        record(tmp_path / "t", fails)
    code, said = compared(tmp_path / "r", tmp_path / "t")
    assert code == 3
    assert "the program raised RuntimeError: boom" in said


def test_a_traceback_through_a_watched_module_says_who_watches(tmp_path: Path) -> None:
    import traceback

    def fails(block: nn.Module) -> None:
        block.down.forward = lambda x: x @ x

    with pytest.raises(RuntimeError) as raised:
        record(tmp_path / "t", fails)
    frames = [frame for frame in traceback.extract_tb(raised.tb) if frame.filename.endswith("codeswap.py")]
    assert frames
    assert all("ulpscope watches this call" in (frame.line or "") for frame in frames)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"level": "mix"}, "level op and mix"), ({"only": "linear"}, "only [] and ['linear']")],
)
def test_runs_of_one_program_that_were_recorded_otherwise_do_not_differ(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    code, output = compared(record(tmp_path / "r"), record(tmp_path / "t", **options))
    assert code == 3
    assert said in output
    assert "Nothing that was compared differs" in output
    words = ["compare", str(tmp_path / "r"), str(tmp_path / "t"), "--format", "junit"]
    junit = CliRunner().invoke(cli, words).output
    assert 'failures="0"' in junit
    assert junit.count("<skipped message=") == 2


def test_a_call_more_that_gives_nothing_new_is_no_difference_and_a_cut_off_step_is_told(tmp_path: Path) -> None:
    for folder, calls in (("r", 1), ("t", 2)):
        with pytest.raises(RuntimeError), ulpscope.capture(tmp_path / folder) as capture:
            for _ in range(calls):
                torch.ones(2).sin()
            capture.step()
            torch.ones(2).cos()
            raise RuntimeError("boom")
    assert compared(tmp_path / "r", tmp_path / "t")[0] == 3


def test_a_seed_that_is_set_after_torch_was_first_called_is_the_one_of_the_run(tmp_path: Path) -> None:
    for folder in ("r", "t"):
        torch.seed()
        with ulpscope.capture(tmp_path / folder):
            torch.ones(2).sin()
            torch.manual_seed(5)
        assert ulpscope.open_dump(tmp_path / folder).manifest.environment["seeds"] == {"torch": 5}
    assert "seeds" not in compared(tmp_path / "r", tmp_path / "t")[1]


def drawn(folder: Path, seed: int, skipped: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(skipped):
        torch.rand(1, generator=generator)
    with ulpscope.capture(folder):
        (torch.rand(4, generator=generator) + 1).neg()
    return folder


@pytest.mark.parametrize("other", [(2, 0), (1, 1)])
def test_a_generator_that_stood_elsewhere_is_an_argument_that_differs(other: tuple[int, int], tmp_path: Path) -> None:
    code, text = compared(drawn(tmp_path / "a", 1, 0), drawn(tmp_path / "b", *other))
    assert code == 1 and "input.generator is 'cpu, seed 1, state " in text and "The fault is in this call" not in text


def test_a_generator_in_one_state_is_the_same_and_its_draws_are_not_changed_by_recording(tmp_path: Path) -> None:
    code, text = compared(drawn(tmp_path / "a", 1, 3), drawn(tmp_path / "b", 1, 3))
    assert code == 0, text
    bare, watched = (torch.Generator().manual_seed(1) for _ in range(2))
    with ulpscope.capture(tmp_path / "c"):
        numbers = torch.randn(5, generator=watched)
    assert torch.equal(numbers, torch.randn(5, generator=bare))
    assert torch.equal(watched.get_state(), bare.get_state())


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Scale) -> Tensor:
        return x * scale.by


def test_a_module_that_got_an_object_is_not_said_to_be_at_fault(tmp_path: Path) -> None:
    model = Scaled()
    for name, by in (("a", 1.0), ("b", 1.5)):
        with ulpscope.capture(tmp_path / name, model=model, level="module"):
            model(torch.ones(4), Scale(by))
    code, text = compared(tmp_path / "a", tmp_path / "b")
    text = " ".join(text.split())
    assert code == 1 and "input.1 was not recorded" in text
    assert "lean inputs" not in text and "The fault is in this call" not in text and "introduced" not in text
    assert "--only" not in text
