"""Where msprobe's files have a value that ours calls by another place, and how it comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ulpscope.model.errors import DumpError
from ulpscope.model.names import slot_text
from ulpscope.store.formats.msprobe_writer import write_msprobe
from ulpscope.store.registry import open_dump


def leaf(maximum: float, *, needs: bool = True, shape: tuple[int, ...] = (2,), **more: Any) -> dict[str, Any]:
    numbers = {"Max": maximum, "Min": -1.0, "Mean": 0.5, "Norm": 4.0}
    return {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": list(shape), **numbers, "requires_grad": needs, **more,
    }  # fmt: skip


def rewritten(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """A dump with these calls, read and written again; what is read from that must be what was read first."""
    first, second = folder / "first", folder / "second"
    first.mkdir()
    (first / "dump.json").write_text(json.dumps({"task": "statistics", "level": "mix", "data": data}))
    write_msprobe(open_dump(first), second, level="mix")
    assert slots(second) == slots(first)
    content: dict[str, Any] = json.loads((second / "dump.json").read_text())["data"]
    return content


def slots(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            slot_text(value.slot): (value.type, value.stats and (value.stats.max, value.stats.norm))
            for value in call.values
        }
        for call in open_dump(folder).calls()
    ]


def test_gradients_of_a_module_are_counted_over_what_needs_one(tmp_path: Path) -> None:
    forward = {
        "input_args": [leaf(1.0, needs=False), [leaf(2.0), leaf(3.0)]],
        "input_kwargs": {"mask": leaf(4.0)},
        "output": [leaf(5.0, needs=False), [leaf(6.0), leaf(7.0)]],
        "parameters": {},
    }
    backward = {"input": [None, [None, leaf(70.0)]], "output": [None, [leaf(20.0)], leaf(40.0, slot=["mask"])]}
    found = rewritten(tmp_path, {"Module.block.Block.forward.0": forward, "Module.block.Block.backward.0": backward})[
        "Module.block.Block.backward.0"
    ]
    assert found["input"] == [None, leaf(70.0, slot=[1, 1])]
    assert found["output"] == [leaf(20.0, slot=[1, 0]), None, leaf(40.0, slot=["mask"])]


def test_what_a_call_without_a_result_wrote_stands_beside_an_empty_place(tmp_path: Path) -> None:
    name = "Tensor.__setitem__.0.forward"
    found = rewritten(tmp_path, {name: {"input_args": [leaf(1.0)], "input_kwargs": {}, "output": [leaf(2.0)]}})[name]
    assert found["output"] == [None]
    assert found["written"] == [leaf(2.0)]


def test_the_norm_of_a_tensor_without_dimensions_is_its_element(tmp_path: Path) -> None:
    name = "Tensor.sum.0.forward"
    number = leaf(-4.0, shape=())
    found = rewritten(tmp_path, {name: {"input_args": [], "input_kwargs": {}, "output": [number]}})[name]
    assert found["output"] == [{**number, "Norm": -4.0}]


@pytest.mark.parametrize("slot", ["mask", [1.5], [None], [["mask"]], [True]])
def test_a_slot_that_is_no_path_is_refused(tmp_path: Path, slot: Any) -> None:
    data = {"Torch.mul.0.backward": {"input": [], "output": [leaf(1.0, slot=slot)]}}
    (tmp_path / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "data": data}))
    with pytest.raises(DumpError, match="slot is"):
        list(open_dump(tmp_path).calls())
