"""Dumps of ptdbg_ascend: lines from real runs, every layout it has had, and files that somebody broke."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.cli.convert import convert
from ulpscope.cli.show import show
from ulpscope.compare.comparison import Evidence, Level
from ulpscope.compare.engine import compare_runs
from ulpscope.model.dtypes import DTYPES
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Phase, ToldStats
from ulpscope.store.dump import Dump
from ulpscope.store.files.npy import write_npy
from ulpscope.store.registry import find_folders, open_dump, open_run

# Lines of a real run of version 3.0.
REAL = """\
["Functional_conv2d_0_forward_input.0", 0, [], "torch.float32", [8, 1, 8, 8], [4.1014933586120605, -3.153724431991577, 0.06246297061443329, 23.01077651977539]]
["Functional_conv2d_0_forward_input.3.0", 0, [], "<class 'int'>", "[]", [1, 1, 1, 1]]
["Functional_conv2d_0_forward_output", 0, [], "torch.float32", [8, 4, 8, 8], [1.653745412826538, -1.561139464378357, 0.044637370854616165, 22.90460968017578]]
["Functional_conv2d_0_forward_stack_info", [["/path/file.py", "58", "__call__", "result = self._call_func(*input, **kwargs)"]]]
["Tensor_sum_0_forward_output", 0, [], "torch.float32", [], [0.38166171312332153, 0.38166171312332153, 0.38166171312332153, "Nan"]]
"""
ARRAY = np.array([[1.5, -2.0], [0.0, 4.0]], dtype=np.float32)


def value(name: str, array: Any = ARRAY, step: int = 0) -> list[Any]:
    """The row of an array, as the tool writes it."""
    statistics = [float(array.max()), float(array.min()), float(array.mean()), float(np.linalg.norm(array))]
    return [name, step, [], f"torch.{array.dtype}", list(array.shape), statistics]


def handmade(folder: Path, *rows: Any, name: str = "dump", arrays: dict[str, Any] | None = None) -> Path:
    """A rank folder with one .pkl; `arrays` go into the folder beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pkl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if arrays is not None:
        (folder / name).mkdir()
        for file, array in arrays.items():
            np.save(folder / name / f"{file}.npy", array)
    return path


def names(dump: Dump) -> list[str]:
    return [call_text(call) for call in dump.ids()]


# --- rows -------------------------------------------------------------------------------------------------------


def test_the_lines_of_a_real_run_are_read(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "api_stack_dump.pkl").write_text(REAL)
    dump = open_dump(tmp_path)
    assert dump.source.format == "ptdbg_ascend"
    assert names(dump) == ["Functional.conv2d.0.forward", "Tensor.sum.0.forward"]
    assert (len(dump), dump.value_count, dump.ending, dump.manifest.config["mode"]) == (2, 4, "complete", "api_stack")
    conv, total = dump.calls()
    first, padding, output = conv.values
    assert [slot_text(item.slot) for item in conv.values] == ["input.0", "input.3.0", "output.0"]
    assert (first.dtype, first.shape, first.type) == ("torch.float32", (8, 1, 8, 8), "torch.Tensor")
    assert isinstance(first.stats, ToldStats)
    assert first.stats.max == 4.1014933586120605 and first.stats.norm == 23.01077651977539
    assert (padding.type, padding.scalar, padding.shape, padding.stats) == ("int", 1, None, None)
    assert output.extra == {"name": "Functional_conv2d_0_forward_output"}
    (frame,) = dump.stack(conv)
    assert (frame.file, frame.line, frame.function) == ("/path/file.py", 58, "__call__")
    assert dump.stack(total) == []
    stats = total.values[0].stats
    assert stats and (stats.max, stats.norm) == (0.38166171312332153, None)
    assert dump.modules() == ["", ""] and dump.sample(first) is None and dump.sketch(first) is None


@pytest.mark.parametrize(
    ("row", "call"),
    [
        ("Torch_batch_norm_0_forward_output", "Torch.batch_norm.0.forward"),
        ("Tensor___add___0_forward_input.1", "Tensor.__add__.0.forward"),
        ("Tensor_add__12_forward_input.1", "Tensor.add_.12.forward"),
        ("VF_lstm_99_forward_input.1.0", "VF.lstm.99.forward"),
        ("NPU_npu_bmmV2_3_backward_input.0", "NPU.npu_bmmV2.3.backward"),
        ("Aten__log_softmax_0_forward_output", "Aten._log_softmax.0.forward"),
        ("Distributed__all_gather_base_1_forward_input.0", "Distributed._all_gather_base.1.forward"),
        ("Functional_max_pool2d_2_backward_output.0", "Functional.max_pool2d.2.backward"),
        ("MyModule_0_forward_input.0", "Module.MyModule.forward.0"),
        ("my_own_1_module_7_forward_output", "Module.my_own_1_module.forward.7"),
        ("Module_Linear_0_backward_output.0", "Module.Linear.backward.0"),
    ],
)
def test_names_with_underscores_are_told_apart(tmp_path: Path, row: str, call: str) -> None:
    dump = open_dump(handmade(tmp_path, value(row)))
    assert names(dump) == [call]
    assert dump.call(call).values[0].extra["name"] == row


def test_a_backward_call_knows_its_forward_call(tmp_path: Path) -> None:
    rows = [value(f"Torch_mul_{index}_forward_output") for index in (0, 1)]
    dump = open_dump(handmade(tmp_path, *rows, value("Torch_mul_1_backward_input.0")))
    assert [call.origin for call in dump.calls()] == [None, None, 1]
    assert dump.nth(2).id.phase is Phase.BACKWARD


def test_statistics_that_were_not_taken_are_unknown(tmp_path: Path) -> None:
    kinds: list[tuple[str, Any, list[Any]]] = [
        ("torch.bool", [2], [[], [], [], "Nan"]),
        ("torch.float32", [2], [1.5, -2.0, 0.5]),
        ("torch.int64", [2], [7.0, 0.0, 3.5, "Nan"]),
        ("torch.float32", [0, 3], [[], [], [], "Nan"]),
        ("torch.float32", [2], [math.nan, math.nan, math.nan, math.nan]),
        ("torch.float16", [2], [math.inf, -math.inf, math.nan, math.inf]),
    ]
    rows = [[f"Torch_f_0_forward_input.{at}", 0, [], *kind] for at, kind in enumerate(kinds)]
    boolean, three, integer, empty, nan, inf = open_dump(handmade(tmp_path, *rows)).nth(0).values
    assert boolean.stats is None
    assert three.stats and (three.stats.max, three.stats.min, three.stats.mean, three.stats.norm) == (
        1.5,
        -2,
        0.5,
        None,
    )
    assert integer.stats and (integer.stats.max, integer.stats.norm) == (7, None)
    assert empty.stats and (empty.stats.numel, empty.stats.max) == (0, None)
    assert nan.stats and math.isnan(nan.stats.max or 0) and math.isnan(nan.stats.norm or 0)
    assert inf.stats and (inf.stats.max, inf.stats.min, inf.stats.norm) == (math.inf, -math.inf, math.inf)


def test_scalars_of_every_kind_are_values_without_a_shape(tmp_path: Path) -> None:
    scalars = [("bool", True), ("int", 3), ("float", 0.1), ("float", math.nan), ("slice", [])]
    rows = [
        [f"Torch_f_0_forward_input.{at}", 0, [], f"<class '{kind}'>", "[]", [item] * 4]
        for at, (kind, item) in enumerate(scalars)
    ]
    found = [(item.type, item.scalar, item.is_tensor) for item in open_dump(handmade(tmp_path, *rows)).nth(0).values]
    assert found == [
        ("bool", True, False),
        ("int", 3, False),
        ("float", 0.1, False),
        ("float", "nan", False),
        ("slice", None, False),
    ]


def test_the_number_of_an_overflow_and_of_a_module_is_kept(tmp_path: Path) -> None:
    rows = [value("Net_0_forward_output", step=1), value("Tensor_add_1_forward_output", step=101)]
    dump = open_dump(handmade(tmp_path, *rows))
    assert [call.values[0].extra.get("dump_step") for call in dump.calls()] == [1, 101]


def test_a_second_backward_through_the_same_graph_is_a_repeat_and_the_last_one_wrote_the_file(tmp_path: Path) -> None:
    name = "Torch_mul_0_backward_input.0"
    path = handmade(tmp_path, value(name), value(name, ARRAY + 1), arrays={name: ARRAY + 1})
    dump = open_dump(path)
    assert names(dump) == ["Torch.mul.0.backward", "Torch.mul.0.backward~1"]
    first, second = (call.values[0] for call in dump.calls())
    assert first.payload is None and "wrote over it" in first.extra["missing"]
    assert np.array_equal(dump.load(second), ARRAY + 1)


def test_the_parts_of_a_call_may_lie_apart(tmp_path: Path) -> None:
    stack = [["net.py", "7", "forward", "all_reduce(x)"], ["run.py", "1", "<module>", None]]
    rows = [
        ["Distributed_all_reduce_0_forward_stack_info", stack],
        value("Distributed_all_reduce_0_forward_input.0"),
        value("Tensor_detach_0_forward_output"),
        value("Distributed_all_reduce_0_forward_output.0"),
    ]
    dump = open_dump(handmade(tmp_path, *rows))
    assert names(dump) == ["Distributed.all_reduce.0.forward", "Tensor.detach.0.forward"]
    assert [slot_text(item.slot) for item in dump.nth(0).values] == ["input.0", "output.0"]
    assert [frame.text for frame in dump.stack(dump.nth(0))] == ["all_reduce(x)", ""]


def test_a_dump_of_stacks_alone_has_calls_without_values(tmp_path: Path) -> None:
    rows = [[f"Torch_f_{at}_forward_stack_info", [["net.py", "7", "forward", "f(x)"]]] for at in range(2)]
    dump = open_dump(handmade(tmp_path, *rows, name="stack_dump"))
    assert dump.source.format == "ptdbg_ascend"
    assert (names(dump), dump.value_count) == (["Torch.f.0.forward", "Torch.f.1.forward"], 0)


# --- arrays -----------------------------------------------------------------------------------------------------


def test_elements_come_from_the_folder_beside_the_file(tmp_path: Path) -> None:
    row = "Torch_f_0_forward_input.0"
    path = handmade(tmp_path, value(row), value("Torch_f_0_forward_output"), arrays={row: ARRAY})
    dump = open_dump(path)
    there, gone = dump.nth(0).values
    assert np.array_equal(dump.load(there), ARRAY)
    assert (gone.payload, gone.extra["missing"]) == (None, "Torch_f_0_forward_output.npy")
    with pytest.raises(DumpError, match="without its elements"):
        dump.load(gone)
    assert dump.manifest.config["tensors"] is True and dump.manifest.counts["payload_bytes"] > ARRAY.nbytes


def test_bfloat16_that_lies_there_as_float32_has_its_own_bits_again(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7FC0], dtype="<u2")
    row = ["Torch_f_0_forward_output", 0, [], "torch.bfloat16", [3], [1.0, -2.0, -0.5, 2.25]]
    path = handmade(tmp_path, row, arrays={})
    write_npy(tmp_path / "dump" / "Torch_f_0_forward_output.npy", DTYPES["bfloat16"], (3,), bits.tobytes())
    dump = open_dump(path)
    (found,) = dump.nth(0).values
    assert dump.load_bits(found).tolist() == bits.tolist()
    assert dump.load(found)[:2].tolist() == [1.0, -2.0]
    assert found.payload and found.payload.nbytes == 6
    np.save(tmp_path / "dump" / "Torch_f_0_forward_output.npy", np.array([0.1, 1, 2], dtype=np.float32))
    with pytest.raises(DumpError, match="holds a float32"):
        dump.load(found)


def test_an_array_that_is_not_what_its_line_says_is_refused(tmp_path: Path) -> None:
    row = "Torch_f_0_forward_output"
    path = handmade(tmp_path, value(row), arrays={row: ARRAY.astype(np.float64)})
    dump = open_dump(path)
    with pytest.raises(DumpError, match=r"holds a float64 of shape \(2, 2\)"):
        dump.load(dump.nth(0).values[0])
    np.save(tmp_path / "dump" / f"{row}.npy", ARRAY[0])
    with pytest.raises(DumpError, match=r"holds a float32 of shape \(2,\)"):
        dump.load(dump.nth(0).values[0])


def test_the_first_version_put_a_time_behind_the_name_of_the_folder(tmp_path: Path) -> None:
    row = "Torch_f_0_forward_output"
    path = handmade(tmp_path, value(row), name="npu_dump", arrays={row: ARRAY})
    (tmp_path / "npu_dump").rename(tmp_path / "npu_dump_20230601120000")
    dump = open_dump(path)
    assert np.array_equal(dump.load(dump.nth(0).values[0]), ARRAY)


def test_links_are_refused(tmp_path: Path) -> None:
    row = "Torch_f_0_forward_output"
    path = handmade(tmp_path / "a", value(row), arrays={row: ARRAY})
    (tmp_path / "a" / "dump" / f"{row}.npy").rename(tmp_path / "secret.npy")
    (tmp_path / "a" / "dump" / f"{row}.npy").symlink_to(tmp_path / "secret.npy")
    dump = open_dump(path)
    with pytest.raises(DumpError, match="symbolic link"):
        dump.load(dump.nth(0).values[0])
    (tmp_path / "a" / "dump").rename(tmp_path / "data")
    (tmp_path / "a" / "dump").symlink_to(tmp_path / "data")
    with pytest.raises(DumpError, match="symbolic link"):
        open_dump(path)
    (tmp_path / "link.pkl").symlink_to(path)
    with pytest.raises(DumpError, match="symbolic link"):
        open_dump(tmp_path / "link.pkl")


@pytest.mark.parametrize("name", ["../../secret_0_forward_output", "/etc/passwd_0_forward_output"])
def test_a_name_never_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "secret_0_forward_output.npy", ARRAY)
    dump = open_dump(handmade(tmp_path / "a" / "b", value(name), arrays={}))
    (found,) = dump.nth(0).values
    assert found.payload is None and found.extra["missing"] == f"{name}.npy"


# --- layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "step", "rank"),
    [
        ("ptdbg_dump_v3.0/rank0", 0, 0),
        ("all_v2.0/rank7", 0, 7),
        ("ptdbg_dump_v3.0/step2/rank1", 2, 1),
        ("step2/ptdbg_dump_v3.0/rank1", 2, 1),
        ("ptdbg_dump_v3.0/step0/rank26847", 0, 26847),
    ],
)
def test_a_dump_opens_from_every_level_of_every_layout(tmp_path: Path, place: str, step: int, rank: int) -> None:
    row = "Torch_f_0_forward_output"
    path = handmade(tmp_path / place, value(row), name="api_stack_dump", arrays={row: ARRAY})
    (path.parent / "compare_data.py").write_text("")
    array = path.parent / "api_stack_dump" / f"{row}.npy"
    levels = [path, array.parent]
    levels += [folder for folder in path.parents if folder == tmp_path or tmp_path in folder.parents]
    for level in levels:
        dump = open_dump(level)
        assert dump.source.format == "ptdbg_ascend", level
        assert (dump.manifest.step, dump.manifest.rank, dump.folder) == (step, rank, path)
    assert len(open_run(tmp_path)) == 1
    assert find_folders(tmp_path) == []  # a capture never replaces it
    for file in (array, path.parent / "compare_data.py"):
        with pytest.raises(DumpError, match=f"{file.name} is no dump"):
            open_dump(file)


def test_ranks_and_steps_of_a_run_are_in_order(tmp_path: Path) -> None:
    for step in (1, 0):
        for rank in (10, 2):
            handmade(tmp_path / "ptdbg_dump_v3.0" / f"step{step}" / f"rank{rank}", value("Torch_f_0_forward_output"))
    found = [(dump.manifest.step, dump.manifest.rank) for dump in open_run(tmp_path)]
    assert found == [(0, 2), (0, 10), (1, 2), (1, 10)]
    assert open_dump(tmp_path, step=1, rank=10).manifest.rank == 10


def test_several_files_in_a_folder_are_several_dumps_and_a_path_chooses_one(tmp_path: Path) -> None:
    folder = tmp_path / "ptdbg_dump_v3.0" / "rank0"
    for name, row in (("dump", "Torch_f_0_forward_output"), ("list_dump", "Torch_g_0_forward_output")):
        handmade(folder, value(row), name=name, arrays={row: ARRAY})
    with (folder / "mine.pkl").open("wb") as file:
        pickle.dump({"weights": 1}, file)
    assert [names(dump) for dump in open_run(folder)] == [["Torch.f.0.forward"], ["Torch.g.0.forward"]]
    assert [dump.manifest.config["mode"] for dump in open_run(tmp_path)] == ["all", "list"]
    assert names(open_dump(folder / "list_dump.pkl")) == names(open_dump(folder / "list_dump")) == ["Torch.g.0.forward"]


def test_an_overflow_is_a_dump_of_its_own(tmp_path: Path) -> None:
    folder, row = tmp_path / "ptdbg_dump_v3.0" / "rank0", "Tensor___add___1_forward_output"
    handmade(folder, value(row, step=101), name="Tensor___add___1_forward_1", arrays={row: ARRAY})
    dump = open_dump(tmp_path)
    assert names(dump) == ["Tensor.__add__.1.forward"]
    assert np.array_equal(dump.load(dump.nth(0).values[0]), ARRAY)


def test_a_folder_with_several_runs_asks_for_one(tmp_path: Path) -> None:
    for tag in ("all_v2.0", "forward_v2.0"):
        handmade(tmp_path / tag / "rank0", value("Torch_f_0_forward_output"))
    with pytest.raises(DumpError, match=r"several runs, all_v2\.0, forward_v2\.0; give one"):
        open_dump(tmp_path)
    assert len(open_run(tmp_path / "all_v2.0")) == 1


def test_a_folder_with_pickles_alone_holds_no_dump(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    with (tmp_path / "rank0" / "dump.pkl").open("wb") as file:
        pickle.dump([1, 2], file)
    with pytest.raises(DumpError, match="holds no dump"):
        open_dump(tmp_path)


# --- damage -----------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_pickle_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        Path("dump.pkl").write_bytes(pickle.dumps(Bomb(), protocol=protocol))
        with pytest.raises(DumpError, match=r"dump\.pkl is not a dump: .* holds JSON lines"):
            open_dump("dump.pkl")
    assert os.listdir() == ["dump.pkl"]


@pytest.mark.parametrize("keep", [1, 20, 60, -2])
def test_a_last_line_that_is_cut_is_dropped_and_told(tmp_path: Path, keep: int) -> None:
    lines = REAL.splitlines(keepends=True)
    (tmp_path / "dump.pkl").write_text("".join(lines[:4]) + lines[4][:keep])
    dump = open_dump(tmp_path / "dump.pkl")
    assert names(dump) == ["Functional.conv2d.0.forward"]
    assert dump.ending == "the last line is cut: the process ended while it was written"


def test_a_last_line_that_is_whole_needs_no_end(tmp_path: Path) -> None:
    (tmp_path / "dump.pkl").write_text(REAL.rstrip("\n"))
    dump = open_dump(tmp_path / "dump.pkl")
    assert (len(dump), dump.ending) == (2, "complete")
    (tmp_path / "dump.pkl").write_text(REAL.replace("\n", "\n\n"))
    assert len(open_dump(tmp_path / "dump.pkl")) == 2


def test_files_that_hold_nothing_say_so(tmp_path: Path) -> None:
    (tmp_path / "dump.pkl").write_text("")
    with pytest.raises(DumpError, match=r"dump\.pkl is empty"):
        open_dump(tmp_path / "dump.pkl")
    (tmp_path / "dump.pkl").write_text(REAL[:30])
    with pytest.raises(DumpError, match="no whole line"):
        open_dump(tmp_path / "dump.pkl")
    with pytest.raises(DumpError, match="does not exist"):
        open_dump(tmp_path / "other.pkl")


GOOD = value("Torch_f_0_forward_output")


@pytest.mark.parametrize("frames", ["text", [["net.py", 58, "f", "x"]], [["net.py"]], None, {}])
def test_a_line_that_is_no_stack_is_left_out_and_that_is_said(
    tmp_path: Path, frames: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [GOOD, [GOOD[0].replace("output", "stack_info"), frames]]
    (tmp_path / "dump.pkl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dump = open_dump(tmp_path / "dump.pkl")
    (call,) = dump.calls()
    assert dump.stack(call) == [] and len(call.values) == 1
    assert "1 lines are no stacks; they are left out" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "{}",
        "[]",
        '["only a name"]',
        "[1, 2]",
        '["Torch_f_0_forward_output", 0',
        "[" * 100_000,
        '["Torch_f_0_forward_stack_info", ' + "[" * 100_000 + "]" * 100_000 + "]",
        json.dumps(["Torch_f_forward_output", *GOOD[1:]]),
        json.dumps(["Torch_f_99999999999_forward_output", *GOOD[1:]]),
        json.dumps(["Torch_f_0_sideways_output", *GOOD[1:]]),
        json.dumps([f"Torch_f_0_forward_output{'.0' * 100}", *GOOD[1:]]),
        json.dumps(["x" * 100_000, *GOOD[1:]]),
        json.dumps(GOOD[:5]),
        json.dumps([*GOOD[:3], 7, *GOOD[4:]]),
        *(json.dumps([*GOOD[:4], wrong, GOOD[5]]) for wrong in ("[1]", None, [-1], [1.5], [[1]], [2**64], [2**62] * 2)),
        json.dumps([*GOOD[:4], [1] * 100, GOOD[5]]),
        *(json.dumps([*GOOD[:5], wrong]) for wrong in (None, [1], [1] * 5, ["many"] * 4, [{}] * 4, [[1]] * 4)),
        '["Torch_f_0_forward_output", 0, [], "torch.float32", [2], [' + "9" * 5000 + ", 1, 1, 1]]",
        '["Torch_f_0_forward_output\udc80", 0]',
    ],
)
def test_a_damaged_line_is_refused_with_its_file_and_number(tmp_path: Path, line: str) -> None:
    text = "\n".join([json.dumps(value("Torch_g_0_forward_output")), line, json.dumps(GOOD), ""])
    (tmp_path / "dump.pkl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DumpError, match=r"dump\.pkl, line 2 ") as caught:
        list(open_dump(tmp_path / "dump.pkl").calls())
    assert len(str(caught.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ROW = st.one_of(
    st.tuples(
        st.sampled_from(["Torch_f_0_forward_input.0", "Tensor___add___1_backward_output", "Net_0_forward_stack_info"]),
        st.integers(0, 101) | JSON,
        st.just([]),
        st.sampled_from(["torch.float32", "torch.bfloat16", "<class 'int'>", "torch.odd"]) | JSON,
        st.lists(st.integers(-1, 2**64), max_size=3) | JSON,
        st.lists(st.floats() | st.integers() | st.just("Nan") | st.just([]), min_size=3, max_size=4) | JSON,
    ).map(list),
    st.tuples(st.just("Torch_f_0_forward_stack_info"), JSON).map(list),
    JSON,
)


@given(rows=st.lists(ROW, min_size=1, max_size=5), cut=st.integers(0, 40))
def test_whatever_a_file_holds_it_is_read_or_refused(
    rows: list[Any], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pkl"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text[: len(text) - cut])
    try:
        dump = open_dump(path)
        for call in dump.calls():
            dump.stack(call)
    except DumpError as error:
        assert "any.pkl" in str(error) and len(str(error)) < 1000


# --- show and convert -------------------------------------------------------------------------------------------


def run_of_two_ranks(folder: Path) -> Path:
    stack = ["Torch_f_0_forward_stack_info", [["net.py", "7", "forward", "f(x)"]]]
    rows = [
        value("Torch_f_0_forward_input.0"),
        ["Torch_f_0_forward_input.1", 0, [], "<class 'int'>", "[]", [3, 3, 3, 3]],
        value("Torch_f_0_forward_output", ARRAY * 2),
        stack,
        value("Torch_f_0_backward_output.0", ARRAY * 3),
    ]
    arrays = {row[0]: ARRAY * times for row, times in ((rows[0], 1), (rows[2], 2), (rows[4], 3))}
    for rank in (0, 1):
        handmade(folder / "ptdbg_dump_v3.0" / f"rank{rank}", *rows, arrays=arrays)
    return folder


def test_show_lists_the_calls_and_shows_one(tmp_path: Path) -> None:
    run = run_of_two_ranks(tmp_path / "run")
    result = CliRunner().invoke(show, [str(run)])
    assert result.exit_code == 0, result.output
    assert "Torch.f.0.forward" in result.output and "f32[2, 2]" in result.output
    command = result.output.splitlines()[-1].split()[3:]
    assert command[0] == str(run / "ptdbg_dump_v3.0" / "rank0" / "dump.pkl")
    result = CliRunner().invoke(show, command)
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(show, [str(run), "Torch.f.0.forward"])
    assert "net.py:7 in forward" in result.output and "Torch_f_0_forward_output" in result.output
    result = CliRunner().invoke(show, [str(run), "--format", "json"])
    assert json.loads(result.output)["calls"][0]["values"][0]["stats"]["max"] == 4.0


@pytest.mark.parametrize("form", [None, "native", "msprobe"])
def test_convert_keeps_names_numbers_stacks_and_elements(tmp_path: Path, form: str | None) -> None:
    run = run_of_two_ranks(tmp_path / "run")
    options = [] if form is None else ["--to", form]
    result = CliRunner().invoke(convert, [str(run), str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    before, after = open_run(run), open_run(tmp_path / "out")
    assert [dump.source.format for dump in after] == [form or "native"] * 2
    assert [dump.manifest.rank for dump in after] == [0, 1]
    for left, right in zip(before, after, strict=True):
        assert left.ids() == right.ids()
        for one, other in zip(left.calls(), right.calls(), strict=True):
            assert left.stack(one) == right.stack(other)
            assert [item.slot for item in one.values] == [item.slot for item in other.values]
            for mine, theirs in zip(one.values, other.values, strict=True):
                assert (mine.scalar, mine.dtype, mine.shape) == (theirs.scalar, theirs.dtype, theirs.shape)
                if mine.payload is not None:
                    assert left.load(mine).tobytes() == right.load(theirs).tobytes()
                    assert mine.stats and theirs.stats and mine.stats.max == theirs.stats.max


def test_statistics_alone_are_converted_as_they_were_told(tmp_path: Path) -> None:
    (tmp_path / "dump.pkl").write_text(REAL)
    result = CliRunner().invoke(convert, [str(tmp_path / "dump.pkl"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    first, _, _ = open_dump(tmp_path / "out").nth(0).values
    assert first.stats and first.stats.norm == 23.01077651977539 and not first.stats.counted


def test_convert_of_a_cut_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "dump.pkl").write_text(REAL[:-20])
    result = CliRunner().invoke(convert, [str(tmp_path / "dump.pkl"), str(tmp_path / "out")])
    assert result.exit_code == 0 and "the last line is cut" in result.output
    assert "the last line is cut" in open_dump(tmp_path / "out").ending


def test_files_of_one_folder_are_converted_side_by_side(tmp_path: Path) -> None:
    for name in ("dump", "list_dump"):
        handmade(tmp_path / "run" / "rank3", value("Torch_f_0_forward_output"), name=name)
    result = CliRunner().invoke(convert, [str(tmp_path / "run"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(tmp_path / "out" / "step0")) == ["rank3", "rank3.1"]


def test_two_runs_are_compared_by_their_elements(tmp_path: Path) -> None:
    reference, target = run_of_two_ranks(tmp_path / "a"), run_of_two_ranks(tmp_path / "b")
    changed = target / "ptdbg_dump_v3.0" / "rank1" / "dump" / "Torch_f_0_forward_output.npy"
    np.save(changed, ARRAY * 2 + 1)
    rows = list(compare_runs(reference, target))
    assert {row.evidence for row in rows if row.target and row.target.is_tensor} == {Evidence.ELEMENTS}
    assert [slot_text(row.slot) for row in rows if row.verdict.level is Level.FAIL] == ["output.0"]
