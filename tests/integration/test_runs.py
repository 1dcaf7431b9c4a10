"""The comparison itself: it must see what torch.equal does not."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from integration.runs import Program, assert_same, assert_unchanged, frozen


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(1), torch.zeros(1, requires_grad=True)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        ([torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]),
        ({"a": 0.1}, {"a": 0.1 + 2**-56}),
        (None, torch.zeros(1)),
    ],
)
def test_what_differs_in_any_bit_is_seen(first: Any, second: Any) -> None:
    with pytest.raises(AssertionError):
        assert_same(frozen(first), frozen(second))


def test_two_nans_with_the_same_bits_are_the_same() -> None:
    assert_same(frozen(torch.tensor([float("nan"), -0.0])), frozen(torch.tensor([float("nan"), -0.0])))


def test_a_frozen_value_keeps_what_a_later_write_changes() -> None:
    tensor = torch.zeros(2)
    before = frozen(tensor)
    tensor[0] = 1
    with pytest.raises(AssertionError):
        assert_same(before, frozen(tensor))


def test_a_view_is_read_through_its_strides() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    assert frozen(whole.t())["bytes"] == frozen(torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))["bytes"]
    assert frozen(torch.ones(1).expand(3))["bytes"] == frozen(torch.ones(3))["bytes"]


def test_a_program_that_behaves_otherwise_under_capture_is_caught(tmp_path: Path) -> None:
    def build() -> Program:
        def step() -> torch.Tensor:
            return torch.ones(1) * (2 if torch._C._len_torch_function_stack() else 1)

        return Program(step)

    with pytest.raises(AssertionError):
        assert_unchanged(build, tmp_path, "op")


def test_a_program_that_draws_one_random_number_more_is_caught(tmp_path: Path) -> None:
    def build() -> Program:
        def step() -> float:
            torch.ones(1) + 1
            if torch._C._len_torch_function_stack():
                torch.rand(1)
            return 0.0

        return Program(step)

    with pytest.raises(AssertionError, match=r"result\.random"):
        assert_unchanged(build, tmp_path, "op")


def test_an_empty_dump_is_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        assert_unchanged(lambda: Program(lambda: 0), tmp_path, "op")


def test_the_helper_records_with_the_options_it_is_given(tmp_path: Path) -> None:
    assert_unchanged(
        lambda: Program(lambda: torch.ones(2) + 1), tmp_path, "op", has_modules=False, tensors=True, checksum=True
    )
    dump = ulpscope.open_dump(tmp_path / "run", step=2)
    (output,) = [value for value in dump.call("Tensor.__add__.0.forward").values if value.slot.role.value == "output"]
    assert dump.load(output).tolist() == [2.0, 2.0]
    assert output.checksum is not None
