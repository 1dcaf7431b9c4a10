"""Two runs into units of work: a step of a rank on both sides. Where units are worked on is the executor's business."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ulpscope.model.errors import DumpError
from ulpscope.store.registry import find_dumps
from ulpscope.store.run_folder import DumpLocation

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Unit:
    """One step of one rank, of the reference and of the target; the numbers are the target's."""

    step: int
    rank: int
    reference: Path
    target: Path


@dataclass(frozen=True, slots=True)
class Runs:
    """The units of two runs, and the dumps that one run alone has."""

    units: tuple[Unit, ...]
    only_reference: tuple[DumpLocation, ...] = ()
    only_target: tuple[DumpLocation, ...] = ()


def pair_runs(reference: str | Path, target: str | Path, *, step: int | None = None, rank: int | None = None) -> Runs:
    """The dumps of two runs by step and rank. A single dump on either side is compared whatever its numbers are.

    Raises DumpError where a run holds nothing, or the two have no step and rank in common.
    """
    left, right = _places(reference, step, rank), _places(target, step, rank)
    if len(left) == len(right) == 1:
        return Runs((_unit(left[0], right[0]),))
    theirs = {(place.step, place.rank, place.copy): place for place in left}
    ours = {(place.step, place.rank, place.copy): place for place in right}
    both = [key for key in ours if key in theirs]
    if not both:
        raise DumpError(
            f"{reference} has {_listed(left)}, {target} has {_listed(right)}: none in common; "
            "give the folders of two steps or ranks that belong together"
        )
    return Runs(
        tuple(_unit(theirs[key], ours[key]) for key in both),
        tuple(place for key, place in theirs.items() if key not in ours),
        tuple(place for key, place in ours.items() if key not in theirs),
    )


def warn_of_one(reference: Path, target: Path) -> None:
    """Says it where two paths lead to one dump: the same path, a link, or another name of the file."""
    with contextlib.suppress(OSError):  # whoever reads it says so
        if reference.samefile(target):
            log.warning("both sides are the same dump: %s", target)


def _places(run: str | Path, step: int | None, rank: int | None) -> list[DumpLocation]:
    found = find_dumps(Path(run))
    chosen = [place for place in found if step in (None, place.step) and rank in (None, place.rank)]
    if not chosen:
        has = f"it has {_listed(found)}" if found else "a dump is a folder step0/rank0, or a dump.json of msprobe"
        asked = "" if step is None and rank is None else " of the asked step and rank"
        raise DumpError(f"{run} holds no dump{asked}; {has}")
    return chosen


def _unit(reference: DumpLocation, target: DumpLocation) -> Unit:
    return Unit(target.step, target.rank, reference.folder, target.folder)


def _listed(places: Sequence[DumpLocation]) -> str:
    shown = ", ".join(f"step {place.step} rank {place.rank}" for place in places[:4])
    return shown + (f" and {len(places) - 4} more" if len(places) > 4 else "")


# --- where units are worked on ----------------------------------------------------------------------------------


class Executor(Protocol):
    """Works on units somewhere: in this process, in others, on other machines. `gather` gives results in order."""

    def map(self, work: Callable[[Unit], Result], units: Sequence[Unit]) -> list[Future[Result]]: ...
    def gather(self, started: Sequence[Future[Result]]) -> Iterator[Result]: ...
    def close(self) -> None: ...


class InProcess:
    """One unit after the other, when it is asked for."""

    def map(self, work: Callable[[Unit], Result], units: Sequence[Unit]) -> list[Future[Result]]:
        return [_Later(work, unit) for unit in units]

    def gather(self, started: Sequence[Future[Result]]) -> Iterator[Result]:
        return (each.result() for each in started)

    def close(self) -> None:
        pass


class Processes:
    """Several units at a time, each in a process."""

    def __init__(self, jobs: int) -> None:
        # Forking does not run the user's script a second time; where there is no fork, Python starts anew.
        ways = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if "fork" in ways else "spawn")
        self._pool = ProcessPoolExecutor(jobs, mp_context=context)

    def map(self, work: Callable[[Unit], Result], units: Sequence[Unit]) -> list[Future[Result]]:
        return [self._pool.submit(work, unit) for unit in units]

    def gather(self, started: Sequence[Future[Result]]) -> Iterator[Result]:
        return (each.result() for each in started)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class _Later(Future[Result]):
    """A result that is worked out when it is asked for."""

    def __init__(self, work: Callable[[Unit], Result], unit: Unit) -> None:
        super().__init__()
        self._work, self._unit = work, unit

    def result(self, timeout: float | None = None) -> Result:
        return self._work(self._unit)


def executor_for(units: int, jobs: int) -> Executor:
    """Processes where there are several units and several jobs; else this process."""
    return Processes(min(units, jobs)) if units > 1 and jobs > 1 else InProcess()
