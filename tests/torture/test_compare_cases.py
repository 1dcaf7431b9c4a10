"""Comparing dumps that are broken, hostile or have nothing in common: unknown is never equal, nothing is executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import time
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import torch
from torch import nn

import ulpscope
from msprobe_files import call, floats, scalar, tensor, write_elements, write_json
from ulpscope.cli.main import main
from ulpscope.compare.mapping import read_mapping
from ulpscope.compat.msprobe.command import main as msprobe
from ulpscope.compat.msprobe.merge import load_merge_config
from ulpscope.model.errors import ConfigError, DumpError
from ulpscope.store.files.pt import read_pt
from ulpscope.store.formats.ptdbg_writer import write_ptdbg
from ulpscope.store.formats.xlsx_reader import read_sheet
from ulpscope.store.registry import open_dump

PROMISE = "unknown is never equal"
case = pytest.mark.case
NAME = "Functional.linear.0"


def compare(*words: Any) -> tuple[int, str]:
    """`ulpscope compare` with these words: its exit code and all it printed."""
    heard = io.StringIO()
    with redirect_stdout(heard), redirect_stderr(heard), pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, words)])
    return int(ended.value.code or 0), heard.getvalue()


def legacy(tmp_path: Path, npu: Path, bench: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """`msprobe compare` of two dump.json: its exit code and the rows of its workbook."""
    asked = tmp_path / "compare.json"
    asked.write_text(json.dumps({"npu_path": str(npu), "bench_path": str(bench), "is_print_compare_log": False}))
    output = tmp_path / "output"
    code = msprobe(["-f", "pytorch", "compare", "-i", str(asked), "-o", str(output), *words])
    books = sorted(output.glob("*.xlsx")) if output.is_dir() else []
    if not books:
        return code, []
    header, *rows = openpyxl.load_workbook(books[-1]).active.iter_rows(values_only=True)
    return code, [dict(zip(header, row, strict=True)) for row in rows]


def passed(rows: list[dict[str, Any]], name: str) -> list[Any]:
    """The rows about a value that say it is fine."""
    good = ("pass", "Yes")
    return [
        row
        for row in rows
        if name in str(row.get("NPU Name", ""))
        and (str(row.get("Result")) in good or str(row.get("Accuracy Reached or Not")) in good)
    ]


def elements(folder: Path, *, value: float = 1.0) -> Path:
    calls = {
        f"Functional.linear.{n}": {("input", 0): floats(1, 2, 3), ("output", 0): floats(value, n + 1, 4)}
        for n in range(3)
    }
    return write_elements(folder, calls)


def data_file(dump: Path, name: str) -> Path:
    return dump.parent / "dump_tensor_data" / f"{name}.pt"


@case("cmp_different")
def test_other_weights_are_found_and_tell_a_script(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 1.5)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        with torch.no_grad():
            model[0].weight.mul_(factor)
        with ulpscope.capture(tmp_path / name, model=model, level="mix", tensors=True):
            model(torch.ones(2, 4)).sum().backward()
    code, said = compare(tmp_path / "a", tmp_path / "b")
    assert code == 1 and "linear" in said


@case("cmp_stat_diff")
def test_one_statistic_ten_times_off_is_flagged(tmp_path: Path) -> None:
    good = {f"Functional.linear.{n}.forward": call([tensor()], [tensor(1.5)]) for n in range(5)}
    bad = {**good, "Functional.linear.2.forward": call([tensor()], [tensor(15.0)])}
    a, b = write_json(tmp_path / "a", good), write_json(tmp_path / "b", bad)
    code, said = compare(a, b)
    assert code == 1 and "Functional.linear.2.forward" in said
    _, rows = legacy(tmp_path, b, a)
    flagged = [row["NPU Name"] for row in rows if row.get("Result") not in ("", None, "pass", "Pass")]
    assert flagged == ["Functional.linear.2.forward.output.0"]


BROKEN: dict[str, Any] = {
    "cmp_truncated": lambda text: text[: len(text) // 2],
    "cmp_zero_byte": lambda text: "",
    "cmp_deep_json": lambda text: '{"task":"statistics","data":{"Functional.x.0.forward":' + "[" * 20_000 + "]" * 20_000 + "}}",
    "cmp_wrong_types": lambda text: text.replace("[2, 3]", '"many"', 1).replace("1.5", '["a"]', 1),
    "cmp_empty_dump": lambda text: '{"task": "statistics", "level": "L1", "data": {}}',
    "graph_trunc": lambda text: text[:-3],
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_dump_is_an_error_and_never_agreement(case: str, tmp_path: Path) -> None:
    good = write_json(tmp_path / "a", {f"{NAME}.forward": call([tensor()], [tensor()])})
    bad = write_json(tmp_path / "b", {})
    bad.write_text(BROKEN[case](good.read_text()))
    code, said = compare(good, bad)
    assert code not in (0, 2) and said.strip(), said
    assert "Traceback" not in said
    if case == "graph_trunc":
        with pytest.raises(SystemExit) as ended:
            main(["show", str(bad)])
        assert ended.value.code == 3


@case("cmp_nothing_matches")
def test_nothing_in_common_is_not_agreement(tmp_path: Path) -> None:
    a = write_json(tmp_path / "a", {"Functional.linear.0.forward": call([tensor()], [tensor()])})
    b = write_json(tmp_path / "b", {"Torch.sin.0.forward": call([tensor()], [tensor()])})
    code, _ = compare(a, b)
    assert code != 0
    _, rows = legacy(tmp_path, a, b)
    assert passed(rows, "") == []


@case("cmp_traversal")
@pytest.mark.parametrize("name", ["../../secret.pt", "/etc/passwd", "..", "a/../../secret.pt", "\\..\\secret.pt"])
def test_a_name_never_leads_out_of_the_dump(name: str, tmp_path: Path) -> None:
    secret = torch.full((3,), 12345.0)
    good, bad = elements(tmp_path / "a"), elements(tmp_path / "b")
    torch.save(secret, tmp_path / "secret.pt")
    text = bad.read_text()
    bad.write_text(text.replace(f"{NAME}.forward.output.0.pt", name))
    assert bad.read_text() != text
    code, said = compare(good, bad)
    assert code != 0
    assert "12345" not in said and "12344" not in said
    _, rows = legacy(tmp_path, bad, good)
    assert passed(rows, f"{NAME}.forward.output.0") == []
    assert not any("1234" in str(cell) for row in rows for cell in row.values())


class Opens:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def _linked(path: Path) -> None:
    outside = path.parents[2] / "outside.pt"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


def _other(value: Any) -> Any:
    return lambda path: torch.save(value, path)


DATA: dict[str, list[Any]] = {
    "cmp_symlink_data": [_linked],
    "cmp_evil_pt": [
        lambda path: path.write_bytes(pickle.dumps(Opens())),
        lambda path: torch.save(Opens(), path),
        lambda path: torch.save({"x": Opens()}, path, _use_new_zipfile_serialization=False),
    ],
    "cmp_trunc_pt": [lambda path: path.write_bytes(path.read_bytes()[:-100]), lambda path: path.write_bytes(b"")],
    "cmp_other_pt": [
        _other("a text"), _other(torch.ones(7)), _other(torch.ones(3, dtype=torch.int64)),
        _other(torch.eye(3).to_sparse()), _other([torch.ones(3)]), _other(None),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("case", "number"), [(name, n) for name, ways in DATA.items() for n in range(len(ways))])
def test_a_data_file_that_is_not_what_it_should_be_is_marked_and_the_others_are_compared(
    case: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = elements(tmp_path / "a"), elements(tmp_path / "b")
    DATA[case][number](data_file(bad, f"{NAME}.forward.output.0"))
    code, said = compare(good, bad)
    assert code != 0, said
    _, rows = legacy(tmp_path, bad, good)
    assert not (tmp_path / "executed").exists()
    assert len(rows) == 6
    assert passed(rows, f"{NAME}.forward.output.0") == []
    assert len(passed(rows, "Functional.linear.2.forward.output.0")) == 1


@case("cmp_missing_pt")
@pytest.mark.parametrize("kept", [0, 4])
@pytest.mark.parametrize("side", ["reference", "target"])
def test_a_partly_copied_dump_is_incomplete_and_the_files_are_counted(side: str, kept: int, tmp_path: Path) -> None:
    sides = {"reference": elements(tmp_path / "a"), "target": elements(tmp_path / "b")}
    files = sorted((sides[side].parent / "dump_tensor_data").iterdir())
    for path in files[kept:]:
        path.unlink()
    code, said = compare(*sides.values())
    assert code == 3 and f"files with elements are missing or cut: {len(files) - kept} of the {side}" in said, said
    assert compare(*sides.values(), "--no-elements")[0] == 0
    # A copy in another format says it, and is no more whole than the original.
    for form in ("native", "msprobe"):
        with redirect_stderr(io.StringIO()) as heard, pytest.raises(SystemExit) as ended:
            main(["convert", str(sides[side]), str(tmp_path / form), "--to", form])
        assert ended.value.code == 3 and f"{len(files) - kept} files with elements" in heard.getvalue()
    other = next(path for name, path in sides.items() if name != side)
    assert compare(tmp_path / "native", other)[0] == compare(tmp_path / "msprobe", other)[0] == 3
    # What is there says that they differ: that is an answer.
    text = sides[side].read_text().replace('"Max": 4.0', '"Max": 400.0')
    sides[side].write_text(text)
    assert compare(*sides.values())[0] == 1


@case("cmp_missing_native")
@pytest.mark.parametrize("name", ["payload.bin", "sketches.bin", "calls.bin"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_partly_copied_native_dump_is_incomplete(name: str, keep: float, tmp_path: Path) -> None:
    for side in "ab":
        with ulpscope.capture(tmp_path / side, tensors=name == "payload.bin"):
            for n in range(40):
                torch.full((64,), float(n)).add(1)
    path = tmp_path / "b" / "step0" / "rank0" / name
    assert compare(tmp_path / "a", tmp_path / "b")[0] == 0
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    code, said = compare(tmp_path / "a", tmp_path / "b")
    assert code == (4 if name == "calls.bin" and not keep else 3), said
    assert name in said and "cut" in said
    assert ("missing or cut: 1 of the target" in said) is (name == "payload.bin")


@case("blame_cut")
def test_a_partly_copied_dump_of_kernels_is_not_cleared_by_the_judge(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path / "a", level="kernel", tensors=True):
        for n in range(5):
            torch.full((8, 8), float(n)).mm(torch.ones(8, 8))
    path = tmp_path / "a" / "step0" / "rank0" / "payload.bin"
    for kept, code in ((1.0, 0), (0.5, 3), (0.0, 3)):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
        heard = io.StringIO()
        with redirect_stdout(heard), pytest.raises(SystemExit) as ended:
            main(["blame", str(tmp_path / "a")])
        assert ended.value.code == code, heard.getvalue()
        assert ("missing or cut" in heard.getvalue()) is (code == 3)
        assert ("nothing is wrong" in heard.getvalue()) is (code == 0)


@case("cmp_missing_npy")
def test_a_partly_copied_dump_of_the_older_tool_is_incomplete(tmp_path: Path) -> None:
    for side in "ab":
        write_ptdbg(open_dump(elements(tmp_path / f"{side}-msprobe")), tmp_path / side, mode="api_stack")
    assert compare(tmp_path / "a", tmp_path / "b")[0] == 0
    next((tmp_path / "b").rglob("*output*.npy")).unlink()
    code, said = compare(tmp_path / "a", tmp_path / "b")
    assert code == 3 and "files with elements are missing or cut: 1 of the target" in said, said


@case("cmp_bad_stacks")
@pytest.mark.parametrize("name", ["stack.json", "construct.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"0": 7}'])
def test_stacks_are_a_comfort_and_dumps_are_compared_without(
    name: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = elements(tmp_path / "a"), elements(tmp_path / "b", value=2.0)
    a.with_name(name).write_text(text)
    code, said = compare(a, b)
    assert code == 1 and "First divergence" in said, said
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    code, rows = legacy(tmp_path, a, b)
    assert code == 0 and len(rows) == 6


@case("cmp_jagged")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("level", ["module", "op", "mix"])
def test_ragged_tensors_are_compared_and_end_no_verb(layout: Any, level: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    data = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=layout)
    for side, scale in (("a", 1.0), ("b", 1.0), ("c", 3.0)):
        with ulpscope.capture(tmp_path / side, model=model, level=level):
            model(data * scale)
    assert compare(tmp_path / "a", tmp_path / "b")[0] == 0
    assert compare(tmp_path / "a", tmp_path / "c")[0] == 1
    for side in "ab":
        with redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as ended:
            main(["convert", str(tmp_path / side), str(tmp_path / f"{side}-msprobe")])
        assert ended.value.code == 0
    assert compare(tmp_path / "a-msprobe", tmp_path / "b-msprobe")[0] == 0


@case("cmp_task_mismatch")
def test_a_dump_of_another_task_is_compared_by_what_both_have_or_refused(tmp_path: Path) -> None:
    with_elements = elements(tmp_path / "a")
    md5 = {f"{NAME}.forward": call([tensor(md5="00000000")], [tensor(md5="11111111")])}
    sums = write_json(tmp_path / "b", md5)
    code, said = compare(with_elements, sums)
    assert code != 0 and said.strip()


@case("cmp_bad_paths")
def test_what_is_no_dump_is_said(tmp_path: Path) -> None:
    good = elements(tmp_path / "a")
    (tmp_path / "junk" / "deep").mkdir(parents=True)
    (tmp_path / "junk" / "file.txt").write_text("x")
    for other in (tmp_path / "junk", tmp_path / "none", tmp_path / "junk" / "file.txt"):
        code, said = compare(good, other)
        assert code == 3 and str(tmp_path) in said
        assert legacy(tmp_path, good, other)[0] == 2


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
YAML: dict[str, str] = {
    "cmp_yaml_bomb": BOMB,
    "cmp_yaml_exec": "x: !!python/object/apply:os.mkdir [executed]\n",
    "hostile: yaml key": "? {a: 1}\n: b\n",
    "hostile: yaml merge": "a: &a {x: 1}\nb: {<<: [" + ", ".join(["*a"] * 100) + "]}\n",
    "hostile: yaml deep": "[" * 5000,
    "hostile: yaml date": "2001-99-99: 3\n",
    "hostile: yaml knot": "&a [*a]\n",
}


@pytest.mark.parametrize("case", YAML)
def test_a_hostile_yaml_is_one_small_error(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.yaml"
    path.write_text(YAML[case])
    began = time.monotonic()
    for read in (read_mapping, load_merge_config):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert len(str(caught.value)) < 20_000
    assert time.monotonic() - began < 10
    assert not (tmp_path / "executed").exists()


@case("cmp_out")
def test_a_place_for_the_result_works_or_is_refused_clearly(tmp_path: Path) -> None:
    a, b = elements(tmp_path / "a"), elements(tmp_path / "b")
    (tmp_path / "file").write_text("mine")
    assert compare(a, b, "-o", tmp_path / "my out", "--xlsx")[0] == 0
    assert list((tmp_path / "my out").glob("*.xlsx"))
    for place in (tmp_path / "file", Path("/proc/nope")):
        _, said = compare(a, b, "-o", place, "--xlsx")
        assert str(place) in said and "Traceback" not in said
        asked = tmp_path / "compare.json"
        asked.write_text(json.dumps({"npu_path": str(a), "bench_path": str(b)}))
        assert msprobe(["-f", "pytorch", "compare", "-i", str(asked), "-o", str(place)]) == 2
    assert (tmp_path / "file").read_text() == "mine"


@case("cmp_legal_odd_names")
def test_a_model_with_odd_names_is_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(0)
        model = nn.ModuleDict({"with space": nn.Linear(2, 2), "ünï✓": nn.Linear(2, 2), "=cmd|' /C calc'!A0": nn.ReLU()})
        with ulpscope.capture(tmp_path / name, model=model, level="mix", tensors=True):
            data = torch.ones(1, 2)
            for layer in model.values():
                data = layer(data)
            data.sum().backward()
    code, said = compare(tmp_path / "a", tmp_path / "b", "--csv", "--xlsx")
    assert code == 0, said


@case("cmp_large")
@pytest.mark.slow
def test_fifty_thousand_entries_are_compared_in_reasonable_time(tmp_path: Path) -> None:
    calls = {f"Functional.linear.{n}.forward": call([tensor(), tensor()], [tensor(1.5 + n)]) for n in range(50_000)}
    a, b = write_json(tmp_path / "a", calls), write_json(tmp_path / "b", calls)
    began = time.monotonic()
    assert compare(a, b)[0] == 0
    assert time.monotonic() - began < 120


@case("cmp_self_tensor")
@case("cmp_self_stat")
@pytest.mark.parametrize("tensors", [True, False], ids=["tensor", "statistics"])
def test_a_run_agrees_with_itself(tensors: bool, tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path / "a", tensors=tensors):
        odd = [
            torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]), torch.tensor(3.0), torch.empty(0, 3),
            torch.tensor([True, False]), torch.tensor([2**63 - 1, -(2**63)]), torch.tensor([1 + 2j, 3 - 4j]),
            torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float8_e4m3fn), torch.ones(3).half(),
        ]  # fmt: skip
        for item in odd:
            item.clone()
    code, said = compare(tmp_path / "a", tmp_path / "a", "-o", tmp_path / "out")
    assert code == 0, said
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "a"), str(tmp_path / "legacy"), "--to", "msprobe"])
    assert ended.value.code == 0
    dump = next((tmp_path / "legacy").rglob("dump.json"))
    _, rows = legacy(tmp_path, dump, dump)
    assert rows and [row for row in rows if row.get("Result") not in (None, "", "pass", "Pass")] == []


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name.replace("__", "/"), content)
    return path


@case("zip_slip")
@pytest.mark.parametrize("read", [read_pt, lambda path: list(read_sheet(path).rows)], ids=["pt", "xlsx"])
def test_a_zip_writes_nothing_anywhere(read: Any, tmp_path: Path) -> None:
    inner = tmp_path / "in" / "side"
    inner.mkdir(parents=True)
    path = zipped(inner / "x.zip", **{"..__..__up.txt": b"x", "__tmp__up.txt": b"x", "data.pkl": b"N."})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DumpError):
        read(path)
    assert sorted(tmp_path.rglob("*")) == before


@case("zip_bomb")
@pytest.mark.parametrize("read", [read_pt, lambda path: list(read_sheet(path).rows)], ids=["pt", "xlsx"])
def test_a_zip_bomb_is_refused_in_little_memory(read: Any, tmp_path: Path) -> None:
    path, block = tmp_path / "x.zip", bytes(1 << 24)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("archive/data.pkl", "xl/workbook.xml", "[Content_Types].xml", "archive/data/0"):
            with file.open(name, "w", force_zip64=True) as member:
                for _ in range(8):
                    member.write(block)
    with pytest.raises(DumpError):
        read(path)


@case("db_sql")
def test_names_that_are_commands_elsewhere_are_names(tmp_path: Path) -> None:
    names = ["x'; DROP TABLE calls; --", '"quoted"', "=1+1", "@SUM(A1)", "<script>alert(1)</script>", "a\tb"]
    calls = {f"Functional.{name}.0.forward": call([tensor(), scalar(name)], [tensor()]) for name in names}
    a, b = write_json(tmp_path / "a", calls), write_json(tmp_path / "b", calls)
    code, said = compare(a, b, "--csv", "-o", tmp_path / "out")
    assert code in (0, 3), said
    text = "".join(path.read_text() for path in (tmp_path / "out").glob("*.csv"))
    assert not any(line.startswith(("=", "@", "+", "-cmd")) for line in text.splitlines())
