"""One thread for every case, and a table of all cases at the end: `make torture`.

A case is the parameter `case` of a test, or its mark `case("name")`; its promise is the constant PROMISE of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

_TABLE = "--torture-table"
_FACTS = "torture case"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_TABLE, action="store_true", help="print which cases hold which promise")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(name): the case that a test of tests/torture is about")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        promise = getattr(getattr(item, "module", None), "PROMISE", None)
        if promise is None:
            continue
        if item.get_closest_marker("slow") and not config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="long; ask for it with -m slow"))
        marks = [mark.args[0] for mark in item.iter_markers("case")]
        params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        for name in [params["case"]] if "case" in params else marks:
            item.user_properties.append((_FACTS, (promise, name)))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption(_TABLE, default=False):
        return
    found: dict[tuple[str, str], list[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if outcome == "passed" and report.when != "call":
                continue
            for label, facts in getattr(report, "user_properties", ()):
                if label == _FACTS:
                    found.setdefault(tuple(facts), []).append(outcome)
    line = terminalreporter.write_line
    line("")
    for (promise, name), outcomes in sorted(found.items()):
        passed = outcomes.count("passed")
        word = "pass" if passed == len(outcomes) else "FAIL" if {"failed", "error"} & set(outcomes) else "not yet"
        line(f"{promise:<28} {name:<30} {word:<8} {passed}/{len(outcomes)}")
    held = sum(set(outcomes) == {"passed"} for outcomes in found.values())
    line(f"{held} of {len(found)} cases pass")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
