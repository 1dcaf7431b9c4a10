"""Every reader and parser, fed with damage: one clear error or what the file then says; nothing executed, nothing large."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from builders import DumpBuilder
from cann_files import Stored, file_name, kernel_bytes
from msprobe_files import call, floats, scalar, tensor, write_elements, write_json
from ulpscope.compare.engine import compare_dumps
from ulpscope.compare.mapping import read_mapping
from ulpscope.compat.msprobe.config import load_config
from ulpscope.compat.msprobe.merge import load_merge_config
from ulpscope.model.errors import DumpError, UlpscopeError
from ulpscope.model.options import capture_config, read_config_file
from ulpscope.report.merge import read_results
from ulpscope.store import run_folder
from ulpscope.store.dump import Dump
from ulpscope.store.files.npy import read_npy
from ulpscope.store.files.pt import read_pt
from ulpscope.store.formats.cann import read_kernel
from ulpscope.store.formats.table_reader import read_table
from ulpscope.store.registry import open_dump, open_run
from ulpscope.store.ring import left_in

PROMISE = "nobody gets in"
BUDGET = int(os.environ.get("ULPSCOPE_FUZZ", "60"))
fuzzed = settings(
    max_examples=BUDGET,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def read_all(dump: Dump) -> None:
    """Everything a reader can ask of a dump; a value that cannot be read may say so."""
    for record in dump.calls():
        dump.parent(record), dump.name_of(record)
        with contextlib.suppress(UlpscopeError):
            dump.stack(record)
        for value in record.values:
            with contextlib.suppress(UlpscopeError):
                dump.load(value)
            dump.sketch(value), dump.sample(value)
    _ = dump.ending, dump.modules(), len(dump), repr(dump)
    for _ in compare_dumps(dump, dump):
        pass


def read_run(path: Path) -> None:
    for dump in open_run(path):
        read_all(dump)


# --- a good file of every format, and who reads it ---------------------------------------------------------------


def native(folder: Path) -> list[Path]:
    builder = DumpBuilder(folder)
    for index in range(4):
        stack = builder.text({"frames": [["a.py", 3, "f", "x", False]], "parent": None})
        values = {("input", 0): floats(1, 2, index), ("input", "eps"): 1e-5, ("output", 0): floats(3, 4)}
        builder.call("Functional", "linear", index, values=values, stack=stack)
    rank = builder.close()
    return [path for path in sorted(rank.iterdir()) if path.is_file() and path.stat().st_size]


def killed(folder: Path) -> list[Path]:
    """The same, as a kill leaves it: rows in the rings only."""
    builder = DumpBuilder(folder)
    left = folder.with_name(f"{folder.name}-left")
    with builder.standing_still():
        for index in range(4):
            builder.call("Functional", "linear", index, values={("input", 0): floats(1, 2, index)})
        shutil.copytree(folder, left)
    builder.close()
    shutil.rmtree(folder)
    left.rename(folder)
    rings = [*folder.rglob(run_folder.JOURNAL), *folder.rglob(run_folder.PAYLOAD_JOURNAL)]
    for ring in rings:  # the counts are at the beginning, the frames behind the first page
        os.truncate(ring, min(ring.stat().st_size, 4096 + (1 << 16)))
    return rings


def msprobe(folder: Path) -> list[Path]:
    values = {("input", 0): floats(1, 2), ("input", "k"): 3, ("output", 0): floats(3, 4)}
    dump = write_elements(folder / "step0" / "rank0", {f"Functional.add.{n}": values for n in range(2)})
    return [dump, *sorted(dump.parent.rglob("*.pt"))[:2], *dump.parent.glob("stack.json")]


def statistics(folder: Path) -> list[Path]:
    calls = {f"Functional.add.{n}.forward": call([tensor(), scalar(2)], [tensor(md5="1234abcd")]) for n in range(3)}
    return [write_json(folder / "step0" / "rank0", calls, stacks={"Functional.add.0.forward": ["File x, line 3"]})]


def ptdbg(folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    rows = [
        [f"Functional_conv2d_{n}_forward_{slot}", 0, [], "torch.float32", [2, 2], [4.1, -3.0, 0.5, 2.0]]
        for n in range(3)
        for slot in ("input.0", "output")
    ]
    rows.append(["Functional_conv2d_0_forward_stack_info", [["/x.py", "58", "f", "y = f()"]]])
    (folder / "dump.pkl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [folder / "dump.pkl"]


def hooks(folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    row = ["0_Functional_linear_forward_input.0", [0.5, 0.25, 0.5, 0.25, 0.375], "torch.float32", [2]]
    (folder / "x.pkl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    return [folder / "x.pkl"]


def one_file(name: str, write: Callable[[Path], Any]) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        folder.mkdir(parents=True)
        write(folder / name)
        return [folder / name]

    return make


def workbook(path: Path) -> None:
    book = openpyxl.Workbook()
    for row in (["NPU Name", "Cosine"], ["Functional.add.0.forward.input.0", 0.5], ["x", True]):
        book.active.append(row)
    book.save(path)


def results(folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"compare_result_rank{rank}_20250101000000.xlsx" for rank in range(2)]
    for path in paths:
        book = openpyxl.Workbook()
        for row in (
            ["NPU Name", "Bench Name", "Max diff", "L2norm diff"],
            ["Functional.add.0.forward.input.0", "x", 1, 2],
        ):
            book.active.append(row)
        book.save(path)
    return paths


def table(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["NPU Name", "Cosine"], ["Functional.add.0.forward.input.0", 0.5]])


def config(path: Path) -> None:
    path.write_text(json.dumps({"task": "tensor", "dump_path": "x", "level": "L1", "step": [1, "2-4"], "tensor": {}}))


PAIR = "Functional.add.0.forward.input.0: Functional.mul.0.forward.input.0\n"
MERGE = "api:\n  - Distributed.all_reduce\ncompare_index:\n  - Max diff\n"
Format = tuple[Callable[[Path], list[Path]], Callable[[Path], Any]]
FORMATS: dict[str, Format] = {
    "native": (native, lambda path: read_run(path.parents[2])),
    "rings of a killed run": (killed, lambda path: read_run(path.parents[2])),
    "msprobe": (msprobe, lambda path: read_run(path.parents[2] if path.suffix == ".json" else path.parents[3])),
    "msprobe statistics": (statistics, lambda path: read_run(path.parents[2])),
    "ptdbg": (ptdbg, read_run),
    "torch_npu.hooks": (hooks, read_run),
    "pt": (one_file("x.pt", lambda path: torch.save(torch.arange(6.0).reshape(2, 3), path)), read_pt),
    "pt of old": (
        one_file("x.pt", lambda path: torch.save(torch.ones(3), path, _use_new_zipfile_serialization=False)),
        read_pt,
    ),
    "npy": (one_file("x.npy", lambda path: np.save(path, np.arange(6.0))), read_npy),
    "CANN": (
        one_file(file_name(), lambda path: path.write_bytes(kernel_bytes([Stored(np.ones((2, 3), np.float32))], []))),
        lambda path: [each for each in read_kernel(path).inputs],
    ),
    "xlsx": (one_file("x.xlsx", workbook), lambda path: list(read_table(path)[1])),
    "csv": (one_file("x.csv", table), lambda path: list(read_table(path)[1])),
    "results to merge": (results, lambda path: read_results(path.parent, ["Functional.add"])),
    "mapping": (one_file("x.yaml", lambda path: path.write_text(PAIR)), read_mapping),
    "merge configuration": (one_file("x.yaml", lambda path: path.write_text(MERGE)), load_merge_config),
    "msprobe configuration": (one_file("config.json", config), load_config),
    "options as json": (
        one_file("x.json", lambda path: path.write_text('{"level": "mix", "steps": "0,3:5"}')),
        lambda path: capture_config(read_config_file(path)),
    ),
    "options as toml": (
        one_file("x.toml", lambda path: path.write_text('level = "mix"\nsteps = [1, 2]\n')),
        lambda path: capture_config(read_config_file(path)),
    ),
    "ring": (lambda folder: killed(folder)[:1], left_in),
}  # fmt: skip

REFUSED = {"hostile: pt of old"}
HUGE = [b"9" * 400, b"-1", b"1e999", b"NaN", b"Infinity", b"[" * 2000, b"{" * 2000, b"\xff\xfe", b"\x00" * 64, b"..", b"/",
        (2**63 - 1).to_bytes(8, "little"), (2**64 - 1).to_bytes(8, "little"), b"\xff" * 4, b'"a": 1, "a": 2', b"null"]  # fmt: skip
EDIT = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("put"), st.floats(0, 1), st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from(HUGE))),
    st.tuples(st.just("over"), st.floats(0, 1), st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from(HUGE))),
    st.tuples(st.just("drop"), st.floats(0, 1), st.binary(min_size=1, max_size=40)),
)


def damaged(content: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    for kind, place, piece in edits:
        at = int(place * len(content))
        if kind == "cut":
            content = content[:at]
        elif kind == "put":
            content = content[:at] + piece + content[at:]
        elif kind == "over":
            content = content[:at] + piece + content[at + len(piece) :]
        else:
            content = content[:at] + content[at + len(piece) :]
    return content


@pytest.mark.parametrize("case", [f"hostile: {name}" for name in FORMATS])
def test_a_damaged_file_is_one_clear_error_or_what_it_then_says(case: str, tmp_path: Path) -> None:
    make, read = FORMATS[case.removeprefix("hostile: ")]
    files = make(tmp_path / "good" / "run")
    whole = {path: path.read_bytes() for path in files}
    with contextlib.suppress(*([DumpError] if case in REFUSED else [])):
        read(files[0])

    @fuzzed
    @given(which=st.integers(0, len(files) - 1), edits=st.lists(EDIT, min_size=1, max_size=3))
    def check(which: int, edits: list[tuple[str, float, bytes]]) -> None:
        path = files[which]
        path.write_bytes(damaged(whole[path], edits))
        before = sorted(tmp_path.rglob("*"))
        try:
            read(path)
        except UlpscopeError as error:
            assert 0 < len(str(error)) < 20_000
        finally:
            path.write_bytes(whole[path])
        assert sorted(tmp_path.rglob("*")) == before

    check()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["torch.Tensor", "../x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "data_name", "value", "input", "output", "md5"]),
        inner,
        max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("case", ["hostile: any json as a dump", "hostile: any json as options"])
def test_any_json_is_refused_or_read(case: str, tmp_path: Path) -> None:
    @fuzzed
    @given(
        content=JSON, name=st.sampled_from(["Functional.add.0.forward", "Module.a.B.backward.0", "x", "", "..", "a.b"])
    )
    def check(content: Any, name: str) -> None:
        folder = tmp_path / "step0" / "rank0"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ("dump.json" if "dump" in case else "config.json")
        try:
            if "dump" in case:
                path.write_text(json.dumps({"task": "tensor", "dump_data_dir": "/", "data": {name: content}}))
                read_all(open_dump(path))
            else:
                path.write_text(json.dumps({"dump_path": "x", "step": content, "statistics": content, name: content}))
                load_config(path)
        except UlpscopeError as error:
            assert 0 < len(str(error)) < 200_000

    check()


ASTRONOMICAL: dict[str, Callable[[Path], Any]] = {
    "hostile: shape of a dump.json": lambda folder: read_all(
        open_dump(write_json(folder, {"Functional.add.0.forward": call([tensor(shape=[2**62, 2**62, -1])], [tensor(shape=[10**30])])}))
    ),
    "hostile: shape of an npy": lambda folder: read_npy(
        _put(folder / "x.npy", b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }" % 2**60)
    ),
    "hostile: lines of a pkl": lambda folder: read_run(
        _put(folder / "dump.pkl", b'["Functional_add_0_forward_output", 0, [], "torch.float32", [%d, %d], [1, 1, 1, 1]]\n' % (2**60, 2**60))
    ),
    "hostile: utf-16": lambda folder: read_all(open_dump(_put(folder / "dump.json", '{"data": {}}'.encode("utf-16")))),
    "hostile: latin-1": lambda folder: read_all(open_dump(_put(folder / "dump.json", b'{"data": {"\xe9": {}}}'))),
    "hostile: a long line": lambda folder: read_run(_put(folder / "dump.pkl", b'["' + b"x" * 20_000_000 + b'"]')),
}  # fmt: skip


def _put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("case", ASTRONOMICAL)
def test_a_small_file_never_takes_much_memory(case: str, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        ASTRONOMICAL[case](tmp_path / "run")
    except UlpscopeError as error:
        assert len(str(error)) < 20_000
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 120 << 20


@pytest.mark.case("hostile: links and pipes in a native dump")
@pytest.mark.parametrize("name", [*run_folder.TABLES, run_folder.PAYLOAD, run_folder.JOURNAL, run_folder.MANIFEST])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_plain_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    rank = native(tmp_path / "run")[0].parent
    secret = _put(tmp_path / "secret", (rank / name).read_bytes() if (rank / name).is_file() else b"secret")
    (rank / name).unlink(missing_ok=True)
    if kind == "link":
        (rank / name).symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(rank / name)
    else:
        (rank / name).mkdir()
    try:
        dump = open_dump(rank)
        values = [value for record in dump.calls() for value in record.values if value.payload is not None]
    except DumpError:
        return
    if name == run_folder.PAYLOAD:
        for value in values:
            with pytest.raises(DumpError):
                dump.load(value)
    else:
        assert name == run_folder.JOURNAL or dump.source.recovered == 0
