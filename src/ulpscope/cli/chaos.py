"""`ulpscope chaos -- CMD`: how far runs drift by themselves, and whether that explains a gap."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click

from ulpscope.analyze.chaos import FEWEST, Origin, place
from ulpscope.cli.launch import CUT, NOTHING, WithCommand, launch
from ulpscope.model.errors import CaptureError, DumpError
from ulpscope.replay.drift_watch import DRIFT_VARIABLE
from ulpscope.report.chaos import chaos_json, chaos_lines
from ulpscope.store.loss_curve import Track, read_tracks


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
    names = [" ".join(command)]
    if learned is None:
        tracks, is_cut = _learn(command, output, runs)
        observed = None
    else:
        if output is not None:
            raise click.UsageError("-o is for learning; LEARNED is only read", ctx)
        tracks = read_tracks(Path(learned))
        observed, is_cut = _observe(command)
        names = [learned, *names]
    reference, nudged = tracks.get(0, {}), [track for run, track in sorted(tracks.items()) if run]
    if len(nudged) < FEWEST:
        raise DumpError(f"only {len(nudged)} nudged runs were seen to their first step; {FEWEST} are needed")
    found = place(reference, nudged, observed)
    if not found.drifts:
        click.echo("ulpscope: nothing to compare: no step has a loss or an output in all runs", err=True)
        sys.exit(NOTHING)
    if form == "json":
        click.echo(json.dumps(chaos_json(found, runs=names), indent=1, sort_keys=True, allow_nan=False))
    else:
        click.echo("\n".join(chaos_lines(found, runs=names)))
    sys.exit(1 if found.origin is Origin.BUG and not exit_zero else CUT if is_cut else 0)


def _learn(command: list[str], output: str | None, runs: int) -> tuple[dict[int, Track], bool]:
    """All runs, and whether the command failed in one of them."""
    with tempfile.TemporaryDirectory(prefix="ulpscope-chaos-") as scratch:
        folder = Path(output or scratch).resolve()
        if folder.exists() and any(folder.glob("track.*")):
            raise CaptureError(f"{output} holds earlier tracks; choose another folder")
        codes = [_run(command, folder, run, seed=run or None) for run in range(runs + 1)]
        return _read(folder), any(codes)


def _observe(command: list[str]) -> tuple[Track, bool]:
    with tempfile.TemporaryDirectory(prefix="ulpscope-chaos-") as scratch:
        code = _run(command, Path(scratch), 0, seed=None)
        return _read(Path(scratch))[0], bool(code)


def _run(command: list[str], folder: Path, run: int, *, seed: int | None) -> int:
    return launch(command, DRIFT_VARIABLE, {"path": str(folder), "run": run, "seed": seed})


def _read(folder: Path) -> dict[int, Track]:
    try:
        return read_tracks(folder)
    except DumpError:
        click.echo("ulpscope: nothing to judge: no model was seen to run", err=True)
        sys.exit(NOTHING)
