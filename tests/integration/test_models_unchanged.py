"""A program computes the same bytes with and without capture, at every level."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from integration import programs_autograd, programs_corners, programs_layers, programs_transformers
from integration.runs import LEVELS, Build, Program, assert_unchanged, run_captured

# Programs that call no nn.Module.
WITHOUT_MODULES = {
    "in_place_views",
    "functional_autograd",
    "higher_order_operators",
    "memory_shared_with_numpy",
    "memory_of_a_storage",
    "unbind_and_out_arguments",
    "complex_fft",
    "odd_dtypes",
    "tensor_subclass",
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {level: (level, {}) for level in LEVELS}
SETTINGS["mix-tensors"] = ("mix", {"tensors": True, "checksum": True})


def programs_of(*modules: Any) -> dict[str, Build]:
    """Every public function of a module that is written there and builds a program."""
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and inspect.signature(function).return_annotation is Program
        and not inspect.signature(function).parameters
    }


PROGRAMS = programs_of(programs_layers, programs_autograd, programs_corners, programs_transformers)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_the_program_computes_the_same_bytes(name: str, setting: str, tmp_path: Path) -> None:
    level, options = SETTINGS[setting]
    assert_unchanged(PROGRAMS[name], tmp_path, level, has_modules=name not in WITHOUT_MODULES, **options)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("attention_in_evaluation", "aten::_native_multi_head_attention"),
        ("encoder_in_evaluation", "aten::_transformer_encoder_layer_fwd"),
    ],
)
def test_attention_stays_on_its_fast_path(name: str, kernel: str, level: str, tmp_path: Path) -> None:
    with torch.autograd.profiler.profile() as profile:
        run_captured(PROGRAMS[name], tmp_path / "run", level)
    assert kernel in {event.name for event in profile.function_events}


def test_the_fast_path_is_one_recorded_call(tmp_path: Path) -> None:
    run_captured(programs_layers.attention_in_evaluation, tmp_path / "run", "op")
    names = {call.name for call in ulpscope.open_dump(tmp_path / "run").ids()}
    assert "_native_multi_head_attention" in names
