"""`ulpscope map REFERENCE TARGET`: which modules and values of two programs are the same."""

from __future__ import annotations

import click

from ulpscope.api import correspondence
from ulpscope.cli.printing import print_json, print_lines
from ulpscope.report.correspondence import correspondence_json, correspondence_lines


@click.command()
@click.argument("reference", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--step", type=int, help="Of this step.  [default: the first]")
@click.option("--rank", type=int, help="Of this rank.  [default: the first]")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def map(reference: str, target: str, step: int | None, rank: int | None, form: str) -> None:
    """Which modules and values of two programs are the same, whatever they are called.

    \b
    ulpscope map runs/library runs/own

    Found by what modules read and gave. Nothing is judged; `ulpscope compare` does. Exit code: 0, or 3 where nothing can be read.
    """
    found = correspondence(reference, target, step=step, rank=rank)
    if form == "json":
        print_json(correspondence_json(found))
    else:
        print_lines(correspondence_lines(found))
