"""The result tables of the older tools: their columns, and the function from compared calls to rows.

`npu` and `bench` are the words of these tables for target and reference. What only the reference has is not in them.
Verdicts and marks are made in compare/rules.py; here they become cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from ulpscope.compare.comparison import CallComparison, Comparison, How
from ulpscope.compare.rules import Kind, Mark, marks
from ulpscope.model.names import MODULE
from ulpscope.model.records import CallRecord, Phase, Role, Value
from ulpscope.report.legacy_cells import (
    Cells,
    Side,
    checksum_cells,
    element_cells,
    is_shown,
    marked_by,
    side_of,
    statistic_cells,
    usual_statistic_row,
)
from ulpscope.report.table import Cell, Colour, Row
from ulpscope.store.dump import Dump

STACK = "NPU_Stack_Info"
_COMMON = (
    "NPU Name",
    "Bench Name",
    "NPU Dtype",
    "Bench Dtype",
    "NPU Tensor Shape",
    "Bench Tensor Shape",
    "NPU Requires_grad",
    "Bench Requires_grad",
)
_STATISTICS = (
    "NPU max",
    "NPU min",
    "NPU mean",
    "NPU l2norm",
    "Bench max",
    "Bench min",
    "Bench mean",
    "Bench l2norm",
)
_METRICS = (
    "Cosine",
    "EucDist",
    "MaxAbsErr",
    "MaxRelativeErr",
    "One Thousandth Err Ratio",
    "Five Thousandths Err Ratio",
)
_DIFFERENCES = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
_RELATIVE = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
_OLD_NAMES = (
    "NPU Name",
    "Bench Name",
    "NPU Tensor Dtype",
    "Bench Tensor Dtype",
    "NPU Tensor Shape",
    "Bench Tensor Shape",
)
_SAME = {"NPU Tensor Dtype": "NPU Dtype", "Bench Tensor Dtype": "Bench Dtype"}
# All cells a kind of row has, in the order in which they are made.
_WIDE: dict[Kind, tuple[str, ...]] = {
    Kind.ELEMENTS: (
        *_COMMON,
        *_METRICS,
        *_STATISTICS,
        "Requires_grad Consistent",
        "Accuracy Reached or Not",
        "Err_message",
        STACK,
        "Data_name",
        "RMSE",
        "MAPE",
    ),
    Kind.STATISTICS: (
        *_COMMON,
        *_DIFFERENCES,
        *_RELATIVE,
        *_STATISTICS,
        "Requires_grad Consistent",
        "Result",
        "Err_message",
        STACK,
    ),
    Kind.CHECKSUMS: (*_COMMON, "NPU MD5", "BENCH MD5", "Requires_grad Consistent", "Result", STACK),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of an older tool: what it rests on, and its columns with the stack."""

    kind: Kind
    columns: tuple[str, ...]

    def header(self, *, stacks: bool) -> tuple[str, ...]:
        """The columns as they are written."""
        return self.columns if stacks else tuple(column for column in self.columns if column != STACK)


TABLES: dict[str, Table] = {
    "real data": Table(Kind.ELEMENTS, _WIDE[Kind.ELEMENTS][:-2]),
    "statistics": Table(Kind.STATISTICS, _WIDE[Kind.STATISTICS]),
    "md5": Table(Kind.CHECKSUMS, _WIDE[Kind.CHECKSUMS]),
    "ptdbg": Table(
        Kind.ELEMENTS,
        (
            *_OLD_NAMES,
            *(column for column in _METRICS if column != "EucDist"),
            *_STATISTICS,
            "Accuracy Reached or Not",
            "Err_message",
            STACK,
        ),
    ),
    "ptdbg statistics": Table(Kind.STATISTICS, (*_OLD_NAMES, *_DIFFERENCES, *_STATISTICS, STACK)),
    "hooks": Table(Kind.ELEMENTS, (*_OLD_NAMES, "Cosine", "RMSE", "MAPE")),
}


def table_for(reference: Dump, target: Dump) -> Table:
    """The table of msprobe that fits two dumps: the best that both can fill."""
    dumps = (reference, target)
    if all(dump.manifest.config.get("tensors") or dump.manifest.config.get("task") == "tensor" for dump in dumps):
        return TABLES["real data"]
    return TABLES["md5" if all(map(_asked_for_checksums, dumps)) else "statistics"]


def _asked_for_checksums(dump: Dump) -> bool:
    """A native dump always has checksums; one of msprobe has them when they, and not statistics, were asked for."""
    if dump.recorded_by != "msprobe":
        return False
    values = (value for call in dump.calls() for value in call.values)
    # A call without a checksum says nothing where it has no tensor with elements.
    return any(value.checksum is not None for value in islice(filter(_has_elements, values), 1))


def _has_elements(value: Value) -> bool:
    return value.shape is not None and 0 not in value.shape


# --- rows -------------------------------------------------------------------------------------------------------

_CELLS: dict[Kind, Callable[[Comparison, Side, Side | None], Cells]] = {
    Kind.ELEMENTS: element_cells,
    Kind.STATISTICS: statistic_cells,
    Kind.CHECKSUMS: checksum_cells,
}
_COLOURS = {Mark.RED: Colour.RED, Mark.YELLOW: Colour.YELLOW, None: None}
_NO_STACK = "N/A"
_ORDER = {Role.INPUT: 0, Role.PARAMETERS: 1, Role.OUTPUT: 2}


def rows(
    calls: Iterable[CallComparison],
    table: Table,
    *,
    reference: Dump,
    target: Dump,
    stacks: bool = False,
    highlight: bool = False,
) -> Iterator[Row]:
    """A row for each value of the target, in its order; `highlight` colours them and adds the reasons to Err_message."""
    wide = _WIDE[table.kind]
    header = table.header(stacks=stacks)
    places = [wide.index(_SAME.get(column, column)) for column in header]
    whole = header == wide
    chosen: Callable[[tuple[Cell, ...]], tuple[Cell, ...]] = itemgetter(*places)
    stack_of = _Stacks(target) if stacks else None
    message = wide.index("Err_message") if "Err_message" in wide else None
    cells_of = _CELLS[table.kind]
    for call in calls:
        if call.match.target is None:
            continue
        stack = stack_of.text(call.match.target) if stack_of is not None else _NO_STACK
        if not highlight or message is None:
            for row in _plain_rows(call, table.kind, reference, target, stack):
                yield row if whole else chosen(row), None
            continue
        made = [
            (comparison, cells_of(comparison, ours, theirs))
            for comparison, ours, theirs in _sides(call, _in_order(call), table.kind, reference, target)
        ]
        for (_, cells), (mark, reasons) in zip(made, _marked(made, table.kind), strict=True):
            row = cells.row(stack)
            if mark is not None:
                said = "\n".join(filter(None, (str(row[message]), *reasons)))
                row = (*row[:message], said, *row[message + 1 :])
            yield row if whole else chosen(row), _COLOURS[mark]
            stack = _NO_STACK


def _plain_rows(
    call: CallComparison, kind: Kind, reference: Dump, target: Dump, stack: str
) -> Iterator[tuple[Cell, ...]]:
    """The rows of a call without marks; the first has the stack."""
    cells_of = _CELLS[kind]
    ours, theirs = call.match.target, call.match.reference
    assert ours is not None
    quick = kind is Kind.STATISTICS and theirs is not None
    if quick and theirs is not None:
        names = target.name_of(ours), reference.name_of(theirs)
        ids = ours.id, theirs.id
    for comparison in _in_order(call):
        value, counterpart = comparison.target, comparison.reference
        row = None
        if quick and value is not None and counterpart is not None and comparison.match is call.match:
            row = usual_statistic_row(names, ids, (value, counterpart), stack)
        if row is None:
            for _, side, other in _sides(call, (comparison,), kind, reference, target):
                row = cells_of(comparison, side, other).row(stack)
        if row is not None:
            yield row
            stack = _NO_STACK


def _sides(
    call: CallComparison, comparisons: Sequence[Comparison], kind: Kind, reference: Dump, target: Dump
) -> Iterator[tuple[Comparison, Side, Side | None]]:
    ours, theirs = call.match.target, call.match.reference
    assert ours is not None
    name = target.name_of(ours)
    other = "" if theirs is None else reference.name_of(theirs)
    for comparison in comparisons:
        value, counterpart = comparison.target, comparison.reference
        if value is None or (value.shape is None and not is_shown(value)):
            continue
        side = side_of(name, ours.id, value, kind)
        if counterpart is None or _kept_apart(comparison, value, counterpart, kind):
            yield comparison, side, None
        elif comparison.match is call.match and theirs is not None:
            yield comparison, side, side_of(other, theirs.id, counterpart, kind, side if other == name else None)
        else:
            # A mapping file takes a value from another call.
            found = comparison.match.reference
            assert found is not None
            yield comparison, side, side_of(reference.name_of(found), found.id, counterpart, kind)


def _in_order(call: CallComparison) -> Sequence[Comparison]:
    """Parameters stand between inputs and outputs."""
    if call.match.call.id.kind != MODULE:
        return call.values
    return sorted(call.values, key=lambda comparison: _ORDER[comparison.slot.role])


def _kept_apart(comparison: Comparison, ours: Value, theirs: Value, kind: Kind) -> bool:
    """Whether two values of one name are no pair: other shapes are not, unless a user or the table says what they are."""
    if ours.shape == theirs.shape:
        return False
    if ours.shape is None or theirs.shape is None:
        return True
    return kind is not Kind.ELEMENTS and comparison.match.how is not How.MAPPING


def _marked(made: Sequence[tuple[Comparison, Cells]], kind: Kind) -> list[tuple[Mark | None, tuple[str, ...]]]:
    is_output = [
        comparison.slot.role is Role.OUTPUT and comparison.match.call.id.phase is not Phase.DEBUG
        for comparison, _ in made
    ]
    values = [marked_by(comparison, cells) for comparison, cells in made]
    inputs = [value for value, output in zip(values, is_output, strict=True) if not output]
    found = marks(inputs, [value for value, output in zip(values, is_output, strict=True) if output], kind)
    of_inputs, of_outputs = iter(found[: len(inputs)]), iter(found[len(inputs) :])
    return [next(of_outputs if output else of_inputs) for output in is_output]


class _Stacks:
    """The stacks of calls as texts; calls from one place share one."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._texts: dict[int, str] = {}

    def text(self, call: CallRecord) -> str:
        """The frames of a call as msprobe writes them; N/A where there are none."""
        if call.stack is None:
            return _NO_STACK
        found = self._texts.get(call.stack)
        if found is None:
            frames = [
                f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.text}"
                if frame.function
                else frame.file
                for frame in self._dump.stack(call)
            ]
            found = self._texts[call.stack] = str(frames) if frames else _NO_STACK
        return found
