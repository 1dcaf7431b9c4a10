"""`ulpscope blame REFERENCE TARGET`, `ulpscope blame -- CMD`: the call that introduced the error."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from ulpscope.analyze.attribution import Attribution, Part, attribution, share_of
from ulpscope.analyze.ledger import REPLAY, Judgement, Verdict, judge
from ulpscope.analyze.statistics import call_row, judged_alone, judged_beside
from ulpscope.api.launch import ending, launch
from ulpscope.cli.compare import compared
from ulpscope.cli.printing import WithCommand, tell_ending
from ulpscope.findings.model import Finding
from ulpscope.model.errors import CaptureError, DumpError
from ulpscope.replay.watch import LEDGER_VARIABLE
from ulpscope.report.blame import blame_json, blame_lines, counted, next_commands
from ulpscope.report.outcome import Answer
from ulpscope.report.panel import verdict_line
from ulpscope.store.call_site import is_replayable
from ulpscope.store.dump import Dump
from ulpscope.store.ledger_file import Row, find_ledgers, is_begun, read_ledger, settle, unseen_beside
from ulpscope.store.registry import find_dumps, open_dump, open_run

_NOTHING = 4


@click.command(cls=WithCommand, options_metavar="[OPTIONS]")
@click.argument("runs", nargs=-1, type=click.Path(), metavar="[REFERENCE] [TARGET] [-- CMD...]")
@click.option("-o", "--output", type=click.Path(), help="Keep the ledger of CMD in this folder.")
@click.option("--from-start", is_flag=True, help="Judge also what CMD runs before the first forward of a model.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--exit-zero", is_flag=True, help="Exit with 0 also when a culprit is named.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, only exit.")
@click.pass_context
def blame(
    ctx: click.Context,
    runs: tuple[str, ...],
    output: str | None,
    from_start: bool,
    form: str,
    exit_zero: bool,
    quiet: bool,
) -> None:
    """Name the operator that introduced an error, by running every kernel again in float64 on its own inputs.

    \b
    ulpscope blame -- python train.py            this run, judged by itself
    ulpscope blame -o runs/a -- python train.py  the same, and the ledger is kept
    ulpscope blame runs/a -- python train.py     a new run beside an earlier one
    ulpscope blame runs/a runs/b                 two ledgers, or two dumps

    A ledger holds a line for every kernel call and no tensors. Dumps of kernels with tensors are run again; of statistics
    it is told who had inputs that agree and an output that does not. Exit code: 0 nothing is wrong, 1 a culprit is named,
    3 unreadable or not enough to tell (CMD ended by a signal or with an error, or not all that ran was seen), 4 nothing
    to judge.
    """
    command: list[str] | None = ctx.meta.get("command")
    if command is not None and not command:
        raise click.UsageError("there is no command behind --", ctx)
    if len(runs) > (1 if command else 2) or not (runs or command):
        raise click.UsageError(
            "blame needs a command behind --, a run, or two runs: the reference, then the target", ctx
        )
    if command is None and all(_is_unreplayable(Path(run)) for run in runs):
        judged = _from_statistics(runs)
    else:
        judged = _from_replay(runs, command, output, from_start)
    judgement = judged.judgement
    if not judged.calls:
        click.echo(f"ulpscope: {judgement.doubt or 'nothing to judge'}: no kernel call was seen", err=True)
        sys.exit(judged.exit_code if judgement.doubt else _NOTHING)
    names = [*runs, *([" ".join(command)] if command else [])]
    after = next_commands(judgement, judged.where)
    if not quiet:
        again = judgement.compared and judgement.by == REPLAY
        shares = _attribution(Path(runs[0]), judged.where) if again else None
        if form == "json":
            _print_json(blame_json(judgement, runs=names, next_commands=after, attribution=shares))
        else:
            size = f"{judged.calls} calls, {counted(judged.steps, 'step')}, {counted(judged.ranks, 'rank')}"
            lines = blame_lines(judgement, runs=names, size=size, next_commands=after, attribution=shares)
            click.echo("\n".join(lines))
    sys.exit(0 if exit_zero else judged.exit_code)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A judgement, how much it is of, where the target lies, and the exit code."""

    judgement: Judgement
    where: Path
    calls: int
    steps: int
    ranks: int
    exit_code: int


def _of(judgement: Judgement, rows: list[Row], where: Path) -> _Judged:
    if judgement.by == REPLAY and judgement.first is None and not judgement.doubt:
        judgement = replace(judgement, doubt=_lacking(judgement))
    steps, ranks = {row.step for row in rows}, {row.rank for row in rows}
    code = 1 if judgement.first is not None else 3 if judgement.doubt else 0
    return _Judged(judgement, where, len(rows), len(steps), len(ranks), code)


def _lacking(judgement: Judgement) -> str:
    """Why nothing can be said of a run in which no call is named, if so."""
    judged = sum(judgement.counts.values()) - judgement.counts.get(Verdict.UNKNOWN.value, 0)
    if judgement.unseen:
        known = "; rounding explains every call that was judged" if judged else ""
        return f"cannot tell: not everything that ran was seen{known}"
    return "" if judged or not judgement.unknown else "cannot tell: none of the calls could be judged"


def _from_replay(runs: tuple[str, ...], command: list[str] | None, output: str | None, from_start: bool) -> _Judged:
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
    return _of(judgement, target.rows, where)


def _missing(run: Path) -> int:
    """How many files with elements a run of dumps should have and has not whole."""
    return 0 if not run.exists() or find_ledgers(run) else sum(len(dump.missing) for dump in open_run(run))


def _is_unreplayable(run: Path) -> bool:
    """A dump whose calls cannot be run again."""
    if not run.exists() or find_ledgers(run) or not find_dumps(run):
        return False
    return not any(is_replayable(dump) for dump in open_run(run))


def _from_statistics(runs: tuple[str, ...]) -> _Judged:
    where = Path(runs[-1])
    if len(runs) == 1:
        return _of(*judged_alone(open_run(where)), where)
    outcome, _ = compared(*runs)
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
    return _Judged(judgement, where, matched, len(steps), len(ranks), answer.exit_code)


def _attribution(reference: Path, target: Path) -> Attribution | None:
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


def _live(command: list[str], output: str | None, from_start: bool) -> tuple[Path, _Run, int]:
    """Runs a command, all Python processes below it judged, and reads what they wrote; its exit code too."""
    with tempfile.TemporaryDirectory(prefix="ulpscope-blame-") as scratch:
        folder = Path(output or scratch).resolve()
        if output is not None and is_begun(folder):
            raise CaptureError(f"{output} holds an earlier ledger; choose another folder")
        options: dict[str, Any] = {"path": str(folder), "from_start": from_start}
        code = launch(command, LEDGER_VARIABLE, options)
        tell_ending(code)
        settle(folder)
        return folder, _read(folder) if find_ledgers(folder) else _Run([], unseen_beside(folder)), code


def _print_json(content: dict[str, Any]) -> None:
    click.echo(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str))
