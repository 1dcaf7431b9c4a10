"""Two dumps in, a stream of comparisons out, in the order of the target. Imports no framework.

Calls are aligned first; then each pair of values is compared on the best evidence both sides have. Elements are read
once for each pair of payloads, on `jobs` threads; only a window of calls is in memory.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter, is_
from pathlib import Path

from ulpscope.compare.align import Align, Pairing, align
from ulpscope.compare.comparison import CallComparison, Code, Comparison, Evidence, How, Level, Match, Verdict
from ulpscope.compare.mapping import Mapping
from ulpscope.compare.reading import Pending, Reading
from ulpscope.compare.runs import pair_runs, warn_of_one
from ulpscope.compare.values import Values
from ulpscope.compare.verdict import (
    elements_error,
    is_partly_known,
    other_form,
    rounding_of,
    scalar_verdict,
    statistics_error,
    tensor_verdict,
)
from ulpscope.model.errors import DumpError
from ulpscope.model.names import value_text
from ulpscope.model.records import CallId, CallRecord, Value
from ulpscope.native.measuring import sketch_relative_l2
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump

log = logging.getLogger(__name__)

_TWO_FORMATS = (
    "%s and %s have sketches of two formats, which cannot be compared: statistics decide, which do not see moved values; "
    "record both with one version of ulpscope"
)
# That the elements agree proves nothing then.
_PARTLY = "its indices, offsets or scales are not in the dump: another tool or an older ulpscope wrote it"
# Calls that wait for their elements, and contrasts kept for the calls that use the same payloads again.
_WINDOW = 64
_KEPT = 4096
_slot_of = attrgetter("slot")


@dataclass(frozen=True, slots=True)
class Options:
    """How two dumps are compared. `jobs`: threads that read elements, 0 for all cores."""

    align: Align = Align.VALUES
    mapping: Mapping = field(default_factory=Mapping)
    jobs: int = 0
    elements: bool = True


def compare_dumps(
    reference: Dump, target: Dump, options: Options | None = None, values: Values | None = None
) -> Iterator[CallComparison]:
    """Every call of both dumps with its values compared, in the order of the target. `values`: of these dumps, if there are some."""
    options = options or Options()
    warn_of_one(reference.folder, target.folder)
    formats = {dump.manifest.format for dump in (reference, target) if dump.manifest.config.get("sketch")}
    if len(formats) > 1:
        log.warning(_TWO_FORMATS, reference.folder, target.folder)
    pairings = align(reference, target, options.align, values)
    jobs = options.jobs or os.cpu_count() or 1
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(jobs)) if jobs > 1 else None
        pairs = _Pairs(reference, target, Reading(reference, target, pool, jobs=jobs), elements=options.elements)
        waiting: deque[tuple[Match, list[_Draft | Comparison]]] = deque()
        for pairing in pairings:
            waiting.append(_drafts(reference, target, pairing, options.mapping, pairs))
            if len(waiting) > _WINDOW:
                yield _finished(waiting.popleft())
        while waiting:
            yield _finished(waiting.popleft())


def compare_calls(reference: Dump, target: Dump, match: Match) -> CallComparison:
    """One call of each, or one that is alone, by all that is known but elements."""
    pairs = _Pairs(reference, target, Reading(reference, target, None, jobs=1), elements=False)
    return _finished((match, _matched(match, Mapping(), reference, pairs)))


def compare_runs(
    reference: str | Path,
    target: str | Path,
    options: Options | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
) -> Iterator[Comparison]:
    """Every value of two runs compared, unit after unit."""
    for unit in pair_runs(reference, target, step=step, rank=rank).units:
        for call in compare_dumps(open_dump(unit.reference), open_dump(unit.target), options):
            yield from call.values


# --- values -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draft:
    """Two values whose elements are still being read."""

    match: Match
    reference: Value
    target: Value
    contrast: Pending


def _drafts(
    reference: Dump, target: Dump, pairing: Pairing, mapping: Mapping, pairs: _Pairs
) -> tuple[Match, list[_Draft | Comparison]]:
    left = None if pairing.reference is None else reference.nth(pairing.reference)
    right = None if pairing.target is None else target.nth(pairing.target)
    match = Match(left, right, pairing.how, pairing.why)
    return match, _matched(match, mapping, reference, pairs)


def _matched(match: Match, mapping: Mapping, reference: Dump, pairs: _Pairs) -> list[_Draft | Comparison]:
    left, right = match.reference, match.target
    if left is not None and right is not None and not mapping and _slot_by_slot(left.values, right.values):
        return list(map(pairs.draft, repeat(match), left.values, right.values))
    unused = {} if left is None else {value.slot: value for value in left.values}
    drafts: list[_Draft | Comparison] = []
    for value in () if right is None else right.values:
        mapped = mapping.source(match.call.id, value.slot) if mapping else None
        if mapped is not None:
            drafts.append(_from_mapping(reference, right, value, mapped, pairs))
        else:
            drafts.append(pairs.draft(match, unused.pop(value.slot, None), value))
    drafts += [pairs.draft(match, value, None) for value in unused.values()]
    return drafts


def _slot_by_slot(left: Sequence[Value], right: Sequence[Value]) -> bool:
    """Whether two calls have the same slots in the same order; false in doubt."""
    return len(left) == len(right) and all(map(is_, map(_slot_of, left), map(_slot_of, right)))


def _from_mapping(
    reference: Dump, right: CallRecord | None, value: Value, mapped: tuple[CallId, str], pairs: _Pairs
) -> _Draft | Comparison:
    call, name = mapped
    try:
        left = reference.call(call)
    except DumpError as error:
        return pairs.draft(Match(None, right, How.ALONE, str(error)), None, value)
    found = next((each for each in left.values if value_text(left.id, each.slot) == name), None)
    return pairs.draft(Match(left, right, How.MAPPING), found, value)


class _Pairs:
    """Starts reading the elements of two values where both have them; each pair of payloads once."""

    def __init__(self, reference: Dump, target: Dump, reading: Reading, *, elements: bool) -> None:
        self._reference, self._target = reference, target
        self._reading = reading
        self._elements = elements
        self._kept: dict[tuple[int, int, str | None, str | None], Pending] = {}

    def draft(self, match: Match, left: Value | None, right: Value | None) -> _Draft | Comparison:
        """The comparison of two values, or a draft where their elements have to be read first."""
        if left is None or right is None:
            return _alone(match, left, right)
        if left.shape is None or right.shape is None:
            verdict = _plain_verdict(left, right)
            return Comparison(match, right.slot, left, right, Evidence.SCALAR, verdict, None, 0.0, None)
        if left.shape != right.shape:
            text = f"{_sizes(left)} in the reference, {_sizes(right)} in the target"
            verdict = Verdict(Level.FAIL, (Code.SHAPE,), text)
            rounding = rounding_of(left, right)
            return Comparison(match, right.slot, left, right, Evidence.NOTHING, verdict, math.inf, rounding)
        if left.extra or right.extra:  # as all odd tensors have
            form = self._form(match, left, right)
            if form is not None:
                return form
        return self._alike(match, left, right)

    def _alike(self, match: Match, left: Value, right: Value) -> _Draft | Comparison:
        """Of two tensors of one shape."""
        if self._elements and left.payload is not None and right.payload is not None:
            return _Draft(match, left, right, self._contrast(left, right))
        lost = _missing(left, right) if self._elements and (left.extra or right.extra) else ""
        sketch = None
        if left.measure is not None and right.measure is not None:
            try:
                sketch = self._sketched(left, right)
            except DumpError as gone:
                lost = str(gone)
        if lost:
            return _by_the_rest(match, left, right, lost)
        evidence, error = _weigh(left, right, sketch)
        verdict = tensor_verdict(left, right, evidence, error)
        return Comparison(match, right.slot, left, right, evidence, verdict, error, rounding_of(left, right), None)

    def _form(self, match: Match, left: Value, right: Value) -> Comparison | None:
        """The comparison of two odd tensors that are not made alike: what their elements are says nothing then."""
        rounding = rounding_of(left, right)
        told = other_form(left, right)
        if told and not is_partly_known(left) and not is_partly_known(right):
            verdict = Verdict(Level.FAIL, (Code.DIFFERENT,), told)
            return Comparison(match, right.slot, left, right, Evidence.NOTHING, verdict, math.inf, rounding)
        for (name, ours), (_, theirs) in zip(left.parts, right.parts, strict=False):
            found = _read(self.draft(match, ours, theirs))
            if found.verdict.level in (Level.FAIL, Level.UNKNOWN):
                fails = found.verdict.level is Level.FAIL
                text = f"other {name}" if fails else f"{name}: {found.verdict.text}"
                verdict, error = Verdict(found.verdict.level, found.verdict.codes, text), math.inf if fails else None
                return Comparison(match, right.slot, left, right, found.evidence, verdict, error, rounding)
        if not is_partly_known(left) and not is_partly_known(right):
            return None
        found = _read(self._alike(match, left, right))
        if found.verdict.level not in (Level.PASS, Level.WARN):
            return found
        verdict = Verdict(Level.UNKNOWN, (Code.NOT_MEASURED,), _PARTLY)
        return replace(found, evidence=Evidence.NOTHING, verdict=verdict, error=None)

    def _sketched(self, left: Value, right: Value) -> float | None:
        if left.checksum is not None and left.checksum == right.checksum:
            return None
        if self._reference.manifest.format != self._target.manifest.format:
            return None  # two kinds of sketches
        ours, theirs = self._reference.sketch(left), self._target.sketch(right)
        return None if ours is None or theirs is None else sketch_relative_l2(ours, theirs)

    def _contrast(self, left: Value, right: Value) -> Pending:
        assert left.payload is not None and right.payload is not None
        key = (left.payload.offset, right.payload.offset, left.dtype, right.dtype)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            found = self._kept[key] = self._reading.start(left, right)
        return found


# --- verdicts ---------------------------------------------------------------------------------------------------


def _finished(waiting: tuple[Match, Sequence[_Draft | Comparison]]) -> CallComparison:
    match, drafts = waiting
    values = [each if isinstance(each, Comparison) else _read_through(each) for each in drafts]
    return CallComparison(match, tuple(values))


def _read(each: _Draft | Comparison) -> Comparison:
    return each if isinstance(each, Comparison) else _read_through(each)


def _read_through(draft: _Draft) -> Comparison:
    match, left, right = draft.match, draft.reference, draft.target
    try:
        contrast = draft.contrast.result()
    except DumpError as error:
        return _by_the_rest(match, left, right, str(error))
    size = elements_error(contrast) if contrast.count else 0.0
    verdict = tensor_verdict(left, right, Evidence.ELEMENTS, size)
    if not contrast.same_places:
        verdict = Verdict(verdict.level, (Code.NOT_FINITE, *verdict.codes[1:]), verdict.text)
    rounding = rounding_of(left, right)
    return Comparison(match, right.slot, left, right, Evidence.ELEMENTS, verdict, size, rounding, contrast)


def _by_the_rest(match: Match, left: Value, right: Value, lost: str) -> Comparison:
    """What statistics and checksums say where a dump promised more than is there: a difference counts, agreement does not."""
    evidence, error = _weigh(left, right, None)
    verdict = tensor_verdict(left, right, evidence, error)
    if verdict.level is not Level.FAIL:
        evidence, error, verdict = Evidence.NOTHING, None, Verdict(Level.UNKNOWN, (Code.UNREADABLE,), lost)
    return Comparison(match, right.slot, left, right, evidence, verdict, error, rounding_of(left, right))


def _missing(left: Value, right: Value) -> str:
    """The files that two values should have and have not; what the tool itself wrote over was never promised."""
    return " and ".join(
        f"{value.extra['missing']} of the {side} is missing"
        for side, value in (("reference", left), ("target", right))
        if "missing" in value.extra and "overwritten" not in value.extra
    )


def _weigh(left: Value, right: Value, sketch: float | None) -> tuple[Evidence, float | None]:
    """The best evidence there is besides elements, and the error it shows."""
    if 0 in (left.shape or ()):
        return Evidence.ELEMENTS, 0.0
    both = left.checksum is not None and right.checksum is not None and left.dtype == right.dtype
    if both and left.checksum == right.checksum:
        return Evidence.CHECKSUM, 0.0
    told = None
    if left.stats is not None and right.stats is not None:
        told = statistics_error(left.stats, right.stats)
    if sketch is not None and not math.isnan(sketch):
        return Evidence.SKETCH, max(sketch, told or 0.0)
    if told and (not both or told > 0.0):
        return Evidence.STATISTICS, told
    if both:
        return Evidence.CHECKSUM, None
    return (Evidence.NOTHING, None) if told is None else (Evidence.STATISTICS, told)


def _plain_verdict(left: Value, right: Value) -> Verdict:
    if left.error is not None or right.error is not None:
        return Verdict(Level.UNKNOWN, (Code.NOT_MEASURED,), left.error or right.error or "")
    if left.is_tensor != right.is_tensor:
        return Verdict(Level.FAIL, (Code.TYPE,), f"{left.type} in the reference, {right.type} in the target")
    return scalar_verdict(left, right)


def _alone(match: Match, left: Value | None, right: Value | None) -> Comparison:
    value = right or left
    assert value is not None
    code = Code.NO_REFERENCE if right is not None else Code.NO_TARGET
    why = match.why or f"the call has no {'such value' if value.is_tensor else 'such argument'} there"
    return Comparison(match, value.slot, left, right, Evidence.NOTHING, Verdict(Level.UNMATCHED, (code,), why))


def _sizes(value: Value) -> str:
    return "[" + ", ".join(map(str, value.shape or ())) + "]"
