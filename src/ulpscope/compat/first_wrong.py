"""What the comparisons of both generations share: the first row that is not accurate, and ranks that cannot be paired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

from ulpscope.analyze.advice import NOT_ACCURATE
from ulpscope.report.table import Row

VERDICTS = ("Result", "Accuracy Reached or Not")


def ranks_differ(npu: Path, ours: int, bench: Path, theirs: int) -> str:
    """What is said of two runs with other numbers of ranks, in the tools' words."""
    return (
        "The number of ranks in the two runs are different. Unable to match the ranks. Please use another folder to "
        f"compare or use compare() api and manually match the ranks. {npu} has {ours}, {bench} has {theirs}"
    )


class FirstWrong:
    """The verdicts of rows on their way to a file, up to the first that is not accurate; `name` is that one's, as `spelt`."""

    def __init__(self, header: Sequence[str], spelt: Callable[[str], str] = str) -> None:
        self._at = next((place for place, column in enumerate(header) if column in VERDICTS), -1)
        self._spelt = spelt
        self._accurate = 0
        self._first: tuple[str, str] | None = None
        self.name = ""

    def watching(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            if self._first is None:
                verdict = str(row[0][self._at])
                if verdict in NOT_ACCURATE:
                    self._first = str(row[0][0]), verdict
                    self.name = self._spelt(self._first[0])
                else:
                    self._accurate += 1
            yield row

    def pairs(self) -> Iterator[tuple[str, str]]:
        """(name, verdict) of each row; those before the first that is not accurate have no name."""
        yield from repeat(("", ""), self._accurate)
        if self._first is not None:
            yield self._first
