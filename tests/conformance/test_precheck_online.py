"""The online pre-check, end to end: a training script with `online_run_ut`, and `run_ut` with `is_online`, two processes."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ulpscope.compat.msprobe import command
from ulpscope.compat.msprobe.config import load_config
from ulpscope.compat.msprobe.online import _receiver
from ulpscope.model.errors import ConfigError
from ulpscope.replay.online import FolderReceiver

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch, torch.nn as nn, torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger
debugger = PrecisionDebugger(config_path="config.json")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
for _ in range(2):
    debugger.start(model)
    F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 2).backward()
    debugger.stop()
    debugger.step()
print("trained")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "dropin"), "OMP_NUM_THREADS": "1", "ULPSCOPE_SECRET": "shared"}


def train(folder: Path, **where: Any) -> subprocess.CompletedProcess[str]:
    section = {"online_run_ut": True, **where}
    config = {"task": "tensor", "dump_path": "./dump", "level": "L1", "tensor": section}
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200)


def checker(folder: Path, **where: Any) -> subprocess.Popen[str]:
    config = folder / "check.json"
    config.write_text(json.dumps({"run_ut": {"is_online": True, "rank_list": [0], **where}}))
    module = "ulpscope.compat.msprobe"
    arguments = ["-f", "pytorch", "run_ut", "-config", str(config), "-o", str(folder / "out")]
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], env=environment(), stderr=subprocess.PIPE, text=True
    )


def results(folder: Path) -> list[list[str]]:
    (path,) = (folder / "out").glob("accuracy_checking_result_*_rank0.csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))[1:]


def both_ends(folder: Path, **where: Any) -> None:
    check = checker(folder, **where)
    assert check.stderr is not None
    try:
        assert "nfs_path" in where or any("listening" in line for line in check.stderr)
        done = train(folder, **where)
        _, said = check.communicate(timeout=200)
    finally:
        check.kill()
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "lost" not in done.stderr
    assert check.returncode == 0, said
    rows = results(folder)
    assert [row[0] for row in rows].count("Functional.linear.0") == 2
    assert {row[1] for row in rows if row[0].startswith("Functional")} == {"pass"}
    assert {row[2] for row in rows if row[0].startswith("Functional")} == {"pass"}
    assert not list((folder / "dump").rglob("payload.bin"))


def test_002_063_065_066_084_086_087_over_a_connection(tmp_path: Path) -> None:
    both_ends(tmp_path, host="127.0.0.1", port=free_port())


def test_002_064_085_through_a_shared_folder_which_wins_over_host_and_port(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    both_ends(tmp_path, nfs_path=str(shared), host="127.0.0.1", port=1)
    assert list(shared.iterdir()) == []


def test_002_063_training_goes_on_without_the_other_end_and_says_what_is_lost(tmp_path: Path) -> None:
    shared = tmp_path / "gone"
    shared.mkdir()
    program = PROGRAM.replace("for _ in", "import shutil; shutil.rmtree('gone')\nfor _ in")
    section = {"online_run_ut": True, "nfs_path": "gone"}
    config = {"task": "tensor", "dump_path": "./dump", "level": "L1", "tensor": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "the online check did not get 2 of 2 dumps" in done.stderr


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({}, "is_online needs nfs_path, or host and port"),
        ({"nfs_path": "nowhere"}, "nfs_path: nowhere does not exist"),
        ({"host": "127.0.0.1", "port": 0, "tls_path": "nowhere"}, "tls_path: nowhere does not exist"),
        ({"host": "192.0.2.1", "port": 7}, "ULPSCOPE_SECRET"),
        ({"host": "127.0.0.1", "port": "7"}, "must be a whole number"),
        ({"rank_list": [-1]}, "rank_list"),
    ],
)
def test_002_067_084_085_086_087_mistakes_are_said(
    tmp_path: Path,
    section: dict[str, Any],
    text: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ULPSCOPE_SECRET", raising=False)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"run_ut": {"is_online": True, **section}}))
    assert command.main(["-f", "pytorch", "run_ut", "-config", str(config), "-o", str(tmp_path)]) == 2
    assert text in caplog.text


def test_002_085_nfs_path_wins(tmp_path: Path) -> None:
    given = {"nfs_path": str(tmp_path), "host": "127.0.0.1", "port": 1}
    assert isinstance(_receiver(given, frozenset({0}), str(tmp_path)), FolderReceiver)


def test_002_067_tls_path_must_hold_the_certificates(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    section = {"is_online": True, "host": "127.0.0.1", "port": 0, "tls_path": str(tmp_path)}
    config.write_text(json.dumps({"run_ut": section}))
    assert command.main(["-f", "pytorch", "run_ut", "-config", str(config), "-o", str(tmp_path / "out")]) != 0


def test_002_084_the_sections_of_the_manual_parse(tmp_path: Path) -> None:
    section = {"is_online": False, "nfs_path": "", "host": "", "port": 0, "rank_list": [0]}
    (tmp_path / "config.json").write_text(json.dumps({"task": "run_ut", "dump_path": "x", "run_ut": section}))
    assert load_config(tmp_path / "config.json").options["rank_list"] == (0,)
    section = {"is_online": "yes"}
    (tmp_path / "config.json").write_text(json.dumps({"task": "run_ut", "dump_path": "x", "run_ut": section}))
    with pytest.raises(ConfigError):
        load_config(tmp_path / "config.json")
