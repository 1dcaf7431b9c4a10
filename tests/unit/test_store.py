"""The store: what is written is read back, from any level, whole or cut."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import DumpBuilder, manifest
from ulpscope.model.errors import CaptureError, DumpError
from ulpscope.model.names import call_text
from ulpscope.model.records import CallId, Phase, Role
from ulpscope.native.schema import FORMAT_VERSION
from ulpscope.store import run_folder
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump, open_run
from ulpscope.store.ring import Ring, left_in
from ulpscope.store.writer import DumpWriter

ARRAY = np.array([[1.5, -2.0], [0.0, 4.0]], dtype=np.float32)


def built(run: Path, calls: int = 3, *, step: int = 0, rank: int = 0) -> DumpBuilder:
    builder = DumpBuilder(run, step=step, rank=rank)
    for index in range(calls):
        builder.call(
            "Torch", "add", index, values={("input", 0): ARRAY + index, ("input", "alpha"): 2, ("output", 0): ARRAY}
        )
    return builder


def test_a_call_is_read_back_with_its_values_statistics_and_bits(tmp_path: Path) -> None:
    dump = open_dump(built(tmp_path).close())
    call = dump.call("Torch.add.1.forward")
    first, alpha, output = call.values
    assert call.id == CallId("Torch", "add", 1, Phase.FORWARD)
    assert (first.slot.role, first.slot.path) == (Role.INPUT, (0,))
    assert (alpha.slot.path, alpha.scalar) == (("alpha",), 2)
    assert output.stats is not None
    assert (output.stats.max, output.stats.min, output.stats.mean) == (4.0, -2.0, 0.875)
    assert output.stats.norm == pytest.approx(math.sqrt(2.25 + 4 + 16), rel=1e-15)
    assert output.stats.zero_count == 1
    assert output.checksum == zlib.crc32(ARRAY.tobytes())
    assert np.array_equal(dump.load(first), ARRAY + 1)
    assert dump.ending == "complete"


def test_a_dump_opens_from_the_run_the_step_the_rank_and_a_file_in_it(tmp_path: Path) -> None:
    folder = built(tmp_path / "run").close()
    for path in (tmp_path / "run", folder.parent, folder, folder / run_folder.CALLS):
        assert len(open_dump(path)) == 3


def test_a_run_lists_its_dumps_by_step_and_rank_as_numbers(tmp_path: Path) -> None:
    for step, rank in ((10, 0), (2, 1), (2, 0), (2, 10)):
        built(tmp_path, step=step, rank=rank).close()
    places = [(dump.manifest.step, dump.manifest.rank) for dump in open_run(tmp_path)]
    assert places == [(2, 0), (2, 1), (2, 10), (10, 0)]
    assert open_dump(tmp_path, step=10).manifest.step == 10
    with pytest.raises(DumpError, match="holds no dump, step 3"):
        open_dump(tmp_path, step=3)


def test_what_a_killed_process_left_in_its_rings_is_read(tmp_path: Path) -> None:
    builder = built(tmp_path / "run", calls=40)
    # The process dies here: nothing was closed. A copy of the folder is what a later reader finds.
    with builder.standing_still():
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    builder.close()
    dump = open_dump(tmp_path / "killed")
    assert [call_text(call) for call in dump.ids()] == [f"Torch.add.{index}.forward" for index in range(40)]
    assert np.array_equal(dump.load(dump.call("Torch.add.39.forward").values[0]), ARRAY + 39)
    assert "the last finished call is Torch.add.39.forward" in dump.ending


@pytest.mark.parametrize("table", run_folder.TABLES)
def test_a_cut_table_gives_one_clear_error_or_the_calls_before_the_cut(tmp_path: Path, table: str) -> None:
    folder = built(tmp_path, calls=20).close()
    whole = (folder / table).read_bytes()
    for keep in (0, 1, len(whole) // 2, len(whole) - 1):
        (folder / table).write_bytes(whole[:keep])
        try:
            names = [call_text(call.id) for call in open_dump(folder).calls()]
        except DumpError as error:
            assert str(folder) in str(error)
        else:
            assert names == [f"Torch.add.{index}.forward" for index in range(len(names))]


def test_a_frame_longer_than_the_ring_passes_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulpscope.store.writer.JOURNAL_BYTES", 1 << 16)
    builder = DumpBuilder(tmp_path, payload_mb=1)
    big = np.arange(1 << 20, dtype=np.float32)
    values = {("input", number): np.full(300, number, np.float32) for number in range(400)}
    builder.call("Torch", "cat", values={**values, ("output", 0): big})
    builder.call("Torch", "add", values={("output", 0): ARRAY})
    dump = open_dump(builder.close())
    call = dump.call("Torch.cat.0.forward")
    assert [float(dump.load(value)[0]) for value in call.values[:-1]] == list(range(400))
    assert np.array_equal(dump.load(call.values[-1]), big)


def test_an_earlier_dump_is_never_written_into(tmp_path: Path) -> None:
    folder = built(tmp_path).close()
    before = (folder / run_folder.CALLS).read_bytes()
    with pytest.raises(CaptureError, match="never mixed"):
        DumpWriter().open(folder, manifest())
    assert (folder / run_folder.CALLS).read_bytes() == before


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CaptureError, match=r"cannot write into .*file.*: Not a directory"):
        DumpWriter().open(tmp_path / "file" / "step0" / "rank0", manifest())


def test_a_manifest_is_written_when_it_says_anything_new_and_in_each_dump(tmp_path: Path) -> None:
    folder = tmp_path / "step0" / "rank0"
    writer = DumpWriter()
    for _ in range(2):  # into the same folder again, as after a removal
        writer.open(folder, manifest())
        writer.flush({**manifest(), "state": "complete"})
        (folder / "manifest.json").unlink()
        writer.flush({**manifest(), "state": "complete"})
        assert not (folder / "manifest.json").exists()
        writer.close({**manifest(), "state": "complete", "notes": ["more"]})
        assert '"more"' in (folder / "manifest.json").read_text()
        assert re.search(
            r'^"written": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d', (folder / "manifest.json").read_text(), re.MULTILINE
        )
        shutil.rmtree(folder)
    writer.shutdown()


def test_a_writer_that_fails_says_so_once_and_keeps_what_it_has(tmp_path: Path) -> None:
    builder = built(tmp_path, calls=5)
    told: list[str] = []
    builder.writer.on_failure = told.append
    builder.writer.flush(manifest())  # by which there are files
    os.close(builder.writer._files[-1])
    builder.writer._files[-1] = os.open(os.devnull, os.O_RDONLY)
    builder.call("Torch", "mul")
    folder = builder.close()
    assert len(told) == 1
    assert "the program goes on" in told[0]
    dump = open_dump(folder)
    assert dump.manifest.state == "incomplete"
    assert call_text(dump.ids()[-1]) == "Torch.mul.0.forward"


def test_a_symbolic_link_in_a_dump_is_refused(tmp_path: Path) -> None:
    folder = built(tmp_path).close()
    secret = tmp_path / "secret"
    (folder / run_folder.STRINGS).rename(secret)
    (folder / run_folder.STRINGS).symlink_to(secret)
    with pytest.raises(DumpError, match="symbolic link"):
        open_dump(folder)


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = built(tmp_path).close()
    content = json.loads((folder / run_folder.MANIFEST).read_text())
    (folder / run_folder.MANIFEST).write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(DumpError, match="has format 99, this ulpscope reads up to 2; upgrade"):
        open_dump(folder)


@pytest.mark.parametrize("config", [5, None, [], "x" * 1000])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, config: Any) -> None:
    folder = built(tmp_path).close()
    content = json.loads((folder / run_folder.MANIFEST).read_text())
    (folder / run_folder.MANIFEST).write_text(json.dumps({**content, "config": config}))
    with pytest.raises(DumpError, match=r"its config is .{1,40}, not an object"):
        open_dump(folder)


@pytest.mark.parametrize("stretches", [5, None, [], {"training": "1"}])
def test_stretches_that_are_no_counts_are_refused(tmp_path: Path, stretches: Any) -> None:
    folder = built(tmp_path).close()
    content = json.loads((folder / run_folder.MANIFEST).read_text())
    (folder / run_folder.MANIFEST).write_text(json.dumps({**content, "stretches": stretches}))
    with pytest.raises(DumpError, match=r"its stretches are .{1,40}, not counts"):
        open_dump(folder)


def test_a_wrong_name_brings_the_nearest(tmp_path: Path) -> None:
    dump = open_dump(built(tmp_path).close())
    with pytest.raises(DumpError, match=r"Did you mean 'Torch\.add\.1\.forward'"):
        dump.call("Torch.ad.1.forward")
    with pytest.raises(DumpError, match="is not the name of a call"):
        dump.call("nonsense")


def test_elements_that_were_not_stored_are_not_invented(tmp_path: Path) -> None:
    folder = built(tmp_path).close()
    (folder / run_folder.PAYLOAD).write_bytes(b"")
    dump = open_dump(folder)
    with pytest.raises(DumpError, match="the file is cut"):
        dump.load(dump.call("Torch.add.0.forward").values[0])


def test_a_ring_gives_back_what_was_put_and_not_taken_across_its_end(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 4096)
    for number in range(100):
        ring.put(bytes([number]) * 100)
        if number < 99:
            ring.take(100)
    start, data = left_in(tmp_path / "ring")
    assert (start, data) == (9900, bytes([99]) * 100)
    ring.close(keep=False)
    assert not (tmp_path / "ring").exists()


def test_a_file_that_is_no_ring_holds_nothing(tmp_path: Path) -> None:
    for content in (b"", b"x" * 10, b"ulpring1" + b"\xff" * 5000):
        (tmp_path / "ring").write_bytes(content)
        assert left_in(tmp_path / "ring") == (0, b"")


def test_a_dump_is_followed_as_it_grows_and_is_then_as_if_opened_anew(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path)
    dump: Dump | None = None
    held = []
    for stretch in range(3):
        for index in range(3000):
            array = np.full(3, stretch * 3000 + index, dtype=np.float32)
            parent = {"parent": builder.seq - 1} if builder.seq else {}
            values = {("output", 0): array, ("input", index % 7): stretch}
            builder.call("Functional", "f", stretch * 3000 + index, values=values, **parent)
        builder.writer.flush({**builder.manifest, "notes": [f"stretch {stretch}"]})
        if dump is None:
            dump = open_dump(builder.folder)
        else:
            assert dump.follow()
        anew = open_dump(builder.folder)
        assert dump.manifest == anew.manifest and dump.ids() == anew.ids() and len(dump) == 3000 * (stretch + 1)
        assert list(dump.calls()) == list(anew.calls())
        last = dump.nth(-1)
        assert dump.parent(last) == anew.parent(last) == dump.ids()[-2] and dump.call(last.id) == last
        assert dump.load(last.values[0]).tolist() == [len(dump) - 1.0] * 3
        held.append((dump.sketch(last.values[0]), anew.sketch(last.values[0])))
    builder.close()
    for own, other in held:  # what was given out stays, however the dump grows
        assert own is not None and other is not None and own.tolist() == other.tolist()


def test_a_dump_is_not_followed_where_a_call_ended_that_had_begun_before_others(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path)
    builder.call("Functional", "first")
    builder.seq = 2
    builder.call("Functional", "third")
    builder.writer.flush(builder.manifest)
    dump = open_dump(builder.folder)
    assert dump.follow() and len(dump) == 2
    builder.seq = 1
    builder.call("Functional", "second")
    builder.writer.flush(builder.manifest)
    assert not dump.follow()
    assert [call.name for call in open_dump(builder.folder).ids()] == ["first", "second", "third"]
    builder.close()


def test_a_dump_is_not_followed_while_a_device_has_not_answered(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path)
    builder.writer.reserve_measure()
    builder.call("Functional", "first")
    builder.writer.flush(builder.manifest)
    assert not open_dump(builder.folder).follow()
    builder.close()


def test_the_page_of_the_format_is_about_the_version_that_is_written() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "dump-format.md").read_text()
    assert page.startswith(f"# Dump format, version {FORMAT_VERSION}\n")
    history = page.partition("## History")[2]
    assert [int(version) for version in re.findall(r"^(\d+): ", history, re.MULTILINE)] == [
        *range(1, FORMAT_VERSION + 1)
    ]
