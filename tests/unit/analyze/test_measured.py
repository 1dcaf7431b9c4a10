"""The table of what right kernels do, and what `ulpscope calibrate` makes of the rows of a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from ulpscope.analyze.calibrate import kept, table_of, unusual
from ulpscope.analyze.habits import BOUND
from ulpscope.analyze.limits import limit, theory
from ulpscope.analyze.measured import MARGIN, Kernel, read_table, shipped, write_table
from ulpscope.model.errors import DumpError
from ulpscope.store.ledger_file import Measure, Row


def row(*measures: Measure, op: str = "aten.exp.default", device: str = "cpu") -> Row:
    return Row(0, 0, 0, "forward", op, "float32", 0, "map", measures=measures, device=device)


def measure(rms: float = 0.3, worst: float = 1.0, **fields: object) -> Measure:
    return Measure(0, "float32", (32, 32), 1, rms, worst, **fields)  # type: ignore[arg-type]


def test_a_table_holds_the_largest_of_each_error_as_multiples_of_theory(tmp_path: Path) -> None:
    allowed = theory(row(), measure())
    table = table_of([row(measure(rms=allowed.rms / 2)), row(measure(worst=3 * allowed.worst), op="aten.exp_.default")])
    assert table == {("exp", "float32", "cpu", 0): Kernel(2, 0.5, 3.0, 0.0, 0.0)}
    write_table(tmp_path / "t.tsv", table, ["somewhere"])
    assert read_table(tmp_path / "t.tsv") == table


def test_the_shipped_table_is_small_and_only_widens_limits() -> None:
    table = shipped()
    assert len(table) > 500
    assert {dtype for _, dtype, _, _ in table} >= {"float32", "bfloat16", "float16"}
    found = row(measure(), op="aten.mul.Tensor")
    assert limit(found, measure()).rms >= theory(found, measure()).rms
    assert not limit(found, measure()).assumed


@pytest.mark.parametrize(
    "line", ["exp\tfloat32", "exp\tfloat32\tcpu\t0\t1\ta\t0\t0\t0", "exp\tfloat32\tcpu\t0\t1\t0\t0"]
)
def test_what_is_no_line_of_a_table_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text(line + "\n")
    with pytest.raises(DumpError, match="line 1 is no line of a table of kernels"):
        read_table(tmp_path / "t.tsv")


def test_a_wrong_kernel_does_not_widen_its_own_limit() -> None:
    wrong = {("exp", "float32", "cuda", 0): Kernel(9, 500.0, 500.0, 500.0, 1.0)}
    most = kept(wrong)["exp", "float32", "cuda", 0]
    assert max(most.rms, most.worst, most.lean) * MARGIN == pytest.approx(BOUND)


def test_what_is_worse_here_than_elsewhere_is_unusual() -> None:
    elsewhere = {("exp", "float32", "cpu", 0): Kernel(9, 1.0, 2.0, 0.1, 0.0)}
    as_there = {("exp", "float32", "cuda", 0): Kernel(9, 1.2, 2.5, 0.5, 0.0)}
    worse = {("exp", "float32", "cuda", 0): Kernel(9, 1.2, 3.5, 0.5, 0.0)}
    assert not list(unusual(as_there, elsewhere))
    ((key, text),) = unusual(worse, elsewhere)
    assert (key[0], text) == ("exp", "one element is off by 3.5 times what theory allows, elsewhere at most 3")
