"""Dumps of torch_npu.hooks: values in the lines, sampled or whole, and calls that are counted here."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.cli.convert import convert
from ulpscope.cli.show import show
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text, slot_text
from ulpscope.model.records import Role, ToldStats
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump, open_run

# The first line of a real run: four elements, then max, min and mean.
REAL = (
    '["0_Functional_linear_forward_input.0", [0.0461304634809494, 0.4024028182029724, -1.0115290880203247, '
    '0.2167382389307022, 0.4024028182029724, -1.0115290880203247, -0.08656439185142517], "torch.float32", [2, 2]]\n'
)


def handmade(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(name: str, numbers: list[float], shape: list[int] | None = None, dtype: str = "float32") -> list[Any]:
    return [name, numbers, f"torch.{dtype}", [len(numbers)] if shape is None else shape]


def sampled(name: str, numbers: list[float], shape: list[int] | None = None) -> list[Any]:
    """A row of sample=True: at most ten elements, then max, min and mean."""
    kept = [*numbers[:10], max(numbers), min(numbers), sum(numbers) / len(numbers)]
    return row(name, kept, [len(numbers)] if shape is None else shape)


def names(dump: Dump) -> list[str]:
    return [call_text(call) for call in dump.ids()]


# --- values -----------------------------------------------------------------------------------------------------


def test_the_line_of_a_real_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpu_module_op.pkl").write_text(REAL)
    dump = open_dump(tmp_path / "cpu_module_op.pkl")
    assert dump.source.format == "torch_npu.hooks"
    (value,) = dump.call("Functional.linear.0.forward").values
    assert (slot_text(value.slot), value.dtype, value.shape) == ("input.0", "torch.float32", (2, 2))
    assert value.extra == {"name": "0_Functional_linear_forward_input.0"}
    elements = np.array([0.0461304634809494, 0.4024028182029724, -1.0115290880203247, 0.2167382389307022])
    assert np.array_equal(dump.load(value), elements.astype(np.float32).reshape(2, 2))
    assert value.stats and (value.stats.max, value.stats.min) == (0.4024028182029724, -1.0115290880203247)
    assert value.stats.counted and value.stats.nan_count == 0
    sample = dump.sample(value)
    assert sample is not None and sample.dtype == np.float64
    assert sample.tolist() == [*elements, 0.4024028182029724, -1.0115290880203247, -0.08656439185142517]
    assert (dump.manifest.config["sample"], dump.ending, dump.sketch(value)) == (True, "complete", None)


def test_a_large_tensor_has_its_statistics_and_ten_elements(tmp_path: Path) -> None:
    numbers = [float(number) for number in range(12)]
    dump = open_dump(handmade(tmp_path / "a.pkl", sampled("0_Torch_f_forward_output", numbers, [3, 4])))
    (value,) = dump.nth(0).values
    assert isinstance(value.stats, ToldStats)
    assert (value.stats.max, value.stats.min, value.stats.mean, value.stats.norm) == (11.0, 0.0, 5.5, None)
    assert value.payload is None
    with pytest.raises(DumpError, match="sample=False"):
        dump.load(value)
    sample = dump.sample(value)
    assert sample is not None and sample.tolist() == [*numbers[:10], 11.0, 0.0, 5.5]


def test_a_dump_without_sampling_has_every_element(tmp_path: Path) -> None:
    numbers = [float(number) for number in range(20)]
    dump = open_dump(handmade(tmp_path / "a.pkl", row("0_Torch_f_forward_output", numbers, [4, 5])))
    (value,) = dump.nth(0).values
    assert np.array_equal(dump.load(value), np.arange(20, dtype=np.float32).reshape(4, 5))
    assert value.stats and (value.stats.max, value.stats.mean, value.stats.zero_count) == (19.0, 9.5, 1)
    sample = dump.sample(value)
    assert sample is not None and sample.tolist() == numbers
    assert (dump.manifest.config["sample"], dump.manifest.config["tensors"]) == (False, True)


THIRTEEN = [float(number) for number in range(13)]


@pytest.mark.parametrize(
    ("rows", "whole"),
    [
        ([row("0_Torch_f_forward_output", THIRTEEN)], True),
        ([sampled("0_Torch_f_forward_output", THIRTEEN)], False),
        (
            [
                row("0_Torch_f_forward_output", [*THIRTEEN[:10], 12.0, 0.0, 6.0]),
                row("1_x_forward_output", [1.0]),
            ],
            True,
        ),
        ([row("0_Torch_f_forward_output", THIRTEEN), sampled("1_x_forward_output", [1.0])], False),
    ],
)
def test_thirteen_elements_are_told_from_ten_and_three_statistics(tmp_path: Path, rows: Any, whole: bool) -> None:
    (value,) = open_dump(handmade(tmp_path / "a.pkl", *rows)).nth(0).values
    assert (value.payload is not None) is whole


def test_a_sample_of_another_length_is_kept_and_says_nothing_of_the_tensor(tmp_path: Path) -> None:
    dump = open_dump(handmade(tmp_path / "a.pkl", row("Torch_f_forward_output", [1.0, 2.0], [32])))
    (value,) = dump.nth(0).values
    sample = dump.sample(value)
    assert (value.stats, value.payload) == (None, None)
    assert sample is not None and sample.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("dtype", "numbers", "stored"),
    [
        ("float16", [1.0, 65504.0, 0.0999755859375], "float16"),
        ("bfloat16", [1.0, -2.0, 0.10009765625], "bfloat16"),
        ("float64", [1.0, 0.10000000149011612, 2.0], "float32"),
        ("int64", [1.0, 2.0, 3.0], "float32"),
    ],
)
def test_elements_are_in_their_own_type_where_float32_lost_nothing(
    tmp_path: Path, dtype: str, numbers: list[float], stored: str
) -> None:
    dump = open_dump(handmade(tmp_path / "a.pkl", row("0_Torch_f_forward_output", numbers, dtype=dtype)))
    (value,) = dump.nth(0).values
    assert value.dtype == f"torch.{dtype}"
    assert dump.raw(value)[0].name == stored
    assert dump.load(value).astype(np.float64).tolist() == numbers
    assert value.payload and value.payload.nbytes == len(numbers) * dump.raw(value)[0].itemsize


def test_nan_and_infinities_are_counted(tmp_path: Path) -> None:
    path = handmade(tmp_path / "a.pkl", row("0_Torch_f_forward_output", [math.nan, math.inf, -math.inf, 1.0]))
    dump = open_dump(path)
    (value,) = dump.nth(0).values
    stats = value.stats
    assert stats and (stats.nan_count, stats.posinf_count, stats.neginf_count, stats.finite_max) == (1, 1, 1, 1.0)
    assert np.array_equal(dump.load(value), np.array([math.nan, math.inf, -math.inf, 1.0]), equal_nan=True)


def test_values_that_the_type_does_not_have_are_refused(tmp_path: Path) -> None:
    rows = [row(f"{at}_Torch_f_forward_output", [0.1], dtype=kind) for at, kind in enumerate(("float16", "bfloat16"))]
    dump = open_dump(handmade(tmp_path / "a.pkl", *rows))
    for call in dump.calls():
        with pytest.raises(DumpError, match=r"a\.pkl, line \d has values that are no"):
            dump.load(call.values[0])


# --- calls ------------------------------------------------------------------------------------------------------


def test_calls_of_a_name_are_counted_whatever_the_counter_in_front_says(tmp_path: Path) -> None:
    def run(path: Path, start: int) -> Dump:
        lines = ["linear_forward_input.0", "linear_forward_input.1", "linear_forward_output"] * 2
        lines += ["relu_forward_input.0", "relu_forward_output", "linear_forward_input.0"]
        rows = [row(f"{start + at}_Functional_{name}", [1.0]) for at, name in enumerate(lines)]
        return open_dump(handmade(path, *rows))

    first, second = run(tmp_path / "a.pkl", 0), run(tmp_path / "b.pkl", 90)
    assert names(first) == [
        "Functional.linear.0.forward",
        "Functional.linear.1.forward",
        "Functional.relu.0.forward",
        "Functional.linear.2.forward",
    ]
    assert first.ids() == second.ids()
    assert [len(call.values) for call in first.calls()] == [3, 3, 2, 1]
    assert first.value_count == 9 and first.modules() == [""] * 4


def test_calls_that_have_inputs_alone_are_told_apart(tmp_path: Path) -> None:
    rows = [row(f"{at}_Tensor_argmax_forward_input.0", [1.0]) for at in range(3)]
    dump = open_dump(handmade(tmp_path / "a.pkl", *rows))
    assert names(dump) == [f"Tensor.argmax.{at}.forward" for at in range(3)]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("3_Torch_batch_norm_forward_output", "Torch.batch_norm.0.forward"),
        ("3_Tensor___add___forward_input.1", "Tensor.__add__.0.forward"),
        ("3_Module_ReLU_backward_input.0", "Module.ReLU.backward.0"),
        ("Functional_conv2d_forward_input.1.0", "Functional.conv2d.0.forward"),
    ],
)
def test_names_are_told_from_their_counter_and_their_slot(tmp_path: Path, name: str, call: str) -> None:
    dump = open_dump(handmade(tmp_path / "a.pkl", row(name, [1.0])))
    assert names(dump) == [call]
    assert dump.nth(0).values[0].extra["name"] == name


def test_the_input_of_a_backward_call_is_the_gradient_that_came_in(tmp_path: Path) -> None:
    rows = [row("0_Functional_relu_backward_input.0", [1.0]), row("1_Functional_relu_backward_output.0", [2.0])]
    dump = open_dump(handmade(tmp_path / "a.pkl", *rows))
    (call,) = dump.calls()
    assert {item.slot.role: item.stats.max for item in call.values if item.stats} == {Role.OUTPUT: 1, Role.INPUT: 2}
    assert call.origin is None
    assert any("does not say which forward call" in note for note in dump.manifest.notes)


def test_a_file_of_the_overflow_hook_has_a_stack_and_values_of_any_kind(tmp_path: Path) -> None:
    stack = [str(frame) for frame in inspect.stack()[:2]]
    rows = [
        *([f"Functional_linear_forward_stack_info.{at}", text] for at, text in enumerate(stack)),
        row("Functional_linear_forward_input.0", [60000.0, 1.0], dtype="float16"),
        ["Functional_linear_forward_input.1", None],
        ["Functional_linear_forward_input.2.0", 3],
        row("Functional_linear_forward_output", [math.inf, 1.0], dtype="float16"),
    ]
    dump = open_dump(handmade(tmp_path / "Overflow_info_20230601_120000.pkl", *rows))
    assert dump.source.format == "torch_npu.hooks"
    (call,) = dump.calls()
    assert [(item.type, item.scalar) for item in call.values] == [
        ("torch.Tensor", None),
        ("NoneType", None),
        ("int", 3),
        ("torch.Tensor", None),
    ]
    inner, _ = dump.stack(call)
    assert (inner.file, inner.function) == (__file__, inspect.stack()[0].function)
    assert inner.line > 0 and "inspect.stack()" in inner.text


# --- damage -----------------------------------------------------------------------------------------------------


def test_a_last_line_that_is_cut_is_dropped_and_told(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_text(REAL + REAL.replace("0_", "1_", 1)[:-30])
    dump = open_dump(tmp_path / "a.pkl")
    assert (len(dump), dump.ending) == (1, "the last line is cut: the process ended while it was written")


GOOD = row("0_Torch_f_forward_output", [1.0, 2.0])


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '["0_Torch_f_forward_output", [1.0, 2.0',
        "[" * 100_000,
        json.dumps(["Torch_f_sideways_output", *GOOD[1:]]),
        json.dumps(GOOD[:3]),
        json.dumps([*GOOD, 1]),
        json.dumps([*GOOD[:2], 7, [2]]),
        *(json.dumps([GOOD[0], wrong, *GOOD[2:]]) for wrong in (7, None, ["1.5", 2.0], [True, False], [[1.0], 2.0])),
        *(json.dumps([*GOOD[:3], wrong]) for wrong in (7, None, "[]", [-1], [1.5], [2**64], [2**62, 2**62])),
        '["0_Torch_f_forward_output", [1' + "0" * 400 + '], "torch.float32", [1]]',
        json.dumps(["Torch_f_forward_stack_info.0", 7]),
        json.dumps(["Torch_f_forward_stack_info.0", "text", "torch.float32", [1]]),
    ],
)
def test_a_damaged_line_is_refused_with_its_file_and_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.pkl").write_text("\n".join([REAL.strip(), line, json.dumps(GOOD), ""]))
    with pytest.raises(DumpError, match=r"a\.pkl, line 2 ") as caught:
        open_dump(tmp_path / "a.pkl")
    assert len(str(caught.value)) < 1000


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["0_Torch_f_forward_input.0", "Tensor___add___backward_output", "7_x_forward_stack_info"]),
            st.lists(st.floats(allow_infinity=True) | st.integers(), max_size=14) | st.none() | st.text(),
            st.sampled_from(["torch.float32", "torch.bfloat16", "torch.odd", 7]),
            st.lists(st.integers(-1, 2**64), max_size=3) | st.just([13]) | st.text(),
        ).map(list),
        min_size=1,
        max_size=4,
    ),
    cut=st.integers(0, 30),
)
def test_whatever_a_file_holds_it_is_read_or_refused(
    rows: list[Any], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pkl"
    text = "".join(json.dumps(line) + "\n" for line in rows)
    path.write_text(text[: len(text) - cut])
    try:
        dump = open_dump(path)
        for call in dump.calls():
            for value in call.values:
                dump.sample(value)
                if value.payload is not None:
                    dump.load(value)
    except DumpError as error:
        assert "any.pkl" in str(error) and len(str(error)) < 1000


# --- show and convert -------------------------------------------------------------------------------------------


def small_run(path: Path) -> Path:
    large = [float(number) for number in range(24)]
    rows = [
        sampled("0_Functional_linear_forward_input.0", [1.0, 2.0, -3.0, 4.0], [2, 2]),
        sampled("1_Functional_linear_forward_output", large, [4, 6]),
        sampled("2_Functional_linear_backward_input.0", [0.5, 0.25], [2]),
        sampled("3_Functional_linear_backward_output.0", [0.5], [1]),
    ]
    return handmade(path, *rows)


def test_show_lists_the_calls_and_shows_one(tmp_path: Path) -> None:
    path = small_run(tmp_path / "npu.pkl")
    result = CliRunner().invoke(show, [str(path)])
    assert result.exit_code == 0, result.output
    assert "Functional.linear.0.forward" in result.output and "f32[4, 6]" in result.output
    assert "note: backward calls are numbered" in result.output
    result = CliRunner().invoke(show, [str(path), "Functional.linear.0.backward"])
    assert result.exit_code == 0 and "2_Functional_linear_backward_input.0" in result.output


@pytest.mark.parametrize("form", ["native", "msprobe"])
def test_convert_keeps_names_numbers_and_elements(tmp_path: Path, form: str) -> None:
    path = small_run(tmp_path / "npu.pkl")
    result = CliRunner().invoke(convert, [str(path), str(tmp_path / "out"), "--to", form])
    assert result.exit_code == 0, result.output
    before, (after,) = open_dump(path), open_run(tmp_path / "out")
    assert after.source.format == form
    assert before.ids() == after.ids()
    for one, other in zip(before.calls(), after.calls(), strict=True):
        found = {item.slot: item for item in other.values}
        for mine in one.values:
            theirs = found[mine.slot]
            assert mine.extra["name"] == theirs.extra["name"]
            assert (
                mine.stats and theirs.stats and (mine.stats.max, mine.stats.min) == (theirs.stats.max, theirs.stats.min)
            )
            assert (mine.payload is None) == (theirs.payload is None)
            if mine.payload is not None:
                assert before.load(mine).tobytes() == after.load(theirs).tobytes()


def test_a_folder_with_files_of_two_runs_opens_each(tmp_path: Path) -> None:
    for name in ("cpu.pkl", "npu.pkl"):
        small_run(tmp_path / name)
    assert [dump.folder.name for dump in open_run(tmp_path)] == ["cpu.pkl", "npu.pkl"]
