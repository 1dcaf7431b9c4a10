"""The files of msprobe's first-difference search: every rank's calls with their rows, and the calls where it begins.

The files have msprobe's shape; who is first is decided by `analyze`. Rows are statistics or checksums, as there, also
where elements were compared. A rank's file is written while its calls are compared.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ulpscope.compare.comparison import CallComparison, Comparison
from ulpscope.compare.engine import Options, compare_dumps
from ulpscope.compare.rules import Kind
from ulpscope.compare.runs import Unit, executor_for
from ulpscope.compare.values import Values
from ulpscope.findings.divergence import Search
from ulpscope.findings.exchange import KIND
from ulpscope.findings.model import Divergence, Finding, Status
from ulpscope.findings.ranks import Origin, origin
from ulpscope.model.records import CallRecord, Phase, Role, Slot, Value
from ulpscope.report.legacy import STACK, TABLES, Table, rows, table_for
from ulpscope.report.table import replacing
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump

_SAME = frozenset({Status.IDENTICAL, Status.ROUNDING})
_NUMBERS = ("max", "min", "mean", "l2norm")
_SHOWN = {Kind.STATISTICS: tuple(f"NPU {name}" for name in _NUMBERS), Kind.CHECKSUMS: ("NPU MD5",)}
_PEER = "NPU P2POp peer"
_GRADIENTS = "Requires_grad Consistent"
_NOTHING, _NO_STACK = "None", "N/A"
_TRUTHS = {"True": True, "False": False}
_ORDER = {Role.INPUT: 0, Role.PARAMETERS: 1, Role.OUTPUT: 2}


@dataclass(frozen=True, slots=True)
class Written:
    """What was found and the files that say it. `analysis` is None where nothing differs: msprobe writes none either.

    `compared` calls are in both dumps, and `unknown` of their values could not be compared."""

    origin: Origin
    ranks: tuple[Path, ...]
    analysis: Path | None
    compared: int = 0
    unknown: int = 0


def write_first_difference(
    units: Sequence[Unit], folder: Path, *, timestamp: str, options: Options | None = None
) -> Written:
    """Compares every unit, several at a time, and writes the files of all."""
    options = options or Options()
    jobs = options.jobs or os.cpu_count() or 1
    if len(units) > 1 and jobs > 1:
        options = replace(options, jobs=1)
    several = len({unit.step for unit in units}) > 1
    work = partial(write_rank, folder=folder, timestamp=timestamp, options=options, name_step=several)
    executor = executor_for(len(units), jobs)
    paths: list[Path] = []
    compared = unknown = 0

    def divergences() -> Iterator[Divergence]:
        nonlocal compared, unknown
        for path, found in executor.gather(executor.map(work, units)):
            paths.append(path)
            compared += found.calls - found.only_reference - found.only_target
            unknown += found.unknown_count
            yield found

    try:
        found = origin(divergences())
    finally:
        executor.close()
    return Written(found, tuple(paths), write_analysis(found, units, folder), compared, unknown)


def write_rank(
    unit: Unit, folder: Path, *, timestamp: str, options: Options | None = None, name_step: bool = False
) -> tuple[Path, Divergence]:
    """compare_result_rank{rank}_{timestamp}.json of one unit, and what its comparison came to."""
    step = f"step{unit.step}_" if name_step else ""
    path = folder / f"compare_result_{step}rank{unit.rank}_{timestamp}.json"
    cells = _Cells(open_dump(unit.reference), open_dump(unit.target))
    search = Search(unit.step, unit.rank, Values(cells.reference, cells.target))
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.write("{")
        between = "\n"
        for call in compare_dumps(cells.reference, cells.target, options):
            status = search.see(call)
            if call.match.target is None:
                continue
            entry = {"is_same": status in _SAME, "op_items": cells.items(call)}
            text = json.dumps({cells.target.name_of(call.match.target): entry}, indent=4, allow_nan=False)
            file.write(between + text[2:-2])
            between = ",\n"
        file.write("\n}")
    return path, search.result()


def write_analysis(found: Origin, units: Iterable[Unit], folder: Path) -> Path | None:
    """diff_analyze_{time in nanoseconds}.json with the calls where the difference begins, by rank; None for no such call."""
    if found.first is None:
        return None
    places = {(unit.step, unit.rank): unit for unit in units}
    content: dict[str, list[dict[str, Any]]] = {}
    for finding in (found.first, *found.also):
        unit = places[finding.step, finding.rank]
        cells = _Cells(open_dump(unit.reference), open_dump(unit.target))
        content.setdefault(f"rank_{finding.rank}", []).append(cells.finding(finding))
    path = folder / f"diff_analyze_{time.time_ns()}.json"
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=2, allow_nan=False), encoding="utf-8")
    return path


# --- rows -------------------------------------------------------------------------------------------------------


class _Cells:
    """The rows of calls as msprobe writes them to JSON."""

    def __init__(self, reference: Dump, target: Dump) -> None:
        self.reference, self.target = reference, target
        fitting = table_for(reference, target)
        self._table: Table = fitting if fitting.kind in _SHOWN else TABLES["statistics"]
        self._columns = self._table.header(stacks=False)

    def items(self, call: CallComparison) -> list[dict[str, Any]]:
        """The rows of a call that the target has."""
        made: list[dict[str, Any]] = []
        assert call.match.target is not None
        for each in _rows_of(call):
            shown = rows((replace(call, values=(each,)),), self._table, reference=self.reference, target=self.target)
            for row, _ in shown:
                item = {column: _plain(cell) for column, cell in zip(self._columns, row, strict=True)}
                item |= _truths(item, each)
                item[STACK] = _NO_STACK if made else self._stack(call.match.target) or _NO_STACK
                item["state"] = _state(call, each)
                item["api_origin_name"] = self.target.name_of(call.match.target)
                for word, key in (("op", "op"), ("peer", "peer")):
                    for side, value in (("NPU", each.target), ("Bench", each.reference)):
                        item[f"{side} P2POp {word}"] = _NOTHING if value is None else value.extra.get(key, _NOTHING)
                made.append(item)
        return made

    def finding(self, finding: Finding) -> dict[str, Any]:
        """An entry of diff_analyze."""
        call = finding.comparison.match.target
        assert call is not None
        told: dict[str, dict[str, Any]] = {Role.INPUT.value: {}, Role.OUTPUT.value: {}}
        for item in self.items(finding.comparison):
            side = Role.OUTPUT if item["state"] == Role.OUTPUT.value else Role.INPUT
            numbers = {column: item[column] for column in (*_SHOWN[self._table.kind], _PEER)}
            told[side.value][item["NPU Name"]] = numbers
        return {"op_name": self.target.name_of(call), "data_info": told, "stack_info": self._stack(call)}

    def _stack(self, call: CallRecord) -> list[str]:
        return [
            f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.text}"
            if frame.function
            else frame.file
            for frame in self.target.stack(call)
        ]


def _rows_of(call: CallComparison) -> list[Comparison]:
    """The values that have rows, in order. A message of a batch is its tensor; its op and peer are told beside it."""
    values = sorted(call.values, key=lambda each: _ORDER[each.slot.role])
    if call.match.call.id.kind != KIND:
        return values
    told: dict[tuple[object, ...], dict[str, Any]] = {}
    for each in values:
        value = each.target or each.reference
        if len(each.slot.path) == 3 and value is not None:
            told.setdefault(each.slot.path[:2], {})[str(each.slot.path[2])] = value.scalar
    messages = {place: facts for place, facts in told.items() if "op" in facts and "peer" in facts}
    found = []
    for each in values:
        facts = messages.get(each.slot.path[:2]) if len(each.slot.path) == 3 else None
        if facts is None:
            found.append(each)
        elif each.slot.path[2] == "tensor":
            found.append(_message(each, facts))
    return found


def _message(each: Comparison, facts: dict[str, Any]) -> Comparison:
    slot = Slot(each.slot.role, each.slot.path[:2])

    def told(value: Value | None) -> Value | None:
        return None if value is None else replace(value, slot=slot, extra={**value.extra, **facts})

    return replace(each, slot=slot, reference=told(each.reference), target=told(each.target))


def _state(call: CallComparison, each: Comparison) -> str:
    gradients = call.match.call.id.phase is Phase.PARAMETERS_GRAD
    return Phase.PARAMETERS_GRAD.value if gradients else each.slot.role.value


def _truths(item: dict[str, Any], each: Comparison) -> dict[str, Any]:
    """Cells that are texts in a sheet and truth values in JSON."""
    columns = [_GRADIENTS]
    for side, value in (("NPU", each.target), ("Bench", each.reference)):
        if value is not None and value.type == "bool":
            columns += [f"{side} {name}" for name in _NUMBERS]
    return {column: _TRUTHS.get(item[column], item[column]) for column in columns if column in item}


def _plain(cell: Any) -> Any:
    """RFC 8259 has no NaN and no Infinity: they become texts."""
    return repr(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell
