"""Calls that overflow: each is found where it happens, with its data; a run without one is left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ulpscope
from builders import DumpBuilder
from device.fakenpu import run as run_on_npu
from integration.runs import LEVELS, assert_same, run_bare, run_captured
from integration.test_models_unchanged import PROGRAMS
from ulpscope.model.errors import OverflowStop
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Role
from ulpscope.replay.overflow import Nature, overflow_of
from ulpscope.store.registry import open_dump

HALF = torch.float16


def found(folder: Path, step: int = 0) -> list[str]:
    return [call_text(call.id) for call in ulpscope.open_dump(folder, step=step).calls()]


def steep() -> Tensor:
    """Numbers whose root has a slope of 2000."""
    return torch.full((3,), 6e-8, dtype=HALF, requires_grad=True)


def check(folder: Path, program: Callable[[], Any], *, level: str = "op", overflows: int = -1) -> list[str]:
    with ulpscope.capture(folder, level=level, overflows=overflows):
        program()
    return found(folder)


def large() -> Tensor:
    return torch.ones(3, dtype=HALF) * 60000


# --- what counts --------------------------------------------------------------------------------------------------


def test_the_call_that_makes_the_first_inf_is_kept_and_those_that_pass_it_on_are_not(tmp_path: Path) -> None:
    assert check(tmp_path, lambda: ((large() * 2) + 1).log()) == ["Tensor.__mul__.1.forward"]


def test_inputs_and_outputs_are_kept_to_the_bit(tmp_path: Path) -> None:
    check(tmp_path, lambda: large() * torch.full((3,), 2, dtype=HALF))
    dump = ulpscope.open_dump(tmp_path)
    (call,) = dump.calls()
    held = {slot_text(value.slot): dump.load(value).tolist() for value in call.values}
    assert held == {"input.0": [60000] * 3, "input.1": [2] * 3, "output.0": [np.inf] * 3}
    assert dump.stack(call)[0].function.endswith("<lambda>")


def test_an_in_place_call_is_kept_with_what_was_there_before(tmp_path: Path) -> None:
    check(tmp_path, lambda: large().mul_(2))
    dump = ulpscope.open_dump(tmp_path)
    (call,) = dump.calls()
    assert call_text(call.id) == "Tensor.mul_.0.forward"
    assert [dump.load(value).tolist() for value in call.values if value.is_tensor] == [[60000] * 3, [np.inf] * 3]


def test_a_functional_asked_to_work_in_place_is_kept_with_what_was_there_before(tmp_path: Path) -> None:
    check(tmp_path, lambda: F.elu(torch.full((2,), 60000.0, dtype=HALF), alpha=1.0, inplace=True).mul(2))
    assert found(tmp_path) == ["Tensor.mul.0.forward"]
    check(tmp_path / "leaky", lambda: F.leaky_relu(-large(), 2.0, inplace=True))
    dump = ulpscope.open_dump(tmp_path / "leaky")
    (call,) = dump.calls()
    assert dump.load(call.values[0]).tolist() == [-60000] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_running_statistics_are_judged_and_kept_as_they_were_before_the_call(tmp_path: Path, level: str) -> None:
    x = torch.full((4, 3), 3e38)
    x[0] = -3e38
    model = nn.BatchNorm1d(3)
    with ulpscope.capture(tmp_path, model=model, overflows=-1, level=level):
        (torch.ones(1) * 100).exp()
        model(x)
    (call,) = [call for call in ulpscope.open_dump(tmp_path).calls() if "orm" in call.id.name]
    assert not any(ulpscope.open_dump(tmp_path).manifest.notes)
    if level != "module":
        held = [
            ulpscope.open_dump(tmp_path).load(value)
            for value in call.values
            if value.slot.role is Role.INPUT and value.is_tensor
        ]
        assert sum(value.tolist() == [0] * 3 for value in held) == 2  # running_mean, and the bias
        assert sum(value.tolist() == [1] * 3 for value in held) == 2  # running_var, and the weight


@pytest.mark.parametrize("level", ["op", "kernel"])
def test_a_result_written_over_an_argument_is_kept_with_what_was_there_before(tmp_path: Path, level: str) -> None:
    x = large()
    (name,) = check(tmp_path, lambda: torch.mul(x, 2.0, out=x), level=level)
    assert name in ("Torch.mul.0.forward", "Aten.mul.out.0.forward")
    dump = ulpscope.open_dump(tmp_path)
    assert dump.load(dump.nth(0).values[0]).tolist() == [60000] * 3


def test_tensors_can_be_exchanged_while_it_looks(tmp_path: Path) -> None:
    def program() -> None:
        a, b = torch.ones(2) * 2, torch.ones(2) * 3
        torch.utils.swap_tensors(a, b)
        assert a.tolist() == [3, 3]

    assert check(tmp_path, program) == []


def test_gradients_that_overflow_are_found_in_the_backward_call(tmp_path: Path) -> None:
    def program() -> None:
        (steep().sqrt() * 100).sum().backward()

    assert check(tmp_path, program) == ["Tensor.sqrt.0.backward"]


def test_the_backward_of_a_call_that_had_overflowed_is_not_accused_again(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.full((3,), 100.0, requires_grad=True)
        torch.where(x < 0, x.exp(), x).sum().backward()

    assert check(tmp_path, program) == ["Tensor.exp.0.forward"]


Z = torch.tensor([2.0, 0.0, 4.0])
POLES: dict[str, Callable[[Tensor], Any]] = {
    "log": lambda z: z.log(),
    "log1p": lambda z: torch.log1p(z - 1),
    "quotient": lambda z: 1 / z,
    "quotient by a number": lambda z: (z + 1) / 0,
    "quotient of whole numbers": lambda z: (z + 1).long() / torch.tensor([0, 1, 2]),
    "power": lambda z: z.pow(-0.5),
    "power in place": lambda z: z.clone().pow_(-1),
    "power by an operator": lambda z: z**-2,
    "power in half precision": lambda z: z.half() ** -1,
    "rsqrt": lambda z: z.rsqrt(),
    "reciprocal": lambda z: torch.reciprocal(z, out=torch.empty(3)),
    "atanh": lambda z: (z == 0).double().atanh(),
    "lgamma": lambda z: z.lgamma(),
    "inside of a module": lambda z: Reciprocal()(z),
    "slope of a root": lambda z: z.clone().requires_grad_().sqrt().sum().backward(),
    "slope of a quotient": lambda z: (1 / z.clone().requires_grad_()).sum().backward(),
}


class Reciprocal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


@pytest.mark.parametrize("level", ["op", "mix", "kernel"])
@pytest.mark.parametrize("name", POLES)
def test_what_is_infinite_because_the_function_is_is_a_pole_and_ends_nothing_unless_asked_to(
    name: str, level: str, tmp_path: Path
) -> None:
    assert check(tmp_path / "told", lambda: POLES[name](Z), level=level, overflows=1) == []
    notes = ulpscope.open_dump(tmp_path / "told").manifest.notes
    assert any("is infinite at a pole, as 1/0 is: that is exact" in note for note in notes)
    with ulpscope.capture(tmp_path / "asked", level=level, overflows=-1, poles=True):
        POLES[name](Z)
    assert found(tmp_path / "asked")


TOO_LARGE: dict[str, Callable[[], Any]] = {
    "exp": lambda: torch.tensor([1000.0]).exp(),
    "exp in float64": lambda: torch.tensor([1000.0]).double().exp(),
    "a quotient by the smallest number": lambda: 1 / torch.tensor([1e-45]),
    "a pole and a quotient by the smallest number": lambda: torch.tensor([0.0, 1e-45]).reciprocal(),
    "a product": lambda: torch.full((2, 2), 1e30) @ torch.full((2, 2), 1e30),
    "a power": lambda: (Z * 1e20) ** 2,
    "a slope that need not be infinite": lambda: (steep().sqrt() * 100).sum().backward(),
}


@pytest.mark.parametrize("level", ["op", "kernel"])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_no_pole(name: str, level: str, tmp_path: Path) -> None:
    assert len(check(tmp_path, TOO_LARGE[name], level=level)) == 1


def test_looking_for_a_pole_changes_neither_the_generator_nor_the_values(tmp_path: Path) -> None:
    def program() -> list[Tensor]:
        torch.manual_seed(0)
        z = Z.clone()
        inverse = z.pow(-0.5)
        inverse[inverse == float("inf")] = 0
        return [inverse, z, z.log(), torch.rand(3), torch.get_rng_state()]

    bare = program()
    with ulpscope.capture(tmp_path, overflows=1):
        watched = program()
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))


@pytest.mark.parametrize("name", ["log", "quotient", "power"])
def test_a_pole_is_no_overflow_but_the_nan_that_comes_of_it_is(name: str, tmp_path: Path) -> None:
    x = torch.zeros(3)
    function = POLES[name]
    assert check(tmp_path / "masked", lambda: torch.where(x > 0, function(x), 0)) == []
    assert check(tmp_path / "used", lambda: function(x) - function(x)) == ["Tensor.__sub__.0.forward"]
    x.requires_grad_()
    (gradient,) = check(tmp_path / "gradient", lambda: torch.where(x > 0, function(x), 0.0).sum().backward())
    assert gradient.endswith(".0.backward")


def test_a_pole_that_was_asked_for_is_told_as_one_and_too_large_a_number_as_that(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path, overflows=-1, poles=True):
        for name in ("log", "quotient", "power"):
            POLES[name](Z)
        torch.tensor([1000.0]).exp()
    dump = open_dump(tmp_path)
    assert [overflow_of(dump, call).nature for call in dump.calls()] == [Nature.POLE] * 3 + [Nature.NORMAL]


@pytest.mark.parametrize(("level", "name"), [
    ("module", "Module.Square.0.forward"),
    ("op", "Tensor.__mul__.1.forward"),
    ("mix", "Tensor.__mul__.1.forward"),
    ("kernel", "Aten.mul.Tensor.1.forward"),
])  # fmt: skip
def test_the_innermost_call_of_every_level_is_named_once(tmp_path: Path, level: str, name: str) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    model = nn.Sequential(nn.Identity(), Square())
    with ulpscope.capture(tmp_path, model=model, level=level, overflows=-1):
        model(large())
    (only,) = found(tmp_path)
    assert only == (name if level != "module" else "Module.1.Square.forward.0")


def test_nan_made_of_infinities_that_were_put_there_on_purpose_is_found(tmp_path: Path) -> None:
    def program() -> None:
        scores = torch.zeros(2, 2).masked_fill(torch.ones(2, 2, dtype=torch.bool), -torch.inf)
        scores.softmax(-1)

    assert check(tmp_path, program) == ["Tensor.softmax.0.forward"]


def clean_masks() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    mask = torch.full((4, 4), -torch.inf).triu(1)
    ((x + mask).softmax(-1) @ x).sum().backward()
    x.detach().masked_fill(mask.bool(), -torch.inf).amax()
    torch.tensor([1.0, torch.inf])
    torch.where(mask.bool(), -torch.inf, 0.0)


def clean_memory() -> None:
    for _ in range(4):
        buffer = torch.empty(1000)
        buffer.view(torch.int32).fill_(-1)  # nan, as far as anybody can tell
        again = torch.empty(1000)
        again[:3] = 1
        again.copy_(torch.ones(1000))
    torch.full((3,), -1, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", [clean_masks, clean_memory])
def test_a_clean_program_is_not_accused(tmp_path: Path, program: Callable[[], None], level: str) -> None:
    assert check(tmp_path, program, level=level) == []


def test_data_that_came_in_with_nan_is_told_and_nobody_is_accused(tmp_path: Path) -> None:
    data = torch.tensor([1.0, torch.nan])
    assert check(tmp_path, lambda: data * 2) == []
    (note,) = ulpscope.open_dump(tmp_path).manifest.notes
    assert note == "Tensor.__mul__.0.forward was given values that are not finite, and no recorded call had made them"


# --- the end of a program -----------------------------------------------------------------------------------------


def test_the_program_ends_at_the_overflow_that_was_asked_for(tmp_path: Path) -> None:
    done: list[int] = []
    ending = pytest.raises(OverflowStop, match=r"overflow 2 times.*Tensor\.exp\.1\.forward")
    with ending, ulpscope.capture(tmp_path, overflows=2):
        for number in range(5):
            done.append(number)
            (torch.ones(1) * 100).exp()
    assert done == [0, 1]
    assert found(tmp_path) == ["Tensor.exp.0.forward", "Tensor.exp.1.forward"]


def test_the_exception_comes_out_of_the_call_itself(tmp_path: Path) -> None:
    model, reached = nn.Sequential(nn.Identity(), Exponential()), []
    with pytest.raises(OverflowStop) as caught, ulpscope.capture(tmp_path, level="mix", overflows=1):
        reached.append(model(torch.ones(1)))
        model(torch.full((1,), 100.0))
        reached.append("behind it")
    assert len(reached) == 1
    assert any(entry.name == "forward" and "exp" in str(entry.statement) for entry in caught.traceback)


def test_the_exception_comes_out_of_the_backward_pass_itself(tmp_path: Path) -> None:
    x = steep()
    with ulpscope.capture(tmp_path, overflows=1) as capture:
        with pytest.raises(OverflowStop, match=r"Tensor\.sqrt\.0\.backward"):
            (x.sqrt() * 100).sum().backward()
        assert not capture._recorder.state().busy
    assert x.grad is None
    (x.detach() + 1).exp()  # torch is as it was


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_overflows_are_counted_over_steps(tmp_path: Path) -> None:
    with pytest.raises(OverflowStop), ulpscope.capture(tmp_path, overflows=2) as capture:
        for _ in range(5):
            (torch.ones(1) * 100).exp()
            capture.step()
    assert [found(tmp_path, step) for step in (0, 1)] == [["Tensor.exp.0.forward"]] * 2


def test_torch_is_untouched_after_the_exception(tmp_path: Path) -> None:
    call = nn.Module.__call__.__code__
    with pytest.raises(OverflowStop), ulpscope.capture(tmp_path, overflows=1):
        x = steep()
        ((x.sqrt() * 100).sum() + (x * 2).sum()).backward()
        x + 1
    assert nn.Module.__call__.__code__ is call
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("level", ["op", "mix"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_the_run_is_not_changed_and_not_accused(tmp_path: Path, name: str, level: str) -> None:
    assert_same(run_bare(PROGRAMS[name]), run_captured(PROGRAMS[name], tmp_path, level, overflows=-1))
    # This one makes its gradients overflow, so that the scaler skips a step.
    steps = [found(tmp_path, step) for step in range(3)]
    if name == "grad_scaler":
        (inside,) = steps[1]
        assert inside in ("Functional.linear.1.backward", "Module.2.Linear.backward.0")
        steps[1] = []
    assert steps == [[], [], []]


# --- the command --------------------------------------------------------------------------------------------------

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    optimizer.zero_grad()
    y = model(torch.randn(3, 4))
    if "overflow" in sys.argv and step == 1:
        y = y + (y.half() * 60000 * 60000).float()
    y.square().sum().backward()
    optimizer.step()
print("trained")
"""


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ulpscope", "check", "overflow", *map(str, words)], capture_output=True, text=True
    )


def test_the_command_prints_the_producer_with_its_line(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    done = command("-o", tmp_path / "kept", "--", sys.executable, program, "overflow")
    assert done.returncode == 1
    assert "Tensor.__mul__.1.forward  overflows  (step 1)" in done.stdout
    assert f"at {program}:10 in <module>: y = y + (y.half() * 60000 * 60000).float()" in done.stdout
    assert "normal: computed in float64" in done.stdout
    assert "trained" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "the program ends here, as it was asked to" in done.stderr
    again = command("--format", "json", tmp_path / "kept")
    assert again.returncode == 1
    (told,) = json.loads(again.stdout)["overflows"]
    assert (told["call"], told["nature"]) == ("Tensor.__mul__.1.forward", "normal")


def test_the_command_exits_with_0_for_a_clean_program_and_does_not_end_it(tmp_path: Path) -> None:
    done = command("--", sys.executable, "-c", TRAIN)
    assert (done.returncode, done.stdout) == (0, "no call overflowed\n")
    assert "trained" in done.stderr


def test_the_command_says_what_it_needs() -> None:
    assert "needs a command behind --" in command().stderr
    assert "no check 'overflw'. Did you mean 'overflow'?" in subprocess.run(
        [sys.executable, "-m", "ulpscope", "check", "overflw"], capture_output=True, text=True
    ).stderr  # fmt: skip


# --- devices ------------------------------------------------------------------------------------------------------

ON_NPU = """
import json, sys, fakenpu, torch, ulpscope
from ulpscope.model.names import call_text
from ulpscope.replay.overflow import overflow_of
"""


def test_an_abnormal_overflow_is_one_that_float64_does_not_have(tmp_path: Path) -> None:
    program = ON_NPU + (
        "x = torch.ones(2, 2).npu()\n"
        "with fakenpu.fault('aten::mm', lambda kernel, *args: kernel(*args) * torch.inf):\n"
        "    with ulpscope.capture(sys.argv[1], overflows=-1): (x @ x) + 1\n"
        "dump = ulpscope.open_dump(sys.argv[1])\n"
        "print(json.dumps([[call_text(call.id), overflow_of(dump, call).nature.value] for call in dump.calls()]))"
    )
    assert run_on_npu(program, tmp_path) == [["Tensor.__matmul__.0.forward", "abnormal"]]


def test_the_flag_of_a_saturating_device_tells_where_no_value_does(tmp_path: Path) -> None:
    program = ON_NPU + (
        "fakenpu.saturate()\n"
        "x = torch.full((2, 2), 60000.0, dtype=torch.float16).npu()\n"
        "with ulpscope.capture(sys.argv[1], overflows=-1): y = x + 1; z = x * 2; w = z - 1\n"
        "print(json.dumps([[call_text(call.id) for call in ulpscope.open_dump(sys.argv[1]).calls()], z.cpu().tolist()]))"
    )
    assert run_on_npu(program, tmp_path) == [["Tensor.__mul__.0.forward"], [[65504.0] * 2] * 2]


LATE = (
    ON_NPU
    + """
import pathlib, torch.nn.functional as F
from ulpscope.model.names import slot_text
from ulpscope.model.errors import OverflowStop
torch.manual_seed(0)

def kept(folder):
    dump = ulpscope.open_dump(folder)
    return {
        call_text(call.id): {
            slot_text(value.slot): value.error or dump.load(value).tolist() for value in call.values if value.is_tensor
        } for call in dump.calls()
    }

def check(program, overflows=-1, behind=10):
    folder = sys.argv[1] + f"/{len(list(pathlib.Path(sys.argv[1]).iterdir()))}"
    with ulpscope.capture(folder, overflows=overflows):
        fakenpu.late(behind)
        program()
        waits = fakenpu.waits()
    return kept(folder), waits
"""
)


def test_a_late_device_is_not_waited_for_and_the_call_is_kept_whole(tmp_path: Path) -> None:
    program = LATE + (
        "x = torch.full((2,), 60000.0, dtype=torch.float16).npu()\n"
        "def program():\n"
        "    for _ in range(50): y = x + 1\n"
        "    y = y * 2\n"
        "    for _ in range(100): y = y - 1\n"
        "print(json.dumps(check(program)))"
    )
    calls, waits = run_on_npu(program, tmp_path)
    assert calls == {"Tensor.__mul__.0.forward": {"input.0": [60000.0] * 2, "output.0": [np.inf] * 2}}
    assert waits == 3  # for the two tensors that are written down, and to look whether there is a pole


@pytest.mark.parametrize("write", [
    "y.zero_()", "y.data.zero_()", "y.view(2, 1)[0].fill_(0)", "torch.neg(x, out=y)", "F.relu(y, inplace=True)",
])  # fmt: skip
def test_what_a_late_device_was_given_is_kept_though_it_is_overwritten_meanwhile(tmp_path: Path, write: str) -> None:
    program = LATE + (
        "x = torch.full((2,), 60000.0, dtype=torch.float16).npu()\n"
        "def program():\n"
        "    y = x - 0\n"
        "    z = y * 2\n"
        f"    {write}\n"
        "    z.clamp_(-1, 1)\n"
        "print(json.dumps(check(program, behind=1000)))"
    )
    calls, waits = run_on_npu(program, tmp_path)
    assert calls == {"Tensor.__mul__.0.forward": {"input.0": [60000.0] * 2, "output.0": [np.inf] * 2}}
    assert waits == 0


def test_what_was_overwritten_unseen_is_said_to_be_lost_and_accuses_nobody_if_it_was_not_known(tmp_path: Path) -> None:
    program = LATE + (
        "x, w = (torch.full((2,), 60000.0, dtype=torch.float16).npu() for _ in range(2))\n"
        "def unseen(tensor):\n"
        "    with torch._C.DisableTorchFunction(): tensor.fill_(1)\n"
        "def program(spoil):\n"
        "    y = x - 0\n"
        "    z = (w if spoil == 'w' else y) * 2\n"
        "    unseen({'w': w, 'y': y, 'z': z}[spoil])\n"
        "print(json.dumps([check(lambda: program(spoil), behind=1000)[0] for spoil in 'wyz']))"
    )
    data, given, returned = run_on_npu(program, tmp_path)
    assert data == {}
    assert "overwritten" in given["Tensor.__mul__.0.forward"]["input.0"]
    assert given["Tensor.__mul__.0.forward"]["output.0"] == [np.inf] * 2
    assert returned["Tensor.__mul__.0.forward"]["input.0"] == [60000.0] * 2
    assert "overwritten" in returned["Tensor.__mul__.0.forward"]["output.0"]


def test_a_late_device_ends_the_program_when_it_is_heard_with_the_number_asked_for(tmp_path: Path) -> None:
    program = LATE + (
        "x = torch.full((2,), 60000.0, dtype=torch.float16).npu()\n"
        "done = []\n"
        "def forward():\n"
        "    for number in range(1000):\n"
        "        done.append(number)\n"
        "        x * 2\n"
        "folder, ends = sys.argv[1], []\n"
        "try:\n"
        "    check(forward, overflows=3)\n"
        "except OverflowStop as error:\n"
        "    ends.append(str(error))\n"
        "def backward():\n"
        "    y = torch.zeros(2, requires_grad=True, device='npu')\n"
        "    z = y.sqrt() * 1e30\n"
        "    for _ in range(100): z = z * 1.0\n"
        "    for _ in range(100): y2 = y * 2; z = z + y2\n"
        "    z.sum().backward()\n"
        "try:\n"
        "    check(backward, overflows=1)\n"
        "except OverflowStop as error:\n"
        "    ends.append(str(error))\n"
        "try:\n"
        "    check(lambda: x * 2, overflows=1)  # heard at the end\n"
        "except OverflowStop as error:\n"
        "    ends.append(str(error))\n"
        "print(json.dumps([len(done), ends, list(kept(folder + '/0'))]))"
    )
    done, ends, calls = run_on_npu(program, tmp_path)
    assert 3 < done < 100
    assert calls == [f"Tensor.__mul__.{number}.forward" for number in range(3)]
    assert ["3 times" in ends[0], "Tensor.sqrt.0.backward" in ends[1], "1 time" in ends[2]] == [True] * 3


def test_a_late_device_is_waited_for_before_the_weights_change_and_holds_no_more_than_there_is_room(
    tmp_path: Path,
) -> None:
    program = LATE + (
        "w = torch.full((2,), 60000.0, dtype=torch.float16).npu().requires_grad_()\n"
        "optimizer = torch.optim.SGD([w], lr=0.5)\n"
        "def train():\n"
        "    (w * 2)\n"
        "    w.grad = torch.full_like(w, 60000.0)\n"
        "    optimizer.step()\n"
        "calls, waits = check(train, behind=1000)\n"
        "held = []\n"
        "def many():\n"
        "    import gc, ulpscope.capture.session as session\n"
        "    sieve = session._on[0]().sieve\n"
        "    x = torch.ones(1024).npu()\n"
        "    x + 1\n"
        "    sieve._finiteness.room = 100 << 10\n"
        "    for _ in range(100):\n"
        "        x + 1\n"
        "        held.append(sieve._bytes)\n"
        "check(many, behind=1000)\n"
        "print(json.dumps([calls, waits > 0, max(held)]))"
    )
    calls, waited, most = run_on_npu(program, tmp_path)
    assert list(calls) == ["Tensor.__mul__.0.forward"]
    assert calls["Tensor.__mul__.0.forward"]["input.0"] == [60000.0] * 2
    assert waited
    assert 50 << 10 < most <= 110 << 10


@pytest.mark.parametrize("name", ["load", "hub.load", "ops.load_library", "serialization.load"])
def test_a_dump_cannot_name_what_is_no_operator(tmp_path: Path, name: str) -> None:
    builder = DumpBuilder(tmp_path)
    builder.call("Torch", name, values={("input", 0): "/nowhere", ("output", 0): np.array([np.inf], np.float32)})
    dump = open_dump(builder.close())
    found = overflow_of(dump, dump.nth(0))
    assert found.nature is Nature.UNKNOWN
    assert "Torch." in found.reason and "nowhere" not in found.reason
