"""tools/conformance.py: which rows a test name serves, and the report made from that."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def conformance() -> ModuleType:
    # Loaded from its path: `tools` is no package, and tests/conformance has the same name.
    spec = importlib.util.spec_from_file_location("conformance_tool", ROOT / "tools" / "conformance.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_000_069_all_reduce_is_recorded", ["000-069"]),
        ("test_000_069", ["000-069"]),
        ("test_000_040_041_042_seed_all_seeds_everything", ["000-040", "000-041", "000-042"]),
        ("test_003_055_068", ["003-055", "003-068"]),
        ("test_002_026_1000_elements_get_noise", ["002-026"]),
        ("test_002_026_16_bit_floats_get_noise", ["002-026"]),
        ("test_002_words_without_a_row", []),
        ("test_0002_026_too_many_digits", []),
        ("test_a_sentence", []),
        ("helper_000_069", []),
    ],
)
def test_a_test_name_says_which_rows_it_serves(conformance: ModuleType, name: str, ids: list[str]) -> None:
    assert conformance.row_ids(name) == ids


def test_functions_coroutines_and_methods_are_found_in_the_order_of_the_text(conformance: ModuleType) -> None:
    source = """
class TestGroup:
    def test_000_001_in_a_class(self): ...

async def test_000_002_coroutine(): ...

def builder(): ...

def test_000_003_function(): ...
"""
    assert conformance.tests_in(source) == [
        "test_000_001_in_a_class",
        "test_000_002_coroutine",
        "test_000_003_function",
    ]


def test_rows_are_gathered_over_several_files(conformance: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_000_001_002_x(): ...\n", encoding="utf-8")
    (tmp_path / "test_b.py").write_text("def test_000_002_y(): ...\n", encoding="utf-8")
    assert conformance.tests_by_row(sorted(tmp_path.glob("test_*.py"))) == {
        "000-001": ["test_a.py::test_000_001_002_x"],
        "000-002": ["test_a.py::test_000_001_002_x", "test_b.py::test_000_002_y"],
    }


def test_the_report_counts_per_stage_and_marks_every_row(conformance: ModuleType) -> None:
    rows = [
        conformance.Row("000-001", "star import", "legacy"),
        conformance.Row("003-001", "compare command", "compare"),
        conformance.Row("000-002", "constructor", "legacy"),
    ]
    served = {"000-002": ["test_a.py::test_000_002_x"]}
    assert conformance.render(rows, served) == [
        "legacy: 1 of 2 rows have a test, 1 have none",
        "  - 000-001  star import",
        "  + 000-002  constructor  [test_a.py::test_000_002_x]",
        "compare: 0 of 1 rows have a test, 1 have none",
        "  - 003-001  compare command",
        "total: 1 of 3 rows have a test, 2 have none",
    ]
    assert "  + 000-002  constructor  [test_a.py::test_000_002_x]" not in conformance.render(
        rows, served, missing_only=True
    )


def test_a_test_that_names_an_unknown_row_is_reported(
    conformance: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.tsv").write_text("id\ttitle\tstage\n000-001\tstar import\tlegacy\n", encoding="utf-8")
    (tmp_path / "test_a.py").write_text("def test_000_999_x(): ...\n", encoding="utf-8")
    monkeypatch.setattr(conformance, "CONFORMANCE", tmp_path)
    assert conformance.main([]) == 0
    assert (
        capsys.readouterr().err == "rows.tsv has no row 000-999, named by test_a.py::test_000_999_x; correct the name\n"
    )


def test_the_table_is_sorted_without_gaps_in_its_cells(conformance: ModuleType) -> None:
    rows = conformance.read_rows(conformance.CONFORMANCE / "rows.tsv")
    ids = [row.id for row in rows]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch(r"00[0-4]-\d{3}", row.id) and row.title for row in rows)
    assert {row.stage for row in rows} == {"msprobe", "compare", "checks", "legacy"}
