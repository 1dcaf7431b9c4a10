"""`ulpscope capture [options] -o DIR -- CMD...`: runs a command, its child processes too, with capture on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import click

from ulpscope.capture.watch import OPTIONS_VARIABLE, RUN_VARIABLE
from ulpscope.config import capture_config, read_config_file
from ulpscope.errors import CaptureError, DumpError
from ulpscope.store.layout import find_places
from ulpscope.store.reader import Dump

_BOOTSTRAP = Path(__file__).parent / "bootstrap"


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
@click.option("--no-sketch", is_flag=True, help="Leave the sketch out.")
@click.option("--no-stacks", is_flag=True, help="Leave the Python stacks out.")
@click.option("--queue-mb", type=int, help="Memory for tensors that wait for the disk.  [default: 64]")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="Options from a .toml or .json file.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in the same folder.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing at the end.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def capture(
    path: str, command: tuple[str, ...], config: str | None, overwrite: bool, quiet: bool, **flags: Any
) -> None:
    """Record a program without editing it.

    \b
    ulpscope capture -o runs/a -- python train.py
    ulpscope capture -o runs/b --level mix --steps 0,100 -- torchrun --nproc-per-node 8 train.py

    Every Python process below COMMAND that imports torch is recorded. A step is an optimizer step, or, where there is no
    optimizer, a forward of the largest model. The exit code is that of COMMAND.
    """
    options = {} if config is None else read_config_file(config)
    for name in ("sketch", "stacks"):
        if flags.pop(f"no_{name}"):
            options[name] = False
    options |= {key: list(value) if isinstance(value, tuple) else value for key, value in flags.items() if value}
    if flags.get("tensors") is False:
        options["tensors"] = False
    options["path"] = str(Path(path).resolve())
    checked = capture_config(options, config or "capture")
    _clear(Path(path), overwrite)
    _refuse_unwritable(Path(path))
    environment = {
        **os.environ,
        OPTIONS_VARIABLE: json.dumps(checked.as_json()),
        RUN_VARIABLE: uuid.uuid4().hex,
        "PYTHONPATH": os.pathsep.join([str(_BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    code = _run(list(command), environment)
    if not quiet:
        _report(Path(path), some=bool(checked.steps or checked.ranks))
    sys.exit(code)


def _clear(run: Path, overwrite: bool) -> None:
    if not run.exists():
        return
    if not run.is_dir():
        raise CaptureError(f"{run} is a file; -o needs a folder")
    places = find_places(run)
    if places and not overwrite:
        raise CaptureError(f"{run} holds an earlier capture; choose another folder, or add --overwrite to replace it")
    for place in places:
        shutil.rmtree(place.folder)
        if not any(place.folder.parent.iterdir()):
            place.folder.parent.rmdir()


def _refuse_unwritable(run: Path) -> None:
    """Before the command runs for hours."""
    folder = next(each for each in (run.absolute(), *run.absolute().parents) if each.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CaptureError(f"cannot write into {run}: {folder} is not writable; choose another folder with -o")


def _run(command: list[str], environment: dict[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise CaptureError(f"cannot run {command[0]}: {error.strerror}") from None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: child.send_signal(received))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child as well
    code = child.wait()
    return code if code >= 0 else 128 - code


def _report(run: Path, *, some: bool) -> None:
    try:
        dumps = [Dump(place.folder) for place in find_places(run)] if run.exists() else []
    except DumpError as error:
        click.echo(f"ulpscope: {error}", err=True)
        return
    if not dumps:
        why = "no process below the command called torch"
        why += ", or none came to a step and a rank that were asked for" if some else ""
        click.echo(f"ulpscope: nothing was recorded; {why}", err=True)
        return
    steps, ranks = len({dump.manifest.step for dump in dumps}), len({dump.manifest.rank for dump in dumps})
    calls = sum(len(dump) for dump in dumps)
    words = f"{calls} calls, {steps} step{'s'[: steps > 1]}, {ranks} rank{'s'[: ranks > 1]}"
    click.echo(f"ulpscope: recorded {words} in {run}\nulpscope: ulpscope show {run}", err=True)
    for dump in dumps:
        if dump.ending != "complete":
            click.echo(f"ulpscope: {dump.folder}: {dump.ending}", err=True)
