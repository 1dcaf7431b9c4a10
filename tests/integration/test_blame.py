"""The judge on small models, with faults planted by a dispatch mode of our own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ulpscope
from ulpscope.analyze.ledger import Judgement, Verdict, judge
from ulpscope.replay.offline import rows_from_dumps
from ulpscope.store.ledger_file import Row, find_ledgers, read_ledger

aten = torch.ops.aten
Change = Callable[[Any, tuple[Any, ...], Any], Any]


class Fault(TorchDispatchMode):
    """Changes the result of one call of one kernel; a replay in float64 is neither counted nor changed."""

    def __init__(self, kernel: Any, number: int, change: Change) -> None:
        super().__init__()
        self.kernel, self.number, self.change = kernel, number, change
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self.kernel and not any(isinstance(a, Tensor) and a.dtype is torch.float64 for a in args):
            self.count += 1
            if self.count == self.number + 1:
                return self.change(func, args, result)
        return result


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)) * self.slope)
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.drop(block(x))
        scores = self.head(x)
        best, _ = scores.topk(2, -1)
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), ids.flatten()) + 0.01 * best.float().mean()


def build(dtype: torch.dtype = torch.float32) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: Model, optimizer: torch.optim.Optimizer, after_step: Callable[[], None] = lambda: None
) -> list[Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(2))
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        after_step()
    return [*seen, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def judged(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    fault: Fault | None = None,
    prepare: Callable[[Model], None] = lambda model: None,
) -> list[Row]:
    model, optimizer = build(dtype)
    prepare(model)
    with fault_on(fault), ulpscope.ledger(folder, model=model) as ledger:
        train(model, optimizer, ledger.step)
        assert ledger.notes == []
    return rows_of(folder)


@contextmanager
def fault_on(fault: Fault | None) -> Iterator[None]:
    if fault is None:
        yield
    else:
        with fault:
            yield


def rows_of(folder: Path) -> list[Row]:
    return [row for path in find_ledgers(folder) for row in read_ledger(path)[1]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, list[Row]]:
    folder = tmp_path_factory.mktemp("references")
    return {dtype: judged(folder / str(dtype), dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_run_is_the_same_bit_for_bit_with_a_ledger(tmp_path: Path, dtype: torch.dtype) -> None:
    bare = train(*build(dtype))
    model, optimizer = build(dtype)
    with ulpscope.ledger(tmp_path, model=model) as ledger:
        watched = train(model, optimizer, ledger.step)
    assert len(bare) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_clean_run_names_nobody(references: dict[torch.dtype, list[Row]], dtype: torch.dtype) -> None:
    rows = references[dtype]
    assert {row.phase for row in rows} == {"forward", "backward", "optimizer"}
    assert [row.op for row in rows if row.unknown] == []
    assert judge(rows).findings == ()
    assert judge(rows, rows).findings == ()


def test_lower_precision_beside_float32_names_nobody(references: dict[torch.dtype, list[Row]]) -> None:
    judgement = judge(references[torch.bfloat16], references[torch.float32])
    assert judgement.findings == ()


def scale(factor: float) -> Change:
    return lambda func, args, result: result * factor


def roll(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    return result.roll(1, -1)


def truncate(func: Any, args: tuple[Any, ...], result: Tensor) -> Tensor:
    """Round toward zero."""
    exact = func(*(a.double() if isinstance(a, Tensor) else a for a in args))
    above = result.double().abs() > exact.abs()
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[result.dtype]
    return torch.where(above, (result.view(bits) - 1).view(result.dtype), result)


def lost(func: Any, args: tuple[Any, ...], result: Tensor) -> Tensor:
    return result.clone().index_fill_(-1, torch.tensor([3]), float("nan"))


def by_tanh(func: Any, args: tuple[Any, ...], result: Tensor) -> Tensor:
    return func(*args, approximate="tanh")


def short_sum(func: Any, args: tuple[Any, ...], result: Tensor) -> Tensor:
    """Sums in bfloat16, eight terms at a time."""
    bias, a, b = args
    total = torch.zeros_like(result)
    for at in range(0, a.shape[-1], 8):
        total = (total.float() + a[:, at : at + 8].float() @ b[at : at + 8].float()).to(result.dtype)
    return (total.float() + bias.float()).to(result.dtype)


def other_choice(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    values, places = result
    return values, places.roll(1, 0)


FAULTS = [
    ("scale", torch.float32, aten.addmm.default, 3, scale(1.001), "blocks.1.down", "forward"),
    ("scale below a unit", torch.bfloat16, aten.addmm.default, 3, scale(1 + 1 / 128), "blocks.1.down", "forward"),
    (
        "rolled",
        torch.bfloat16,
        aten.native_layer_norm.default,
        1,
        lambda f, a, r: (r[0].roll(1, -1), *r[1:]),
        "blocks.1.norm",
        "forward",
    ),
    ("truncated", torch.float32, aten.addmm.default, 2, truncate, "blocks.1.up", "forward"),
    ("truncated in bfloat16", torch.bfloat16, aten.addmm.default, 2, truncate, "blocks.1.up", "forward"),
    ("not a number", torch.float32, aten.gelu.default, 1, lost, "blocks.1", "forward"),
    ("another gelu", torch.bfloat16, aten.gelu.default, 2, by_tanh, "blocks.2", "forward"),
    ("short sums", torch.bfloat16, aten.addmm.default, 5, short_sum, "blocks.2.down", "forward"),
    ("wrong choice", torch.float32, aten.topk.default, 0, other_choice, "", "forward"),
    ("dropout", torch.float32, aten.bernoulli_.float, 1, lambda f, a, r: r.copy_(r.roll(1, 0)), "drop", "forward"),
    ("gradient", torch.float32, aten.mm.default, 4, scale(1.03), None, "backward"),
    ("gradient of gelu", torch.bfloat16, aten.gelu_backward.default, 1, roll, "blocks.1", "backward"),
]


@pytest.mark.parametrize(
    ("dtype", "kernel", "number", "change", "module", "phase"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_the_faulty_call_is_named(
    tmp_path: Path,
    references: dict[torch.dtype, list[Row]],
    dtype: torch.dtype,
    kernel: Any,
    number: int,
    change: Change,
    module: str | None,
    phase: str,
) -> None:
    fault = Fault(kernel, number, change)
    rows = judged(tmp_path, dtype, fault)
    assert fault.count > number, "the fault was not reached"
    named(judge(rows, references[dtype]), kernel, number, module, phase)


def named(judgement: Judgement, kernel: Any, number: int, module: str | None, phase: str) -> None:
    assert judgement.first is not None
    row = judgement.first.row
    overload = f"aten.{kernel.overloadpacket.__name__}.{kernel._overloadname}"
    assert (row.op, row.index, row.phase) == (overload, number, phase), judgement.first.why
    if module is not None:
        assert row.module == module


def test_one_run_alone_is_enough_for_a_gross_fault(tmp_path: Path) -> None:
    fault = Fault(aten.addmm.default, 3, scale(1.01))
    judgement = judge(judged(tmp_path, torch.float32, fault))
    named(judgement, aten.addmm.default, 3, "blocks.1.down", "forward")
    assert judgement.first is not None
    assert judgement.first.row.api == "Functional.linear.3.forward"
    assert judgement.first.row.source is not None
    assert judgement.first.row.source[0] == __file__


def test_a_write_that_did_not_happen_is_named_with_its_parameter(
    tmp_path: Path, references: dict[torch.dtype, list[Row]]
) -> None:
    class Lost(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.addcdiv_.default and args[0].shape == (32, 64) and args[0].dtype is torch.float32:
                return args[0]
            return func(*args, **(kwargs or {}))

    model, optimizer = build()
    with Lost(), ulpscope.ledger(tmp_path, model=model) as ledger:
        train(model, optimizer, ledger.step)
    judgement = judge(rows_of(tmp_path), references[torch.float32])
    assert judgement.first is not None
    assert (judgement.first.row.op, judgement.first.row.phase) == ("aten.addcdiv_.default", "optimizer")
    assert judgement.first.row.param in ("embed.weight", "head.weight")


def test_another_setting_is_told_differently(tmp_path: Path, references: dict[torch.dtype, list[Row]]) -> None:
    def prepare(model: Model) -> None:
        model.blocks[1].slope = 1.01  # type: ignore[assignment]

    judgement = judge(judged(tmp_path, prepare=prepare), references[torch.float32])
    assert judgement.first is not None
    assert (judgement.first.verdict, judgement.first.row.module) == (Verdict.TOLD, "blocks.1")


def test_exchanged_weights_are_told_differently(tmp_path: Path, references: dict[torch.dtype, list[Row]]) -> None:
    def prepare(model: Model) -> None:
        first, second = model.blocks[1].up.weight, model.blocks[2].up.weight  # type: ignore[union-attr]
        first.data, second.data = second.data, first.data  # type: ignore[union-attr]

    judgement = judge(judged(tmp_path, prepare=prepare), references[torch.float32])
    assert judgement.first is not None
    assert judgement.first.row.module == "blocks.1.up"
    assert "blocks.1.up.weight" in judgement.first.why


def test_an_operator_without_a_reference_is_unknown_until_it_has_one(tmp_path: Path) -> None:
    @torch.library.custom_op("ulptest::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise NotImplementedError("only float32")
        return x * 2.01

    with ulpscope.ledger(tmp_path / "a"):
        twice(torch.ones(100))
    unknown = [row for row in rows_of(tmp_path / "a") if row.unknown]
    assert [row.op for row in unknown] == ["ulptest.twice.default"]

    @ulpscope.reference("ulptest::twice")
    def _(x: Tensor) -> Tensor:
        return x * 2

    with ulpscope.ledger(tmp_path / "b"):
        twice(torch.ones(100))
    first = judge(rows_of(tmp_path / "b")).first
    assert first is not None
    assert first.row.op == "ulptest.twice.default"


def recorded(folder: Path, dtype: torch.dtype, fault: Fault | None = None) -> list[Row]:
    model, optimizer = build(dtype)
    with fault_on(fault), ulpscope.Capture(folder, model=model, level="kernel", tensors=True) as capture:
        train(model, optimizer, capture.step)
    return rows_from_dumps(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_dump_gives_the_same_scores_as_the_live_ledger(
    tmp_path: Path, references: dict[torch.dtype, list[Row]], dtype: torch.dtype
) -> None:
    offline = recorded(tmp_path, dtype)
    live = [row for row in references[dtype] if row.kind not in ("view", "unwritten", "random")]
    known = [row for row in offline if row.kind not in ("view", "unwritten", "random")]
    assert [row.op for row in known] == [row.op for row in live]
    assert [row.unknown for row in known if row.unknown] == []
    for here, there in zip(known, live, strict=True):
        # The memory layout is not the same, so float64 sums are not the same to the last bit.
        assert [m.rms for m in here.measures] == pytest.approx([m.rms for m in there.measures], rel=1e-6), here.op
        assert (here.phase, here.index, here.dtypes) == (there.phase, there.index, there.dtypes)
        assert here.module in ("", there.module)
    assert judge(offline).findings == ()


def test_a_fault_is_named_from_two_dumps(tmp_path: Path) -> None:
    reference = recorded(tmp_path / "a", torch.bfloat16)
    fault = Fault(aten.addmm.default, 5, short_sum)
    judgement = judge(recorded(tmp_path / "b", torch.bfloat16, fault), reference)
    named(judgement, aten.addmm.default, 5, "blocks.2.down", "forward")
    assert judgement.first is not None
    assert judgement.first.row.api == "Functional.linear.5.forward"


PROGRAM = """
import sys, torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

class Fault(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.relu.default:
            return result.roll(1, -1)
        return result

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
if len(sys.argv) > 1:
    Fault().__enter__()
model(torch.randn(4, 8)).sum().backward()
"""


def ulp(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ulpscope", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=120,
    )


def test_the_command_line_names_the_call_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    good = ulp("blame", "-o", "good", "--", sys.executable, "program.py", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert "nothing is wrong" in good.stdout
    bad = ulp("blame", "good", "-o", "bad", "--format", "json", "--", sys.executable, "program.py", "bad", cwd=tmp_path)
    assert bad.returncode == 1, bad.stderr
    first = json.loads(bad.stdout)["first"]
    assert (first["op"], first["module"], first["api"]) == ("aten.relu.default", "1", "Functional.relu.0.forward")
    again = ulp("blame", "good", "bad", "--format", "json", cwd=tmp_path)
    assert json.loads(again.stdout)["first"] == first
    text = ulp("blame", "good", "bad", cwd=tmp_path)
    assert "introduced by 1, Functional.relu.0.forward" in text.stdout
    assert "program.py" in text.stdout


@pytest.mark.parametrize(
    ("level", "op", "by"),
    [
        ("op", "Functional.relu", "sketch"),
        ("kernel", "aten.roll.default", "nothing"),  # the kernel that the good program does not have
        ("module", "Module.1.ReLU", "sketch"),
    ],
)
def test_statistics_tell_whose_inputs_agree_and_whose_output_does_not(
    tmp_path: Path, level: str, op: str, by: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    for run, *more in (("good",), ("same",), ("bad", "bad")):
        command = (sys.executable, "program.py", *more)
        assert ulp("capture", "--level", level, "-o", run, "--", *command, cwd=tmp_path).returncode == 0
    same = ulp("blame", "good", "same", cwd=tmp_path)
    assert (same.returncode, "nothing is wrong" in same.stdout) == (0, True), same.stdout + same.stderr
    bad = ulp("blame", "good", "bad", "--format", "json", cwd=tmp_path)
    assert bad.returncode == 1, bad.stderr
    found = json.loads(bad.stdout)
    first = found["first"]
    assert (found["by"], first["op"], first["module"], first["evidence"]["by"]) == ("statistics", op, "1", by)
    if by == "sketch":
        assert (first["evidence"]["input_error"], first["evidence"]["output_error"] > 0.5) == (0.0, True)
    text = ulp("blame", "good", "bad", cwd=tmp_path).stdout
    assert "nothing was run again" in text
    assert ("its inputs agree, its output does not" if by == "sketch" else "the reference has no such call") in text
    one = ulp("blame", "bad", cwd=tmp_path)
    assert (one.returncode, "statistics of one run say no more" in one.stdout.replace("\n", " ")) == (3, True)


def test_a_ledger_beside_statistics_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = (sys.executable, "program.py")
    assert ulp("capture", "-o", "statistics", "--", *command, cwd=tmp_path).returncode == 0
    assert ulp("blame", "-o", "ledger", "--", *command, cwd=tmp_path).returncode == 0
    mixed = ulp("blame", "statistics", "ledger", cwd=tmp_path)
    assert mixed.returncode == 3
    assert "--level kernel --tensors" in mixed.stderr


def test_what_cannot_be_read_and_what_cannot_be_meant_have_their_exit_codes(tmp_path: Path) -> None:
    assert ulp("blame", "nowhere", cwd=tmp_path).returncode == 3
    assert ulp("blame", cwd=tmp_path).returncode == 2
    (tmp_path / "empty.py").write_text("print('nothing')", encoding="utf-8")
    assert ulp("blame", "--", sys.executable, "empty.py", cwd=tmp_path).returncode == 4


@pytest.mark.parametrize(
    ("end", "how"), [("os.kill(os.getpid(), signal.SIGKILL)", "signal 9 (SIGKILL)"), ("sys.exit(7)", "exit code 7")]
)
def test_a_command_that_does_not_end_well_is_never_nothing_wrong(tmp_path: Path, end: str, how: str) -> None:
    begin = "import os, signal, sys, torch\n"
    (tmp_path / "clean.py").write_text(f"{begin}torch.ones(3) * 2\n{end}", encoding="utf-8")
    clean = ulp("blame", "--from-start", "--", sys.executable, "clean.py", cwd=tmp_path)
    assert clean.returncode == 3
    told = rf"cannot tell: the command .*{re.escape(how)}; rounding explains every call that it made"
    assert re.search(told, clean.stdout), clean.stdout
    (tmp_path / "nothing.py").write_text(begin + end, encoding="utf-8")
    nothing = ulp("blame", "--from-start", "--", sys.executable, "nothing.py", cwd=tmp_path)
    assert (nothing.returncode, how in nothing.stderr, nothing.stdout) == (3, True, "")
    faulty = PROGRAM + f"import os, signal\n{end}\n"
    (tmp_path / "faulty.py").write_text(faulty, encoding="utf-8")
    assert ulp("blame", "-o", "good", "--", sys.executable, "faulty.py", cwd=tmp_path).returncode == 3
    found = ulp("blame", "good", "--", sys.executable, "faulty.py", "bad", cwd=tmp_path)
    assert (found.returncode, "introduced by 1, Functional.relu.0.forward" in found.stdout) == (1, True), found.stdout


@pytest.mark.parametrize("check", ["overflow", "noise"])
def test_a_check_of_a_command_that_does_not_end_well_is_no_pass(tmp_path: Path, check: str) -> None:
    (tmp_path / "program.py").write_text("import sys, torch\ntorch.ones(3) * 2\nsys.exit(7)", encoding="utf-8")
    done = ulp("check", check, "--", sys.executable, "program.py", cwd=tmp_path)
    assert (done.returncode, "exit code 7" in done.stderr) == (3, True)


def test_a_folder_with_a_ledger_is_refused_at_once(tmp_path: Path) -> None:
    for _ in range(2):
        with ulpscope.ledger(tmp_path, overwrite=True):
            torch.ones(2) * 2
    with pytest.raises(ulpscope.CaptureError, match=r"overwrite=True"), ulpscope.ledger(tmp_path):
        torch.ones(2) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_update_that_cancels_is_rounding_and_one_that_is_wrong_is_not(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(1 << 16, generator=generator).to(dtype) for _ in range(2))

    class Wrong(TorchDispatchMode):
        def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = kernel(*args, **(kwargs or {}))
            if kernel is torch.ops.aten._foreach_add_.List:
                args[0][0].mul_(1.03)
            return out

    for name, device, alarms in (("clean", nullcontext(), False), ("wrong", Wrong(), True)):
        updated = [weight.clone(), torch.ones(8, dtype=dtype)]
        with device, ulpscope.ledger(tmp_path / name):
            torch._foreach_add_(updated, [gradient * 10, torch.ones(8, dtype=dtype)], alpha=-0.1)
        assert (judge(rows_of(tmp_path / name)).first is not None) is alarms


class Wrapped(torch.Tensor):
    """A tensor without elements of its own: those are in another."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        return Wrapped(func(*plain, **(kwargs or {})))


def test_a_tensor_of_a_class_of_its_own_is_judged_by_what_is_inside(tmp_path: Path) -> None:
    with ulpscope.ledger(tmp_path) as ledger:
        found = Wrapped(torch.ones(4)) * 2 + 1
        assert ledger.notes == []
    assert found.inner.tolist() == [3.0] * 4
    rows = [row for path in find_ledgers(tmp_path) for row in read_ledger(path)[1]]
    assert [row.name for row in rows if row.measures] == ["ones", "mul", "add"]


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_generator_that_stood_elsewhere_was_told_differently(tmp_path: Path, skipped: int) -> None:
    for name, draws in (("good", 0), ("bad", skipped)):
        generator = torch.Generator().manual_seed(1)
        for _ in range(draws):
            torch.rand(1, generator=generator)
        with ulpscope.ledger(tmp_path / name):
            torch.rand(4, generator=generator) + 1
    found = ulp("blame", "bad", "good", cwd=tmp_path)
    assert ("generator = cpu, seed 1, state " in found.stdout) == bool(skipped), found.stdout
    assert found.returncode == skipped
