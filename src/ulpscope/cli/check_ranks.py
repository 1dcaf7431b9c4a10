"""`ulpscope check ranks RUN`: what should be equal over data-parallel replicas, and is not."""

from __future__ import annotations

import json
import sys

import click

from ulpscope.analyze.replicas import Groups
from ulpscope.api.checks import check_ranks
from ulpscope.api.launch import NOTHING
from ulpscope.cli.printing import tell
from ulpscope.report.replicas import replica_json, replica_lines


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False))
@click.option("--replicas", help="Ranks that hold the same parameters: 0,1;2,3  [default: those that begin equal]")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing, only exit.")
def ranks(run: str, replicas: str | None, form: str, quiet: bool) -> None:
    """Find the first call of a recorded run at which data-parallel replicas disagree.

    \b
    ulpscope capture -o runs/a --level mix --checksum -- torchrun --nproc-per-node 8 train.py
    ulpscope check ranks runs/a

    Compared are parameters over replicas, and what all_reduce, all_gather and broadcast leave with the members of a group.
    Exit code: 0 all agree, 1 some do not, 4 there was nothing to compare.
    """
    answer = check_ranks(run, replicas=_groups(replicas))
    if not answer.compared:
        tell("nothing to compare: no two ranks begin with the same parameters; name them (--replicas)")
        sys.exit(NOTHING)
    if not quiet:
        click.echo(json.dumps(replica_json(answer), indent=1) if form == "json" else "\n".join(replica_lines(answer)))
    sys.exit(1 if answer.found else 0)


def _groups(text: str | None) -> Groups:
    if text is None:
        return ()
    try:
        return tuple(tuple(int(rank) for rank in part.split(",")) for part in text.split(";") if part.strip())
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of ranks such as '0,1;2,3'", param_hint="--replicas") from None
