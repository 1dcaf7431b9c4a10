"""The compare results of all ranks in one workbook: a sheet for each index, a column for each rank.

Reads result tables that are on disk, ours and those of the older tools; compares nothing anew. The rows stand in the order of the
network, which is the order of the results, not that of their names.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ulpscope.model.errors import ConfigError, DumpError, did_you_mean
from ulpscope.report.relations import Communication, communications, relation_sheet
from ulpscope.report.table import Cell, Row, Sheet
from ulpscope.store.formats.table_reader import read_table

RESULT_NAME = re.compile(r"compare_result_rank(?P<rank>\d+)(?:-rank(?P=rank))?_\d{14}(?:_\d+)?\.(?:xlsx|csv)")
NAME, TARGET_MAX, REFERENCE_MAX = "NPU Name", "NPU max", "Bench max"
_NO_VALUE = frozenset({"n/a", "unsupported", "nan"})
_log = logging.getLogger(__name__)


class Kind(Enum):
    """What was compared; it shows in the header."""

    REAL = "real data"
    STATISTICS = "statistics"
    MD5 = "md5"


TELLTALE = {Kind.REAL: "Cosine", Kind.STATISTICS: "Max diff", Kind.MD5: "NPU MD5"}
_GRAD = "Requires_grad Consistent"
_RATIOS = ("One Thousandth Err Ratio", "Five Thousandths Err Ratio")
_DIFFS = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
_RELATIVE = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
INDICES: dict[Kind, tuple[str, ...]] = {
    Kind.REAL: ("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", *_RATIOS, _GRAD),
    Kind.STATISTICS: (*_DIFFS, *_RELATIVE, _GRAD),
}

Key = tuple[str, int]  # a name, and which of the rows of this name on one rank


@dataclass(frozen=True, slots=True)
class RankResult:
    """The chosen rows of one rank, in the order of its network, with the columns that a merge can show."""

    rank: int
    kind: Kind
    columns: Sequence[str]
    rows: Mapping[Key, Sequence[Cell]]
    communications: Sequence[Communication]


def read_results(folder: Path, apis: Sequence[str]) -> list[RankResult]:
    """The rows of the named calls in every rank's result, by rank.

    Raises DumpError if there are fewer than two results, if they are not of one kind, if they are md5 results, or if none of them
    has any of the calls.
    """
    found = [read_result(path, rank, apis) for rank, path in sorted(result_paths(folder).items())]
    kinds = {result.kind for result in found}
    if len(kinds) > 1:
        told = ", ".join(f"rank{result.rank}: {result.kind.value}" for result in found)
        raise DumpError(
            f"the compare results in {folder} are not all real data or all statistics ({told}); put those of one kind there"
        )
    if not any(result.rows for result in found):
        raise DumpError(f"Nothing to merge. No result in {folder} has a row of {', '.join(apis)}; correct 'api'")
    return found


def result_paths(folder: Path) -> dict[int, Path]:
    """The result of each rank. Raises DumpError if there are fewer than two, or two of one rank."""
    if not folder.is_dir():
        raise DumpError(f"{folder} is not a folder; give the one that compare wrote its results to")
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        name = RESULT_NAME.fullmatch(path.name)
        if name is None:
            continue
        other = paths.setdefault(int(name["rank"]), path)
        if other is not path:
            raise DumpError(f"{folder} has two results of rank {name['rank']}: {other.name} and {path.name}; leave one")
    if len(paths) < 2:
        raise DumpError(
            f"Number of compare result is no more than 1, no need to merge. {folder} holds {len(paths)} files named"
            " compare_result_rank{n}_{14 digits}.xlsx or .csv"
        )
    return paths


def read_result(path: Path, rank: int, apis: Sequence[str]) -> RankResult:
    """The rows of the named calls in one result. Raises DumpError if it is none that can be merged."""
    columns, table = read_table(path)
    kind = next((kind for kind, column in TELLTALE.items() if column in columns), None)
    if kind is None or NAME not in columns:
        raise DumpError(
            f"A valid dump task can not be identified from rank{rank} compare result, please check! {path} has the columns"
            f" {', '.join(columns[:6])}"
        )
    if kind is Kind.MD5:
        raise DumpError(
            f"Rank{rank} compare result is 'md5' dump task and does not support merging result, please check! {path}"
        )
    kept = [column for column in (*INDICES[kind], TARGET_MAX, REFERENCE_MAX) if column in columns]
    places = [columns.index(column) for column in kept]
    at = columns.index(NAME)
    exact, prefixes = frozenset(apis), tuple(f"{api}." for api in apis)
    times: Counter[str] = Counter()
    rows: dict[Key, Sequence[Cell]] = {}
    tied: list[dict[str, Cell]] = []
    for row in table:
        name = str(row[at])
        if name in exact or name.startswith(prefixes):
            rows[name, times[name]] = [row[place] for place in places]
            times[name] += 1
            if name.startswith("Distributed."):
                tied.append(dict(zip(columns, row, strict=True)))
    for api in apis:
        if not any(name == api or name.startswith(f"{api}.") for name, _ in rows):
            _log.warning("%s not found in rank%d compare result.", api, rank)
    return RankResult(rank, kind, kept, rows, communications(tied))


def chosen_indices(results: Sequence[RankResult], wanted: Sequence[str] | None) -> list[str]:
    """The indices to show: those asked for, or all that the results have. Raises ConfigError for one that they cannot have."""
    known = INDICES[results[0].kind]
    present = [index for index in known if any(index in result.columns for result in results)]
    if wanted is None:
        return present
    wrong = [index for index in wanted if index not in known]
    if not set(wanted) - set(wrong):
        raise ConfigError(
            [f"No compare index recognized, please check! {_kind(results)} have {', '.join(known)}, not {wanted!r}"]
        )
    if wrong:
        raise ConfigError(
            [
                f"{index!r} is no index of {_kind(results)}.{did_you_mean(index, known)} They have {', '.join(known)}"
                for index in wrong
            ]
        )
    return list(dict.fromkeys(wanted))


def merged_sheets(results: Sequence[RankResult], indices: Sequence[str]) -> Iterator[Sheet]:
    """A sheet for each index; after them, if there are communication calls, whether what is expected of them holds."""
    order = merged_order([list(result.rows) for result in results])
    columns = [NAME, *(f"rank{result.rank}" for result in results)]
    for index in indices:
        yield Sheet(index, columns, _index_rows(results, index, order))
    relations = relation_sheet({result.rank: result.communications for result in results})
    if relations is not None:
        yield relations


def merged_order(orders: Iterable[Sequence[Key]]) -> list[Key]:
    """One order of all keys: that of the first, with what only others have after the key that it follows there."""
    following: dict[Key | None, Key | None] = {None: None}
    for keys in orders:
        last: Key | None = None
        for key in keys:
            if key not in following:
                following[key] = following[last]
                following[last] = key
            last = key
    merged: list[Key] = []
    at = following[None]
    while at is not None:
        merged.append(at)
        at = following[at]
    return merged


def _index_rows(results: Sequence[RankResult], index: str, order: Iterable[Key]) -> Iterator[Row]:
    for key in order:
        yield (key[0], *(_shown(result, key, index) for result in results)), None


def _shown(result: RankResult, key: Key, index: str) -> Cell:
    """The index, or both maxima where it has no value; nothing if the rank has no such row."""
    row = result.rows.get(key)
    if row is None or index not in result.columns:
        return None
    cells = dict(zip(result.columns, row, strict=True))
    value = cells[index]
    if isinstance(value, str) and value.strip().lower() in _NO_VALUE:
        return f"NPU:{_text(cells.get(TARGET_MAX))}  Bench:{_text(cells.get(REFERENCE_MAX))}"
    return value


def _text(cell: Cell) -> str:
    return "N/A" if cell is None else str(cell)


def _kind(results: Sequence[RankResult]) -> str:
    return f"results of {results[0].kind.value}"
