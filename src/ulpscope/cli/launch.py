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

from ulpscope.capture.watch import RUN_VARIABLE
from ulpscope.errors import CaptureError

_BOOTSTRAP = Path(__file__).parent / "bootstrap"


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
    environment = {
        **os.environ,
        variable: json.dumps(options),
        RUN_VARIABLE: uuid.uuid4().hex,
        "PYTHONPATH": os.pathsep.join([str(_BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    try:
        # What the program prints is not the result of this command.
        code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
    except OSError as error:
        raise CaptureError(f"cannot run {command[0]}: {error.strerror}") from None
    if code:
        click.echo(f"ulpscope: the command {ending(code)}; this is what it did until then", err=True)
    return code


def ending(code: int) -> str:
    """How a command ended that did not end well: what it did until then is no proof that nothing is wrong."""
    names = {-number.value: f" ({number.name})" for number in signal.Signals}
    return f"ended with exit code {code}{names.get(code, '')}"
