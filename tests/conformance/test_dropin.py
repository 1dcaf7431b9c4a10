"""The names-only distribution beside real tools, and where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

DROPIN = Path(__file__).parents[2] / "dropin"


def run(code: str, *paths: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def real_tools(folder: Path) -> Path:
    """A mindstudio-probe and a torch_npu as they are installed."""
    for name in ("msprobe", "torch_npu"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("real = True")
    (folder / "torch_npu" / "hooks.py").write_text("register_hook = 'real'")
    told = folder / "mindstudio_probe-26.2.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: mindstudio-probe\nVersion: 26.2.0\n")
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel puts into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    source = folder / "source"
    subprocess.run(["cp", "-r", str(DROPIN), str(source)], check=True)
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


HOOKS = "from torch_npu.hooks import schedule, step_schedule; import torch_npu.hooks as h; print(h.__name__)"


def test_the_old_path_works_where_there_is_no_torch_npu(tmp_path: Path, installed: Path) -> None:
    begin = f"import site; site.addsitedir({str(installed)!r}); "
    for done in (run(HOOKS, DROPIN, cwd=tmp_path), run(begin + HOOKS, cwd=tmp_path)):
        assert done.stdout == "ulpscope.compat.torch_npu_hooks\n", done.stderr
    absent = "import importlib.util as u; print(u.find_spec('torch_npu')); import torch_npu"
    done = run(begin + absent, cwd=tmp_path)
    assert done.stdout == "None\n" and "No module named 'torch_npu'" in done.stderr
    assert "No module named 'torch_npu'" in run("import torch_npu", DROPIN, cwd=tmp_path).stderr


def test_a_real_torch_npu_is_what_is_imported(tmp_path: Path, installed: Path) -> None:
    real, code = (
        real_tools(tmp_path / "real"),
        "import torch_npu.hooks; print(torch_npu.real, torch_npu.hooks.register_hook)",
    )
    begin = f"import site; site.addsitedir({str(installed)!r}); "
    for done in (run(code, DROPIN, real, cwd=tmp_path), run(begin + code, real, cwd=tmp_path)):
        assert done.stdout == "True real\n", done.stderr


def test_beside_a_real_msprobe_ours_refuses_and_touches_nothing_of_it(tmp_path: Path, installed: Path) -> None:
    real = real_tools(tmp_path / "real")
    done = run("import msprobe", DROPIN, real, cwd=tmp_path)
    assert done.returncode == 1
    assert "msprobe belongs to mindstudio-probe 26.2.0, which is installed too" in done.stderr
    begin = f"import site; site.addsitedir({str(installed)!r}); "
    assert run(begin + "import msprobe; print(msprobe.real)", real, cwd=tmp_path).stdout == "True\n"
    assert run(begin + "import msprobe.pytorch as m; print(m.compare.__module__)", cwd=tmp_path).stdout == (
        "ulpscope.compat.msprobe.comparing\n"
    )
    overwritten = {path.name for path in installed.iterdir()} & {"msprobe", "ptdbg_ascend", "torch_npu"}
    assert not overwritten
    command = "import sys; sys.argv = ['/usr/bin/msprobe']; from ulpscope.compat.msprobe.command import main; sys.exit(main([]))"
    done = run(command, real, cwd=tmp_path)
    assert done.returncode == 2 and "python -m ulpscope.compat.msprobe" in done.stderr
