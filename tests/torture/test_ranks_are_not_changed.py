"""Several ranks: every rank computes the same bytes, and has a dump of its own for every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from integration.runs import LEVELS, assert_same, whole_dumps
from torture.ranks import FOURS, PAIRS, run_world
from torture.test_run_is_not_changed import without_versions

PROMISE = "the run is not changed"
WORLDS = {**dict.fromkeys(PAIRS, 2), **dict.fromkeys(FOURS, 4)}
WITHOUT_MODULES = ("dist_collectives_2p", "dist_subgroup_4p")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {size: world(tmp_path_factory.mktemp(f"bare{size}"), size, None) for size in (2, 4)}


def world(folder: Path, size: int, level: str | None) -> list[dict[str, Any]]:
    torch.distributed.is_initialized()  # what is imported now is there in all ranks
    return run_world(size, folder, PAIRS if size == 2 else FOURS, level)


@pytest.fixture(scope="module", params=LEVELS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    level = request.param
    folder = tmp_path_factory.mktemp(level)
    return level, folder, {size: world(folder / str(size), size, level) for size in (2, 4)}


@pytest.mark.parametrize("case", WORLDS)
def test_every_rank_computes_the_same_and_has_its_dumps(case: str, recorded: Any, bare: Any) -> None:
    level, folder, captured = recorded
    size = WORLDS[case]
    for rank in range(size):
        one, two = bare[size][rank][case], captured[size][rank][case]
        if level == "kernel":
            one, two = without_versions(one), without_versions(two)
        assert_same(one, two, f"rank {rank}")
    dumps = ulpscope.open_run(folder / str(size) / case)
    if level == "module" and case in WITHOUT_MODULES:
        return
    whole_dumps(folder / str(size) / case, len(dumps))
    assert {dump.manifest.rank for dump in dumps} == set(range(size))
    if case == "dist_subgroup_4p":
        for dump in dumps:
            call = dump.call("Distributed.all_reduce.0.forward")
            given, got = call.values[0].stats.max, call.values[-1].stats.max
            assert (given, got) == (dump.manifest.rank + 1.0, 4.0 if dump.manifest.rank % 2 == 0 else 6.0)
