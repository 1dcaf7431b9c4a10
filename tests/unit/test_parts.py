"""A part that was not compiled is said, once a process, with what it costs; what was left out on purpose is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ulpscope

RECORDING = """
import torch, ulpscope
for number in range(2):
    with ulpscope.capture(f"run{number}", level="op", tensors=True, overwrite=True):
        torch.ones(300) + torch.rand(300)
"""
COMPARING = "import ulpscope; print(sum(1 for _ in ulpscope.compare('run0', 'run1')))"


def warnings(package: Path, folder: Path, program: str, **environment: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), **environment},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stderr.splitlines() if "not compiled" in line]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package as it is here, to take parts from."""
    shutil.copytree(Path(ulpscope.__file__).parent, tmp_path / "site" / "ulpscope")
    return tmp_path / "site"


def test_a_missing_part_is_said_once_by_what_needs_it(package: Path, tmp_path: Path) -> None:
    built = list(package.rglob("_*.so"))
    if built:
        assert warnings(package, tmp_path, RECORDING) == []
        assert warnings(package, tmp_path, COMPARING) == []
        assert warnings(package, tmp_path, RECORDING, ULPSCOPE_NATIVE="off") == []
    for part in built:
        part.unlink()
    (line,) = warnings(package, tmp_path, RECORDING)
    assert "ulpscope.native._taps, ulpscope.native._measure" in line and "times" in line
    (line,) = warnings(package, tmp_path, COMPARING)
    assert "ulpscope.native._pairs" in line and "times" in line
