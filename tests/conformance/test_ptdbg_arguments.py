"""The arguments of ptdbg_ascend's names: what is refused, and in which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ulpscope.compat import ptdbg_ascend
from ulpscope.compat.ptdbg_ascend.switch import ArgumentError, Chooser, Switch, read_switch


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "list"}, "f, scope param set invalid, it's should not be an empty list."),
        ({"mode": "range", "scope": ["a"]}, "f, scope param set invalid, it's must be [start, end]."),
        ({"mode": "stack", "scope": ["a", "b", "c"]}, "f, scope param set invalid, it's must be [start, end] or []."),
        ({"mode": "acl", "scope": ["a", "b"]}, "scope must be congfigured as a list with one api name"),
        ({"mode": "acl"}, "scope must be congfigured as a list with one api name"),
        (
            {"mode": "api_list"},
            "Current dump mode is 'api_list', but the content of api_list parameter is empty or valid.",
        ),
        (
            {"mode": "x"},
            "Current mode 'x' is not supported. Please use the field in ['all', 'list', 'range', 'stack', 'acl', 'api_list', 'api_stack']",
        ),
        ({"mode": "list", "scope": "a"}, "f, scope param set invalid, it's must be a list."),
        ({"mode": "api_list", "api_list": "a"}, "f, api_list param set invalid, it's must be a list."),
        ({"filter_switch": "on"}, "Please set switch with 'ON' or 'OFF'."),
        ({"summary_only": "yes"}, "Params summary_only only support True or False."),
        (
            {"parts": ["sideways"]},
            'Please set dump_mode as a list containing one or more of "all", "forward", "backward", "input", "output".',
        ),
    ],
)
def test_000_011_012_013_014_015_017_018_019_020_023_024_055_mistakes_are_told_in_the_words_of_the_tool(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(said) + "$"):
        read_switch("f", **arguments)


def test_000_023_one_part_does_not_exclude_those_of_the_other_kind() -> None:
    assert read_switch("f", parts=["backward", "input"]).parts == ("backward", "input")
    assert read_switch("f", parts="input").parts == ("input",)
    assert read_switch("f", parts=["all", "input"]).parts == ()


def test_000_011_a_name_is_no_beginning_of_a_longer_number() -> None:
    calls = ["Tensor_abs_1_forward", "Tensor_abs_10_forward", "Tensor_abs_1_backward", "Tensor_absolute_0_forward"]
    assert Chooser(Switch("list", scope=("Tensor_abs_1",))).chosen(calls) == [0, 2]
    assert Chooser(Switch("list", scope=("Tensor_abs",))).chosen(calls) == [0, 1, 2]
    span = Switch("range", scope=("Tensor_abs_10_forward", "Tensor_abs_1_backward"))
    assert Chooser(span).chosen(calls) == [1, 2]
    piece = Chooser(span)
    assert [piece.chosen([call]) for call in (*calls, *calls)] == [[], [0], [0], [], [], [], [], []]


@pytest.mark.parametrize("api", ["relu", "Functional_relu", "functional_relu_0", "ReLU"])
def test_000_015_a_part_of_a_name_in_any_case_selects(api: str) -> None:
    asked = Switch("api_list", api_list=(api,))
    assert Chooser(asked).chosen(["Functional_relu_0_forward", "Functional_gelu_0_forward"]) == [0]
    assert asked.capture_options()["only"] in ((), ("relu",), ("Functional.relu",), ("ReLU",))


DEBUGGER_MISTAKES = [
    ({}, "You must provide hook_name argument to PrecisionDebugger when config is not provided."),
    ({"hook_name": "x"}, "hook_name should be in ['dump', 'overflow_check'], got x"),
    ({"hook_name": "dump", "rank": -1}, "rank -1 must be a positive integer."),
    ({"hook_name": "dump", "rank": "0"}, "rank 0 must be a positive integer."),
    ({"hook_name": "dump", "step": 3}, "step 3 should be list"),
    ({"hook_name": "dump", "step": ["a"]}, "step element a should be int"),
    ({"hook_name": "dump", "enable_dataloader": 1}, "Params enable_dataloader only support True or False."),
]


@pytest.mark.parametrize(("arguments", "said"), DEBUGGER_MISTAKES)
def test_000_004_005_006_007_arguments_of_the_debugger_are_checked(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(said) + "$"):
        ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), **arguments)


def test_000_003_without_a_folder_there_is_no_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_WORK_PATH", raising=False)
    for dump in (lambda: ptdbg_ascend.PrecisionDebugger(hook_name="dump"), lambda: ptdbg_ascend.set_dump_path()):
        with pytest.raises(ArgumentError, match="ASCEND_WORK_PATH"):
            dump()


def test_000_021_022_acl_needs_its_configuration_and_a_backward_its_gradients(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump")
    (tmp_path / "dump.json").write_text("{}")
    scope = ["Functional_conv2d_1_backward"]
    with pytest.raises(ValueError, match="acl_config must be configured when mode is 'acl'"):
        debugger.configure_hook(mode="acl", scope=["Tensor_permute_1_forward"])
    with pytest.raises(ValueError, match="file that exists"):
        debugger.configure_hook(mode="acl", scope=["Tensor_permute_1_forward"], acl_config="no.json")
    with pytest.raises(ValueError, match="backward_input must be configured when scope contains 'backward'"):
        debugger.configure_hook(mode="acl", scope=scope, acl_config=str(tmp_path / "dump.json"))


def test_000_009_025_026_032_arguments_of_overflow_check_are_checked(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="overflow_check")
    debugger.configure_hook(overflow_nums=1)
    debugger.configure_hook(overflow_nums=-1, need_replicate=True)
    for bad in (0, -2, 1.5, True):
        with pytest.raises(ValueError, match="overflow_nums must be an integer greater than 0 or set -1"):
            debugger.configure_hook(overflow_nums=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only support True or False"):
        debugger.configure_hook(need_replicate="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="acl_config must be configured when mode is 'acl'"):
        debugger.configure_hook(mode="acl")


def test_000_048_049_050_051_052_053_058_059_arguments_of_the_functions_are_checked() -> None:
    mistakes = {
        "The file path a/b contains special characters.": lambda: ptdbg_ascend.set_dump_path("x", dump_tag="a/b"),
        "sample not a valid keyword arguments in register_hook.": lambda: ptdbg_ascend.register_hook(
            None, ptdbg_ascend.acc_cmp_dump, sample=True
        ),
        "hook function must be set overflow_check or acc_cmp_dump": lambda: ptdbg_ascend.register_hook(None, print),
        "overflow_nums must be an integer": lambda: ptdbg_ascend.register_hook(
            None, ptdbg_ascend.overflow_check, overflow_nums=0
        ),
        "Current mode 'x' is not supported": lambda: ptdbg_ascend.register_hook(
            None, ptdbg_ascend.acc_cmp_dump, dump_mode="x"
        ),
        "acl_config must be configured when mode is 'acl'": lambda: ptdbg_ascend.register_hook(
            None, ptdbg_ascend.acc_cmp_dump, dump_mode="acl"
        ),
        "Please set switch with 'ON' or 'OFF'.": lambda: ptdbg_ascend.set_overflow_check_switch("on"),
        "backward_input is 'a.npy'": lambda: ptdbg_ascend.set_backward_input("a.npy"),  # type: ignore[arg-type]
    }
    for said, call in mistakes.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            call()
