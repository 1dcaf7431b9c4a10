"""After a capture torch, Python and the model are as they were; while it is on, nobody can tell by looking."""

import copy
import gc
import inspect
import io
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as optimizers

import ulpscope
from integration.runs import LEVELS, assert_same, frozen

SPACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch._C.TensorBase": torch._C.TensorBase,
    "torch.nn.functional": F,
    "torch.nn.init": nn.init,
    "torch._VF": torch._VF,
    "torch.distributed": torch.distributed,
    "torch.distributed.distributed_c10d": torch.distributed.distributed_c10d,
    "torch.distributed.Work": torch.distributed.Work,
    "torch.nn.Module": nn.Module,
    "torch.nn.modules.module": nn.modules.module,
    "torch.nn.Linear": nn.Linear,
    "torch.overrides": torch.overrides,
    "torch.autograd": torch.autograd,
    "torch.autograd.graph": torch.autograd.graph,
    "torch.autograd.Function": torch.autograd.Function,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.optimizer": optimizers,
    "torch.utils.checkpoint": torch.utils.checkpoint,
    "torch._dynamo.eval_frame": torch._dynamo.eval_frame,
    "torch._dynamo": torch._dynamo,
    "threading": threading,
    "threading.Thread": threading.Thread,
}
FUNCTIONS: dict[str, Any] = {
    "Module.__call__": nn.Module.__call__,
    "Thread._bootstrap_inner": threading.Thread._bootstrap_inner,
    "torch.compile": torch.compile,
    "all_reduce": torch.distributed.all_reduce,
    "all_gather": torch.distributed.all_gather,
    "_engine_run_backward": torch.autograd.graph._engine_run_backward,
    "_register_hook": torch.autograd.function._HookMixin._register_hook,
    "Tensor.backward": torch.Tensor.backward,
    "F.softmax": F.softmax,
}
# Written by torch itself when a thread, a hook or a mode comes and goes.
MAY_CHANGE = {("threading", "_active"), ("threading", "_limbo")}


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda module, args, output: None)
    model[2].weight.register_post_accumulate_grad_hook(lambda value: None)
    return model


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    worker = threading.Thread(target=lambda: model(torch.ones(1, 3)))
    worker.start()
    worker.join()


def fail(model: nn.Module) -> None:
    train(model)
    model(torch.ones(2, 99))


def survey(model: nn.Module) -> dict[str, Any]:
    """Every object that a tool could have touched, by identity."""
    found: dict[str, Any] = {}
    for name, space in SPACES.items():
        for key, value in vars(space).items():
            if (name, key) not in MAY_CHANGE:
                found[f"{name}.{key}"] = value
    for name, function in FUNCTIONS.items():
        found[f"code of {name}"] = function.__code__
        found[f"defaults of {name}"] = function.__defaults__
        found[f"closure of {name}"] = function.__closure__
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"module {path!r} {key}"] = value
            if isinstance(value, dict):
                found[f"module {path!r} {key} content"] = tuple((name, id(item)) for name, item in value.items())
    for path, parameter in model.named_parameters():
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, attribute)
            found[f"parameter {path} {attribute}"] = None if hooks is None else tuple(map(id, hooks.values()))
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        found[f"optimizer {name} content"] = tuple(getattr(optimizers, name))
    for name, hooks in vars(nn.modules.module).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            found[f"module {name} content"] = tuple(hooks)
    found["function modes"] = torch._C._len_torch_function_stack()
    found["dispatch modes"] = torch._C._len_torch_dispatch_stack()
    found["gc"] = (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), tuple(map(id, gc.callbacks)))
    found["python"] = (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile(), sys.excepthook)
    found["threads"] = frozenset(threading.enumerate())
    found["flags"] = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_anomaly_enabled(),
    )
    return found


def assert_untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    changed = [key for key, value in before.items() if after[key] is not value and not _equal(value, after[key])]
    assert changed == []


def _equal(first: Any, second: Any) -> bool:
    plain = (int, str, float, bool, tuple, type(None))
    if isinstance(first, frozenset):  # threads; one that an earlier test left may have ended meanwhile
        return first >= second
    return isinstance(first, plain) and type(first) is type(second) and bool(first == second)


def random_states() -> Any:
    return frozen([torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()])


@pytest.mark.parametrize("level", LEVELS)
def test_torch_is_untouched_after_capture(level: str, tmp_path: Path) -> None:
    model = make_model()
    train(model)
    before = survey(model)
    with ulpscope.capture(tmp_path / "run", model=model, level=level, tensors=True) as cap:
        train(model)
        cap.save("x", torch.ones(1))
        cap.step()
        train(model)
    assert_untouched(before, survey(model))


@pytest.mark.parametrize("level", LEVELS)
def test_torch_is_untouched_after_an_exception(level: str, tmp_path: Path) -> None:
    model = make_model()
    train(model)
    before = survey(model)
    with pytest.raises(RuntimeError), ulpscope.capture(tmp_path / "run", model=model, level=level):
        fail(model)
    assert_untouched(before, survey(model))


@pytest.mark.parametrize("level", LEVELS)
def test_torch_is_untouched_after_stop_and_between_two_starts(level: str, tmp_path: Path) -> None:
    model = make_model()
    train(model)
    before = survey(model)
    cap = ulpscope.Capture(tmp_path / "run", model=model, level=level)
    for _ in range(2):
        cap.start()
        train(model)
        cap.stop()
        after = survey(model)
        after["threads"] = before["threads"]  # the writer waits for a second start
        assert_untouched(before, after)
    cap.close()
    assert_untouched(before, survey(model))


def test_a_capture_of_steps_that_are_over_leaves_torch_alone(tmp_path: Path) -> None:
    model = make_model()
    train(model)
    before = survey(model)
    with ulpscope.capture(tmp_path / "run", model=model, level="mix", steps=[0]) as cap:
        train(model)
        cap.step()
        after = survey(model)
        after["threads"] = before["threads"]
        assert_untouched(before, after)


def test_a_capture_that_cannot_start_leaves_torch_alone(tmp_path: Path) -> None:
    model = make_model()
    (tmp_path / "file").write_text("in the way")
    before = survey(model)
    with pytest.raises(ulpscope.CaptureError):
        ulpscope.Capture(tmp_path / "file" / "run", model=model, level="mix").start()
    assert_untouched(before, survey(model))


def test_the_survey_sees_a_hook_a_patch_and_a_mode() -> None:
    model = make_model()
    before = survey(model)
    handle = model[1].register_forward_hook(lambda module, args, output: None)
    with pytest.raises(AssertionError):
        assert_untouched(before, survey(model))
    handle.remove()
    assert_untouched(before, survey(model))
    with torch.device("cpu"), pytest.raises(AssertionError):
        assert_untouched(before, survey(model))
    original = F.gelu
    try:
        F.gelu = lambda value: original(value)
        with pytest.raises(AssertionError):
            assert_untouched(before, survey(model))
    finally:
        F.gelu = original


@pytest.mark.parametrize("level", LEVELS)
def test_the_random_sources_are_where_they_were(level: str, tmp_path: Path) -> None:
    model = make_model()
    before = random_states()
    with ulpscope.capture(tmp_path / "run", model=model, level=level, tensors=True, checksum=True) as cap:
        train(model)
        cap.step()
        train(model)
    assert_same(before, random_states())


@pytest.mark.parametrize("level", LEVELS)
def test_the_modes_of_the_program_stay_in_their_place(level: str, tmp_path: Path) -> None:
    with torch.device("cpu"):
        mode = torch._C._get_function_stack_at(0)
        with ulpscope.capture(tmp_path / "run", level=level):
            torch.ones(1) + 1
        assert torch._C._len_torch_function_stack() == 1
        assert torch._C._get_function_stack_at(0) is mode
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_mode_that_ends_after_the_capture_began_ends_well(level: str, tmp_path: Path) -> None:
    cap = ulpscope.Capture(tmp_path / "run", level=level)
    with torch.device("cpu"):
        cap.start()
        torch.ones(1)
    torch.ones(1) + 1
    cap.close()
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_thread_that_outlives_the_capture_loses_its_dispatch_mode(level: str, tmp_path: Path) -> None:
    cap = ulpscope.Capture(tmp_path / "run", level=level).start()
    stopped, asked = threading.Event(), threading.Event()
    lengths: list[int] = []

    def work() -> None:
        torch.ones(1) + 1
        lengths.append(torch._C._len_torch_dispatch_stack())
        asked.set()
        stopped.wait(30)
        torch.ones(1) + 1
        lengths.append(torch._C._len_torch_dispatch_stack())

    thread = threading.Thread(target=work)
    thread.start()
    asked.wait(30)
    cap.close()
    stopped.set()
    thread.join(30)
    assert lengths == [int(level == "kernel"), 0]


def test_a_mode_of_ours_that_was_taken_away_is_told(tmp_path: Path) -> None:
    cap = ulpscope.Capture(tmp_path / "run", level="kernel").start()
    torch.ones(1) + 1
    torch._C._pop_torch_dispatch_stack(None)
    cap.close()
    notes = ulpscope.open_dump(tmp_path / "run").manifest.notes
    assert "at the end torch's stack of dispatch modes held ours 0 times, not once" in notes


# --- while it is on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_torch_looks_the_same_while_capturing(level: str, tmp_path: Path) -> None:
    def look() -> dict[str, Any]:
        return {
            "gelu": F.gelu,
            "signature of softmax": str(inspect.signature(F.softmax)),
            "signature of a module": str(inspect.signature(nn.Linear.forward)),
            "call of a module": nn.Module.__call__,
            "add": torch.Tensor.add,
            "matmul": torch.matmul,
            "pickled": pickle.loads(pickle.dumps(torch.matmul)),
            "pickled functional": pickle.loads(pickle.dumps(F.gelu)),
            "type": type(torch.ones(1)),
            "type of a sum": type(torch.ones(1) + 1),
        }

    before = look()
    with ulpscope.capture(tmp_path / "run", level=level):
        assert look() == before
        assert F.gelu is before["gelu"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_model_can_be_copied_while_capturing(way: str, level: str, tmp_path: Path) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "torch.save": saved_and_loaded,
    }
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with ulpscope.capture(tmp_path / "run", model=model, level=level):
        model(torch.randn(2, 3)).sum().backward()
        twin = ways[way](model)
        twin(torch.randn(2, 3)).sum().backward()
    assert [*map(torch.equal, model.parameters(), twin.parameters())] == [True] * 4
    assert type(twin) is nn.Sequential


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_of_the_program_is_kept_alive(level: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with ulpscope.capture(tmp_path / "run", model=model, level=level, tensors=True):
        gc.disable()
        try:
            data = torch.randn(2, 3)
            hidden = model(data)
            loss = hidden.square().sum()
            loss.backward()
            watched = [weakref.ref(value) for value in (data, hidden, loss)]
            del data, hidden, loss
            assert [reference() for reference in watched] == [None, None, None]
        finally:
            gc.enable()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_function_that_the_program_has_exchanged_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Python function stands there any more; a test of the program's may do so."""
    for owner, name in ((torch.distributed, "init_process_group"), (torch.cuda.CUDAGraph, "replay")):
        monkeypatch.setattr(owner, name, print)
    with ulpscope.capture(tmp_path / "run"):
        torch.ones(2) + 1
    assert torch.distributed.init_process_group is torch.cuda.CUDAGraph.replay is print
    assert len(ulpscope.open_dump(tmp_path / "run")) > 0
