"""The files of a dump are made while nobody waits for them."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from ulpscope.store import layout
from ulpscope.store.writer import DumpWriter


def test_the_files_of_a_dump_are_made_right_after_it_was_opened(tmp_path: Path) -> None:
    writer = DumpWriter()
    waited = []
    for step in range(5):
        folder = tmp_path / f"step{step}" / "rank0"
        writer.open(folder, {"state": "open"})
        began = time.perf_counter()
        while not (folder / layout.TABLES[-1]).exists() and time.perf_counter() - began < 1:
            time.sleep(0.001)
        waited.append(time.perf_counter() - began)
        writer.close({"state": "complete"})
    writer.shutdown()
    # A thread that nobody wakes looks by itself after a fifth of a second.
    assert statistics.median(waited) < 0.15, waited
