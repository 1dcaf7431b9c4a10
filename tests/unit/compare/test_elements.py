"""Two tensors element by element: numbers small enough to check by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.compare.elements import RELATIVE_EDGES, ULP_EDGES, Elements, elements_at, survey
from ulpscope.compare.metrics import contrast
from ulpscope.model.dtypes import DTYPES


def elements(values: Any, dtype: str = "float32") -> Elements:
    array = np.asarray(values, dtype=dtype)
    return Elements(memoryview(array.tobytes()), DTYPES[dtype], array.shape)


def test_the_worst_elements_come_first_with_index_values_and_errors() -> None:
    found = survey(elements([[1, 2], [4, 8]]), elements([[1, 2.5], [3, 8]]), worst=1)
    (worst,) = found.worst
    assert (worst.place, worst.index, worst.reference, worst.target) == (2, (1, 0), 4.0, 3.0)
    assert (worst.error, worst.relative, worst.ulps) == (1.0, 0.25, 2.0**21)
    assert [each.place for each in found.first_off] == [1]
    assert (found.count, found.off) == (4, 2)


@pytest.mark.parametrize(("by", "place"), [("abs", 3), ("rel", 0), ("ulp", 0)])
def test_what_is_worst_depends_on_the_measure(by: str, place: int) -> None:
    found = survey(elements([1, 10, 10, 100]), elements([2, 11, 10, 120]), by=by)
    assert found.worst[0].place == place


def test_of_equal_errors_the_first_is_told() -> None:
    found = survey(elements(np.zeros(200_000)), elements(np.ones(200_000)), worst=3)
    assert [each.place for each in found.worst] == [0, 1, 2]


def test_an_element_is_off_beyond_the_absolute_and_relative_part_together() -> None:
    reference, target = elements([0.0, 1.0, 1.0, 100.0]), elements([0.1, 1.1, 1.21, 110.0])
    assert survey(reference, target).off == 4
    assert [each.place for each in survey(reference, target, atol=0.125).first_off] == [2, 3]
    assert [each.place for each in survey(reference, target, atol=0.125, rtol=0.125).first_off] == []
    # rtol alone excuses nothing where the reference is 0.
    assert [each.place for each in survey(reference, target, rtol=0.25).first_off] == [0]


def test_what_is_not_finite_is_equal_to_itself_and_off_by_infinity_from_all_else() -> None:
    nan, inf = math.nan, math.inf
    found = survey(
        elements([nan, nan, 1.0, inf, inf, -inf, inf]), elements([nan, 1.0, nan, inf, -inf, 1.0, 3.0]), rtol=0.1
    )
    assert [each.place for each in found.first_off] == [1, 2, 4, 5, 6]
    assert all(each.error == each.relative == each.ulps == inf for each in found.first_off)
    assert (found.ulps[0], found.ulps[-1], found.relatives[0], found.relatives[-1]) == (2, 5, 2, 5)


def test_errors_are_counted_by_class() -> None:
    step = 2.0**-23
    target = [1.0, 1 + step, 1 + 2 * step, 1 + 3 * step, 1 + 4 * step, 1 + 5 * step, 3.0]
    found = survey(elements(np.ones(7)), elements(target))
    assert dict(zip(ULP_EDGES, found.ulps, strict=False)) == dict.fromkeys(ULP_EDGES, 0) | {
        0: 1,
        1: 1,
        2: 1,
        4: 2,
        16: 1,
    }
    assert found.ulps[len(ULP_EDGES)] == 1
    assert sum(found.relatives) == 7 and found.relatives[len(RELATIVE_EDGES)] == 1


def test_where_the_error_sits_is_told_for_every_dimension() -> None:
    reference = np.zeros((4, 6, 5))
    target = reference.copy()
    target[2, 1:4, [0, 4]] = 1.0
    found = survey(elements(reference), elements(target))
    assert [(each.length, each.off, each.first, each.last) for each in found.extents] == [
        (4, 1, 2, 2),
        (6, 3, 1, 3),
        (5, 2, 0, 4),
    ]
    assert survey(elements(reference), elements(reference)).extents == ()


def test_the_map_has_the_largest_error_of_every_block() -> None:
    target = np.zeros((32, 96))
    target[31, 95], target[0, 0], target[1, 1] = 3.0, 1.0, 2.0
    blocks = np.array(survey(elements(np.zeros((32, 96))), elements(target)).blocks)
    assert blocks.shape == (16, 48)
    assert (blocks[0, 0], blocks[15, 47], blocks.sum()) == (2.0, 3.0, 5.0)


def test_large_integers_keep_every_digit() -> None:
    (worst,) = survey(elements([2**53 + 1], "int64"), elements([2**53], "int64")).worst
    assert (worst.reference, worst.target, worst.error) == (2**53 + 1, 2**53, 1.0)


def test_one_number_empty_tensors_and_types_of_two_kinds() -> None:
    (worst,) = survey(elements(1.0), elements(2.0)).worst
    assert (worst.index, worst.error) == ((), 1.0)
    assert survey(elements(np.zeros((0, 3))), elements(np.zeros((0, 3)))).off == 0
    assert survey(elements([1.0, 2.0], "float16"), elements([1, 3], "int64")).off == 1
    assert survey(elements([1j], "complex64"), elements([2j], "complex64")).worst[0].error == 1.0
    with pytest.raises(ValueError, match="not equally many"):
        survey(elements([1.0]), elements([1.0, 2.0]))


def test_elements_can_be_had_by_their_place() -> None:
    first, second = elements_at(elements([1, 2]), elements([1, 4]), [1, 0])
    assert (first.place, first.error, second.error) == (1, 2.0, 0.0)


@given(
    st.lists(
        st.tuples(st.floats(width=32), st.floats(width=32)),
        min_size=1,
        max_size=60,
    )
)
def test_the_survey_agrees_with_the_metrics(pairs: list[tuple[float, float]]) -> None:
    r, t = (np.array(side, dtype=np.float32) for side in zip(*pairs, strict=True))
    found, known = survey(elements(r), elements(t), worst=60), contrast(r, t)
    assert found.off == known.differing == len(found.worst)
    assert found.ulps[0] == found.relatives[0] == known.count - known.differing
    finite = [each for each in found.worst if each.error < math.inf]
    if finite:
        assert (finite[0].error, finite[0].place) == (known.max_abs, known.max_abs_index)
        assert max(each.ulps for each in finite) == known.max_ulp
