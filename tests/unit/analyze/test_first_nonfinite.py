"""Where the first nan of a recorded run begins, over ranks and through exchanges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import DumpBuilder
from ulpscope.analyze.first_nonfinite import Bad, Beginning, First, first_nonfinite
from ulpscope.model.names import call_text
from ulpscope.model.records import Phase
from ulpscope.report.nonfinite import answer_line, nonfinite_lines
from ulpscope.store.registry import open_run

GOOD = np.ones(2, np.float32)
NAN = np.array([1, np.nan], np.float32)
INF = np.array([1, np.inf], np.float32)
IN, OUT = ("input", 0), ("output", 0)


def call(name: str, given: Any, returned: Any, **more: Any) -> tuple[str, str, dict[tuple[Any, ...], Any]]:
    kind, _, api = name.partition(".")
    return kind, api, {IN: given, OUT: returned, **{("input", key): value for key, value in more.items()}}


def of(folder: Path, *ranks: list[tuple[str, str, dict[tuple[Any, ...], Any]]]) -> list[First]:
    for rank, calls in enumerate(ranks):
        builder = DumpBuilder(folder, rank=rank)
        builder.manifest["world_size"] = len(ranks)
        numbers: dict[str, int] = {}
        for kind, name, values in calls:
            index = numbers[name] = numbers.get(name, -1) + 1
            builder.call(kind, name, index, values=values)
        builder.close()
    return first_nonfinite(open_run(folder))


def told(found: list[First]) -> list[tuple[str, int, Beginning]]:
    return [(call_text(each.call.id), each.rank, each.how) for each in found]


SQRT = call("Torch.sqrt", GOOD, NAN)
ADD = call("Torch.add", NAN, NAN)


def test_the_call_that_made_it_of_finite_values_is_named_and_those_behind_it_are_not(tmp_path: Path) -> None:
    found = of(tmp_path, [call("Torch.mul", GOOD, GOOD), SQRT, ADD])
    assert told(found) == [("Torch.sqrt.0.forward", 0, Beginning.MADE)]
    assert "all it was given is finite" in "\n".join(nonfinite_lines(found[0], ranks=1))


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_through_an_exchange_it_is_followed_to_the_rank_that_made_it(tmp_path: Path, name: str) -> None:
    more = {1: 2} if name == "broadcast" else {}
    came = [call(f"Distributed.{name}", GOOD, NAN, **{}), ADD]
    gave = [SQRT, call(f"Distributed.{name}", NAN, NAN), ADD]
    for calls in (came, gave):
        for _, api, values in calls:
            values.update({("input", place): rank for place, rank in more.items() if api == name})
    found = of(tmp_path, came, came, gave)
    assert told(found) == [("Torch.sqrt.0.forward", 2, Beginning.MADE)]
    assert [rank for rank, _ in found[0].reached] == [0, 1]
    assert f"  rank 0 got it by Distributed.{name}.0.forward" in nonfinite_lines(found[0], ranks=3)
    assert answer_line(found) == "it begins at Torch.sqrt.0.forward on rank 2"


def test_through_send_and_recv_over_three_ranks(tmp_path: Path) -> None:
    def message(name: str, key: str, peer: int, given: Any, returned: Any) -> Any:
        values = {IN: given, ("input", key): peer}
        return "Distributed", name, {**values, OUT: returned} if name == "recv" else values

    first = [SQRT, message("send", "dst", 1, NAN, None)]
    second = [message("recv", "src", 0, GOOD, NAN), message("send", "dst", 2, NAN, None)]
    third = [message("recv", "src", 1, GOOD, NAN), ADD]
    found = of(tmp_path, first, second, third)
    assert told(found) == [("Torch.sqrt.0.forward", 0, Beginning.MADE)]
    assert [rank for rank, _ in found[0].reached] == [1, 2]


def test_an_exchange_that_is_given_finite_values_alone_made_it_itself(tmp_path: Path) -> None:
    sum_of_all = [call("Distributed.all_reduce", GOOD, INF)]
    found = of(tmp_path, sum_of_all, sum_of_all)
    assert {each.how for each in found} == {Beginning.MADE}
    assert found[0].bad is Bad.INF


def test_what_a_rank_without_a_record_gave_is_not_guessed(tmp_path: Path) -> None:
    found = of(tmp_path, [call("Distributed.all_reduce", GOOD, NAN)], [call("Torch.mul", GOOD, GOOD)])
    assert told(found) == [("Distributed.all_reduce.0.forward", 0, Beginning.CAME)]
    assert found[0].why == "rank 1 has no record of it"
    assert answer_line(found) == "who made it cannot be told from this recording"


def test_a_nan_that_was_there_before_is_not_blamed_on_who_reads_it(tmp_path: Path) -> None:
    found = of(tmp_path, [ADD, SQRT])
    assert told(found) == [("Torch.add.0.forward", 0, Beginning.THERE)]


def test_infinities_that_the_program_writes_down_are_no_finding_until_a_nan_comes_of_them(tmp_path: Path) -> None:
    mask = ("Tensor", "masked_fill", {IN: GOOD, ("input", 1): float("-inf"), OUT: INF})
    added, shown = call("Torch.add", INF, INF), call("Functional.softmax", INF, GOOD)
    assert of(tmp_path / "clean", [mask, added, shown]) == []
    assert of(tmp_path / "pole", [call("Torch.log", GOOD, INF)]) == []
    found = of(tmp_path / "nan", [mask, call("Torch.sub", INF, NAN)])
    assert told(found) == [("Torch.sub.0.forward", 0, Beginning.MADE)]
    assert "it was given infinities, and no nan" in "\n".join(nonfinite_lines(found[0], ranks=1))


def test_an_overflow_is_named_before_the_nan_that_comes_of_it(tmp_path: Path) -> None:
    found = of(tmp_path, [call("Torch.exp", GOOD, INF), call("Torch.sub", INF, NAN)])
    assert [(call_text(each.call.id), each.bad) for each in found] == [
        ("Torch.exp.0.forward", Bad.INF),
        ("Torch.sub.0.forward", Bad.NAN),
    ]


def test_the_call_inside_a_module_is_named_not_the_module(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path)
    above = builder.call("Module", "fc.Linear", values={IN: GOOD, OUT: NAN})
    builder.call("Functional", "linear", values={IN: GOOD, OUT: NAN}, parent=above)
    builder.close()
    assert told(first_nonfinite(open_run(tmp_path))) == [("Functional.linear.0.forward", 0, Beginning.MADE)]


def test_a_backward_is_judged_with_what_its_forward_was_given(tmp_path: Path) -> None:
    builder = DumpBuilder(tmp_path)
    builder.call("Torch", "mul", 0, values={IN: INF, OUT: INF})
    builder.call("Torch", "mul", 0, Phase.BACKWARD, values={IN: GOOD, OUT: INF})
    builder.call("Torch", "sqrt", 0, values={IN: GOOD, OUT: GOOD})
    builder.call("Torch", "sqrt", 0, Phase.BACKWARD, values={IN: GOOD, OUT: NAN})
    builder.close()
    assert told(first_nonfinite(open_run(tmp_path))) == [("Torch.sqrt.0.backward", 0, Beginning.MADE)]
