"""Which format a path has is asked of one format after the other, and of those of others last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from builders import DumpBuilder
from ulpscope.model.errors import DumpError
from ulpscope.store.dump import Recording, Source
from ulpscope.store.registry import find_dumps, find_folders, open_dump

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "jsonl_format.py"


def python(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, for which what lies in `folder` is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def install(folder: Path, **formats: str) -> None:
    """An installed distribution with entry points, as pip leaves it."""
    about = folder / "jsonl_format-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jsonl-format\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in formats.items())
    (about / "entry_points.txt").write_text(f"[ulpscope.formats]\n{lines}")
    (folder / EXAMPLE.name).write_text(EXAMPLE.read_text())


def jsonl(path: Path, last: float) -> Path:
    rows = [
        {"call": "Torch.mul.0.forward", "values": {"input.0": [1.0, 2.0], "output.0": [2.0, 4.0]}},
        {"call": "Torch.add.0.forward", "values": {"input.0": [2.0, 4.0], "output.0": [3.0, last]}},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_native_dump_opens_without_a_reader_of_another_tool(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path / "run")
    builder.call("Torch", "mul", values={("output", 0): np.ones(2, dtype=np.float32)})
    builder.close()
    code = (
        f"import sys, ulpscope\nfor path in ({str(tmp_path / 'run')!r}, {str(builder.folder / 'calls.bin')!r}):\n"
        "    dump = ulpscope.open_dump(path)\n    assert len(list(dump.calls())) == 1, dump\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('ulpscope.store.formats.', 'importlib.metadata'))))"
    )
    done = python(tmp_path, "-c", code)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_a_format_of_others_is_shown_compared_and_converted(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 75
    install(tmp_path / "site", jsonl="jsonl_format:FORMAT")
    site, a, b = tmp_path / "site", jsonl(tmp_path / "a.jsonl", 5.0), jsonl(tmp_path / "b.jsonl", 5.5)

    def ulpscope(*words: object) -> subprocess.CompletedProcess[str]:
        return python(site, "-m", "ulpscope", *words)

    shown = ulpscope("show", a, "--format", "json")
    assert [call["name"] for call in json.loads(shown.stdout)["calls"]] == [
        "Torch.mul.0.forward",
        "Torch.add.0.forward",
    ]
    assert ulpscope("show", a, "Torch.add.0.forward").stdout.split()[-5:] == ["[2]", "5", "3", "4", "-"]

    assert ulpscope("compare", a, a, "-o", tmp_path / "same").returncode == 0
    other = ulpscope("compare", a, b, "-o", tmp_path / "other")
    assert other.returncode == 1 and "add" in other.stdout and "mul" not in other.stdout

    done = ulpscope("convert", b, tmp_path / "native")
    assert done.returncode == 0, done.stderr
    copy = open_dump(tmp_path / "native")
    assert (copy.source.format, copy.recorded_by, len(copy)) == ("native", "jsonl", 2)
    assert copy.load(copy.nth(1).values[1]).tolist() == [3.0, 5.5]
    assert ulpscope("compare", b, tmp_path / "native", "-o", tmp_path / "back").returncode == 0


def test_a_format_that_cannot_be_loaded_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    install(tmp_path / "site", jsonl="jsonl_format:FORMAT", broken="no_such_module:FORMAT")
    done = python(tmp_path / "site", "-m", "ulpscope", "show", jsonl(tmp_path / "a.jsonl", 5.0))
    assert done.returncode == 0 and "Torch.add.0.forward" in done.stdout
    assert "the format broken (no_such_module:FORMAT) cannot be loaded: No module named 'no_such_module'" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing", None, "does not exist"),
        ("a.jsonl", '{"call": 1}', "it has no object 'data'"),
        ("a.txt", "1.5", "it holds no JSON"),
        ("a.pt", "PK", "it is one tensor"),
    ],
)
def test_what_no_format_knows_is_refused_for_what_it_is(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DumpError, match=says):
        find_dumps(tmp_path / name)


def test_a_folder_without_dumps_has_none_and_opening_it_says_what_a_dump_is(tmp_path: Path) -> None:
    assert find_dumps(tmp_path) == [] == find_folders(tmp_path)
    with pytest.raises(DumpError, match="a dump is a folder step0/rank0"):
        open_dump(tmp_path)


def test_a_source_has_ten_members() -> None:
    def members(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert members(Source) == {
        *("format", "manifest", "missing", "ids", "modules", "record", "stack", "parent", "spelled", "stored"),
    }
    assert members(Recording) == {"ending", "threads", "position", "sketch", "unmasked", "rows", "follow"}
