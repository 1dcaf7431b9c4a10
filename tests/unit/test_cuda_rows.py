"""What a device answers becomes the same rows in C and in Python. No device is needed."""

from typing import Any

import numpy as np
import pytest
import torch

from ulpscope.frameworks.torch.cuda_rows import (
    ABOUT,
    ANSWER,
    BOOLEAN,
    BUCKETS,
    DOUBLE,
    FLOAT,
    HEAD,
    Room,
    plain_rows_of,
    rows_of,
)
from ulpscope.native import measuring, taps

pytestmark = pytest.mark.skipif(taps.C is None, reason="the extension was not built")

ODD = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, -5e-324, 1.8e308, 2.0**-901, 2.0**-899, 1e-310])


def keys(values: Any) -> Any:
    """Integers in the order of the values, as kernels give them."""
    bits = values.view(np.int64)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


def answers(count: int, flags: int) -> tuple[Any, Any]:
    random = np.random.default_rng(count)
    words = random.integers(-(1 << 63), 1 << 63, (count, ANSWER), dtype=np.int64)
    about = np.zeros(count, dtype=ABOUT)
    about["kind"] = random.integers(FLOAT, BOOLEAN + 1, count)
    about["flags"] = flags
    about["sketch"] = (
        np.where(random.random(count) < 0.8, BUCKETS, random.integers(0, BUCKETS, count))
        if flags & measuring.SKETCH
        else 0
    )
    about["zeros"] = random.integers(0, 1 << 32, count)
    floats = about["kind"] <= DOUBLE
    for column in (0, 1):
        words[:, column] = np.where(floats, keys(random.choice(ODD, count)), words[:, column])
    for column in (2, 3, 8, 9):
        words[:, column] = np.abs(random.choice(ODD, count)).view(np.int64)
    words[:, 4:8] = random.integers(0, 3, (count, 4))
    words[:, 10] = random.integers(0, 1 << 32, count)
    about["numel"] = random.integers(0, 6, count)
    return words, about


@pytest.mark.parametrize(
    "flags",
    [
        measuring.STATS,
        measuring.STATS | measuring.SKETCH,
        measuring.STATS | measuring.CRC,
        measuring.CRC,
        measuring.STATS | measuring.SKETCH | measuring.CRC,
    ],
)
@pytest.mark.parametrize("count", [1, 2, 700])
def test_rows_are_the_same_in_c_and_in_python(count: int, flags: int) -> None:
    words, about = answers(count, flags)
    rows, sketches = rows_of(words, about, Room(count))
    plain, plain_sketches = plain_rows_of(words, about, Room(0))
    for name in rows.dtype.names or ():
        assert rows[name].tobytes() == plain[name].tobytes(), name
    assert bytes(sketches) == plain_sketches


def test_what_does_not_agree_is_refused() -> None:
    assert taps.C is not None
    words, about = answers(3, measuring.STATS | measuring.SKETCH)
    for there, rows, sketches in ((words[:2], 3, 3), (words, 2, 3), (words, 3, 1)):
        with pytest.raises(ValueError, match="do not agree"):
            taps.C.rows_of(there, about, Room(rows).rows, Room(sketches).sketches)
    about["sketch"][1] = 2 * (ANSWER - HEAD) + 1
    with pytest.raises(ValueError, match="do not agree"):
        taps.C.rows_of(words, about, Room(3).rows, Room(9).sketches)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_copies_are_left_to_torch() -> None:
    assert taps.C is not None
    assert taps.C.copy_back(0, 0, 0, 0, 0) is False
