"""A killed process leaves every finished call, readable and right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ulpscope
from ulpscope.store import run_folder

# After each finished call the child says so on a pipe: what it said before the kill must be in the dump.
CHILD = """
import os, sys, torch, ulpscope
torch.set_num_threads(1)
capture = ulpscope.Capture(sys.argv[1], level="op", tensors=True, queue_mb=1).start()
x = torch.arange(3000, dtype=torch.float32)
for number in range(1_000_000):
    torch.add(x, number)
    os.write(1, f"{number}\\n".encode())
    if number % 50 == 49:
        capture.step()
"""
KILLS = int(os.environ.get("ULPSCOPE_KILLS", "8"))


@pytest.mark.parametrize("seed", range(KILLS))
def test_every_call_that_had_finished_is_readable_and_right(tmp_path: Path, seed: int) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, tmp_path / "run"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.0, 0.3))
        child.send_signal(signal.SIGKILL)
        said = [int(line) for line in (first + child.stdout.read()).splitlines() if line]
    dumps = {dump.manifest.step: dump for dump in ulpscope.open_run(tmp_path / "run")}
    for number in said:
        dump = dumps[number // 50]
        call = dump.call(f"Torch.add.{number % 50}.forward")
        output = call.values[-1]
        assert output.stats is not None
        assert output.stats.max == 2999.0 + number
        assert np.array_equal(dump.load(output), np.arange(3000, dtype=np.float32) + number)
    last = dumps[max(dumps)]
    assert last.ending != "complete" or (said[-1] + 1) % 50 == 0


@pytest.mark.parametrize("how", ["os._exit(7)", "os.abort()", "raise SystemExit(7)", "raise RuntimeError('boom')"])
def test_any_other_end_leaves_the_calls_too(tmp_path: Path, how: str) -> None:
    program = f"""
import os, sys, torch, ulpscope
capture = ulpscope.Capture(sys.argv[1]).start()
torch.sin(torch.ones(3))
{how}
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "run"], stderr=subprocess.DEVNULL, check=False)
    dump = ulpscope.open_dump(tmp_path / "run")
    assert dump.call("Torch.sin.0.forward").values[-1].stats is not None
    endings = {"raise SystemExit(7)": "complete", "raise RuntimeError('boom')": "the program raised RuntimeError: boom"}
    assert dump.ending.startswith(endings.get(how, "the process ended, or is still running"))


def test_a_kill_before_the_tables_are_made_leaves_the_calls_too(tmp_path: Path) -> None:
    program = """
import os, signal, sys, torch, ulpscope
capture = ulpscope.Capture(sys.argv[1]).start()
torch.sin(torch.ones(3))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "run"], check=False, timeout=120)
    folder = tmp_path / "run" / "step0" / "rank0"
    for table in run_folder.TABLES:  # which the thread of the writer makes when it comes to it
        if (folder / table).exists() and not (folder / table).stat().st_size:
            (folder / table).unlink()
    dump = ulpscope.open_dump(tmp_path / "run")
    assert dump.call("Torch.sin.0.forward").values[-1].stats is not None
    assert dump.ending != "complete"


def test_sigterm_leaves_the_calls_too(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path / "run"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.terminate()
    child.communicate()
    assert len(ulpscope.open_dump(tmp_path / "run")) >= 1


def test_a_full_disk_ends_the_recording_with_one_warning_and_not_the_program(tmp_path: Path) -> None:
    program = """
import resource, signal, sys, torch, ulpscope, logging
logging.basicConfig(format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
capture = ulpscope.Capture(sys.argv[1], tensors=True, queue_mb=1).start()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
x = torch.ones(100_000)
for number in range(100):
    x = torch.add(x, 1)
capture.close()
print(x[0].item())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "run"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "101.0"
    warnings = [line for line in done.stderr.splitlines() if "recording ended" in line]
    assert len(warnings) == 1
    assert "File too large" in warnings[0]
    dump = ulpscope.open_dump(tmp_path / "run")
    assert dump.manifest.state == "incomplete"
    assert "recording ended" in dump.ending
    assert dump.load(dump.call("Torch.add.0.forward").values[-1])[0] == 2.0


def test_tables_that_cannot_be_made_end_the_recording_and_not_the_program(tmp_path: Path) -> None:
    """No descriptors are left: the folder, the manifest and the ring of the second step are there, its tables are not."""
    program = """
import os, resource, sys, torch, ulpscope
capture = ulpscope.Capture(sys.argv[1]).start()
torch.sin(torch.ones(3))
capture.step()
os.listdir(sys.argv[1])
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for _ in range(3):
    torch.cos(torch.ones(3))
    capture.step()
capture.close()
print("went on")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "run"], capture_output=True, text=True, check=False, timeout=120
    )
    assert "went on" in ran.stdout
    assert ran.stderr.count("recording ended") == 1
    assert ulpscope.open_dump(tmp_path / "run", step=0).ending == "complete"
    assert all(dump.ending != "complete" for dump in ulpscope.open_run(tmp_path / "run")[1:])
