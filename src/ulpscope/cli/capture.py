"""`ulpscope capture [options] -o DIR -- CMD...`: runs a command, its child processes too, with capture on."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from ulpscope.api.launch import NOTHING
from ulpscope.api.recording import record
from ulpscope.cli.printing import tell
from ulpscope.model.errors import DumpError
from ulpscope.model.options import read_config_file
from ulpscope.store.dump import Dump
from ulpscope.store.registry import find_folders, open_dump


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("-o", "--output", "path", required=True, type=click.Path(), help="Folder for the run.")
@click.option("--level", type=click.Choice(["module", "op", "mix", "kernel"]), help="How deep to look.  [default: op]")
@click.option("--steps", help="Steps to record: 0,10:12  [default: all]")
@click.option("--ranks", help="Ranks to record: 0,4:7  [default: all]")
@click.option("--only", multiple=True, help="Record only calls with this name, or part of it. May be repeated.")
@click.option("--skip", multiple=True, help="Do not record calls with this name, or part of it. May be repeated.")
@click.option("--scope", nargs=2, help="Record from the first named call to the second.", metavar="FIRST LAST")
@click.option("--below", help="At level kernel: only kernels inside this call.")
@click.option(
    "--acl-config", type=click.Path(exists=True, dir_okay=False), help="With --below, on an NPU: its own dump."
)
@click.option(
    "--backward-input", multiple=True, help="With --acl-config: a .pt with a gradient of an output. In order."
)
@click.option("--phase", "phases", multiple=True, type=click.Choice(["forward", "backward"]))
@click.option("--role", "roles", multiple=True, type=click.Choice(["input", "output"]))
@click.option("--tensors/--stats", default=None, help="Store the exact bits too, or statistics alone (the default).")
@click.option("--checksum", is_flag=True, default=None, help="CRC-32 of every tensor.")
@click.option("--rows", is_flag=True, help="Record two numbers for each row of a tensor, too.")
@click.option("--no-sketch", is_flag=True, help="Leave the sketch out.")
@click.option("--no-stacks", is_flag=True, help="Leave the Python stacks out.")
@click.option("--queue-mb", type=int, help="Memory for tensors that wait for the disk.  [default: 64]")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="Options from a .toml or .json file.")
@click.option("--strict", is_flag=True, help="Refuse to begin where the disk has no room for the queues.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in the same folder.")
@click.option("--allow-empty", is_flag=True, help="Exit with 0 also when nothing was recorded.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing at the end, unless something is wrong.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def capture(
    path: str,
    command: tuple[str, ...],
    config: str | None,
    overwrite: bool,
    allow_empty: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Record a program without editing it.

    \b
    ulpscope capture -o runs/a -- python train.py
    ulpscope capture -o runs/b --level mix --steps 0,100 -- torchrun --nproc-per-node 8 train.py

    Every Python process below COMMAND that imports torch is recorded. A step is a round of a training loop, with the updates
    of all its optimizers, or, where nothing is trained, a forward of the largest model or a generation. The exit code is that of COMMAND; 3 if it is 0 and what was recorded cannot be
    read, 4 if it is 0 and nothing was recorded.
    """
    options = {} if config is None else read_config_file(config)
    for name in ("sketch", "stacks"):
        if flags.pop(f"no_{name}"):
            options[name] = False
    options |= {key: list(value) if isinstance(value, tuple) else value for key, value in flags.items() if value}
    if flags.get("tensors") is False:
        options["tensors"] = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command as well
    code = record(command, path, overwrite=overwrite, told_in=config or "capture", **options)
    code = code if code >= 0 else 128 - code
    try:
        some = any(options.get(name) not in (None, "", []) for name in ("steps", "ranks"))
        calls = _report(Path(path), some=some, quiet=quiet)
    except DumpError as error:
        tell(str(error))
        sys.exit(code or error.exit_code)
    sys.exit(code or (0 if calls or allow_empty else NOTHING))


def _report(run: Path, *, some: bool, quiet: bool) -> int:
    """Says what there is, and what is wrong with it; returns how many calls there are."""
    dumps = [open_dump(place.folder) for place in find_folders(run)] if run.exists() else []
    calls = sum(len(dump) for dump in dumps)
    steps, ranks = len({dump.manifest.step for dump in dumps}), len({dump.manifest.rank for dump in dumps})
    if calls and not quiet:
        words = f"{calls} calls, {steps} step{'s'[: steps > 1]}, {ranks} rank{'s'[: ranks > 1]}"
        click.echo(f"ulpscope: recorded {words} in {run}\nulpscope: ulpscope show {run}", err=True)
    for dump in dumps:
        if dump.ending != "complete":
            tell(f"{dump.folder}: {dump.ending}")
    if not calls:
        tell(f"nothing was recorded; {_why_nothing(dumps, some=some)}")
    return calls


def _why_nothing(dumps: list[Dump], *, some: bool) -> str:
    if dumps:
        notes = sorted({note for dump in dumps for note in dump.manifest.notes})
        return "; ".join(["torch was called, but nothing was left of what was asked for", *notes])
    why = "no Python process below the command called torch, or its environment did not reach the one that did"
    return why + (", or none came to a step and a rank that were asked for" if some else "")
