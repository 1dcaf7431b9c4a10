"""Starting, stopping, selecting and saving, in any order: what was asked is recorded, a mistake is one clear error."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ulpscope
from integration.runs import LEVELS, whole_dumps
from integration.test_threads_and_forks import in_fork
from ulpscope.model.errors import CaptureError
from ulpscope.model.names import call_text

PROMISE = "as asked, or one clear error"
case = pytest.mark.case
levels = pytest.mark.parametrize("level", LEVELS)
X = torch.ones(3)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def names(dump: ulpscope.Dump) -> list[str]:
    return [call_text(call) for call in dump.ids()]


def outermost(dump: ulpscope.Dump) -> list[str]:
    return [call_text(call.id) for call in dump.calls() if call.parent is None]


@case("start_twice")
@levels
def test_a_second_start_records_nothing_twice(level: str, tmp_path: Path) -> None:
    model = net()
    capture = ulpscope.Capture(tmp_path, level=level)
    capture.start(model)
    capture.start(model)
    model(X)
    capture.close()
    (dump,) = whole_dumps(tmp_path, 1)
    assert sum(call.name in ("Sequential", "linear") for call in dump.ids()) == (2 if level in ("mix", "kernel") else 1)


@case("two_windows")
@levels
def test_windows_of_one_step_are_kept_and_what_is_between_is_not(level: str, tmp_path: Path) -> None:
    model = net()
    capture = ulpscope.Capture(tmp_path, model=model, level=level)
    for number in range(3):
        if number != 1:
            capture.start()
        model(X * number)
        capture.stop()
    capture.step()
    capture.close()
    (dump,) = whole_dumps(tmp_path, 1)
    name = "linear" if level == "op" else "Sequential"
    shown = [call.values[0].stats.max for call in dump.calls() if call.id.name == name]
    assert shown == [0.0, 2.0]


@case("second_model")
@levels
def test_a_model_given_later_is_recorded_too(level: str, tmp_path: Path) -> None:
    first, second = net(), nn.Sequential(nn.Linear(3, 2))
    capture = ulpscope.Capture(tmp_path, level=level)
    for model in (first, second):
        capture.start(model)
        model(X).sum().backward()
        capture.stop()
        capture.step()
    capture.close()
    one, two = whole_dumps(tmp_path, 2)
    kind = "linear" if level == "op" else "Linear"
    assert all(any(call.name.endswith(kind) for call in dump.ids()) for dump in (one, two))


@case("model_list")
@levels
def test_several_models_are_told_apart(level: str, tmp_path: Path) -> None:
    models = [net(), net()]
    with ulpscope.capture(tmp_path, model=models, level=level):
        for model in models:
            model(X).sum().backward()
    (dump,) = whole_dumps(tmp_path, 1)
    if level != "op":
        tops = [call.name for call in dump.ids() if call.name.endswith("Sequential") and call.phase.value == "forward"]
        assert tops == ["0.Sequential", "1.Sequential"]


@case("bad_model")
@levels
@pytest.mark.parametrize("model", ["a text", 3, [nn.Linear(1, 1), "x"], {"a": nn.Linear(1, 1)}], ids=str)
def test_what_is_no_model_is_refused(model: Any, level: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"model must be a torch\.nn\.Module"):
        ulpscope.Capture(tmp_path, level=level).start(model)
    assert torch._C._len_torch_function_stack() == 0


@case("step_list")
@levels
def test_only_the_asked_steps_are_recorded(level: str, tmp_path: Path) -> None:
    model = net()
    with ulpscope.capture(tmp_path, model=model, level=level, steps=[1, 3]) as capture:
        for _ in range(5):
            model(X)
            capture.step()
    assert [dump.manifest.step for dump in whole_dumps(tmp_path, 2)] == [1, 3]


@case("step_beyond")
@levels
def test_steps_that_never_came_are_said(level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ulpscope.capture(tmp_path / "run", level=level, steps=[100]) as capture:
        torch.sin(X)
        capture.step()
    assert "before the first asked one" in caplog.text


@case("debug_save")
@levels
def test_saved_values_and_their_gradients_are_recorded(level: str, tmp_path: Path) -> None:
    weight = torch.ones(3, requires_grad=True)
    with ulpscope.capture(tmp_path, level=level) as capture:
        hidden = weight * 2
        capture.save("hidden", {"a": hidden, "n": 3})
        (hidden * 5).sum().backward()
    assert weight.grad.tolist() == [10.0] * 3
    (dump,) = whole_dumps(tmp_path, 1)
    assert dump.call("hidden.0.debug").values[0].stats.max == 2.0
    assert dump.call("hidden_grad.0.debug").values[0].stats.max == 5.0


@case("filter_list")
@pytest.mark.parametrize("level", ["op", "mix", "kernel"])
def test_a_filter_keeps_what_it_names(level: str, tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path, level=level, only=["Torch.sin"]):
        torch.cos(torch.sin(X))
    (dump,) = whole_dumps(tmp_path, 1)
    assert {call.name.split(".")[0] for call in dump.ids()} <= {"sin"}
    assert "Torch.sin.0.forward" in names(dump)


@case("filter_data_mode")
@levels
def test_phases_and_roles_keep_what_they_name(level: str, tmp_path: Path) -> None:
    model = net()
    with ulpscope.capture(tmp_path, model=model, level=level, phases=["forward"], roles=["output"]):
        model(X).sum().backward()
    (dump,) = whole_dumps(tmp_path, 1)
    assert {call.phase.value for call in dump.ids()} <= {"forward", "parameters_grad"}
    roles = {value.slot.role.value for call in dump.calls() for value in call.values}
    assert roles <= {"output", "parameters"} and "output" in roles


@case("xor_mode")
@pytest.mark.parametrize("level", ["op", "mix", "kernel"])
def test_the_checksum_of_an_input_is_that_before_the_write(level: str, tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path, level=level, checksum=True):
        data = torch.ones(4) * 3
        data.mul_(5)
    (dump,) = whole_dumps(tmp_path, 1)
    made, written = dump.call("Tensor.__mul__.0.forward"), dump.call("Tensor.mul_.0.forward")
    assert written.values[0].checksum == made.values[-1].checksum != written.values[-1].checksum


@case("md5_stable")
@levels
def test_equal_values_have_equal_checksums(level: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with ulpscope.capture(tmp_path, model=model, level=level, checksum=True):
        for _ in range(40):
            model(torch.full((2, 8), 0.5))
    (dump,) = whole_dumps(tmp_path, 1)
    found: dict[Any, set[int]] = {}
    for call in dump.calls():
        for value in call.values:
            found.setdefault((call.id.name, value.slot), set()).add(value.checksum or 0)
    assert {len(each) for each in found.values()} == {1}


@case("start_in_forward")
@levels
def test_a_forward_may_start_and_stop(level: str, tmp_path: Path) -> None:
    capture = ulpscope.Capture(tmp_path, level=level)

    class Starts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, data: Tensor) -> Tensor:
            capture.start(self)
            data = self.inner(data)
            capture.stop()
            return self.outer(data)

    model = Starts()
    for _ in range(2):
        model(X).sum().backward()
        capture.step()
    capture.close()
    for dump in whole_dumps(tmp_path, 2):
        assert sum(call.name.lower().endswith("linear") for call in dump.ids()) >= 1
        assert not any("outer" in call.name for call in dump.ids())


# --- misuse -----------------------------------------------------------------------------------------------------


@case("misuse: order of calls")
@pytest.mark.parametrize("order", ["stop", "step", "close", "stop close start stop", "step start step stop step close",
                                   "close close", "start close stop step close", "start step step step close"])  # fmt: skip
def test_calls_in_any_order_do_no_harm(order: str, tmp_path: Path) -> None:
    capture = ulpscope.Capture(tmp_path, overwrite=True)
    for word in order.split():
        getattr(capture, word)()
        torch.sin(X)
    capture.close()
    assert torch._C._len_torch_function_stack() == 0
    for dump in ulpscope.open_run(tmp_path) if (tmp_path / "step0").exists() else []:
        assert dump.ending == "complete"


@case("misuse: two captures")
def test_a_second_capture_is_refused_nested_or_from_a_thread(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def other() -> None:
        try:
            ulpscope.Capture(tmp_path / "b").start()
        except CaptureError as error:
            errors.append(error)

    with ulpscope.capture(tmp_path / "a"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        other()
        torch.sin(X)
    assert len(errors) == 2 and "is on already; stop it" in str(errors[0])
    assert len(whole_dumps(tmp_path / "a", 1)[0]) == 1 and not (tmp_path / "b").exists()


@case("misuse: notebook run again")
def test_a_cell_run_again_replaces_or_is_refused(tmp_path: Path) -> None:
    """A capture that was left open by an exception goes when its name is bound anew."""
    capture: Any = None
    for turn in range(3):
        if capture is not None:
            capture.close()
        capture = ulpscope.Capture(tmp_path, overwrite=True).start()
        for _ in range(turn + 1):
            torch.sin(X)
    capture.close()
    (dump,) = whole_dumps(tmp_path, 1)
    assert len(dump) == 3


@case("misuse: capture forgotten")
def test_a_capture_that_nobody_holds_any_more_does_not_block_the_next(tmp_path: Path) -> None:
    def forgetful() -> None:
        ulpscope.Capture(tmp_path / "a").start()
        torch.sin(X)

    assert in_fork(lambda: (forgetful(), _second(tmp_path / "b"))) == 0  # type: ignore[arg-type, func-returns-value]
    assert names(ulpscope.open_dump(tmp_path / "a"))[0] == "Torch.sin.0.forward"


def _second(path: Path) -> None:
    try:
        with ulpscope.capture(path):
            torch.cos(X)
    except CaptureError as error:
        assert "is on already; stop it" in str(error)


@case("misuse: model changed between steps")
@levels
def test_a_model_may_change_between_steps(level: str, tmp_path: Path) -> None:
    model = net()
    with ulpscope.capture(tmp_path, model=model, level=level) as capture:
        for width in (3, 5, 2):
            model[0] = nn.Linear(3, width)
            if width == 2:
                del model[1]
                model.requires_grad_(False)
            out = model(X)
            if out.requires_grad:
                out.sum().backward()
            capture.step()
    shapes = [
        [value.shape for value in call.values if value.slot.role.value == "output"]
        for dump in whole_dumps(tmp_path, 3)
        for call in dump.calls()
        if call.id.name == ("linear" if level == "op" else "Sequential") and call.id.phase.value == "forward"
    ]
    assert shapes == [[(3,)], [(5,)], [(2,)]]


@case("misuse: hooks removed by the user")
@levels
def test_hooks_that_the_program_clears_change_nothing(level: str, tmp_path: Path) -> None:
    model = net()
    with ulpscope.capture(tmp_path, model=model, level=level):
        for module in model.modules():
            for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
                getattr(module, table).clear()
        out = model(X)
        for value in model.parameters():
            value._backward_hooks = None
        out.sum().backward()
        for value in model.parameters():
            hooks = value._post_accumulate_grad_hooks
            if hooks is not None:
                hooks.clear()
        model(X).sum().backward()
    (dump,) = whole_dumps(tmp_path, 1)
    name = "tanh" if level == "op" else "Tanh"
    assert Counter(c.phase.value for c in dump.ids() if c.name.endswith(name)) == {"forward": 2, "backward": 2}


@case("misuse: model copied while captured")
@levels
def test_a_copy_of_a_captured_model_is_a_model_of_its_own(level: str, tmp_path: Path) -> None:
    model = net()
    with ulpscope.capture(tmp_path, model=model, level=level):
        model(X).sum().backward()
        twin, other = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for each in (twin, other):
            with torch.no_grad():
                each[0].weight.zero_()
                each[0].bias.fill_(0.5)
            assert each(X).tolist() == torch.full((3,), 0.5).tanh().tolist()
    assert model(X).tolist() != twin(X).tolist()
    whole_dumps(tmp_path, 1)


@case("misuse: folder changed by chdir")
def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with ulpscope.capture("run") as capture:
        torch.sin(X)
        capture.step()
        os.chdir("elsewhere")
        torch.sin(X)
        capture.step()
    assert [dump.manifest.step for dump in whole_dumps(tmp_path / "run", 2)] == [0, 1]


@case("index_2d_not_started")
@levels
def test_a_capture_that_was_never_started_changes_nothing(level: str, tmp_path: Path) -> None:
    def indexed() -> list[Any]:
        weight = torch.arange(18.0).reshape(6, 3).requires_grad_()
        out = weight[torch.tensor([[0, 1], [5, 2]])]
        out.square().sum().backward()
        return [out.tolist(), weight.grad.tolist()]

    bare = indexed()
    capture = ulpscope.Capture(tmp_path / "run", level=level, tensors=True)
    assert indexed() == bare
    assert torch._C._len_torch_function_stack() == 0
    capture.close()
    assert not (tmp_path / "run").exists()
