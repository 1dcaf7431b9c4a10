"""Names as the seeds spell them, and back."""

from __future__ import annotations

import pytest

from ulpscope.model.names import call_text, parse_call, slot_text
from ulpscope.model.records import CallId, Phase, Role, Slot

NAMES = {
    "Functional.conv2d.1.forward": CallId("Functional", "conv2d", 1, Phase.FORWARD),
    "Tensor.__add__.3.backward": CallId("Tensor", "__add__", 3, Phase.BACKWARD),
    "Distributed.all_reduce.0.forward": CallId("Distributed", "all_reduce", 0, Phase.FORWARD),
    "Module.layer1.0.Conv2d.forward.0": CallId("Module", "layer1.0.Conv2d", 0, Phase.FORWARD),
    "Module.fc2.Linear.parameters_grad.2": CallId("Module", "fc2.Linear", 2, Phase.PARAMETERS_GRAD),
    "Aten.mm.default.13.backward": CallId("Aten", "mm.default", 13, Phase.BACKWARD),
    "Optimizer.SGD.step.0": CallId("Optimizer", "SGD", 0, Phase.STEP),
    "x.0.debug": CallId("Saved", "x", 0, Phase.DEBUG),
    "Torch.mul.0.backward~2": CallId("Torch", "mul", 0, Phase.BACKWARD, 2),
}


@pytest.mark.parametrize(("text", "call"), NAMES.items())
def test_a_name_is_written_and_read_the_same(text: str, call: CallId) -> None:
    assert call_text(call) == text
    assert parse_call(text) == call


@pytest.mark.parametrize("text", ["", "relu", "Functional.relu", "Functional.relu.forward", "Module.conv.forward.x"])
def test_a_text_that_is_no_full_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="looks like Functional"):
        parse_call(text)


@pytest.mark.parametrize(
    ("role", "path", "text"),
    [
        (Role.INPUT, (0,), "input.0"),
        (Role.INPUT, ("mask",), "input.mask"),
        (Role.OUTPUT, (0, 1), "output.0.1"),
        (Role.PARAMETERS, ("weight",), "parameters.weight"),
    ],
)
def test_a_slot_is_named_by_position_key_and_nesting(role: Role, path: tuple[str | int, ...], text: str) -> None:
    assert slot_text(Slot(role, path)) == text
