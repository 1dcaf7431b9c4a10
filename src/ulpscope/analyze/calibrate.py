"""What kernels did in right programs, as a table of `analyze.measured`, and what of it is unusual beside the shipped one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from ulpscope.analyze.habits import BOUND
from ulpscope.analyze.limits import LOW, kernel_name, theory
from ulpscope.analyze.measured import MARGIN, Kernel, Key
from ulpscope.store.ledger_file import Measure, Row

_ROUNDS = frozenset({"map", "norm", "contraction", "other"})
_SOME = 8  # fewer elements have no root mean square
_MANY = 256  # fewer have no share of misrounded ones
_CHANCE = 6.0  # standard errors that are no lean


def table_of(rows: Iterable[Row]) -> dict[Key, Kernel]:
    """The largest errors of each kernel, as multiples of what theory allows."""
    table: dict[Key, Kernel] = {}
    for row in rows:
        for measure in row.measures if row.kind in _ROUNDS else ():
            if not (measure.wrong or measure.lost):
                key = kernel_name(row), measure.dtype, row.device, min(measure.place, 1)
                table[key] = _seen(row, measure).beside(table.get(key, Kernel()))
    return table


def _seen(row: Row, measure: Measure) -> Kernel:
    allowed = theory(row, measure)
    count = math.prod(measure.shape)
    lean = max(abs(measure.toward), abs(measure.up))
    lean = 0.0 if lean < max(_CHANCE * measure.spread, 2 * measure.leans) else lean
    return Kernel(
        calls=1,
        rms=measure.rms / allowed.rms if count >= _SOME else 0.0,
        worst=measure.worst / allowed.worst,
        lean=lean / allowed.bias,
        misrounded=measure.misrounded if measure.dtype in LOW and count >= _MANY else 0.0,
    )


def unusual(own: Mapping[Key, Kernel], shipped: Mapping[Key, Kernel]) -> Iterator[tuple[Key, str]]:
    """Kernels that do worse here than anywhere they were measured, with what they do."""
    for key, kernel in sorted(own.items()):
        known = shipped.get(key) or next((shipped[other] for other in shipped if other[:2] == key[:2]), None)
        for word in ("rms", "worst", "lean"):
            here = getattr(kernel, word)
            usual = max(1.0, MARGIN * getattr(known, word)) if known is not None else 1.0
            if here > usual:
                yield key, f"{_WORDS[word]} {here:.2g} times what theory allows, elsewhere at most {usual:.2g}"


_WORDS = {"rms": "its errors are", "worst": "one element is off by", "lean": "its results lean by"}


def kept(own: Mapping[Key, Kernel]) -> dict[Key, Kernel]:
    """What may widen a limit: no more than a tensor core or a quick function explains. What is above that stays a finding."""
    most = BOUND / MARGIN
    return {
        key: Kernel(
            each.calls, min(each.rms, most), min(each.worst, most), min(each.lean, most), min(each.misrounded, 0.5)
        )
        for key, each in own.items()
    }
