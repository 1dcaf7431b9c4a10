"""msprobe's config.json: every key of its manual, its defaults, its examples, and what a mistake gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ulpscope.compat.msprobe.config import DEFAULT_CONFIG, load_config, read_config
from ulpscope.model.errors import ConfigError

BASE = {"task": "statistics", "dump_path": "./dump", "rank": [], "step": [], "level": "L1"}


def problems(**content: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config({**BASE, **content})
    return caught.value.problems


def test_002_001_the_package_has_a_configuration_for_those_who_give_none() -> None:
    assert DEFAULT_CONFIG.is_file()
    found = load_config()
    assert (found.task, found.level, found.dump_path) == ("statistics", "L1", "./dump_path")


@pytest.mark.parametrize("task", ["statistics", "tensor", "overflow_check", "free_benchmark", "run_ut"])
def test_002_002_the_five_tasks_are_known(task: str) -> None:
    assert read_config({**BASE, "task": task}).task == task
    assert read_config({"dump_path": "x"}).task == "statistics"


def test_002_002_another_task_is_refused_with_the_choices() -> None:
    (problem,) = problems(task="statistic")
    assert "must be one of statistics, tensor, overflow_check, free_benchmark, run_ut" in problem
    assert "Did you mean 'statistics'?" in problem


@pytest.mark.parametrize("path", [None, "", 3, []])
def test_002_003_a_dump_path_is_needed(path: Any) -> None:
    assert any("dump_path" in problem for problem in problems(dump_path=path))


@pytest.mark.parametrize("key", ["rank", "step"])
@pytest.mark.parametrize("value", [[0, 1], [], ["2-4", 7]])
def test_002_004_005_ranks_and_steps_are_lists_of_numbers_and_ranges(key: str, value: list[Any]) -> None:
    found = read_config({**BASE, key: value})
    assert getattr(found, key) == tuple((2, 4) if item == "2-4" else item for item in value)


@pytest.mark.parametrize("key", ["rank", "step"])
@pytest.mark.parametrize("value", ["0", 3, [-1], [1.5], ["a-b"], [True], [None], [float("nan")], ["4-2"]])
def test_002_004_005_anything_else_is_refused_by_name(key: str, value: Any) -> None:
    assert any(problem.startswith(key) for problem in problems(**{key: value}))


@pytest.mark.parametrize(("level", "ours"), [("L0", "module"), ("L1", "op"), ("mix", "mix")])
def test_002_006_levels(level: str, ours: str) -> None:
    assert read_config({**BASE, "level": level}).capture_options()["level"] == ours
    assert read_config({"dump_path": "x"}).level == "L1"


def test_002_006_an_unknown_level_names_the_choices() -> None:
    assert any("level" in problem and "L0, L1, L2, mix" in problem for problem in problems(level="L5"))


@pytest.mark.parametrize(
    ("key", "default", "good", "bad"),
    [
        ("acl_config", "", "./acl_config.json", 3),
        ("seed", 1234, 7, "x"),
        ("is_deterministic", False, True, "yes"),
        ("enable_dataloader", False, True, 1),
        ("async_dump", False, True, "true"),
    ],
)
def test_002_007_008_009_010_the_other_common_keys(key: str, default: Any, good: Any, bad: Any) -> None:
    assert getattr(read_config(BASE), key) == default
    assert getattr(read_config({**BASE, key: good}), key) == good
    assert any(key in problem for problem in problems(**{key: bad}))


def test_002_011_arguments_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, "level": "L0", "step": [3]}))
    found = load_config(path, task="tensor", dump_path="other", level="mix", step=[1])
    assert (found.task, found.dump_path, found.level, found.step) == ("tensor", "other", "mix", (1,))


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_002_050_053_060_scope_and_list_may_stand_together(task: str) -> None:
    section = {"scope": ["Torch.sin.0.forward", "Torch.cos.3.forward"], "list": ["relu"], "data_mode": ["all"]}
    options = read_config({**BASE, "task": task, task: section}).capture_options()
    assert options["scope"] == ("Torch.sin.0.forward", "Torch.cos.3.forward")
    assert options["only"] == ("relu",)
    assert any("scope" in problem for problem in problems(task=task, **{task: {"scope": ["one"]}}))


@pytest.mark.parametrize("value", ["relu", 3, [1], {"a": 1}])
def test_002_051_052_a_list_is_a_list_of_names(value: Any) -> None:
    assert any("statistics.list" in problem for problem in problems(statistics={"list": value}))


@pytest.mark.parametrize(
    ("modes", "phases", "roles"),
    [
        (["all"], [], []),
        (["forward"], ["forward"], []),
        (["backward", "output"], ["backward"], ["output"]),
        (["forward", "backward", "input"], ["forward", "backward"], ["input"]),
    ],
)
def test_002_055_data_mode(modes: list[str], phases: list[str], roles: list[str]) -> None:
    options = read_config({**BASE, "statistics": {"data_mode": modes}}).capture_options()
    assert (options["phases"], options["roles"]) == (phases, roles)


@pytest.mark.parametrize("value", [["forwardd"], ["all", "input"], 3, [None]])
def test_002_055_a_wrong_data_mode_is_named(value: Any) -> None:
    assert any("statistics.data_mode" in problem for problem in problems(statistics={"data_mode": value}))


def test_002_056_summary_mode() -> None:
    assert read_config(BASE).capture_options()["checksum"] is False
    assert read_config({**BASE, "statistics": {"summary_mode": "md5"}}).capture_options()["checksum"] is True
    assert any("summary_mode" in problem for problem in problems(statistics={"summary_mode": "sha"}))


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("backward_input", "a.pt", 3),
        ("backward_input", ["a.pt"], [3]),
        ("file_format", "npy", "pt"),
        ("online_run_ut", True, "yes"),
        ("nfs_path", "/nfs", 3),
        ("host", "127.0.0.1", 3),
        ("port", 59208, "x"),
        ("tls_path", "./tls", 1),
    ],
)
def test_002_061_062_063_064_065_066_067_keys_of_the_tensor_task(key: str, good: Any, bad: Any) -> None:
    read_config({**BASE, "task": "tensor", "tensor": {key: good}})
    assert any(f"tensor.{key}" in problem for problem in problems(task="tensor", tensor={key: bad}))


def test_002_068_kernel_level_wants_one_api_and_a_gradient_for_a_backward() -> None:
    base = {"task": "tensor", "level": "L2"}
    found = read_config({**BASE, **base, "tensor": {"scope": ["Tensor.__mul__.10.forward"]}})
    assert found.capture_options()["below"] == "Tensor.__mul__.10.forward"
    assert any("exactly one API name" in problem for problem in problems(**base, tensor={"scope": []}))
    # Where there is no NPU the kernels of a backward are recorded while it runs; the vendor's dump says what it needs.
    backward = read_config({**BASE, **base, "tensor": {"scope": ["Tensor.__mul__.10.backward"]}})
    assert backward.capture_options()["below"] == "Tensor.__mul__.10.backward"


SEEDS_EXAMPLES = {
    "free_benchmark": {
        "scope": [],
        "list": ["conv2d"],
        "fuzz_device": "npu",
        "pert_mode": "improve_precision",
        "handler_type": "check",
        "fuzz_level": "L1",
        "fuzz_stage": "forward",
        "if_preheat": False,
        "preheat_step": 15,
        "max_sample": 20,
    },
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"], "backward_input": ""},
    "overflow_check": {"overflow_nums": 1},
    "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
}


@pytest.mark.parametrize("task", SEEDS_EXAMPLES)
def test_002_100_the_examples_of_the_manual_are_accepted_as_written(task: str) -> None:
    common = {"dump_path": "/home/data_dump", "rank": [], "step": [], "level": "L1"}
    flags = {"seed": 1234, "is_deterministic": False, "enable_dataloader": False}
    assert read_config({"task": task, **common, **flags, task: SEEDS_EXAMPLES[task]}).task == task


@pytest.mark.parametrize(
    ("phase", "backward_input"), [("forward", [""]), ("backward", ["Tensor.__mul__.10.backward.input.0.pt"])]
)
def test_002_108_109_the_kernel_examples_are_accepted_as_written(phase: str, backward_input: list[str]) -> None:
    found = read_config(
        {
            "task": "tensor",
            "dump_path": "/home/data_dump",
            "level": "L2",
            "rank": [0],
            "step": [0],
            "is_deterministic": False,
            "tensor": {
                "scope": [f"Tensor.__mul__.10.{phase}"],
                "list": [],
                "data_mode": ["all"],
                "backward_input": backward_input,
                "file_format": "npy",
            },
            "acl_config": "acl_config.json",
        }
    )
    assert found.acl_config == "acl_config.json"


def test_every_mistake_is_told_at_once_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"setp": [1], "level": "L9", "statistics": {"data_mode": ["fwd"], "lst": []}}, "config.json")
    text = str(caught.value)
    assert "config.json: unknown key 'setp'. Did you mean 'step'?" in text
    assert "config.json: level = 'L9'" in text
    assert "config.json: statistics.data_mode = ['fwd']: element 0 must be one of all, forward" in text
    assert "config.json: statistics: unknown key 'lst'. Did you mean 'list'?" in text
    assert "config.json: dump_path is missing" in text
    assert text.endswith("5 problems, nothing was done")


@pytest.mark.parametrize("section", [[], "x", 3])
def test_a_section_that_is_no_table_is_named(section: Any) -> None:
    assert any("statistics must be a table" in problem for problem in problems(statistics=section))


def test_null_stands_for_the_default() -> None:
    found = read_config({"dump_path": "x", "task": None, "rank": None, "level": None, "statistics": None})
    assert (found.task, found.rank, found.level) == ("statistics", (), "L1")


def test_scope_and_list_exclude_each_other_in_free_benchmark() -> None:
    both = {"scope": ["Torch.matmul.0"], "list": ["relu"]}
    assert any("exclude each other" in problem for problem in problems(task="free_benchmark", free_benchmark=both))


STATIC_GRAPH = {
    "statistics": {"list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"list": [], "data_mode": ["all"], "backward_input": ""},
    "overflow_check": {"check_mode": "all"},
}
DYNAMIC_GRAPH = {
    "free_benchmark": {
        "list": ["mindspore.ops.add"],
        "fuzz_device": "npu",
        "pert_mode": "improve_precision",
        "handler_type": "check",
        "fuzz_level": "L1",
        "fuzz_stage": "forward",
    },
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    "overflow_check": {"overflow_nums": 1},
}


def test_002_101_the_overflow_example_for_a_static_graph_looks_at_kernels_here() -> None:
    example = {"task": "overflow_check", "level": "L2", "overflow_check": STATIC_GRAPH["overflow_check"]}
    assert read_config({**BASE, **example}).capture_options()["level"] == "kernel"


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_002_101_examples_for_a_static_graph_ask_for_an_api_where_there_is_no_graph(task: str) -> None:
    found = problems(task=task, level="L2", **{task: STATIC_GRAPH[task]})
    assert any("level L2 needs exactly one API name" in problem for problem in found)
    assert not any("unknown key" in problem for problem in found)


@pytest.mark.parametrize("task", DYNAMIC_GRAPH)
def test_002_102_examples_for_a_dynamic_graph_are_accepted(task: str) -> None:
    assert read_config({**BASE, "task": task, task: DYNAMIC_GRAPH[task]}).task == task


def test_002_102_the_comma_too_many_of_the_tensor_example_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, "task": "tensor", "tensor": DYNAMIC_GRAPH["tensor"]}).replace("]}}", "],}}"))
    with pytest.raises(ConfigError, match="line 1 column"):
        load_config(path)


def test_002_054_names_of_kernels_and_expressions_are_read_as_written() -> None:
    names = ["Default/Conv2D-op1", "name-regex(Default/.+)"]
    assert read_config({**BASE, "statistics": {"list": names}}).options["list"] == tuple(names)


# The keys of the files that msprobe ships, by version; the values are the tool's defaults.
SELECT = {"scope": [], "list": [], "data_mode": ["all"]}
FIRST = {
    "seed": 1234,
    "is_deterministic": False,
    "acl_config": "",
    "tensor": {**SELECT, "backward_input": [], "file_format": "npy"},
}
MIDDLE = {
    "tensor": {**SELECT, "file_format": "npy"},
    "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
    "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
    "free_benchmark": SEEDS_EXAMPLES["free_benchmark"],
}
OF_8 = {
    "statistics": {**SELECT, "summary_mode": "statistics"},
    "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
    "enable_dataloader": False,
}
OF_26 = {
    "extra_info": True,
    "async_dump": False,
    "statistics": {**SELECT, "summary_mode": "statistics"},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
}
SHIPPED = {
    "1.0.1": {**OF_8, **FIRST},
    "1.0.3, 1.0.4": {**OF_8, **MIDDLE, **FIRST},
    "1.1.0": {**OF_8, **MIDDLE, **FIRST, "seed": None},
    "1.1.1, 1.2.0": {**OF_8, **MIDDLE},
    "1.2.1 to 8.3.3": {**OF_8, **MIDDLE, "async_dump": False},
    "26.0.0": {**OF_26, "tensor": {**SELECT, "file_format": "npy"}},
    "26.1.0 to 26.2.0": {**OF_26, "tensor": SELECT},
}
TASKS = ("statistics", "tensor", "overflow_check", "free_benchmark", "run_ut", "acc_check", "structure")
OTHER_TASKS = ("grad_probe", "exception_dump", "diff_check", "nan_check")


@pytest.mark.parametrize("version", SHIPPED)
@pytest.mark.parametrize("task", [*TASKS, *OTHER_TASKS])
def test_the_file_that_every_version_ships_is_accepted_in_silence_for_every_task(
    version: str, task: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = read_config({**BASE, **SHIPPED[version], "task": task})
    assert found.task == task.replace("acc_check", "run_ut")
    assert not caplog.records


def test_only_the_section_of_the_task_is_judged_and_the_others_are_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = {"grad_probe": {"grad_level": "L7"}, "tensor": [], "free_benchmark": {"lst": []}, "mine": {"a": 1}}
    assert read_config({**BASE, **wrong}).options == {}
    (record,) = caplog.records
    assert "grad_probe.grad_level = 'L7'" in record.message
    assert "tensor must be a table of options, not list (not read: the task is 'statistics')" in record.message
    assert "free_benchmark: unknown key 'lst'. Did you mean 'list'?" in record.message
    assert "mine is the section of no task" in record.message
    assert any("tensor must be a table" in problem for problem in problems(**{**wrong, "task": "tensor"}))


@pytest.mark.parametrize(
    ("key", "meant"),
    [("dump_pth", "dump_path"), ("lvl", "level"), ("statistcs", "statistics"), ("acc_chek", "acc_check")],
)
def test_a_typing_mistake_at_the_top_is_an_error_whatever_it_holds(key: str, meant: str) -> None:
    for value in ("x", [], {}, None, {"list": ["relu"]}):
        assert problems(**{key: value}) == [f"unknown key {key!r}. Did you mean {meant!r}?"]


@pytest.mark.parametrize("key", ["tensor_list", "slice", "summary_mode", "data_mode", "list", "backward_input"])
@pytest.mark.parametrize("value", [None, [], ""])
def test_an_empty_value_asks_for_nothing(key: str, value: Any) -> None:
    found = read_config({**BASE, "task": "tensor", "tensor": {key: value}})
    assert found.capture_options() == read_config({**BASE, "task": "tensor"}).capture_options()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dump_enable", False),
        ("load", {"path": "x"}),
        ("custom_op_namespaces", ["mine"]),
    ],
)
def test_a_common_key_that_does_nothing_here_is_said_in_one_line(
    key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_config({**BASE, key: value}).capture_options() == read_config(BASE).capture_options()
    assert [record.message for record in caplog.records] == [f"config.json: {key} = {value!r} has no effect here"]
    assert any(key in problem for problem in problems(**{key: 3}))


@pytest.mark.parametrize(("key", "usual", "value"), [("risk_level", "ALL", "CORE"), ("precision", "high", "low")])
def test_a_common_key_that_asks_for_another_dump_is_refused(key: str, usual: str, value: str) -> None:
    assert read_config({**BASE, key: usual}).capture_options() == read_config(BASE).capture_options()
    (problem,) = problems(**{key: value})
    assert problem.startswith(f"{key} = {value!r}: ") and "leave the key out" in problem


@pytest.mark.parametrize(
    ("level", "wrong", "right"),
    [
        ("L1", "Functional_conv2d_1_forward", "Functional.conv2d.1.forward"),
        ("L1", "conv2d", "Torch.relu.3"),
        ("L1", "Module.fc.Linear.forward.0", "NPU.npu_swiglu.0.backward"),
        ("L0", "Functional.conv2d.1.forward", "Module.fc.Linear.forward.0"),
        ("L0", "Tensor.__add__.0", "MyModuleOP1"),
    ],
)
def test_002_050_a_scope_that_no_call_of_the_level_can_have_is_refused(level: str, wrong: str, right: str) -> None:
    (problem,) = problems(level=level, statistics={"scope": [right, wrong]})
    assert repr(wrong) in problem and "a name looks like" in problem
    read_config({**BASE, "level": level, "statistics": {"scope": [right, right]}})


@pytest.mark.parametrize("mode", ["add_noise", "bit_noise", "no_change", "change_value"])
def test_002_032_fix_puts_no_noise_into_the_run(mode: str) -> None:
    (problem,) = problems(task="free_benchmark", free_benchmark={"pert_mode": mode, "handler_type": "fix"})
    assert "'fix' works with improve_precision and to_cpu" in problem


@pytest.mark.parametrize(
    ("task", "key", "value", "bad"),
    [
        ("statistics", "tensor_list", ["relu"], [1]),
        ("statistics", "slice", [{"dim": 0, "begin": 0, "end": 8}], [{"dim": "x"}]),
        ("statistics", "device", "device", "cpu"),
        ("tensor", "request_id", "r1", 3),
        ("tensor", "bench_path", "./other", 3),
        ("diff_check", "diff_nums", 3, 0),
    ],
)
def test_a_key_of_a_section_that_does_nothing_here_is_said_in_one_line(
    task: str, key: str, value: Any, bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    read_config({**BASE, "task": task, task: {key: value}})
    assert [record.message for record in caplog.records] == [
        f"config.json: {task}.{key} = {value!r} has no effect here"
    ]
    assert any(f"{task}.{key}" in problem for problem in problems(task=task, **{task: {key: bad}}))


def test_an_xor_is_asked_for_and_the_checksum_that_there_is_is_written(caplog: pytest.LogCaptureFixture) -> None:
    found = read_config({**BASE, "statistics": {"summary_mode": "xor"}})
    assert (found.summary_mode, found.capture_options()["checksum"]) == ("md5", True)
    assert "the checksum is that of md5, a CRC-32" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        SHIPPED["26.1.0 to 26.2.0"],
        {"dump_enable": True},
        {"task": "acc_check"},
        {"task": "diff_check"},
        {"statistics": {"summary_mode": "xor"}},
        {"tensor": {"bench_path": "x"}},
    ],
)
def test_a_configuration_that_only_26_knows_changes_nothing_of_the_run(content: dict[str, Any]) -> None:
    found = read_config({**BASE, **content})
    assert (found.seed, found.dropout) == (None, "keep")
    asked = read_config({**BASE, **content, "seed": 7, "dropout": "off"})
    assert (asked.seed, asked.dropout) == (7, "off")


def test_002_008_a_seed_of_null_and_dropout_keep_leave_both_alone() -> None:
    assert (read_config(BASE).seed, read_config(BASE).dropout) == (1234, "off")
    found = read_config({**BASE, "seed": None, "dropout": "keep"})
    assert (found.seed, found.dropout) == (None, "keep")
    assert any(problem.startswith("dropout = 'kep'") for problem in problems(dropout="kep"))
    assert any(problem.startswith("seed") for problem in problems(seed=1 << 32))


def test_a_backward_that_a_list_names_needs_no_gradient_as_since_1_1_1() -> None:
    section = {"scope": [], "list": ["Functional.conv2d.1.backward"], "data_mode": ["all"]}
    found = read_config({**BASE, "task": "tensor", "level": "L2", "tensor": section})
    assert found.capture_options()["below"] == "Functional.conv2d.1.backward"


def test_a_configuration_for_the_check_alone_needs_no_folder() -> None:
    assert read_config({"task": "run_ut", "run_ut": {"host": "127.0.0.1", "port": -1}}).task == "run_ut"
