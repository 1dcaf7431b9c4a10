"""Replicas, from dumps made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from builders import DumpBuilder
from ulpscope.analyze.replicas import agreement
from ulpscope.model.errors import DumpError
from ulpscope.store.registry import open_run
from ulpscope.store.run_folder import MANIFEST

Array = np.ndarray


def run_of(folder: Path, ranks: list[list[tuple[str, Array]]], step: int = 0) -> None:
    """For each rank its calls: an exchange and what came out of it, or a module and its weight."""
    for rank, calls in enumerate(ranks):
        builder = DumpBuilder(folder, step=step, rank=rank)
        builder.manifest["world_size"] = len(ranks)
        for index, (name, array) in enumerate(calls):
            if name == "all_reduce":
                builder.call("Distributed", name, index, values={("input", 0): array * 0, ("output", 0): array})
            else:
                builder.call("Module", name, values={("parameters", "weight"): array})
        builder.close()


ONE, TWO = np.ones(4, np.float32), np.full(4, 2, np.float32)


def test_what_all_reduce_leaves_with_its_members_is_compared(tmp_path: Path) -> None:
    run_of(tmp_path, [[("all_reduce", ONE), ("all_reduce", TWO)], [("all_reduce", ONE), ("all_reduce", ONE)]])
    answer = agreement(open_run(tmp_path))
    (found,) = answer.found
    assert (found.call.name, found.call.index, answer.compared) == ("all_reduce", 1, 2)


def test_the_rank_that_differs_from_most_is_the_odd_one(tmp_path: Path) -> None:
    big = np.ones(100, np.float32)
    run_of(tmp_path, [[("a.Linear", big), ("b.Linear", each)] for each in (ONE, TWO, ONE)])
    answer = agreement(open_run(tmp_path))
    (found,) = answer.found
    assert (answer.groups, found.call.name, found.odd, found.others) == (((0, 1, 2),), "b.Linear", (1,), (0, 2))


def test_ranks_with_other_parameters_are_no_replicas_unless_somebody_says_so(tmp_path: Path) -> None:
    run_of(tmp_path, [[("a.Linear", ONE)], [("a.Linear", TWO)]])
    assert agreement(open_run(tmp_path)).compared == 0
    assert len(agreement(open_run(tmp_path), ((0, 1),)).found) == 1


def test_ranks_of_two_formats_are_refused_unless_they_have_checksums(tmp_path: Path) -> None:
    run_of(tmp_path, [[("a.Linear", ONE)], [("a.Linear", ONE)]])
    paths = sorted(tmp_path.rglob(MANIFEST))
    for path in paths[1:]:
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(DumpError, match="several versions of ulpscope"):
        agreement(open_run(tmp_path))
    for path in paths:
        path.write_text(json.dumps({**json.loads(path.read_text()), "config": {"checksum": True}}))
    assert agreement(open_run(tmp_path)).compared == 1


def test_the_earliest_step_comes_first(tmp_path: Path) -> None:
    for step, second in ((0, ONE), (1, TWO), (2, TWO)):
        run_of(tmp_path, [[("a.Linear", ONE)], [("a.Linear", second)]], step)
    assert [each.step for each in agreement(open_run(tmp_path)).found] == [1, 2]


def test_one_rank_is_not_enough(tmp_path: Path) -> None:
    run_of(tmp_path, [[("a.Linear", ONE)]])
    with pytest.raises(DumpError, match="several ranks"):
        agreement(open_run(tmp_path))
