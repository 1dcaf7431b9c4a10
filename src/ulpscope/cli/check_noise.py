"""`ulpscope check noise -- CMD...`: calls whose result changes more than a small change of their input explains."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from ulpscope.api.checks import check_noise
from ulpscope.cli.printing import WithCommand, print_lines, tell, tell_ending
from ulpscope.report.noise import noise_lines

MODES = ("improve_precision", "add_noise", "no_change", "bit_noise", "change_value", "to_cpu")


@click.command(cls=WithCommand, options_metavar="[OPTIONS]")
@click.argument("nothing", required=False, metavar="-- CMD...")
@click.option("--mode", type=click.Choice(MODES), default="bit_noise", show_default=True, help="What is changed.")
@click.option("--only", multiple=True, help="Only calls with this part in their name. May be repeated.")
@click.option("--steps", type=int, default=1, show_default=True, help="How many steps to look at.")
@click.option("--backward", is_flag=True, help="Compare gradients, not results.")
@click.option("-o", "--output", type=click.Path(), help="Keep the rows in this folder.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, only exit.")
@click.pass_context
def noise(
    ctx: click.Context,
    nothing: str | None,
    mode: str,
    only: tuple[str, ...],
    steps: int,
    backward: bool,
    output: str | None,
    form: str,
    quiet: bool,
) -> None:
    """Run every call of CMD a second time with its input slightly changed, and compare.

    \b
    ulpscope check noise -- python train.py
    ulpscope check noise --mode no_change -- python train.py     calls that do not repeat themselves

    A result is told if it changes by more than float64 says that the change of the input does, and rounding. CMD itself
    computes what it always does. Exit code: 0 all is explained, 1 some is not, 3 all is until CMD ended by a signal or with an
    error, 4 no call was run twice.
    """
    command: list[str] | None = ctx.meta.get("command")
    if command is None or nothing is not None:
        raise click.UsageError("check noise needs a command behind --", ctx)
    found = check_noise(command, mode=mode, only=only, steps=steps, backward=backward, output=output)
    tell_ending(found.ended)
    if not found.seen:
        tell("nothing to check: no call was run twice, or none began with a forward of a module")
    elif not quiet and form == "json":
        click.echo(json.dumps([asdict(row) for row in found.rows], indent=1))
    elif not quiet:
        print_lines(noise_lines(found.rows))
    sys.exit(found.exit_code)
