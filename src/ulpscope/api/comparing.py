"""Two runs side by side: where they stop agreeing, and by how much."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ulpscope.compare.align import Align
from ulpscope.compare.comparison import CallComparison
from ulpscope.compare.engine import Options, compare_dumps
from ulpscope.compare.mapping import Mapping, read_mapping
from ulpscope.compare.runs import Unit, executor_for, pair_runs
from ulpscope.compare.settings import manifest_differences
from ulpscope.compare.values import Values
from ulpscope.findings.advice import Advice, advise
from ulpscope.findings.divergence import Search
from ulpscope.findings.ranks import explain_later, origin
from ulpscope.model.errors import ConfigError, DumpError, did_you_mean
from ulpscope.model.records import CallRecord, Frame
from ulpscope.report.csv import write_csv
from ulpscope.report.outcome import Answer, Outcome, UnitOutcome
from ulpscope.report.rows import COLUMNS, rows_of
from ulpscope.report.table import Sheet
from ulpscope.report.xlsx import write_xlsx
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)

Progress = Callable[[Iterator[CallComparison], int], Iterator[CallComparison]]


def compare(
    reference: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    rank: int | None = None,
    align: str = Align.VALUES.value,
    mapping: str | Path | None = None,
    elements: bool = True,
    jobs: int = 0,
    tables: str | None = None,
    output: str | Path | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Compares two runs, step by step and rank by rank: where they stop agreeing, and by how much.

    `mapping` is a YAML file, `tables` is xlsx or csv: every row goes to a file in `output` (beside the target). `jobs` are cores,
    0 all. `progress` may pass on the calls of a unit and their number.
    """
    for name, given, known in (("align", align, [each.value for each in Align]), ("tables", tables, ("xlsx", "csv"))):
        if given is not None and given not in known:
            near = did_you_mean(given, known)
            raise ConfigError([f"{name} is {given!r}; it must be one of {', '.join(known)}.{near}"])
    runs = pair_runs(reference, target, step=step, rank=rank)
    folder = result_folder(reference, target, output)
    jobs = jobs or os.cpu_count() or 1
    apart = len(runs.units) > 1 and jobs > 1
    options = Options(
        Align(align),
        read_mapping(mapping) if mapping else Mapping(),
        jobs=1 if apart else jobs,
        elements=elements,
    )
    work = partial(compare_unit, Task(options, tables, folder, None if apart else progress))
    executor = executor_for(len(runs.units), jobs)
    try:
        found = tuple(executor.gather(executor.map(work, runs.units)))
    finally:
        executor.close()
    return Outcome(
        str(reference),
        str(target),
        found,
        tuple(f"step {place.step} rank {place.rank}" for place in runs.only_reference),
        tuple(f"step {place.step} rank {place.rank}" for place in runs.only_target),
        origin(explain_later(unit.divergence for unit in found)),
    )


@dataclass(frozen=True, slots=True)
class Task:
    """What is done with every unit."""

    options: Options
    tables: str | None
    folder: Path
    progress: Progress | None


def compare_unit(task: Task, unit: Unit) -> UnitOutcome:
    """One step of one rank: its table if asked, and what was found."""
    reference, target = open_dump(unit.reference), open_dump(unit.target)
    values = Values(reference, target)
    search = Search(unit.step, unit.rank, values)
    stream = _seen(compare_dumps(reference, target, task.options, values), search)
    if task.progress:
        stream = task.progress(stream, max(len(reference), len(target)))
    artefacts = []
    if task.tables:
        path = task.folder / f"compare_step{unit.step}_rank{unit.rank}.{task.tables}"
        if task.tables == "xlsx":
            write_xlsx(path, [Sheet("values", list(COLUMNS), rows_of(stream))])
        else:
            write_csv(path, list(COLUMNS), rows_of(stream))
        artefacts.append(path)
    for _ in stream:
        pass
    divergence = search.result()
    stacks = {}
    for finding in divergence.findings:
        match = finding.comparison.match
        dump = reference if match.target is None else target
        stacks[match.call.seq] = _stack(dump, match.call)
    endings = [f"{dump.folder}: {dump.ending}" for dump in (reference, target) if dump.ending != "complete"]
    endings += _other_calls(reference, target)
    missing = (len(reference.missing), len(target.missing)) if task.options.elements else (0, 0)
    surroundings = tuple(manifest_differences(reference.manifest, target.manifest))
    return UnitOutcome(divergence, stacks, tuple(endings), surroundings, tuple(artefacts), missing)


def advice_on(outcome: Outcome) -> Advice:
    """What to do next, and why."""
    several = len(outcome.units) > 1
    alone = None
    for unit in reversed(outcome.units) if outcome.answer is not Answer.AGREES else ():
        for name, why in unit.divergence.alone[:1]:
            run = outcome.target if why.startswith("the reference") else outcome.reference
            alone = (f"{run} --step {unit.divergence.step} --rank {unit.divergence.rank}" if several else run), name
    return advise(outcome.first, reference=outcome.reference, target=outcome.target, several=several, alone=alone)


def result_folder(reference: str | Path, target: str | Path, output: str | Path | None = None) -> Path:
    """Where what is written about two runs goes: `output`, or beside the target."""
    if output is not None:
        return Path(output)
    names = [Path(path).resolve().name for path in (target, reference)]
    return Path(target).resolve().parent / f"{names[0]}.vs.{names[1]}"


def _stack(dump: Dump, call: CallRecord) -> tuple[Frame, ...]:
    try:
        return tuple(dump.stack(call))
    except DumpError as error:
        _log.warning("%s; it is left out", error)  # the answer does without
        return ()


def _seen(calls: Iterator[CallComparison], search: Search) -> Iterator[CallComparison]:
    for call in calls:
        search.see(call)
        yield call


def _other_calls(reference: Dump, target: Dump) -> Iterator[str]:
    """Why one of two dumps of the same program may have calls that the other lacks."""
    left, right = reference.manifest.config, target.manifest.config
    for key in ("level", "only", "skip", "scope", "phases"):
        if key in left and key in right and left[key] != right[key]:
            yield f"recorded with other options, {key} {left[key]} and {right[key]}: calls that only one has are left out"
