"""`ulpscope blame REFERENCE TARGET`, `ulpscope blame -- CMD`: the call that introduced the error."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ulpscope.analyze.ledger import REPLAY
from ulpscope.api.blaming import Blamed, loss_attribution
from ulpscope.api.blaming import blame as blame_runs
from ulpscope.cli.printing import WithCommand, print_json, print_lines, tell, tell_ending
from ulpscope.report.blame import blame_json, blame_lines, counted, next_commands


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
    reference = runs[0] if runs and (command or len(runs) == 2) else None
    judged = blame_runs(
        None if command else runs[-1],
        reference,
        command=command,
        output=output,
        from_start=from_start,
    )
    tell_ending(judged.ended)
    if not judged.calls:
        tell(f"{judged.judgement.doubt or 'nothing to judge'}: no kernel call was seen")
    elif not quiet:
        _print(judged, runs, command, form)
    sys.exit(0 if exit_zero and judged.calls else judged.exit_code)


def _print(judged: Blamed, runs: tuple[str, ...], command: list[str] | None, form: str) -> None:
    judgement = judged.judgement
    names = [*runs, *([" ".join(command)] if command else [])]
    after = next_commands(judgement, judged.where)
    again = judgement.compared and judgement.by == REPLAY
    shares = loss_attribution(Path(runs[0]), judged.where) if again else None
    if form == "json":
        print_json(blame_json(judgement, runs=names, next_commands=after, attribution=shares), default=str)
        return
    size = f"{judged.calls} calls, {counted(judged.steps, 'step')}, {counted(judged.ranks, 'rank')}"
    print_lines(blame_lines(judgement, runs=names, size=size, next_commands=after, attribution=shares))
