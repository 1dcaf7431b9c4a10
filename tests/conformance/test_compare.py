"""Rows of the seeds' feature list that msprobe's compare serves: its command, functions, files, tables and messages.

Each test carries the ids of its rows. Workbooks are read by openpyxl, as a user's spreadsheet would.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest

import ulpscope.compat.msprobe as facade
from msprobe_files import call, floats, scalar, tensor, write_elements, write_json
from ulpscope.compat.msprobe.command import main
from ulpscope.model.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
ADD = "Functional.add.0.forward"
FRAMES = ["File train.py, line 3, in step, \n y = F.add(x, x)"]
Table = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The command sets up logging; what it adds goes."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def read(path: Path) -> Table:
    """The rows of a workbook by column; `fill` is the colour of a row."""
    header, *rows = openpyxl.load_workbook(path).active.iter_rows()
    names = [cell.value for cell in header]
    return [
        {name: cell.value for name, cell in zip(names, row, strict=True)}
        | {"fill": row[0].fill.fgColor.rgb if row[0].fill.patternType else None}
        for row in rows
    ]


def only(folder: Path, pattern: str) -> Path:
    (found,) = [path for path in folder.iterdir() if re.fullmatch(pattern, path.name)]
    return found


def command(tmp_path: Path, npu: Path, bench: Path, *flags: str, code: int = 0, **more: Any) -> Table:
    """What `msprobe -f pytorch compare` writes for two dumps, and ends with."""
    config = tmp_path / "compare.json"
    config.write_text(json.dumps({"npu_path": str(npu), "bench_path": str(bench), **more}))
    output = tmp_path / "output"
    assert main(["-f", "pytorch", "compare", "-i", str(config), "-o", str(output), "-c", *flags]) == code
    return read(max(output.glob("*compare_result_*.xlsx")))


def pair(tmp_path: Path, npu: Any, bench: Any, **more: Any) -> tuple[Path, Path]:
    """Two dumps of statistics, each with one call that has this output."""
    npu_file, bench_file = (
        write_json(tmp_path / side, {ADD: call([tensor()], [leaf])}, **more)
        for side, leaf in (("npu", npu), ("bench", bench))
    )
    return npu_file, bench_file


def output_row(tmp_path: Path, npu: Any, bench: Any, *flags: str) -> dict[str, Any]:
    return command(tmp_path, *pair(tmp_path, npu, bench), *flags)[-1]


def advice(tmp_path: Path, npu: Path, bench: Path, *, code: int = 0) -> str:
    """What the advisor says of two dumps, and the command ends with."""
    config, output = tmp_path / "advice.json", tmp_path / "advice"
    config.write_text(json.dumps({"npu_path": str(npu), "bench_path": str(bench)}))
    assert main(["-f", "pytorch", "compare", "-i", str(config), "-o", str(output)]) == code
    (path,) = output.glob("advisor_*.txt")
    return path.read_text()


def element_row(tmp_path: Path, npu: Any, bench: Any, *flags: str, inputs: Any = None) -> dict[str, Any]:
    same = floats(*range(1, 11))
    files = [
        write_elements(tmp_path / side, {"Functional.add.0": {("input", 0): before, ("output", 0): after}})
        for side, before, after in (("npu", same if inputs is None else inputs, npu), ("bench", same, bench))
    ]
    return command(tmp_path, *files, *flags)[-1]


# --- the command ------------------------------------------------------------------------------------------------


def test_003_001_002_003_004_the_command_of_the_manual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "npu_dump", {ADD: call([], [tensor()])}, stacks={ADD: FRAMES})
    write_json(tmp_path / "bench_dump", {ADD: call([], [tensor()])})
    manual = {
        "npu_path": "./npu_dump/dump.json",
        "bench_path": "./bench_dump/dump.json",
        "stack_path": "./npu_dump/stack.json",
        "is_print_compare_log": True,
    }
    (tmp_path / "compare.json").write_text(json.dumps(manual))
    monkeypatch.chdir(tmp_path)
    assert main(["-f", "pytorch", "compare", "-i", "./compare.json", "-o", "./output", "-s"]) == 0
    (row,) = read(only(tmp_path / "output", r"compare_result_\d{14}\.xlsx"))
    assert row["NPU_Stack_Info"] == str(FRAMES)
    assert main(["-f", "pytorch", "compare", "-i", "./compare.json"]) == 0  # ./output is the default


def test_003_001_as_a_module_without_a_framework(tmp_path: Path) -> None:
    file = write_json(tmp_path / "a", {ADD: call([], [tensor()])})
    (tmp_path / "c.json").write_text(json.dumps({"npu_path": str(file), "bench_path": str(file)}))
    code = (
        "import sys; from ulpscope.compat.msprobe.command import main\n"
        f"assert main(['-f', 'pytorch', 'compare', '-i', {str(tmp_path / 'c.json')!r}, '-o', {str(tmp_path / 'o')!r}]) == 0\n"
        "assert not {'torch', 'mindspore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})
    done = subprocess.run(
        [sys.executable, "-m", "ulpscope.compat.msprobe", "--help"],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "merge_result" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        "compare -i c.json",
        "-f mindspore compare -i c.json",
        "-f pytorch",
        "-f pytorch compare",
        "-f pytorch compare -i",
    ],
)
def test_003_002_003_a_bad_command_line_is_exit_code_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "input_param should be dict, please check!"),
        ('{"bench_path": "x"}', "Missing npu_path in input configuration file, please check!"),
        ('{"npu_path": "x"}', "Missing bench_path in input configuration file, please check!"),
        ('{"npu_path": 1, "bench_path": "x"}', "npu_path is 1, it must be a path"),
        ('{"npu_path": "x", "bench_path": "y", "is_print_compare_log": "no"}', "is_print_compare_log"),
        ('{"npu_path": "nowhere", "bench_path": "nowhere"}', "nowhere does not exist"),
        ("{", "cannot be read"),
    ],
)
def test_003_003_a_mistake_in_the_file_is_one_message_and_exit_code_2(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, message: str
) -> None:
    (tmp_path / "c.json").write_text(content)
    assert main(["-f", "pytorch", "compare", "-i", str(tmp_path / "c.json"), "-o", str(tmp_path / "o")]) == 2
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert message in error.getMessage()


def test_003_004_results_of_one_second_are_kept_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20260101000000")
    config, output = tmp_path / "compare.json", tmp_path / "output"
    for largest in (1.0, 2.0, 3.0):
        npu, bench = pair(tmp_path / str(largest), tensor(largest), tensor(largest))
        config.write_text(json.dumps({"npu_path": str(npu), "bench_path": str(bench)}))
        assert main(["-f", "pytorch", "compare", "-i", str(config), "-o", str(output)]) == 0
    found = [f"{name}_20260101000000{more}" for name in ("advisor", "compare_result") for more in ("", "_1", "_2")]
    assert sorted(path.stem for path in output.iterdir()) == sorted(found)
    books = [output / f"compare_result_20260101000000{more}.xlsx" for more in ("", "_1", "_2")]
    assert [read(path)[-1]["NPU max"] for path in books] == [1, 2, 3]
    assert main(["-f", "pytorch", "compare", "-i", str(config), "-o", str(output), "-da"]) == 0
    assert main(["-f", "pytorch", "compare", "-i", str(config), "-o", str(output), "-da"]) == 0
    assert len(list(output.glob("compare_result_rank0_20260101000000*.json"))) == 2


def test_003_005_102_a_named_stack_is_shown_with_s_and_found_by_itself_without_a_name(tmp_path: Path) -> None:
    npu, bench = pair(tmp_path, tensor(), tensor(), stacks={ADD: FRAMES})
    named = str(npu.parent / "stack.json")
    assert "NPU_Stack_Info" not in command(tmp_path / "", npu, bench, stack_path=named)[0]
    assert command(tmp_path, npu, bench, "-s", stack_path=named)[0]["NPU_Stack_Info"] == str(FRAMES)
    assert "NPU_Stack_Info" in command(tmp_path, npu, bench)[0]
    (npu.parent / "stack.json").unlink()
    assert "NPU_Stack_Info" not in command(tmp_path, npu, bench, "-s")[0]


def test_003_006_071_advice_unless_only_the_table_is_asked_for(tmp_path: Path) -> None:
    npu, bench = pair(tmp_path, tensor(9.0), tensor(1.0))
    (tmp_path / "c.json").write_text(json.dumps({"npu_path": str(npu), "bench_path": str(bench)}))
    for flags, advice in (((), 1), (("-c",), 0)):
        output = tmp_path / f"output{advice}"
        assert main(["-f", "pytorch", "compare", "-i", str(tmp_path / "c.json"), "-o", str(output), *flags]) == 0
        assert len(list(output.glob("advisor_*.txt"))) == advice
    text = only(tmp_path / "output1", r"advisor_\d{14}\.txt").read_text()
    assert f"Suspect Nodes: {ADD}.output.0" in text
    assert "forward API computation error" in text


ALL_WELL = "All data in comparison result meets the accuracy requirements."


def test_003_071_that_all_is_well_needs_rows_that_were_compared(tmp_path: Path) -> None:
    good = write_json(tmp_path / "good", {ADD: call([tensor()], [tensor()])})
    other = write_json(tmp_path / "other", {"Torch.sin.0.forward": call([], [tensor()])})
    empty = write_json(tmp_path / "empty", {})
    unknown = write_json(tmp_path / "unknown", {ADD: call([], [tensor(None, None, None, None)])})
    more = write_json(
        tmp_path / "more", {ADD: call([tensor()], [tensor()]), "Torch.sin.0.forward": call([], [tensor()])}
    )
    assert ALL_WELL in advice(tmp_path / "good", good, good)
    for name, left, right in (("1", good, other), ("2", empty, empty), ("3", good, empty), ("4", unknown, good)):
        text = advice(write_json(tmp_path / name, {}).parent, left, right, code=4)
        assert "Nothing was compared" in text and "meets" not in text
    text = advice(more.parent, more, good)
    assert ALL_WELL not in text and "1 of 3 rows could not be judged" in text
    nothing = write_json(tmp_path / "nothing", {})
    nothing.write_text("{}")
    (tmp_path / "c.json").write_text(json.dumps({"npu_path": str(nothing), "bench_path": str(nothing)}))
    assert main(["-f", "pytorch", "compare", "-i", str(tmp_path / "c.json"), "-o", str(tmp_path / "o")]) == 2


def test_003_071_truth_values_empty_tensors_and_arguments_do_not_stand_against_all_being_well(tmp_path: Path) -> None:
    truth = tensor(True, False, None, None, dtype="torch.bool")
    arguments = [scalar(3), scalar("mean"), scalar(True), None, {"type": "torch.Size", "value": [2, 3]}]
    values = [tensor(), truth, tensor(None, None, None, None, shape=(0, 3)), *arguments]
    sides = [write_json(tmp_path / side, {ADD: call(values, [tensor()])}) for side in "ab"]
    assert ALL_WELL in advice(tmp_path, *sides)
    odd = [np.array([True, False]), np.zeros((0, 2), np.float32), np.array(2, np.float32), floats(1.0), 3, "mean"]
    given = {("input", place): value for place, value in enumerate(odd)}
    calls = {"Functional.add.0": {**given, ("output", 0): floats(1, 2)}}
    sides = [write_elements(tmp_path / side, calls) for side in ("c", "d")]
    assert ALL_WELL in advice(tmp_path / "c", *sides)
    off = {"Functional.add.0": {**given, ("input", 2): np.array(3, np.float32), ("output", 0): floats(1, 2)}}
    text = advice(tmp_path / "d", write_elements(tmp_path / "e", off), sides[1])
    assert ALL_WELL not in text and "1 of" in text


def test_003_007_fuzzy_matching_ignores_the_number_of_the_call(tmp_path: Path) -> None:
    npu = write_json(tmp_path / "npu", {f"Functional.relu.{n}.forward": call([], [tensor(n)]) for n in (1, 2)})
    bench = write_json(tmp_path / "bench", {f"Functional.relu.{n}.forward": call([], [tensor(n - 1)]) for n in (2, 3)})
    assert [row["Bench Name"] for row in command(tmp_path, npu, bench)] == ["N/A", "Functional.relu.2.forward.output.0"]
    found = [row["Bench Name"] for row in command(tmp_path, npu, bench, "-f")]
    assert found == ["Functional.relu.2.forward.output.0", "Functional.relu.3.forward.output.0"]


def test_003_008_070_rows_are_coloured_with_hl_only(tmp_path: Path) -> None:
    assert output_row(tmp_path, tensor(9.0), tensor(1.0))["fill"] is None
    assert output_row(tmp_path, tensor(9.0), tensor(1.0), "-hl")["fill"] == "FFFF0000"
    assert output_row(tmp_path, tensor(requires_grad=True), tensor(), "-hl")["fill"] == "00FFFF00"


def test_003_008_a_table_beyond_a_sheet_has_no_colours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ulpscope.compat.msprobe.comparing._MOST_COLOURED", 1)
    assert output_row(tmp_path, tensor(9.0), tensor(1.0), "-hl")["fill"] is None
    assert "the result has no colours" in caplog.text


def test_003_009_012_104_a_mapping_file_puts_values_together(tmp_path: Path) -> None:
    leaves = [tensor()], [tensor()]
    npu = write_json(tmp_path / "npu", {"NPU.npu_attention.0.forward": call(*leaves), ADD: call(*leaves)})
    bench = write_json(tmp_path / "bench", {"Functional.attention.4.forward": call(*leaves), ADD: call(*leaves)})
    module = "Module.a.B.forward.0.input.0: Module.c.D.forward.0.input.0\n"
    (tmp_path / "map.yaml").write_text(
        f"# API\nNPU.npu_attention.0.forward.input.0: Functional.attention.4.forward.input.0\n# module\n{module}"
    )
    rows = command(tmp_path, npu, bench, "-dm", str(tmp_path / "map.yaml"))
    assert [row["Bench Name"] for row in rows] == [
        "Functional.attention.4.forward.input.0",
        "N/A",
        f"{ADD}.input.0",
        f"{ADD}.output.0",
    ]


def test_003_009_a_mapping_is_for_one_card_and_not_for_fuzzy_matching(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "map.yaml").write_text(f"{ADD}.input.0: {ADD}.input.0\n")
    files = pair(tmp_path / "step0", tensor(), tensor())
    for paths, flags, message in (
        (files, ["-f"], "cannot be used with -f"),
        ([tmp_path / "step0"] * 2, [], "-dm is for one card"),
    ):
        npu, bench = map(str, paths)
        if not flags:
            (tmp_path / "step0" / "npu").rename(tmp_path / "step0" / "rank0")
        (tmp_path / "c.json").write_text(json.dumps({"npu_path": npu, "bench_path": bench}))
        arguments = ["-f", "pytorch", "compare", "-i", str(tmp_path / "c.json"), "-o", str(tmp_path / "o"), *flags]
        assert main([*arguments, "-dm", str(tmp_path / "map.yaml")]) == 2
        assert message in caplog.records[-1].getMessage()


@pytest.mark.parametrize("md5", [None, "0000000a"])
def test_003_010_014_the_first_difference(tmp_path: Path, md5: str | None) -> None:
    more = {} if md5 is None else {"md5": md5}
    other = {} if md5 is None else {"md5": "0000000b"}
    npu = write_json(tmp_path / "npu", {ADD: call([tensor(**more)], [tensor(9.0, **other)])})
    bench = write_json(tmp_path / "bench", {ADD: call([tensor(**more)], [tensor(1.0, **more)])})
    (tmp_path / "c.json").write_text(json.dumps({"npu_path": str(npu), "bench_path": str(bench)}))
    output = tmp_path / "output"
    assert main(["-f", "pytorch", "compare", "-i", str(tmp_path / "c.json"), "-o", str(output), "-da"]) == 0
    rank = json.loads(only(output, r"compare_result_rank0_\d{14}\.json").read_text())
    assert rank[ADD]["is_same"] is False
    found = json.loads(only(output, r"diff_analyze_\d+\.json").read_text())
    assert found["rank_0"][0]["op_name"] == ADD


# --- scenarios and functions ------------------------------------------------------------------------------------


def ranks(tmp_path: Path, *numbers: str, name: str = "dump.json", step: str = "step0") -> Path:
    folder = tmp_path / step
    for number in numbers:
        calls = {"x.0.debug": tensor()} if name == "debug.json" else {ADD: call([], [tensor(requires_grad=True)])}
        write_json(folder / f"rank{number}", calls, name=name, stacks={ADD: FRAMES})
    return folder


def test_003_011_016_101_ranks_are_paired_in_numeric_order(tmp_path: Path) -> None:
    npu, bench = ranks(tmp_path / "npu", "2", "10"), ranks(tmp_path / "bench", "0", "1")
    command(tmp_path, npu, bench)
    names = sorted(path.name for path in (tmp_path / "output").iterdir())
    assert [re.sub(r"\d{14}", "T", name) for name in names] == [
        "compare_result_rank10_T.xlsx",
        "compare_result_rank2_T.xlsx",
    ]
    assert read(tmp_path / "output" / names[0])[0]["NPU_Stack_Info"] == str(FRAMES)


def test_003_011_the_folder_of_a_process_without_a_rank(tmp_path: Path) -> None:
    command(tmp_path, ranks(tmp_path / "npu", ""), ranks(tmp_path / "bench", ""))
    only(tmp_path / "output", r"compare_result_rank_\d{14}\.xlsx")


def test_003_016_101_another_number_of_ranks_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    npu, bench = ranks(tmp_path / "npu", "0", "1"), ranks(tmp_path / "bench", "0")
    with pytest.raises(ConfigError, match="The number of ranks in the two runs are different"):
        facade.compare_distributed(str(npu), str(bench), str(tmp_path))
    (tmp_path / "c.json").write_text(
        json.dumps({"npu_path": str(npu), "bench_path": str(bench / "rank0" / "dump.json")})
    )
    assert main(["-f", "pytorch", "compare", "-i", str(tmp_path / "c.json"), "-o", str(tmp_path / "o")]) == 2
    assert "need to be of the same type" in caplog.text


def test_003_013_106_single_values_of_one_card(tmp_path: Path) -> None:
    files = []
    for side, large in (("npu", 9.0), ("bench", 1.0)):
        write_json(tmp_path / side, {ADD: call([], [tensor()])})
        calls = {"x.0.debug": tensor(large), "pack.0.debug": {"a": tensor(), "b": [scalar(1)]}, "x_grad.0.debug": None}
        files.append(write_json(tmp_path / side, calls, name="debug.json"))
    rows = command(tmp_path, *files)
    only(tmp_path / "output", r"debug_compare_result_\d{14}\.xlsx")
    assert [row["NPU Name"] for row in rows][:3] == ["x.0.debug", "pack.0.debug.a", "pack.0.debug.b.0"]
    assert (rows[0]["Max diff"], rows[0]["Result"]) == (8, "Warning")


def test_003_013_106_single_values_of_several_cards(tmp_path: Path) -> None:
    sides = [ranks(tmp_path / side, "0", "1", name="debug.json") for side in ("npu", "bench")]
    command(tmp_path, *sides)
    names = sorted(re.sub(r"\d{14}", "T", path.name) for path in (tmp_path / "output").iterdir())
    assert names == ["debug_compare_result_rank0_T.xlsx", "debug_compare_result_rank1_T.xlsx"]


def test_003_015_the_compare_function(tmp_path: Path) -> None:
    expected = "(input_param, output_path, stack_mode=False, auto_analyze=True, fuzzy_match=False, highlight=False)"
    plain = [
        parameter.replace(annotation="", kind=parameter.kind)
        for parameter in inspect.signature(facade.compare).parameters.values()
    ]
    shown = ", ".join(each.name + ("" if each.default is each.empty else f"={each.default}") for each in plain)
    assert f"({shown})" == expected
    npu, bench = pair(tmp_path, tensor(9.0), tensor(1.0), stacks={ADD: FRAMES})
    parameters = {
        "npu_json_path": str(npu),
        "bench_json_path": str(bench),
        "stack_json_path": str(npu.parent / "stack.json"),
        "is_print_compare_log": True,
    }
    facade.compare(parameters, output_path=str(tmp_path / "output"), stack_mode=True, highlight=True)
    rows = read(only(tmp_path / "output", r"compare_result_\d{14}\.xlsx"))
    assert (rows[0]["NPU_Stack_Info"], rows[1]["fill"]) == (str(FRAMES), "FFFF0000")
    assert only(tmp_path / "output", r"advisor_\d{14}\.txt").is_file()
    with pytest.raises(ConfigError, match="Missing npu_json_path"):
        facade.compare({"bench_json_path": str(bench)}, str(tmp_path))
    with pytest.raises(ConfigError, match="should be dict"):
        facade.compare([], str(tmp_path))  # type: ignore[arg-type]


def test_003_016_the_compare_distributed_function(tmp_path: Path) -> None:
    npu, bench = ranks(tmp_path / "npu", "0", "1"), ranks(tmp_path / "bench", "0", "1")
    output = tmp_path / "output"
    with pytest.raises(ConfigError, match="make it first"):
        facade.compare_distributed(str(npu), str(bench), str(output))
    output.mkdir()
    with pytest.raises(ConfigError, match=r"'fuzzy_matsch'.*'fuzzy_match'"):
        facade.compare_distributed(str(npu), str(bench), str(output), fuzzy_matsch=True)
    facade.compare_distributed(str(npu), str(bench), str(output), stack_mode=False, auto_analyze=False)
    assert len(list(output.glob("compare_result_rank[01]_*.xlsx"))) == len(list(output.iterdir())) == 2
    facade.compare_distributed(str(npu), str(bench), str(output))
    assert len(list(output.glob("advisor_rank[01]_*.txt"))) == 2


def test_003_015_016_the_names_of_msprobe_give_them_without_torch() -> None:
    code = "import sys; from msprobe.pytorch import compare, compare_distributed; assert 'torch' not in sys.modules"
    path = f"{ROOT / 'src'}:{ROOT / 'dropin'}"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})


def test_003_017_the_speed_is_measured_in_benchmarks() -> None:
    """The manual's 0.1 to 0.3 GB/s is a target for benchmarks/; a test that measures time would not be one."""
    assert (ROOT / "benchmarks").is_dir()


# --- rows -------------------------------------------------------------------------------------------------------


def test_003_018_105_names_of_rows(tmp_path: Path) -> None:
    pooling = call(
        [tensor(), *map(scalar, (3, 2, 1, 1))],
        [tensor()],
        {"ceil_mode": scalar(False), "return_indices": scalar(False)},
    )
    nested = call([[tensor(), {"a": scalar(1)}]], [[tensor()]])
    file = write_json(tmp_path / "a", {"Functional.max_pool2d.0.forward": pooling, "Torch.f.1.forward": nested})
    slots = [
        "input.0",
        "input.1",
        "input.2",
        "input.3",
        "input.4",
        "input.ceil_mode",
        "input.return_indices",
        "output.0",
    ]
    assert [row["NPU Name"] for row in command(tmp_path, file, file)] == [
        *(f"Functional.max_pool2d.0.forward.{slot}" for slot in slots),
        *(f"Torch.f.1.forward.{slot}" for slot in ("input.0.0", "input.0.1.a", "output.0.0")),
    ]
    elements = write_elements(tmp_path / "b", {"Torch.mul.0": {("input", "other"): floats(1, 2)}})
    assert [row["NPU Name"] for row in command(tmp_path, elements, elements)] == ["Torch.mul.0.forward.kwargs.other"]


def test_003_019_names_and_shapes_make_a_match(tmp_path: Path) -> None:
    npu = write_json(tmp_path / "npu", {ADD: call([tensor(), tensor()], [tensor(shape=[4])])})
    bench = write_json(tmp_path / "bench", {ADD: call([tensor()], [tensor(shape=[2])])})
    assert [row["Bench Name"] for row in command(tmp_path, npu, bench)] == [f"{ADD}.input.0", "N/A", "N/A"]


COMMON = [
    *("NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape"),
    *("NPU Requires_grad", "Bench Requires_grad"),
]
STATISTICS = ["NPU max", "NPU min", "NPU mean", "NPU l2norm", "Bench max", "Bench min", "Bench mean", "Bench l2norm"]


def test_003_030_031_035_the_table_of_real_data(tmp_path: Path) -> None:
    row = element_row(tmp_path, floats(1, 2), floats(1, 2))
    metrics = [
        "Cosine",
        "EucDist",
        "MaxAbsErr",
        "MaxRelativeErr",
        "One Thousandth Err Ratio",
        "Five Thousandths Err Ratio",
    ]
    verdicts = ["Requires_grad Consistent", "Accuracy Reached or Not", "Err_message"]
    assert [name for name in row if name not in ("fill", "NPU_Stack_Info")] == [
        *COMMON,
        *metrics,
        *STATISTICS,
        *verdicts,
        "Data_name",
    ]
    assert row["Data_name"] == f"['{ADD}.output.0.pt', '{ADD}.output.0.pt']"


def test_003_030_032_the_table_of_statistics(tmp_path: Path) -> None:
    differences = ["Max diff", "Min diff", "Mean diff", "L2norm diff"]
    errors = ["MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr"]
    verdicts = ["Requires_grad Consistent", "Result", "Err_message", "fill"]
    assert list(output_row(tmp_path, tensor(), tensor())) == [*COMMON, *differences, *errors, *STATISTICS, *verdicts]


def test_003_030_033_034_the_table_of_checksums_with_stacks(tmp_path: Path) -> None:
    files = [
        write_json(
            tmp_path / side, {ADD: call([tensor(md5="0000000a")], [tensor(md5="0000000a")])}, stacks={ADD: FRAMES}
        )
        for side in ("npu", "bench")
    ]
    rows = command(tmp_path, *files)
    assert list(rows[0])[8:-1] == ["NPU MD5", "BENCH MD5", "Requires_grad Consistent", "Result", "NPU_Stack_Info"]
    assert [row["NPU_Stack_Info"] for row in rows] == [str(FRAMES), "N/A"]


def test_003_040_the_formulas(tmp_path: Path) -> None:
    row = element_row(tmp_path, floats(3, 0, 4), floats(3, 4, 0))
    # N . B = 9, both of length 5; N - B = (0, -4, 4).
    assert [row["Cosine"], row["EucDist"], row["MaxAbsErr"]] == [0.36, pytest.approx(32**0.5), 4]
    assert (row["MaxRelativeErr"], row["One Thousandth Err Ratio"]) == ("inf", pytest.approx(1 / 3))
    row = output_row(tmp_path / "s", tensor(3.0, -1.0, 1.0, 5.0), tensor(2.0, -4.0, 2.0, 4.0))
    assert [row[f"{name} diff"] for name in ("Max", "Min", "Mean", "L2norm")] == [1, 3, -1, 1]
    assert [row[f"{name}RelativeErr"] for name in ("Max", "Min", "Mean", "Norm")] == [
        "50.0%",
        "75.0%",
        "50.0%",
        "25.0%",
    ]


# --- colours ----------------------------------------------------------------------------------------------------

RED, YELLOW = "FFFF0000", "00FFFF00"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_003_041_red_for_what_is_not_finite(tmp_path: Path, number: float) -> None:
    row = output_row(tmp_path, tensor(1.0, number), tensor(1.0, 0.5), "-hl")
    assert (row["fill"], row["Err_message"].splitlines()[-1]) == (RED, "maximum or minimum is nan, -inf, or inf")
    row = element_row(tmp_path / "e", floats(1, number), floats(1, number), "-hl")
    assert (row["fill"], row["Err_message"]) == (RED, "maximum or minimum is nan, -inf, or inf")


def test_003_042_red_for_a_huge_error(tmp_path: Path) -> None:
    same = floats(*range(1, 11))
    row = element_row(tmp_path, same, same, "-hl", inputs=same)
    assert row["fill"] is None
    files = [
        write_elements(tmp_path / side, {"Functional.add.0": {("input", 0): floats(1, large)}})
        for side, large in (("b", 3e10), ("c", 1.0))
    ]
    row = command(tmp_path, *files, "-hl")[-1]
    assert (row["fill"], row["Err_message"]) == (RED, "maximum absolute error exceeds 1e+10")


def test_003_043_046_red_and_yellow_for_a_ratio_that_falls(tmp_path: Path) -> None:
    bench = floats(*range(1, 11))
    for off, fill, word in ((5, RED, "below 0.6"), (2, YELLOW, "decreases by more than 0.1")):
        npu = bench.copy()
        npu[:off] *= np.float32(1.01)
        row = element_row(tmp_path / str(off), npu, bench, "-hl")
        assert row["fill"] == fill
        assert word in row["Err_message"]


def test_003_044_red_for_a_largest_element_that_is_off_with_a_floor(tmp_path: Path) -> None:
    assert output_row(tmp_path, tensor(1.6), tensor(1.0), "-hl")["fill"] == RED
    assert (
        output_row(tmp_path / "b", tensor(0.005), tensor(0.001), "-hl")["fill"] == YELLOW
    )  # 0.004 / 0.01 is below 0.5
    rows = command(tmp_path / "b", *pair(tmp_path / "c", tensor(1.6), tensor(1.0)), "-hl")
    assert rows[0]["fill"] is None


@pytest.mark.parametrize("elements", [True, False])
def test_003_045_yellow_for_an_error_ten_times_that_of_the_input(tmp_path: Path, elements: bool) -> None:
    if elements:
        bench = floats(*range(100, 110))
        files = [
            write_elements(tmp_path / side, {"Functional.add.0": {("input", 0): before, ("output", 0): after}})
            for side, before, after in (("npu", bench + 2, bench + 30), ("bench", bench, bench))
        ]
    else:
        files = [
            write_json(tmp_path / side, {ADD: call([tensor(before)], [tensor(after)])})
            for side, before, after in (("npu", 102.0, 130.0), ("bench", 100.0, 100.0))
        ]
    row = command(tmp_path, *files, "-hl")[-1]
    assert row["fill"] == YELLOW
    assert "with the output larger by an order of magnitude" in row["Err_message"]


@pytest.mark.parametrize("elements", [True, False])
def test_003_047_yellow_for_a_relative_error_that_appears(tmp_path: Path, elements: bool) -> None:
    if elements:
        row = element_row(
            tmp_path,
            np.append(np.ones(99, np.float32), floats(2.4)),
            np.append(np.ones(99, np.float32), floats(2)),
            "-hl",
        )
    else:
        row = output_row(tmp_path, tensor(1.2), tensor(1.0), "-hl")
    assert row["fill"] == YELLOW
    assert "maximum relative error exceeds 0.1, while the input/parameter's is below 0.01" in row["Err_message"]


def test_003_048_yellow_for_a_cosine_that_falls(tmp_path: Path) -> None:
    bench = np.append(np.zeros(98, np.float32), floats(1, 1))
    npu = np.append(np.zeros(98, np.float32), floats(1, -1))
    row = element_row(tmp_path, npu, bench, "-hl")
    assert row["fill"] == YELLOW
    assert "The output's cosine decreases by more than 0.1 compared to the input/parameter's" in row["Err_message"]


def test_003_049_067_yellow_and_a_message_for_requires_grad(tmp_path: Path) -> None:
    row = output_row(tmp_path, tensor(requires_grad=True), tensor(), "-hl")
    assert (row["fill"], row["Requires_grad Consistent"]) == (YELLOW, "False")
    assert row["Err_message"] == "Requires_grad inconsistent.\nrequires_grad is inconsistent"


def test_003_050_051_red_wins_and_reasons_stand_below_each_other(tmp_path: Path) -> None:
    row = output_row(tmp_path, tensor(3e10, requires_grad=True), tensor(1.0), "-hl")
    assert row["fill"] == RED
    assert row["Err_message"].split("\n") == [
        "Need double check api accuracy. Requires_grad inconsistent.",
        "maximum absolute error exceeds 1e+10",
        "maximum relative error exceeds 0.5",
    ]


# --- verdicts and messages --------------------------------------------------------------------------------------


def test_003_052_055_068_the_result_of_statistics(tmp_path: Path) -> None:
    row = output_row(tmp_path, tensor(1.6), tensor(1.0))
    assert (row["Result"], row["Err_message"]) == ("Warning", "Need double check api accuracy.")
    row = output_row(tmp_path / "b", tensor(1.5), tensor(1.0))
    assert (row["Result"], row["Err_message"]) == (None, None)
    npu = write_json(tmp_path / "c", {"Torch.f.0.forward": call([], [scalar(1)])})
    (row,) = command(tmp_path, npu, write_json(tmp_path / "d", {}), code=4)
    assert (row["Result"], row["Err_message"]) == ("N/A", "No bench data matched.")


NAN = float("nan")


@pytest.mark.parametrize(
    ("npu", "bench"),
    [
        (tensor(NAN, NAN, NAN, NAN), tensor()),
        (tensor(), tensor(NAN, NAN, NAN, NAN)),
        (tensor("nan", "nan", "nan", "nan"), tensor()),
        (tensor(1.5, -1.5, NAN, 3.0), tensor()),
        (tensor(NAN, NAN, NAN, NAN, shape=()), tensor(shape=())),
        (tensor(NAN, None, None, None), tensor(1.0, None, None, None)),
        (scalar(NAN), scalar(1.0)),
    ],
)
def test_003_052_055_nan_on_one_side_is_a_warning(tmp_path: Path, npu: Any, bench: Any) -> None:
    row = output_row(tmp_path, npu, bench)
    assert (row["Result"], row["Err_message"]) == ("Warning", "Need double check api accuracy.")


def test_003_052_nan_on_both_sides_is_no_warning_and_no_accuracy(tmp_path: Path) -> None:
    nothing = tensor(NAN, NAN, NAN, NAN)
    assert output_row(tmp_path, nothing, nothing)["Result"] is None
    text = advice(tmp_path, *pair(tmp_path / "b", nothing, nothing))
    assert "could be judged" in text and "1 of 2 rows" in text


def test_003_053_the_result_of_checksums(tmp_path: Path) -> None:
    leaves = [tensor(md5=md5) for md5 in ("0000000a", "0000000b", "0000000c")]
    npu = write_json(tmp_path / "npu", {ADD: call(leaves, [])})
    bench = write_json(tmp_path / "bench", {ADD: call([leaves[0], leaves[0]], [])})
    assert [row["Result"] for row in command(tmp_path, npu, bench)] == ["Pass", "Different", "N/A"]


@pytest.mark.parametrize(
    ("npu", "bench", "verdict"),
    [
        (floats(1, 2), floats(1, 2), "Yes"),
        (floats(1, 0.12), floats(1, 0), "Yes"),  # a cosine above 0.99
        (floats(1, 0.15), floats(1, 0), "No"),  # 0.989 and an error above 0.001
        (floats(1e-4, 1e-4), floats(1e-4, 0), "No"),  # a cosine below 0.9
        (floats(1000, 2000), floats(1002, 2000), "No"),  # an error above 1
        (floats(float("nan"), 1), floats(1, 1), "No"),
        (floats(), floats(), "None"),
        (np.array(1, np.float32), np.array(1, np.float32), "None"),
        (np.array(float("nan"), np.float32), np.array(1, np.float32), "No"),
        (np.array(1, np.float32), np.array(float("inf"), np.float32), "No"),
        (np.array(float("nan"), np.float32), np.array(float("nan"), np.float32), "None"),
        (floats(1, 2, 3), floats(1, 2), "Unmatched"),
    ],
)
def test_003_054_accuracy(tmp_path: Path, npu: Any, bench: Any, verdict: str) -> None:
    assert element_row(tmp_path, npu, bench)["Accuracy Reached or Not"] == verdict


def test_003_056_a_fuzzy_match_is_said(tmp_path: Path) -> None:
    files = [
        write_elements(tmp_path / side, {f"Torch.f.{number}": {("output", 0): floats(1, 2)}})
        for side, number in (("npu", 0), ("bench", 3))
    ]
    (row,) = command(tmp_path, *files, "-f")
    assert row["Err_message"] == "Fuzzy matching data, the comparison accuracy may be affected."


def test_003_057_059_060_files_that_are_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"Torch.f.0": {("output", 0): np.ones((2, 3), np.float32)}}
    npu, bench = (write_elements(tmp_path / side, values) for side in ("npu", "bench"))
    without = write_json(tmp_path / "none", {"Torch.f.0.forward": call([], [tensor()])}, task="tensor")
    assert command(tmp_path, without, bench, code=4)[0]["Err_message"] == "NPU does not have data file."
    assert command(tmp_path, npu, without, code=4)[0]["Err_message"] == "Bench does not have data file."
    next((npu.parent / "dump_tensor_data").iterdir()).unlink()
    name = "Torch.f.0.forward.output.0.pt"
    said = command(tmp_path, npu, bench, code=4)[0]["Err_message"]
    assert said == f"Dump file: ['{name}', '{name}'] not found or read failed."
    assert f"Files with elements are missing or cut: 1 of {npu}" in caplog.text


def test_003_058_061_what_has_no_counterpart(tmp_path: Path) -> None:
    values = {("input", 0): 3, ("output", 0): floats(1, 2)}
    files = [write_elements(tmp_path / name, {f"Torch.{name}.0": values}) for name in "ab"]
    assert [row["Err_message"] for row in command(tmp_path, *files, code=4)] == [
        "No bench data matched. NPU does not have data file.",
        "Requires_grad inconsistent. Bench api/module unmatched.",
    ]


@pytest.mark.parametrize(
    ("npu", "bench", "message"),
    [
        (floats(), floats(), "This is empty data, can not compare."),
        (floats(1, 2, 3), floats(1, 2), "Shape of NPU and bench Tensor do not match. Skipped."),
        (
            floats(float("nan"), 1),
            floats(1, 1),
            "The Position of inf or nan in NPU and bench Tensor do not match.",
        ),
        (
            np.array(1, np.float32),
            np.array(1, np.float32),
            "This is type of 0-d tensor, can not calculate 'Cosine', 'EucDist', 'One Thousandth Err Ratio' and "
            "'Five Thousandths Err Ratio'.",
        ),
        (floats(1, 2), np.array([1, 2], np.float16), "Dtype of NPU and bench Tensor do not match."),
        (floats(1, 2), floats(1, 2), None),
    ],
)
def test_003_062_063_064_065_066_068_messages_about_elements(
    tmp_path: Path, npu: Any, bench: Any, message: str | None
) -> None:
    assert element_row(tmp_path, npu, bench)["Err_message"] == message


# --- compare.json -----------------------------------------------------------------------------------------------


def test_003_100_101_the_examples_of_the_manual_with_their_remarks(tmp_path: Path) -> None:
    npu, bench = ranks(tmp_path / "npu_dump", "0"), ranks(tmp_path / "bench_dump", "0")
    text = f"""{{
    "npu_path": "{npu}",  # 需填写到step层级（rank的上一层级）
    "bench_path": "{bench}",  # 需填写到step层级（rank的上一层级）
    "is_print_compare_log": true
    }}"""
    (tmp_path / "compare.json").write_text(text, encoding="utf-8")
    arguments = ["-f", "pytorch", "compare", "-i", str(tmp_path / "compare.json"), "-o", str(tmp_path / "o")]
    assert main(arguments) == 0
    only(tmp_path / "o", r"compare_result_rank0_\d{14}\.xlsx")


def test_003_102_a_missing_stack_path_is_said_and_a_wrong_one_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    npu, bench = pair(tmp_path, tensor(), tensor())
    command(tmp_path, npu, bench)
    assert "Missing stack_path in the configuration file. Automatically detecting stack.json" in caplog.text
    parameters = {"npu_json_path": str(npu), "bench_json_path": str(bench)}
    with pytest.raises(ConfigError, match="does not exist"):
        facade.compare({**parameters, "stack_json_path": "nowhere.json"}, str(tmp_path))


@pytest.mark.parametrize(("wanted", "lines"), [(None, 2), (True, 2), (False, 0)])
def test_003_103_a_line_for_each_tensor_unless_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: bool | None, lines: int
) -> None:
    caplog.set_level(logging.INFO)
    files = [
        write_elements(tmp_path / side, {"Torch.f.0": {("input", 0): floats(1, 2), ("output", 0): floats(1, 2)}})
        for side in ("npu", "bench")
    ]
    command(tmp_path, *files, **({} if wanted is None else {"is_print_compare_log": wanted}))
    said = [record.getMessage() for record in caplog.records if "Compare result: cosine" in record.getMessage()]
    assert len(said) == lines
    assert all(line.startswith("[Torch.f.0.forward.") for line in said)
