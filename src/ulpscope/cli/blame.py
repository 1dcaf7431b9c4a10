"""`ulpscope blame REFERENCE TARGET`, `ulpscope blame -- CMD`: the call that introduced the error."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from ulpscope.analyze.attribution import Attribution, Part, attribution, share_of
from ulpscope.analyze.ledger import judge
from ulpscope.cli.launch import WithCommand, launch
from ulpscope.errors import CaptureError, DumpError
from ulpscope.replay.watch import LEDGER_VARIABLE
from ulpscope.report.blame import blame_json, blame_lines, next_commands
from ulpscope.store.layout import find_places
from ulpscope.store.ledger import Row, find_ledgers, read_ledger

_NOTHING = 4


@click.command(cls=WithCommand, options_metavar="[OPTIONS]")
@click.argument("runs", nargs=-1, type=click.Path(), metavar="[REFERENCE] [TARGET] [-- CMD...]")
@click.option("-o", "--output", type=click.Path(), help="Keep the ledger of CMD in this folder.")
@click.option("--from-start", is_flag=True, help="Judge CMD from its first torch call, not from its first forward.")
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
    ulpscope blame runs/a runs/b                 two ledgers

    A ledger holds a line for every kernel call and no tensors. Exit code: 0 nothing is wrong, 1 a culprit is named.
    """
    command: list[str] | None = ctx.meta.get("command")
    if command is not None and not command:
        raise click.UsageError("there is no command behind --", ctx)
    if len(runs) > (1 if command else 2) or not (runs or command):
        raise click.UsageError(
            "blame needs a command behind --, a run, or two runs: the reference, then the target", ctx
        )
    reference = _read(Path(runs[0])) if (len(runs) == 2 or (command and runs)) else None
    if command is None:
        where, target = Path(runs[-1]), _read(Path(runs[-1]))
    else:
        where, target = _live(command, output, from_start)
    if not target:
        click.echo("ulpscope: nothing to judge: no kernel call was seen", err=True)
        sys.exit(_NOTHING)
    judgement = judge(target, reference)
    names = [runs[0]] if reference is not None else []
    names.append(runs[-1] if command is None else " ".join(command))
    after = next_commands(judgement, where)
    if not quiet:
        shares = _attribution(Path(runs[0]), where) if reference is not None else None
        if form == "json":
            _print_json(blame_json(judgement, runs=names, next_commands=after, attribution=shares))
        else:
            lines = blame_lines(judgement, runs=names, rows=target, next_commands=after, attribution=shares)
            click.echo("\n".join(lines))
    sys.exit(1 if judgement.first is not None and not exit_zero else 0)


def _attribution(reference: Path, target: Path) -> Attribution | None:
    """Who explains the loss gap, where both runs are dumps with tensors and gradients."""
    if not all(run.exists() and not find_ledgers(run) and find_places(run) for run in (reference, target)):
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


def _read(run: Path) -> list[Row]:
    paths = find_ledgers(run) if run.exists() else []
    if not paths and run.exists() and find_places(run):
        from ulpscope.replay.offline import rows_from_dumps  # brings torch

        return rows_from_dumps(run)
    if not paths:
        raise DumpError(f"{run} holds no ledger; `ulpscope blame -o {run} -- CMD` writes one")
    return [row for path in paths for row in read_ledger(path)[1]]


def _live(command: list[str], output: str | None, from_start: bool) -> tuple[Path, list[Row]]:
    """Runs a command, all Python processes below it judged, and reads what they wrote."""
    with tempfile.TemporaryDirectory(prefix="ulpscope-blame-") as scratch:
        folder = Path(output or scratch).resolve()
        if output is not None and folder.exists() and find_ledgers(folder):
            raise CaptureError(f"{output} holds an earlier ledger; choose another folder")
        options: dict[str, Any] = {"path": str(folder), "from_start": from_start}
        launch(command, LEDGER_VARIABLE, options)
        return folder, _read(folder) if find_ledgers(folder) else []


def _print_json(content: dict[str, Any]) -> None:
    click.echo(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str))
