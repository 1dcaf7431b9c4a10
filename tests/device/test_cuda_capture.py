"""Captures of programs on a CUDA device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ulpscope
from ulpscope.model.dtypes import dtype_named
from ulpscope.model.records import Stats, Value
from ulpscope.native import measuring, taps

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Net(nn.Module):
    """Convolutions, attention, in-place writes, views, a reused weight: what a capture can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.shared = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.norm(self.conv(x)))
        x = x.flatten(2).transpose(1, 2)
        x, _ = self.attention(x, x, x)
        x = self.shared(self.shared(x)).mul_(0.5)
        x[:, 0] += 1.0
        return self.head(x.mean(1))


def train(capture: Any = None, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Two steps; everything that a capture must not change."""
    torch.manual_seed(0)
    model = Net().cuda().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = []
    for _ in range(2):
        if capture is not None:
            capture.start(model)
        data = torch.randn(8, 3, 24, 24, device="cuda", dtype=dtype)
        target = torch.randint(0, 10, (8,), device="cuda")
        output = model(data)
        loss = nn.functional.cross_entropy(output.float(), target)
        optimizer.zero_grad()
        loss.backward()
        kept += [output, loss, *(parameter.grad for parameter in model.parameters())]
        kept = [item.detach().clone() for item in kept if item is not None]
        optimizer.step()
        if capture is not None:
            capture.stop()
            capture.step()
    return [*kept, *(item.detach().clone() for item in model.state_dict().values())]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"level": "op"}, {"level": "mix", "checksum": True}, {"level": "kernel"}, {"level": "op", "tensors": True}],
    ids=str,
)
def test_results_are_the_same_bits_with_and_without_a_capture(
    tmp_path: Path, options: dict[str, Any], dtype: torch.dtype
) -> None:
    bare = train(dtype=dtype)
    capture = ulpscope.Capture(tmp_path / "run", **options)
    recorded = train(capture, dtype)
    capture.close()
    assert len(bare) == len(recorded)
    for left, right in zip(bare, recorded, strict=True):
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    assert len(ulpscope.open_dump(tmp_path / "run", step=1)) > 50


def check_value(dump: Any, value: Value) -> bool:
    """Whether the numbers of a stored tensor are those of its stored bits."""
    if value.payload is None or value.stats is None:
        return False
    dtype, raw, shape = dump.raw(value)
    held = np.frombuffer(raw, dtype=np.uint8)
    flags = measuring.STATS | measuring.CRC | measuring.SKETCH
    answer = measuring.measure(held.ctypes.data, dtype.code, shape, None, flags, 0, 0, 0)
    row = np.frombuffer(answer, dtype=measuring.ROW, count=1)[0]
    stats = value.stats
    assert isinstance(stats, Stats)
    assert value.checksum == row["crc"]
    counts = (stats.nan_count, stats.posinf_count, stats.neginf_count, stats.zero_count)
    assert counts == tuple(row[name] for name in ("nan", "posinf", "neginf", "zero"))
    if dtype_named(str(value.dtype)).name.startswith(("float", "bfloat")):
        assert np.float64(stats.finite_max).view(np.uint64) == row["max_bits"]
        assert np.float64(stats.finite_min).view(np.uint64) == row["min_bits"]
    assert stats.finite_norm == pytest.approx(row["norm"], rel=1e-6)
    return True


def test_every_row_says_what_the_stored_bits_say(tmp_path: Path) -> None:
    capture = ulpscope.Capture(tmp_path / "run", level="mix", tensors=True, checksum=True)
    train(capture)
    capture.close()
    for dump in ulpscope.open_run(tmp_path / "run"):
        seen = [check_value(dump, value) for call in dump.calls() for value in call.values if value.dtype is not None]
        assert sum(seen) > 300
        assert dump.manifest.state == "complete"


def values_of(dump: Any, name: str) -> list[Value]:
    return [value for call in dump.calls() if name in call.id.name for value in call.values if value.stats is not None]


def test_a_value_is_measured_before_it_is_overwritten(tmp_path: Path) -> None:
    x = torch.full((3_000_000,), 2.0, device="cuda")
    with ulpscope.capture(tmp_path / "run", level="op"):
        for _ in range(3):
            x.mul_(2.0)
    dump = ulpscope.open_dump(tmp_path / "run")
    assert [(value.stats.max, value.stats.min) for value in values_of(dump, "mul_")] == [
        (2.0, 2.0), (4.0, 4.0), (4.0, 4.0), (8.0, 8.0), (8.0, 8.0), (16.0, 16.0),
    ]  # fmt: skip


def test_other_streams_are_measured_in_their_own_order(tmp_path: Path) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(2_000_000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with ulpscope.capture(tmp_path / "run", level="op"):
        with torch.cuda.stream(side):
            y = x + 1
            y.mul_(3.0)
        torch.cuda.current_stream().wait_stream(side)
        torch.add(y, 1.0)
    dump = ulpscope.open_dump(tmp_path / "run")
    assert [value.stats.max for value in values_of(dump, "mul_")] == [2.0, 6.0]
    assert [value.stats.max for value in values_of(dump, "add")][-1] == 7.0


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("before", [True, False], ids=["a tensor before", "no tensor before"])
def test_a_graph_is_captured_and_replayed_as_without_us(tmp_path: Path, before: bool, checksum: bool) -> None:
    x = torch.ones(1000, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x * 2 + 1
    torch.cuda.synchronize()
    with ulpscope.capture(tmp_path / "run", level="op", checksum=checksum):
        if before:
            torch.sin(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2 + 1
        x.fill_(5.0)
        graph.replay()
        torch.cos(y)
    assert y.eq(11.0).all()
    dump = ulpscope.open_dump(tmp_path / "run")
    errors = {value.error for call in dump.calls() for value in call.values if value.error}
    assert any("CUDA graph" in error for error in errors)
    assert any("CUDA graph" in note for note in dump.manifest.notes)
    assert values_of(dump, "cos")[0].stats.max == 11.0


def test_the_device_gives_a_bounded_part_of_its_memory(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    x = torch.randn(4096, 2048, device="cuda")

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    bare = torch.cuda.max_memory_allocated()
    for options in ({"level": "op"}, {"level": "op", "tensors": True, "checksum": True}):
        capture = ulpscope.Capture(tmp_path / f"run{len(options)}", **options)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            capture.start(model)
            step()
            capture.stop()
            capture.step()
        capture.close()
        del capture
        assert torch.cuda.max_memory_allocated() - bare <= 256 << 20


KILLED = """
import os, signal, sys, torch, ulpscope
x = torch.ones(1000, device="cuda")
capture = ulpscope.Capture(sys.argv[1], level="op").start()
for _ in range(3000):
    x = x + 1
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_keeps_its_calls_and_says_which_are_not_measured(tmp_path: Path) -> None:
    path = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == -signal.SIGKILL
    dump = ulpscope.open_dump(tmp_path / "run")
    outputs = [call.values[-1] for call in dump.calls()]
    assert len(outputs) == 3000
    measured = [value.stats.max for value in outputs if value.stats is not None]
    assert measured == [float(number + 2) for number in range(len(measured))]
    assert len(measured) >= 500
    assert all("device" in (value.error or "") for value in outputs if value.stats is None)


def test_without_triton_the_rows_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ulpscope.frameworks.torch import cuda_gauge

    rows = []
    for number in range(2):
        if number:
            monkeypatch.setattr(cuda_gauge, "kernels", lambda: None)
        capture = ulpscope.Capture(tmp_path / f"run{number}", level="op", checksum=True)
        train(capture)
        capture.close()
        dump = ulpscope.open_dump(tmp_path / f"run{number}")
        rows.append([(value.checksum, value.stats) for call in dump.calls() for value in call.values])
    for (left_crc, left), (right_crc, right) in zip(*rows, strict=True):
        assert left_crc == right_crc
        if isinstance(left, Stats) and isinstance(right, Stats):
            assert (left.finite_max, left.finite_min, left.zero_count) == (
                right.finite_max,
                right.finite_min,
                right.zero_count,
            )
            assert left.finite_norm == pytest.approx(right.finite_norm, rel=1e-6)


def test_modules_are_measured_each_time_without_a_mode(tmp_path: Path) -> None:
    """On the device measuring a value again costs less than a mode that torch tells of every call."""
    model, value = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).cuda(), torch.randn(3, 8, device="cuda")
    with ulpscope.Capture(tmp_path / "run", model=model, level="module") as capture:
        assert torch._C._len_torch_function_stack() == 0
        model(value).sum().backward()
    shown = [value.measure for call in ulpscope.open_dump(capture.dumps[0]).calls() for value in call.values]
    measured = [number for number in shown if number is not None]
    assert measured and len(set(measured)) == len(measured)


@pytest.mark.parametrize("level", ["op", "mix"])
def test_what_a_graph_wrote_again_is_measured_again(tmp_path: Path, level: str) -> None:
    value = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = value * 2
    with ulpscope.capture(tmp_path / "run", level=level):
        for number in range(3):
            value.fill_(number)
            graph.replay()
            result.neg()
    dump = ulpscope.open_dump(tmp_path / "run")
    shown = [dump.call(f"Tensor.neg.{number}.forward").values for number in range(3)]
    assert [[item.stats.max for item in values if item.stats] for values in shown] == [[0, 0], [2, -2], [4, -4]]


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("few", [False, True])
def test_tensors_of_one_call_are_measured_together_and_each_right(tmp_path: Path, few: bool, checksum: bool) -> None:
    torch.manual_seed(0)
    sizes = [3, 256, 1000, 70_001, 1 << 20, 2_000_000, *[600 + 2 * number for number in range(150)]]
    values = [torch.randn(size, device="cuda").to(dtype) for dtype in (torch.float32, torch.bfloat16) for size in sizes]
    values += [torch.randn(size, 40, device="cuda").t() for size in (5, 300, 7000)]
    heads = [torch.randn(2, 40, size, 64, device="cuda").transpose(1, 2) for size in (16, 30)]
    values += [head.to(dtype) for dtype in (torch.float32, torch.bfloat16) for head in heads]
    if few:  # three for one kernel, two for each of two others, and one alone
        values = [*values[4:6], *values[1:4], *values[-2:], values[-6]]
    capture = ulpscope.Capture(tmp_path / "run", level="op", checksum=checksum)
    for _ in range(2):  # in the first the kernels are made
        capture.start()
        torch._foreach_add(values, 1.0)  # type: ignore[call-overload]
        capture.stop()
        capture.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        capture.start()
        results = torch._foreach_add(values, 1.0)  # type: ignore[call-overload]
        capture.stop()
    launches = sum(event.count for event in profiled.key_averages() if event.key.startswith("measure"))
    capture.close()
    assert 0 < launches < (12 if few else len(values) // 4)  # of twice as many
    dump = ulpscope.open_dump(tmp_path / "run", step=2)
    (call,) = dump.calls()
    shown = [value for value in call.values if value.stats is not None]
    assert len(shown) == 2 * len(values)
    for value, tensor in zip(shown, [*values, *results], strict=True):
        held = tensor.cpu().contiguous()
        code = dtype_named(str(value.dtype)).code
        flags = measuring.STATS | measuring.CRC | measuring.SKETCH
        answer = measuring.measure(held.data_ptr(), code, tuple(held.shape), None, flags, 0, 0, 0)
        row = np.frombuffer(answer, dtype=measuring.ROW, count=1)[0]
        stats = value.stats
        assert isinstance(stats, Stats)
        assert np.float64(stats.finite_max).view(np.uint64) == row["max_bits"]
        assert np.float64(stats.finite_min).view(np.uint64) == row["min_bits"]
        assert stats.zero_count == row["zero"]
        assert stats.finite_norm == pytest.approx(row["norm"], rel=1e-6)
        assert stats.finite_sum == pytest.approx(row["sum"], rel=1e-5, abs=1e-3)
        assert not checksum or value.checksum == row["crc"]
        sketch = np.frombuffer(answer, dtype=np.float32, offset=measuring.ROW.itemsize)
        assert np.allclose(dump.sketch(value), sketch, rtol=1e-4, atol=1e-3)


def test_a_forked_child_that_computes_on_the_cpu_is_recorded_beside_its_parent_on_the_device(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path / "run", level="op") as capture:
        torch.ones(5, device="cuda").sin()
        child = os.fork()
        if not child:
            code = 1
            try:
                torch.ones(3).cos()
                capture.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        torch.ones(5, device="cuda").tan()
    parent, other = ulpscope.open_run(tmp_path / "run")
    assert {"sin", "tan"} <= {call.name for call in parent.ids()} and parent.ending == "complete"
    assert [call.name for call in other.ids()] == ["ones", "cos"] and other.ending == "complete"


def test_every_fast_way_of_a_device_is_gone(tmp_path: Path) -> None:
    assert taps.C is not None
    before = taps.C.ways()
    model, value = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).cuda(), torch.randn(3, 8, device="cuda")
    with ulpscope.capture(tmp_path / "run", model=model, level="mix"):
        model(value).sum().backward()
    after = taps.C.ways()
    assert all(after[way] > before[way] for way in ("queued", "launches", "device_rows", "copies_back"))
