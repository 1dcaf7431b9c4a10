"""The files of a dump are made while nobody waits for them."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ulpscope.model.errors import CaptureError
from ulpscope.store import run_folder
from ulpscope.store.ring import Ring
from ulpscope.store.writer import DumpWriter


def test_the_files_of_a_dump_are_made_right_after_it_was_opened(tmp_path: Path) -> None:
    writer = DumpWriter()
    waited = []
    for step in range(5):
        folder = tmp_path / f"step{step}" / "rank0"
        writer.open(folder, {"state": "open"})
        began = time.perf_counter()
        while not (folder / run_folder.TABLES[-1]).exists() and time.perf_counter() - began < 1:
            time.sleep(0.001)
        waited.append(time.perf_counter() - began)
        writer.close({"state": "complete"})
    writer.shutdown()
    # A thread that nobody wakes looks by itself after a fifth of a second.
    assert statistics.median(waited) < 0.15, waited


def test_a_folder_that_is_moved_at_once_gets_its_files_all_the_same(tmp_path: Path) -> None:
    for step in range(20):
        writer = DumpWriter()
        writer.open(tmp_path / "run" / f"step{step}" / "rank0", {"state": "open"})
        (tmp_path / "run").rename(tmp_path / f"moved{step}")
        writer.add_string('"kept"')
        writer.close({"state": "complete"})
        folder = tmp_path / f"moved{step}" / f"step{step}" / "rank0"
        assert (folder / run_folder.TABLES[0]).read_text() == '"kept"\n', (step, os.listdir(folder))
        assert writer.failure is not None  # the manifest could not be finished where it was
        writer.shutdown()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    def held() -> list[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return [target for link in links if link.exists() and str(tmp_path) in (target := os.readlink(link))]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for turn in range(3):
        writer = DumpWriter()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # enough for a manifest, not for a journal
        try:
            with pytest.raises(CaptureError, match="choose another folder"):
                writer.open(tmp_path / f"run{turn}" / "rank0", {"state": "open"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.open(tmp_path / f"again{turn}" / "rank0", {"state": "open"})
        writer.close({"state": "complete"})
        writer.shutdown()
    assert held() == []


def test_a_count_of_a_ring_is_never_seen_half_written(tmp_path: Path) -> None:
    """After a kill the file is as it was at that moment, whichever that is; another process looks at it all the while."""
    ring = Ring(tmp_path / "ring", 1 << 20)
    ring.advance(1 << 40)
    ring.take(1 << 40)
    looker = """
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    counts = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[16:32].cast("Q")
print("looking", flush=True)
end, least = time.monotonic() + 1, 1 << 60
while time.monotonic() < end:
    for _ in range(1000):
        least = min(least, counts[0], counts[1])
print(least)
"""
    with subprocess.Popen([sys.executable, "-c", looker, str(ring.path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "looking\n"
        while process.poll() is None:
            for _ in range(1000):
                ring.advance(1)
                ring.take(1)
        assert int(process.stdout.read()) >= 1 << 40
    ring.close(keep=False)
