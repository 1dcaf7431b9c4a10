"""What should be equal over data-parallel replicas: parameters, and what an exchange leaves with every member of its group.

Ranks are replicas of each other if most of their parameters were equal when they were first seen, or if somebody says so.
Calls are compared by name, exchanges by their number in their group. What was recorded of a value decides: its checksum, else
all statistics and the sketch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ulpscope.findings.exchange import KIND
from ulpscope.model.errors import DumpError
from ulpscope.model.operators import ROLES_OF_COLLECTIVES
from ulpscope.model.records import CallId, CallRecord, Phase, Role, Slot, Value
from ulpscope.store.dump import Dump

_SHARING = frozenset(name for name, roles in ROLES_OF_COLLECTIVES.items() if roles.shares)
Groups = tuple[tuple[int, ...], ...]
Key = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A value that should be the same on other ranks. `members` is empty for parameters: the replicas of the rank."""

    key: Key
    seq: int
    call: CallId
    slot: Slot
    value: Value
    evidence: Hashable
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A value that is not the same on all ranks; `odd` are those that differ from most."""

    step: int
    seq: int
    call: CallId
    slot: Slot
    values: dict[int, Value]
    odd: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in sorted(self.values) if rank not in self.odd)

    @property
    def is_exchange(self) -> bool:
        return self.call.kind == KIND


@dataclass(frozen=True, slots=True)
class Agreement:
    """The answer: the groups of replicas, how many values were compared, and what disagrees, earliest first."""

    groups: Groups
    compared: int
    found: tuple[Disagreement, ...]


def agreement(dumps: Iterable[Dump], groups: Groups = ()) -> Agreement:
    """Compares the ranks of one run. Raises DumpError where it has but one, or ranks of several formats."""
    steps: dict[int, dict[int, Dump]] = {}
    for dump in dumps:
        steps.setdefault(dump.manifest.step, {}).setdefault(dump.manifest.rank, dump)
    ranks = sorted({rank for step in steps.values() for rank in step})
    if len(ranks) < 2:
        raise DumpError(
            "replicas need a run with several ranks; this one has " + (f"rank {ranks[0]}" if ranks else "none")
        )
    sketched = [dump for step in steps.values() for dump in step.values() if not dump.manifest.config.get("checksum")]
    if len({dump.manifest.format for dump in sketched}) > 1:
        raise DumpError(
            "the ranks were recorded by several versions of ulpscope, whose sketches cannot be compared; "
            "record them with one, or with checksums"
        )
    compared, found = 0, list[Disagreement]()
    first_seen: dict[Key, bool] = {}
    for step in sorted(steps):
        claims = {rank: list(_claims(dump)) for rank, dump in sorted(steps[step].items())}
        groups = groups or _replicas(claims)
        for one in _met(claims, groups):
            compared += 1
            agrees = len({claim.evidence for claim in one.values()}) == 1
            claim = next(iter(one.values()))
            known = first_seen.setdefault(claim.key, agrees) if not claim.members else True
            # At op level any leaf with a gradient may be a parameter; one that never agreed is none.
            certain = bool(claim.members) or claim.slot.role is Role.PARAMETERS
            if not agrees and (known or certain):
                found.append(_disagreement(step, one))
    found.sort(key=lambda each: (each.step, each.seq))
    return Agreement(groups, compared, tuple(found))


def _claims(dump: Dump) -> Iterator[Claim]:
    produced: set[int] = set()
    exchanges: Counter[Key] = Counter()
    for call in dump.calls():
        if call.id.kind == KIND:
            if call.id.name in _SHARING and not call.error:
                members = _members(call) or tuple(range(dump.manifest.world_size))
                way = (call.id.name, members)
                exchanges[way] += 1
                yield from _of(dump, call, Role.OUTPUT, (*way, exchanges[way]), members)
        elif call.id.phase is Phase.FORWARD:
            yield from _of(dump, call, Role.PARAMETERS, (call.id,), ())
            for value in call.values:
                leaf = value.slot.role is Role.INPUT and value.requires_grad and value.measure not in produced
                if leaf and value.is_tensor and value.stats is not None:
                    yield Claim((call.id, value.slot), call.seq, call.id, value.slot, value, _evidence(dump, value))
        produced |= {
            value.measure for value in call.values if value.slot.role is Role.OUTPUT and value.measure is not None
        }


def _of(dump: Dump, call: CallRecord, role: Role, key: Key, members: tuple[int, ...]) -> Iterator[Claim]:
    for value in call.values:
        if value.slot.role is role and value.is_tensor and value.stats is not None:
            evidence = _evidence(dump, value)
            yield Claim((*key, value.slot), call.seq, call.id, value.slot, value, evidence, members)


def _evidence(dump: Dump, value: Value) -> Hashable:
    return _evidence_alone(dump, value), tuple(_evidence_alone(dump, part) for _, part in value.parts)


def _evidence_alone(dump: Dump, value: Value) -> Hashable:
    if value.checksum is not None:
        return value.dtype, value.shape, value.checksum
    sketch = dump.sketch(value)
    return value.dtype, value.shape, _bits(value), b"" if sketch is None else sketch.tobytes()


def _bits(value: Value) -> Hashable:
    """The statistics as text: nan is equal to itself there."""
    return repr(value.stats)


def _members(call: CallRecord) -> tuple[int, ...]:
    for value in call.values:
        if value.type.endswith("ProcessGroup") and isinstance(value.scalar, dict):
            ranks = value.scalar.get("group_ranks")
            if isinstance(ranks, list):
                return tuple(rank for rank in ranks if isinstance(rank, int))
    return ()


def _replicas(claims: dict[int, list[Claim]]) -> Groups:
    """Ranks most of whose parameters, by elements, are the same."""
    held = {rank: {claim.key: claim for claim in mine if not claim.members} for rank, mine in claims.items()}
    groups: list[list[int]] = []
    for rank, mine in held.items():
        for group in groups:
            other = held[group[0]]
            sizes = {key: claim.value.stats.numel for key, claim in mine.items() if claim.value.stats is not None}
            same = sum(sizes[key] for key in mine if key in other and other[key].evidence == mine[key].evidence)
            if same * 2 > sum(sizes.values()):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _met(claims: dict[int, list[Claim]], groups: Groups) -> Iterator[dict[int, Claim]]:
    """What belongs together, by rank."""
    group_of = {rank: group for group in groups for rank in group}
    together: defaultdict[Key, dict[int, Claim]] = defaultdict(dict)
    for rank, mine in claims.items():
        for claim in mine:
            group: Sequence[int] = claim.members or group_of.get(rank, ())
            if rank in group:
                together[(tuple(group), *claim.key)].setdefault(rank, claim)
    for one in together.values():
        if len(one) > 1:
            yield one


def _disagreement(step: int, one: dict[int, Claim]) -> Disagreement:
    counts = Counter(claim.evidence for claim in one.values())
    most = max(counts, key=lambda evidence: counts[evidence])
    # Of two ranks neither is the odd one.
    tie = list(counts.values()).count(counts[most]) > 1
    odd = tuple(rank for rank, claim in sorted(one.items()) if tie or claim.evidence != most)
    claim = min(one.values(), key=lambda each: each.seq)
    return Disagreement(step, claim.seq, claim.call, claim.slot, {rank: one[rank].value for rank in sorted(one)}, odd)
