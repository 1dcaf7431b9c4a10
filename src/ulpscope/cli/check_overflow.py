"""`ulpscope check overflow [RUN] [-- CMD...]`: the call that made the first inf or nan."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click

from ulpscope.analyze.first_nonfinite import First
from ulpscope.api.checks import OverflowCheck, check_overflow
from ulpscope.cli.printing import WithCommand, print_lines, tell, tell_ending
from ulpscope.report.nonfinite import answer_line, nonfinite_json, nonfinite_lines
from ulpscope.report.overflow import overflow_json, overflow_lines, summary_line


@click.command(cls=WithCommand, options_metavar="[OPTIONS]")
@click.argument("run", required=False, type=click.Path(), metavar="[RUN] [-- CMD...]")
@click.option("-n", "--number", type=int, default=1, show_default=True, help="End CMD at this overflow; -1: never.")
@click.option("--poles", is_flag=True, help="Count also what is infinite because the function is there: 1/0, log 0.")
@click.option("--level", type=click.Choice(["module", "op", "mix", "kernel"]), default="op", show_default=True)
@click.option("-o", "--output", type=click.Path(), help="Keep what was found, with its tensors, in this folder.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, only exit.")
@click.pass_context
def overflow(
    ctx: click.Context,
    run: str | None,
    number: int,
    poles: bool,
    level: str,
    output: str | None,
    form: str,
    quiet: bool,
) -> None:
    """Find the call that was given finite values and returned inf or nan, forward or backward.

    \b
    ulpscope check overflow -- python train.py           ends the program at the first overflow
    ulpscope check overflow -n -1 -- python train.py     lets it run to its end
    ulpscope check overflow runs/a                       what an earlier check kept (-o), or a whole recording of any tool

    Of a whole recording the first nan of any rank is named, and followed back through send, recv, broadcast and the like to
    the rank whose call made it; where there is none, the first infinity.

    Exit code: 0 no call overflowed, 1 one did, 3 none did until CMD ended by a signal or with an error, 4 no call of torch
    was seen.
    """
    command: list[str] | None = ctx.meta.get("command")
    if (run is None) == (command is None):
        raise click.UsageError("check overflow needs a command behind --, or the folder of an earlier check", ctx)
    found = check_overflow(run, command=command, number=number, poles=poles, level=level, output=output)
    tell_ending(found.ended)
    if not found.seen:
        tell("nothing to check: no call of torch was seen")
    elif not quiet:
        _print(found, form)
    for text in found.cut:
        tell(text)
    sys.exit(found.exit_code)


def _print(found: OverflowCheck, form: str) -> None:
    if found.firsts is not None:
        _print_firsts(found.firsts, found.ranks, form)
        return
    if form == "json":
        content = {"overflows": [overflow_json(each) for each in found.overflows], "notes": found.notes}
        click.echo(json.dumps(content, indent=1, default=str))
        return
    for each in found.overflows:
        print_lines([*overflow_lines(each, ranks=found.ranks), ""])
    click.echo(summary_line(len(found.overflows), found.notes))


def _print_firsts(firsts: Sequence[First], ranks: int, form: str) -> None:
    if form == "json":
        click.echo(json.dumps({"first": [nonfinite_json(each) for each in firsts]}, indent=1, default=str))
        return
    for each in firsts:
        print_lines([*nonfinite_lines(each, ranks=ranks), ""])
    click.echo(answer_line(firsts))
