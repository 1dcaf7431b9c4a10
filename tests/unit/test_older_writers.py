"""Dumps written in the files of ptdbg_ascend and torch_npu.hooks, from dumps made by hand, and read again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from builders import DumpBuilder
from ulpscope.cli.convert import convert
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Phase, Value
from ulpscope.native.schema import NONE32
from ulpscope.store.dump import Dump
from ulpscope.store.formats.hooks_writer import export_arrays, write_hooks
from ulpscope.store.formats.ptdbg_writer import ptdbg_folder, write_ptdbg
from ulpscope.store.registry import open_dump

ARRAY = np.array([[1.5, -2.0], [0.0, 4.0]], dtype=np.float32)
LONG = np.arange(16, dtype=np.float32)


def made(folder: Path, *calls: tuple[Any, ...]) -> Dump:
    """A native dump of calls (kind, name, phase, values)."""
    builder = DumpBuilder(folder / "native")
    for kind, name, phase, values in calls:
        builder.call(kind, name, 0, phase, values)
    return open_dump(builder.close())


def rows(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(dump: Dump) -> dict[str, Any]:
    """The elements or the content of every value, by name."""

    def content(value: Value) -> Any:
        return dump.load(value).tolist() if value.payload is not None else value.scalar

    return {
        f"{call_text(call.id)} {slot_text(value.slot)}": content(value)
        for call in dump.calls()
        for value in call.values
    }


# --- ptdbg_ascend -----------------------------------------------------------------------------------------------


def test_values_come_back_from_the_files_of_ptdbg(tmp_path: Path) -> None:
    forward = {("input", 0): ARRAY, ("input", 1, 0): 3, ("input", "other"): LONG, ("output", 0): ARRAY * 2}
    backward = {("input", 0): ARRAY + 1, ("output", 0): ARRAY + 2, ("output", 1): LONG}
    dump = made(tmp_path, ("Torch", "mul", Phase.FORWARD, forward), ("Torch", "mul", Phase.BACKWARD, backward))
    path = write_ptdbg(dump, tmp_path / "rank0")
    assert [row[0] for row in rows(path)] == [
        "Torch_mul_0_forward_input.0",
        "Torch_mul_0_forward_input.1.0",
        "Torch_mul_0_forward_input.other",
        "Torch_mul_0_forward_output",
        "Torch_mul_0_backward_input.0",
        "Torch_mul_0_backward_output.0",
        "Torch_mul_0_backward_output.1",
    ]
    again = open_dump(path)
    assert contents(again) == contents(dump)
    assert [call.origin for call in again.calls()] == [None, 0]
    assert (path.stat().st_mode & 0o777, (tmp_path / "rank0" / "dump").stat().st_mode & 0o777) == (0o640, 0o750)


def test_statistics_are_those_that_ptdbg_has(tmp_path: Path) -> None:
    values = {
        ("input", 0): ARRAY,
        ("input", 1): np.array([True, False]),
        ("input", 2): np.zeros((0, 3), dtype=np.float32),
        ("input", 3): np.array(2.5, dtype=np.float32),
        ("input", 4): np.array([1, 3], dtype=np.int64),
        ("input", 5): True,
        ("input", 6): "mean",
        ("input", 7): None,
        ("output", 0): ARRAY,
        ("output", 1): ARRAY,
    }
    written = {
        row[0].rpartition("_")[2]: row[3:]
        for row in rows(write_ptdbg(made(tmp_path, ("Torch", "f", Phase.FORWARD, values)), tmp_path))
    }
    assert written == {
        "input.0": ["torch.float32", [2, 2], [4.0, -2.0, 0.875, pytest.approx(22.25**0.5)]],
        "input.1": ["torch.bool", [2], [[], [], [], "Nan"]],
        "input.2": ["torch.float32", [0, 3], [[], [], [], "Nan"]],
        "input.3": ["torch.float32", [], [2.5, 2.5, 2.5, "Nan"]],
        "input.4": ["torch.int64", [2], [3.0, 1.0, 2.0, pytest.approx(10**0.5)]],
        "input.5": ["<class 'bool'>", "[]", [True] * 4],
        "output.0": ["torch.float32", [2, 2], [4.0, -2.0, 0.875, pytest.approx(22.25**0.5)]],
        "output.1": ["torch.float32", [2, 2], [4.0, -2.0, 0.875, pytest.approx(22.25**0.5)]],
    }


def test_scalars_have_arrays_too_and_equal_tensors_share_one(tmp_path: Path) -> None:
    values = {("input", 0): ARRAY, ("input", 1): 3, ("input", 2): 0.5, ("input", 3): True, ("input", 4): 1 << 70}
    write_ptdbg(made(tmp_path, ("Torch", "f", Phase.FORWARD, values)), tmp_path)
    loaded = {path.stem.rpartition("_")[2]: np.load(path) for path in (tmp_path / "dump").iterdir()}
    assert sorted(loaded) == ["input.0", "input.1", "input.2", "input.3"]
    assert [loaded[f"input.{at}"].item() for at in (1, 2, 3)] == [3, 0.5, True]


def test_the_mode_is_in_the_names_and_says_what_is_written(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "native")
    frames = {
        "frames": [["net.py", 58, "forward", "return conv(x)", False], ["train.py", 3, "main", "net(x)", False]],
        "parent": None,
    }
    builder.call("Functional", "relu", values={("output", 0): ARRAY}, stack=builder.text(frames))
    dump = open_dump(builder.close())
    stack = [
        "Functional_relu_0_forward_stack_info",
        [["net.py", "58", "forward", "return conv(x)"], ["train.py", "3", "main", "net(x)"]],
    ]
    value = "Functional_relu_0_forward_output"
    for mode, names in {"all": [value], "list": [value], "api_stack": [value, stack[0]], "stack": [stack[0]]}.items():
        path = write_ptdbg(dump, tmp_path / "rank0", mode=mode)
        assert path.name == ("dump.pkl" if mode == "all" else f"{mode}_dump.pkl")
        assert [row[0] for row in rows(path)] == names
        assert path.with_suffix("").is_dir() is (mode != "stack")
    assert rows(tmp_path / "rank0" / "stack_dump.pkl") == [stack]
    assert [frame.line for frame in open_dump(path).stack(open_dump(path).nth(0))] == [58, 3]


def test_a_second_write_replaces_the_first_and_leaves_other_modes_alone(tmp_path: Path) -> None:
    first = made(tmp_path / "a", ("Torch", "abs", Phase.FORWARD, {("output", 0): ARRAY}))
    second = made(tmp_path / "b", ("Torch", "neg", Phase.FORWARD, {("output", 0): ARRAY}))
    for dump, mode in ((first, "all"), (first, "list"), (second, "all")):
        write_ptdbg(dump, tmp_path / "rank0", mode=mode)
    assert {path.name for path in (tmp_path / "rank0").iterdir()} == {"dump", "dump.pkl", "list_dump", "list_dump.pkl"}
    assert [path.name for path in (tmp_path / "rank0" / "dump").iterdir()] == ["Torch_neg_0_forward_output.npy"]


def test_without_arrays_there_is_no_folder(tmp_path: Path) -> None:
    dump = made(tmp_path, ("Torch", "abs", Phase.FORWARD, {("output", 0): ARRAY}))
    write_ptdbg(dump, tmp_path / "rank0", arrays=False)
    assert [path.name for path in (tmp_path / "rank0").iterdir()] == ["dump.pkl"]


def test_only_floating_tensors_are_left_when_others_are_filtered(tmp_path: Path) -> None:
    whole = np.array([1], dtype=np.int64)
    values = {("input", 0): ARRAY, ("input", 1): whole, ("input", 2): 2.0, ("output", 0): whole > 0}
    path = write_ptdbg(made(tmp_path, ("Torch", "f", Phase.FORWARD, values)), tmp_path, floats_only=True)
    assert [row[0] for row in rows(path)] == ["Torch_f_0_forward_input.0"]


def test_a_module_that_was_named_has_its_name_alone_and_step_1(tmp_path: Path) -> None:
    values = {("input", 0): ARRAY, ("parameters", "weight"): ARRAY, ("output", 0): ARRAY}
    dump = made(tmp_path, ("Module", "MyModule.Linear", Phase.FORWARD, values))
    path = write_ptdbg(dump, tmp_path)
    assert [row[:2] for row in rows(path)] == [["MyModule_0_forward_input.0", 1], ["MyModule_0_forward_output", 1]]
    assert [call_text(call) for call in open_dump(path).ids()] == ["Module.MyModule.forward.0"]
    assert rows(write_ptdbg(open_dump(path), tmp_path / "copy")) == rows(path)


def test_what_has_no_place_is_left_out(tmp_path: Path) -> None:
    dump = made(
        tmp_path,
        ("Optimizer", "SGD", Phase.STEP, {("input", 0): ARRAY}),
        ("Module", "fc.Linear", Phase.PARAMETERS_GRAD, {("parameters", "weight"): ARRAY}),
        ("Torch", "abs", Phase.FORWARD, {("output", 0): ARRAY}),
    )
    assert [row[0] for row in rows(write_ptdbg(dump, tmp_path))] == ["Torch_abs_0_forward_output"]


def test_keys_that_are_no_names_stay_apart(tmp_path: Path) -> None:
    values = {("input", 0, key): ARRAY for key in ("a/b", "a b", "7", "x" * 300)}
    path = write_ptdbg(made(tmp_path, ("Torch", "f", Phase.FORWARD, values)), tmp_path)
    assert len({row[0] for row in rows(path)}) == len(open_dump(path).nth(0).values) == 4
    assert len(list((tmp_path / "dump").iterdir())) == 4


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    dump = made(tmp_path, ("Torch", "abs", Phase.FORWARD, {("output", 0): ARRAY}))
    with pytest.raises(DumpError, match="file"):
        write_ptdbg(dump, tmp_path / "file" / "rank0")


def test_the_folder_of_a_rank_is_in_the_order_of_the_manual() -> None:
    assert ptdbg_folder(Path("d"), rank=3) == Path("d/ptdbg_dump_v2.0/rank3")
    assert ptdbg_folder(Path("d"), rank=0, step=2, tag="all") == Path("d/step2/all_v2.0/rank0")


# --- torch_npu.hooks --------------------------------------------------------------------------------------------


def test_sampled_lines_hold_ten_values_and_three_statistics(tmp_path: Path) -> None:
    dump = made(tmp_path, ("Functional", "linear", Phase.FORWARD, {("input", 0): ARRAY, ("output", 0): LONG}))
    write_hooks(dump, tmp_path / "op.pkl")
    assert rows(tmp_path / "op.pkl") == [
        ["0_Functional_linear_forward_input.0", [1.5, -2.0, 0.0, 4.0, 4.0, -2.0, 0.875], "torch.float32", [2, 2]],
        ["1_Functional_linear_forward_output", [*map(float, range(10)), 15.0, 0.0, 7.5], "torch.float32", [16]],
    ]


def test_whole_lines_come_back(tmp_path: Path) -> None:
    backward = {("input", 0): LONG, ("output", 0): LONG + 1}
    dump = made(
        tmp_path,
        ("Functional", "relu", Phase.FORWARD, {("input", 0): ARRAY, ("output", 0): ARRAY.astype(np.float16)}),
        ("Functional", "relu", Phase.BACKWARD, backward),
    )
    write_hooks(dump, tmp_path / "op.pkl", sample=False)
    names = [row[0].partition("_")[2] for row in rows(tmp_path / "op.pkl")]
    assert names[2:] == ["Functional_relu_backward_input.0", "Functional_relu_backward_output.0"]
    assert rows(tmp_path / "op.pkl")[3][1] == LONG.tolist()  # what came in is `output` there
    assert contents(open_dump(tmp_path / "op.pkl")) == contents(dump)


def test_lines_hold_floating_tensors_with_a_dimension_only(tmp_path: Path) -> None:
    values = {
        ("input", 0): np.array(1.0, dtype=np.float32),
        ("input", 1): np.array([1], dtype=np.int64),
        ("input", 2): np.zeros(0, dtype=np.float32),
        ("input", 3): 2.0,
        ("output", 0): ARRAY,
    }
    write_hooks(made(tmp_path, ("Torch", "f", Phase.FORWARD, values)), tmp_path / "op.pkl")
    assert [row[0] for row in rows(tmp_path / "op.pkl")] == ["0_Torch_f_forward_output"]


def test_exported_arrays_have_everything_in_their_names(tmp_path: Path) -> None:
    dump = made(
        tmp_path,
        ("Functional", "relu", Phase.FORWARD, {("input", 0): ARRAY, ("output", 0): ARRAY}),
        ("Functional", "relu", Phase.BACKWARD, {("input", 0): LONG, ("output", 0): np.ones((2, 1), dtype=np.float32)}),
    )
    export_arrays(dump, tmp_path / "output")
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == [
        "0_Functional_relu_forward_input0_shape[2,2]_stride[2,1]_offset[0]_format[2].npy",
        "1_Functional_relu_forward_output0_shape[2,2]_stride[2,1]_offset[0]_format[2].npy",
        "2_Functional_relu_backward_output0_shape[16]_stride[1]_offset[0]_format[2].npy",
        "3_Functional_relu_backward_input0_shape[2,1]_stride[1,1]_offset[0]_format[2].npy",
    ]
    name = "3_Functional_relu_backward_input0_shape[2,1]_stride[1,1]_offset[0]_format[2].npy"
    assert np.load(tmp_path / "output" / name).tolist() == [[1.0], [1.0]]


def test_convert_writes_for_ptdbg(tmp_path: Path) -> None:
    dump = made(tmp_path, ("Torch", "abs", Phase.FORWARD, {("input", 0): LONG, ("output", 0): ARRAY}))
    done = CliRunner().invoke(convert, [str(dump.folder), str(tmp_path / "old"), "--to", "ptdbg"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "old/step0/ptdbg_dump_v2.0/rank0/api_stack_dump.pkl").is_file()
    assert contents(open_dump(tmp_path / "old")) == contents(dump)


def test_a_tensor_whose_sizes_cannot_be_said_is_left_out(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "native")
    nested = builder.text({"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, None, 4]})
    plain = builder._value
    builder._value = lambda value: (nested, NONE32, NONE32) if value == "nested" else plain(value)  # type: ignore[method-assign]
    builder.call("Torch", "f", values={("input", 0): "nested", ("input", 1): 3})
    dump = open_dump(builder.close())
    assert [row[0] for row in rows(write_ptdbg(dump, tmp_path))] == ["Torch_f_0_forward_input.1"]


def test_files_are_readable_for_the_group_whatever_the_umask(tmp_path: Path) -> None:
    dump = made(tmp_path, ("Torch", "abs", Phase.FORWARD, {("output", 0): ARRAY}))
    before = os.umask(0o077)
    try:
        path = write_ptdbg(dump, tmp_path / "rank0")
    finally:
        os.umask(before)
    modes = [each.stat().st_mode & 0o777 for each in (path, path.with_suffix(""), *path.with_suffix("").iterdir())]
    assert modes == [0o640, 0o750, 0o640]
