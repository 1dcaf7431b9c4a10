"""Communication calls: whom a call speaks to, what this rank gave and what it got. Reads names and arguments only.

A buffer that is only written says nothing before the call, and only the root of a broadcast gives. Calls are counted in
their group, or between two ranks, so that the same number is the same exchange on every rank. `Passings` keeps a few
dozen bytes for each, because a step of a large run makes many thousands of them on every rank.
"""

from __future__ import annotations

import enum
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ulpscope.compare.comparison import CallComparison, Comparison
from ulpscope.model.operators import ROLES_OF_COLLECTIVES, Place, Roles
from ulpscope.model.records import CallId, CallRecord, PathStep, Phase, Role

KIND = "Distributed"

_TAG: Place = (3, "tag")
_NO_ROLES = Roles()
_BATCH, _BATCH_SENDS = "batch_isend_irecv", "isend"


class Side(enum.Enum):
    """What a rank gave or got, against the reference."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


class Direction(enum.Enum):
    """Whether all members of a group meet, or one rank sends to another."""

    MEETING = "meeting"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Way:
    """The group of a call, or its two ends. `ranks` is empty for the group of all ranks; for a message (from, to)."""

    name: str
    direction: Direction
    ranks: tuple[int, ...] = ()
    label: str = ""
    # The same on all ranks that take part.
    key: tuple[object, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        message = self.direction is not Direction.MEETING
        object.__setattr__(self, "key", ("" if message else self.name, self.ranks, self.label))


@dataclass(frozen=True, slots=True)
class Passing:
    """A rank's part in the `nth` exchange of its way: whether what it gave and got agrees with the reference."""

    index: int
    seq: int
    way: Way
    nth: int
    gave: Side
    got: Side

    @property
    def call(self) -> CallId:
        return CallId(KIND, self.way.name, self.index, Phase.FORWARD)

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks that take part; empty for all."""
        return self.way.ranks


class Passings(Sequence[Passing]):
    """The communication calls of one dump in order, in columns."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[object, ...]] = Counter()
        self._ways: dict[Way, int] = {}
        self._columns = [array(code) for code in "QIIIBB"]

    def add(self, call: CallId, seq: int, *, way: Way, gave: Side, got: Side) -> None:
        nth = self.counts[way.key]
        self.counts[way.key] += 1
        number = self._ways.setdefault(way, len(self._ways))
        row = seq, number, call.index, nth, _SIDES.index(gave), _SIDES.index(got)
        for column, item in zip(self._columns, row, strict=True):
            column.append(item)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        seq, number, index, nth, gave, got = (column[place] for column in self._columns)
        return Passing(index, seq, list(self._ways)[number], nth, _SIDES[gave], _SIDES[got])

    def __iter__(self) -> Iterator[Passing]:
        ways = list(self._ways)
        for seq, number, index, nth, gave, got in zip(*self._columns, strict=True):
            yield Passing(index, seq, ways[number], nth, _SIDES[gave], _SIDES[got])


_SIDES = list(Side)


@dataclass(frozen=True, slots=True)
class Part:
    """One exchange of a call: whom it is with, and the values that count on either side."""

    way: Way
    given: tuple[Comparison, ...]
    taken: tuple[Comparison, ...]


def parts_of(comparison: CallComparison, rank: int) -> tuple[Part, ...]:
    """What a communication call of `rank` gave, what it got, and from whom: one exchange, or several messages."""
    name = comparison.match.call.id.name
    ins = [each for each in comparison.values if each.slot.role is Role.INPUT]
    outs = [each for each in comparison.values if each.slot.role is Role.OUTPUT]
    if name == _BATCH:
        return _messages(ins, outs, rank)
    way = _way(name, ins, rank)
    roles = ROLES_OF_COLLECTIVES.get(name, _NO_ROLES)
    root = roles.gives or roles.gets
    one = None if root is None else _rank_at(ins, root)
    if one is not None and one != rank:
        # What the others of a broadcast hold before it, and what the others of a reduce hold after it, is nothing.
        ins, outs = (ins, []) if roles.gets else ([], outs)
    overwritten = () if roles.reads_it or roles.writes is None else roles.writes
    given = tuple(each for each in ins if each.slot.path[0] not in overwritten)
    return (Part(way, given, () if way.direction is Direction.SEND else tuple(outs)),)


def is_inside(call: CallRecord, communication: int | None) -> bool:
    """Whether a call belongs to the communication call with the number `communication`: it only hands values on."""
    if communication is not None and call.parent == communication:
        return True
    # What torch calls by the same names inside a communication call, where a dump does not say inside what a call was made.
    roles = ROLES_OF_COLLECTIVES.get(call.id.name) if call.id.kind == "Torch" else None
    return roles is not None and not roles.apart


def is_group(each: Comparison) -> bool:
    """Whether an argument says which group a call speaks to, and no more. Groups have other names in each run."""
    value = each.target or each.reference
    assert value is not None
    named = value.type.endswith("ProcessGroup") or each.slot.path[-1:] == ("group_id",)
    if not named or each.reference is None or each.target is None:
        return named
    return _members(each.reference.scalar) == _members(each.target.scalar)


def _way(name: str, ins: list[Comparison], rank: int) -> Way:
    members, label = _group(ins)
    roles = ROLES_OF_COLLECTIVES.get(name, _NO_ROLES)
    for place, direction in ((roles.sends_to, Direction.SEND), (roles.comes_from, Direction.RECEIVE)):
        if place is not None:
            peer = _rank_at(ins, place, members)
            ends = (rank, peer) if direction is Direction.SEND else (peer, rank)
            if None in ends:
                # From anyone: who sent is not recorded.
                return Way(name, direction, (rank,), "any")
            return Way(name, direction, tuple(each for each in ends if each is not None), _tag(ins, label))
    return Way(name, Direction.MEETING, members, label)


def _messages(ins: list[Comparison], outs: list[Comparison], rank: int) -> tuple[Part, ...]:
    """Messages started together, each an entry of a list with its op, tensor, peer and tag; those sent come first."""
    entries: dict[PathStep, list[Comparison]] = {}
    for each in ins:
        if len(each.slot.path) == 3:
            entries.setdefault(each.slot.path[1], []).append(each)
    sent: list[Part] = []
    received: list[Part] = []
    for at, entry in entries.items():
        told = {each.slot.path[2]: each.target.scalar for each in entry if each.target is not None}
        peer, tag = told.get("peer"), str(told.get("tag") or 0)
        if not isinstance(peer, int):
            continue
        if told.get("op") == _BATCH_SENDS:
            sent.append(Part(Way(_BATCH, Direction.SEND, (rank, peer), tag), tuple(entry), ()))
        else:
            # The outputs are what was received, one after the other, or a list like that of the inputs.
            places = (len(received),), (0, at, "tensor")
            taken = tuple(each for each in outs if each.slot.path in places)
            received.append(Part(Way(_BATCH, Direction.RECEIVE, (peer, rank), tag), (), taken))
    return (*sent, *received)


def _group(ins: list[Comparison]) -> tuple[tuple[int, ...], str]:
    for each in ins:
        value = each.target
        if value is not None and value.type.endswith("ProcessGroup"):
            told = value.scalar if isinstance(value.scalar, dict) else {}
            return _members(told), str(told.get("group_id", ""))
    return (), ""


def _members(group: Any) -> tuple[int, ...]:
    ranks = group.get("group_ranks") if isinstance(group, dict) else None
    return tuple(each for each in ranks if isinstance(each, int)) if isinstance(ranks, list) else ()


def _rank_at(ins: list[Comparison], place: Place, members: tuple[int, ...] = ()) -> int | None:
    """The rank that an argument names, by its number among all ranks or, with group_ before the keyword, in the group."""
    found = _scalar(ins, place)
    if isinstance(found, int):
        return found
    inside = _scalar(ins, (-1, f"group_{place[1]}"))
    members = members or _group(ins)[0]
    if not isinstance(inside, int):
        return None
    return members[inside] if inside < len(members) else inside


def _tag(ins: list[Comparison], label: str) -> str:
    tag = _scalar(ins, _TAG)
    return f"{tag if isinstance(tag, int) else 0}{label and ':' + label}"


def _scalar(ins: list[Comparison], place: Place) -> Any:
    return next(
        (
            each.target.scalar
            for each in ins
            if each.target is not None and each.slot.path in ((place[0],), (place[1],))
        ),
        None,
    )
