"""What comparing call by call says of the values of the target, kept small: one word for each value."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from ulpscope.compare.comparison import Code, Level
from ulpscope.compare.value_graph import FILLED, key_of
from ulpscope.findings.view import CallView
from ulpscope.model.names import MODULE
from ulpscope.model.records import Phase, Value


class Agreement(enum.IntEnum):
    """What comparing a call with its counterpart said of what it wrote. FOLLOWS: by no more than what it read explains."""

    UNKNOWN = 0
    AGREES = 1
    FOLLOWS = 2
    DIFFERS = 3


@dataclass(slots=True)
class Pairs:
    """What comparing call by call said of the target's values; and which call went with which."""

    said: dict[Hashable, Agreement] = field(default_factory=dict)
    partner: dict[int, int] = field(default_factory=dict)

    def see(self, view: CallView, how: Agreement) -> None:
        match = view.comparison.match
        if match.reference is None or match.target is None:
            return
        self.partner[match.target.seq] = match.reference.seq
        late = view.call.kind == MODULE and view.call.phase is Phase.BACKWARD
        read = {key_of(each.target) for each in view.ins if each.target is not None}
        for each in view.outs:
            key = None if each.target is None else key_of(each.target)
            if key in read and view.call.kind != MODULE:
                continue  # a view of what it read: that was said before
            if key is None or not how or Code.SHAPE in each.verdict.codes:
                continue  # of another shape it may be the same all the same
            if each.verdict.level not in (Level.UNKNOWN, Level.UNMATCHED):
                fails = each.verdict.level is Level.FAIL or how is Agreement.FOLLOWS
                said = how if fails else Agreement.AGREES
                self.said[key] = self.said.get(key, said) if late else said
        for each in view.ins:
            if each.target is not None and each.verdict.level in (Level.PASS, Level.WARN):
                key = key_of(each.target)
                if key is not None and not _is_filled(each.target):
                    self.said.setdefault(key, Agreement.AGREES)


def _is_filled(value: Value) -> bool:
    stats = value.stats
    return stats is not None and stats.norm is not None and stats.norm >= FILLED
