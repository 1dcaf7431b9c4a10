"""Who compiles the C parts, and what a build does that cannot have them. Nothing is compiled here: `make wheels` does that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_COMPILER = {"CC": "/nonexistent/cc", "ULPSCOPE_BUILD_OPTIONAL": "", "ULPSCOPE_ZIG_TARGET": ""}
REQUIREMENTS = "from setuptools import build_meta; print(build_meta.get_requires_for_build_{}())"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def run(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_zig_is_required_only_where_no_compiler_works(tree: Path, kind: str) -> None:
    program = REQUIREMENTS.format(kind)
    assert "ziglang" in run(tree, "-c", program, **NO_COMPILER).stdout.splitlines()[-1]
    if shutil.which("cc"):
        assert "ziglang" not in run(tree, "-c", program, **{**NO_COMPILER, "CC": "cc"}).stdout.splitlines()[-1]


@pytest.mark.skipif(find_spec("ziglang") is not None, reason="zig is here, and would compile")
def test_a_build_that_loses_a_part_fails_unless_that_is_asked_for(tree: Path) -> None:
    # As a frontend builds: requirements are its business, and here it did not meet them.
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    failed = run(tree, "-c", build, **NO_COMPILER)
    assert failed.returncode != 0
    assert "was not built: no C compiler works here" in failed.stderr
    assert not list(tree.glob("dist/*.whl"))
    made = run(tree, "-c", build, **{**NO_COMPILER, "ULPSCOPE_BUILD_OPTIONAL": "1"})
    assert made.returncode == 0, made.stderr
    assert len(list(tree.glob("dist/*.whl"))) == 1
