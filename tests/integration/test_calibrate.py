"""`ulpscope calibrate`: a table of this machine's kernels, which `blame` reads, and no word about right ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ulpscope.analyze.measured import read_table


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ulpscope", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_a_device_is_measured_into_a_small_table(tmp_path: Path) -> None:
    own = tmp_path / "own.tsv"
    done = run("calibrate", "--seconds", "0", ULPSCOPE_KERNELS=str(own))
    assert done.returncode in (0, 1), done.stderr
    assert f"on cpu: {own}" in done.stdout
    table = read_table(own)
    assert {("addmm", "float32", "cpu", 0), ("gelu", "bfloat16", "cpu", 0)} <= table.keys()
    assert own.stat().st_size < 100_000
    # What blame reads beside its own table: a file that is none is an error, not ignored.
    own.write_text("no table\n")
    broken = run("blame", "--", sys.executable, "-c", "import torch; torch.ones(2).exp()", ULPSCOPE_KERNELS=str(own))
    assert broken.returncode == 3
    assert "no line of a table of kernels" in broken.stderr


def test_a_device_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    done = run("calibrate", "--device", "cuda:7", "-o", str(tmp_path / "own.tsv"))
    assert (done.returncode, "there is no device 'cuda:7' here" in done.stderr) == (2, True)
    assert not (tmp_path / "own.tsv").exists()
