"""Three of the programs of tests/strangers, built on libraries that nobody here wrote; `make strangers` runs all of them."""

import importlib.util
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "strangers" / "run.py"
_spec = importlib.util.spec_from_file_location("strangers_run", RUN)
assert _spec is not None and _spec.loader is not None
strangers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(strangers)


@pytest.mark.parametrize("name", ["lion_ema", "vector_quantize", "zuko_flow"])
def test_a_program_on_a_library_is_the_same_agrees_with_itself_and_is_not_accused(name: str, tmp_path: Path) -> None:
    trial = strangers.Trial(name, sys.executable, tmp_path / name)
    assert {check: getattr(trial, check)() or None for check in strangers.CHECKS} == dict.fromkeys(strangers.CHECKS)
