"""The files of msprobe while their dump is being made: whole after each stop, at the end as if written at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from builders import DumpBuilder
from ulpscope.model.names import OPTIMIZER, call_text
from ulpscope.store.formats.msprobe_writer import MsprobeFiles, write_msprobe
from ulpscope.store.growing import GrowingJson
from ulpscope.store.registry import open_dump

NAMES = ("dump.json", "debug.json", "stack.json", "construct.json")
OPTIONS = {"level": "mix", "task": "statistics", "summary_mode": "statistics"}


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything that is there, by name; the folder's own name does not count."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes().replace(os.fsencode(folder), b"FOLDER") for name, path in found.items()}


def training(capture: ulpscope.Capture, stretches: int) -> None:
    """Forward and backward in stretches of their own, the optimizer in every other, a saved value in all."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for stretch in range(stretches):
        capture.start(model)
        out = model(torch.randn(2, 1, 6, 6))
        loss = torch.log(out.relu()).clamp(-1e9).sum() * 1e-3  # of -inf too
        capture.save("loss", loss, gradient=False)
        capture.stop()
        capture.start()
        loss.backward()
        if stretch % 2:
            optimizer.step()
        capture.stop()


@pytest.mark.parametrize("stretches", [1, 4])
@pytest.mark.parametrize(
    ("level", "task", "summary_mode"),
    [("mix", "tensor", "statistics"), ("L1", "statistics", "md5"), ("L0", "statistics", "statistics")],
)
def test_files_that_grew_are_those_that_are_written_at_once(
    level: str, task: str, summary_mode: str, stretches: int, tmp_path: Path
) -> None:
    ours = {"mix": "mix", "L0": "module", "L1": "op"}[level]
    options = {"level": level, "task": task, "summary_mode": summary_mode}
    capture = ulpscope.Capture(tmp_path / "run", level=ours, tensors=task == "tensor", sketch=False)
    files: list[MsprobeFiles] = []
    inodes = set()

    def on_dump(folder: Path, finished: bool) -> None:
        if not files:
            files.append(MsprobeFiles(open_dump(folder), tmp_path / "grown", **options))
            files[0].write()
        else:
            assert files[0].add()
        if finished:
            files[0].finish()
        content = {
            name: json.loads((tmp_path / "grown" / name).read_text(), parse_constant=lambda word: pytest.fail(word))
            for name in NAMES
            if (tmp_path / "grown" / name).exists()
        }
        calls = [call for call in open_dump(folder).ids() if call.kind != OPTIMIZER]
        entries = [*content["dump.json"]["data"], *content["debug.json"]["data"]]
        assert sorted(entries) == sorted(map(call_text, calls))
        named = {name: frames for names, frames in content["stack.json"].values() for name in names}
        native = open_dump(folder)
        assert {name: len(named[name]) for name in named} == {
            native.name_of(call): len(native.stack(call)) for call in native.calls() if native.name_of(call) in named
        }
        if task == "tensor":
            assert len(list(open_dump(tmp_path / "grown").calls())) == len(calls)
        inodes.add((tmp_path / "grown" / "dump.json").stat().st_ino)

    capture.on_dump = on_dump
    training(capture, stretches)
    capture.close()
    native = open_dump(tmp_path / "run")
    write_msprobe(native, tmp_path / "whole", **options)
    assert files_of(tmp_path / "grown") == files_of(tmp_path / "whole")
    assert len(inodes) == 2  # two that take turns, and no more


def grown(tmp_path: Path) -> tuple[DumpBuilder, MsprobeFiles, Callable[[], None]]:
    builder = DumpBuilder(tmp_path / "run")

    def more() -> None:
        builder.call("Torch", "add", builder.seq, values={("output", 0): builder.seq})
        builder.writer.flush(builder.manifest)

    more()
    files = MsprobeFiles(open_dump(builder.folder), tmp_path / "out", **OPTIONS)
    files.write()
    return builder, files, more


def entries(folder: Path) -> list[str]:
    return list(json.loads((folder / "dump.json").read_text())["data"])


def test_what_was_moved_away_is_left_alone_and_written_anew(tmp_path: Path) -> None:
    builder, files, more = grown(tmp_path)
    for _ in range(3):
        more()
        assert files.add()
    (tmp_path / "out").rename(tmp_path / "kept")
    assert files.add() and not (tmp_path / "out").exists()  # nothing is new
    kept = files_of(tmp_path / "kept")
    more()
    assert not files.add()
    files = MsprobeFiles(open_dump(builder.folder), tmp_path / "out", **OPTIONS)
    files.write(replace=True)
    assert len(entries(tmp_path / "out")) == 5 and files_of(tmp_path / "kept") == kept
    builder.close()


def test_who_has_a_link_to_an_earlier_state_keeps_it(tmp_path: Path) -> None:
    builder, files, more = grown(tmp_path)
    for number in range(4):
        os.link(tmp_path / "out" / "dump.json", tmp_path / f"{number}.json")
        more()
        assert files.add()
    for number in range(4):
        assert len(json.loads((tmp_path / f"{number}.json").read_text())["data"]) == number + 1
    assert len(entries(tmp_path / "out")) == 5
    builder.close()


def test_a_file_system_without_links_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    builder, files, more = grown(tmp_path)
    for number in range(3):
        more()
        assert files.add()
        assert len(entries(tmp_path / "out")) == number + 2
    files.finish()
    assert sorted(files_of(tmp_path / "out")) == ["construct.json", "dump.json", "stack.json"]
    builder.close()


def test_notes_stand_behind_the_calls_and_come_back_with_the_dump(tmp_path: Path) -> None:
    builder, files, more = grown(tmp_path)
    assert "notes" not in json.loads((tmp_path / "out" / "dump.json").read_text())
    for notes in (["a", 'b "-inf"'], ["a (2 times)", 'b "-inf"']):
        builder.manifest = {**builder.manifest, "notes": notes}
        builder.writer.flush(builder.manifest)
        assert files.add()  # with or without a call
        content = json.loads((tmp_path / "out" / "dump.json").read_text())
        assert list(content)[-2:] == ["data", "notes"] and content["notes"] == notes
        assert open_dump(tmp_path / "out").manifest.notes == tuple(notes)
        more()
        assert files.add()
    assert len(entries(tmp_path / "out")) == 3
    builder.close()


@pytest.mark.parametrize("notes", [None, "text", 5, {"a": 1}, [1, None, ["x"]]])
def test_notes_of_another_kind_are_none(notes: Any, tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(json.dumps({"task": "statistics", "data": {}, "notes": notes}))
    assert open_dump(tmp_path / "dump.json").manifest.notes == ()


def test_a_call_that_ends_late_takes_its_place_and_the_files_are_there_all_the_time(tmp_path: Path) -> None:
    builder, files, more = grown(tmp_path)
    builder.seq = 2
    more()
    assert files.add()
    builder.seq = 1
    more()
    before = files_of(tmp_path / "out")
    assert not files.add() and files_of(tmp_path / "out") == before
    files = MsprobeFiles(open_dump(builder.folder), tmp_path / "out", **OPTIONS)
    files.write(replace=True)
    assert entries(tmp_path / "out") == [f"Torch.add.{number}.forward" for number in range(3)]
    assert sorted(files_of(tmp_path / "out")) == ["construct.json", "dump.json", "stack.json"]
    builder.seq = 3
    more()
    assert files.add() and len(entries(tmp_path / "out")) == 4
    builder.close()


def test_an_interrupted_growth_is_seen_by_nobody(tmp_path: Path) -> None:
    path, spare = tmp_path / "a.json", tmp_path / ".a"
    file = GrowingJson("{", "\n", ",\n")
    file.create(path, ['"a": 1'], "}\n")
    file.add(path, spare, ['"b": 2'], "}\n")

    def broken() -> Any:
        yield '"c": 3'
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file.add(path, spare, broken(), "}\n")
    assert json.loads(path.read_text()) == {"a": 1, "b": 2} and path.read_text() == '{\n"a": 1,\n"b": 2}\n'


def test_what_one_more_call_costs_does_not_grow_with_the_calls_before(tmp_path: Path) -> None:
    builder, files, more = grown(tmp_path)
    written = []
    for stretch in range(2):
        for number in range(400):
            builder.call("Torch", "mul", stretch * 400 + number, values={("output", 0): 1})
        more()
        assert files.add()
        for _ in range(3):  # the one that waits has caught up by then
            before = _written_bytes()
            more()
            assert files.add()
        written.append(_written_bytes() - before)
    assert written[1] < 1.2 * written[0]
    builder.close()


def _written_bytes() -> int:
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))[7:])
