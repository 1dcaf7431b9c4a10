"""A file that is named is the file that is read, or it is refused for what it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
from click.testing import CliRunner, Result

from builders import DumpBuilder
from msprobe_files import call, floats, tensor, write_elements, write_json
from ulpscope.cli.main import cli
from ulpscope.compat.msprobe.command import main as msprobe
from ulpscope.compat.torch_npu_hooks.tools import compare as hooks
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text
from ulpscope.store.registry import open_dump

NAME = "Torch.mul.0.forward"


def dump(folder: Path, name: str, largest: float, **more: Any) -> Path:
    return write_json(folder, {NAME: call([], [tensor(largest, **more)])}, name=name)


def stacks(folder: Path, name: str, file: str) -> None:
    (folder / name).write_text(json.dumps({"0": [[NAME], [f"File {file}, line 1, in f, \n y = x"]]}))


def largest(path: Path) -> Any:
    stats = open_dump(path).call(NAME).values[0].stats
    return None if stats is None else stats.max


def ulpscope(*words: Any) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


def test_two_dumps_in_one_folder_are_two_dumps(tmp_path: Path) -> None:
    npu, gpu = dump(tmp_path, "dump.json", 1.0), dump(tmp_path, "gpu_dump.json", 9.0)
    assert (largest(npu), largest(gpu), largest(tmp_path)) == (1.0, 9.0, 1.0)
    assert ulpscope("compare", gpu, npu, "-o", tmp_path / "out").exit_code == 1
    assert f"ulpscope show {gpu}" in ulpscope("show", gpu).output
    assert "mul" in ulpscope("blame", gpu, npu).output


@pytest.mark.parametrize("name", ["rank0.json", "forward.json", "dump.json.old", "dump", "debug_dump.json"])
def test_a_dump_is_read_under_any_name(tmp_path: Path, name: str) -> None:
    dump(tmp_path, "dump.json", 1.0)
    assert largest(dump(tmp_path, name, 9.0)) == 9.0


def test_a_pkl_of_an_older_tool_is_read_under_any_name(tmp_path: Path) -> None:
    row = json.dumps(["Torch_mul_0_forward_output", 0, [], "torch.float32", [2], [9.0, 1.0, 1.0, 1.0]])
    for name in ("gpu.pkl", "gpu_lines.txt"):
        (tmp_path / name).write_text(row + "\n")
        assert largest(tmp_path / name) == 9.0


def test_calls_and_saved_values_that_are_named_are_read_alone(tmp_path: Path) -> None:
    dump(tmp_path, "dump.json", 1.0)
    write_json(tmp_path, {"x.0.debug": tensor()}, name="debug.json")
    assert [len(open_dump(tmp_path / name)) for name in ("", "dump.json", "debug.json")] == [2, 1, 1]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("stack.json", {"0": [[NAME], ["File a.py, line 1"]]}, "it is the stacks of a dump; name {}/dump.json"),
        ("construct.json", {NAME: None}, "it is what called what in a dump; name {}/dump.json"),
        ("gpu_stack.json", {}, "it is the stacks of a dump; name the dump.json that it belongs to"),
        ("notes.json", {"remarks": []}, "it has no object 'data'; name a dump.json, "),
        ("notes.txt", "9.0 on the GPU", "it holds no JSON; name a dump.json, "),
        ("dump_tensor_data/x.pt", "PK", "it is one tensor; name the dump"),
    ],
)
def test_a_file_that_is_no_dump_is_refused_for_what_it_is(tmp_path: Path, name: str, content: Any, says: str) -> None:
    good = dump(tmp_path, "dump.json", 1.0)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DumpError, match="is no dump") as caught:
        open_dump(path)
    assert str(path) in str(caught.value) and says.format(tmp_path) in str(caught.value)
    for verb in (("compare", good, path), ("compare", path, good), ("show", path), ("convert", path, tmp_path / "out")):
        found = ulpscope(*verb)
        assert isinstance(found.exception, DumpError) and "is no dump" in str(found.exception)
    asked = tmp_path / "compare_these.json"
    asked.write_text(json.dumps({"npu_path": str(path), "bench_path": str(good)}))
    assert msprobe(["-f", "pytorch", "compare", "-i", str(asked), "-o", str(tmp_path / "o")]) == 2
    assert msprobe(["-f", "pytorch", "run_ut", "-api_info", str(path), "-o", str(tmp_path / "o")]) == 2


def test_the_tables_of_a_native_dump_stand_for_it_and_other_files_beside_them_do_not(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path)
    builder.call("Torch", "mul", values={("output", 0): np.ones(3, np.float32)})
    folder = builder.close()
    for name in ("manifest.json", "calls.bin", "strings.jsonl"):
        assert open_dump(folder / name).folder == folder
    (folder / "result.json").write_text('{"verdict": "agrees"}')
    with pytest.raises(DumpError, match=r"result\.json is no dump"):
        open_dump(folder / "result.json")


def test_a_dump_of_another_name_has_the_files_that_are_named_as_it_is(tmp_path: Path) -> None:
    write_elements(tmp_path / "a", {"Torch.mul.0": {("output", 0): floats(1, 2)}})
    write_elements(tmp_path / "b", {"Torch.mul.0": {("output", 0): floats(3, 4)}})
    shutil.move(tmp_path / "b" / "dump.json", tmp_path / "a" / "gpu_dump.json")
    shutil.move(tmp_path / "b" / "dump_tensor_data", tmp_path / "a" / "gpu_dump_tensor_data")
    stacks(tmp_path / "a", "stack.json", "npu.py")
    stacks(tmp_path / "a", "gpu_stack.json", "gpu.py")
    for name, numbers, line in (("dump.json", [1, 2], "npu.py"), ("gpu_dump.json", [3, 4], "gpu.py")):
        found = open_dump(tmp_path / "a" / name)
        (record,) = found.calls()
        assert found.load(record.values[0]).tolist() == numbers
        assert [frame.file for frame in found.stack(record)] == [line]


def test_files_that_may_belong_to_another_dump_are_not_taken_from_it(tmp_path: Path) -> None:
    plain = write_elements(tmp_path, {"Torch.mul.0": {("output", 0): floats(1, 2)}})
    stacks(tmp_path, "stack.json", "npu.py")
    other = tmp_path / "gpu_dump.json"
    shutil.copy(plain, other)
    (record,) = open_dump(other).calls()
    assert open_dump(other).stack(record) == [] and record.values[0].payload is None
    assert "missing" in record.values[0].extra
    found = ulpscope("compare", plain, other, "-o", tmp_path / "out")
    assert found.exit_code == 3 and "files with elements are missing or cut: 1 of the target" in found.output
    plain.unlink()  # now nothing else can have them
    alone = open_dump(other)
    (record,) = alone.calls()
    assert alone.load(record.values[0]).tolist() == [1, 2] and len(alone.stack(record)) == 1


def test_the_same_dump_on_both_sides_is_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, other = dump(tmp_path / "a", "dump.json", 1.0), dump(tmp_path / "b", "dump.json", 1.0)
    os.link(path, tmp_path / "a" / "same.json")
    os.symlink(tmp_path / "a", tmp_path / "link")
    asked = tmp_path / "compare.json"
    for left, right in ((path, path), (path, tmp_path / "a" / "same.json"), (tmp_path / "a", tmp_path / "link")):
        caplog.clear()
        assert ulpscope("compare", left, right, "-o", tmp_path / "out").exit_code == 0
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.startswith("both sides are the same dump")
        caplog.clear()
        asked.write_text(json.dumps({"npu_path": str(left), "bench_path": str(right)}))
        msprobe(["-f", "pytorch", "compare", "-i", str(asked), "-o", str(tmp_path / "o")])
        assert caplog.text.count("both sides are the same dump") == 1
    caplog.clear()
    assert ulpscope("compare", path, other, "-o", tmp_path / "out").exit_code == 0
    assert "same dump" not in caplog.text


def test_the_compare_of_msprobe_reads_the_files_it_is_given(tmp_path: Path) -> None:
    npu, bench = dump(tmp_path, "dump.json", 1.0), dump(tmp_path, "gpu_dump.json", 9.0)
    saved = [write_json(tmp_path, {"x.0.debug": tensor(n)}, name=f"{n}_debug.json") for n in (1, 2)]
    stacks(tmp_path, "stack.json", "npu.py")
    asked = tmp_path / "compare.json"

    def rows(left: Path, right: Path, *words: str) -> list[dict[str, Any]]:
        asked.write_text(json.dumps({"npu_path": str(left), "bench_path": str(right)}))
        output = tmp_path / f"{left.stem}-{right.stem}"
        assert msprobe(["-f", "pytorch", "compare", "-i", str(asked), "-o", str(output), *words]) == 0
        (book,) = output.glob("*.xlsx")
        header, *found = openpyxl.load_workbook(book).active.iter_rows(values_only=True)
        return [dict(zip(header, row, strict=True)) for row in found]

    (row,) = rows(npu, bench)
    assert (row["NPU max"], row["Bench max"], row["Max diff"]) == (1, 9, -8) and "npu.py" in row["NPU_Stack_Info"]
    (row,) = rows(bench, npu)
    assert (row["NPU max"], row["Bench max"]) == (9, 1) and "NPU_Stack_Info" not in row
    (row,) = rows(*saved)
    assert (row["NPU Name"], row["NPU max"], row["Bench max"]) == ("x.0.debug", 1, 2)
    asked.write_text(json.dumps({"npu_path": str(saved[0]), "bench_path": str(npu)}))
    assert msprobe(["-f", "pytorch", "compare", "-i", str(asked), "-o", str(tmp_path / "o")]) == 2


def test_the_compare_of_the_oldest_tool_says_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [[f"{n}_Functional_{name}_forward_output", [1.0, 2.0], "torch.float32", [2]] for n, name in enumerate("ab")]
    for row, name in zip(rows, ("a.pkl", "b.pkl"), strict=True):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    hooks(str(tmp_path / "a.pkl"), str(tmp_path / "a.pkl"), str(tmp_path / "same.csv"))
    assert "both sides are the same dump" in caplog.text and "Nothing was compared" not in caplog.text
    caplog.clear()
    hooks(str(tmp_path / "a.pkl"), str(tmp_path / "b.pkl"), str(tmp_path / "other.csv"))
    assert "Nothing was compared" in caplog.text


def test_a_check_of_a_recorded_run_reads_what_is_named_or_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path, says in ((tmp_path / "notes.txt", "is no dump"), (tmp_path / "nowhere", "does not exist")):
        found = ulpscope("check", "overflow", path)
        assert isinstance(found.exception, DumpError) and says in str(found.exception)


def test_run_ut_runs_the_file_it_is_given(tmp_path: Path) -> None:
    dump(tmp_path, "dump.json", 1.0)
    leaf = tensor(1.0, 1.0, 1.0, 2.0, shape=(2, 2))
    named = write_json(tmp_path, {"Torch.abs.0.forward": call([leaf], [leaf])}, name="forward.json")
    assert msprobe(["-f", "pytorch", "run_ut", "-api_info", str(named), "-o", str(tmp_path / "o")]) == 0
    (result,) = (tmp_path / "o").glob("accuracy_checking_result_*.csv")
    assert "Torch.abs.0" in result.read_text(encoding="utf-8-sig") and "mul" not in result.read_text(
        encoding="utf-8-sig"
    )


def test_every_step_of_the_names_is_kept_where_a_file_is_named(tmp_path: Path) -> None:
    dump(tmp_path / "step3" / "rank7", "dump.json", 1.0)
    named = dump(tmp_path / "step3" / "rank7", "other.json", 2.0)
    found = open_dump(named)
    assert (found.manifest.step, found.manifest.rank, [call_text(each) for each in found.ids()]) == (3, 7, [NAME])
