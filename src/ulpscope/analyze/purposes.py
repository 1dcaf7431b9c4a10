"""Values that are infinite or not a number by definition, in float64 too: followed to what they reach.

`log 0`, a pole that the next line masks, a number beyond the range of float16: the kernel did what it was asked to. That is a
remark, with who read the value. Where it reaches a loss, a gradient or a weight it is a finding under its own name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ulpscope.analyze.told import Key
from ulpscope.analyze.verdicts import STATISTICS, Finding, Verdict
from ulpscope.model.operators import Trait, traits
from ulpscope.store.ledger_file import Measure, Row

_Call = tuple[int, str, str, int]


def purposes(rows: Sequence[Row], partners: Mapping[Key, Row], keys: Mapping[Key, Row]) -> dict[int, Finding]:
    """A finding for each row that made such values, by the identity of the row; without excess where no harm is known.

    What the reference made too is left out."""
    made: dict[int, Finding] = {}
    paths: _Paths | None = None
    for key, row in keys.items():
        found = [(measure, why) for measure in row.measures if (why := _why(row, measure))]
        partner = partners.get(key)
        if not found or (partner is not None and any(_why(partner, measure) for measure in partner.measures)):
            continue
        measure, why = found[0]
        if row.poles is None:
            wild = measure.undefined or measure.overflowed or row.phase != "forward" or row.kind == STATISTICS
            excess = 1.5 if measure.overflowed else math.inf if wild else 0.0
            verdict = Verdict.INTRODUCED if row.kind == STATISTICS else Verdict.PURPOSE
            made[id(row)] = Finding(row, verdict, why, excess, measure)
            continue
        paths = paths or _Paths(rows)
        harm = paths.harm(row)
        why += f"; it reaches {harm}" if harm else f"; {paths.reader(row)}"
        made[id(row)] = Finding(row, Verdict.PURPOSE, why, math.inf if harm else 0.0, measure)
    return made


def _why(row: Row, measure: Measure) -> str:
    """What a call made of numbers that is none, where the higher precision makes it too."""
    again = row.kind != STATISTICS
    if measure.overflowed:
        return f"{_values(measure.overflowed, 'is', 'are')} beyond what {measure.dtype} can hold"
    if measure.undefined:
        why = ": in float64 too, its inputs are beyond its domain" if again else ""
        return f"{_values(measure.undefined, 'is', 'are')} NaN, made from numbers{why}"
    if measure.infinite:
        why = ": in float64 too, its inputs have a pole" if again else ""
        return f"{_values(measure.infinite, 'is', 'are')} infinite, made from numbers{why}"
    return ""


def _values(count: int, one: str, many: str) -> str:
    return f"{count} {'value ' + one if count == 1 else 'values ' + many}"


class _Paths:
    """Who read what a call made, and what it has reached."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._readers: defaultdict[_Call, list[Row]] = defaultdict(list)
        # Who updates, or looks for such gradients to leave the update out, tells by the weights whether there was harm.
        self._updates = any(row.phase == "optimizer" or row.name.startswith("_amp_") for row in rows)
        for row in rows:
            for op, dtypes, index in row.poles or ():
                self._readers[row.rank, op, dtypes, index].append(row)

    def harm(self, row: Row) -> str:
        """The loss, the gradient or the weight that the values of a call have reached; empty where there is none."""
        seen: set[_Call] = set()
        left = [row]
        while left:
            each = left.pop()
            readers = self._readers[_call(each)]
            if each.ends == "weight":
                return f"the weight {each.param or ''}".strip() + f" in step {each.step}"
            if each.ends == "gradient" and not self._updates:
                return f"the gradient of {each.param or 'a weight'} in step {each.step}"
            if each.ends == "loss" and all(reader.passes or _is_quiet(reader) for reader in readers):
                return f"a loss in step {each.step}: {each.api or each.op}"
            if each.ends == "result" and all(_is_quiet(reader) for reader in readers):
                return f"what the program is left with: {each.api or each.op} in step {each.step}"
            if each is row or each.ends in ("loss", "result"):
                new = [reader for reader in readers if _call(reader) not in seen]
                seen.update(map(_call, new))
                left += new
        return ""

    def reader(self, row: Row) -> str:
        found = [
            each for each in self._readers[_call(row)] if each.kind != "view" and Trait.TELLS not in traits(each.name)
        ]
        if not found:
            return "no other call reads it"
        last = next((reader for reader in found if not reader.passes), found[0])
        what = "read by" if last.passes else "masked by"
        return (
            f"{what} {last.api or last.op}"
            + (f" in {last.module}" if last.module else "")
            + ", and it reaches no weight or loss"
        )


def _is_quiet(row: Row) -> bool:
    """Reads it without making anything of it."""
    return row.kind == "view" or row.phase == "backward" or Trait.TELLS in traits(row.name)


def _call(row: Row) -> _Call:
    return row.rank, row.op, row.dtypes, row.index
