"""Two dumps made by hand, compared value by value."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ulpscope
from builders import DumpBuilder
from ulpscope.compare.comparison import Code, Comparison, Evidence, How, Level
from ulpscope.compare.engine import Options, compare_dumps
from ulpscope.compare.mapping import read_mapping
from ulpscope.compare.runs import InProcess, Processes, Unit, pair_runs
from ulpscope.model.errors import ConfigError, DumpError
from ulpscope.model.names import call_of_value, call_text, value_text
from ulpscope.store.formats.msprobe_writer import write_msprobe
from ulpscope.store.mapped import forget
from ulpscope.store.registry import open_dump
from ulpscope.store.run_folder import MANIFEST

X = np.arange(8, dtype=np.float32)
Y = np.linspace(-1, 1, 1000, dtype=np.float32)


def run(folder: Path, values: dict[tuple[Any, ...], Any], *, step: int = 0, rank: int = 0, name: str = "add") -> Path:
    builder = DumpBuilder(folder, step=step, rank=rank)
    builder.call("Tensor", name, values=values)
    return builder.close()


def rows(reference: Path, target: Path, **options: Any) -> dict[str, Comparison]:
    found = compare_dumps(open_dump(reference), open_dump(target), Options(jobs=1, **options))
    return {".".join(map(str, (each.slot.role.value, *each.slot.path))): each for call in found for each in call.values}


def test_elements_are_the_best_evidence(tmp_path: Path) -> None:
    reference = run(tmp_path / "r", {("input", 0): X, ("output", 0): Y})
    target = run(tmp_path / "t", {("input", 0): X, ("output", 0): Y * np.float32(1.001)})
    found = rows(reference, target)
    assert found["input.0"].verdict.codes == (Code.IDENTICAL,)
    assert found["output.0"].evidence is Evidence.ELEMENTS
    assert found["output.0"].error == pytest.approx(0.001, rel=1e-3)


def test_without_elements_the_sketch_sees_moved_values(tmp_path: Path) -> None:
    reference = run(tmp_path / "r", {("output", 0): Y})
    target = run(tmp_path / "t", {("output", 0): np.roll(Y, 128)})
    found = rows(reference, target, elements=False)["output.0"]
    assert found.evidence is Evidence.SKETCH
    true = np.linalg.norm(np.roll(Y, 128) - Y) / np.linalg.norm(Y)
    assert found.error == pytest.approx(float(true), rel=0.25)


def test_sketches_of_two_formats_are_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sides = [run(tmp_path / str(size), {("output", 0): Y * np.float32(size)}) for size in (1, 2)]
    for number, side in enumerate(sides):
        path = next(side.rglob(MANIFEST))
        content = {**json.loads(path.read_text()), "config": {"sketch": True}}
        path.write_text(json.dumps(content))
        assert rows(side, side, elements=False)["output.0"].evidence is Evidence.CHECKSUM
        path.write_text(json.dumps({**content, "format": 1 + number}))
        assert open_dump(path.parent).sketch(next(iter(open_dump(path.parent).calls())).values[0]) is not None
    assert "sketches of two formats" not in caplog.text
    found = rows(*sides, elements=False)["output.0"]
    assert (found.evidence, found.error) == (Evidence.STATISTICS, pytest.approx(1.0))
    assert "sketches of two formats" in caplog.text


def test_an_equal_checksum_proves_identity_without_elements(tmp_path: Path) -> None:
    reference, target = (run(tmp_path / side, {("output", 0): Y}) for side in "rt")
    found = rows(reference, target, elements=False)["output.0"]
    assert (found.evidence, found.verdict.codes) == (Evidence.CHECKSUM, (Code.IDENTICAL,))


def test_a_native_dump_and_one_of_msprobe_meet_at_their_common_evidence(tmp_path: Path) -> None:
    reference = run(tmp_path / "r", {("output", 0): Y})
    target = run(tmp_path / "t", {("output", 0): Y * np.float32(2)})
    write_msprobe(open_dump(target), tmp_path / "m" / "step0" / "rank0", task="statistics", level="L1")
    found = rows(reference, tmp_path / "m")["output.0"]
    assert found.evidence is Evidence.STATISTICS
    assert found.error == pytest.approx(1.0)


def test_another_shape_is_different_and_said(tmp_path: Path) -> None:
    reference, target = run(tmp_path / "r", {("output", 0): X}), run(tmp_path / "t", {("output", 0): X[:4]})
    found = rows(reference, target)["output.0"]
    assert (found.verdict.level, found.verdict.codes) == (Level.FAIL, (Code.SHAPE,))
    assert found.verdict.text == "[8] in the reference, [4] in the target"


def test_empty_tensors_are_identical(tmp_path: Path) -> None:
    empty = np.zeros((0, 3), np.float32)
    reference, target = (run(tmp_path / side, {("output", 0): empty}) for side in "rt")
    assert rows(reference, target)["output.0"].verdict.codes == (Code.IDENTICAL,)


def test_a_value_that_one_side_lacks_is_listed(tmp_path: Path) -> None:
    reference = run(tmp_path / "r", {("input", 0): X, ("input", 1): X})
    target = run(tmp_path / "t", {("input", 0): X, ("input", "alpha"): 2})
    found = rows(reference, target)
    assert found["input.1"].verdict.codes == (Code.NO_TARGET,)
    assert found["input.alpha"].verdict.codes == (Code.NO_REFERENCE,)


def test_a_call_that_one_side_lacks_is_listed_with_its_values(tmp_path: Path) -> None:
    reference, target = run(tmp_path / "r", {("output", 0): X}), run(tmp_path / "t", {("output", 0): X}, name="mul")
    found = list(compare_dumps(open_dump(reference), open_dump(target)))
    assert [each.match.how for each in found] == [How.ALONE, How.ALONE]
    assert [each.values[0].verdict.level for each in found] == [Level.UNMATCHED] * 2


def test_a_tensor_against_a_number_is_another_type(tmp_path: Path) -> None:
    reference, target = run(tmp_path / "r", {("input", 0): X}), run(tmp_path / "t", {("input", 0): 3})
    assert rows(reference, target)["input.0"].verdict.codes == (Code.TYPE,)


def test_a_cut_payload_is_unreadable_not_equal(tmp_path: Path) -> None:
    reference, target = (run(tmp_path / side, {("output", 0): Y}) for side in "rt")
    (target / "payload.bin").write_bytes(b"")
    found = rows(reference, target)["output.0"]
    assert (found.verdict.level, found.verdict.codes) == (Level.UNKNOWN, (Code.UNREADABLE,))
    assert "payload.bin" in found.verdict.text


@pytest.mark.parametrize("jobs", [1, 3])
def test_threads_change_neither_order_nor_numbers(tmp_path: Path, jobs: int) -> None:
    generator = np.random.default_rng(0)
    builders = [DumpBuilder(tmp_path / side) for side in "rt"]
    for index in range(200):
        value = generator.standard_normal(50).astype(np.float32)
        for builder, scale in zip(builders, (1.0, 1.0 + index / 1000), strict=True):
            builder.call("Tensor", "mul", index, values={("output", 0): value * np.float32(scale)})
    reference, target = (builder.close() for builder in builders)
    found = list(compare_dumps(open_dump(reference), open_dump(target), Options(jobs=jobs)))
    assert [each.match.call.id.index for each in found] == list(range(200))
    for index, each in enumerate(found):
        assert each.values[0].error == pytest.approx(index / 1000, abs=1e-6)


def test_a_payload_that_several_values_share_is_read_once(tmp_path: Path) -> None:
    builders = [DumpBuilder(tmp_path / side) for side in "rt"]
    for builder in builders:
        for index in range(3):
            builder.call("Tensor", "mul", index, values={("output", 0): Y})
    first = list(compare_dumps(*(open_dump(builder.close()) for builder in builders), Options(jobs=1)))
    assert len({id(each.values[0].contrast) for each in first}) <= 3


# --- mapping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("Functional.conv2d.1.forward.input.0", "Functional.conv2d.1.forward"),
        ("Module.layer.0.Linear.forward.2.output.0", "Module.layer.0.Linear.forward.2"),
        ("Module.input.output.Linear.forward.0.input.0", "Module.input.output.Linear.forward.0"),
        ("Module.fc.Linear.parameters_grad.0.weight", "Module.fc.Linear.parameters_grad.0"),
        ("Torch.mul.0.forward.kwargs.other", "Torch.mul.0.forward"),
        ("x.0.debug", "x.0.debug"),
        ("x.0.debug.a.1", "x.0.debug"),
    ],
)
def test_the_call_is_found_in_the_name_of_a_value(text: str, call: str) -> None:
    assert call_text(call_of_value(text)) == call


@pytest.mark.parametrize("text", ["", "x", "Functional.conv2d.forward.input.0", "input.0"])
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        call_of_value(text)


def test_a_mapping_file_puts_values_of_other_calls_together(tmp_path: Path) -> None:
    reference = run(tmp_path / "r", {("input", 0): X, ("output", 0): Y}, name="attention")
    target = run(tmp_path / "t", {("input", 0): X, ("output", 0): Y}, name="fused")
    lines = "Tensor.fused.0.forward.output.0: Tensor.attention.0.forward.output.0\n"
    (tmp_path / "map.yaml").write_text(lines)
    mapping = read_mapping(tmp_path / "map.yaml")
    found = list(compare_dumps(open_dump(reference), open_dump(target), Options(jobs=1, mapping=mapping)))
    fused = next(call for call in found if call.match.target is not None)
    output = next(each for each in fused.values if value_text(fused.match.call.id, each.slot).endswith("output.0"))
    assert (output.match.how, output.verdict.codes) == (How.MAPPING, (Code.IDENTICAL,))


def test_names_of_files_and_of_keywords_are_understood(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text("Torch.mul.0.forward.kwargs.other.pt: Torch.mul.1.forward.input.other\n")
    mapping = read_mapping(tmp_path / "map.yaml")
    assert dict(mapping.names).keys() == {"Torch.mul.0.forward.input.other"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is no mapping"),
        ("- a\n- b\n", "is no mapping"),
        ("a: b\n", "not the name of a value"),
        ("a: [1\n", "cannot be read"),
        ("!!python/object/apply:os.system ['true']: x\n", "cannot be read"),
    ],
)
def test_a_bad_mapping_file_gets_one_clear_error(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "map.yaml").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_mapping(tmp_path / "map.yaml")


# --- runs -------------------------------------------------------------------------------------------------------


def test_single_dumps_are_compared_whatever_their_numbers(tmp_path: Path) -> None:
    run(tmp_path / "r", {("output", 0): X}, step=3)
    run(tmp_path / "t", {("output", 0): X}, step=7, rank=2)
    (unit,) = pair_runs(tmp_path / "r", tmp_path / "t").units
    assert (unit.step, unit.rank) == (7, 2)


def test_steps_and_ranks_are_paired_and_the_rest_is_named(tmp_path: Path) -> None:
    for step, rank in ((0, 0), (0, 1), (1, 0)):
        run(tmp_path / "r", {("output", 0): X}, step=step, rank=rank)
    for step, rank in ((0, 0), (0, 1), (2, 0)):
        run(tmp_path / "t", {("output", 0): X}, step=step, rank=rank)
    runs = pair_runs(tmp_path / "r", tmp_path / "t")
    assert [(unit.step, unit.rank) for unit in runs.units] == [(0, 0), (0, 1)]
    assert [(place.step, place.rank) for place in runs.only_reference] == [(1, 0)]
    assert [(place.step, place.rank) for place in runs.only_target] == [(2, 0)]


def test_runs_without_a_common_step_are_refused_with_what_they_have(tmp_path: Path) -> None:
    for step in (0, 1):
        run(tmp_path / "r", {("output", 0): X}, step=step)
        run(tmp_path / "t", {("output", 0): X}, step=step + 2)
    with pytest.raises(DumpError, match=r"step 0 rank 0, step 1 rank 0.*none in common"):
        pair_runs(tmp_path / "r", tmp_path / "t")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "r", {("output", 0): X})
    (tmp_path / "t").mkdir()
    with pytest.raises(DumpError, match="holds no dump"):
        pair_runs(tmp_path / "r", tmp_path / "t")


def double(unit: Unit) -> int:
    return unit.step * 2


@pytest.mark.parametrize("executor", [InProcess(), Processes(2)])
def test_executors_give_results_in_order(executor: Any) -> None:
    units = [Unit(step, 0, Path(), Path()) for step in range(9)]
    try:
        assert list(executor.gather(executor.map(double, units))) == [step * 2 for step in range(9)]
    finally:
        executor.close()


def test_the_package_is_the_function(tmp_path: Path) -> None:
    reference = run(tmp_path / "r", {("output", 0): X})
    target = run(tmp_path / "t", {("output", 0): X + 1})
    (found,) = ulpscope.compare(reference, target)
    assert found.verdict.level is Level.FAIL


# --- reading in pieces ------------------------------------------------------------------------------------------


def test_forgotten_pages_can_be_read_again(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", {("output", 0): np.arange(100_000, dtype=np.float32)})
    dump = open_dump(folder)
    (value,) = dump.nth(0).values
    _, raw, _ = dump.raw(value)
    before = bytes(raw)
    forget(raw, raw[5000:300000])
    forget()
    assert bytes(raw) == before
    forget(memoryview(b"not a file"), raw)
    assert bytes(raw) == before


@pytest.mark.parametrize("side", ["r", "t"])
def test_a_changed_byte_in_a_file_of_torch_is_found_while_it_is_compared(tmp_path: Path, side: str) -> None:
    folders = {}
    for each in "rt":
        native = run(tmp_path / "native" / each, {("input", 0): X, ("output", 0): Y})
        folders[each] = tmp_path / each / "step0" / "rank0"
        write_msprobe(open_dump(native), folders[each], task="tensor", level="L1")
    (path,) = folders[side].rglob("*output.0.pt")
    whole = bytearray(path.read_bytes())
    whole[whole.index(Y.tobytes()) + 1001] ^= 1
    path.write_bytes(whole)
    found = rows(folders["r"], folders["t"])
    assert found["input.0"].verdict.codes == (Code.IDENTICAL,)
    assert found["output.0"].verdict.level is Level.UNKNOWN
    assert f"{path} is not a tensor that can be read" in found["output.0"].verdict.text
    assert "damaged" in found["output.0"].verdict.text


@pytest.mark.parametrize("jobs", [1, 3])
def test_many_values_are_read_some_at_a_time_and_each_gets_its_own_answer(tmp_path: Path, jobs: int) -> None:
    folders = []
    for side in range(2):
        builder = DumpBuilder(tmp_path / str(side))
        for number in range(300):
            values = {("input", 0): X + number, ("output", 0): X * number + side * (number % 3)}
            builder.call("Tensor", "add", number, values=values)
        folders.append(open_dump(builder.close()))
    found = [call.values for call in compare_dumps(folders[0], folders[1], Options(jobs=jobs))]
    assert [given.error for given, _ in found] == [0.0] * 300
    assert [made.contrast.max_abs for _, made in found if made.contrast] == [float(number % 3) for number in range(300)]


def test_entries_of_a_dump_json_are_read_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "step0" / "rank0"
    folder.mkdir(parents=True)
    leaf = {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2],
        "Max": 1.0,
        "Min": 0.0,
        "Mean": 0.5,
        "Norm": 1.0,
    }
    data = {f"Torch.f.{index}.forward": {"output": [leaf]} for index in range(50)}
    text = json.dumps({"task": "statistics", "level": "L1", "data": data, "note": 'a "quoted" } brace'}, indent=1)
    (folder / "dump.json").write_text(text)
    dump = open_dump(folder)
    assert len(dump) == 50
    assert dump.nth(49).values[0].stats.norm == 1.0
    other = tmp_path / "step1" / "rank0"
    other.mkdir(parents=True)
    (other / "dump.json").write_bytes(text.encode("utf-16"))
    assert [call.id for call in open_dump(other).calls()] == [call.id for call in dump.calls()]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"data": []}', '{"data": {"a" 1}}', '{"data": {}} x', "\x00\x01"])
def test_a_broken_dump_json_gets_one_clear_error(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "step0" / "rank0"
    folder.mkdir(parents=True)
    (folder / "dump.json").write_text(content)
    with pytest.raises(DumpError, match=r"dump\.json"):
        open_dump(folder)


def test_infinite_and_missing_numbers_do_not_stop_a_comparison(tmp_path: Path) -> None:
    value = np.array([1, math.inf, math.nan], np.float32)
    reference, target = (run(tmp_path / side, {("output", 0): value}) for side in "rt")
    assert rows(reference, target)["output.0"].verdict.codes == (Code.IDENTICAL,)


def test_an_odd_tensor_of_which_a_dump_has_the_elements_alone_is_unknown_not_equal(tmp_path: Path) -> None:
    class Older(DumpBuilder):
        def _value(self, value: Any) -> tuple[int, int, int]:
            meta, measure, text = super()._value(value)
            return self.text({**json.loads(self.written[meta]), "layout": "torch.sparse_coo", "nnz": 8}), measure, text

        def text(self, content: Any) -> int:
            self.written = getattr(self, "written", {})
            number = super().text(content)
            self.written[number] = json.dumps(content)
            return number

    def older(folder: Path, value: Any) -> Path:
        builder = Older(folder)
        builder.call("Tensor", "add", values={("output", 0): value})
        return builder.close()

    one, same, other = (older(tmp_path / str(at), value) for at, value in enumerate((X, X, X + 1)))
    found = rows(one, same)["output.0"]
    assert (found.verdict.level, found.error, found.evidence) == (Level.UNKNOWN, None, Evidence.NOTHING)
    assert "older" in found.verdict.text
    assert rows(one, other)["output.0"].verdict.level is Level.FAIL
