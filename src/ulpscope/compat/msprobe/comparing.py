"""msprobe's compare and compare_distributed: two dumps in, a workbook with its tables out. Imports no framework.

`npu` is the target, `bench` the reference; calls are put together by name, or by name without number (`fuzzy_match`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ulpscope.compare.align import Align
from ulpscope.compare.comparison import CallComparison
from ulpscope.compare.engine import Options, compare_dumps
from ulpscope.compare.mapping import Mapping as Names
from ulpscope.compare.rules import Kind
from ulpscope.compare.runs import Unit, executor_for
from ulpscope.compat.first_wrong import NOTHING_COMPARED, FirstWrong, missing_files, ranks_differ
from ulpscope.model.errors import ConfigError, did_you_mean
from ulpscope.model.names import SAVED
from ulpscope.report import legacy
from ulpscope.report.advisor import write_advisor
from ulpscope.report.first_difference import write_first_difference
from ulpscope.report.table import Row, Sheet, stamped
from ulpscope.report.xlsx import write_xlsx
from ulpscope.store import registry
from ulpscope.store.dump import Dump
from ulpscope.store.formats import msprobe_folder
from ulpscope.store.formats.msprobe_reader import MsprobeDump
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)
DUMP, DEBUG = msprobe_folder.FILES
_PRINT_LOG = "is_print_compare_log"
_SHEET = "Sheet"
# As in 8.2.1, a little below what a sheet holds; with more rows there are no colours.
_MOST_COLOURED = 1_048_500
_CHUNK = 1 << 24
_NO_STACK_PATH = (
    "Missing stack_path in the configuration file. Automatically detecting stack.json to determine whether to display "
    "NPU_Stack_Info."
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """How to compare, as the arguments of msprobe say it."""

    output: Path
    fuzzy: bool = False
    highlight: bool = False
    advice: bool = True
    print_log: bool = True
    names: Names = field(default_factory=Names)


def compare(
    input_param: Mapping[str, Any],
    output_path: str,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    highlight: bool = False,
) -> None:
    """Compares two dumps of one card and writes compare_result_{timestamp}.xlsx.

    `input_param`: npu_json_path, bench_json_path, stack_json_path (optional), is_print_compare_log. ConfigError, naming
    what is wrong, for a mistake in the arguments; DumpError for a dump that cannot be read.
    """
    npu, bench, stacks, print_log = read_input(input_param, suffix="_json_path")
    given = {"stack_mode": stack_mode, "auto_analyze": auto_analyze, "fuzzy_match": fuzzy_match, "highlight": highlight}
    flags = {name: _flag(name, value) for name, value in given.items()}
    output = Path(output_path)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"output_path {str(output)!r}: {error.strerror}"]) from None
    wanted = Wanted(output, flags["fuzzy_match"], flags["highlight"], flags["auto_analyze"], print_log)
    compare_files(npu, bench, wanted, stacks=shows_stacks(npu, stacks, stack_mode=flags["stack_mode"]))


def compare_distributed(npu_dump_dir: str, bench_dump_dir: str, output_path: str, **kwargs: Any) -> None:
    """Compares the ranks of two steps, in numeric order, and writes compare_result_rank{n}_{timestamp}.xlsx for each.

    `kwargs` are the optional arguments of `compare`; stack_mode has no effect, as stack.json is found by itself. The
    output folder must be there. Raises as `compare` does.
    """
    if not Path(output_path).is_dir():
        raise ConfigError([f"output_path {output_path!r} is not a folder; make it first"])
    known = {"stack_mode": False, "auto_analyze": True, "fuzzy_match": False, "highlight": False}
    known |= {_PRINT_LOG: True}
    for name, value in kwargs.items():
        if name not in known:
            raise ConfigError([f"compare_distributed has no argument {name!r}.{did_you_mean(name, known)}"])
        known[name] = _flag(name, value)
    wanted = Wanted(
        Path(output_path),
        known["fuzzy_match"],
        known["highlight"],
        known["auto_analyze"],
        known[_PRINT_LOG],
    )
    compare_folders(Path(npu_dump_dir), Path(bench_dump_dir), wanted)


def _flag(name: str, value: Any) -> bool:
    """A flag, also as the text that scripts which tools write have it in. Raises ConfigError."""
    if value in ("True", "False"):
        return bool(value == "True")
    if not isinstance(value, bool):
        raise ConfigError([f"{name} is {value!r}, it must be True or False"])
    return value


# --- arguments --------------------------------------------------------------------------------------------------


def read_input(given: object, *, suffix: str = "_path") -> tuple[Path, Path, Path | None, bool]:
    """npu, bench, stack and is_print_compare_log from a table; ConfigError with every mistake in it."""
    if not isinstance(given, Mapping):
        raise ConfigError(["input_param should be dict, please check!"])
    keys = [f"{side}{suffix}" for side in ("npu", "bench", "stack")]
    for key in given:
        if key not in (*keys, _PRINT_LOG):
            # Scripts of other versions have more keys; a misspelt one is missing, and said below.
            _log.warning("%r is not used.%s", key, did_you_mean(str(key), [*keys, _PRINT_LOG]))
    problems = []
    paths: list[Path | None] = []
    for key in keys:
        found = given.get(key)
        if not found and key != keys[2]:
            problems.append(f"Missing {key} in input configuration file, please check!")
        elif found is not None and not isinstance(found, str):
            problems.append(f"{key} is {found!r}, it must be a path")
        paths.append(Path(found) if found and isinstance(found, str) else None)
    print_log = given.get(_PRINT_LOG, True)
    if not isinstance(print_log, bool):
        problems.append(f"Invalid input parameter, {_PRINT_LOG} which should be only bool type.")
    if problems:
        raise ConfigError(problems)
    npu, bench, stack = paths
    assert npu is not None and bench is not None
    return npu, bench, stack, bool(print_log)


def shows_stacks(npu: Path, stacks: Path | None, *, stack_mode: bool) -> bool | None:
    """Whether NPU_Stack_Info is shown: as `stack_mode` says where a file is named; None, found out later, where none is."""
    if stacks is None:
        _log.warning(_NO_STACK_PATH)
        return None
    if not stacks.is_file():
        raise ConfigError(
            [f"stack_path {str(stacks)!r} does not exist; leave it out and stack.json is found by itself"]
        )
    own = msprobe_folder.beside(npu, msprobe_folder.STACKS)
    if stack_mode and not (own.is_file() and own.samefile(stacks)):
        raise ConfigError(
            [f"stack_path is {str(stacks)!r}; it must be the {msprobe_folder.STACKS} beside npu_path, {str(own)!r}"]
        )
    return stack_mode


# --- comparisons ------------------------------------------------------------------------------------------------


def compare_files(npu: Path, bench: Path, wanted: Wanted, *, stacks: bool | None = None) -> bool:
    """Compares two dumps, each a dump.json, a debug.json or a folder with one; returns whether any row was compared."""
    for path in (npu, bench):
        if not path.exists():
            raise ConfigError([f"{path} does not exist; give a dump.json, a debug.json or the folder of a step"])
    saved, theirs = _is_saved(npu), _is_saved(bench)
    if saved is not theirs:
        raise ConfigError([f"{npu} and {bench} are not of one kind; compare a {DEBUG} with a {DEBUG}"])
    return _write(Unit(0, 0, bench, npu), wanted, label="", saved=saved, stacks=stacks, progress=True)


def compare_folders(npu: Path, bench: Path, wanted: Wanted) -> bool:
    """Compares two steps rank by rank, several at a time; returns whether of each rank any row was compared."""
    jobs = [
        (label, saved, unit)
        for label, unit in paired_ranks(npu, bench)
        for saved in (False, True)
        if all(_has(folder, saved=saved) for folder in (unit.reference, unit.target))
    ]
    if not jobs:
        raise ConfigError([f"{npu} and {bench} have no rank with a {DUMP} or a {DEBUG} on both sides"])
    cores = os.cpu_count() or 1
    threads = max(1, cores // len(jobs))
    executor = executor_for(len(jobs), cores)
    started: list[Future[bool]] = []
    for label, saved, unit in jobs:
        work = partial(_write, wanted=wanted, label=label, saved=saved, progress=len(jobs) == 1, threads=threads)
        started += executor.map(work, [unit])
    try:
        compared: list[bool] = list(executor.gather(started))
        return all(compared)
    finally:
        executor.close()


def first_difference(npu: Path, bench: Path, wanted: Wanted) -> bool:
    """Writes compare_result_rank{n}_{timestamp}.json for each rank, and diff_analyze_{time}.json where they differ.

    Returns whether any call was compared."""
    if npu.is_dir():
        units = [unit for _, unit in paired_ranks(npu, bench)]
    else:
        place = registry.find_dumps(npu)[0]
        units = [Unit(place.step, place.rank, bench, npu)]
    with stamped(wanted.output, f"compare_result_rank{units[0].rank}_{{}}.json") as stamp:
        written = write_first_difference(units, wanted.output, timestamp=stamp, options=_options(wanted))
    for path in (*written.ranks, *((written.analysis,) if written.analysis else ())):
        _log.info("The comparison result is saved in: %s", path)
    if not written.compared:
        _log.error("%s", NOTHING_COMPARED)
    elif written.unknown:
        _log.warning("%d values could not be compared.", written.unknown)
    elif written.analysis is None:
        _log.info("No difference was found.")
    return written.compared > 0


def _options(wanted: Wanted, threads: int = 0) -> Options:
    return Options(align=Align.FUZZY if wanted.fuzzy else Align.NAME, mapping=wanted.names, jobs=threads)


def paired_ranks(npu: Path, bench: Path) -> list[tuple[str, Unit]]:
    """The ranks of two steps in numeric order, each with the word for it in the name of its result."""
    found = []
    for path in (npu, bench):
        if not path.is_dir():
            raise ConfigError([f"{path} is not a folder; give the folder of a step, as ./npu_dump/step0"])
        places = registry.find_dumps(path)
        if not places:
            raise ConfigError([f"{path} holds no dump; give the folder of a step, as ./npu_dump/step0"])
        steps = sorted({place.step for place in places})
        if len(steps) > 1:
            raise ConfigError([f"{path} holds the steps {', '.join(map(str, steps))}; give the folder of one of them"])
        found.append(places)
    ours, theirs = found
    if len(ours) != len(theirs):
        raise ConfigError([ranks_differ(npu, len(ours), bench, len(theirs))])
    return [
        (
            place.folder.name if place.folder.is_dir() else f"rank{place.rank}",
            Unit(place.step, place.rank, other.folder, place.folder),
        )
        for place, other in zip(ours, theirs, strict=True)
    ]


def _has(folder: Path, *, saved: bool) -> bool:
    if msprobe_folder.is_msprobe(folder):
        return (folder / (DEBUG if saved else DUMP)).is_file()
    return not saved


def _is_saved(path: Path) -> bool:
    """Whether a named file holds values that were saved one by one, as debug.json does under whatever name."""
    if not path.is_file():
        return False
    ids = open_dump(path).ids()
    return all(call.kind == SAVED for call in ids) if ids else path.name == DEBUG


def _write(
    unit: Unit,
    wanted: Wanted,
    *,
    label: str,
    saved: bool,
    stacks: bool | None = None,
    progress: bool = False,
    threads: int = 0,
) -> bool:
    """Writes the result of one rank; returns whether any of its rows was compared."""
    reference, target = open_dump(unit.reference), open_dump(unit.target)
    table = legacy.table_for(reference, target)
    if stacks is None:
        stacks = _has_stacks(target)
    found = compare_dumps(reference, target, _options(wanted, threads))
    calls: Iterator[CallComparison] = (call for call in found if (call.match.call.id.kind == SAVED) == saved)
    if progress and sys.stderr.isatty():
        calls = _showing_progress(calls, len(target))
    header = table.header(stacks=stacks)
    made = legacy.rows(
        calls,
        table,
        reference=reference,
        target=target,
        stacks=stacks,
        highlight=wanted.highlight and _can_be_coloured(target),
    )
    if wanted.print_log and "Cosine" in header and _log.isEnabledFor(logging.INFO):
        made = _logging(made, header)
    verdicts = FirstWrong(header)
    name = f"{'debug_' if saved else ''}compare_result_{label + '_' if label else ''}{{}}.xlsx"
    with stamped(wanted.output, name) as stamp:
        path = wanted.output / name.format(stamp)
        for note in write_xlsx(path, [Sheet(_SHEET, header, verdicts.watching(made))]):
            _log.warning("%s: %s", path, note)
        _log.info("The comparison result is saved in: %s", path)
        if wanted.advice:
            _advise(wanted.output, verdicts, stamp, unit.rank if label else None)
    gone = missing_files(target, reference) if table.kind is Kind.ELEMENTS else ""
    if gone:
        _log.warning("%s: %s", path, gone)
    if not verdicts.compared:
        _log.error("%s: %s", path, NOTHING_COMPARED)
    return verdicts.compared


def _advise(folder: Path, verdicts: FirstWrong, stamp: str, rank: int | None) -> None:
    path, suspect = write_advisor(folder, verdicts.pairs(), timestamp=stamp, rank=rank)
    _log.info("The summary of the expert advice is as follows:\n%s", suspect.content.rstrip())
    _log.info("The advisor summary is saved in: %s", path)


def _has_stacks(target: Dump) -> bool:
    if target.source.format == "msprobe":
        return msprobe_folder.beside(target.folder, msprobe_folder.STACKS).is_file()
    return len(target) > 0 and target.nth(0).stack is not None


def _can_be_coloured(target: Dump) -> bool:
    if _count(target) <= _MOST_COLOURED:
        return True
    _log.warning("%s has more rows than a sheet holds; the result has no colours", target.folder)
    return False


def _count(target: Dump) -> int:
    """How many values a dump has. Those of msprobe are counted by their types, as reading them all would take long."""
    if not isinstance(target.source, MsprobeDump):
        return target.value_count
    found = 0
    for path in target.source.files:
        with path.open("rb") as file:
            found += sum(chunk.count(b'"type"') for chunk in iter(partial(file.read, _CHUNK), b""))
    return found


def _showing_progress(calls: Iterable[CallComparison], total: int) -> Iterator[CallComparison]:
    # Heavy, and only for a terminal.
    from rich.console import Console
    from rich.progress import track

    return iter(track(calls, "API/Module Compare Progress", total, console=Console(stderr=True)))


def _logging(made: Iterable[Row], header: Sequence[str]) -> Iterator[Row]:
    """A line for each row on its way to the file."""
    first, message = header.index("Cosine"), header.index("Err_message")
    for cells, colour in made:
        cosine, euclidean, absolute, relative, thousandth, five = cells[first : first + 6]
        _log.info(
            "[%s] Compare result: cosine %s, euc_dist %s, max_abs_err %s, max_relative_err %s, "
            "one_thousand_err_ratio %s, five_thousand_err_ratio %s, %s",
            cells[0],
            cosine,
            euclidean,
            absolute,
            relative,
            thousandth,
            five,
            cells[message],
        )
        yield cells, colour
