"""Threads share one capture and never mix their calls; a forked child has a dump of its own, and never touches its parent's."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ulpscope
from integration.runs import LEVELS, assert_same, frozen, seed, whole_dumps
from torture.faults import Heard
from ulpscope.model.records import CallRecord

THREADS = 8
ROUNDS = 5


class Scale(nn.Module):
    """Multiplies by two in a way that takes several calls."""

    def forward(self, data: Tensor) -> Tensor:
        return (data + data) * 1.0


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale()

    def forward(self, data: Tensor) -> Tensor:
        return self.inner(self.inner(data))


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Runs `work(number)` in threads that begin together; the first exception is raised here."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            barrier.wait(30)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def loaded(dump: ulpscope.Dump, call: CallRecord, role: str) -> list[Any]:
    return [dump.load(value) for value in call.values if value.slot.role.value == role and value.is_tensor]


@pytest.mark.parametrize("level", LEVELS)
def test_eight_threads_through_one_model_never_mix_their_calls(level: str, tmp_path: Path) -> None:
    model = Nested()

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            data = torch.full((3,), float(1 + number * ROUNDS + turn), requires_grad=True)
            out = model(data)
            (grad,) = torch.autograd.grad(out.sum(), data)
            assert out[0].item() == 4 * data[0].item()
            assert grad.tolist() == [4.0] * 3

    with ulpscope.capture(tmp_path / "run", model=model, level=level, tensors=True):
        in_threads(work)
    (dump,) = whole_dumps(tmp_path / "run", 1)
    calls = list(dump.calls())
    by_seq = {call.seq: call for call in calls}
    for call in calls:
        assert any(value.slot.role.value == "output" for value in call.values), call.id
        if call.parent is not None and call.id.phase.value == "forward":
            assert by_seq[call.parent].thread == call.thread
    if level != "op":
        outer = [call for call in calls if call.id.name == "Nested" and call.id.phase.value == "forward"]
        assert len(outer) == THREADS * ROUNDS
        assert len({call.thread for call in outer}) == THREADS
        starts = []
        for call in outer:
            ((given,), (got,)) = loaded(dump, call, "input"), loaded(dump, call, "output")
            assert np.array_equal(got, given * 4)
            starts.append(float(given[0]))
            inside = [other for other in calls if other.parent == call.seq and other.id.kind == "Module"]
            assert [
                float(loaded(dump, other, "input")[0][0]) for other in inside if other.id.phase.value == "forward"
            ] == [
                starts[-1],
                starts[-1] * 2,
            ]
        assert sorted(starts) == [1.0 + number for number in range(THREADS * ROUNDS)]
        backward = [call for call in calls if call.id.name == "Nested" and call.id.phase.value == "backward"]
        assert len(backward) == THREADS * ROUNDS
        for call in backward:
            assert by_seq[call.origin].thread == call.thread
    if level != "module":
        sums = [call for call in calls if call.id.name == "__add__" and call.id.phase.value == "forward"]
        assert len(sums) == 2 * THREADS * ROUNDS
        for call in sums:
            (left, right), (total,) = loaded(dump, call, "input"), loaded(dump, call, "output")
            assert np.array_equal(left, right) and np.array_equal(total, left * 2)


@pytest.mark.parametrize("level", LEVELS)
def test_threads_change_no_number(level: str, tmp_path: Path) -> None:
    def results() -> list[Any]:
        seed()
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        found: list[Any] = [None] * THREADS

        def work(number: int) -> None:
            data = torch.linspace(-1, 1, 12).reshape(3, 4) * (number + 1)
            out = model(data)
            found[number] = frozen([out, torch.autograd.grad(out.square().sum(), list(model.parameters()))])

        in_threads(work)
        return found

    bare = results()
    with ulpscope.capture(tmp_path / "run", level=level):
        captured = results()
    assert_same(bare, captured)
    whole_dumps(tmp_path / "run", 1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_thread_older_than_the_capture_is_recorded_when_it_calls_a_module(level: str, tmp_path: Path) -> None:
    model = Scale()
    begin, done = threading.Event(), threading.Event()

    def work() -> None:
        assert begin.wait(30)
        model(torch.ones(2))
        model(torch.ones(2)).cos()
        done.set()

    older = threading.Thread(target=work)
    older.start()
    with ulpscope.capture(tmp_path / "run", model=model, level=level):
        begin.set()
        assert done.wait(30)
        older.join()
    (dump,) = whole_dumps(tmp_path / "run", 1)
    names = [call.name for call in dump.ids() if call.phase.value == "forward"]
    if level != "op":
        assert names.count("Scale") == 2
    if level != "module":
        assert names.count("__add__") == 2
        assert names.count("cos") == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_thread_that_outlives_the_capture_is_left_without_modes(level: str, tmp_path: Path) -> None:
    recorded, over = threading.Event(), threading.Event()
    left: list[Any] = []

    def work() -> None:
        Scale()(torch.ones(2))
        recorded.set()
        assert over.wait(30)
        out = Scale()(torch.ones(2))
        left.extend([out.tolist(), torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()])

    with ulpscope.capture(tmp_path / "run", level=level):
        thread = threading.Thread(target=work)
        thread.start()
        assert recorded.wait(30)
    over.set()
    thread.join(30)
    assert left[0] == [2.0, 2.0]
    (dump,) = whole_dumps(tmp_path / "run", 1)
    assert sum(call.name == "Scale" for call in dump.ids()) == (0 if level == "op" else 1)


def test_a_thread_of_an_earlier_capture_is_recorded_by_a_later_one(tmp_path: Path) -> None:
    turn = [threading.Event() for _ in range(3)]

    def work() -> None:
        for event in turn:
            assert event.wait(30)
            event.clear()
            torch.ones(1).cos()
            Scale()(torch.ones(1))
            done.set()

    done = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    for number, event in enumerate(turn):
        with ulpscope.capture(tmp_path / f"run{number}", level="mix"):
            event.set()
            assert done.wait(30)
            done.clear()
    thread.join(30)
    for number in range(3):
        names = [call.name for call in ulpscope.open_dump(tmp_path / f"run{number}").ids()]
        assert names.count("Scale") == 1
        assert names.count("__add__") == 1


def test_calls_of_a_thread_pool_and_of_backward_threads_are_recorded(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ulpscope.capture(tmp_path / "run", level="op"), ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda number: torch.full((2,), float(number)).exp().sum().item(), range(6)))
    assert len(results) == 6
    (dump,) = whole_dumps(tmp_path / "run", 1)
    assert sum(call.name == "exp" for call in dump.ids()) == 6


def test_steps_may_end_while_threads_are_working(tmp_path: Path) -> None:
    model = Nested()
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                data = torch.ones(2, requires_grad=True)
                torch.autograd.grad(model(data).sum(), data)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    with ulpscope.capture(tmp_path / "run", model=model, level="mix", tensors=True) as cap:
        for thread in threads:
            thread.start()
        for _ in range(10):
            model(torch.ones(2))
            cap.step()
        stop.set()
        for thread in threads:
            thread.join(30)
    assert errors == []
    for dump in ulpscope.open_run(tmp_path / "run"):
        assert dump.ending == "complete"
        for call in dump.calls():
            for value in call.values:
                if value.payload is not None:
                    dump.load(value)


# --- processes --------------------------------------------------------------------------------------------------


class Squares(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> Tensor:
        return torch.tensor([float(at)]).square() + torch.rand(1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_data_loader_with_forked_workers_gives_the_same_batches(level: str, tmp_path: Path) -> None:
    def batches() -> list[Any]:
        seed()
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, shuffle=True, multiprocessing_context="fork")
        return [frozen(batch) for batch in loader]

    bare = batches()
    with ulpscope.capture(tmp_path / "run", level=level):
        torch.ones(1).cos()
        nn.Identity()(torch.ones(1))
        captured = batches()
        torch.ones(1).sin()
    assert_same(bare, captured)
    (dump,) = whole_dumps(tmp_path / "run", 1)
    assert not any(call.name in ("square", "rand") for call in dump.ids())
    assert len(list((tmp_path / "run").rglob("manifest.json"))) == 1


def in_fork(work: Callable[[], None]) -> int:
    """Runs `work` in a child made by os.fork and returns its exit code; a child that hangs is ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        threading.Event().wait(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


def train(model: nn.Module, steps: int = 50) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def of_this_process(run: Path) -> list[ulpscope.Dump]:
    """The dumps of this process, each complete; those of its children are another's."""
    own = [dump for dump in ulpscope.open_run(run) if dump.manifest.environment["pid"] == os.getpid()]
    assert [dump.ending for dump in own] == ["complete"] * len(own)
    return own


@pytest.mark.parametrize("level", LEVELS)
def test_a_forked_child_that_trains_on_is_recorded_in_a_folder_of_its_own(level: str, tmp_path: Path) -> None:
    seed()
    bare = nn.Linear(3, 3)
    seed()
    model = nn.Linear(3, 3)
    train(bare, 22)

    def child() -> None:
        train(model, 20)
        assert_same(frozen(list(bare.parameters())), frozen(list(model.parameters())))

    with ulpscope.capture(tmp_path / "run", model=model, level=level, tensors=True):
        train(model, 2)
        assert in_fork(child) == 0
        model(torch.ones(2, 3)).cos()
    (dump,) = of_this_process(tmp_path / "run")
    (other,) = [each for each in ulpscope.open_run(tmp_path / "run") if each.folder != dump.folder]
    assert (dump.folder.name, other.folder.name) == ("rank0", "rank0.1")
    expected = "linear" if level == "op" else "Linear"
    for each, times in ((dump, 3), (other, 20)):
        assert [call.name for call in each.ids() if call.phase.value == "forward"].count(expected) == times
        assert all(call.error is None for call in each.calls())


def test_a_forked_child_that_calls_nothing_leaves_nothing(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path / "run"):
        assert in_fork(lambda: None) == 0
        torch.ones(1).cos()
    assert len(list((tmp_path / "run").rglob("manifest.json"))) == 1


def test_children_of_multiprocessing_end_their_dumps(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path / "run"):
        children = [
            multiprocessing.get_context("fork").Process(target=torch.sin, args=(torch.ones(n),)) for n in (5, 6)
        ]
        for each in children:
            each.start()
        for each in children:
            each.join(60)
        torch.ones(1).cos()
    found = {dump.folder.name: dump for dump in ulpscope.open_run(tmp_path / "run")}
    assert sorted(found) == ["rank0", "rank0.1", "rank0.2"]
    assert [dump.ending for dump in found.values()] == ["complete"] * 3
    shapes = sorted(found[name].call("Torch.sin.0.forward").values[0].shape for name in ("rank0.1", "rank0.2"))
    assert shapes == [(5,), (6,)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_child_forked_inside_a_call_goes_on_without_a_trace_in_its_parents_dump(level: str, tmp_path: Path) -> None:
    """It returns through frames that were recording for its parent, while other threads of that one were at work."""
    children: list[int] = []

    class Forks(nn.Module):
        def forward(self, data: Tensor) -> Tensor:
            children.append(os.fork())
            return data.exp() if children[-1] else data.cos()

    model = Forks()
    stop = threading.Event()
    others = [threading.Thread(target=lambda: [torch.ones(64) + 1 for _ in iter(stop.is_set, True)]) for _ in range(2)]
    with ulpscope.capture(tmp_path / "run", model=model, level=level, tensors=True) as cap:
        for other in others:
            other.start()
        try:
            for _ in range(4):
                out = model(torch.full((2,), 2.0))
                if not children[-1]:
                    fine = out[0].item() < 0
                    torch.full((2,), 3.0).tan()
                    cap.step()
                    os._exit(0 if fine else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1]) == 0
        finally:
            stop.set()
            for other in others:
                other.join()
    (dump,) = of_this_process(tmp_path / "run")
    for call in dump.calls():
        assert call.error is None and call.id.name not in ("cos", "tan")
        if call.id.name in ("Forks", "exp") and call.id.phase.value == "forward":
            assert float(loaded(dump, call, "output")[0][0]) == float(torch.full((2,), 2.0).exp()[0])
    for each in ulpscope.open_run(tmp_path / "run"):
        if each.folder != dump.folder and level != "module":
            assert {"cos", "tan"} <= {call.name for call in each.ids()} or level == "kernel"
            assert each.ending == "complete"


def test_where_a_child_cannot_be_recorded_it_says_so_when_it_calls(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def child() -> None:
        heard = Heard()
        torch.ones(1).cos().cos()
        told.write_text("\n".join(heard.words))

    cap = ulpscope.Capture(tmp_path / "run")
    cap.on_dump = lambda folder, finished: None  # as the older tools do, whose files have one name for both
    cap.start()
    assert in_fork(child) == 0
    cap.close()
    assert "is a fork and is not recorded; call start() in it" in told.read_text()
    assert len(told.read_text().splitlines()) == 1
    assert len(list((tmp_path / "run").rglob("manifest.json"))) == 1


@pytest.mark.parametrize("ending", ["step", "stop", "close", "with block", "all"])
def test_a_forked_child_that_ends_its_parents_capture_leaves_the_dump_alone(ending: str, tmp_path: Path) -> None:
    """The child runs on through the same loop as its parent: cap.step(), cap.stop(), the end of the with block."""
    model = nn.Linear(3, 3)
    cap = ulpscope.Capture(tmp_path / "run", model=model, level="mix", tensors=True).start()
    train(model, 2)

    def child() -> None:
        train(model, 2)
        if ending in ("step", "all"):
            cap.step()
            train(model, 2)
            cap.step()
        if ending in ("stop", "all"):
            cap.stop()
        if ending in ("close", "all"):
            cap.close()
        if ending == "with block":
            cap.__exit__(None, None, None)

    assert in_fork(child) == 0
    model(torch.ones(2, 3)).cos()
    cap.step()
    model(torch.ones(2, 3)).sin()
    cap.close()
    first, second = of_this_process(tmp_path / "run")
    names = [call.name for call in first.ids() if call.phase.value == "forward"]
    assert names.count("Linear") == 3 and names.count("cos") == 1
    assert [call.name for call in second.ids() if call.phase.value == "forward"].count("sin") == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_forked_child_that_starts_itself_gets_a_folder_of_its_own(level: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    cap = ulpscope.Capture(tmp_path / "run", model=model, level=level).start()
    train(model, 2)

    def child() -> None:
        cap.start()
        train(model, 5)
        torch.ones(1).tan()
        nn.Identity()(torch.ones(1))
        cap.close()
        assert torch._C._len_torch_function_stack() == 0
        assert torch._C._len_torch_dispatch_stack() == 0

    assert in_fork(child) == 0
    model(torch.ones(2, 3))
    cap.close()
    dumps = whole_dumps(tmp_path / "run", 2)
    expected = "linear" if level == "op" else "Linear"
    counts = {
        dump.manifest.environment["pid"]: [call.name for call in dump.ids() if call.phase.value == "forward"].count(
            expected
        )
        for dump in dumps
    }
    assert counts.pop(os.getpid()) == 3
    assert list(counts.values()) == [5]


def test_a_child_that_starts_a_capture_of_its_own_elsewhere_may(tmp_path: Path) -> None:
    def child() -> None:
        with ulpscope.capture(tmp_path / "child", level="op"):
            torch.ones(1).cos()

    with ulpscope.capture(tmp_path / "parent", level="op"):
        torch.ones(1).sin()
        assert in_fork(child) == 0
    (parent,) = whole_dumps(tmp_path / "parent", 1)
    (of_child,) = whole_dumps(tmp_path / "child", 1)
    assert "cos" not in {call.name for call in parent.ids()}
    assert "cos" in {call.name for call in of_child.ids()}


def test_a_child_forked_while_other_threads_record_does_not_hang(tmp_path: Path) -> None:
    """Locks of the writer may be held at the moment of the fork; the child must never wait for one."""
    stop = threading.Event()

    def record() -> None:
        while not stop.is_set():
            torch.ones(64) + 1

    with ulpscope.capture(tmp_path / "run", level="op", tensors=True) as cap:
        threads = [threading.Thread(target=record) for _ in range(3)]
        for thread in threads:
            thread.start()

        def child() -> None:
            torch.ones(1).cos()
            cap.step()
            cap.stop()
            cap.close()

        try:
            codes = [in_fork(child) for _ in range(10)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert codes == [0] * 10
    (dump,) = of_this_process(tmp_path / "run")
    assert "cos" not in {call.name for call in dump.ids()}


def _spawned(path: str) -> None:
    with ulpscope.capture(path, level="op"):
        torch.ones(1).cos()


def test_a_spawned_child_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the child imports this file by its name
    with ulpscope.capture(tmp_path / "parent", level="op"):
        child = multiprocessing.get_context("spawn").Process(target=_spawned, args=(str(tmp_path / "child"),))
        child.start()
        child.join(60)
        torch.ones(1).sin()
    assert child.exitcode == 0
    whole_dumps(tmp_path / "parent", 1)
    whole_dumps(tmp_path / "child", 1)
