"""`ulpscope VERB ...`. Each verb is loaded when it is asked for, so that --help is quick."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from typing import Any, NoReturn

import click

from ulpscope import __version__
from ulpscope.model.errors import CRASHED, UlpscopeError, crash_text

# verb -> what --help says about it; the file of the same name has a command of the same name.
VERBS = {
    "capture": "Record a program: runs any command with capture on.",
    "compare": "Two runs: where they stop agreeing, and by how much.",
    "map": "Which modules and values of two programs are the same, whatever they are called.",
    "blame": "The operator that introduced an error, by running every kernel again.",
    "calibrate": "What the kernels of this device do, for the limits of `blame`.",
    "replay": "One recorded call, run again on its recorded inputs.",
    "repro": "A folder with a stand-alone script that shows what is wrong with one call.",
    "chaos": "Bug or chaos: how far runs of this model drift apart by themselves.",
    "check": "Checks of one run, without a second one: overflow, noise, ranks, ops.",
    "show": "What was recorded: a run, its calls, or one call with its values and stack.",
    "tensor": "One tensor, or two element by element: worst elements, histogram, error map.",
    "convert": "A run in the files of another tool, or the other way round.",
}

# As a dump that cannot be read: the answer is not known.
_NO_FILE = 3
_USAGE, _SIGPIPE = 2, 13


class Verbs(click.Group):
    """Finds a verb's command in its file, and the nearest verb for a misspelt one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = getattr(importlib.import_module(f"ulpscope.cli.{name}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Verbs: {', '.join(VERBS)}."
            raise click.UsageError(f"no verb {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # A reader such as head has closed the pipe: nowhere to say anything. click would end with 1, which is an answer.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + _SIGPIPE)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ulpscope")
def cli() -> None:
    """Finds where two runs of a model stop agreeing, and says whether that is a bug or rounding."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point: every error becomes one message and an exit code, and none of them 1, which is an answer."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        code = cli.main(args=arguments, prog_name="ulpscope", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return _USAGE
    except UlpscopeError as error:
        return _told(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        return _told(f"this needs {error.name}, which is not installed here", _NO_FILE)
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        return _told(f"cannot use{place}: {error.strerror or error}; choose another place", _NO_FILE)
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except Exception as error:
        return _told(crash_text(error), CRASHED)


def _told(text: str, code: int) -> int:
    # A name may hold what a terminal cannot be given.
    click.echo(f"ulpscope: {text}".encode("utf-8", "backslashreplace").decode(), err=True)
    return code


if __name__ == "__main__":
    main()
