"""Every call that computes leaves a record: with exceptions, threads, forks and windows around it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ulpscope
from integration.runs import LEVELS, assert_same, frozen, seed, whole_dumps
from integration.test_threads_and_forks import in_fork, in_threads
from ulpscope.compat.msprobe.debugger import PrecisionDebugger
from ulpscope.model.names import call_text
from ulpscope.store import writer

PROMISE = "nothing is lost"
case = pytest.mark.case
levels = pytest.mark.parametrize("level", LEVELS)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def forward_names(dump: ulpscope.Dump) -> Counter[str]:
    return Counter(call.name for call in dump.ids() if call.phase.value == "forward")


def shown(dump: ulpscope.Dump, call: Any, role: str) -> list[Any]:
    return [dump.load(value) for value in call.values if value.slot.role.value == role and value.is_tensor]


X = torch.ones(2, 2)
# What a typical script computes with, and the name under which it must be found.
COMPUTING: dict[str, Any] = {
    "__getitem__": lambda: X[0],
    "__neg__": lambda: -X,
    "fft_fft": lambda: torch.fft.fft(X),
    "special_erf": lambda: torch.special.erf(X),
    "rms_norm": lambda: F.rms_norm(X, (2,)),
    "zeros": lambda: torch.zeros(2),
    "rand": lambda: torch.rand(2),
    "randn_like": lambda: torch.randn_like(X),
    "relu.default": lambda: torch.ops.aten.relu.default(X),
    "_foreach_add": lambda: torch._foreach_add([X], 1),
    "clone": lambda: X.clone(),
    "copy_": lambda: torch.empty(2, 2).copy_(X),
    "type": lambda: X.type(torch.float64),
    "contiguous": lambda: X.t().contiguous(),
    "to": lambda: X.to(torch.float16),
    "linalg_inv": lambda: torch.linalg.inv(torch.eye(2)),
    "einsum": lambda: torch.einsum("ij,jk", X, X),
    "where": lambda: torch.where(X > 0, X, 0),
    "__gt__": lambda: X > 0,
    "item": lambda: X.sum().item(),
    "arange": lambda: torch.arange(3),
    "tensor": lambda: torch.tensor([1.0]),
    "masked_fill": lambda: X.masked_fill(X > 0, 1),
    "scatter_add": lambda: X.scatter_add(0, torch.zeros(2, 2, dtype=torch.long), X),
    "__matmul__": lambda: X @ X,
    "__iadd__": lambda: exec("y = x.clone()\ny += 1", {"x": X}),
    "conv1d": lambda: F.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 2)),
    "float": lambda: X.float(),
    "__setitem__": lambda: torch.zeros(2).__setitem__(0, 1.0),
}


@case("api_coverage")
@pytest.mark.parametrize("name", COMPUTING)
def test_what_computes_leaves_a_record(name: str, tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path, level="op"):
        COMPUTING[name]()
    found = {call.name for call in ulpscope.open_dump(tmp_path).ids()}
    assert any(each == name or each.endswith(name) for each in found), found


@case("api_exception")
@levels
def test_calls_after_a_caught_error_are_recorded(level: str, tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    with ulpscope.capture(tmp_path, level=level):
        for _ in range(3):
            try:
                torch.matmul(torch.ones(2, 3), torch.ones(2, 3))
            except RuntimeError:
                pass
            layer(torch.ones(1, 4)).sigmoid()
    (dump,) = whole_dumps(tmp_path, 1)
    count = forward_names(dump)
    if level == "module":
        assert count["Linear"] == 3
    else:
        assert (count["linear"], count["sigmoid"], count["matmul"]) == (3, 3, 3)


class OutOfMemoryOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fails = nn.Linear(4, 4), True

    def forward(self, data: Tensor) -> Tensor:
        data = self.inner(data)
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("no room")
        return data


@case("module_exception")
@levels
def test_the_forward_after_a_caught_one_has_its_own_place(level: str, tmp_path: Path) -> None:
    model = nn.Sequential(OutOfMemoryOnce(), nn.Tanh())
    with ulpscope.capture(tmp_path, model=model, level=level):
        for _ in range(2):
            try:
                model(torch.ones(1, 4))
            except torch.OutOfMemoryError:
                pass
    (dump,) = whole_dumps(tmp_path, 1)
    if level == "op":
        assert forward_names(dump)["linear"] == 2
        return
    second = dump.call("Module.Sequential.forward.1")
    assert second.parent is None and second.error is None
    assert dump.parent(dump.call("Module.0.OutOfMemoryOnce.forward.1")) == second.id
    assert "no room" in str(dump.call("Module.0.OutOfMemoryOnce.forward.0").error)


@case("keyboard_interrupt")
@levels
def test_an_interrupt_passes_and_stop_still_writes(level: str, tmp_path: Path) -> None:
    class Interrupted(nn.Module):
        def forward(self, data: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(4, 4), Interrupted())
    capture = ulpscope.Capture(tmp_path, model=model, level=level).start()
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4))
    capture.stop()
    (dump,) = whole_dumps(tmp_path, 1)
    assert forward_names(dump)["linear" if level == "op" else "0.Linear"] == 1
    capture.close()


@case("threads_same_model")
@levels
def test_threads_through_one_model_lose_and_mix_nothing(level: str, tmp_path: Path) -> None:
    def results() -> list[Any]:
        seed()
        model, found = net(), [None] * 8

        def work(number: int) -> None:
            for turn in range(5):
                out = model(torch.full((1, 4), 1.0 + number + turn / 8))
                found[number] = frozen([out, torch.autograd.grad(out.sum(), list(model.parameters()))])

        in_threads(work)
        return found

    bare = results()
    with ulpscope.capture(tmp_path, level=level, tensors=True):
        captured = results()
    assert_same(bare, captured)
    (dump,) = whole_dumps(tmp_path, 1)
    calls = [call for call in dump.calls() if call.id.name.endswith("tanh" if level == "op" else "Tanh")]
    assert Counter(call.id.phase.value for call in calls) == {"forward": 40, "backward": 40}
    for call in calls:
        if call.id.phase.value == "forward":
            (given,), (got,) = shown(dump, call, "input"), shown(dump, call, "output")
            assert np.allclose(got, np.tanh(given), rtol=1e-6)


@case("threads_api")
@levels
def test_a_record_pairs_the_input_and_the_output_of_one_call(level: str, tmp_path: Path) -> None:
    identity = nn.Identity()

    def work(number: int) -> None:
        for turn in range(50):
            identity(torch.full((3,), float(number * 100 + turn)) * 2)

    with ulpscope.capture(tmp_path, level=level, tensors=True):
        in_threads(work, 4)
    (dump,) = whole_dumps(tmp_path, 1)
    calls = [call for call in dump.calls() if call.id.name == ("Identity" if level == "module" else "__mul__")]
    assert len(calls) == 200
    for call in calls:
        (given, *_), (got,) = shown(dump, call, "input"), shown(dump, call, "output")
        assert np.array_equal(got, given if level == "module" else given * 2)


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> Tensor:
        return torch.full((2,), float(at)) + torch.rand(2)


@case("dataloader_fork")
@levels
def test_forked_workers_give_the_same_batches(level: str, tmp_path: Path) -> None:
    def loader() -> DataLoader[Tensor]:
        return DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork", shuffle=True)

    def batches(each: Any) -> list[Any]:
        return [frozen(batch) for batch in each]

    seed()
    bare = [batches(loader()), batches(loader())]
    seed()
    before = loader()
    with ulpscope.capture(tmp_path, level=level):
        captured = [batches(before), batches(loader())]
        nn.Identity()(torch.ones(1))
    assert_same(bare, captured)
    (dump,) = whole_dumps(tmp_path, 1)
    assert "rand" not in forward_names(dump)


@case("fork_while_locked")
def test_a_fork_while_other_threads_record_does_not_hang(tmp_path: Path) -> None:
    over = threading.Event()

    def record() -> None:
        while not over.is_set():
            torch.ones(64) + 1

    def child() -> None:
        model = net()
        model(torch.ones(1, 4)).sum().backward()

    with ulpscope.capture(tmp_path, level="mix", tensors=True):
        threads = [threading.Thread(target=record) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            codes = [in_fork(child) for _ in range(12)]
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert codes == [0] * 12


@case("fork_child_training")
@levels
def test_a_forked_child_that_starts_is_recorded_in_a_folder_of_its_own(level: str, tmp_path: Path) -> None:
    model = net()
    capture = ulpscope.Capture(tmp_path, model=model, level=level)

    def child() -> None:
        capture.start()
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            capture.step()
        capture.close()

    assert in_fork(child) == 0
    assert len(whole_dumps(tmp_path, 3)[0]) > 0
    capture.start()
    model(torch.ones(1, 4)).sum().backward()
    capture.close()
    own = [dump for dump in ulpscope.open_run(tmp_path) if dump.manifest.environment["pid"] == os.getpid()]
    assert [dump.ending for dump in own] == ["complete"]


@case("fork_child_training")
def test_a_forked_child_of_an_older_tool_that_starts_leaves_the_files_of_its_parent(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(dump_path=str(tmp_path), task="statistics", level="L1")
    written, writing = os.pipe()

    def one_step(call: Any) -> None:
        debugger.start()
        call(torch.ones(2))
        debugger.stop()
        debugger.step()

    child = os.fork()
    if not child:
        code = 1
        try:
            os.read(written, 1)
            one_step(torch.sin)
            debugger._close()
            code = 0
        finally:
            os._exit(code)
    one_step(torch.cos)
    os.write(writing, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    debugger._close()
    dumps = ulpscope.open_run(tmp_path)
    assert sorted(names(dump)[-1] for dump in dumps) == ["Torch.cos.0.forward", "Torch.sin.0.forward"]


def names(dump: ulpscope.Dump) -> list[str]:
    return [call_text(call) for call in dump.ids()]


@case("stop_before_backward")
@levels
def test_a_backward_after_stop_is_said(level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = net()
    capture = ulpscope.Capture(tmp_path, model=model, level=level).start()
    loss = model(torch.ones(1, 4)).sum()
    capture.stop()
    loss.backward()
    capture.step()
    capture.close()
    (dump,) = whole_dumps(tmp_path, 1)
    assert any("after stop()" in note for note in dump.manifest.notes)
    assert "after stop()" in caplog.text


@case("call_larger_than_queue")
def test_a_call_that_is_larger_than_a_small_queue_is_recorded_as_with_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [torch.full((300,), float(number)) for number in range(1000)]

    def recorded(name: str, size: int) -> tuple[list[float], list[Any]]:
        monkeypatch.setattr(writer, "JOURNAL_BYTES", size)
        with ulpscope.capture(tmp_path / name, tensors=True, queue_mb=1):
            result = torch.cat(parts)
        (dump,) = whole_dumps(tmp_path / name, 1)
        (call,) = dump.calls()
        return result.tolist(), [
            (value.stats, dump.sketch(value).tobytes()) for value in call.values if value.is_tensor
        ]

    bare = torch.cat(parts).tolist()
    large, small = recorded("large", 8 << 20), recorded("small", 64 << 10)
    assert large == small and len(large[1]) == 1001 and large[0] == bare
