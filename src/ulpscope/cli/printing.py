"""What commands have in common: a command behind --, JSON on stdout, sentences on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import click

from ulpscope.api.launch import ending


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


def tell(text: str) -> None:
    """A sentence beside the answer."""
    click.echo(f"ulpscope: {text}", err=True)


def tell_ending(code: int) -> None:
    """How the command ended that was run, if it did not end well."""
    if code:
        tell(f"the command {ending(code)}; this is what it did until then")


def print_json(content: Any, *, default: Callable[[Any], Any] | None = None) -> None:
    """The same bytes for the same answer."""
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False, default=default)
    click.echo(text)


def print_lines(lines: Iterable[str]) -> None:
    click.echo("\n".join(lines))
