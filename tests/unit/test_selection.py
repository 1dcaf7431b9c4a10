"""What is wanted of all that happens."""

from __future__ import annotations

import pytest

from ulpscope.capture.selection import Selection
from ulpscope.model.options import capture_config
from ulpscope.model.records import Phase, Role

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
    assert selection.wants_backward("Torch", "relu", 3, chosen=False)
    assert not selection.wants_backward("Torch", "relu", 4, chosen=False)
    assert not Selection(capture_config({"phases": "forward"})).wants_backward("Torch", "relu", 3, chosen=True)


def test_what_is_skipped_has_no_backward_either() -> None:
    selection = Selection(capture_config({"only": "Functional", "skip": ["linear", "Functional.relu.1.backward"]}))
    assert not selection.wants("Functional", "linear", 0, Phase.FORWARD)
    assert not selection.wants_backward("Functional", "linear", 0, chosen=False)
    assert selection.wants("Functional", "relu", 1, Phase.FORWARD)
    assert not selection.wants_backward("Functional", "relu", 1, chosen=True)
    assert selection.wants_backward("Functional", "relu", 0, chosen=True)


def test_a_backward_is_chosen_with_its_forward_also_where_forwards_are_not_recorded() -> None:
    selection = Selection(capture_config({"skip": "Functional.relu.1", "phases": "backward"}))
    for index, answer in enumerate((True, False, True)):
        chosen = selection.wants("Functional", "relu", index, Phase.FORWARD)
        assert chosen == answer
        assert selection.wants_backward("Functional", "relu", index, chosen) == answer


def test_a_backward_is_not_wanted_where_its_forward_is_skipped_or_outside_the_span() -> None:
    skipped = Selection(capture_config({"only": "relu", "skip": "Functional.relu.1.forward"}))
    assert not skipped.wants("Functional", "relu", 1, Phase.FORWARD)
    assert not skipped.wants_backward("Functional", "relu", 1, chosen=False)
    outside = Selection(capture_config({"only": "relu", "scope": ["Torch.sin.0", "Torch.sin.1"]}))
    assert not outside.wants("Functional", "relu", 0, Phase.FORWARD)
    assert not outside.wants_backward("Functional", "relu", 0, chosen=False)


@pytest.mark.parametrize(
    ("pattern", "inside"),
    [
        ("model.layers.1", True),
        ("Module.model.layers.1", True),
        ("model.layers.1.mlp", True),
        ("model.layers.10", False),
        ("layers.1", False),
        ("Module.mlp", False),
    ],
)
def test_the_path_of_a_module_stands_for_the_calls_inside_it(pattern: str, inside: bool) -> None:
    call = "Functional", "silu", 3, Phase.FORWARD, "model.layers.1.mlp"
    only = Selection(capture_config({"only": pattern}))
    assert only.wants(*call) is inside
    assert only.unmatched() == ([] if inside else [pattern])
    assert Selection(capture_config({"skip": pattern})).wants(*call) is not inside
    assert not only.wants("Functional", "silu", 4, Phase.FORWARD)


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
