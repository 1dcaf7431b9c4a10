"""What the comparisons of both generations share: the first row that is not accurate, and ranks that cannot be paired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

from ulpscope.findings.advice import ACCURATE, NOT_ACCURATE
from ulpscope.model.dtypes import DTYPES
from ulpscope.report.table import Cell, Row
from ulpscope.store.dump import Dump

VERDICTS = ("Result", "Accuracy Reached or Not")
# What a table says of a row that it cannot judge, and the error below which the manual takes a value for accurate.
UNJUDGED, NEGLIGIBLE = "None", 0.001
_MEASURED = ("MaxAbsErr", "Max diff", "Min diff", "Mean diff", "L2norm diff")
_SHOWN = ("max", "min", "mean", "l2norm")
_NO_NUMBER = frozenset({"N/A", "None", "Nan", ""})
_ABOUT = (("NPU Dtype", "NPU Tensor Dtype"), ("NPU Tensor Shape",))


def ranks_differ(npu: Path, ours: int, bench: Path, theirs: int) -> str:
    """What is said of two runs with other numbers of ranks, in the tools' words."""
    return (
        "The number of ranks in the two runs are different. Unable to match the ranks. Please use another folder to "
        f"compare or use compare() api and manually match the ranks. {npu} has {ours}, {bench} has {theirs}"
    )


def missing_files(npu: Dump, bench: Dump) -> str:
    """What is said of files with elements that should be there; nothing where all are."""
    counts = [f"{len(dump.missing)} of {dump.folder}" for dump in (npu, bench) if dump.missing]
    return f"Files with elements are missing or cut: {', '.join(counts)}" if counts else ""


class FirstWrong:
    """The verdicts of rows on their way to a file, up to the first that is not accurate; `name` is that one's, as `spelt`."""

    def __init__(self, header: Sequence[str], spelt: Callable[[str], str] = str) -> None:
        self._places = {column: place for place, column in enumerate(header)}
        self._at = next((place for place, column in enumerate(header) if column in VERDICTS), None)
        self._measured = [self._places[column] for column in _MEASURED if column in self._places]
        self._spelt = spelt
        self._plain = 0
        self._told: Counter[str | None] = Counter()
        self._first: tuple[str, str] | None = None
        self.name = ""

    def watching(self, rows: Iterable[Row]) -> Iterator[Row]:
        at, measured = self._at, self._measured[0] if self._measured else 0
        for row in rows:
            if self._first is None:
                cells = row[0]
                if at is not None and cells[at] == "" and type(cells[measured]) is float:
                    self._plain += 1  # nearly all rows of statistics
                    yield row
                    continue
                verdict = self._verdict(cells)
                if verdict in NOT_ACCURATE:
                    self._first = str(row[0][0]), str(verdict)
                    self.name = self._spelt(self._first[0])
                else:
                    self._told[verdict] += 1
            yield row

    @property
    def compared(self) -> bool:
        """Whether any row was."""
        return self._first is not None or self._plain > 0 or any(self._told[verdict] for verdict in ACCURATE)

    def pairs(self) -> Iterator[tuple[str, str | None]]:
        """(name, verdict) of each row; those before the first that is not accurate have no name, and no order."""
        yield from repeat(("", ""), self._plain)
        for verdict, count in self._told.items():
            yield from repeat(("", verdict), count)
        if self._first is not None:
            yield self._first

    def _verdict(self, cells: Sequence[Cell]) -> str | None:
        """What a row is for the advice: a verdict of the table; "None" for one that is not known, None without any data."""
        verdict = "" if self._at is None else str(cells[self._at])
        if verdict in NOT_ACCURATE or (verdict and verdict in ACCURATE):
            return verdict
        numbers = [number for place in self._measured if (number := _number(cells[place])) is not None]
        if verdict in ("", UNJUDGED) and numbers:
            # A tensor without dimensions has no cosine, and so no verdict; its error is known.
            return "" if not verdict or max(numbers) <= NEGLIGIBLE else UNJUDGED
        if not verdict and self._says_the_same(cells):
            return ""
        return UNJUDGED if self._has_data(cells) else None

    def _says_the_same(self, cells: Sequence[Cell]) -> bool:
        """Truth values have no differences, only what is shown of both sides."""
        pairs = [(cells[self._places[f"NPU {name}"]], cells[self._places[f"Bench {name}"]]) for name in _SHOWN]
        return all(ours == theirs for ours, theirs in pairs) and any(str(ours) not in _NO_NUMBER for ours, _ in pairs)

    def _has_data(self, cells: Sequence[Cell]) -> bool:
        dtype, shape = (next(cells[self._places[name]] for name in names if name in self._places) for names in _ABOUT)
        return str(dtype).removeprefix("torch.") in DTYPES and "0" not in str(shape).strip("[]").split(", ")


def _number(cell: Cell) -> float | int | None:
    return cell if isinstance(cell, int | float) and cell == cell else None


NOTHING_COMPARED = (
    "Nothing was compared: no row of the result has numbers of both sides. Give two dumps of one program, both whole"
)
