"""`ulpscope chaos -- CMD`: how far runs drift by themselves, and whether that explains a gap."""

from __future__ import annotations

import sys

import click

from ulpscope.analyze.chaos import FEWEST, Placement
from ulpscope.api.drift import chaos as find_chaos
from ulpscope.api.launch import CUT
from ulpscope.cli.printing import WithCommand, print_json, print_lines, tell, tell_ending
from ulpscope.report.chaos import chaos_json, chaos_lines


@click.command(cls=WithCommand, options_metavar="[OPTIONS]")
@click.argument("learned", type=click.Path(), required=False, metavar="[LEARNED] -- CMD...")
@click.option("-o", "--output", type=click.Path(), help="Keep what is learned about CMD in this folder.")
@click.option(
    "-n", "--runs", type=click.IntRange(FEWEST, 1000), default=8, show_default=True, help="So many nudged runs."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--exit-zero", is_flag=True, help="Exit with 0 also when chaos does not explain the gap.")
@click.pass_context
def chaos(ctx: click.Context, learned: str | None, output: str | None, runs: int, form: str, exit_zero: bool) -> None:
    """Learn how far runs of a program drift apart by themselves, and place another run among them.

    \b
    ulpscope chaos -o runs/chaos -- python train.py              the reference, and 8 times nudged by one ulp
    ulpscope chaos runs/chaos -- python train.py --device cuda   is this gap drift, or a bug?

    CMD must do the same each time it is run: fixed seeds and data. A nudge moves every weight of the first model that runs
    to a neighbouring number before its first forward. Exit code: 0, 1 the gap is not chaos, 3 CMD failed, so that not
    all of it was seen, 4 nothing was seen.
    """
    command: list[str] | None = ctx.meta.get("command")
    if command is None:
        raise click.UsageError("chaos needs a command behind --", ctx)
    if learned is not None and output is not None:
        raise click.UsageError("-o is for learning; LEARNED is only read", ctx)
    found = find_chaos(command, learned=learned, output=output, runs=runs)
    for code in found.ended:
        tell_ending(code)
    if found.placement is None:
        tell("nothing to judge: no model was seen to run")
    elif not found.placement.drifts:
        tell("nothing to compare: no step has a loss or an output in all runs")
    else:
        _print(found.placement, [*([learned] if learned else []), " ".join(command)], form)
    excused = exit_zero and found.exit_code == 1
    sys.exit((CUT if any(found.ended) else 0) if excused else found.exit_code)


def _print(placement: Placement, names: list[str], form: str) -> None:
    if form == "json":
        print_json(chaos_json(placement, runs=names))
    else:
        print_lines(chaos_lines(placement, runs=names))
