"""What processes do: become daemons, other programs and other users; run out of threads, memory and descriptors."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ulpscope
from integration.runs import LEVELS, whole_dumps
from integration.test_threads_and_forks import in_fork
from torture.faults import Heard
from torture.killing import check, killed
from ulpscope.model.errors import CaptureError

PROMISE = "nothing is lost"
case = pytest.mark.case
NOBODY = 65534
X = torch.ones(4)


@pytest.fixture(scope="module", autouse=True)
def warmed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What torch imports at the first kernel is imported here, not in each of the forks."""
    with ulpscope.capture(tmp_path_factory.mktemp("warm") / "run", level="kernel"):
        torch.add(X, 1)


def sines(path: Path, count: int = 3, **options: Any) -> None:
    with ulpscope.capture(path, **options) as capture:
        for _ in range(count):
            torch.sin(X)
            capture.step()


def names(path: Path, copy: str = "rank0") -> list[str]:
    return [call.name for dump in ulpscope.open_run(path) if dump.folder.name == copy for call in dump.ids()]


def deleted_folder(path: Path) -> None:
    gone = path.parent / "gone"
    gone.mkdir()
    os.chdir(gone)
    shutil.rmtree(gone)
    with pytest.raises(CaptureError, match=r"working folder of the program was deleted; give an absolute path"):
        ulpscope.Capture("run").start()
    sines(path)


def linked_folder(path: Path) -> None:
    (path.parent / "real").mkdir()
    path.symlink_to("real")
    sines(path)


def closed_streams(path: Path) -> None:
    for number in (0, 1, 2):
        os.close(number)
    with ulpscope.capture(path, tensors=True) as capture:
        for _ in range(3):
            torch.sin(X)
            for number in (0, 1, 2):
                try:
                    os.write(number, b"junk" * 1000)
                except OSError:
                    pass
            capture.step()


def without_streams(path: Path) -> None:
    sys.stdout = sys.stderr = sys.stdin = None  # type: ignore[assignment]
    sines(path)


def clock_of_its_own(path: Path) -> None:
    """What a test of the program's does to the clock: it stands still, or goes backwards, and nobody sleeps."""
    moments = iter(range(10**9, 0, -1))
    time.time = time.monotonic = time.perf_counter = lambda: float(next(moments))  # type: ignore[assignment]
    time.sleep = lambda seconds: None  # type: ignore[assignment]
    sines(path, tensors=True)


def other_program(path: Path) -> None:
    capture = ulpscope.Capture(path).start()
    for _ in range(3):
        torch.sin(X)
    os.execv(sys.executable, [sys.executable, "-S", "-c", "pass"])
    capture.close()


def children_of_children(path: Path) -> None:
    """A child that calls everything there is to call does nothing to the dump of its parent, and inherits no file of it."""
    with ulpscope.capture(path) as capture:
        for _ in range(3):
            torch.sin(X)
            child = os.fork()
            if not child:
                for _ in range(3):
                    torch.cos(X)
                capture.step(), capture.stop(), capture.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            opened = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True).stdout
            assert str(path) not in opened
            capture.step()


def fork_inside_a_call(path: Path) -> None:
    class Forks(nn.Module):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            child = os.fork()
            if not child:
                torch.cos(data)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            return torch.sin(data)

    with ulpscope.capture(path, level="op") as capture:
        for _ in range(3):
            Forks()(X)
            capture.step()


def no_threads(path: Path) -> None:
    os.setresuid(NOBODY, NOBODY, NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    with pytest.raises(RuntimeError):
        threading.Thread(target=print).start()
    sines(path, tensors=True, queue_mb=1)


def stopped_and_continued(path: Path) -> None:
    parent = os.getpid()
    waker = os.fork()
    if not waker:
        for _ in range(3):
            time.sleep(0.02)
            os.kill(parent, signal.SIGSTOP)
            time.sleep(0.02)
            os.kill(parent, signal.SIGCONT)
        os._exit(0)
    with ulpscope.capture(path) as capture:
        for _ in range(3):
            torch.sin(X)
            time.sleep(0.04)
            capture.step()
    os.waitpid(waker, 0)


def many_small_switches(path: Path) -> None:
    sys.setswitchinterval(1e-6)
    sys.setrecursionlimit(sys.getrecursionlimit() // 2)
    over = threading.Event()
    thread = threading.Thread(target=lambda: [X + 1 for _ in iter(over.is_set, True)], daemon=True)
    thread.start()
    sines(path)
    over.set()


LIVES: dict[str, Callable[[Path], None]] = {
    "process: working folder deleted": deleted_folder,
    "process: folder is a link": linked_folder,
    "process: standard streams closed": closed_streams,
    "process: standard streams None": without_streams,
    "process: a clock of its own": clock_of_its_own,
    "process: becomes another program": other_program,
    "process: children of children": children_of_children,
    "process: fork inside a call": fork_inside_a_call,
    "process: no thread to be had": no_threads,
    "process: stopped and continued": stopped_and_continued,
    "process: switches all the time": many_small_switches,
}


@pytest.mark.parametrize("case", LIVES)
def test_the_calls_are_there_and_the_process_lived_its_life(case: str, tmp_path: Path) -> None:
    if "no thread" in case and os.getuid() != 0:
        pytest.skip("needs to become another user")
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if folder.name.startswith(("pytest-", "popen-")):  # its own, which only root may enter
            folder.chmod(0o755)
    assert in_fork(lambda: LIVES[case](tmp_path / "run")) == 0
    assert [name for name in names(tmp_path / "run") if name != "__add__"] == ["sin"] * 3


LIMITS: dict[str, Callable[[], Any]] = {
    "limit: address space": lambda: resource.setrlimit(resource.RLIMIT_AS, (_mapped() + (2 << 20), resource.RLIM_INFINITY)),
    "limit: descriptors": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4)),
    "limit: size of a file": lambda: (
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    ),
}  # fmt: skip


def _mapped() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@pytest.mark.parametrize("case", LIMITS)
@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "statistics"])
def test_a_capture_without_room_says_one_word_and_the_program_goes_on(case: str, tensors: bool, tmp_path: Path) -> None:
    sines(tmp_path / "warm", tensors=tensors)

    def child() -> None:
        LIMITS[case]()
        heard = Heard()
        with ulpscope.capture(tmp_path / "run", tensors=tensors) as capture:
            for _ in range(3):
                assert torch.sin(X).tolist() == bare
                capture.save("mine", X)
                capture.step()
        assert len(heard.words) <= 1
        assert "he program goes on" in heard.words[0] if heard.words else names(tmp_path / "run").count("sin") == 3
        assert torch._C._len_torch_function_stack() == 0

    bare = torch.sin(X).tolist()
    assert in_fork(child) == 0


@pytest.mark.parametrize("case", LIMITS)
def test_whoever_asks_for_it_is_refused_where_there_is_no_room(case: str, tmp_path: Path) -> None:
    sines(tmp_path / "warm")

    def child() -> None:
        LIMITS[case]()
        with pytest.raises(CaptureError, match=r"cannot (write|look|reserve)"):
            ulpscope.Capture(tmp_path / "run", strict=True).start()
        assert torch._C._len_torch_function_stack() == 0

    assert in_fork(child) == 0
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


@case("process: ended by any signal")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGXCPU, signal.SIGBUS])
def test_calls_before_any_signal_are_there(how: signal.Signals, level: str, tmp_path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    check(tmp_path / "run", level, killed(tmp_path / "run", level, int(how), how=how))


@case("process: two with one folder")
def test_two_processes_of_one_rank_do_not_mix(tmp_path: Path) -> None:
    """Whoever comes second is refused; its program goes on."""

    def child(number: int) -> None:
        try:
            with ulpscope.capture(tmp_path / "run") as capture:
                for _ in range(20):
                    torch.full((3,), float(number)).sin()
                    capture.step()
        except CaptureError as error:
            assert "never mixed with a new one" in str(error)
            os._exit(3)

    children = []
    for number in range(4):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                child(number)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)
    assert set(codes) <= {0, 3} and 0 in codes
    for dump in ulpscope.open_run(tmp_path / "run"):
        assert dump.ending == "complete"
        (made, sine) = list(dump.calls())
        assert made.values[-1].stats == sine.values[0].stats


@case("process: folder moved away")
@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "statistics"])
def test_a_run_that_is_moved_away_is_whole_where_it_went(tensors: bool, tmp_path: Path) -> None:
    def child() -> None:
        with ulpscope.capture(tmp_path / "run", tensors=tensors) as capture:
            torch.sin(X)
            (tmp_path / "run").rename(tmp_path / "elsewhere")
            torch.sin(X)
            capture.step()
            torch.sin(X)
            capture.step()

    assert in_fork(child) == 0
    (dump,) = ulpscope.open_run(tmp_path / "elsewhere")
    assert [call.name for call in dump.ids()] == ["sin", "sin"]


PROGRAM = """
import atexit, sys, threading, time, warnings
import torch, ulpscope
capture = ulpscope.Capture(sys.argv[1], level="mix", tensors=True)
atexit.register(lambda: print("before", torch.ones(2).sum().item()))
capture.start()
atexit.register(lambda: print("after", torch.ones(2).sum().item()))
class Ünïcode(torch.nn.Module):
    def forward(self, data):
        return data.sin()
def work():
    torch.ones(2).cos()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
Ünïcode()(torch.ones(2, requires_grad=True)).sum().backward()
time.sleep(0.2)
assert not __debug__
"""


@pytest.mark.slow
@case("process: -O, -X dev, -W error, C locale, daemons at exit")
def test_a_strict_interpreter_in_a_poor_locale(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    ended = subprocess.run(
        # What torch itself warns of while it is imported is no business of ours.
        [sys.executable, "-O", "-X", "dev", "-W", "error", "-W", "ignore:::torch", "program.py", "run"],
        cwd=tmp_path, env=environment, capture_output=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == b"after 2.0\nbefore 2.0\n"
    assert b"ulpscope" not in ended.stderr and b"Warning" not in ended.stderr, ended.stderr[-2000:]
    (dump,) = whole_dumps(tmp_path / "run", 1)
    assert "Ünïcode" in {call.name for call in dump.ids()}


STARTS_NOTHING = """
import platform, subprocess, sys, torch, ulpscope
def refuse(*args, **kwargs): raise AssertionError(f"a process was started: {args}")
real, subprocess.Popen = subprocess.Popen, refuse
with ulpscope.capture(sys.argv[1], model=torch.nn.Linear(2, 2)): torch.ones(2).sin()
subprocess.Popen = real
assert ulpscope.open_dump(sys.argv[1]).manifest.environment["host"]["system"] == platform.platform()
"""


@case("process: starts no other")
def test_a_capture_starts_no_process(tmp_path: Path) -> None:
    """A fork costs a process with a device in it much, and an exception in the middle of it leaves descriptors behind."""
    done = subprocess.run([sys.executable, "-c", STARTS_NOTHING, tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
