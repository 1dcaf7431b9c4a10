"""Replicas that must agree: a real run of two ranks, clean and with one of them led astray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, torch, torch.distributed as dist
import torch.multiprocessing as mp
import ulpscope

def rank(number, folder, fault, level):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + number)
    with ulpscope.capture(f"{folder}/run", model=model, level=level) as capture:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            for value in model.parameters():
                dist.all_reduce(value.grad)
                if fault == "gradient" and number == 1 and step == 0:
                    value.grad[0] += 1e-3
            optimizer.step()
            total = torch.ones(3) * (number + 1)
            dist.all_reduce(total)
            capture.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1], sys.argv[2], sys.argv[3]), nprocs=2)
"""


def record(folder: Path, fault: str, level: str) -> Path:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, folder, fault, level], capture_output=True, text=True, env=None, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


def check(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ulpscope", "check", "ranks", str(run), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("level", ["op", "mix"])
def test_replicas_that_agree_are_not_accused(tmp_path: Path, level: str) -> None:
    done = check(record(tmp_path, "none", level))
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("replicas agree: ")
    assert "replicas: ranks 0-1" in done.stdout


def test_the_first_call_with_other_parameters_is_named(tmp_path: Path) -> None:
    run = record(tmp_path, "gradient", "mix")
    done = check(run)
    assert done.returncode == 1
    assert done.stdout.startswith("replicas disagree from step 1 on, at Module.0.Linear.forward.0  parameters.weight")
    first = json.loads(check(run, "--format", "json").stdout)["disagreements"][0]
    assert (first["step"], first["ranks"]) == (1, [0, 1])


def test_at_op_level_the_first_call_that_reads_them_is_named(tmp_path: Path) -> None:
    done = check(record(tmp_path, "gradient", "op"))
    assert done.returncode == 1
    assert "step 1 on, at Functional.linear.0.forward  input.1" in done.stdout


def test_a_run_of_one_rank_is_refused(tmp_path: Path) -> None:
    program = "import sys, torch, ulpscope\nwith ulpscope.capture(sys.argv[1]): torch.ones(1) + 1"
    subprocess.run([sys.executable, "-c", program, tmp_path / "run"], check=True)
    done = check(tmp_path / "run")
    assert done.returncode == 3
    assert "replicas need a run with several ranks" in done.stderr
