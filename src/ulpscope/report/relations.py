"""What a reader expects of communication calls across ranks, looked up in their compare results.

After an all_reduce every member of the group holds the same tensor; what one rank receives is what another sent. Statistics show
whether that can be so: a relation is violated, holds as far as they can tell, or cannot be told from them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ulpscope.report.table import Cell, Colour, Row, Sheet

SHEET_NAME = "Expected relations"
COLUMNS = ("NPU Name", "group", "expected", "NPU", "Bench", "detail")
SIDES = ("NPU", "Bench")
_ROW_NAME = re.compile(r"(?P<call>Distributed\.(?P<api>\w+)\.\d+\.forward)\.(?P<slot>(?:input|output)\..+)")
_CLOSE = 1e-6


class Verdict(Enum):
    HOLDS = "holds"
    VIOLATED = "violated"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Measured:
    """A tensor as a result shows it: shape, then max, min, mean and norm."""

    shape: str
    numbers: tuple[float, ...]

    def like(self, other: Measured) -> bool:
        pairs = zip(self.numbers, other.numbers, strict=True)
        return self.shape == other.shape and all(
            math.isclose(one, two, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(two)) for one, two in pairs
        )


@dataclass(slots=True)
class Call:
    """One communication call of one rank, on one side."""

    slots: dict[str, Measured] = field(default_factory=dict)

    def tensors(self, slot: str) -> dict[str, Measured]:
        """A slot, or the parts of a list in it."""
        return {name: found for name, found in self.slots.items() if name == slot or name.startswith(f"{slot}.")}


@dataclass(slots=True)
class Communication:
    """One communication call of one rank, on both sides, and the ranks it is about: everyone if it names no group."""

    name: str
    api: str
    sides: tuple[Call, Call] = field(default_factory=lambda: (Call(), Call()))
    group: tuple[int, ...] | None = None
    partner: int | None = None


Members = Mapping[int, Call]
Matched = dict[int, Communication]
Found = tuple[Verdict, str]


def communications(rows: Iterable[Mapping[str, Cell]]) -> list[Communication]:
    """The communication calls in the rows of one rank's result, in order."""
    calls: dict[str, Communication] = {}
    for row in rows:
        name = _ROW_NAME.fullmatch(str(row.get("NPU Name")))
        if name is None or name["api"] not in EXPECTED:
            continue
        call = calls.setdefault(name["call"], Communication(name["call"], name["api"]))
        slot = name["slot"]
        if slot.endswith(".group") or "ProcessGroup" in str(row.get("NPU Dtype")):
            call.group = _group(str(row.get("NPU max")))
        elif slot in ("input.1", "input.dst", "input.src") and isinstance(row.get("NPU max"), int):
            call.partner = int(row["NPU max"] or 0)
        for side, found in zip(SIDES, call.sides, strict=True):
            measured = _measured(row, side)
            if measured is not None:
                found.slots[slot] = measured
    return list(calls.values())


def _group(text: str) -> tuple[int, ...]:
    """The ranks in `[0, 1]` or `tp-0-1`; none if it says something else."""
    parts = text.strip("[]").split(",") if text.startswith("[") else text.split("-")[1:]
    numbers = [part.strip() for part in parts]
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else ()


def _measured(row: Mapping[str, Cell], side: str) -> Measured | None:
    dtype = str(row.get(f"{side} Dtype"))
    if dtype == "N/A" or dtype.startswith("<class"):
        return None
    try:
        numbers = [float(str(row.get(f"{side} {name}"))) for name in ("max", "min", "mean", "l2norm")]
    except ValueError:
        return None
    return Measured(str(row.get(f"{side} Tensor Shape")), tuple(numbers))


def outputs_agree(members: Members) -> Found:
    """Every member has the same in its first output."""
    (first, reference), *others = ((rank, call.tensors("output.0")) for rank, call in members.items())
    if not reference or not others:
        return Verdict.UNKNOWN, "no two members with an output"
    for rank, outputs in others:
        for slot in sorted({*reference, *outputs}):
            if slot not in outputs or slot not in reference:
                return Verdict.UNKNOWN, f"{slot} is not there on every rank"
            if not outputs[slot].like(reference[slot]):
                return Verdict.VIOLATED, f"{slot}: rank{first} and rank{rank} differ"
    return Verdict.HOLDS, ""


def sent_unchanged(members: Members) -> Found:
    """What is sent is still there afterwards."""
    for rank, call in members.items():
        before, after = call.slots.get("input.0"), call.slots.get("output.0")
        if before is None or after is None:
            return Verdict.UNKNOWN, f"rank{rank} has not both input.0 and output.0"
        if not after.like(before):
            return Verdict.VIOLATED, f"rank{rank}: output.0 is not input.0"
    return Verdict.HOLDS, ""


def elements_kept(members: Members) -> Found:
    """Together the outputs hold the elements of the inputs: the largest and the smallest are the same."""
    inputs = [call.slots.get("input.1") for call in members.values()]
    outputs = [call.slots.get("output.0") for call in members.values()]
    before, after = _extremes(inputs), _extremes(outputs)
    if before is None or after is None:
        return Verdict.UNKNOWN, "not every member has its input and its output"
    if before != after:
        return Verdict.VIOLATED, f"max and min of the inputs {before}, of the outputs {after}"
    return Verdict.HOLDS, ""


def _extremes(tensors: Sequence[Measured | None]) -> tuple[float, float] | None:
    known = [tensor.numbers for tensor in tensors if tensor is not None]
    if len(known) < len(tensors) or not all(math.isfinite(number) for numbers in known for number in numbers[:2]):
        return None
    return max(numbers[0] for numbers in known), min(numbers[1] for numbers in known)


def cannot_be_seen(members: Members) -> Found:
    """Parts of a reduction have no statistics in common with the inputs."""
    return Verdict.UNKNOWN, "statistics do not show it"


_SAME = "the same output on every rank of the group"
_PARTS = "outputs are the parts of the reduced inputs"
EXPECTED: dict[str, tuple[str, Callable[[Members], Found]]] = {
    "all_reduce": (_SAME, outputs_agree),
    "all_gather": (_SAME, outputs_agree),
    "all_gather_into_tensor": (_SAME, outputs_agree),
    "broadcast": (_SAME, outputs_agree),
    "reduce_scatter": (_PARTS, cannot_be_seen),
    "reduce_scatter_tensor": (_PARTS, cannot_be_seen),
    "isend": ("output is the input", sent_unchanged),
    "irecv": ("output is what the other rank sent", outputs_agree),
    "all_to_all_single": ("outputs are the inputs, cut and put together", elements_kept),
}


def relation_sheet(ranks: Mapping[int, Sequence[Communication]]) -> Sheet | None:
    """A row for each call of a group with what is expected and whether it holds on either side; None without such calls."""
    rows = list(_rows(ranks))
    return Sheet(SHEET_NAME, COLUMNS, rows) if rows else None


def _rows(ranks: Mapping[int, Sequence[Communication]]) -> Iterator[Row]:
    for api, group, members in _matched(ranks):
        text, check = EXPECTED[api]
        found = [check({rank: call.sides[side] for rank, call in members.items()}) for side in range(len(SIDES))]
        absent = [rank for rank in group if rank not in members]
        if absent:
            found = [(verdict if verdict is Verdict.VIOLATED else Verdict.UNKNOWN, told) for verdict, told in found]
        details = [f"{side}: {told}" for side, (_, told) in zip(SIDES, found, strict=True) if told]
        details += [f"no such row: {', '.join(f'rank{rank}' for rank in absent)}"] if absent else []
        name = next(call.name for call in members.values() if call.api == api)
        verdicts = [verdict for verdict, _ in found]
        cells = (name, str(list(group)), text, *(verdict.value for verdict in verdicts), "; ".join(details))
        yield cells, Colour.RED if Verdict.VIOLATED in verdicts else None


def _matched(
    ranks: Mapping[int, Sequence[Communication]],
) -> Iterator[tuple[str, tuple[int, ...], Matched]]:
    """The ranks of each group with the call that is the same for all of them: the n-th of its kind within this group."""
    matched: dict[tuple[str, tuple[int, ...], int], Matched] = {}
    sent: dict[tuple[int, ...], list[Communication]] = {}
    for rank, calls in ranks.items():
        times: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for call in calls:
            group = _ranks_of(call, rank, tuple(ranks))
            key = (call.api, group, times[call.api, group])
            times[call.api, group] += 1
            matched.setdefault(key, {})[rank] = call
            if call.api == "isend" and call.partner is not None:
                sent.setdefault((rank, call.partner), []).append(call)
    for (api, group, number), members in matched.items():
        senders = sent.get(group, []) if api == "irecv" else []
        yield api, group, ({group[0]: senders[number]} if number < len(senders) else {}) | members


def _ranks_of(call: Communication, rank: int, everyone: tuple[int, ...]) -> tuple[int, ...]:
    if call.api == "isend":
        return (rank,)
    if call.api == "irecv":
        return (rank,) if call.partner is None else (call.partner, rank)
    if call.group is None:
        return everyone
    return call.group or (rank,)
