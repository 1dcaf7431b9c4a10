"""Our free_benchmark.csv against that of the real mindstudio-probe 8.2.1, our api_precision_compare against that of 1.0.3."""

from __future__ import annotations

import csv
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from interop.peers import OLDER, ROOT, python
from ulpscope.compat.msprobe import command
from ulpscope.compat.msprobe.precheck_files import DETAIL_COLUMNS

pytestmark = [pytest.mark.interop, pytest.mark.slow]

PEER = OLDER[0]
HERE = Path(__file__).resolve().parent
TYPES = {"linear": "(16, 32)", "gelu": "(16, 32)", "layer_norm": "(16, 32)", "matmul": "(16, 8)"}


def rows(interpreter: Path | str, folder: Path, mode: str, paths: str) -> dict[str, dict[str, str]]:
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    done = subprocess.run(
        [str(interpreter), str(HERE / "run_free_benchmark.py"), mode, port],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = list(folder.rglob("free_benchmark.csv"))
    if not found:
        return {}
    with found[0].open(newline="") as file:
        return {row["api_name"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("mode", ["improve_precision", "bit_noise", "change_value", "no_change"])
def test_the_same_calls_are_accused_with_the_same_ratios(tmp_path: Path, mode: str) -> None:
    """`add_noise` is left out: 8.2.1 adds 1e-6 to a float16, which changes none of these numbers; ours moves the last place."""
    theirs = rows(python(PEER), tmp_path / "theirs", mode, "")
    ours = rows(sys.executable, tmp_path / "ours", mode, os.pathsep.join([str(ROOT / "dropin"), str(ROOT / "src")]))
    assert ours.keys() == theirs.keys()
    assert mode in ("improve_precision", "no_change") or len(ours) >= 5
    for name, their in theirs.items():
        our = ours[name]
        assert our.keys() == their.keys()
        for column in ("rank", "pert_mode", "stage", "step", "output_index"):
            assert our[column] == their[column], (name, column)
        try:
            # Theirs is computed in the dtype of the result, with three digits of a float16.
            assert float(our["max_rel"]) == pytest.approx(float(their["max_rel"]), rel=4e-3)
        except ValueError:
            assert our["max_rel"] == their["max_rel"]
        # dtype and shape are the input's in the manual and here, the output's there.
        api = name.split(".")[1]
        if api in TYPES:
            assert (our["dtype"], our["shape"]) == ("torch.float16", TYPES[api])


def details(path: Path, seed: int) -> None:
    """Numbers for every standard: elementwise, matrix products, gradients."""
    draw = random.Random(seed)
    names = [
        "Functional.linear.0",
        "Functional.gelu.0",
        "Torch.matmul.0",
        "Functional.softmax.0",
        "Tensor.sqrt.0",
        "Torch.sin.0",
    ]
    lines = []
    for name in names:
        for phase in ("forward", "backward"):
            numbers = [f"{draw.random() * 10 ** -draw.randint(1, 6):.14f}" for _ in range(len(DETAIL_COLUMNS) - 6)]
            numbers[0] = "1.00000000000000"
            numbers[DETAIL_COLUMNS.index("inf/nan错误率") - 4] = (
                "0.00000000000000"  # here any is an error, there it has no cell
            )
            lines.append([f"{name}.{phase}.output.0", "torch.float64", "torch.float32", "(4, 4)", *numbers, "pass", ""])
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([DETAIL_COLUMNS, *lines])


def table(folder: Path, start: str) -> tuple[list[str], list[list[str]]]:
    (path,) = folder.glob(f"{start}_*.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        header, *found = csv.reader(file)
    return header, found


def test_two_devices_beside_each_other_have_the_cells_of_the_peer(tmp_path: Path) -> None:
    interpreter = python(OLDER[1])  # later ones divide by no less than a smallest error, which the manual does not know
    for number, name in enumerate(("npu", "gpu")):
        details(tmp_path / f"accuracy_checking_details_{name}.csv", number)
    files = [str(tmp_path / f"accuracy_checking_details_{name}.csv") for name in ("npu", "gpu")]
    for side in ("theirs", "ours"):
        (tmp_path / side).mkdir()
    arguments = ["-f", "pytorch", "api_precision_compare", "-npu", files[0], "-gpu", files[1], "-o"]
    msprobe = interpreter.with_name("msprobe")
    done = subprocess.run(
        [str(interpreter), str(msprobe), *arguments, str(tmp_path / "theirs")],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert command.main([*arguments, str(tmp_path / "ours")]) == 0
    header, theirs = table(tmp_path / "theirs", "api_precision_compare_details")
    our_header, ours = table(tmp_path / "ours", "api_precision_compare_details")
    assert our_header == header
    differing = [
        (row[0], title, their, our)
        for row, other in zip(theirs, ours, strict=True)
        for title, their, our in zip(header, row, other, strict=True)
        if title != "Message" and not same(their, our)
    ]
    assert differing == []


def same(theirs: str, ours: str) -> bool:
    try:
        return float(ours) == pytest.approx(float(theirs), rel=1e-9, abs=1e-13)
    except ValueError:
        return theirs.strip().lower() == ours.strip().lower()  # "Warning" there
