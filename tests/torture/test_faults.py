"""Every place where our code asks the operating system for something: it fails there, or the process is killed there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import ulpscope
from torture.faults import CALLS, ERRORS, STEPS, WAYS, Asks, dying, failing, found_calls, run

PROMISE = "nothing is lost"
# All places take minutes; a run of the suite looks at so many of each way, evenly spread.
PLACES = int(os.environ.get("ULPSCOPE_FAULTS", "12"))


@pytest.fixture(scope="module", autouse=True)
def warmed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is imported at first use is imported here, not in each fork."""
    for way in WAYS:
        run(way, tmp_path_factory.mktemp("warm") / "run", Uninstalled(), lambda number: None, overflow=False)


class Uninstalled(Asks):
    def __init__(self) -> None:
        super().__init__(-1, dying)

    def install(self) -> None:
        return


def in_child(way: str, path: Path, asks: Asks) -> tuple[int, list[int], list[str]]:
    """The status of a child, the calls that it had finished, and its last words: how often it asked, then warnings."""
    reading, writing = os.pipe()
    told = path.parent.parent / "told"  # not on the disk that is full
    told.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            words, refused = run(way, path, asks, lambda n: os.write(writing, b"%d\n" % n) and None, overflow=False)
            lines = [str(asks.count), f"refused: {refused}" if refused else "", *words]
            descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(descriptor, "\n".join(line.replace("\n", " ") for line in lines).encode())
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as said:
        heard = [int(line) for line in said.read().splitlines()]
    _, status = os.waitpid(child, 0)
    return status, heard, told.read_text().split("\n") if told.exists() else []


def asked_in_all(way: str, tmp_path: Path) -> int:
    status, _, words = in_child(way, tmp_path / "count" / "run", counted := Asks(-1, dying))
    assert status == 0 and counted.count == 0
    return int(words[0])


def places(way: str, tmp_path: Path) -> range:
    (tmp_path / "count").mkdir()
    total = asked_in_all(way, tmp_path)
    assert total > 20
    each = max(1, total // PLACES)
    return range(1 + list(WAYS).index(way) % each, total + 1, each)


@pytest.mark.parametrize("case", [f"fault: {way}" for way in WAYS])
def test_a_failure_anywhere_ends_the_recording_with_one_word(case: str, tmp_path: Path) -> None:
    way = case.removeprefix("fault: ")
    for at in places(way, tmp_path):
        folder = tmp_path / str(at)
        folder.mkdir()
        number = ERRORS[at % len(ERRORS)]
        status, said, words = in_child(way, folder / "run", Asks(at, failing(number)))
        assert status == 0, f"{errno.errorcode[number]} at place {at}: the program ended"
        _, refused, *warned = words
        assert len(warned) <= 1, (at, errno.errorcode[number], warned)
        assert said == ([] if refused else list(range(STEPS * CALLS)))
        found = found_calls(folder / "run") if (folder / "run").exists() else set()
        if not refused and not warned and way != "overflows":
            assert found == set(range(STEPS * CALLS)), f"{errno.errorcode[number]} at place {at}: lost without a word"
        shutil.rmtree(folder)


@pytest.mark.parametrize("case", [f"killed: {way}" for way in WAYS])
def test_a_kill_anywhere_loses_no_finished_call(case: str, tmp_path: Path) -> None:
    way = case.removeprefix("killed: ")
    asked = places(way, tmp_path)
    for at in asked:
        folder = tmp_path / str(at)
        folder.mkdir()
        status, said, _ = in_child(way, folder / "run", Asks(at, dying))
        if status == 0 and at > 0.9 * asked.stop:
            continue  # how often the writer wakes, and so how often it asks, is not the same in each run
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"place {at} was not reached: {status}"
        found = found_calls(folder / "run") if (folder / "run").exists() else set()
        if way != "overflows":
            assert found >= set(said), f"killed at place {at}: {sorted(set(said) - found)} are lost"
        shutil.rmtree(folder)


@pytest.mark.case("killed: the files of the older names, in the middle of a stop")
def test_a_kill_in_a_stop_leaves_the_files_of_the_stop_before_or_of_this_one(tmp_path: Path) -> None:
    way = "msprobe, one step"
    (tmp_path / "count").mkdir()
    sizes = set()
    for at in range(1, asked_in_all(way, tmp_path) + 1, 7):
        folder = tmp_path / str(at)
        folder.mkdir()
        _, said, _ = in_child(way, folder / "run", Asks(at, dying))
        dumped = folder / "run" / "step0" / "rank0"
        stopped = max(0, len(said) - 1) // CALLS * CALLS  # by a stop that had come back
        if not stopped and not dumped.exists():
            continue  # before the first one
        content = json.loads((dumped / "dump.json").read_text())["data"]
        added = [name for name in content if name.startswith("Torch.add.")]
        assert len(added) % CALLS == 0 and len(added) >= stopped, f"killed at place {at}"
        sizes.add(len(added))
        stacks = json.loads((dumped / "stack.json").read_text()).values()
        assert {name for names, _ in stacks for name in names} >= set(content), f"killed at place {at}"
        assert json.loads((dumped / "construct.json").read_text()).keys() >= set(content), f"killed at place {at}"
        leaves = [leaf for name in added for leaf in (content[name]["input_args"][0], *content[name]["output"])]
        assert len(leaves) == 2 * len(added)
        assert all((dumped / "dump_tensor_data" / leaf["data_name"]).stat().st_size for leaf in leaves)
        shutil.rmtree(folder)
    assert sizes == {CALLS, 2 * CALLS, 3 * CALLS}


@pytest.mark.case("fault: a disk that is really full")
@pytest.mark.parametrize("left", [9_400_000, 1_200_000, 200_000, 20_000, 0])
@pytest.mark.parametrize("way", WAYS)
def test_a_full_file_system(way: str, left: int, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() != 0 or os.system(f"mount -t tmpfs -o size=12m tmpfs '{disk}' 2>/dev/null") != 0:
        pytest.skip("needs to mount a file system")
    try:
        (disk / "filler").write_bytes(bytes((12 << 20) - left))
        status, said, words = in_child(way, disk / "run", Asks(-1, dying))
        assert status == 0
        _, refused, *warned = words
        assert not refused and len(warned) <= 1, words
        assert said == list(range(STEPS * CALLS))
        found = found_calls(disk / "run") if (disk / "run").exists() else set()
        assert warned or found == (set(said) if way != "overflows" else set())
    finally:
        os.system(f"umount '{disk}'")


@pytest.mark.case("fault: the harness sees overflows")
def test_calls_that_overflow_are_kept(tmp_path: Path) -> None:
    run("overflows", tmp_path / "run", Uninstalled(), lambda number: None, overflow=True)
    found = [call.id.name for dump in ulpscope.open_run(tmp_path / "run") for call in dump.calls()]
    assert found == ["exp"] * (STEPS * CALLS)
