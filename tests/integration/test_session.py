"""Starting, stopping, stepping: what a loop does to a capture, and what mistakes give."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from ulpscope.model.errors import CaptureError, ConfigError
from ulpscope.model.names import call_text

X = torch.ones(4)


def names(path: Path, **where: int) -> list[str]:
    return [call_text(call) for call in ulpscope.open_dump(path, **where).ids()]


def test_windows_inside_one_step_are_kept_and_what_is_between_is_not(tmp_path: Path) -> None:
    capture = ulpscope.Capture(tmp_path)
    capture.start()
    torch.sin(X)
    capture.stop()
    torch.cos(X)
    capture.start()
    torch.tan(X)
    capture.stop()
    capture.step()
    capture.close()
    assert names(tmp_path) == ["Torch.sin.0.forward", "Torch.tan.0.forward"]


def test_what_was_written_between_two_windows_is_measured_anew(tmp_path: Path) -> None:
    x = torch.ones(4)
    capture = ulpscope.Capture(tmp_path)
    capture.start()
    torch.sin(x)
    capture.stop()
    x.data.mul_(5)  # raises no version, and nobody was looking
    capture.start()
    torch.cos(x)
    capture.close()
    stats = ulpscope.open_dump(tmp_path).call("Torch.cos.0.forward").values[0].stats
    assert stats is not None
    assert stats.max == 5.0


def test_steps_that_never_came_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ulpscope.capture(tmp_path / "run", steps=[100]) as capture:
        torch.sin(X)
        capture.step()
    assert "nothing was recorded: the run ended at step 1, before the first asked one" in caplog.text


def test_a_forked_child_saves_nothing_into_its_parents_dump(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path) as capture:
        capture.save("mine", X)
        child = os.fork()
        if not child:
            capture.save("childs", X)
            os._exit(0)
        os.waitpid(child, 0)
    assert names(tmp_path) == ["mine.0.debug"]


def test_after_stop_the_dump_reads_as_complete(tmp_path: Path) -> None:
    capture = ulpscope.Capture(tmp_path)
    capture.start()
    torch.sin(X)
    capture.stop()
    assert ulpscope.open_dump(tmp_path).ending == "complete"
    capture.close()


def test_starting_twice_records_once(tmp_path: Path) -> None:
    capture = ulpscope.Capture(tmp_path)
    capture.start()
    capture.start()
    torch.sin(X)
    capture.stop()
    capture.stop()
    capture.close()
    capture.close()
    assert names(tmp_path) == ["Torch.sin.0.forward"]


def test_only_asked_steps_are_recorded_and_the_others_cost_nothing(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path, steps=[1, "3:4"]) as capture:
        for step in range(6):
            assert (torch._C._len_torch_function_stack() > 0) == (step in (1, 3, 4))
            torch.sin(X)
            capture.step()
    assert [dump.manifest.step for dump in ulpscope.open_run(tmp_path)] == [1, 3, 4]


def test_a_rank_that_is_not_asked_records_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ulpscope.capture(tmp_path / "run", ranks=[3], rank=1):
        torch.sin(X)
    assert not (tmp_path / "run").exists()


def test_no_empty_step_is_left_behind_the_last(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path) as capture:
        torch.sin(X)
        capture.step()
    assert [dump.manifest.step for dump in ulpscope.open_run(tmp_path)] == [0]


def test_an_earlier_capture_is_refused_or_replaced_never_mixed(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path) as capture:
        for _ in range(3):
            torch.sin(X)
            capture.step()
    with pytest.raises(CaptureError, match="holds an earlier capture"):
        ulpscope.Capture(tmp_path).start()
    assert torch._C._len_torch_function_stack() == 0
    with ulpscope.capture(tmp_path, overwrite=True):
        torch.cos(X)
    assert [dump.manifest.step for dump in ulpscope.open_run(tmp_path)] == [0]
    assert names(tmp_path) == ["Torch.cos.0.forward"]


def test_only_one_capture_can_be_on(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path / "a"):
        with pytest.raises(CaptureError, match="is on already; stop it"):
            ulpscope.Capture(tmp_path / "b").start()
        torch.sin(X)
    assert names(tmp_path / "a") == ["Torch.sin.0.forward"]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("model", ["model", 3, [torch.nn.Linear(1, 1), "x"]])
def test_what_is_no_model_is_refused(tmp_path: Path, model: object) -> None:
    with pytest.raises(CaptureError, match=r"model must be a torch\.nn\.Module"):
        ulpscope.Capture(tmp_path, model=model)


def test_a_wrong_option_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'levle'\. Did you mean 'level'"):
        ulpscope.Capture(tmp_path, levle="op")


def test_a_read_only_place_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot write into"):
        ulpscope.Capture(tmp_path / "file" / "run").start()
    assert torch._C._len_torch_function_stack() == 0


def test_saved_values_have_a_counter_and_a_gradient(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    with ulpscope.capture(tmp_path, tensors=True) as capture:
        y = x * 2
        capture.save("y", y)
        capture.save("y", {"a": y, "b": [1, "two"]})
        (y * 3).sum().backward()
    dump = ulpscope.open_dump(tmp_path)
    assert dump.load(dump.call("y.0.debug").values[0]).tolist() == [2.0, 2.0, 2.0]
    assert dump.load(dump.call("y_grad.0.debug").values[0]).tolist() == [3.0, 3.0, 3.0]
    assert [value.slot.path for value in dump.call("y.1.debug").values] == [("a",), ("b", 0), ("b", 1)]


def test_a_filter_that_matches_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ulpscope.capture(tmp_path, only="gelu"):
        torch.sin(X)
    assert "nothing matched 'gelu'" in caplog.text
    assert "nothing matched 'gelu'" in ulpscope.open_dump(tmp_path).manifest.notes


def test_a_filter_that_matches_nothing_in_many_steps_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capture = ulpscope.Capture(tmp_path, only="gelu")
    for _ in range(3):
        capture.start()
        torch.sin(X)
        capture.stop()
        capture.step()
    capture.close()
    assert caplog.text.count("nothing matched") == 1
    for step in range(3):
        assert "nothing matched 'gelu'" in ulpscope.open_dump(tmp_path / f"step{step}").manifest.notes


def test_a_filter_that_matches_only_what_its_level_does_not_record_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ulpscope.capture(tmp_path, level="module", only="sin"):
        torch.sin(X)
    assert "nothing matched 'sin'" in caplog.text


def test_a_program_may_hold_every_object_that_the_collector_knows(tmp_path: Path) -> None:
    x, held = torch.ones(3, requires_grad=True), []
    with ulpscope.capture(tmp_path):
        for _ in range(3):
            held.append(gc.get_objects())
            torch.sin(x).sum().backward()
    dump = ulpscope.open_dump(tmp_path)
    assert not dump.manifest.notes
    assert {f"Torch.sin.{index}.backward" for index in range(3)} <= {call_text(call.id) for call in dump.calls()}


def test_phases_and_roles_leave_out_the_rest(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    with ulpscope.capture(tmp_path / "b", phases=["backward"]):
        (x * 2).sum().backward()
    assert {call.phase.value for call in ulpscope.open_dump(tmp_path / "b").ids()} == {"backward"}
    with ulpscope.capture(tmp_path / "o", roles=["output"]):
        (x * 2).sum().backward()
    roles = {value.slot.role.value for call in ulpscope.open_dump(tmp_path / "o").calls() for value in call.values}
    assert roles == {"output"}


def test_activations_are_freed_as_they_would_be(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    with ulpscope.capture(tmp_path, model=model, level="mix", tensors=True):
        y = model(torch.ones(2, 8))
        loss = (y * 2).sum()
        alive = weakref.ref(y)
        del y
        loss.backward()
        del loss
        gc.collect()
        assert alive() is None


def test_each_distinct_value_is_stored_once(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with ulpscope.capture(tmp_path, tensors=True):
        for _ in range(10):
            torch.sin(x)
            x.clone()
    size = (tmp_path / "step0" / "rank0" / "payload.bin").stat().st_size
    assert size <= 2 * 4000 + 64


def test_the_environment_is_in_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(77)
    with ulpscope.capture(tmp_path):
        torch.sin(X)
    environment = ulpscope.open_dump(tmp_path).manifest.environment
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["seeds"]["torch"] == 77
    assert environment["flags"]["deterministic_algorithms"] is False
    assert {"command", "commit", "folder", "devices"} <= set(environment)


def flags(path: Path, **where: int) -> dict[str, Any]:
    found: dict[str, Any] = ulpscope.open_dump(path, **where).manifest.environment["flags"]
    return found


@pytest.fixture
def settings() -> Iterator[None]:
    """Gives back what the tests below change."""
    yield
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("level", ["op", "module", "mix", "kernel"])
def test_settings_are_those_of_the_first_forward(tmp_path: Path, settings: None, level: str) -> None:
    model = torch.nn.Linear(4, 2)
    with ulpscope.capture(tmp_path, level=level) as capture:
        X.clone()
        torch.set_float32_matmul_precision("high")
        torch.set_flush_denormal(True)
        with torch.autocast("cpu", torch.bfloat16):
            model(X)
        capture.step()
        model(X)
    first, second = flags(tmp_path, step=0), flags(tmp_path, step=1)
    assert (first["float32_matmul_precision"], first["flush_denormals"]) == ("high", True)
    assert first["float32_products"]["cuda matmul"] == "tf32"
    assert first["autocast"] == {"cpu": "torch.bfloat16"}
    assert second["autocast"] == {}
    assert not {text for text in first.values() if str(text).startswith("unknown")}


def test_settings_without_a_module_are_those_of_the_first_call_and_what_they_became_is_told(
    tmp_path: Path, settings: None
) -> None:
    with ulpscope.capture(tmp_path) as capture:
        torch.sin(X)
        torch.use_deterministic_algorithms(True)
        capture.step()
        torch.sin(X)
    environments = [dump.manifest.environment for dump in ulpscope.open_run(tmp_path)]
    assert [each["flags"]["deterministic_algorithms"] for each in environments] == [False, True]
    assert [each.get("flags_at_end") for each in environments] == [{"deterministic_algorithms": True}, None]


def test_asking_for_settings_loads_nothing_and_wakes_no_device() -> None:
    code = """
import sys, torch
before = set(sys.modules)
from ulpscope.frameworks.torch.settings import settings, variables
found = settings(), variables()
print(sorted(each for each in set(sys.modules) - before if not each.startswith("ulpscope")), torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    modules, _, woken = done.stdout.strip().rpartition(" ")
    assert woken == "False"
    assert "torch._dynamo" not in modules
    assert "torch.backends" not in modules


@pytest.mark.parametrize("name", ["my dump", "lr=1e-4,bs=8+run@2(%1)#~", "-a'\"\\b", "ünïcode"])
def test_a_folder_may_be_called_what_the_file_system_accepts(tmp_path: Path, name: str) -> None:
    with ulpscope.capture(tmp_path / name):
        torch.sin(X)
    assert names(tmp_path / name) == ["Torch.sin.0.forward"]
