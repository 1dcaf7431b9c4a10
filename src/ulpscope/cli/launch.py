"""Running a command with something switched on in every Python process below it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ulpscope.capture.folder import RUN_VARIABLE
from ulpscope.model.errors import CaptureError

_BOOTSTRAP = Path(__file__).parent / "bootstrap"
# Exit codes of every verb that runs a command: what was seen is not all, or there was nothing to see.
CUT, NOTHING = 3, 4


class WithCommand(click.Command):
    """Takes what stands behind `--` as a command: `ctx.meta["command"]`, absent without a `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            if not args[at + 1 :]:
                raise click.UsageError("there is no command behind --", ctx)
            ctx.meta["command"] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def launch(command: list[str], variable: str, options: Mapping[str, Any]) -> int:
    """Runs the command to its end with the options in an environment variable, and tells an exit code that is not 0."""
    # What the program prints is not the result of this command.
    code = run(command, variable, options, stdout=sys.stderr)
    if code:
        click.echo(f"ulpscope: the command {ending(code)}; this is what it did until then", err=True)
    return code


def run(command: list[str], variable: str, options: Mapping[str, Any], *, stdout: Any = None) -> int:
    """The exit code of the command, negative for a signal. Whoever asks us to end asks the command."""
    environment = {
        **os.environ,
        variable: json.dumps(options),
        RUN_VARIABLE: uuid.uuid4().hex,
        "PYTHONPATH": os.pathsep.join([str(_BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    try:
        child = subprocess.Popen(command, env=environment, stdout=stdout)
    except OSError as error:
        raise CaptureError(f"cannot run {command[0]}: {error.strerror}") from None
    forwarded = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda received, _: child.send_signal(received)) for number in forwarded]
    try:
        with child:
            try:
                return child.wait()
            except BaseException:
                child.kill()
                raise
    finally:
        for number, handler in zip(forwarded, before, strict=True):
            signal.signal(number, handler)


def ending(code: int) -> str:
    """How a command ended that did not end well: what it did until then is no proof that nothing is wrong."""
    names = {-number.value: f" ({number.name})" for number in signal.Signals}
    return f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}{names.get(code, '')}"
