"""`ulpscope check WHAT ...`: checks that need no second run. Each is loaded when it is asked for."""

from __future__ import annotations

import importlib

import click

from ulpscope.model.errors import did_you_mean

# check -> what --help says about it; `check_NAME.py` beside this file has a command NAME.
CHECKS = {
    "overflow": "The call that made the first inf or nan.",
    "noise": "Calls whose result changes more than a small change of their input explains.",
    "ranks": "What should be equal over data-parallel replicas, and is not.",
    "ops": "Every recorded API call run again in float64, and what was recorded beside it.",
}


class Checks(click.Group):
    """Finds a check's command in its file."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(CHECKS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in CHECKS:
            return None
        command: click.Command = getattr(importlib.import_module(f"ulpscope.cli.check_{name}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in CHECKS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], CHECKS) or f" Checks: {', '.join(CHECKS)}."
            raise click.UsageError(f"no check {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Checks"):
            formatter.write_dl(list(CHECKS.items()))


@click.group(cls=Checks)
def check() -> None:
    """Checks of one run that need no run to compare it with."""
