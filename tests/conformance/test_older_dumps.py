"""Dumps that users of ptdbg_ascend and torch_npu.hooks have on disk, read as their manuals describe them.

These tests serve the rows as far as reading goes; that the older names write such files is the matter of other tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ulpscope import open_dump, open_run
from ulpscope.model.names import call_text, slot_text

ARRAY = np.array([[1.5, -2.0], [0.0, 4.0]], dtype=np.float32)
STATISTICS = [4.0, -2.0, 0.875, 4.716990566028302]


def row(name: str, **fields: Any) -> list[Any]:
    facts = {"step": 0, "dtype": "torch.float32", "shape": [2, 2], "statistics": STATISTICS, **fields}
    return [name, facts["step"], [], facts["dtype"], facts["shape"], facts["statistics"]]


def dumped(folder: Path, *rows: list[Any], name: str = "dump") -> Path:
    """A .pkl and the folder with the arrays of its tensors, as ptdbg_ascend leaves them."""
    (folder / name).mkdir(parents=True)
    (folder / f"{name}.pkl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    for each in rows:
        if each[3] == "torch.float32":
            np.save(folder / name / f"{each[0]}.npy", ARRAY)
    return folder / f"{name}.pkl"


def test_000_090_the_ranks_of_a_run_are_found_below_its_tag_and_version(tmp_path: Path) -> None:
    for rank in range(8):
        dumped(tmp_path / "ptdbg_dump_v2.0" / f"rank{rank}", row("Tensor_permute_1_forward_output"))
    for start in (tmp_path, tmp_path / "ptdbg_dump_v2.0"):
        assert [dump.manifest.rank for dump in open_run(start)] == list(range(8))


@pytest.mark.parametrize("order", ["step{}/ptdbg_dump_v3.0/rank0", "ptdbg_dump_v3.0/step{}/rank0"])
def test_000_091_steps_are_found_above_and_below_the_version(tmp_path: Path, order: str) -> None:
    for step in (0, 1, 2):
        dumped(tmp_path / order.format(step), row("Tensor_permute_1_forward_output"))
    assert [dump.manifest.step for dump in open_run(tmp_path)] == [0, 1, 2]


def test_000_092_the_mode_in_front_of_the_names_is_known(tmp_path: Path) -> None:
    dumped(tmp_path / "all_v2.0" / "rank0", row("Tensor_permute_1_forward_output"), name="api_stack_dump")
    dump = open_dump(tmp_path / "all_v2.0" / "rank0" / "api_stack_dump.pkl")
    assert dump.manifest.config["mode"] == "api_stack"
    assert np.array_equal(dump.load(dump.nth(0).values[0]), ARRAY)


def test_000_093_nested_arguments_and_single_outputs_have_their_arrays(tmp_path: Path) -> None:
    names = ["VF_lstm_99_forward_input.0", "VF_lstm_99_forward_input.1.0", "VF_lstm_99_forward_output"]
    dump = open_dump(dumped(tmp_path, *map(row, names)))
    (call,) = dump.calls()
    assert [slot_text(value.slot) for value in call.values] == ["input.0", "input.1.0", "output.0"]
    assert all(np.array_equal(dump.load(value), ARRAY) for value in call.values)


def test_000_094_every_prefix_is_the_kind_of_its_calls_and_other_names_are_modules(tmp_path: Path) -> None:
    kinds = ["Tensor", "Torch", "Functional", "NPU", "VF", "Distributed", "Aten"]
    dump = open_dump(
        dumped(tmp_path, *(row(f"{name}_0_forward_output") for name in [f"{k}_op" for k in kinds] + ["MyModule"]))
    )
    assert [call.kind for call in dump.ids()] == [*kinds, "Module"]
    assert call_text(dump.ids()[-1]) == "Module.MyModule.forward.0"


def test_000_095_a_line_gives_type_shape_and_statistics_with_and_without_a_norm(tmp_path: Path) -> None:
    rows = [row("Torch_f_0_forward_input.0"), row("Torch_f_0_forward_output", statistics=STATISTICS[:3])]
    with_norm, without = open_dump(dumped(tmp_path, *rows)).nth(0).values
    assert (with_norm.dtype, with_norm.shape) == ("torch.float32", (2, 2))
    for value, norm in ((with_norm, STATISTICS[3]), (without, None)):
        assert value.stats is not None
        assert [value.stats.max, value.stats.min, value.stats.mean, value.stats.norm] == [*STATISTICS[:3], norm]


def test_000_096_the_files_of_an_overflow_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "ptdbg_dump_v3.0" / "rank0"
    dumped(folder, row("Tensor___add___1_forward_output", step=101), name="Tensor___add___1_forward_1")
    dump = open_dump(tmp_path)
    assert [call_text(call) for call in dump.ids()] == ["Tensor.__add__.1.forward"]
    assert np.array_equal(dump.load(dump.nth(0).values[0]), ARRAY)


def test_001_012_lines_of_the_hooks_are_read_sampled_and_whole(tmp_path: Path) -> None:
    numbers = [float(number) for number in range(16)]
    lines = {"sampled": [*numbers[:10], 15.0, 0.0, 7.5], "whole": numbers}
    for name, values in lines.items():
        line = json.dumps(["0_Functional_linear_forward_output", values, "torch.float32", [4, 4]])
        (tmp_path / f"{name}.pkl").write_text(line + "\n")
        dump = open_dump(tmp_path / f"{name}.pkl")
        (value,) = dump.call("Functional.linear.0.forward").values
        sample = dump.sample(value)
        assert sample is not None and sample.tolist() == values
        assert value.stats is not None and (value.stats.max, value.stats.min, value.stats.mean) == (15.0, 0.0, 7.5)
        assert (value.payload is not None) is (name == "whole")


def test_001_022_gradients_of_the_hooks_go_where_later_generations_have_them(tmp_path: Path) -> None:
    lines = [
        ["0_Functional_relu_backward_input.0", [1.0], "torch.float32", [1]],  # what left the call
        ["1_Functional_relu_backward_output.0", [2.0], "torch.float32", [1]],  # what came in
    ]
    (tmp_path / "cpu.pkl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {slot_text(value.slot): value for value in open_dump(tmp_path / "cpu.pkl").nth(0).values}
    assert {slot: value.stats.max for slot, value in values.items() if value.stats} == {"output.0": 1.0, "input.0": 2.0}
    assert values["input.0"].extra["name"] == "1_Functional_relu_backward_output.0"
