"""Folders of tensors: what is paired with what, and the numbers of the kernel comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cann_files import MOMENT, Stored, file_name, to_nc1hwc0, write_kernel
from ulpscope.compare.kernels import TensorPair, compare_folders
from ulpscope.model.errors import DumpError
from ulpscope.report.kernels import COLUMNS, kernel_rows
from ulpscope.store.formats.cann_npy import convert_kernel
from ulpscope.store.tensor_folder import read_folder


def values(*numbers: float) -> Stored:
    return Stored(np.array(numbers, dtype=np.float32))


def pairs(tmp_path: Path) -> list[TensorPair]:
    """The pairs of the folders `reference` and `target`."""
    return list(compare_folders(read_folder(tmp_path / "reference"), read_folder(tmp_path / "target")))


def cells(tmp_path: Path) -> dict[str, Any]:
    """The only row, by column; of columns of the same name the last."""
    (row,) = kernel_rows(pairs(tmp_path))
    return dict(zip(COLUMNS, row[0], strict=True))


def test_the_ten_measures_of_a_pair(tmp_path: Path) -> None:
    write_kernel(tmp_path / "reference", [], [values(1, 2, 3, 4)])
    write_kernel(tmp_path / "target", [], [values(1, 2, 3, 5)])
    row = cells(tmp_path)
    assert row["CosineSimilarity"] == f"{34 / np.sqrt(30 * 39):.6f}"
    assert row["MaxAbsoluteError"] == "1.000000"
    assert row["AccumulatedRelativeError"] == row["MaxRelativeError"] == "0.250000"
    assert row["RelativeEuclideanDistance"] == f"{1 / np.sqrt(30):.6f}"
    # The distributions are 0, 1, 2, 4 sevenths and 0, 1, 2, 3 sixths.
    assert row["KullbackLeiblerDivergence"] == f"{3 / 7 * np.log(6 / 7) + 4 / 7 * np.log(8 / 7):.6f}"
    assert row["StandardDeviation"] == "(2.750;1.479),(2.500;1.118)"
    assert (row["MeanAbsoluteError"], row["RootMeanSquareError"]) == ("0.250000", "0.500000")
    assert row["MeanRelativeError"] == "0.062500"
    assert (row["OpType"], row["NPUDump"], row["GroundTruth"]) == ("Add", "add_1", "add_1")
    assert (row["TensorIndex"], row["Shape"], row["DataType"], row["Address"]) == (
        "add_1:output:0",
        "[4]",
        "float32",
        4096,
    )
    assert row["CompareFailReason"] == ""


def test_layouts_are_put_back_before_they_are_compared(tmp_path: Path) -> None:
    x = np.arange(1, 13, dtype=np.float16).reshape(1, 3, 2, 2)
    write_kernel(tmp_path / "reference", [], [Stored(x, "NCHW")])
    write_kernel(tmp_path / "target", [], [Stored(to_nc1hwc0(x), "NC1HWC0", origin=x.shape)])
    (pair,) = pairs(tmp_path)
    assert pair.measured is not None and pair.measured.contrast.differing == 0
    assert pair.shape == (1, 3, 2, 2)


def test_of_several_files_of_a_kernel_the_latest_counts(tmp_path: Path) -> None:
    for moment, number in ((MOMENT, 1), (MOMENT + 5, 2), (MOMENT + 3, 3)):
        write_kernel(tmp_path / "reference", [], [values(number)], moment=moment)
    write_kernel(tmp_path / "target", [], [values(2)], moment=MOMENT + 99)
    (pair,) = pairs(tmp_path)
    assert pair.measured is not None and pair.measured.contrast.differing == 0


def test_converted_arrays_pair_with_kernel_dumps(tmp_path: Path) -> None:
    dump = write_kernel(tmp_path / "reference", [], [values(1, 2)])
    (tmp_path / "target").mkdir()
    convert_kernel(dump, tmp_path / "target")
    np.save(tmp_path / "target" / "alone.npy", np.zeros(2, dtype=np.float32))
    found = {pair.key: pair for pair in pairs(tmp_path)}
    assert found["add_1", "output.0"].measured is not None
    assert found["alone", ""].reason == f"{tmp_path / 'reference'} has no such tensor"


def test_arrays_of_any_name_pair_by_it(tmp_path: Path) -> None:
    for side in ("reference", "target"):
        (tmp_path / side).mkdir()
        np.save(tmp_path / side / "Torch_add_0_forward_input.0.npy", np.ones(3, dtype=np.float32))
    (pair,) = pairs(tmp_path)
    assert (pair.key, pair.measured is not None) == (("Torch_add_0_forward_input.0", ""), True)


def test_what_cannot_be_compared_has_its_reason_and_stops_nothing(tmp_path: Path) -> None:
    for side in ("reference", "target"):
        write_kernel(tmp_path / side, [], [values(1, 2)], op_name="good")
        write_kernel(tmp_path / side, [], [values(*range(len(side)))], op_name="shape")
        write_kernel(tmp_path / side, [], [Stored(np.zeros((0,), np.float32))], op_name="empty")
        write_kernel(tmp_path / side, [Stored(np.ones(3, np.uint8), type_code=37)], [], op_name="type")
    (tmp_path / "target" / file_name(op_name="cut")).write_bytes(b"x" * 20)
    write_kernel(tmp_path / "reference", [], [values(1)], op_name="cut")
    (tmp_path / "reference" / file_name(op_name="both")).write_bytes(b"")
    found = {pair.key[0]: pair for pair in pairs(tmp_path)}
    assert found["good"].measured is not None
    assert found["shape"].reason == "the shapes are (9,) and (6,)"
    assert found["empty"].reason == "there is no element to compare"
    assert "FLOAT6" in found["type"].reason
    assert "Add.cut" in found["cut"].reason and "Add.both" in found["both"].reason
    rows = [row for row, _ in kernel_rows(found.values())]
    assert [row[10] for row in rows if row[-1]] == ["NaN"] * 5


def test_elements_that_are_not_finite_are_left_out_and_told(tmp_path: Path) -> None:
    write_kernel(tmp_path / "reference", [], [values(1, np.nan, 4)])
    write_kernel(tmp_path / "target", [], [values(1, 2, 5)])
    row = cells(tmp_path)
    assert (row["MaxAbsoluteError"], row["MeanAbsoluteError"], row["KullbackLeiblerDivergence"]) == (
        "1.000000",
        "0.500000",
        "NaN",
    )
    assert row["CompareFailReason"] == "1 of 3 elements are not finite, not at the same places; they are left out"


def test_a_zero_has_no_sign(tmp_path: Path) -> None:
    write_kernel(tmp_path / "reference", [], [values(-1e-5)])
    write_kernel(tmp_path / "target", [], [values(-1e-5)])
    assert cells(tmp_path)["StandardDeviation"] == "(0.000;0.000),(0.000;0.000)"


def test_a_difference_where_the_reference_is_zero_has_no_relative_size(tmp_path: Path) -> None:
    write_kernel(tmp_path / "reference", [], [values(0, 1)])
    write_kernel(tmp_path / "target", [], [values(1, 1)])
    row = cells(tmp_path)
    assert row["AccumulatedRelativeError"] == row["MaxRelativeError"] == row["MeanRelativeError"] == "inf"


def test_a_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="holds no tensor"):
        read_folder(tmp_path)
    inner = write_kernel(tmp_path / "20230818104735" / "0" / "1", [], [values(1)]).parent
    with pytest.raises(DumpError, match=f"There are some in {inner}"):
        read_folder(tmp_path)
    with pytest.raises(DumpError, match="is no folder"):
        read_folder(tmp_path / "no")
