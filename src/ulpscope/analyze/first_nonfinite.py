"""The first nan or infinity of a recorded run: which call made it, and on which rank, from what the dumps say and nothing else.

A call makes one if it was given none and returns one. Over ranks it is followed back through the exchanges that brought it.
Infinities that a program writes down (a mask) or a function has by its nature (log 0) are no findings of their own; a nan always
is. What was not recorded is unknown, and never finite.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from ulpscope.compare.comparison import CallComparison, Code, Comparison, Evidence, How, Level, Match, Verdict
from ulpscope.findings.exchange import KIND, Direction, Way, parts_of
from ulpscope.model.errors import DumpError
from ulpscope.model.names import MODULE, OPTIMIZER, SAVED
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import CallId, CallRecord, Frame, Phase, Role, Value
from ulpscope.store.dump import Dump

_FLOATS = ("float", "bfloat", "complex", "half", "double")
_UNJUDGED = Verdict(Level.UNKNOWN, (Code.NOT_MEASURED,))
Exchange = tuple[tuple[object, ...], int]
CallName = tuple[str, str, int]


class Bad(enum.IntEnum):
    """How bad the worst element of a value is."""

    FINITE = 0
    INF = 1
    NAN = 2


class Beginning(enum.Enum):
    """How a rank came by it. THERE: a call was given it, and none that is recorded had returned it. UNCLEAR: the call returned it,
    and was given something that was not measured. CAME is for one whose sender is not known."""

    MADE = "made"
    CAME = "came"
    THERE = "there"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class First:
    """The first value of a rank that is as bad as `bad`, with the exchange that brought it."""

    call: CallRecord
    step: int
    rank: int
    bad: Bad
    how: Beginning
    given: Bad = Bad.FINITE
    why: str = ""
    source: Frame | None = None
    exchange: Exchange | None = None
    way: Way | None = None
    # The ranks to which it came, and by which call of theirs.
    reached: tuple[tuple[int, CallId], ...] = ()


@dataclass
class _Rank:
    """What one pass over the dump of a rank has seen."""

    dump: Dump
    first: dict[Bad, First] = field(default_factory=dict)
    gave: dict[Exchange, Bad | None] = field(default_factory=dict)
    counts: Counter[Hashable] = field(default_factory=Counter)
    unheard: CallId | None = None  # an exchange whose result was not measured


def first_nonfinite(dumps: Iterable[Dump]) -> list[First]:
    """Where the nans of the first step that has any begin; where it has none, the infinities; nothing where all is finite."""
    steps: defaultdict[int, list[Dump]] = defaultdict(list)
    for dump in dumps:
        steps[dump.manifest.step].append(dump)
    for _, ranks in sorted(steps.items()):
        seen = {dump.manifest.rank: _scan(dump) for dump in ranks}
        for bad in (Bad.NAN, Bad.INF):
            found = _origins(seen, bad)
            if found and bad is Bad.NAN and any(each.given is Bad.INF for each in found):
                found = [*_origins(seen, Bad.INF), *found]
            if found:
                return found
    return []


def badness(value: Value) -> Bad | None:
    """How bad a value is; None where it was not measured and may hold anything."""
    if not value.is_tensor:
        scalar = value.scalar
        if value.type == "float" and isinstance(scalar, str):
            scalar = math.nan if scalar == "nan" else math.inf if scalar in ("inf", "-inf") else 0.0
        return _of_numbers(scalar) if isinstance(scalar, float) else Bad.FINITE
    if not (value.dtype or "").removeprefix("torch.").startswith(_FLOATS) or 0 in (value.shape or ()):
        return Bad.FINITE
    if value.stats is None:
        return None
    numbers = [float(number) for number in (value.stats.max, value.stats.min) if number is not None]
    return _of_numbers(*numbers) if numbers else None


def _of_numbers(*numbers: float) -> Bad:
    if any(math.isnan(number) for number in numbers):
        return Bad.NAN
    return Bad.INF if any(math.isinf(number) for number in numbers) else Bad.FINITE


# --- one rank -----------------------------------------------------------------------------------------------------------


def _scan(dump: Dump) -> _Rank:
    seen = _Rank(dump)
    bad_before: dict[CallName, Bad] = {}
    for call in dump.calls():
        if call.id.kind in (OPTIMIZER, SAVED):
            continue
        if call.id.kind == KIND and call.id.phase is Phase.FORWARD:
            _pass(seen, call)
            continue
        ins, outs = _sides(call)
        given, unsure = _worst(ins), [value for value in ins if value.is_tensor and badness(value) is None]
        name = call.id.kind, call.id.name, call.id.index
        if call.id.phase is not Phase.FORWARD:
            given = max(given, bad_before.get(name, Bad.FINITE))
        returned = _worst(outs)
        bad_before[name] = max(given, returned, bad_before.get(name, Bad.FINITE))
        if not bad_before[name]:
            del bad_before[name]
        in_tensors = _worst([value for value in ins if value.is_tensor])
        for bad in (Bad.INF, Bad.NAN):
            _note(seen, call, bad, in_tensors, given, returned, unsure)
    return seen


def _note(
    seen: _Rank, call: CallRecord, bad: Bad, in_tensors: Bad, given: Bad, returned: Bad, unsure: list[Value]
) -> None:
    """Enters a call as the first of its rank, if it is; a call inside the one that is entered takes its place."""
    made = returned >= bad > given
    if not _comes_first(seen, call, bad, made):
        return
    if made and bad is Bad.INF and Trait.POLE in traits(call.id.name):
        return
    if made and not unsure:
        _enter(seen, call, bad, Beginning.MADE, given=given)
    elif made and bad is Bad.NAN:
        names = ", ".join(".".join([value.slot.role.value, *map(str, value.slot.path)]) for value in unsure[:3])
        _enter(seen, call, bad, Beginning.UNCLEAR, given=given, why=f"{names} was not measured")
    elif in_tensors >= bad is Bad.NAN:
        heard = (
            "" if seen.unheard is None else f"the result of {seen.unheard.kind}.{seen.unheard.name} was not measured"
        )
        _enter(seen, call, bad, Beginning.THERE, given=given, why=heard)


def _comes_first(seen: _Rank, call: CallRecord, bad: Bad, made: bool) -> bool:
    """Whether nothing is entered yet, or a call around this one."""
    entered = seen.first.get(bad)
    if entered is None:
        return True
    return made and entered.how is not Beginning.THERE and _is_within(seen.dump, call, entered.call.id)


def _enter(
    seen: _Rank,
    call: CallRecord,
    bad: Bad,
    how: Beginning,
    *,
    given: Bad = Bad.FINITE,
    why: str = "",
    exchange: Exchange | None = None,
    way: Way | None = None,
) -> None:
    frames = seen.dump.stack(call)
    source = next((frame for frame in frames if not frame.library), frames[0] if frames else None)
    manifest = seen.dump.manifest
    seen.first[bad] = First(call, manifest.step, manifest.rank, bad, how, given, why, source, exchange, way)


def _sides(call: CallRecord) -> tuple[list[Value], list[Value]]:
    """What a call was given, and what it returned that says anything."""
    if call.id.phase is Phase.PARAMETERS_GRAD:
        return [], list(call.values)
    known = traits(call.id.name)
    ins = [value for value in call.values if value.slot.role is not Role.OUTPUT]
    outs = [value for value in call.values if value.slot.role is Role.OUTPUT]
    if call.id.phase is Phase.FORWARD and call.id.kind != MODULE:
        if Trait.UNINITIALISED in known:
            outs = []
        if Trait.NOTES in known:
            outs = [value for value in outs if value.slot.path[:1] == (0,)]
        if Trait.FILLS in known:
            ins = [value for value in ins if value.slot.path[:1] != (0,)]
    return ins, outs


def _worst(values: Iterable[Value]) -> Bad:
    return max((badness(value) or Bad.FINITE for value in values), default=Bad.FINITE)


def _is_within(dump: Dump, call: CallRecord, above: CallId) -> bool:
    parent = dump.parent(call)
    depth = 0
    while parent is not None and depth < 1000:
        if parent == above:
            return True
        try:
            parent, depth = dump.parent(dump.call(parent)), depth + 1
        except DumpError:  # it was not asked for, and is not recorded
            return False
    return False


# --- over ranks ---------------------------------------------------------------------------------------------------------


def _pass(seen: _Rank, call: CallRecord) -> None:
    """A communication call: what this rank gave and got in each of its exchanges."""
    match = Match(call, call, How.NAME)
    values = tuple(Comparison(match, value.slot, value, value, Evidence.NOTHING, _UNJUDGED) for value in call.values)
    for part in parts_of(CallComparison(match, values), seen.dump.manifest.rank):
        exchange = part.way.key, seen.counts[part.way.key]
        seen.counts[part.way.key] += 1
        given = [badness(each.target) for each in part.given if each.target is not None and each.target.is_tensor]
        got = [badness(each.target) for each in part.taken if each.target is not None and each.target.is_tensor]
        gave = seen.gave[exchange] = None if None in given else max(given, default=Bad.FINITE)  # type: ignore[type-var]
        if None in got or (not got and part.way.direction is not Direction.SEND):
            seen.unheard = call.id
        worst = max((each for each in got if each is not None), default=Bad.FINITE)
        for bad in (Bad.INF, Bad.NAN):
            if not _comes_first(seen, call, bad, worst >= bad > (gave or Bad.FINITE)):
                continue
            if gave is not None and gave >= bad:
                if bad is Bad.NAN:
                    _enter(seen, call, bad, Beginning.THERE, given=gave)
            elif worst >= bad:
                _enter(seen, call, bad, Beginning.CAME, given=gave or Bad.FINITE, exchange=exchange, way=part.way)


def _origins(seen: dict[int, _Rank], bad: Bad) -> list[First]:
    """Where it begins, each origin once, with the ranks that got it from there."""
    found: dict[tuple[int, CallId], First] = {}
    for rank, each in seen.items():
        first = each.first.get(bad)
        if first is None:
            continue
        for origin in _followed(seen, rank, bad, set()):
            at = origin.rank, origin.call.id
            known = found.setdefault(at, origin)
            if origin.rank != rank:
                found[at] = replace(known, reached=(*known.reached, (rank, first.call.id)))
    return sorted(found.values(), key=lambda each: (each.how is not Beginning.MADE, each.rank, each.call.seq))


def _followed(seen: dict[int, _Rank], rank: int, bad: Bad, visited: set[int]) -> list[First]:
    """The origins of what a rank has, back through the exchanges that brought it."""
    first = seen[rank].first[bad]
    if first.how is not Beginning.CAME or rank in visited:
        return [first]
    visited.add(rank)
    assert first.exchange is not None and first.way is not None
    others = [other for other in seen if other != rank and first.exchange in seen[other].gave]
    givers = [other for other in others if (seen[other].gave[first.exchange] or Bad.FINITE) >= bad]
    if givers:
        origins = [
            origin for other in givers if bad in seen[other].first for origin in _followed(seen, other, bad, visited)
        ]
        if origins:
            return origins
    expected = set(first.way.ranks or range(seen[rank].dump.manifest.world_size)) - {rank}
    lacking = sorted(other for other in expected if other not in others)
    unsure = sorted(other for other in others if seen[other].gave[first.exchange] is None)
    if lacking or unsure:
        which = f"rank {', '.join(map(str, lacking or unsure))}"
        why = f"{which} has no record of it" if lacking else f"what {which} gave was not measured"
        return [replace(first, why=why)]
    # All that went in was finite: it is the exchange that adds up too much.
    return [replace(first, how=Beginning.MADE)]
