"""Our table over the dumps of msprobe 8.2.1 against the table that its own compare makes of them, cell by cell."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pytest

from interop.peers import OLDER, locked, python
from interop.table_exceptions import BEGIN, DOCS, END, EXCEPTIONS, document, exemptions, plain
from msprobe_files import call, floats, scalar, tensor, write_elements, write_json
from ulpscope.compat.msprobe.comparing import Wanted, compare_files

pytestmark = [pytest.mark.interop, pytest.mark.slow]

PEER = OLDER[0]
HERE = Path(__file__).resolve().parent
MODELS = ("kinds", "resnet", "lstm")
LEVELS = ("L1", "mix")
KINDS = {"statistics": ("statistics", "statistics"), "md5": ("statistics", "md5"), "tensor": ("tensor", "")}
CHANGES = ("noise", "fault")
NAN, INF = float("nan"), float("inf")
Table = list[dict[str, Any]]


class Pairs:
    """Dumps and comparisons of the peer, made when they are first asked for."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def model(self, model: str) -> Path:
        """The folder with every dump of a model and every comparison of two."""
        folder = self.base / model
        with locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                dumps = [
                    self._dump(folder, model, change, level, kind)
                    for change in ("none", *CHANGES)
                    for level in LEVELS
                    for kind in KINDS
                ]
                self.run(folder, dumps)
                self.run(
                    folder, [self._compare(folder, c, level, k) for c in CHANGES for level in LEVELS for k in KINDS]
                )
        return folder

    def run(self, folder: Path, jobs: list[dict[str, str]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "jobs.json").write_text(json.dumps(jobs))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        command = [str(python(PEER)), str(HERE / "run_pairs.py"), str(folder / "jobs.json")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    @staticmethod
    def _dump(folder: Path, model: str, change: str, level: str, kind: str) -> dict[str, str]:
        task, mode = KINDS[kind]
        out = str(folder / f"{change}-{level}-{kind}")
        return {"model": model, "level": level, "task": task, "summary_mode": mode, "change": change, "out": out}

    @staticmethod
    def _compare(folder: Path, change: str, level: str, kind: str) -> dict[str, str]:
        npu, bench = (next((folder / f"{each}-{level}-{kind}").rglob("dump.json")) for each in (change, "none"))
        return {"npu": str(npu), "bench": str(bench), "out": str(folder / f"{change}-{level}-{kind}.result")}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Pairs:
    python(PEER)  # skips where there is none
    base = tmp_path_factory.getbasetemp()
    return Pairs((base if worker_id == "master" else base.parent) / "pairs")


def read(folder: Path) -> Table:
    (path,) = folder.glob("compare_result_*.xlsx")
    header, *rows = openpyxl.load_workbook(path).active.iter_rows()
    names = [cell.value for cell in header]
    return [
        {name: cell.value for name, cell in zip(names, row, strict=True)}
        | {"fill": row[0].fill.fgColor.rgb if row[0].fill.patternType else None}
        for row in rows
    ]


def differing(ours: Table, peer: Table) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every cell that is not equal as (column, our row, the peer's row); rows of absent gradients are left out."""
    mine = {row["NPU Name"]: row for row in ours}
    theirs = {row["NPU Name"]: row for row in peer if row["NPU Dtype"] != "None" or row["NPU Name"] in mine}
    assert list(mine) == list(theirs)
    for name, row in theirs.items():
        assert list(mine[name]) == list(row)
        yield from ((column, mine[name], row) for column in row if not equal(column, mine[name][column], row[column]))


def equal(column: str, ours: object, peer: object) -> bool:
    left, right = number(ours), number(peer)
    if left is None or right is None:
        return plain(ours) == plain(peer)
    # These two are rounded to 12 decimals.
    slack = 2e-12 if column in ("MaxAbsErr", "MaxRelativeErr") else 0.0
    if left == right or INF in (abs(left), abs(right)):
        return left == right
    return abs(left - right) <= max(1e-6 * max(abs(left), abs(right)), slack)


def number(cell: object) -> float | None:
    try:
        found = float(str(cell).strip().removesuffix("%"))
    except ValueError:
        return None
    return None if found != found else found


def unexplained(ours: Table, peer: Table) -> list[str]:
    found = []
    for column, mine, theirs in differing(ours, peer):
        if not exemptions(column, mine, theirs):
            found.append(f"{mine['NPU Name']} {column}: {mine[column]!r:.200}, 8.2.1 has {theirs[column]!r:.200}")
    return found


def compared(npu: Path, bench: Path, output: Path) -> Table:
    compare_files(npu, bench, Wanted(output, highlight=True, advice=False))
    return read(output)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("model", MODELS)
def test_our_table_is_the_peers(pairs: Pairs, tmp_path: Path, model: str, change: str, level: str, kind: str) -> None:
    folder = pairs.model(model)
    npu, bench = (next((folder / f"{each}-{level}-{kind}").rglob("dump.json")) for each in (change, "none"))
    peer = read(folder / f"{change}-{level}-{kind}.result")
    ours = compared(npu, bench, tmp_path)
    problems = unexplained(ours, peer)
    assert peer
    assert not problems, "\n".join([f"{len(problems)} cells:", *problems[:40]])


# --- edges ------------------------------------------------------------------------------------------------------

FOURS: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    ((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0)),
    ((1.0, 2.0, 3.0, 4.0), (2.0, 2.0, 3.0, 4.0)),
    ((NAN,) * 4, (1.0, 0.0, 0.5, 2.0)),
    ((1.0, 0.0, 0.5, 2.0), (NAN,) * 4),
    ((INF, -INF, NAN, INF), (INF, -INF, NAN, INF)),
    ((INF, 0.0, INF, INF), (1.0, 0.0, 0.5, 2.0)),
    ((1.0, 0.0, 0.5, 2.0), (INF, -INF, INF, INF)),
    ((None,) * 4, (1.0, 0.0, 0.5, 2.0)),
    ((1.0, 0.0, 0.5, 2.0), (None,) * 4),
    ((1.0, 0.0, 0.0, 2.0), (0.0,) * 4),
    ((0.0,) * 4, (0.0,) * 4),
    ((-1.0, -3.0, -2.0, 2.0), (-2.0, -1.0, -1.0, 2.0)),
    ((1e11, 0.0, 1.0, 1e11), (1.0, 0.0, 1.0, 1.0)),
    ((1.6, 0.0, 1.0, 2.0), (1.0, 0.0, 1.0, 2.0)),
    ((0.0065, 0.0, 1.0, 1.0), (0.001, 0.0, 1.0, 1.0)),
    ((True, False, None, None), (True, True, None, None)),
]
ARGUMENTS = [
    *map(scalar, (3, 2.5, True, "abc")),
    *({"type": "slice", "value": value} for value in ([None, None, 2], [0, 3, None])),
    {"type": "torch.dtype", "value": "torch.float32"},
    {"type": "torch.memory_format", "format": "contiguous_format"},
    {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "a"},
    *([], {}, None, [scalar(1), [scalar(2)]]),
]


def statistics_edges(folder: Path, side: int) -> Path:
    calls = {"Torch.kinds.0.forward": call(ARGUMENTS, [tensor(), None], {"k": tensor(), "d": {"a": scalar(side)}})}
    for place, fours in enumerate(FOURS):
        calls[f"Functional.both.{place}.forward"] = call([tensor(*fours[side])], [tensor(*fours[side])])
        calls[f"Functional.after.{place}.forward"] = call([tensor()], [tensor(*fours[side])])
    calls[f"Functional.only{side}.0.forward"] = call([tensor(), scalar(3)], [tensor()])
    calls["Functional.shape.0.forward"] = call([tensor()], [tensor(shape=[2 + side])])
    calls["Functional.count.0.forward"] = call([tensor()] * (2 - side), [tensor()])
    calls["Functional.grad.0.forward"] = call([tensor(requires_grad=bool(side))], [tensor()])
    dtypes = [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float32"), ("int64", "int32")]
    for place, pair in enumerate(dtypes):
        calls[f"Functional.dtype.{place}.forward"] = call([], [tensor(dtype=f"torch.{pair[side]}")])
    calls["Functional.grows.0.forward"] = call([tensor((103.0, 100.0)[side])], [tensor((130.0, 100.0)[side])])
    calls["Functional.zero_d.0.forward"] = call([], [tensor(*[-1.5 + side] * 4, shape=[])])
    calls["Functional.both.0.backward"] = {"input": [tensor()], "output": [tensor(), None]}
    calls["Module.fc.Linear.forward.0"] = call([tensor()], [tensor()], parameters={"weight": tensor((3.0, 1.0)[side])})
    calls["Module.fc.Linear.parameters_grad"] = {"weight": [tensor((3.0, 1.0)[side])], "bias": [None]}
    return write_json(folder, calls, stacks={"Functional.both.1.forward": ["File a.py, line 1, in f, \n x = 'y'"]})


def checksum_edges(folder: Path, side: int) -> Path:
    one = tensor(md5=("0000000a", "0000000b")[side])
    calls = {
        "Torch.kinds.0.forward": call([*ARGUMENTS, scalar(side)], [one, None]),
        "Functional.a.0.forward": call([one, tensor(md5="0000000c"), tensor()], [one]),
        f"Functional.only{side}.0.forward": call([one], [one]),
        "Functional.shape.0.forward": call([tensor(shape=[2 + side], md5="0000000c")], [one]),
    }
    return write_json(folder, calls)


TEN = np.arange(1, 11, dtype=np.float32)
ELEMENTS: dict[str, tuple[Any, Any]] = {
    "equal": (TEN, TEN),
    "zeros": (floats(0, 0), floats(0, 0)),
    "npu_zero": (floats(0, 0), floats(1, 2)),
    "bench_zero": (floats(1, 2), floats(0, 0)),
    "small_zero": (floats(0.5, 0.5), floats(0, 0)),
    "one_zero": (floats(5, 1, 2), floats(0, 1, 2)),
    "nan_both": (floats(NAN, 2, 3), floats(NAN, 2, 3.1)),
    "nan_apart": (floats(NAN, 2, 3), floats(1, NAN, 3)),
    "nan_npu": (floats(NAN, 2, 3), floats(1, 2, 3)),
    "inf_signs": (floats(INF, 2, 3), floats(-INF, 2, 3)),
    "inf_both": (floats(INF, 2, 3), floats(INF, 2, 3)),
    "nan_inf": (floats(NAN, 2), floats(INF, 2)),
    "zero_d": (np.array(1.5, np.float32), np.array(1.25, np.float32)),
    "zero_d_nan": (np.array(NAN, np.float32), np.array(1, np.float32)),
    "zero_d_int": (np.array(3), np.array(5)),
    "one_element": (floats(1.5), floats(1.25)),
    "truths": (np.array([True, True, False, True]), np.array([True] * 4)),
    "big_int": (np.array([2**53 + 1, 5]), np.array([2**53, 5])),
    "int": (np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)),
    "half": (np.array([60000, 1, 2], np.float16), np.array([65504, 1, 2], np.float16)),
    "half_float": (np.array([1, 2], np.float16), floats(1, 2)),
    "float_int": (floats(1, 2, 3), np.array([1, 2, 3])),
    "shape": (np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)),
    "double": (np.array([1.0, 2, 3]), np.array([1.0, 2, 3]) + 5e-13),
    "large": (floats(1000, 2000), floats(1002, 2000)),
    "huge": (floats(1e11, 1), floats(0.5, 1)),
    "turned": (floats(1, 1), floats(1, -1)),
    "half_off": (TEN * np.repeat(floats(1.01, 1), 5), TEN),
    "fifth_off": (TEN * np.repeat(floats(1.01, 1, 1, 1, 1), 2), TEN),
    "negated": (-TEN, TEN),
    "larger": (TEN * np.float32(1.2), TEN),
    "shifted": (TEN + 30, TEN),
    "scalar": (3, 3),
}


def element_edges(folder: Path, side: int) -> Path:
    calls = {f"Functional.{name}.0": {("input", 0): TEN, ("output", 0): pair[side]} for name, pair in ELEMENTS.items()}
    calls["Functional.grows.0"] = {("input", 0): TEN + 2 * (1 - side), ("output", 0): TEN + 30 * (1 - side)}
    calls[f"Functional.only{side}.0"] = {("input", 0): 3, ("output", 0): TEN}
    calls["Torch.mul.0"] = {("input", "other"): TEN + side, ("output", 0): TEN}
    file = write_elements(folder, calls)
    if side == 0:
        (folder / "dump_tensor_data" / "Functional.equal.0.forward.output.0.pt").unlink()
    return file


EDGES = {"statistics": statistics_edges, "md5": checksum_edges, "tensor": element_edges}


def edges(pairs: Pairs, folder: Path, kind: str) -> tuple[Table, Table]:
    npu, bench = (EDGES[kind](folder / name, side) for side, name in enumerate(("npu", "bench")))
    pairs.run(folder / "peer", [{"npu": str(npu), "bench": str(bench), "out": str(folder / "result")}])
    return compared(npu, bench, folder / "ours"), read(folder / "result")


@pytest.mark.parametrize("kind", EDGES)
def test_our_table_of_edge_cases_is_the_peers(pairs: Pairs, tmp_path: Path, kind: str) -> None:
    problems = unexplained(*edges(pairs, tmp_path, kind))
    assert not problems, "\n".join([f"{len(problems)} cells:", *problems[:40]])


def test_every_exception_is_needed(pairs: Pairs, tmp_path: Path) -> None:
    used: Counter[str] = Counter()
    for kind in EDGES:
        for cell in differing(*edges(pairs, tmp_path / kind, kind)):
            used.update([each.name for each in exemptions(*cell)])
    assert {each.name for each in EXCEPTIONS} - set(used) <= {"complex numbers", "NoneType"}


def test_the_manual_shows_the_exceptions() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == document()
