"""`ulpscope check overflow [RUN] [-- CMD...]`: the call that made the first inf or nan."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from ulpscope.capture.watch import OPTIONS_VARIABLE
from ulpscope.cli.launch import CUT, NOTHING, WithCommand, launch
from ulpscope.model.errors import CaptureError
from ulpscope.model.options import capture_config
from ulpscope.report.overflow import overflow_json, overflow_lines, summary_line
from ulpscope.store.dump import Dump
from ulpscope.store.registry import find_folders, open_run


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
    ulpscope check overflow runs/a                       what an earlier check kept (-o)

    Exit code: 0 no call overflowed, 1 one did, 3 none did until CMD ended by a signal or with an error, 4 no call of torch
    was seen.
    """
    command: list[str] | None = ctx.meta.get("command")
    if (run is None) == (command is None):
        raise click.UsageError("check overflow needs a command behind --, or the folder of an earlier check", ctx)
    if command is None:
        assert run is not None
        sys.exit(_tell(Path(run), open_run(Path(run)), form, quiet))
    with tempfile.TemporaryDirectory(prefix="ulpscope-check-") as scratch:
        folder = Path(output or scratch).resolve()
        if output is not None and folder.is_dir() and find_folders(folder):
            raise CaptureError(f"{output} holds an earlier run; choose another folder")
        options = {"path": str(folder), "overflows": number, "poles": poles, "level": level, "sketch": False}
        ended = launch(command, OPTIONS_VARIABLE, capture_config(options, "check overflow").as_json())
        code = _tell(folder, open_run(folder) if folder.is_dir() and find_folders(folder) else [], form, quiet)
        sys.exit(CUT if ended and code != 1 else code)


def _tell(folder: Path, dumps: list[Dump], form: str, quiet: bool) -> int:
    if not dumps:
        click.echo("ulpscope: nothing to check: no call of torch was seen", err=True)
        return NOTHING
    kept = [dump for dump in dumps if dump.manifest.config.get("overflows") is not None]
    if not kept:
        raise CaptureError(f"{folder} is a whole recording; `ulpscope check overflow -o DIR -- CMD` keeps overflows")
    found = _found(kept)
    notes = sorted({note for dump in kept for note in dump.manifest.notes})
    if not quiet and form == "json":
        told = [overflow_json(**each) for each in found]
        click.echo(json.dumps({"overflows": told, "notes": notes}, indent=1, default=str))
    elif not quiet:
        ranks = max(dump.manifest.world_size for dump in kept)
        for each in found:
            click.echo("\n".join(overflow_lines(**each, ranks=ranks)) + "\n")
        click.echo(summary_line(len(found), notes))
    cut = [dump for dump in kept if dump.ending != "complete"]
    for dump in cut:
        click.echo(f"ulpscope: step {dump.manifest.step} rank {dump.manifest.rank}: {dump.ending}", err=True)
    return 1 if found else CUT if cut else 0


def _found(dumps: list[Dump]) -> list[dict[str, Any]]:
    if not any(len(dump) for dump in dumps):
        return []
    from ulpscope.replay.overflow import overflow_of  # brings torch

    ordered = sorted(dumps, key=lambda dump: (dump.manifest.step, dump.manifest.rank))
    judged = [overflow_of(dump, call) for dump in ordered for call in dump.calls()]
    return [
        {
            "call": each.call,
            "step": each.step,
            "rank": each.rank,
            "source": each.source,
            "nature": each.nature.value,
            "reason": each.reason,
        }
        for each in judged
    ]
