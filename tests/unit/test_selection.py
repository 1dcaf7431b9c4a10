"""What is wanted of all that happens."""

from __future__ import annotations

import pytest

from ulpscope.capture.selection import Selection
from ulpscope.config import capture_config
from ulpscope.records import Phase, Role

CALLS = [
    ("Functional", "relu", 0),
    ("Functional", "leaky_relu", 0),
    ("Functional", "relu", 1),
    ("Module", "a.b.ReLU", 0),
]


def chosen(**options: object) -> list[tuple[str, str, int]]:
    selection = Selection(capture_config(options))
    return [call for call in CALLS if selection.wants(*call, Phase.FORWARD)]


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, [0, 1, 2, 3]),
        ({"only": "relu"}, [0, 1, 2, 3]),
        ({"only": "Functional.relu"}, [0, 2]),
        ({"only": "Functional.relu.1.forward"}, [2]),
        ({"only": "Functional.relu.1"}, [2]),
        ({"only": "a.b"}, [3]),
        ({"only": ["leaky", "a.b"]}, [1, 3]),
        ({"skip": "Functional"}, [3]),
        ({"only": "relu", "skip": "leaky"}, [0, 2, 3]),
        ({"scope": ["Functional.leaky_relu.0.forward", "Functional.relu.1.forward"]}, [1, 2]),
        ({"scope": ["Functional.relu.0", "Functional.relu.1"], "only": "leaky"}, [1]),
    ],
)
def test_names_and_spans(options: dict[str, object], places: list[int]) -> None:
    assert chosen(**options) == [CALLS[place] for place in places]


def test_a_name_of_one_call_does_not_stand_for_the_tenth() -> None:
    selection = Selection(capture_config({"only": "Tensor.add.1.forward"}))
    assert not selection.wants("Tensor", "add", 10, Phase.FORWARD)


def test_a_backward_is_wanted_as_its_forward_or_by_its_own_name() -> None:
    selection = Selection(capture_config({"only": ["Torch.relu.3.backward"]}))
    assert not selection.wants("Torch", "relu", 3, Phase.FORWARD)
    assert selection.wants_backward("Torch", "relu", 3, forward_wanted=False)
    assert not selection.wants_backward("Torch", "relu", 4, forward_wanted=False)
    assert not Selection(capture_config({"phases": "forward"})).wants_backward("Torch", "relu", 3, forward_wanted=True)


def test_what_is_skipped_has_no_backward_either() -> None:
    selection = Selection(capture_config({"only": "Functional", "skip": ["linear", "Functional.relu.1.backward"]}))
    assert not selection.wants("Functional", "linear", 0, Phase.FORWARD)
    assert not selection.wants_backward("Functional", "linear", 0, forward_wanted=False)
    assert selection.wants("Functional", "relu", 1, Phase.FORWARD)
    assert not selection.wants_backward("Functional", "relu", 1, forward_wanted=True)
    assert selection.wants_backward("Functional", "relu", 0, forward_wanted=True)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({}, True),
        ({"only": "relu"}, True),
        ({"only": "gelu"}, False),
        ({"skip": "RELU"}, False),
        ({"skip": ["gelu", "Functional.relu.1"]}, None),
        ({"only": "Functional.relu.1.backward"}, None),
        ({"only": "Functional.relu.1", "skip": "relu"}, False),
        ({"only": ["Functional.relu.1", "relu"]}, True),
        ({"scope": ["Functional.relu.0", "Functional.relu.1"]}, None),
    ],
)
def test_a_name_may_tell_of_all_its_calls(options: dict[str, object], answer: bool | None) -> None:
    assert Selection(capture_config(options)).of_name("Functional", "relu") is answer


def test_names_that_nothing_had_are_known() -> None:
    selection = Selection(capture_config({"only": ["relu", "gelu"]}))
    assert selection.wants("Functional", "relu", 0, Phase.FORWARD)
    assert selection.unmatched() == ["gelu"]


def test_steps_ranks_and_roles() -> None:
    selection = Selection(capture_config({"steps": "0,10:12", "ranks": [1], "roles": ["output"]}))
    assert [step for step in range(20) if selection.wants_step(step)] == [0, 10, 11, 12]
    assert [rank for rank in range(3) if selection.wants_rank(rank)] == [1]
    assert selection.wants_role(Role.OUTPUT)
    assert not selection.wants_role(Role.INPUT)
    assert selection.past(13)
    assert not selection.past(11)
