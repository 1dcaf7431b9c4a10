"""Which call of the target belongs to which call of the reference.

    VALUES  FUZZY inside each module, modules by what they read and gave where their names differ; where a module has more calls of a
            name on one side, those that read the same values
    NAME    the same full name
    FUZZY   the same name without its number, in order, arguments deciding where the counts differ

A backward call follows its forward call, whatever the order in which gradients were taken.
"""

from __future__ import annotations

import difflib
import enum
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ulpscope.compare.comparison import How
from ulpscope.compare.values import Values, path_of, plain_module
from ulpscope.model.names import MODULE
from ulpscope.model.records import CallId, CallRecord, Phase
from ulpscope.store.dump import Dump

_FOLLOWS_FORWARD = frozenset({Phase.BACKWARD, Phase.PARAMETERS_GRAD})
# Above this many pairs of calls of one name in one module, arguments are not compared: the cost is their product.
_MOST_PAIRS = 4_000_000


class Align(enum.Enum):
    """How calls are put together."""

    VALUES = "values"
    NAME = "name"
    FUZZY = "fuzzy"


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two calls by their places in execution order, or one that is alone."""

    reference: int | None
    target: int | None
    how: How
    why: str = ""


def align(reference: Dump, target: Dump, by: Align = Align.VALUES, values: Values | None = None) -> list[Pairing]:
    """Every call of both dumps, paired or alone, in the order of the target; what only the reference has at its place there."""
    left, right = reference.ids(), target.ids()
    named = _Named(reference, target, left)
    if by is Align.NAME:
        partner = [named.take(_plain(call), place) for place, call in enumerate(right)]
    else:
        values = (values or Values(reference, target)) if by is Align.VALUES else None
        partner = _Groups(reference, target, values).partners(named)
    how = {Align.NAME: How.NAME, Align.FUZZY: How.FUZZY, Align.VALUES: How.VALUES}[by]
    return list(_in_order(left, right, partner, how))


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


class _Groups:
    """The calls of both dumps by module, kind and name; a backward call goes with its forward call."""

    def __init__(self, reference: Dump, target: Dump, values: Values | None) -> None:
        self._reference, self._target = reference, target
        self._left, self._right = reference.ids(), target.ids()
        self._values = values

    def partners(self, named: _Named) -> list[int | None]:
        """For each call of the target its place in the reference."""
        groups = self._grouped(self._reference, self._left, {}), self._grouped(self._target, self._right, {})
        modules = all(any(group[0] for group in side) for side in groups)
        if self._values is not None and modules and groups[0].keys() != groups[1].keys():
            self._values.is_apart = True
            groups = groups[0], self._grouped(self._target, self._right, self._values.modules)
        if self._values is None or not modules:
            # Without modules on both sides there is one place for all.
            groups = _merged(groups[0], without=0), _merged(groups[1], without=0)
        groups = _by_thread(*groups)
        same = self._values is None or all(
            len(groups[0].get(group, ())) == len(groups[1].get(group, ()))
            for group in groups[0].keys() | groups[1].keys()
        )
        if self._values is not None:
            self._values.is_apart |= not same
        partner: list[int | None] = [None] * len(self._right)
        number: dict[CallId, int] = {}
        for group, places in groups[1].items():
            others = groups[0].get(group, [])
            for mine, theirs in self._paired(others, places, in_order=same):
                partner[mine] = theirs
                number[_plain(self._right[mine])] = theirs
        self._follow(partner, number, named)
        return partner

    def _follow(self, partner: list[int | None], number: dict[CallId, int], named: _Named) -> None:
        """Gives backward calls the partner of their forward call; one whose forward was not recorded goes by its name."""
        calls = [_plain(call) for call in self._right]
        forwards = {call for call in calls if call.phase is Phase.FORWARD}
        orphans = []
        for place, call in enumerate(calls):
            if partner[place] is not None or call.phase not in _FOLLOWS_FORWARD:
                continue
            forward = CallId(call.kind, call.name, call.index, Phase.FORWARD)
            if forward in number:
                theirs = _plain(self._left[number[forward]])
                partner[place] = named.take(
                    CallId(theirs.kind, theirs.name, theirs.index, call.phase, call.again), place
                )
            elif forward not in forwards:
                orphans.append(place)
        for place in orphans:
            partner[place] = named.take(calls[place], place)

    def _grouped(self, dump: Dump, calls: Sequence[CallId], modules: dict[str, str]) -> dict[_Group, list[int]]:
        """The places of all calls that are not a backward of another, by module, kind and name."""
        found: dict[_Group, list[int]] = defaultdict(list)
        for place, (call, module, thread) in enumerate(
            zip(map(_plain, calls), dump.modules(), dump.threads(), strict=True)
        ):
            if call.phase in _FOLLOWS_FORWARD or call.again:
                continue
            name, plain = call.name, plain_module(module)
            if call.kind == MODULE and self._values is not None:
                path = path_of(call)
                # Of a module the path says which one it is; what its class is called does not matter.
                name = modules.get(path, path) or name
                plain = modules.get(path, path).rpartition(".")[0]
            else:
                plain = modules.get(plain, plain)
            found[plain, call.kind, name, thread].append(place)
        return dict(found)

    def _paired(self, theirs: list[int], mine: list[int], *, in_order: bool) -> Iterable[tuple[int, int]]:
        """Pairs (place in the target, place in the reference) of one group."""
        if not theirs:
            return ()
        even = len(theirs) == len(mine)
        if even and (in_order or self._values is None or self._is_in_order(theirs, mine, self._values)):
            return zip(mine, theirs, strict=True)
        found: list[tuple[int, int]] = []
        if self._values is not None:
            found = self._by_values(theirs, mine, self._values)
            used, ours = {place for _, place in found}, {place for place, _ in found}
            theirs, mine = (
                [place for place in theirs if place not in used],
                [place for place in mine if place not in ours],
            )
        if even and len(theirs) == len(mine) and self._values is not None:
            return [*found, *zip(mine, theirs, strict=True)]  # as many here as there, and no better partner
        return [*found, *self._by_arguments(theirs, mine)]

    def _is_in_order(self, theirs: Sequence[int], mine: Sequence[int], values: Values) -> bool:
        """Whether no call reads what is known to be another value of the reference than its counterpart reads."""
        for here, there in zip(mine, theirs, strict=True):
            read, given = _read(values, here), _given(values, there)
            if read and None not in read and not given.issuperset(read):
                return False
        return True

    def _by_values(self, theirs: Sequence[int], mine: Sequence[int], values: Values) -> list[tuple[int, int]]:
        """The calls that read the same values, in order."""
        waiting: defaultdict[frozenset[int | None], list[int]] = defaultdict(list)
        for place in reversed(theirs):
            waiting[frozenset(_given(values, place))].append(place)
        found = []
        for place in mine:
            read = _read(values, place)
            if read and None not in read and waiting.get(frozenset(read)):
                found.append((place, waiting[frozenset(read)].pop()))
        return found

    def _by_arguments(self, theirs: list[int], mine: list[int]) -> Iterator[tuple[int, int]]:
        """Of the rest those that are alike in everything but their numbers; never one that reads what its counterpart does not."""
        if not theirs or not mine:
            return
        if len(theirs) * len(mine) > _MOST_PAIRS:
            same = {self._left[place].index: place for place in theirs}
            yield from ((place, same[self._right[place].index]) for place in mine if self._right[place].index in same)
            return
        values = self._values
        ours, others = (
            [_told(dump.nth(place)) for place in places]
            for dump, places in ((self._target, mine), (self._reference, theirs))
        )
        blocks = difflib.SequenceMatcher(None, others, ours, autojunk=False).get_matching_blocks()
        for block in blocks:
            for step in range(block.size):
                here, there = mine[block.b + step], theirs[block.a + step]
                read = _read(values, here) if values is not None else []
                if values is None or not read or None in read or _given(values, there).issuperset(read):
                    yield here, there


def _read(values: Values, place: int) -> list[int | None]:
    """Which values of the reference a call of the target reads; None for one that the reference has not."""
    graph = values.target
    return [values.content_of(node) for node in graph.inputs[place] if graph.is_telling[node]]


def _given(values: Values, place: int) -> set[int | None]:
    graph = values.reference
    return {values.contents[node] for node in graph.inputs[place] if graph.is_telling[node]}


def _told(call: CallRecord) -> Hashable:
    """What a call was asked for: its slots, and of each the shape and dtype, or the argument."""
    return tuple(
        (value.slot, value.shape, value.dtype, None if value.is_tensor else repr(value.scalar)) for value in call.values
    )


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
