"""Which calls belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import DumpBuilder
from ulpscope.compare.align import Align, align
from ulpscope.compare.comparison import How
from ulpscope.compare.values import plain_module
from ulpscope.model.names import call_text
from ulpscope.model.records import Phase
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump

Call = tuple[str, int, str] | tuple[str, int, str, tuple[int, ...]]


def dump(run: Path, calls: list[Any], *, backward: bool = False) -> Dump:
    """`calls` are (name, index, module[, shape]) of kind Tensor; with `backward` all go back in reverse order."""
    builder = DumpBuilder(run)
    seqs = []
    for name, index, module, *shape in calls:
        value = np.zeros(shape[0] if shape else (2,), dtype=np.float32)
        seqs.append(
            builder.call(
                "Tensor",
                name,
                index,
                values={("output", 0): value},
                module=builder.text(module) if module else 0xFFFFFFFF,
            )
        )
    for (name, index, *_), seq in reversed(list(zip(calls, seqs, strict=True)) if backward else []):
        builder.call("Tensor", name, index, Phase.BACKWARD, {("output", 0): np.zeros(2, np.float32)}, origin=seq)
    return open_dump(builder.close())


def named(reference: Dump, target: Dump, by: Align) -> list[tuple[str | None, str | None]]:
    left, right = reference.ids(), target.ids()
    return [
        (
            None if pair.reference is None else call_text(left[pair.reference]),
            None if pair.target is None else call_text(right[pair.target]),
        )
        for pair in align(reference, target, by)
    ]


def test_the_same_calls_belong_together_by_every_rule(tmp_path: Path) -> None:
    calls = [("add", 0, "a"), ("mul", 0, "a"), ("add", 1, "b")]
    reference, target = dump(tmp_path / "r", calls), dump(tmp_path / "t", calls)
    for by in Align:
        pairs = align(reference, target, by)
        assert [(pair.reference, pair.target) for pair in pairs] == [(0, 0), (1, 1), (2, 2)]
        assert {pair.how for pair in pairs} == {How.NAME}


def test_one_call_more_in_a_module_does_not_shift_the_modules_after_it(tmp_path: Path) -> None:
    reference = dump(tmp_path / "r", [("add", 0, "a"), ("add", 1, "b"), ("add", 2, "c")])
    target = dump(tmp_path / "t", [("add", 0, "a"), ("add", 1, "a", (3,)), ("add", 2, "b"), ("add", 3, "c")])
    assert named(reference, target, Align.VALUES) == [
        ("Tensor.add.0.forward", "Tensor.add.0.forward"),
        (None, "Tensor.add.1.forward"),
        ("Tensor.add.1.forward", "Tensor.add.2.forward"),
        ("Tensor.add.2.forward", "Tensor.add.3.forward"),
    ]


def test_by_name_the_numbers_decide_whatever_the_shapes_are(tmp_path: Path) -> None:
    reference = dump(tmp_path / "r", [("add", 0, "a"), ("add", 1, "b")])
    target = dump(tmp_path / "t", [("add", 0, "a", (3,)), ("add", 1, "a"), ("add", 2, "b")])
    assert named(reference, target, Align.NAME)[-1] == (None, "Tensor.add.2.forward")


def test_without_modules_shapes_decide_where_the_counts_differ(tmp_path: Path) -> None:
    reference = dump(tmp_path / "r", [("add", 0, "", (2,)), ("add", 1, "", (4,)), ("add", 2, "", (5,))])
    target = dump(
        tmp_path / "t", [("add", 0, "", (2,)), ("add", 1, "", (9,)), ("add", 2, "", (4,)), ("add", 3, "", (5,))]
    )
    for by in (Align.FUZZY, Align.VALUES):
        assert named(reference, target, by) == [
            ("Tensor.add.0.forward", "Tensor.add.0.forward"),
            (None, "Tensor.add.1.forward"),
            ("Tensor.add.1.forward", "Tensor.add.2.forward"),
            ("Tensor.add.2.forward", "Tensor.add.3.forward"),
        ]


def test_a_backward_call_follows_its_forward_call(tmp_path: Path) -> None:
    reference = dump(tmp_path / "r", [("add", 0, "a"), ("add", 1, "b")], backward=True)
    target = dump(tmp_path / "t", [("add", 0, "a"), ("add", 1, "a", (3,)), ("add", 2, "b")], backward=True)
    pairs = named(reference, target, Align.VALUES)
    assert ("Tensor.add.1.backward", "Tensor.add.2.backward") in pairs
    assert ("Tensor.add.0.backward", "Tensor.add.0.backward") in pairs
    assert (None, "Tensor.add.1.backward") in pairs


def test_what_only_the_reference_has_stands_where_it_ran(tmp_path: Path) -> None:
    reference = dump(tmp_path / "r", [("add", 0, "a"), ("mul", 0, "a"), ("sub", 0, "a")])
    target = dump(tmp_path / "t", [("add", 0, "a"), ("sub", 0, "a")])
    assert named(reference, target, Align.VALUES) == [
        ("Tensor.add.0.forward", "Tensor.add.0.forward"),
        ("Tensor.mul.0.forward", None),
        ("Tensor.sub.0.forward", "Tensor.sub.0.forward"),
    ]
    alone = align(reference, target)[1]
    assert (alone.how, alone.why) == (How.ALONE, "the target has no such call")


@pytest.mark.parametrize(
    ("name", "plain"),
    [("module.layers.0", "layers.0"), ("_orig_mod.head", "head"), ("layers.0", "layers.0"), ("", "")],
)
def test_wrappers_do_not_change_a_module(name: str, plain: str) -> None:
    assert plain_module(name) == plain


def test_a_wrapped_model_belongs_to_the_bare_one(tmp_path: Path) -> None:
    reference = dump(tmp_path / "r", [("add", 0, "layers.0"), ("add", 1, "layers.1")])
    target = dump(tmp_path / "t", [("add", 0, "module.layers.0"), ("add", 1, "module.layers.1")])
    assert [(pair.reference, pair.target) for pair in align(reference, target)] == [(0, 0), (1, 1)]


def test_every_call_is_in_the_result_once(tmp_path: Path) -> None:
    reference = dump(tmp_path / "r", [("add", at, f"m{at % 3}", (at % 4 + 1,)) for at in range(20)], backward=True)
    target = dump(tmp_path / "t", [("add", at, f"m{at % 4}", (at % 5 + 1,)) for at in range(25)], backward=True)
    for by in Align:
        pairs = align(reference, target, by)
        assert sorted(pair.target for pair in pairs if pair.target is not None) == list(range(len(target)))
        assert sorted(pair.reference for pair in pairs if pair.reference is not None) == list(range(len(reference)))


@pytest.mark.parametrize("by", list(Align))
@pytest.mark.parametrize("turned", [False, True])
def test_two_records_of_one_name_have_two_places(tmp_path: Path, by: Align, turned: bool) -> None:
    """As a call has whose outputs have nodes of their own; those that are about the same output belong together."""
    found = []
    for run, order in (("r", (0, 1)), ("t", (1, 0) if turned else (0, 1))):
        builder = DumpBuilder(tmp_path / run)
        x = np.zeros(2, dtype=np.float32)
        seq = builder.call("Torch", "split", 0, values={("output", 0): x, ("output", 1): x})
        for at in order:
            builder.call("Torch", "split", 0, Phase.BACKWARD, {("input", at): x}, origin=seq)
        found.append(open_dump(builder.close()))
    pairs = [(pair.reference, pair.target) for pair in align(*found, by)]
    assert pairs == ([(0, 0), (2, 1), (1, 2)] if turned else [(0, 0), (1, 1), (2, 2)])


def test_calls_of_threads_belong_together_by_thread_where_each_has_as_many(tmp_path: Path) -> None:
    def record(run: Path, threads: list[int]) -> Dump:
        builder = DumpBuilder(run)
        for index, thread in enumerate(threads):
            builder.call("Tensor", "add", index, values={("output", 0): np.zeros(2, np.float32)}, thread=thread)
        return open_dump(builder.close())

    def pairs(one: list[int], other: list[int]) -> list[tuple[int | None, int | None]]:
        dumps = [record(tmp_path / f"{one}{other}{side}", each) for side, each in enumerate((one, other))]
        return [(pair.reference, pair.target) for pair in align(*dumps)]

    assert pairs([0, 1, 2, 1], [2, 0, 1, 1]) == [(2, 0), (0, 1), (1, 2), (3, 3)]
    assert pairs([0, 1, 2, 1], [0, 2, 2, 1]) == [(0, 0), (1, 1), (2, 2), (3, 3)], "by their order, as before"
