"""ptdbg_ascend's compare and compare_distributed: two dumps in, a csv table out. Imports no framework.

`npu` is the target, `bench` the reference; calls are put together by name, or by name without number (`fuzzy_match`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ulpscope.compare.align import Align
from ulpscope.compare.comparison import CallComparison
from ulpscope.compare.engine import Options, compare_dumps
from ulpscope.compare.rules import relative_error
from ulpscope.compat.first_wrong import NOTHING_COMPARED, FirstWrong, missing_files, ranks_differ
from ulpscope.compat.ptdbg_ascend.switch import ArgumentError
from ulpscope.findings.advice import Suspect, first_suspect
from ulpscope.model.errors import did_you_mean
from ulpscope.report import legacy
from ulpscope.report.csv import write_csv
from ulpscope.report.legacy_cells import ZERO_D
from ulpscope.report.pkl_rows import older_names
from ulpscope.report.table import Row, replacing, stamped
from ulpscope.store.dump import Dump
from ulpscope.store.formats.pkl_folder import is_lines, locate
from ulpscope.store.formats.pkl_lines import is_ptdbg
from ulpscope.store.formats.ptdbg_reader import PtdbgDump
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)
_PRINT_LOG = "is_print_compare_log"
_OPTIONS = ("stack_mode", "auto_analyze", "fuzzy_match", _PRINT_LOG)
_WORDS = {"True": True, "False": False}  # compare_data.py has the stack_mode as a text
_WITH_STACKS = "api_stack_"
_RANK = re.compile(r"rank(\d+)")
_DTYPE = "NPU Tensor Dtype"
_FAILED = "Compare failed. Please check the arguments and do it again!"
_TURN_ON = "The current file contains stack information, please turn on the stack_mode"
_TURN_OFF = "The current file does not contain stack information, please turn off the stack_mode"
_OTHER_MODE = "The dump mode of the two files is not same, please check the dump files"


@dataclass(frozen=True, slots=True)
class _Side:
    """A dump by its .pkl and its folder of arrays, if that is to be looked at."""

    path: Path
    arrays: Path | None


@dataclass(frozen=True, slots=True)
class _Wanted:
    stacks: bool
    advice: bool
    fuzzy: bool
    print_log: bool


def compare(
    input_param: Mapping[str, Any],
    output_path: str,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
) -> None:
    """Compares two dumps of one card and writes compare_result_{timestamp}.csv, and advisor_{timestamp}.txt.

    `input_param`: npu_pkl_path, bench_pkl_path, npu_dump_data_dir, bench_dump_data_dir and is_print_compare_log (False).
    Without the folders the statistics are compared, and there is no advice. ArgumentError, naming what is wrong, for a
    mistake in the arguments; DumpError for a dump that cannot be read.
    """
    with _telling():
        npu, bench, print_log = _read_input(input_param)
        given = {"stack_mode": stack_mode, "auto_analyze": auto_analyze, "fuzzy_match": fuzzy_match}
        wanted = _read_options({**given, _PRINT_LOG: print_log})
        _check_modes(npu, bench, wanted)
        _write(npu, bench, wanted, _existing_folder(output_path), label="")


def compare_distributed(npu_dump_dir: str, bench_dump_dir: str, output_path: str, **kwargs: Any) -> None:
    """Compares all ranks of two dumps, in numeric order; writes compare_result_rank{npu}-rank{bench}_{timestamp}.csv for each.

    `kwargs` are the optional arguments of `compare`. The output folder must be there. Raises as `compare` does.
    """
    with _telling():
        wanted = _read_options(kwargs)
        folder = _existing_folder(output_path)
        ours, theirs = _ranks(Path(npu_dump_dir)), _ranks(Path(bench_dump_dir))
        if len(ours) != len(theirs):
            raise ArgumentError(ranks_differ(Path(npu_dump_dir), len(ours), Path(bench_dump_dir), len(theirs)))
        jobs = [
            (_side(npu), _side(bench), f"{npu.name}-{bench.name}_") for npu, bench in zip(ours, theirs, strict=True)
        ]
        for npu, bench, _ in jobs:
            _check_modes(npu, bench, wanted)
        for npu, bench, label in jobs:
            _write(npu, bench, wanted, folder, label=label)


# --- arguments --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except ArgumentError:
        _log.error(_FAILED)
        raise


def _read_input(given: object) -> tuple[_Side, _Side, object]:
    if not isinstance(given, Mapping):
        raise ArgumentError("input_param should be dict, please check!")
    sides = []
    for side in ("npu", "bench"):
        path, folder = given.get(f"{side}_pkl_path"), given.get(f"{side}_dump_data_dir")
        if not isinstance(path, str) or not Path(path).exists():
            raise ArgumentError(f"Please check the pkl path is valid. {side}_pkl_path is {path!r}")
        if folder is not None and (not isinstance(folder, str) or not Path(folder).is_dir()):
            raise ArgumentError(
                f"{side}_dump_data_dir is {folder!r}, which is no folder; leave both out to compare statistics"
            )
        sides.append(_Side(Path(path), None if folder is None else Path(folder)))
    return sides[0], sides[1], given.get(_PRINT_LOG, False)


def _read_options(given: Mapping[str, Any]) -> _Wanted:
    found = {"stack_mode": False, "auto_analyze": True, "fuzzy_match": False, _PRINT_LOG: False}
    for name, value in given.items():
        if name not in found:
            raise ArgumentError(f"compare has no argument {name!r}.{did_you_mean(name, _OPTIONS)}")
        value = _WORDS.get(value, value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise ArgumentError(f"Invalid input parameters which should be only bool type. {name} is {value!r}")
        found[name] = value
    return _Wanted(*(found[name] for name in _OPTIONS))


def _existing_folder(path: Any) -> Path:
    if not isinstance(path, str | Path) or not Path(path).is_dir():
        raise ArgumentError(f"output_path {path!r} is not a folder; make it first")
    return Path(path)


def _check_modes(npu: _Side, bench: _Side, wanted: _Wanted) -> None:
    """What is in a file is told by its name. Stacks that nobody asked for are left out: the manual's own example does so."""
    with_stacks = [side.path.name.startswith(_WITH_STACKS) for side in (npu, bench)]
    if with_stacks[0] != with_stacks[1]:
        raise ArgumentError(f"{_OTHER_MODE}: {npu.path} and {bench.path}")
    if wanted.stacks and not with_stacks[0]:
        raise ArgumentError(f"{_TURN_OFF}: {npu.path}")
    if with_stacks[0] and not wanted.stacks:
        _log.warning(_TURN_ON)


def _ranks(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; give the one with rank0, as ./npu_dump/ptdbg_dump_v2.0")
    found = {}
    for path in folder.iterdir():
        rank = _RANK.fullmatch(path.name)
        if rank is None or not path.is_dir():
            raise ArgumentError(f"dump_dir contains '{path.name}'. Expected 'rank' folders only, in {folder}")
        found[int(rank[1])] = path
    if not found:
        raise ArgumentError(f"No file is found in dump dir {folder}")
    return [found[rank] for rank in sorted(found)]


def _side(rank: Path) -> _Side:
    files = sorted(path for path in rank.iterdir() if is_lines(path))
    if not files:
        raise ArgumentError(f"No file is found in dump dir {rank}")
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ArgumentError(f"{rank} holds {names}; compare them one by one with compare()")
    folders = [path.name for path in rank.iterdir() if path.is_dir()]
    if folders and files[0].stem not in folders:
        raise ArgumentError(f"The names of pkl and directory do not match! {rank} has {files[0].name} and {folders[0]}")
    return _Side(files[0], rank / files[0].stem if folders else None)


# --- comparison -------------------------------------------------------------------------------------------------


def _write(npu: _Side, bench: _Side, wanted: _Wanted, folder: Path, *, label: str) -> None:
    reference, target = _opened(bench), _opened(npu)
    whole = npu.arrays is not None and bench.arrays is not None
    table = legacy.TABLES["ptdbg" if whole else "ptdbg statistics"]
    options = Options(align=Align.FUZZY if wanted.fuzzy else Align.NAME, elements=whole)
    spelling = _Spelling(reference, target)
    calls = spelling.watching(compare_dumps(reference, target, options))
    header = table.header(stacks=wanted.stacks)
    made = legacy.rows(calls, table, reference=reference, target=target, stacks=wanted.stacks)
    if whole:
        made = _with_plain_numbers(made, header)
    if whole and wanted.print_log:
        made = _printing(made, header, spelling)
    first = FirstWrong(header, spelling.name)
    name = f"compare_result_{label}{{}}.csv"
    with stamped(folder, name) as stamp:
        path = folder / name.format(stamp)
        write_csv(path, header, spelling.spelt(first.watching(made)))
        _log.info("The comparison result is saved in: %s", path)
        if whole and wanted.advice:
            suspect = first_suspect(first.pairs())
            _advise(replace(suspect, node=first.name or suspect.node), folder / f"advisor_{label}{stamp}.txt")
    gone = missing_files(target, reference) if whole else ""
    if gone:
        _log.warning("%s: %s", path, gone)
    if not first.compared:
        _log.error("%s: %s", path, NOTHING_COMPARED)


def _opened(side: _Side) -> Dump:
    if is_lines(side.path) and is_ptdbg(side.path):
        return Dump(side.path, PtdbgDump(locate(side.path), arrays=side.arrays))
    return open_dump(side.path)


class _Spelling:
    """The names of values as the tool spells them, for the call whose rows are being made."""

    def __init__(self, reference: Dump, target: Dump) -> None:
        self._dumps = reference, target
        self._names: tuple[dict[str, str], dict[str, str]] = {}, {}

    def watching(self, calls: Iterable[CallComparison]) -> Iterator[CallComparison]:
        for call in calls:
            reference, target = self._dumps
            match = call.match
            self._names = (
                {} if match.reference is None else older_names(reference, match.reference),
                {} if match.target is None else older_names(target, match.target),
            )
            yield call

    def name(self, name: str) -> str:
        return self._names[1].get(name, name)

    def spelt(self, rows: Iterable[Row]) -> Iterator[Row]:
        for (ours, theirs, *cells), colour in rows:
            reference, target = self._names
            yield (target.get(str(ours), ours), reference.get(str(theirs), theirs), *cells), colour


def _with_plain_numbers(rows: Iterable[Row], header: Sequence[str]) -> Iterator[Row]:
    """Arguments that are plain numbers have arrays in the tool's dumps, and so their errors in its table."""
    npu, bench = header.index("NPU max"), header.index("Bench max")
    first, message = header.index("MaxAbsErr"), header.index("Err_message")
    for cells, colour in rows:
        theirs, ours = _WORDS.get(str(cells[bench]), cells[bench]), _WORDS.get(str(cells[npu]), cells[npu])
        if (
            str(cells[header.index(_DTYPE)]).startswith("<class")
            and isinstance(ours, int | float)
            and isinstance(theirs, int | float)
        ):
            changed = list(cells)
            changed[first : first + 2] = abs(ours - theirs), relative_error(theirs, ours)
            changed[message] = ZERO_D
            yield changed, colour
        else:
            yield cells, colour


def _advise(suspect: Suspect, path: Path) -> None:
    with replacing(path) as draft:
        draft.write_text(suspect.content, encoding="utf-8")
    # The manual promises it on the screen, where a log may not be.
    sys.stdout.write(f"The summary of the expert advice is as follows:\n{suspect.content}")
    _log.info("The advisor summary is saved in: %s", path)


def _printing(rows: Iterable[Row], header: Sequence[str], spelling: _Spelling) -> Iterator[Row]:
    """A line on the screen for each row on its way to the file."""
    first, message = header.index("Cosine"), header.index("Err_message")
    for row in rows:
        cells = row[0]
        cosine, absolute, relative, thousandth, five = cells[first : first + 5]
        sys.stdout.write(
            f"[{spelling.name(str(cells[0]))}] Compare result: cosine {cosine}, max_abs_err {absolute}, max_relative_err "
            f"{relative}, one_thousand_err_ratio {thousandth}, five_thousand_err_ratio {five}, {cells[message]}\n"
        )
        yield row
