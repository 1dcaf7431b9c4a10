"""`python -m ptdbg_ascend.parse`: a prompt that knows vc, dc, pt, pk and cn, and hands every other line to the system's shell.

With arguments it runs that one command and ends. `exit`, `quit`, Ctrl+D and Ctrl+C at the prompt leave; Ctrl+C while a command
runs stops the command.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ulpscope.compat.ptdbg_ascend import parse_verbs
from ulpscope.model.errors import CRASHED, UlpscopeError, crash_text, did_you_mean

PROMPT = "Parse >>> "
_UNUSED_ASC = "[INFO] -asc is not used: kernel dumps are read without msaccucmp."
_LEAVE = ("exit", "quit")
_NOT_FOUND = 127


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its options, and what runs it."""

    help: str
    usage: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[parse_verbs.Say, argparse.Namespace], bool]

    def parser(self, name: str) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=name, description=self.help, allow_abbrev=False)
        self.add_options(parser)
        return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The prompt, or the one command that `arguments` are. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        return loop()
    if words[0] in ("-h", "--help", "help"):
        click.echo(help_text())
        return 0
    if words[0] not in COMMANDS:
        click.echo(f"[ERROR] no command {words[0]!r}.{did_you_mean(words[0], COMMANDS)} {_known()}", err=True)
        return 2
    return run_command(words[0], words[1:])


def loop() -> int:
    """Reads lines and runs them until one of them leaves."""
    with _completing():
        while True:
            try:
                line = input(PROMPT).strip()
            except (EOFError, KeyboardInterrupt):
                click.echo()
                return 0
            if line in _LEAVE:
                return 0
            try:
                run_line(line)
            except KeyboardInterrupt:
                click.echo("\n[INFO] stopped")


def run_line(line: str) -> int:
    """Runs one line: a command of ours, or anything the system's shell knows. Returns its exit code."""
    if not line:
        return 0
    name, rest = (*line.split(None, 1), "")[:2]
    if name in ("help", "?"):
        click.echo(help_text())
        return 0
    if name == "history":
        click.echo("\n".join(f"{number:5}  {entry}" for number, entry in enumerate(_history(), 1)))
        return 0
    if name not in COMMANDS and name != "cd":
        return _system(line)
    try:
        words = shlex.split(rest)
    except ValueError as error:
        click.echo(f"[ERROR] {line!r} cannot be read: {error}", err=True)
        return 2
    return _change_folder(words) if name == "cd" else run_command(name, words)


def run_command(name: str, words: Sequence[str]) -> int:
    """Runs one of COMMANDS. Mistakes are one message each."""
    command = COMMANDS[name]
    try:
        asked = command.parser(name).parse_args(words)
    except SystemExit as leaving:  # argparse has said what is wrong, or shown its help
        return int(leaving.code or 0)
    try:
        if getattr(asked, "asc", None) is not None:
            click.echo(_UNUSED_ASC)
        return 0 if command.run(click.echo, asked) else 3
    except UlpscopeError as error:
        click.echo(f"[ERROR] {error}", err=True)
        return error.exit_code
    except OSError as error:
        click.echo(f"[ERROR] {error.filename or name}: {error.strerror or error}", err=True)
        return 3
    except Exception as error:
        click.echo(f"[ERROR] {crash_text(error)}", err=True)
        return CRASHED


def help_text() -> str:
    """What can be typed."""
    rows = [f"  {command.usage:<62}{command.help}" for command in COMMANDS.values()]
    others = ("cd FOLDER", "go to another folder"), ("history", "the lines of this session")
    rows += [f"  {usage:<62}{what}" for usage, what in (*others, ("exit", "leave, as Ctrl+C and Ctrl+D do"))]
    return "\n".join(["Commands; COMMAND -h tells more, and any other line goes to the system's shell:", *rows])


def _system(line: str) -> int:
    sys.stdout.flush()
    code = subprocess.run(line, shell=True, check=False).returncode
    if code == _NOT_FOUND:
        name = line.split()[0]
        click.echo(f"[ERROR] no command {name!r}.{did_you_mean(name, COMMANDS)} {_known()}", err=True)
    return code


def _change_folder(words: Sequence[str]) -> int:
    try:
        os.chdir(os.path.expanduser(words[0] if words else "~"))
    except OSError as error:
        click.echo(f"[ERROR] cd: {error.filename}: {error.strerror}", err=True)
        return 1
    return 0


def _known() -> str:
    return f"Commands: {', '.join(COMMANDS)}, help, exit."


# --- options ----------------------------------------------------------------------------------------------------


def _vc_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", required=True, metavar="FOLDER", help="The kernel dumps to judge.")
    parser.add_argument("-g", required=True, metavar="FOLDER", help="The kernel dumps that are right.")
    parser.add_argument("-out", metavar="FOLDER", help=f"Where the csv goes; must exist. [{parse_verbs.COMPARED}]")
    _add_asc(parser)


def _dc_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", required=True, metavar="PATH", help="A kernel dump, or a folder of them.")
    parser.add_argument("-f", metavar="FORMAT", help="Convert to this format: NCHW, NHWC, ND ... [as on the device]")
    parser.add_argument("-out", metavar="FOLDER", help=f"Where the arrays go; must exist. [{parse_verbs.CONVERTED}]")
    _add_asc(parser)


def _add_asc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-asc", metavar="PATH", help="The path of msaccucmp; accepted and not used.")


def _pt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", required=True, metavar="FILE", help="An array.")


def _pk_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", required=True, metavar="PKL", help="The .pkl of a dump.")
    parser.add_argument("-n", required=True, metavar="API", help="The name of an API: Functional_conv2d_0_forward.")


def _cn_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", required=True, metavar="FILE", help="The array to judge.")
    parser.add_argument("-g", required=True, metavar="FILE", help="The array that is right.")
    parser.add_argument("-p", type=_count, default=20, metavar="NUM", help="So many elements are shown. [20]")
    parser.add_argument("-al", type=_limit, default=0.001, metavar="ATOL", help="Absolute part of the limit. [0.001]")
    parser.add_argument("-rl", type=_limit, default=0.001, metavar="RTOL", help="Relative part of the limit. [0.001]")
    parser.add_argument("-s", action="store_true", default=True, help="Save both as text; always on.")


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of elements from 0 to 999999")
    return int(text)


def _limit(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no limit; give a number from 0 on")
    return found


COMMANDS: dict[str, Command] = {
    "vc": Command(
        "compare two folders of kernel dumps, into a csv",
        "vc -m FOLDER -g FOLDER [-out FOLDER] [-asc PATH]",
        _vc_options,
        lambda say, asked: parse_verbs.compare_kernels(say, asked.m, asked.g, asked.out),
    ),
    "dc": Command(
        "convert kernel dumps to npy",
        "dc -n FILE_OR_FOLDER [-f FORMAT] [-out FOLDER] [-asc PATH]",
        _dc_options,
        lambda say, asked: parse_verbs.convert_kernels(say, asked.n, asked.f, asked.out),
    ),
    "pt": Command(
        "show the statistics of an array, and save it as text",
        "pt -n FILE",
        _pt_options,
        lambda say, asked: parse_verbs.show_array(say, asked.n),
    ),
    "pk": Command(
        "show the statistics and the stack of an API in a pkl",
        "pk -f PKL -n API",
        _pk_options,
        lambda say, asked: parse_verbs.show_api(say, asked.f, asked.n),
    ),
    "cn": Command(
        "compare two arrays element by element",
        "cn -m FILE -g FILE [-p NUM] [-al ATOL] [-rl RTOL] [-s]",
        _cn_options,
        lambda say, asked: parse_verbs.compare_arrays(
            say, asked.m, asked.g, count=asked.p, atol=asked.al, rtol=asked.rl
        ),
    ),
}


# --- history and completion -------------------------------------------------------------------------------------


def completions(line: str, word: str) -> list[str]:
    """What the last `word` of a line may become: a command, an option of the command, or a path."""
    first = line.lstrip().partition(" ")[0]
    if first == word and " " not in line.lstrip():
        known = [*COMMANDS, "cd", "help", "history", *_LEAVE]
        return sorted(name for name in known if name.startswith(word)) or _paths(word)
    if word.startswith("-") and first in COMMANDS:
        options = re.findall(r"-\w+", COMMANDS[first].usage)
        return sorted(option for option in options if option.startswith(word))
    return _paths(word)


def _paths(word: str) -> list[str]:
    found = sorted(glob.glob(glob.escape(os.path.expanduser(word)) + "*"))
    return [path + os.sep if os.path.isdir(path) else path for path in found]


@contextlib.contextmanager
def _completing() -> Iterator[None]:
    """Tab completes while the prompt is open; the program around it gets its own completion back."""
    readline = _readline()
    if readline is None:
        yield
        return
    before, delimiters = readline.get_completer(), readline.get_completer_delims()

    def complete(word: str, state: int) -> str | None:
        found = completions(readline.get_line_buffer()[: readline.get_endidx()], word)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before)
        readline.set_completer_delims(delimiters)


def _history() -> list[str]:
    readline = _readline()
    if readline is None:
        return []
    length = readline.get_current_history_length()
    return [entry for entry in map(readline.get_history_item, range(1, length + 1)) if entry is not None]


def _readline() -> Any:
    """None on Windows, which has none; lines are read all the same."""
    try:
        return importlib.import_module("readline")
    except ImportError:
        return None
