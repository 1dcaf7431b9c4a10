"""The judge: which call introduced an error, from ledgers alone.

Every row says how far a call was from the same operation in higher precision on the same inputs. What it inherited is in
its inputs and not in its score, so a row above its limit introduced what it is above it by. Before any arithmetic, what the
two runs were told is compared: arguments, weights, inputs, calls that only one of them makes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ulpscope.analyze.habits import Habits
from ulpscope.analyze.limits import LOW, UNITS, Limit, limit
from ulpscope.analyze.purposes import purposes
from ulpscope.analyze.told import Key, keyed, told_differently
from ulpscope.analyze.verdicts import REPLAY, STATISTICS, Finding, Judgement, Seen, Verdict
from ulpscope.model.operators import Trait, traits
from ulpscope.store.ledger_file import Exchange, Measure, Row

__all__ = ["REPLAY", "STATISTICS", "Finding", "Judgement", "Seen", "Verdict", "judge", "same_place"]

# Moved values are equal: what is left is the rounding of the sketches themselves, which are sums in float64.
_MOVED = 1e-4
_STANDARD_ERRORS = 6.0
_LEANS = 0.05
_FEW = 4  # with fewer calls of a kind, there is no usual one
_SMALL = 0.05
_NOTABLE = 0.45
_OUTLIER = 1.5
_MANY = 256


def judge(target: Sequence[Row], reference: Sequence[Row] | None = None) -> Judgement:
    """Judges a run by itself, or against a reference run. Rows of all ranks together, in any order."""
    target = sorted(target, key=_order)
    partners: dict[Key, Row] = {} if reference is None else keyed(sorted(reference, key=_order))
    keys = keyed(target)
    findings: list[Finding] = []
    counts: defaultdict[str, int] = defaultdict(int)
    unknown: defaultdict[str, int] = defaultdict(int)
    if reference is not None:
        findings += [
            Finding(row, Verdict.TOLD, why, excess)
            for row, why, excess in told_differently(sorted(reference, key=_order), target)
        ]
    findings += _exchanges(target)
    peers = _Peers(
        (row, measure, same_place(partners.get(key), measure)) for key, row in keys.items() for measure in row.measures
    )
    made = purposes(target, partners, keys)
    habits = Habits(target, _ratios)
    remarks: list[Finding] = []
    for key, row in keys.items():
        finding = _weigh(row, partners.get(key), peers)
        if finding is None:
            finding = made.get(id(row))
        if finding is not None:
            finding = habits.explain(finding)
            (remarks if finding.is_remark else findings).append(finding)
            counts[finding.verdict.value] += 1
        elif row.unknown is not None:
            counts[Verdict.UNKNOWN.value] += 1
            unknown[f"{row.op}: {row.unknown}"] += 1
        else:
            counts[_quiet(row, partners.get(key)).value] += 1
    findings.sort(key=lambda finding: (*_order(finding.row), finding.verdict is not Verdict.TOLD))
    return Judgement(
        _first(findings),
        tuple(findings),
        dict(counts),
        dict(unknown),
        compared=reference is not None,
        remarks=tuple(remarks),
    )


def _first(findings: Sequence[Finding]) -> Finding | None:
    """The first that is sure; only where none is, the first at all."""
    return next((finding for finding in findings if finding.sure), findings[0] if findings else None)


def _order(row: Row) -> tuple[int, int, int]:
    return row.step, row.seq, row.rank


# --- one call -----------------------------------------------------------------------------------------------------


def _quiet(row: Row, partner: Row | None) -> Verdict:
    """The verdict of a call that rounding explains."""
    for measure in row.measures:
        other = same_place(partner, measure)
        if other is not None and measure.size and other.size:
            unit = UNITS.get(measure.dtype, 0.0) * max(measure.size, other.size)
            if max(abs(measure.size - other.size), abs(measure.total - other.total)) > unit:
                return Verdict.INHERITED
    return Verdict.IDENTICAL if all(measure.rms == 0 for measure in row.measures) else Verdict.WITHIN


class _Peers:
    """The other calls of the same kernel in the same run: what this run's kernels usually do.

    A score is compared as it is, or, where the reference run has the same call, as a multiple of that one's score: the data
    are then the same on both sides and only the kernel is left.
    """

    def __init__(self, pairs: Iterable[tuple[Row, Measure, Measure | None]]) -> None:
        self._known: defaultdict[tuple[str, str, int, bool], list[float]] = defaultdict(list)
        for row, measure, other in pairs:
            self._known[self._key(row, measure, other)].append(_relative(measure, other))
        for values in self._known.values():
            values.sort()

    def usual(self, row: Row, measure: Measure, other: Measure | None) -> float | None:
        """The highest score of the others; None where there are too few to speak of."""
        values = self._known[self._key(row, measure, other)]
        if len(values) < _FEW:
            return None
        mine = _relative(measure, other)
        return values[-1] if mine < values[-1] else values[-2]

    @staticmethod
    def _key(row: Row, measure: Measure, other: Measure | None) -> tuple[str, str, int, bool]:
        return row.op, measure.dtype, measure.place, _comparable(other)


def _comparable(other: Measure | None) -> bool:
    return other is not None and other.rms > _SMALL


def _relative(measure: Measure, other: Measure | None) -> float:
    return measure.rms / other.rms if other is not None and _comparable(other) else measure.rms


def _weigh(row: Row, partner: Row | None, peers: _Peers) -> Finding | None:
    """The worst of the call's results, if it is above its limit."""
    worst: Finding | None = None
    for measure in row.measures:
        found = _weigh_measure(row, measure, same_place(partner, measure), peers)
        if found is not None and (worst is None or found.excess > worst.excess):
            worst = found
    return worst


def same_place(partner: Row | None, measure: Measure) -> Measure | None:
    """The same result of the same call of the reference run; another dtype has other units and says nothing."""
    if partner is None:
        return None
    found = next((other for other in partner.measures if other.place == measure.place), None)
    return found if found is not None and found.dtype == measure.dtype else None


def _weigh_measure(row: Row, measure: Measure, other: Measure | None, peers: _Peers) -> Finding | None:
    if measure.lost and not (other is not None and other.lost):
        why = f"{measure.lost} values are not finite but should be"
        return Finding(row, Verdict.INTRODUCED, why, math.inf, measure)
    if measure.wrong:
        if other is not None and other.wrong:
            return None
        why = f"{measure.wrong} of {math.prod(measure.shape)} elements differ, and this operation must not change any"
        return Finding(row, Verdict.INTRODUCED, why, math.inf, measure)
    bound = _bound(row, measure, other)
    excess, why = max(_ratios(row, measure, bound, other))
    if excess <= 1:
        excess, why = _unlike_its_peers(row, measure, other, peers)
    if excess > 1 and bound.assumed:
        why += f"; limit assumed: {row.name} was not measured"
    return Finding(row, Verdict.INTRODUCED, why, excess, measure, bound) if excess > 1 else None


def _ratios(
    row: Row, measure: Measure, bound: Limit | None = None, other: Measure | None = None
) -> list[tuple[float, str]]:
    """How many times the limit each kind of error is, and what to say of it; always in the same order."""
    bound = bound or _bound(row, measure, other)
    unit = f"units of {measure.dtype} rounding"
    return [
        (measure.rms / bound.rms, f"error {measure.rms:.2g} {unit}, expected at most {bound.rms:.2g}"),
        (measure.worst / bound.worst, f"one element is off by {measure.worst:.2g} {unit}"),
        _bias(measure, bound, other),
        _misrounded(row, measure, bound, other),
    ]


def _bound(row: Row, measure: Measure, other: Measure | None) -> Limit:
    """Theory, wider where the reference run itself is wider. Low precision rounds once: what leans there, leans on purpose."""
    bound = limit(row, measure)
    if other is None:
        return bound
    bias = max(abs(other.toward), abs(other.up))
    return Limit(
        max(bound.rms, 3 * other.rms),
        max(bound.worst, 3 * other.worst),
        max(_LEANS if measure.dtype in LOW else bound.bias, 2 * bias),
        bound.misrounded,
        bound.assumed,
    )


def _unlike_its_peers(row: Row, measure: Measure, other: Measure | None, peers: _Peers) -> tuple[float, str]:
    """Partial sums rounded in low precision: below what theory allows, but this run's other calls do not do it."""
    if measure.dtype not in LOW or row.kind != "contraction" or measure.rms < _NOTABLE:
        return 0.0, ""
    if math.prod(measure.shape) < _MANY or Trait.ONE_BY_ONE in traits(row.name):
        return 0.0, ""  # the error of a few elements is a matter of chance, that of a running sum one of its length
    if row.name.startswith("convolution") and not _comparable(other):
        return 0.0, ""  # another size of the kernel is another algorithm
    usual = peers.usual(row, measure, other)
    if usual is None:
        return 0.0, ""
    mine = _relative(measure, other)
    against = "the reference's own error" if _comparable(other) else "a unit of rounding"
    why = f"error {mine:.2g} times {against}; no other {row.name} of this run is above {usual:.2g}"
    return mine / (_OUTLIER * max(usual, 1.0 if _comparable(other) else _NOTABLE)), why


def _misrounded(row: Row, measure: Measure, bound: Limit, other: Measure | None) -> tuple[float, str]:
    """A map in low precision is computed in a higher one and rounded once: all but a few results are the nearest number."""
    count = math.prod(measure.shape)
    if measure.dtype not in LOW or count < _MANY:
        return 0.0, ""
    allowed = bound.misrounded if other is None else max(0.02, 3 * other.misrounded)
    allowed += 4 * math.sqrt(allowed / count)
    why = f"{measure.misrounded:.0%} of the results are not the nearest {measure.dtype}, expected at most {allowed:.0%}"
    return measure.misrounded / allowed, why


def _bias(measure: Measure, bound: Limit, other: Measure | None) -> tuple[float, str]:
    size = max(abs(measure.toward), abs(measure.up))
    noise = _STANDARD_ERRORS * math.hypot(measure.spread, other.spread if other is not None else 0.0)
    direction = "toward zero" if measure.toward < 0 else "away from zero"
    if abs(measure.up) > abs(measure.toward):
        direction = "upward" if measure.up > 0 else "downward"
    why = f"all results lean {direction} by {size:.2g} units of {measure.dtype} rounding; rounding leans nowhere"
    return size / max(bound.bias, noise, 2 * measure.leans, 1e-9), why


# --- collectives --------------------------------------------------------------------------------------------------


def _exchanges(rows: Iterable[Row]) -> Iterator[Finding]:
    """Exchanges between ranks: what every rank got must follow from what all gave. Sketches are linear, so they add up."""
    groups: defaultdict[tuple[object, ...], list[tuple[Row, Exchange]]] = defaultdict(list)
    for row in rows:
        if row.exchange is not None and row.measures and row.rank in row.exchange.group:
            groups[row.exchange.group, row.exchange.number, row.exchange.how].append((row, row.exchange))
    for found in groups.values():
        group = found[0][1].group
        if len(found) == len(group):
            yield from _check(sorted(found, key=lambda item: group.index(item[0].rank)))


def _check(found: Sequence[tuple[Row, Exchange]]) -> Iterator[Finding]:
    """The findings of one exchange; `found` in the order of the group."""
    name, _, reduction = found[0][1].how.partition(".")
    given = [exchange.given for _, exchange in found]
    count = len(found)
    if name.startswith(("allreduce", "reduce_scatter")):
        if reduction not in ("sum", "avg", "unknown"):
            return
        share = 1 / count if reduction == "avg" else 1.0
        total = [share * math.fsum(parts) for parts in zip(*given, strict=False)]
        size = len(total) // count
        whole = name.startswith("allreduce")
        want = [total if whole else total[at * size : (at + 1) * size] for at in range(count)]
        bound, what = 2.0 * count, f"the sum of what the {count} ranks gave"
    elif name.startswith("allgather"):
        want = [[number for part in given for number in part]] * count
        bound, what = _MOVED, f"what the {count} ranks gave"
    elif name == "broadcast" and reduction.isdigit() and int(reduction) < count:
        want = [list(given[int(reduction)])] * count
        bound, what = _MOVED, f"what rank {found[0][1].group[int(reduction)]} gave"
    else:
        return
    scores = [_off(row, exchange, expected) for (row, exchange), expected in zip(found, want, strict=True)]
    if reduction == "unknown" and min(scores) > bound:
        return  # not a sum
    for (row, _), score in zip(found, scores, strict=True):
        if score > bound:
            why = f"what this rank got is not {what} (off by {score:.2g} units)"
            yield Finding(row, Verdict.INTRODUCED, why, score / bound, row.measures[0])


def _off(row: Row, exchange: Exchange, expected: Sequence[float]) -> float:
    """The worst of the sketches, in units of rounding; infinite where there are too few or too many of them."""
    if len(exchange.got) != len(expected):
        return math.inf
    dtype = row.measures[0].dtype if "reduce" in exchange.how else "float32"
    unit = UNITS.get(dtype, 2.0**-24) * max(exchange.norm, 1e-300)
    return max((abs(got - want) for got, want in zip(exchange.got, expected, strict=True)), default=0.0) / unit
