"""The operator that introduced an error, by running every kernel again, or from what was recorded of two runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ulpscope.analyze.attribution import Attribution, Part, attribution, share_of
from ulpscope.analyze.ledger import REPLAY, Judgement, Verdict, judge
from ulpscope.analyze.statistics import call_row, judged_alone, judged_beside
from ulpscope.api.comparing import compare
from ulpscope.api.launch import NOTHING, ending, launch
from ulpscope.findings.model import Finding
from ulpscope.model.errors import CaptureError, ConfigError, DumpError
from ulpscope.replay.watch import LEDGER_VARIABLE
from ulpscope.report.outcome import Answer
from ulpscope.report.panel import verdict_line
from ulpscope.store.call_site import is_replayable
from ulpscope.store.dump import Dump
from ulpscope.store.ledger_file import Row, find_ledgers, is_begun, read_ledger, settle, unseen_beside
from ulpscope.store.registry import find_dumps, open_dump, open_run


@dataclass(frozen=True, slots=True)
class Blamed:
    """A judgement, how much it is of, where the target lies, and the exit code; `ended` is that of a command."""

    judgement: Judgement
    where: Path
    calls: int
    steps: int
    ranks: int
    exit_code: int
    ended: int = 0


def blame(
    target: str | Path | None = None,
    reference: str | Path | None = None,
    *,
    command: Sequence[str] | None = None,
    output: str | Path | None = None,
    from_start: bool = False,
) -> Blamed:
    """Names the operator that introduced an error. The target is a ledger or a run of dumps, or what `command` does now; with a
    reference it is judged beside that, without one by itself. `output` keeps the ledger of the command, and `from_start` judges
    also what it runs before the first forward of a model. No calls: there was nothing to judge.
    """
    if (target is None) == (command is None):
        raise ConfigError(["blame needs a target or a command, and may have a reference"])
    runs = tuple(str(run) for run in (reference, target) if run is not None)
    if command is None and all(_is_unreplayable(Path(run)) for run in runs):
        judged = _from_statistics(runs)
    else:
        judged = _from_replay(runs, command, output, from_start)
    return (
        judged if judged.calls else replace(judged, exit_code=judged.exit_code if judged.judgement.doubt else NOTHING)
    )


def loss_attribution(reference: Path, target: Path) -> Attribution | None:
    """Who explains the loss gap, where both runs are dumps with tensors and gradients."""
    if not all(run.exists() and not find_ledgers(run) and find_dumps(run) for run in (reference, target)):
        return None
    from ulpscope.replay.effects import loss_gap  # brings torch

    gap = loss_gap(reference, target)
    if gap is None:
        return None
    shares, without = [], 0
    for effect in gap.effects:
        pairs = [(Part(*a), Part(*b)) for a, b in effect.pairs or ()]
        share = share_of(effect.call, effect.module, effect.what, pairs) if effect.pairs is not None else None
        if share is None:
            without += 1
        else:
            shares.append(share)
    return attribution(
        shares, step=gap.step, rank=gap.rank, reference=gap.reference, target=gap.target, without=without
    )


def _of(judgement: Judgement, rows: list[Row], where: Path) -> Blamed:
    if judgement.by == REPLAY and judgement.first is None and not judgement.doubt:
        judgement = replace(judgement, doubt=_lacking(judgement))
    steps, ranks = {row.step for row in rows}, {row.rank for row in rows}
    code = 1 if judgement.first is not None else 3 if judgement.doubt else 0
    return Blamed(judgement, where, len(rows), len(steps), len(ranks), code)


def _lacking(judgement: Judgement) -> str:
    """Why nothing can be said of a run in which no call is named, if so."""
    judged = sum(judgement.counts.values()) - judgement.counts.get(Verdict.UNKNOWN.value, 0)
    if judgement.unseen:
        known = "; rounding explains every call that was judged" if judged else ""
        return f"cannot tell: not everything that ran was seen{known}"
    return "" if judged or not judgement.unknown else "cannot tell: none of the calls could be judged"


def _from_replay(
    runs: tuple[str, ...], command: Sequence[str] | None, output: str | Path | None, from_start: bool
) -> Blamed:
    reference = _read(Path(runs[0])) if (len(runs) == 2 or (command and runs)) else None
    if command is None:
        where, code = Path(runs[-1]), 0
        target = _read(where)
    else:
        where, target, code = _live(command, output, from_start)
    unseen = {} if reference is None else reference.unseen
    judgement = judge(target.rows, None if reference is None else reference.rows)
    judgement = replace(judgement, unseen=unseen | target.unseen, before=target.before)
    if code and judgement.first is None:
        doubt = f"cannot tell: the command {ending(code)}"
        known = "; rounding explains every call that it made until then" if target.rows else ""
        judgement = replace(judgement, doubt=doubt + known)
    gone = sum(_missing(Path(run)) for run in runs)
    if gone and judgement.first is None and not judgement.doubt:
        text = f"No call is named, but {gone} files with elements are missing or cut: their calls were not judged."
        judgement = replace(judgement, doubt=text)
    return replace(_of(judgement, target.rows, where), ended=code)


def _missing(run: Path) -> int:
    """How many files with elements a run of dumps should have and has not whole."""
    return 0 if not run.exists() or find_ledgers(run) else sum(len(dump.missing) for dump in open_run(run))


def _is_unreplayable(run: Path) -> bool:
    """A dump whose calls cannot be run again."""
    if not run.exists() or find_ledgers(run) or not find_dumps(run):
        return False
    return not any(is_replayable(dump) for dump in open_run(run))


def _from_statistics(runs: tuple[str, ...]) -> Blamed:
    where = Path(runs[-1])
    if len(runs) == 1:
        return _of(*judged_alone(open_run(where)), where)
    outcome = compare(*runs)
    dumps: dict[tuple[int, int], Dump] = {}

    def row(finding: Finding) -> Row:
        place = finding.step, finding.rank
        if place not in dumps:
            dumps[place] = open_dump(where, step=finding.step, rank=finding.rank)
        return call_row(dumps[place], finding.comparison.match.call)

    answer = outcome.answer
    doubt = "" if answer is Answer.AGREES else verdict_line(outcome)[2:]
    divergences = [unit.divergence for unit in outcome.units]
    judgement = judged_beside(outcome.origin, divergences, row, doubt)
    steps, ranks = {each.step for each in divergences}, {each.rank for each in divergences}
    matched = 0 if answer is Answer.NOTHING else outcome.calls
    return Blamed(judgement, where, matched, len(steps), len(ranks), answer.exit_code)


@dataclass(slots=True)
class _Run:
    """The rows of a run, and what of it was not seen, or was before there was a model."""

    rows: list[Row]
    unseen: dict[str, int] = field(default_factory=dict)
    before: int = 0


def _read(run: Path) -> _Run:
    paths = find_ledgers(run) if run.exists() else []
    if not paths and run.exists() and find_dumps(run):
        from ulpscope.replay.offline import rows_from_dumps  # brings torch

        return _Run(rows_from_dumps(run))
    if not paths:
        raise DumpError(f"{run} holds no ledger; `ulpscope blame -o {run} -- CMD` writes one")
    found = _Run([], unseen_beside(run))
    for path in paths:
        about, rows = read_ledger(path)
        found.rows += rows
        found.before += about["before"]
        for text, count in about["unseen"].items():
            found.unseen[text] = found.unseen.get(text, 0) + count
    return found


def _live(command: Sequence[str], output: str | Path | None, from_start: bool) -> tuple[Path, _Run, int]:
    """Runs a command, all Python processes below it judged, and reads what they wrote; its exit code too."""
    with tempfile.TemporaryDirectory(prefix="ulpscope-blame-") as scratch:
        folder = Path(output or scratch).resolve()
        if output is not None and is_begun(folder):
            raise CaptureError(f"{output} holds an earlier ledger; choose another folder")
        options: dict[str, Any] = {"path": str(folder), "from_start": from_start}
        code = launch(command, LEDGER_VARIABLE, options)
        settle(folder)
        return folder, _read(folder) if find_ledgers(folder) else _Run([], unseen_beside(folder)), code
