"""An outcome as a page of text: what was compared, the first divergence with its evidence, counts, suspects, what to do next.

Lines are pieces of text with a style each; the command line colours them on a terminal and joins them elsewhere.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ulpscope.compare.comparison import Code, Comparison, Level
from ulpscope.compare.verdict import ROUNDINGS
from ulpscope.findings.advice import Advice
from ulpscope.findings.model import Beside, CallPlace, Divergence, Finding, Status
from ulpscope.model.names import MODULE, call_text, slot_text
from ulpscope.model.records import Frame, Phase, Role
from ulpscope.report.outcome import Answer, Outcome
from ulpscope.report.text import short_value

_MARKS = {Level.PASS: "✓", Level.WARN: "!", Level.FAIL: "✗", Level.UNMATCHED: "?", Level.UNKNOWN: "?"}
_STYLES = {
    Level.PASS: "green",
    Level.WARN: "yellow",
    Level.FAIL: "red",
    Level.UNMATCHED: "yellow",
    Level.UNKNOWN: "yellow",
}
_ROWS, _FEW = 12, 3


@dataclass(frozen=True, slots=True)
class Piece:
    """A text and how it is shown: "" plain, else words for the terminal, such as "bold red"."""

    text: str
    style: str = ""


Line = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The lines before the box, its title and content, and those behind it. No title: no box."""

    head: list[Line]
    title: str
    style: str
    box: list[Line]
    tail: list[Line]

    def lines(self) -> Iterator[str]:
        """As plain text."""
        for part in (self.head, [(Piece(self.title),)] if self.title else [], self.box, self.tail):
            yield from ("".join(piece.text for piece in line).rstrip() for line in part)


def page_of(outcome: Outcome, advice: Advice) -> Page:
    """The page for a terminal, about thirty lines."""
    first = outcome.first
    head = list(_head(outcome))
    if first is not None:
        title, style, box = f"✗ {_headline(first)}", "red", list(_finding(outcome, first, advice))
    else:
        title, style, box = verdict_line(outcome), "green" if outcome.answer is Answer.AGREES else "yellow", []
    return Page(head, title, style, box, list(_tail(outcome, advice.commands)))


def _head(outcome: Outcome) -> Iterator[Line]:
    dim = "dim"
    yield Piece("reference  ", dim), Piece(outcome.reference, "cyan")
    yield Piece("target     ", dim), Piece(outcome.target, "cyan")
    reference_alone, target_alone = outcome.alone
    matched = outcome.calls - reference_alone - target_alone
    alone = (
        f", {reference_alone} only in the reference, {target_alone} only in the target"
        if matched < outcome.calls
        else ""
    )
    dumps = f" in {len(outcome.units)} dumps" if len(outcome.units) > 1 else ""
    yield Piece("matched    ", dim), Piece(f"{_count(matched)} of {_count(outcome.calls)} calls{dumps}{alone}")
    evidence = ", ".join(f"{_count(count)} by {kind.value}" for kind, count in outcome.evidence.most_common() if count)
    yield Piece("compared   ", dim), Piece(f"{_count(outcome.values)} values: {evidence}")
    if outcome.differences:
        shown = "; ".join(f"{key} {left} → {right}" for key, left, right in outcome.differences[:4])
        more = f"; {len(outcome.differences) - 4} more" if len(outcome.differences) > 4 else ""
        yield Piece("surroundings ", dim), Piece(shown + more)
    if outcome.modules:
        shown = ", ".join(f"{mine} is {theirs} there" for mine, theirs in list(outcome.modules.items())[:2])
        more = f", {len(outcome.modules) - 2} more: ulpscope map" if len(outcome.modules) > 2 else ""
        yield Piece("modules    ", "dim"), Piece(shown + more)
    for lack in outcome.lacks:
        yield Piece("incomplete ", "yellow"), Piece(lack)
    for word, places in (("reference", outcome.only_reference), ("target", outcome.only_target)):
        if places:
            yield Piece("alone      ", "yellow"), Piece(f"only the {word} has {', '.join(places[:4])}")
    yield ()


def _headline(first: Finding) -> str:
    where, _, name = first.call.name.rpartition(".") if first.call.kind == MODULE else ("", "", first.call.name)
    where = where or first.where
    alone = "Only in the reference" if first.comparison.match.target is None else "Only in the target"
    words = {
        Status.SOURCE: "Differs before any call",
        Status.UNSURE: "Differs from here on",
        Status.UNMATCHED: alone,
        Status.LOST: "Another result",
    }
    word = words.get(first.status, "First divergence")
    return f"{word}: {where + ', ' if where else ''}{name.rpartition('.')[2]}, {_phase(first)}"


def _phase(finding: Finding) -> str:
    place = f"step {finding.step}, rank {finding.rank}"
    return f"{finding.call.phase.value}, {place}"


def _finding(outcome: Outcome, finding: Finding, advice: Advice) -> Iterator[Line]:
    match = finding.comparison.match
    name = call_text(finding.call)
    other = ""
    if match.reference is not None and match.reference.id != finding.call:
        other = f"   is {call_text(match.reference.id)} in the reference ({match.how.value})"
    yield Piece(name, "bold"), Piece(f"   call {match.call.seq}{other}", "dim")
    yield (Piece(_sentence(finding)),)
    yield ()
    rows = _chosen(finding.comparison.values) if None not in (match.reference, match.target) else []
    if rows:
        yield (Piece(_columns("", "", "error", "expected ≤", "÷", "cosine", ""), "dim"),)
    for each in rows:
        yield _row(finding, each)
    if 0 < len(rows) < len(finding.comparison.values):
        yield (Piece(f"  {len(finding.comparison.values) - len(rows)} more values that agree", "dim"),)
    yield from _source(outcome.stack(finding))
    if finding.beside is not None:
        yield from _beside(finding.beside)
    for text in outcome.origin.sentences:
        yield Piece("spread  ", "bold"), Piece(text)
    yield ()
    yield from ((Piece(line),) for line in textwrap.wrap(advice.text, 110))


def _beside(beside: Beside) -> Iterator[Line]:
    """Both sides' calls between the values that both have."""
    yield ()
    yield (Piece(f"  {'reference':<60} target", "dim"),)
    for anchor in beside.before[:_FEW]:
        yield (Piece(f"  = {anchor.reference:<58} = {anchor.target}   {_number(anchor.error)}", "dim"),)
    for left, right in itertools.zip_longest(beside.reference, beside.target):
        yield Piece(f"  {_call_place(left):<60} "), Piece(_call_place(right))
    more = [
        count - len(shown)
        for count, shown in ((beside.of_reference, beside.reference), (beside.of_target, beside.target))
    ]
    if any(more):
        yield (Piece(f"  {_more(more[0]):<60} {_more(more[1])}", "dim"),)
    for anchor in beside.after[:_FEW]:
        yield (Piece(f"  = {anchor.reference:<58} = {anchor.target}   {_number(anchor.error)}", "dim"),)


def _call_place(place: CallPlace | None) -> str:
    if place is None:
        return ""
    source = place.source.rpartition("/")[2]
    return f"{place.call}  {source}"


def _more(count: int) -> str:
    return f"{_count(count)} more" if count > 0 else ""


def _sentence(finding: Finding) -> str:
    if finding.status is Status.SOURCE:
        return f"Before any arithmetic: {finding.text}."
    if finding.status is Status.UNSURE:
        return f"The output differs, and {finding.text}."
    if finding.status in (Status.UNMATCHED, Status.LOST):
        return f"{finding.text[0].upper()}{finding.text[1:]}."
    if finding.output_error is None:
        return "Its inputs are identical, its output is not."
    if finding.output_error == math.inf:
        return "Its inputs agree, its output is not even of the same size or finite at the same places."
    return (
        f"{finding.text[0].upper()}{finding.text[1:]}: {_times(finding.weight)} what rounding explains."
        if finding.text
        else ""
    )


def _chosen(values: Sequence[Comparison]) -> list[Comparison]:
    """The values worth a line: all tensors and whatever differs, at most a dozen."""
    loud = [each for each in values if each.verdict.level is not Level.PASS or each.error is not None]
    loud.sort(key=lambda each: (each.verdict.level is Level.PASS, each.slot.role is Role.OUTPUT))
    keep = set(map(id, loud[:_ROWS]))
    return [each for each in values if id(each) in keep]


def _row(finding: Finding, each: Comparison) -> Line:
    out = each.slot.role is Role.OUTPUT or finding.call.phase is Phase.PARAMETERS_GRAD
    value = each.target or each.reference
    assert value is not None
    shown = short_value(value) if value.is_tensor else repr(value.scalar)[:24]
    limit = finding.limit if out else ROUNDINGS * each.rounding
    ratio = "-" if each.error is None or not limit else _times(each.error / limit)
    cosine = "-" if each.contrast is None else _number(each.contrast.alignment)
    level = each.verdict.level
    style = _STYLES[level] if level is not Level.PASS else ""
    words = ", ".join(code.value for code in each.verdict.codes)
    if each.verdict.text and (not value.is_tensor or value.extra):
        words = f"{words}: {each.verdict.text}"
    if out and level is Level.FAIL and finding.status is Status.INTRODUCED and Code.DIFFERENT in each.verdict.codes:
        words = "introduced here"
    left = _columns(
        ("out  " if out else "in   ") + slot_text(each.slot),
        shown,
        "-" if each.error is None else _number(each.error),
        _number(limit) if limit and each.error is not None else "-",
        ratio,
        cosine,
        "",
    )
    return Piece(left, style), Piece(f"{_MARKS[level]} {words}", _STYLES[level])


def _source(stack: Sequence[Frame]) -> Iterator[Line]:
    own = [frame for frame in stack if not frame.library] or list(stack[:1])
    if not own:
        return
    yield ()
    yield Piece(f"{near(own[0].file)}:{own[0].line}", "bold"), Piece(f" in {own[0].function}", "dim")
    if own[0].text:
        yield (Piece(f"    {own[0].text}"),)
    # In a model from a library: its own line, not that of torch's layers.
    inner = next((frame for frame in stack if "/torch/" not in frame.file.replace("\\", "/")), own[0])
    if inner is not own[0]:
        yield (Piece(f"    inside {inner.file.rpartition('/')[2]}:{inner.line} {inner.function}: {inner.text}", "dim"),)
    if len(own) > 1:
        above = " ← ".join(f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}" for frame in own[1:4])
        yield (Piece(f"    from {above}", "dim"),)


def verdict_line(outcome: Outcome) -> str:
    """What there is to say where no call is named, behind its mark."""
    match outcome.answer:
        case Answer.AGREES:
            if any(outcome.alone):
                theirs, mine = (outcome.calls - alone for alone in reversed(outcome.alone))
                return f"✓ The runs agree, by other calls: {_count(mine)} here, {_count(theirs)} in the reference come to the same values."
            return "✓ The runs agree: nothing differs by more than rounding explains."
        case Answer.INCOMPLETE:
            choice = outcome.choice
            if choice is not None:
                name = choice.comparison.match.call.id.name
                return f"? Another choice from step {choice.step} on: {choice.text} ({name})."
            return "? Nothing that was compared differs, but not everything could be compared."
        case Answer.NOTHING:
            return "? Nothing to compare: no call of one run belongs to a call of the other."
        case _:
            return "✗ The runs differ, and no recorded call introduced it."


def _tail(outcome: Outcome, commands: Sequence[str]) -> Iterator[Line]:
    statuses = outcome.statuses
    counts = [
        f"{_count(statuses[status])} {text}"
        for status, text in (
            (Status.INTRODUCED, "introduce error"),
            (Status.LOST, "give what the reference has nowhere"),
            (Status.SOURCE, "got other values from outside"),
            (Status.UNSURE, "got what was not recorded"),
            (Status.INHERITED, "inherit it"),
            (Status.CHOICE, "decided otherwise within rounding"),
            (Status.OTHER, "did other work after that"),
            (Status.OUTSIDE, "from outside, read by nothing"),
            (Status.ELSEWHERE, "come to the same by another way"),
            (Status.ROUNDING, "within rounding"),
            (Status.IDENTICAL, "identical"),
            (Status.UNMATCHED, "unmatched"),
            (Status.UNKNOWN, "unknown"),
        )
        if statuses[status]
    ]
    yield ()
    yield Piece("calls      ", "dim"), Piece(" · ".join(counts))
    if len(outcome.suspects) > 1:
        yield (Piece(_suspect("order", "call", "rank", "in → out", "÷ expected"), "dim"),)
        for each in outcome.suspects:
            into = "?" if each.input_error is None else _number(each.input_error)
            out = "?" if each.output_error is None else _number(each.output_error)
            style = "red" if each is outcome.first else ""
            weight = "from outside" if each.status is Status.SOURCE else _times(each.weight)
            order = str(each.comparison.match.call.seq)
            yield (Piece(_suspect(order, call_text(each.call), str(each.rank), f"{into} → {out}", weight), style),)
    found = [unit.divergence for unit in outcome.units]
    if outcome.answer is not Answer.AGREES:
        yield from _some("unmatched  ", [(each, told) for each in found for told in each.alone], sum(outcome.alone))
    unknown = [(each, told) for each in found for told in each.unknown]
    yield from _some("unknown    ", unknown, sum(each.unknown_count for each in found))
    yield from _some("remark     ", outcome.remarks, len(outcome.remarks))
    for path in sorted({path for unit in outcome.units for path in unit.artefacts}):
        yield Piece("written    ", "dim"), Piece(near(path))
    for number, command in enumerate(commands):
        yield Piece("next       " if not number else "           ", "dim"), Piece(command)


def _some(word: str, told: Sequence[tuple[Divergence, tuple[str, str]]], count: int) -> Iterator[Line]:
    """The first few, with their places where there is more than one, and how many more there are."""
    several = len({(each.step, each.rank) for each, _ in told}) > 1
    for each, (name, why) in told[:_FEW]:
        place = f" (step {each.step}, rank {each.rank})" if several else ""
        yield Piece(word, "yellow"), Piece(f"{name}{place}: {why}")
    if told and count > _FEW:
        yield Piece(word, "yellow"), Piece(f"{_count(count - _FEW)} more", "dim")


def _columns(slot: str, shown: str, error: str, expected: str, ratio: str, cosine: str, words: str) -> str:
    return f"  {slot:<22} {shown:<24} {error:>9} {expected:>11} {ratio:>7} {cosine:>9}   {words}"


def _suspect(order: str, call: str, rank: str, change: str, ratio: str) -> str:
    return f"  {order:>8}  {call:<52} {rank:>4}  {change:>20}  {ratio:>12}"


def near(path: str | Path) -> str:
    """A path as one would type it here: relative where that is below the current folder."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)


def _number(value: float) -> str:
    """Two significant digits."""
    return (
        "0"
        if value == 0
        else "1"
        if value == 1
        else f"{value:.1e}"
        if abs(value) < 0.01 or abs(value) >= 1000
        else f"{value:.3g}"
    )


def _times(value: float) -> str:
    if value == math.inf:
        return "∞"
    return f"{value:.2g}×" if value < 10 else f"{value:.0f}×" if value < 100_000 else f"{value:.0e}×"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")
