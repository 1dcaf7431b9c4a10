"""An outcome for other readers than a terminal: Markdown, the annotations of GitHub, JUnit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from xml.sax.saxutils import escape, quoteattr

from ulpscope.findings.model import Finding
from ulpscope.model.names import call_text
from ulpscope.report.outcome import Answer, Outcome
from ulpscope.report.panel import Page


def markdown(outcome: Outcome, page: Page) -> Iterator[str]:
    """The page as a heading and a block."""
    yield f"## ulpscope: {outcome.answer.text}"
    yield ""
    yield "```"
    yield from page.lines()
    yield "```"


def github(outcome: Outcome, page: Page) -> Iterator[str]:
    """A line of annotation for the first divergence at its source line, and one for each other suspect."""
    if outcome.answer is Answer.AGREES:
        yield f"::notice title=ulpscope::{_one_line(page.title)}"
    elif outcome.first is None:
        yield f"::error title=ulpscope::{_one_line(page.title)}"
    for finding in outcome.suspects:
        word = "error" if finding is outcome.first else "warning"
        yield f"::{word} {_place(outcome, finding)}title=ulpscope::{_one_line(_told(finding))}"


def junit(outcome: Outcome, page: Page) -> Iterator[str]:
    """A test case for each step of each rank."""
    failed = sum(unit.differs for unit in outcome.units)
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield f'<testsuite name="ulpscope compare" tests="{len(outcome.units)}" failures="{failed}">'
    for unit in outcome.units:
        found = unit.divergence
        name = f"step {found.step} rank {found.rank}"
        yield f"  <testcase classname={quoteattr(outcome.target)} name={quoteattr(name)}>"
        if unit.differs:
            said = _told(found.first) if found.first is not None else "differs; no recorded call introduced it"
            yield f"    <failure message={quoteattr(said)}>{escape(chr(10).join(page.lines()))}</failure>"
        elif unit.unsure:
            yield f"    <skipped message={quoteattr(unit.unsure)}/>"
        yield "  </testcase>"
    yield "</testsuite>"


def _told(finding: Finding) -> str:
    return (
        f"{call_text(finding.call)} (step {finding.step}, rank {finding.rank}): {finding.text or finding.status.value}"
    )


def _place(outcome: Outcome, finding: Finding) -> str:
    own = next((frame for frame in outcome.stack(finding) if not frame.library), None)
    return f"file={own.file},line={own.line}," if own is not None else ""


def _one_line(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


FORMS: dict[str, Callable[[Outcome, Page], Iterator[str]]] = {"md": markdown, "github": github, "junit": junit}
