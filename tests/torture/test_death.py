"""However a process ends and whatever the disk does: finished calls are readable, the program goes on, one clear word."""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import os
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from integration.runs import LEVELS
from integration.test_threads_and_forks import in_fork
from torture.faults import Heard
from torture.killing import check, killed, record
from ulpscope.compat.msprobe.debugger import PrecisionDebugger
from ulpscope.model.errors import CaptureError, UlpscopeError
from ulpscope.store import writer

PROMISE = "nothing is lost"
case = pytest.mark.case
X = torch.ones(1000)
NOBODY = 65534
KILLS = int(os.environ.get("ULPSCOPE_KILLS", "200"))


@pytest.fixture(scope="module", autouse=True)
def warmed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What torch imports at the first kernel is imported here, not in each of the forks."""
    with ulpscope.capture(tmp_path_factory.mktemp("warm") / "run", level="kernel"):
        torch.add(X, 1)


@case("sigkill_random")
@case("sigkill_mid_step")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "statistics"])
def test_what_had_finished_before_a_kill_is_readable_and_right(tmp_path: Path, level: str, tensors: bool) -> None:
    for seed in range(KILLS // 8):
        run = tmp_path / str(seed)
        check(run, level, killed(run, level, seed, tensors=tensors), tensors=tensors)
        shutil.rmtree(run, ignore_errors=True)


@case("sigterm")
@pytest.mark.parametrize("level", LEVELS)
def test_a_preempted_process_leaves_its_calls(tmp_path: Path, level: str) -> None:
    said = killed(tmp_path / "run", level, 5, how=signal.SIGTERM)
    check(tmp_path / "run", level, said)


ENDS: dict[str, Callable[[], Any]] = {
    "os._exit": lambda: os._exit(7),
    "abort": lambda: (faulthandler.disable(), os.abort()),
}


@case("os_exit")
@pytest.mark.parametrize("how", ENDS)
def test_an_end_without_a_word_leaves_the_calls(tmp_path: Path, how: str) -> None:
    def say(number: int) -> None:
        if number == 17:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ENDS[how]()

    in_fork(lambda: record(tmp_path, "op", say, tensors=True))
    check(tmp_path, "op", list(range(18)))


@case("no_stop_exit")
@pytest.mark.parametrize("level", LEVELS)
def test_an_exit_without_stop_completes_the_dump(tmp_path: Path, level: str) -> None:
    def say(number: int) -> None:
        if number == 10:
            raise RuntimeError("the loop ends")

    def child() -> None:
        try:
            record(tmp_path, level, say, tensors=True)
        except RuntimeError:
            atexit._run_exitfuncs()

    assert in_fork(child) == 0
    assert [dump.ending for dump in ulpscope.open_run(tmp_path)] == ["complete"] * 2
    check(tmp_path, level, list(range(11)))


@case("reader_race")
def test_a_dump_that_is_being_written_is_readable_at_any_moment(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            capture = ulpscope.Capture(tmp_path, tensors=True, queue_mb=1).start()
            os.write(writing, b"x")
            data = torch.ones(300)
            for number in range(1_000_000):
                torch.add(data, number % 50)
                if number % 20_000 == 19_999:
                    capture.step()
        finally:
            os._exit(1)
    os.close(writing)
    os.read(reading, 1)
    sizes = []
    try:
        until = time.monotonic() + 4
        while time.monotonic() < until:
            dump = ulpscope.open_run(tmp_path)[-1]
            calls = list(dump.calls())
            sizes.append(len(calls))
            for call in (*calls[:3], *calls[-3:]):
                dump.load(call.values[-1])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
    assert len(set(sizes)) > 3


# --- the disk ---------------------------------------------------------------------------------------------------


def trains_on(path: Path, trouble: Callable[[ulpscope.Capture], None], **options: Any) -> list[str]:
    """Records with trouble after the first call; the program must compute on. Returns the warnings."""
    heard = Heard()
    capture = ulpscope.Capture(path, **options).start()
    data = X
    for number in range(60):
        data = torch.add(data, 1)
        if number == 0:
            capture._writer._drain(everything=True)
            trouble(capture)
        if number % 15 == 14:
            capture.step()
    capture.close()
    assert data[0].item() == 61.0
    assert torch._C._len_torch_function_stack() == 0
    return heard.words


def no_room(path: Path) -> Callable[[ulpscope.Capture], None]:
    def limit(capture: ulpscope.Capture) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    return limit


def no_blocks(path: Path) -> Callable[[ulpscope.Capture], None]:
    def fill(capture: ulpscope.Capture) -> None:
        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        os.pwrite = writer.file_frames = full  # type: ignore[assignment]

    return fill


def broken_writer(path: Path) -> Callable[[ulpscope.Capture], None]:
    def break_it(capture: ulpscope.Capture) -> None:
        def odd(*_: Any) -> int:
            raise ValueError("a bug in the writer thread")

        os.pwrite = writer.file_frames = odd  # type: ignore[assignment]

    return break_it


def deleted(path: Path) -> Callable[[ulpscope.Capture], None]:
    return lambda capture: shutil.rmtree(path)


def no_more_files(path: Path) -> Callable[[ulpscope.Capture], None]:
    return lambda capture: resource.setrlimit(
        resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def read_only(path: Path) -> Callable[[ulpscope.Capture], None]:
    def forbid(capture: ulpscope.Capture) -> None:
        path.chmod(0o555)
        for folder in path.rglob("*"):
            if folder.is_dir():
                folder.chmod(0o555)
        os.setresuid(NOBODY, NOBODY, NOBODY)

    return forbid


TROUBLES = {
    "disk_full_tensor": no_room,
    "crash: no blocks left": no_blocks,
    "crash: error in the writer thread": broken_writer,
    "crash: folder deleted": deleted,
    "crash: too many open files": no_more_files,
    "crash: folder made read-only": read_only,
}


@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "statistics"])
@pytest.mark.parametrize("case", TROUBLES)
def test_trouble_with_the_disk_ends_the_recording_with_one_word_and_not_the_program(
    case: str, tensors: bool, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    run = tmp_path / "run"
    run.mkdir()
    if case == "crash: folder made read-only" and os.getuid() != 0:
        pytest.skip("needs to become another user")
    told = tmp_path / "told"
    told.touch()
    told.chmod(0o666)
    report = os.open(told, os.O_WRONLY)

    def child() -> None:
        words = trains_on(run, TROUBLES[case](run), tensors=tensors)
        os.write(report, "\n".join(words).encode())

    assert in_fork(child) == 0
    os.close(report)
    words = told.read_text().splitlines()
    assert len(words) <= 1, words
    if case == "crash: folder deleted":
        return
    (first, *_) = ulpscope.open_run(run)
    assert first.call("Torch.add.0.forward").values[-1].stats.max == 2.0
    assert first.ending == "complete" or words


def on_a_small_disk(place: Path, size: str) -> None:
    """A file system of this size stands at a place, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private = 0x20000, 0x10000000, 1 << 18 | 1 << 14
    if libc.unshare(new_mounts) and libc.unshare(new_mounts | new_user):
        raise PermissionError(ctypes.get_errno(), "no mounts of one's own")
    libc.mount(b"none", b"/", None, private, None)
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={size}".encode()):
        raise PermissionError(ctypes.get_errno(), "no file systems of one's own")


@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "statistics"])
@pytest.mark.parametrize("size", ["16k", "1m", "12m", "90m"])
def test_a_disk_that_is_full_by_itself_ends_the_recording_and_not_the_program(
    size: str, tensors: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A real file system without room, from the start or later on: what fits is there, each step that is there is readable, one word."""
    told = tmp_path_factory.mktemp("told")

    def child() -> None:
        try:
            on_a_small_disk(tmp_path, size)
        except PermissionError as error:
            (told / "cannot").write_text(str(error))
            return
        heard = Heard()
        data = torch.zeros(1 << 18)
        with ulpscope.capture(tmp_path / "run", tensors=tensors) as capture:
            for number in range(1, 121):
                data = torch.add(data, 1)
                assert data[0].item() == number
                if number % 15 == 0:
                    capture.step()
        found = 0
        for dump in ulpscope.open_run(tmp_path / "run") if (tmp_path / "run").exists() else []:
            for call in dump.ids():
                if call.name == "add":
                    found += 1
                    output = dump.call(call).values[-1]
                    assert output.stats.max == output.stats.min == float(found)
                    if tensors and not dump.missing:
                        try:
                            assert dump.load(output)[-1] == float(found)
                        except UlpscopeError:
                            assert heard.words, "lost without a word"
        (told / "words").write_text("\n".join([str(found), *heard.words]))

    assert in_fork(child) == 0
    if (told / "cannot").exists():
        pytest.skip((told / "cannot").read_text())
    found, *words = (told / "words").read_text().splitlines()
    assert len(words) <= 1, words
    assert words or found == "120"
    if size == "90m" and not tensors:
        assert not words


# --- places -----------------------------------------------------------------------------------------------------

PLACES: dict[str, list[str]] = {
    "path_space": ["my dump"],
    "path_punct": ["lr=1e-4,bs=8+run@2(%1)#~"],
    "path_evil": ["-a'\"\\b\nc", "x;rm -rf $HOME", "\u202eünï✓"],
    "path_long": ["/".join(["d" * 200] * 25), "n" * 250, "n" * 256],
}
EITHER = {"path_evil", "path_long"}


def native(path: Path) -> None:
    with ulpscope.capture(path):
        torch.sin(X)


def msprobe(path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=str(path), task="tensor", level="L1")
    try:
        debugger.start()
        torch.sin(X)
        debugger.stop()
        debugger.step()
    finally:
        debugger._close()


WAYS = {"native": native, "msprobe": msprobe}
ways = pytest.mark.parametrize("way", WAYS)


@ways
@pytest.mark.parametrize(("case", "name"), [(case, name) for case, names in PLACES.items() for name in names])
def test_a_folder_of_any_name_works_or_is_refused_clearly(case: str, name: str, way: str, tmp_path: Path) -> None:
    try:
        WAYS[way](tmp_path / name)
    except UlpscopeError as error:
        assert case in EITHER and "cannot write into" in str(error)
        return
    calls = ulpscope.open_dump(tmp_path / name).ids()
    assert [call.name for call in calls] == ["sin"]


@case("path_dangling")
@ways
@pytest.mark.parametrize("kind", ["dangling", "file", "loop"])
def test_a_folder_that_is_something_else_is_a_clear_error(kind: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / "place"
    if kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "nowhere" / "deep")
    with pytest.raises(UlpscopeError, match=r"cannot write into|is no folder|exists"):
        WAYS[way](path)
    assert kind != "file" or path.read_text() == "mine"


@case("readonly_dir")
@ways
@pytest.mark.parametrize("place", ["/proc/ulpscope-run", "/sys/ulpscope-run", "/dev/full", "/dev/null/x"])
def test_a_read_only_place_is_a_clear_error_at_start(place: str, way: str) -> None:
    with pytest.raises(UlpscopeError, match=r"cannot write into|is no folder|exists"):
        WAYS[way](Path(place))
    assert torch._C._len_torch_function_stack() == 0


@case("no_write_perm")
@ways
def test_a_folder_of_somebody_else_is_a_clear_error(way: str, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs to become another user")
    tmp_path.chmod(0o755)
    (tmp_path / "theirs").mkdir(mode=0o755)

    def child() -> None:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with pytest.raises(CaptureError, match=r"cannot write into.*Permission denied"):
            WAYS[way](tmp_path / "theirs" / "run")

    assert in_fork(child) == 0


@case("perms")
@ways
def test_nothing_in_a_dump_is_writable_by_others(way: str, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        WAYS[way](tmp_path / "run")
    finally:
        os.umask(before)
    loose = stat.S_IWGRP | stat.S_IWOTH
    found = [path for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")) if path.stat().st_mode & loose]
    assert found == []


@case("symlink_attack")
@ways
@pytest.mark.parametrize("name", ["dump.json", "manifest.json", "journal.ring", "stack.json", "."])
def test_a_planted_link_is_never_written_through(name: str, way: str, tmp_path: Path) -> None:
    victims = tmp_path / "victims"
    victims.mkdir()
    (victims / "file").write_text("precious")
    rank = tmp_path / "run" / "step0" / "rank0"
    rank.parent.mkdir(parents=True)
    if name == ".":
        rank.symlink_to(victims)
    else:
        rank.mkdir()
        (rank / name).symlink_to(victims / "file")
    try:
        WAYS[way](tmp_path / "run")
    except UlpscopeError:
        pass
    assert (victims / "file").read_text() == "precious"
    assert [path.name for path in victims.iterdir()] == ["file"]
