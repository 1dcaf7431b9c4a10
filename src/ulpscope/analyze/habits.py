"""What a kernel does at every call, on other inputs too and at the same small size, is how it is made and no fault of a call.

Only where the dtype is no narrower than what kernels compute in: a quick exponential, a tensor core that drops digits, a sum in
another order all show there. In a narrow dtype the result is rounded once, and whatever leans was rounded wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ulpscope.analyze.limits import LOW
from ulpscope.analyze.verdicts import Finding, Verdict
from ulpscope.store.ledger_file import Measure, Row

# A habit is at most so many limits large: what a tensor core or a quick function explains (docs/judge.md).
BOUND = 4.0
_FEW = 4  # with fewer calls nothing is said of all calls
_SAME = 2.0  # sizes within this factor are the same
_MANY = 256  # elements that have a mean worth to compare

Ratios = Callable[[Row, Measure], list[tuple[float, str]]]


class Habits:
    """The other calls of each kernel of the run, looked at only where one of them is above its limit."""

    def __init__(self, rows: Sequence[Row], ratios: Ratios) -> None:
        self._rows = rows
        self._ratios = ratios
        self._usual: dict[tuple[str, str, int], tuple[list[list[float]], int]] = {}

    def explain(self, finding: Finding) -> Finding:
        """The same finding, or the remark that this is what the kernel does at every call."""
        measure = finding.measure
        if finding.verdict is not Verdict.INTRODUCED or measure is None or finding.excess > BOUND:
            return finding
        if measure.dtype in LOW or measure.wrong or measure.lost or finding.limit is None:
            return finding
        row = finding.row
        sizes, count = self._of(row, measure)
        above = [place for place, (ratio, _) in enumerate(self._ratios(row, measure)) if ratio > 1]
        if count < _FEW or not above:
            return finding
        for place in above:
            usual = sorted(sizes[place])[len(sizes[place]) // 2]
            mine = self._ratios(row, measure)[place][0]
            if not usual / _SAME <= mine <= usual * _SAME:
                return finding
        why = finding.why.partition(";")[0] + f"; at all {count} calls of {row.name}: as this kernel does"
        return replace(finding, verdict=Verdict.HABIT, why=why)

    def _of(self, row: Row, measure: Measure) -> tuple[list[list[float]], int]:
        key = row.op, measure.dtype, measure.place
        if key not in self._usual:
            sizes: list[list[float]] = [[], [], [], []]
            count = 0
            for each in self._rows:
                for other in each.measures:
                    if (each.op, other.dtype, other.place) == key and math.prod(other.shape) >= _MANY:
                        count += 1
                        for place, (ratio, _) in enumerate(self._ratios(each, other)):
                            sizes[place].append(ratio)
            self._usual[key] = sizes, count
        return self._usual[key]
