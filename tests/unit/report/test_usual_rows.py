"""The row that is made at once is the row that is made of two sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.compare.comparison import Comparison, Evidence, How, Level, Match, Verdict
from ulpscope.compare.rules import Kind
from ulpscope.model.names import parse_call
from ulpscope.model.records import Role, Slot, ToldStats, Value
from ulpscope.report.legacy_cells import side_of, statistic_cells, usual_statistic_row
from ulpscope.report.table import Cell

NAMES = "Functional.linear.0.forward", "Functional.linear.1.forward"
IDS = parse_call(NAMES[0]), parse_call(NAMES[1])
SLOT = Slot(Role.INPUT, (0,))
_numbers = st.one_of(st.floats(), st.floats(-10, 10), st.integers(-5, 5), st.none())
_values = st.builds(
    lambda dtype, shape, gradient, numbers: Value(
        SLOT,
        "torch.Tensor",
        dtype,
        shape,
        requires_grad=gradient,
        stats=None if numbers is None else ToldStats(6, *numbers),
    ),
    st.sampled_from(["torch.float32", "torch.float16", "torch.bool", None]),
    st.sampled_from([(2, 3), (6,), ()]),
    st.sampled_from([True, False, None]),
    st.one_of(st.none(), st.tuples(*[_numbers] * 4), st.tuples(*[st.floats(0.1, 9)] * 4)),
)


def whole_row(ours: Value, theirs: Value, names: tuple[str, str]) -> tuple[Cell, ...]:
    comparison = Comparison(
        Match(None, None, How.NAME), SLOT, theirs, ours, Evidence.STATISTICS, Verdict(Level.PASS, ())
    )
    sides = (
        side_of(name, call, value, Kind.STATISTICS)
        for name, call, value in zip(names, IDS, (ours, theirs), strict=True)
    )
    return statistic_cells(comparison, *sides).row("stack")


@given(_values, _values, st.sampled_from([NAMES, (NAMES[0], NAMES[0])]))
def test_the_row_made_at_once_is_that_of_two_sides(ours: Value, theirs: Value, names: tuple[str, str]) -> None:
    found = usual_statistic_row(names, IDS, (ours, theirs), "stack")
    if found is not None:
        assert repr(found) == repr(whole_row(ours, theirs, names))


def test_two_tensors_with_finite_numbers_have_such_a_row() -> None:
    ours, theirs = (
        Value(SLOT, "torch.Tensor", "torch.float32", (2, 3), stats=ToldStats(6, largest, -1.0, 0.5, 2.0))
        for largest in (3.0, 2.0)
    )
    found = usual_statistic_row((NAMES[0], NAMES[0]), IDS, (ours, theirs), "stack")
    assert found is not None
    assert found[8:16] == (1.0, 0.0, 0.0, 0.0, "50.0%", "0.0%", "0.0%", "0.0%")


@pytest.mark.parametrize("number", [0.0, None, float("nan"), float("inf")])
def test_a_number_that_cannot_be_divided_by_is_left_to_the_two_sides(number: float | None) -> None:
    ours, theirs = (
        Value(SLOT, "torch.Tensor", "torch.float32", (2, 3), stats=ToldStats(6, largest, -1.0, 0.5, 2.0))
        for largest in (3.0, number)
    )
    assert usual_statistic_row((NAMES[0], NAMES[0]), IDS, (ours, theirs), "stack") is None
