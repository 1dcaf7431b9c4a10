"""The smaller readers, fed with damage: ledgers, tracks, rows of a noise check, compare.json, tables of the pre-check."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cann_files import Stored, file_name, kernel_bytes
from msprobe_files import call, scalar, tensor, write_json
from torture.test_hostile_input import EDIT, JSON, damaged, fuzzed, one_file
from ulpscope.analyze.ledger import judge
from ulpscope.capture.folder import claim
from ulpscope.cli.main import main as ulpscope_main
from ulpscope.compat.msprobe.command import main as msprobe_main
from ulpscope.compat.msprobe.comparing import read_input
from ulpscope.compat.msprobe.precheck_files import DETAIL_COLUMNS, compare_details
from ulpscope.compat.ptdbg_ascend.dumping import acl_root
from ulpscope.model.errors import UlpscopeError
from ulpscope.store.ledger_file import find_ledgers, read_ledger
from ulpscope.store.loss_curve import read_tracks, track_path
from ulpscope.store.noise import OWN_FILE, read_rows
from ulpscope.store.tensor_file import read_tensor
from ulpscope.store.tensor_folder import read_folder

PROMISE = "nobody gets in"

MEASURE = {
    "place": 0,
    "dtype": "float32",
    "shape": [2, 3],
    "terms": 3,
    "rms": 0.4,
    "worst": 1.5,
    "total": 2.0,
    "size": 1.0,
}
LEAF = {"place": "0", "dtype": "float32", "shape": [2], "crc": 7, "norm": 1.0, "sketch": [0.5, 0.25], "name": "w"}
ROW = {"step": 0, "rank": 0, "phase": "forward", "op": "aten.mm.default", "dtypes": "float32", "index": 0, "kind": "sum",
       "api": "Torch.mm.0.forward", "source": ["a.py", 3, "f"], "measures": [MEASURE], "leaves": [LEAF], "scalars": {"x": 1}}  # fmt: skip
EXCHANGE = {"how": "sum", "group": [0, 1], "number": 0, "given": [1.0], "got": [2.0], "norm": 1.0}
NOISE = {"rank": 0, "pert_mode": "add_noise", "stage": "forward", "step": 0, "api_name": "x", "max_rel": 0.5, "dtype": "torch.float32",
         "shape": "2", "output_index": 0, "inconsistent": False, "excess": 0.5, "reason": "", "source": None}  # fmt: skip


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def ledger(path: Path) -> None:
    rows = [{**ROW, "seq": n, "exchange": EXCHANGE if n == 2 else None} for n in range(3)]
    path.write_text(lines({"format": 1, "command": ["x"]}, *rows))


def read_and_judge(path: Path) -> None:
    for found in find_ledgers(path.parent):
        rows = read_ledger(found)[1]
        judge(rows)
        judge(rows, rows)


def details(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        cells = ["Functional.add.0.forward.output.0", "torch.float32", "torch.float32", "(2,)"]
        csv.writer(file).writerows([DETAIL_COLUMNS, [*cells, *["0.1"] * (len(DETAIL_COLUMNS) - 4)]])


def compared(path: Path) -> None:
    out = path.parent / "out"
    out.mkdir(exist_ok=True)
    try:
        compare_details(path, path, out, "20250101000000")
    finally:
        for made in out.iterdir():
            made.unlink()
        out.rmdir()


def compare_json(path: Path) -> None:
    path.write_text(
        json.dumps({"npu_path": "a.json", "bench_path": "b.json", "stack_path": "s.json", "is_print_compare_log": True})
    )


def asks_to_compare(path: Path) -> None:
    from ulpscope.compat.msprobe.command import _read_json

    read_input(_read_json(path))


def kernel(path: Path) -> None:
    path.write_bytes(kernel_bytes([Stored(np.ones((2, 3), np.float32))], []))


def tensors(folder: Path) -> None:
    found = read_folder(folder)
    for each in found.tensors.values():
        with contextlib.suppress(UlpscopeError):
            each.read().values()


def manifest(path: Path) -> None:
    rank = path.parent / "step0" / "rank0"
    rank.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": 1, "run": "x"}))


def claimed(path: Path) -> None:
    rank = path.parent / "step0" / "rank0"
    (rank / "manifest.json").write_bytes(path.read_bytes())
    claim(path.parent, 0, "x", overwrite=False)


READERS: dict[str, tuple[Callable[[Path], list[Path]], Callable[[Path], Any]]] = {
    "ledger": (one_file("ledger.rank0.jsonl", ledger), read_and_judge),
    "tracks": (
        one_file(track_path(Path(), 0, 0).name, lambda path: path.write_text(lines({"step": 0, "loss": 1.5, "output": [1.0]}))),
        lambda path: read_tracks(path.parent),
    ),
    "noise": (one_file(OWN_FILE, lambda path: path.write_text(lines(NOISE, NOISE))), lambda path: read_rows(path.parent)),
    "details of a pre-check": (one_file("x_details.csv", details), compared),
    "compare.json": (one_file("compare.json", compare_json), asks_to_compare),
    "acl.json": (
        one_file("acl.json", lambda path: path.write_text('{"dump": {"dump_path": "/x", "dump_list": []}}')),
        lambda path: acl_root(str(path)),
    ),
    "a tensor of any kind": (one_file("x.npy", lambda path: np.save(path, np.ones(4))), lambda path: read_tensor(str(path)).values()),
    "a folder of tensors": (one_file(file_name(), kernel), lambda path: tensors(path.parent)),
    "manifest of an earlier run": (one_file("x.json", manifest), claimed),
}  # fmt: skip


@pytest.mark.parametrize("case", [f"hostile: {name}" for name in READERS])
def test_a_damaged_file_is_one_clear_error_or_what_it_then_says(case: str, tmp_path: Path) -> None:
    make, read = READERS[case.removeprefix("hostile: ")]
    (path,) = make(tmp_path / "good" / "run")
    whole = path.read_bytes()
    read(path)

    @fuzzed
    @given(edits=st.lists(EDIT, min_size=1, max_size=3))
    def check(edits: list[tuple[str, float, bytes]]) -> None:
        path.write_bytes(damaged(whole, edits))
        before = sorted(tmp_path.rglob("*"))
        try:
            read(path)
        except UlpscopeError as error:
            assert 0 < len(str(error)) < 20_000
        assert sorted(tmp_path.rglob("*")) == before

    check()


RECORDS: dict[str, tuple[dict[str, Any], str, Callable[[Path], Any]]] = {
    "ledger": ({**ROW, "seq": 0, "exchange": EXCHANGE}, "ledger.rank0.jsonl", read_and_judge),
    "tracks": ({"step": 0, "loss": 1.5, "output": [1.0]}, "track.0.rank0.jsonl", lambda path: read_tracks(path.parent)),
    "noise": (NOISE, OWN_FILE, lambda path: read_rows(path.parent)),
}


@pytest.mark.parametrize("case", [f"hostile: any value in {name}" for name in RECORDS])
def test_a_field_of_another_kind_is_refused(case: str, tmp_path: Path) -> None:
    record, name, read = RECORDS[case.removeprefix("hostile: any value in ")]
    path = tmp_path / name
    header = [{"format": 1}] if "ledger" in case else []

    @fuzzed
    @given(key=st.sampled_from([*record, "more"]), inner=st.sampled_from([*MEASURE, *LEAF]), value=JSON)
    def check(key: str, inner: str, value: Any) -> None:
        for row in (
            {**record, key: value},
            {**record, "measures": [{**MEASURE, inner: value}]},
            {**record, "leaves": [{**LEAF, inner: value}]},
            {each: item for each, item in record.items() if each != key},
            value,
        ):
            path.write_text(lines(*header, row))
            with contextlib.suppress(UlpscopeError):
                read(path)

    check()


NAMES = [
    "ledger.rank.jsonl",
    "ledger.rankx.jsonl",
    "ledger.rank²0.jsonl",
    "track.x.ranky.jsonl",
    "track.0.rank1.2.jsonl",
    "track..rank.jsonl",
]


@pytest.mark.case("hostile: names of ledgers and tracks")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_name_is_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    assert find_ledgers(tmp_path) == []
    with pytest.raises(UlpscopeError, match="holds no tracks"):
        read_tracks(tmp_path)


@pytest.mark.case("hostile: a ledger cut short")
def test_a_ledger_ends_where_it_was_cut_and_says_what_else_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "ledger.rank0.jsonl"
    ledger(path)
    whole = path.read_text()
    path.write_text(whole[:-10])
    assert len(read_ledger(path)[1]) == 2
    path.write_text(whole.replace('"phase"', '"phrase"', 1))
    with pytest.raises(UlpscopeError, match="line 2 is no row of a ledger"):
        read_ledger(path)


TABLES: dict[str, Callable[[Path], bytes]] = {
    "compare.json: names of a device": lambda folder: json.dumps(
        {"npu_path": "/dev/zero", "bench_path": "/dev/zero"}
    ).encode(),
    "compare.json: a name with a nul": lambda folder: json.dumps({"npu_path": "a\0b", "bench_path": "a\0b"}).encode(),
    "compare.json: a surrogate": lambda folder: b'{"npu_path": "\\ud800", "bench_path": "\\ud800"}',
    "compare.json: a long name": lambda folder: json.dumps({"npu_path": "x" * 9000, "bench_path": "y" * 9000}).encode(),
    "compare.json: NaN": lambda folder: b'{"npu_path": NaN, "bench_path": Infinity}',
    "compare.json: latin-1": lambda folder: b'{"npu_path": "\xe9", "bench_path": "x"}',
    "compare.json: deep": lambda folder: b'{"npu_path": ' + b"[" * 100_000,
    "compare.json: folders that link to themselves": lambda folder: looped(folder),
}


def looped(folder: Path) -> bytes:
    (folder / "loop").symlink_to(folder / "loop")
    return json.dumps({"npu_path": str(folder / "loop"), "bench_path": str(folder / "loop")}).encode()


@pytest.mark.parametrize("case", [f"hostile: {name}" for name in TABLES])
def test_compare_ends_with_a_word_and_writes_nothing_elsewhere(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "compare.json"
    path.write_bytes(TABLES[case.removeprefix("hostile: ")](tmp_path))
    tracemalloc.start()
    try:
        code = msprobe_main(["-f", "pytorch", "compare", "-i", str(path), "-o", str(tmp_path / "out")])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert code != 0 and peak < 64 << 20
    assert [entry for entry in caplog.records if entry.levelname == "ERROR" and entry.exc_info is None]
    assert {each.name for each in tmp_path.iterdir()} <= {"compare.json", "out", "loop"}
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.case("hostile: results that cannot be written")
@pytest.mark.parametrize("table", [[], ["--csv"], ["--xlsx"]], ids=["json", "csv", "xlsx"])
@pytest.mark.parametrize("trouble", ["a link", "a file", "no such device", "a full disk"])
def test_results_of_compare_never_go_through_what_lies_there(
    trouble: str, table: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is named on one line, and what was there stays."""
    dump = write_json(
        tmp_path / "step0" / "rank0", {"Functional.add.0.forward": call([tensor(), scalar(2)], [tensor()])}
    )
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.write_text("mine")
    if trouble == "a link":
        out.mkdir()
        for name in ("result.json", "compare_step0_rank0.csv", "compare_step0_rank0.xlsx"):
            (out / name).symlink_to(precious)
    elif trouble == "a file":
        out.symlink_to(precious)
    elif trouble == "no such device":
        out = Path("/proc/ulpscope/out")
    else:
        out.mkdir()
        if os.getuid() != 0 or os.system(f"mount -t tmpfs -o size=4k,nr_inodes=3 tmpfs '{out}' 2>/dev/null") != 0:
            pytest.skip("needs to mount a file system")
        (out / "filler").write_bytes(bytes(4096))
    try:
        with pytest.raises(SystemExit) as ended:
            ulpscope_main(["compare", str(dump), str(dump), "-o", str(out), *table])
        left = sorted(each.name for each in out.iterdir()) if out.is_dir() else []
    finally:
        if trouble == "a full disk":
            os.system(f"umount '{out}'")
    said = capsys.readouterr().err
    assert "Traceback" not in said and precious.read_text() == "mine"
    if trouble != "a link":
        assert any(f"ulpscope: cannot {word} {out.parent}" in said for word in ("write", "use")), said
        assert ended.value.code != 0 or not table
    assert not [name for name in left if name.startswith(".")], left
