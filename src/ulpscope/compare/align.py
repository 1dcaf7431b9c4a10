"""Which call of the target belongs to which call of the reference. Works on names, modules and shapes; reads no element.

    NAME    the same full name
    FUZZY   the same name without its number, in order, shapes deciding where the counts differ
    PLACE   FUZZY inside each module: a call more in one module does not shift the numbers of all calls after it

A backward call follows its forward call, whatever the order in which gradients were taken.
"""

from __future__ import annotations

import difflib
import enum
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ulpscope.compare.comparison import How
from ulpscope.model.names import MODULE
from ulpscope.model.records import CallId, Phase
from ulpscope.store.dump import Dump

# Wrappers put these into the names of modules; a run with one and a run without are the same model.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_FOLLOWS_FORWARD = frozenset({Phase.BACKWARD, Phase.PARAMETERS_GRAD})
# Above this many pairs of calls of one name in one module, shapes are not compared: the cost is their product.
_MOST_PAIRS = 4_000_000


class Align(enum.Enum):
    """How calls are put together."""

    NAME = "name"
    FUZZY = "fuzzy"
    PLACE = "place"


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two calls by their places in execution order, or one that is alone."""

    reference: int | None
    target: int | None
    how: How
    why: str = ""


def align(reference: Dump, target: Dump, by: Align = Align.PLACE) -> list[Pairing]:
    """Every call of both dumps, paired or alone, in the order of the target; what only the reference has at its place there."""
    left, right = reference.ids(), target.ids()
    named = _Named(reference, target, left)
    if by is Align.NAME:
        partner = [named.take(_plain(call), place) for place, call in enumerate(right)]
    else:
        partner = _by_group(reference, target, left, right, named, inside_modules=by is Align.PLACE)
    how = {Align.NAME: How.NAME, Align.FUZZY: How.FUZZY, Align.PLACE: How.PLACE}[by]
    return list(_in_order(left, right, partner, how))


def plain_module(name: str) -> str:
    """A module's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _plain(call: CallId) -> CallId:
    if call.kind != MODULE:
        return call
    name = plain_module(call.name)
    return call if name == call.name else CallId(call.kind, name, call.index, call.phase, call.again)


class _Named:
    """The places of each name in the reference, each given once: a call whose outputs have nodes of their own has as many
    backward records of its name."""

    def __init__(self, reference: Dump, target: Dump, calls: Sequence[CallId]) -> None:
        self._reference, self._target = reference, target
        self._places: dict[CallId, list[int]] = defaultdict(list)
        for place, call in enumerate(calls):
            self._places[_plain(call)].append(place)

    def take(self, call: CallId, place: int) -> int | None:
        """The place of a name; of several, of one with the values that the call at `place` of the target has."""
        left = self._places.get(call)
        if not left:
            return None
        if len(left) == 1:
            return left.pop()
        slots = [value.slot for value in self._target.nth(place).values]
        same = (each for each in left if [value.slot for value in self._reference.nth(each).values] == slots)
        found = next(same, left[0])
        left.remove(found)
        return found


# --- by group ---------------------------------------------------------------------------------------------------

_Group = tuple[str, str, str, int]


def _by_group(
    reference: Dump,
    target: Dump,
    left: Sequence[CallId],
    right: Sequence[CallId],
    named: _Named,
    *,
    inside_modules: bool,
) -> list[int | None]:
    groups = _groups(reference, left), _groups(target, right)
    if not inside_modules or not all(any(group[0] for group in side) for side in groups):
        # Without modules on both sides there is one place for all.
        groups = _merged(groups[0], without=0), _merged(groups[1], without=0)
    groups = _by_thread(*groups)
    partner: list[int | None] = [None] * len(right)
    number: dict[CallId, int] = {}
    for group, places in groups[1].items():
        others = groups[0].get(group, [])
        for mine, theirs in _paired(reference, target, others, places, left, right):
            partner[mine] = theirs
            number[_plain(right[mine])] = left[theirs].index
    _follow(partner, number, right, named)
    return partner


def _follow(partner: list[int | None], number: dict[CallId, int], right: Sequence[CallId], named: _Named) -> None:
    """Gives backward calls the partner of their forward call; one whose forward was not recorded goes by its name."""
    calls = [_plain(call) for call in right]
    forwards = {call for call in calls if call.phase is Phase.FORWARD}
    orphans = []
    for place, call in enumerate(calls):
        if partner[place] is not None or call.phase not in _FOLLOWS_FORWARD:
            continue
        forward = CallId(call.kind, call.name, call.index, Phase.FORWARD)
        if forward in number:
            partner[place] = named.take(CallId(call.kind, call.name, number[forward], call.phase, call.again), place)
        elif forward not in forwards:
            orphans.append(place)
    for place in orphans:
        partner[place] = named.take(calls[place], place)


def _groups(dump: Dump, calls: Sequence[CallId]) -> dict[_Group, list[int]]:
    """The places of all calls that are not a backward of another, by module, kind and name."""
    found: dict[_Group, list[int]] = defaultdict(list)
    for place, (call, module, thread) in enumerate(
        zip(map(_plain, calls), dump.modules(), dump.threads(), strict=True)
    ):
        if call.phase not in _FOLLOWS_FORWARD and not call.again:
            found[plain_module(module), call.kind, call.name, thread].append(place)
    return dict(found)


def _by_thread(
    left: dict[_Group, list[int]], right: dict[_Group, list[int]]
) -> tuple[dict[_Group, list[int]], dict[_Group, list[int]]]:
    """Threads apart, of which nobody can say which comes first, where both sides have as many calls on each; else together."""
    odd = {group[:3] for group in left.keys() | right.keys() if len(left.get(group, ())) != len(right.get(group, ()))}
    sides = []
    for side in (left, right):
        together = _merged({group: places for group, places in side.items() if group[:3] in odd}, without=3)
        sides.append({**{group: places for group, places in side.items() if group[:3] not in odd}, **together})
    return sides[0], sides[1]


def _merged(groups: dict[_Group, list[int]], *, without: int) -> dict[_Group, list[int]]:
    """Groups that are one but for their module (0) or thread (3)."""
    found: dict[_Group, list[int]] = defaultdict(list)
    for (module, kind, name, thread), places in groups.items():
        found["" if without == 0 else module, kind, name, -1 if without == 3 else thread] += places
    return {group: sorted(places) for group, places in found.items()}


def _paired(
    reference: Dump,
    target: Dump,
    theirs: list[int],
    mine: list[int],
    left: Sequence[CallId],
    right: Sequence[CallId],
) -> Iterable[tuple[int, int]]:
    """Pairs (place in the target, place in the reference) of one group."""
    if len(theirs) == len(mine):
        return zip(mine, theirs, strict=True)
    if len(theirs) * len(mine) > _MOST_PAIRS:
        same = {left[place].index: place for place in theirs}
        return ((place, same[right[place].index]) for place in mine if right[place].index in same)
    ours, others = _shapes(target, mine), _shapes(reference, theirs)
    blocks = difflib.SequenceMatcher(None, others, ours, autojunk=False).get_matching_blocks()
    return ((mine[block.b + step], theirs[block.a + step]) for block in blocks for step in range(block.size))


def _shapes(dump: Dump, places: Iterable[int]) -> list[Hashable]:
    return [tuple((value.slot, value.shape) for value in dump.nth(place).values) for place in places]


# --- order ------------------------------------------------------------------------------------------------------


def _in_order(
    left: Sequence[CallId], right: Sequence[CallId], partner: Sequence[int | None], how: How
) -> Iterator[Pairing]:
    names = {_plain(call) for call in right}
    used = {place for place in partner if place is not None}
    alone = [place for place in range(len(left)) if place not in used]
    next_alone = 0
    for place, other in enumerate(partner):
        while other is not None and next_alone < len(alone) and alone[next_alone] < other:
            yield _left_over(left, alone[next_alone], names)
            next_alone += 1
        if other is None:
            yield Pairing(None, place, How.ALONE, "the reference has no such call")
        else:
            same = _plain(left[other]) == _plain(right[place])
            yield Pairing(other, place, How.NAME if same else how, "")
    for rest in alone[next_alone:]:
        yield _left_over(left, rest, names)


def _left_over(left: Sequence[CallId], place: int, names: set[CallId]) -> Pairing:
    taken = _plain(left[place]) in names
    why = "the target's call of this name is another one" if taken else "the target has no such call"
    return Pairing(place, None, How.ALONE, why)
