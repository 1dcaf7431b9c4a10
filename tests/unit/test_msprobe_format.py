"""Dumps of msprobe: written as it writes them, read from all its versions, there and back without a loss."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ulpscope
from builders import DumpBuilder
from msprobe_files import call as made_call
from msprobe_files import tensor, write_json
from ulpscope.cli.convert import convert
from ulpscope.model.errors import CaptureError, DumpError
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Phase, ToldStats
from ulpscope.store.convert import write_native
from ulpscope.store.dump import Dump
from ulpscope.store.formats.msprobe_writer import write_msprobe
from ulpscope.store.registry import open_dump, open_run

ARRAY = np.array([[1.5, -2.0], [0.0, 4.0]], dtype=np.float32)
LEAF = {
    "type": "torch.Tensor",
    "dtype": "torch.float32",
    "shape": [2, 2],
    "Max": 4.0,
    "Min": -2.0,
    "Mean": 0.875,
    "Norm": math.sqrt(22.25),
    "requires_grad": False,
}


def written(dump: Dump, folder: Path, **options: str) -> dict[str, Any]:
    write_msprobe(dump, folder, **options)
    content: dict[str, Any] = json.loads(
        (folder / "dump.json").read_text(), parse_constant=lambda word: pytest.fail(word)
    )
    return content


def handmade(folder: Path, data: Any, **more: Any) -> Path:
    """A dump as msprobe would leave it; `more` are the contents of further files."""
    folder.mkdir(parents=True)
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (folder / "dump.json").write_text(json.dumps({**header, "data": data}))
    for name, content in more.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


# --- writing ----------------------------------------------------------------------------------------------------


def test_calls_are_written_as_msprobe_writes_them(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    values = {
        ("input", 0): ARRAY,
        ("input", 1, 0): 3,
        ("input", 1, 1): "mean",
        ("input", "mask", "a"): None,
        ("output", 0): ARRAY,
    }
    builder.call("Torch", "add", values=values)
    builder.call("Torch", "add", phase=Phase.BACKWARD, values={("input", 0): ARRAY, ("output", 1): ARRAY}, origin=0)
    builder.call("Module", "fc.Linear", values={("parameters", "weight"): ARRAY})
    builder.call("Module", "fc.Linear", phase=Phase.PARAMETERS_GRAD, values={("parameters", "weight"): ARRAY})
    content = written(open_dump(builder.close()), tmp_path / "out")
    assert {key: item for key, item in content.items() if key != "data"} == {
        "task": "statistics",
        "level": "L1",
        "framework": "pytorch",
        "dump_data_dir": None,
    }
    leaf = LEAF
    assert content["data"] == {
        "Torch.add.0.forward": {
            "input_args": [leaf, [{"type": "int", "value": 3}, {"type": "str", "value": "mean"}]],
            "input_kwargs": {"mask": {"a": None}},
            "output": [leaf],
        },
        "Torch.add.0.backward": {"input": [leaf], "output": [None, leaf]},
        "Module.fc.Linear.forward.0": {
            "input_args": [],
            "input_kwargs": {},
            "output": [],
            "parameters": {"weight": leaf},
        },
        "Module.fc.Linear.parameters_grad.0": {"weight": [leaf]},
    }
    assert list(content["data"]["Torch.add.0.forward"]["output"][0]) == list(LEAF)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "out" / "dump.json").stat().st_mode) == 0o640


def test_gradients_of_keywords_follow_the_positions_and_keep_their_names(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    values = {("output", "other"): ARRAY, ("output", 1): ARRAY * 2, ("output", "more", 0): ARRAY * 3}
    builder.call("Torch", "mul", phase=Phase.BACKWARD, values=values)
    content = written(open_dump(builder.close()), tmp_path / "out")
    first, second, third, (fourth,) = content["data"]["Torch.mul.0.backward"]["output"]
    assert (first, second["Max"], third["Max"], fourth["Max"]) == (None, 8.0, 4.0, 12.0)
    found = {slot_text(value.slot): value.stats for value in open_dump(tmp_path / "out").nth(0).values}
    assert {slot: stats and stats.max for slot, stats in found.items()} == {
        "output.1": 8.0,
        "output.other": 4.0,
        "output.more.0": 12.0,
    }


def test_numbers_json_lacks_are_texts_and_kinds_without_a_mean_have_none(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    values = {
        ("input", 0): np.array([1.0, np.nan], dtype=np.float32),
        ("input", 1): np.array([1.0, np.inf], dtype=np.float32),
        ("input", 2): np.array([True, False]),
        ("input", 3): np.zeros((0, 2), dtype=np.float32),
        ("input", 4): np.array([2**62, -3]),
        ("input", 5): np.array([1.0, -np.inf], dtype=np.float32),
        ("input", 6): "-inf",
        ("input", 7): 'a "\0-inf" b',
    }
    builder.call("Torch", "cat", values=values)
    folder = tmp_path / "out"
    leaves = written(open_dump(builder.close()), folder)["data"]["Torch.cat.0.forward"]["input_args"]
    shown = [[leaf[key] for key in ("Max", "Min", "Mean", "Norm")] for leaf in leaves[:4]]
    assert shown == [["nan"] * 4, ["inf", 1.0, "inf", "inf"], [True, False, None, None], [None] * 4]
    assert (leaves[4]["Max"], leaves[4]["Min"]) == (2**62, -3)
    # msprobe refuses texts that begin with "-".
    assert [leaves[5][key] for key in ("Max", "Min", "Mean", "Norm")] == [1.0, -math.inf, -math.inf, "inf"]
    assert '"Min": -1e999' in (folder / "dump.json").read_text()
    assert [leaf["value"] for leaf in leaves[6:]] == ["-inf", 'a "\0-inf" b']
    nan, inf, boolean, empty, integer, minus, *_ = (value.stats for value in open_dump(folder).nth(0).values)
    assert nan and inf and boolean and empty and integer and minus
    assert (minus.max, minus.min, minus.mean, minus.norm) == (1.0, -math.inf, -math.inf, math.inf)
    assert math.isnan(nan.max or 0) and inf.max == inf.norm == math.inf and inf.min == 1.0
    assert (boolean.max, boolean.min, boolean.mean, boolean.norm) == (1, 0, None, None)
    assert (empty.numel, empty.max) == (0, None)
    assert (integer.max, integer.min) == (2**62, -3)


def test_tensor_files_have_the_names_of_msprobe_and_torch_reads_them(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    builder.call("Torch", "add", values={("input", 0): ARRAY, ("input", "other"): ARRAY + 1, ("output", 0, 1): ARRAY})
    native = open_dump(builder.close())
    content = written(native, tmp_path / "out", task="tensor", summary_mode="md5")
    folder = tmp_path / "out" / "dump_tensor_data"
    assert content["dump_data_dir"] == str(folder)
    assert sorted(os.listdir(folder)) == [
        "Torch.add.0.forward.input.0.pt",
        "Torch.add.0.forward.kwargs.other.pt",
        "Torch.add.0.forward.output.0.1.pt",
    ]
    loaded = torch.load(folder / "Torch.add.0.forward.kwargs.other.pt", weights_only=True)
    assert np.array_equal(loaded.numpy(), ARRAY + 1)
    leaf = content["data"]["Torch.add.0.forward"]["input_args"][0]
    assert leaf["md5"] == f"{native.nth(0).values[0].checksum:08x}"
    dump = open_dump(tmp_path / "out")
    assert np.array_equal(dump.load(dump.nth(0).values[1]), ARRAY + 1)


def test_equal_tensors_are_one_file(tmp_path: Path) -> None:
    (dump, _) = captured(tmp_path / "run", level="mix", tensors=True)
    write_msprobe(dump, tmp_path / "out", task="tensor", level="mix")
    folder = tmp_path / "out" / "dump_tensor_data"
    module, call = folder / "Module.0.Conv2d.forward.0", folder / "Functional.conv2d.0.forward"
    assert os.path.samefile(f"{module}.input.0.pt", f"{call}.input.0.pt")
    assert os.path.samefile(f"{module}.parameters.weight.pt", f"{call}.input.1.pt")
    assert len({path.stat().st_ino for path in folder.iterdir()}) < len(os.listdir(folder))


@pytest.mark.parametrize("name", ["a/b", "../../up", "a\0b", "x" * 400, "模型" * 80, "a\\b", "\udc80"])
def test_a_name_no_file_system_takes_is_written_inside_the_folder(tmp_path: Path, name: str) -> None:
    builder = DumpBuilder(tmp_path / "run")
    builder.call("Torch", name, values={("input", 0): ARRAY, ("input", "key/" + name): ARRAY + 1})
    before = sorted(os.listdir(tmp_path))
    content = written(open_dump(builder.close()), tmp_path / "out", task="tensor")
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "out"])
    assert sorted(os.listdir(tmp_path / "out")) == ["construct.json", "dump.json", "dump_tensor_data", "stack.json"]
    (entry,) = content["data"].values()
    names = {entry["input_args"][0]["data_name"], next(iter(entry["input_kwargs"].values()))["data_name"]}
    assert names == set(os.listdir(tmp_path / "out" / "dump_tensor_data"))
    dump = open_dump(tmp_path / "out")
    assert [float(dump.load(value)[0, 0]) for value in dump.nth(0).values] == [1.5, 2.5]


def test_names_that_would_be_one_file_are_two(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    builder.call("Torch", "f", values={("input", "a", "b"): ARRAY, ("input", "a.b"): ARRAY + 1})
    write_msprobe(open_dump(builder.close()), tmp_path / "out", task="tensor")
    dump = open_dump(tmp_path / "out")
    assert [float(dump.load(value)[0, 0]) for value in dump.nth(0).values] == [1.5, 2.5]


def test_saved_values_go_into_debug_json(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    builder.call("Saved", "x", phase=Phase.DEBUG, values={("output", 0): ARRAY})
    builder.call("Saved", "pack", phase=Phase.DEBUG, values={("output", "a"): ARRAY, ("output", "b", 0): 1})
    folder = tmp_path / "out"
    write_msprobe(open_dump(builder.close()), folder, task="tensor")
    assert not (folder / "dump.json").exists()
    content = json.loads((folder / "debug.json").read_text())
    assert content["level"] == "debug"
    assert content["data"]["x.0.debug"]["data_name"] == "x.0.debug.pt"
    assert content["data"]["pack.0.debug"]["a"]["data_name"] == "pack.0.debug.a.pt"
    assert content["data"]["pack.0.debug"]["b"] == [{"type": "int", "value": 1}]
    slots = [[slot_text(value.slot) for value in call.values] for call in open_dump(folder).calls()]
    assert slots == [["output.0"], ["output.a", "output.b.0"]]


def test_parents_and_stacks_and_the_optimizer(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    stack = builder.text({"frames": [["net.py", 7, "forward", "return a + b", False]], "parent": None})
    module = builder.call("Module", "fc.Linear", stack=stack)
    builder.call("Torch", "add", stack=stack, parent=module)
    builder.call("Torch", "add", phase=Phase.BACKWARD, parent=module, origin=1)
    step = builder.call("Optimizer", "SGD", phase=Phase.STEP)
    builder.call("Tensor", "add_", parent=step)
    native = open_dump(builder.close())
    content = written(native, tmp_path / "out", level="mix")
    assert list(content["data"]) == [
        "Module.fc.Linear.forward.0",
        "Torch.add.0.forward",
        "Torch.add.0.backward",
        "Tensor.add_.0.forward",
    ]
    assert json.loads((tmp_path / "out" / "construct.json").read_text()) == {
        "Module.fc.Linear.forward.0": None,
        "Torch.add.0.forward": "Module.fc.Linear.forward.0",
        "Torch.add.0.backward": "Module.fc.Linear.backward.0",
        "optimizer": None,
        "Tensor.add_.0.forward": "optimizer",
    }
    assert json.loads((tmp_path / "out" / "stack.json").read_text()) == {
        "0": [
            ["Module.fc.Linear.forward.0", "Torch.add.0.forward"],
            ["File net.py, line 7, in forward, \n return a + b"],
        ]
    }
    dump = open_dump(tmp_path / "out")
    assert [dump.parent(call) for call in dump.calls()] == [
        None,
        dump.nth(0).id,
        native.parent(native.nth(2)),
        None,
    ]
    assert dump.stack(dump.nth(1)) == native.stack(native.nth(1))
    written(native, tmp_path / "L1")
    assert (tmp_path / "L1" / "construct.json").read_text() == "{}\n"


def test_a_folder_with_something_in_it_is_never_written_into(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    dump = open_dump(builder.close())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(DumpError, match="cannot write"):
        write_msprobe(dump, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]
    with pytest.raises(DumpError, match="task 'nonsense'"):
        write_msprobe(dump, tmp_path / "other", task="nonsense")


# --- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["rank0", "rank", "proc1234", "rank3", "rank0.1"])
def test_a_dump_of_msprobe_opens_from_every_level(tmp_path: Path, rank: str) -> None:
    folder = handmade(tmp_path / "run" / "step2" / rank, {"Torch.add.0.forward": {"input_args": [], "output": [LEAF]}})
    (folder / "dump_tensor_data").mkdir()
    for path in (tmp_path / "run", folder.parent, folder, folder / "dump.json", folder / "dump_tensor_data"):
        dump = open_dump(path)
        assert dump.source.format == "msprobe"
        assert (dump.manifest.step, dump.manifest.rank) == (2, 3 if rank == "rank3" else 0)
        assert [call_text(call) for call in dump.ids()] == ["Torch.add.0.forward"]
        assert (len(dump), dump.value_count, dump.ending) == (1, 1, "complete")


def test_processes_without_a_rank_are_told_apart(tmp_path: Path) -> None:
    for name in ("proc100", "proc99"):
        handmade(tmp_path / "step0" / name, {})
    found = [(dump.source.format, dump.folder.name) for dump in open_run(tmp_path)]
    assert found == [("msprobe", "proc99"), ("msprobe", "proc100")]
    DumpBuilder(tmp_path, step=1).close()
    assert [dump.source.format for dump in open_run(tmp_path)] == [
        "native"
    ]  # ours first, and no other tool's beside it


def test_the_older_versions_are_read(tmp_path: Path) -> None:
    odd = {**LEAF, "Max": math.inf, "Norm": math.nan, "Max_except_inf_nan": 3.0}
    data = {
        "Functional.relu.0.forward": {"input_args": [odd], "input_kwargs": {}, "output": [LEAF], "is_recompute": True},
        "Module.conv1.Conv2d.parameters_grad": {"weight": [None], "bias": [LEAF]},
        "Functional.relu.0.backward": {"input": [LEAF], "output": [None, LEAF]},
    }
    stacks = {"Functional.relu.0.forward": ["File /a/site-packages/b.py, line 97, in op, \n return 1", "odd"]}
    dump = open_dump(handmade(tmp_path / "rank", data, stack=stacks))
    call, gradients, backward = dump.calls()
    assert call.recomputed
    stats = call.values[0].stats
    assert stats and stats.max == math.inf and math.isnan(stats.norm or 0) and not stats.counted
    assert call.values[0].extra == {"Max_except_inf_nan": 3.0}
    frames = [(frame.file, frame.line, frame.function, frame.text, frame.library) for frame in dump.stack(call)]
    assert frames == [("/a/site-packages/b.py", 97, "op", "return 1", True), ("odd", 0, "", "", False)]
    assert gradients.id.phase is Phase.PARAMETERS_GRAD
    assert [slot_text(value.slot) for value in gradients.values] == ["parameters.bias"]
    assert [slot_text(value.slot) for value in backward.values] == ["input.0", "output.1"]
    assert (backward.origin, dump.by_seq(2)) == (0, backward)


def test_what_the_file_does_not_say_stays_unknown(tmp_path: Path) -> None:
    integer = {**LEAF, "dtype": "torch.int64", "Max": 7, "Min": 0, "Mean": None, "Norm": None}
    nothing = {**LEAF, "Max": None, "Min": None, "Mean": None, "Norm": None, "md5": "337b2557"}
    dump = open_dump(handmade(tmp_path / "r", {"Torch.f.0.forward": {"input_args": [integer, nothing, {}, None, []]}}))
    first, second, unknown, none, empty = dump.nth(0).values
    assert isinstance(first.stats, ToldStats)
    assert (first.stats.max, first.stats.min, first.stats.mean, first.stats.norm) == (7, 0, None, None)
    assert (second.stats, second.checksum) == (None, 0x337B2557)
    assert (unknown.type, none.type, empty.type) == ("object", "NoneType", "list")
    assert dump.sketch(first) is None
    with pytest.raises(DumpError, match="without its elements"):
        dump.load(first)


@pytest.mark.parametrize("name", ["/etc/passwd", "../dump.json", "..", "a/b.pt", "", 7, ["x"]])
def test_a_tensor_outside_of_its_folder_is_refused(tmp_path: Path, name: Any) -> None:
    dump = open_dump(handmade(tmp_path / "r", {"Torch.f.0.forward": {"output": [{**LEAF, "data_name": name}]}}))
    with pytest.raises(DumpError, match=r"dump\.json: Torch\.f\.0\.forward\.output\.0\.data_name is"):
        dump.nth(0)


def test_links_are_refused_and_missing_files_named(tmp_path: Path) -> None:
    leaves = [{**LEAF, "data_name": "a.pt"}, {**LEAF, "data_name": "gone.pt"}]
    folder = handmade(tmp_path / "r", {"Torch.f.0.forward": {"output": leaves}})
    (folder / "dump_tensor_data").mkdir()
    torch.save(torch.ones(2, 2), tmp_path / "secret.pt")
    (folder / "dump_tensor_data" / "a.pt").symlink_to(tmp_path / "secret.pt")
    dump = open_dump(folder)
    linked, gone = dump.nth(0).values
    with pytest.raises(DumpError, match="symbolic link"):
        dump.load(linked)
    assert (gone.payload, gone.extra) == (None, {"missing": "gone.pt"})
    (folder / "dump_tensor_data" / "a.pt").unlink()
    torch.save(torch.ones(3), folder / "dump_tensor_data" / "a.pt")
    dump = open_dump(folder)
    with pytest.raises(DumpError, match=r"holds a float32 of shape \(3,\)"):
        dump.load(dump.nth(0).values[0])
    shutil.rmtree(folder / "dump_tensor_data")
    (folder / "dump_tensor_data").symlink_to(tmp_path)
    with pytest.raises(DumpError, match="symbolic link"):
        open_dump(folder)


def test_malformed_files_are_refused_with_their_place(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "r", {})
    whole = json.dumps({"data": {"Torch.f.0.forward": {"output": [LEAF]}}})
    texts = [
        *(whole[:keep] for keep in range(0, len(whole), 5)),
        "[]",
        "7",
        "{}",
        '{"0": [["Torch.f.0.forward"], ["File x, line 1"]]}',
        '{"data": []}',
        '{"data": {"nonsense": {}}}',
        '{"data": {"Torch.f.99999999999.forward": {}}}',
        '{"data": {"Torch.f.0.forward": 7}}',
        "[" * 20000,
        '{"data": {"Torch.f.0.forward": {"output": ' + "[" * 20000 + "]" * 20000 + "}}}",
        '{"data": {"Torch.f.0.forward": {"output": ' + "[" * 100 + "]" * 100 + "}}}",
        *(
            json.dumps({"data": {"Torch.f.0.forward": {"output": [{**LEAF, key: wrong}]}}})
            for key in ("shape", "stored_shape", "dtype", "requires_grad", "Max", "error")
            for wrong in ({}, [-7], [[1]], ["x"] * 100, {"a": 1}, [1.5], [2**64])
        ),
        json.dumps({"data": {"Torch.f.0.forward": {"output": [{**LEAF, "shape": [2**62, 2**62]}]}}}),
        json.dumps({"data": {"Torch.f.0.forward": {"output": [{**LEAF, "Norm": "many"}]}}}),
    ]
    for text in texts:
        (folder / "dump.json").write_text(text)
        with pytest.raises(DumpError, match=r"dump\.json") as caught:
            list(open_dump(folder).calls())
        assert len(str(caught.value)) < 1000
    (folder / "dump.json").rename(tmp_path / "away")
    (folder / "dump.json").symlink_to(tmp_path / "away")
    with pytest.raises(DumpError, match="symbolic link"):
        open_dump(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stack", '{"0": 7}'),
        ("stack", '{"0": [["a"], [7]]}'),
        ("stack", "["),
        ("stack", ""),
        ("stack", "[" * 20000),
        ("construct", '{"a": 7}'),
        ("construct", "[]"),
        ("construct", None),
    ],
)
def test_what_only_helps_to_read_a_dump_is_left_out_where_it_cannot_be_read_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, text: str | None
) -> None:
    folder = handmade(tmp_path / "r", {"Torch.f.0.forward": {"output": [LEAF]}})
    if text is None:
        (folder / f"{name}.json").mkdir()
    else:
        (folder / f"{name}.json").write_text(text)
    dump = open_dump(folder)
    (call,) = dump.calls()
    assert dump.stack(call) == [] and call.module == "" and dump.ending == "complete"
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{name}.json" in said and "left out" in said and "\n" not in said
    assert dump.manifest.notes == (said,)


def test_saved_values_that_cannot_be_read_leave_the_calls_and_the_dump_is_incomplete(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "r", {"Torch.f.0.forward": {"output": [LEAF]}})
    (folder / "debug.json").write_text('{"data": {')
    dump = open_dump(folder)
    assert len(dump) == 1 and "debug.json" in dump.ending
    with pytest.raises(DumpError, match=r"debug\.json"):
        open_dump(folder / "debug.json")


# --- there and back ---------------------------------------------------------------------------------------------


def captured(path: Path, **options: Any) -> list[Dump]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(32, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    inputs = torch.randn(4, 1, 6, 6)
    with ulpscope.capture(path, model=model, **options) as capture:
        for _ in range(2):
            output = model(inputs)
            scaled = torch.mul(output, other=output.bfloat16())
            scaled = scaled.masked_fill(scaled > 1e30, float("-inf"))
            best = torch.max(torch.cat([scaled, output]), dim=1)
            capture.save("best", {"values": best.values, "pair": [best.indices, 1]}, gradient=False)
            (best.values.sum() + (output > 0).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return open_run(path)


def table(dump: Dump) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Everything both formats hold of each call, by name; optimizer steps are no calls of msprobe."""
    calls = {}
    for call in dump.calls():
        if call.id.kind == "Optimizer":
            continue
        rows = {}
        for value in sorted(call.values, key=lambda value: slot_text(value.slot)):
            bits = dump.load_bits(value).tobytes() if value.payload is not None else None
            facts = (value.type, value.dtype, value.shape, value.requires_grad, value.scalar, value.error)
            rows[slot_text(value.slot)] = (*facts, value.stats, value.checksum, bits)
        calls[call_text(call.id)] = rows
    return calls


def test_a_capture_with_tensors_is_the_same_there_and_back(tmp_path: Path) -> None:
    dumps = captured(tmp_path / "run", level="mix", tensors=True, checksum=True)
    runner = CliRunner()
    for source, dest in (("run", "msprobe"), ("msprobe", "back")):
        result = runner.invoke(convert, [str(tmp_path / source), str(tmp_path / dest)])
        assert result.exit_code == 0, result.output
    legacy, back = open_run(tmp_path / "msprobe"), open_run(tmp_path / "back")
    assert [dump.source.format for dump in legacy + back] == ["msprobe", "msprobe", "native", "native"]
    for first, middle, second in zip(dumps, legacy, back, strict=True):
        before, after = table(first), table(second)
        assert before == after
        recorded = [name for name in before if not name.endswith(".debug")]
        assert [call_text(call) for call in middle.ids() if call.phase is not Phase.DEBUG] == recorded
        assert [call_text(call) for call in second.ids() if call.phase is not Phase.DEBUG] == recorded
        parents = {
            call_text(call.id): parent
            for call in first.calls()
            if (parent := first.parent(call)) is None or parent.kind != "Optimizer"
        }
        for name, parent in parents.items():
            if not name.startswith("Optimizer") and not name.endswith(".debug"):
                assert middle.parent(middle.call(name)) == second.parent(second.call(name)) == parent
                assert middle.stack(middle.call(name)) == second.stack(second.call(name))
        assert second.manifest.state == "complete"


def test_statistics_alone_keep_their_numbers_there_and_back(tmp_path: Path) -> None:
    (first, _) = captured(tmp_path / "run", level="op", checksum=True)
    write_msprobe(first, tmp_path / "msprobe", summary_mode="md5")
    middle = open_dump(tmp_path / "msprobe")
    write_native(middle, tmp_path / "back" / "step0" / "rank0")
    second = open_dump(tmp_path / "back")
    assert middle.source.format == "msprobe"
    assert table(middle) == table(second)
    for call in second.calls():
        for value in call.values:
            original = {item.slot: item for item in first.call(call.id).values}[value.slot]
            assert value.checksum == original.checksum
            assert (value.stats is None) == (original.stats is None)
            if value.stats is not None and original.stats is not None:
                assert (value.stats.max, value.stats.min) == (original.stats.max, original.stats.min)
                mean, norm = value.stats.mean, value.stats.norm
                known = (None, None) if value.dtype == "torch.bool" else (original.stats.mean, original.stats.norm)
                assert (mean, norm) == known


def test_numbers_of_every_kind_survive_the_native_format(tmp_path: Path) -> None:
    rows = [
        (1, 0, None, None),
        (True, False, None, None),
        (2**64 - 1, 0, 1.5, 3.0),
        (2**64 - 1, -1, None, 1.0),
        ("nan", "nan", "nan", "nan"),
        ("inf", "-inf", "nan", "inf"),
        (None, 1.5, 0.1, None),
        (-0.0, -0.0, -0.0, 0.0),
    ]
    leaves = [
        {**LEAF, "dtype": "torch.int64", **dict(zip(("Max", "Min", "Mean", "Norm"), row, strict=True))} for row in rows
    ]
    source = open_dump(handmade(tmp_path / "r", {"Torch.f.0.forward": {"output": leaves}}))
    write_native(source, tmp_path / "back" / "step0" / "rank0")
    for before, after in zip(source.nth(0).values, open_dump(tmp_path / "back").nth(0).values, strict=True):
        assert before.stats and after.stats
        for key in ("max", "min", "mean", "norm"):
            left, right = getattr(before.stats, key), getattr(after.stats, key)
            assert (left is None) == (right is None)
            assert left is None or repr(float(left)) == repr(float(right))


def test_convert_refuses_what_would_be_lost(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    builder.call("Torch", "add", values={("output", 0): ARRAY})
    builder.close()
    runner, dest = CliRunner(), tmp_path / "out"
    dest.mkdir()
    (dest / "mine.txt").write_text("x")
    result = runner.invoke(convert, [str(tmp_path / "run"), str(dest)])
    assert isinstance(result.exception, CaptureError) and "is not empty" in str(result.exception)
    for _ in range(2):
        assert runner.invoke(convert, [str(tmp_path / "run"), str(dest), "--overwrite"]).exit_code == 0
    assert (dest / "mine.txt").read_text() == "x"
    assert (dest / "step0" / "rank0" / "dump_tensor_data" / "Torch.add.0.forward.output.0.pt").is_file()
    result = runner.invoke(convert, [str(tmp_path / "run"), str(tmp_path / "run"), "--overwrite"])
    assert isinstance(result.exception, CaptureError) and "lie in each other" in str(result.exception)
    result = runner.invoke(convert, [str(dest), str(tmp_path / "stats"), "--to", "msprobe", "--task", "statistics"])
    assert result.exit_code == 0
    assert not (tmp_path / "stats" / "step0" / "rank0" / "dump_tensor_data").exists()
    result = runner.invoke(convert, [str(tmp_path / "nothing"), str(tmp_path / "x")])
    assert isinstance(result.exception, DumpError)


def test_a_killed_run_is_converted_up_to_its_last_call(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    for index in range(20):
        builder.call("Torch", "add", index, values={("output", 0): ARRAY + index})
    # The process dies here: nothing was closed. A copy of the folder is what a later reader finds.
    with builder.standing_still():
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    builder.close()
    for form in ("msprobe", "native"):
        result = CliRunner().invoke(convert, [str(tmp_path / "killed"), str(tmp_path / form), "--to", form])
        assert result.exit_code == 0
        assert "the last finished call is Torch.add.19.forward" in result.output
        dump = open_dump(tmp_path / form)
        assert len(dump) == 20
        assert np.array_equal(dump.load(dump.call("Torch.add.19.forward").values[0]), ARRAY + 19)
    assert "the last finished call" in open_dump(tmp_path / "native").ending


@pytest.mark.parametrize("name", ["api", "api.0.forward", "Torch.x"])
def test_a_name_that_is_none_of_a_call_does_not_stop_the_reading(tmp_path: Path, name: str) -> None:
    sine = "Torch.sin.0.forward"
    dump = open_dump(write_json(tmp_path, {name: made_call([tensor(7.0)], []), sine: made_call([tensor()], [])}))
    assert [dump.name_of(each) for each in dump.calls()] == [name, sine]
    (value,) = dump.nth(0).values
    assert value.stats is not None and value.stats.max == 7.0
