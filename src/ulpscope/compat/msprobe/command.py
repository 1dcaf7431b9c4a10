"""The command line of msprobe: `msprobe -f pytorch compare ...`, `merge_result`, `run_ut` and others.

Bad input is one message and exit code 2, a comparison of nothing 4. `-f` before the subcommand is the framework, after it fuzzy matching or a filter.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ulpscope.compare.mapping import Mapping, read_mapping
from ulpscope.compat.beside import refuse_beside
from ulpscope.compat.msprobe.comparing import (
    Wanted,
    compare_files,
    compare_folders,
    first_difference,
    read_input,
    shows_stacks,
)
from ulpscope.compat.msprobe.merge import merge_result
from ulpscope.compat.msprobe.overflow_command import add_overflow_command
from ulpscope.compat.msprobe.precheck import add_commands
from ulpscope.model.errors import CRASHED, ConfigError, UlpscopeError, crash_text

_log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 20
_NOTHING = 4
# The manual's own examples have remarks behind the values.
_REMARK = re.compile(r'(?m)#[^"\n]*$')


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code."""
    if Path(sys.argv[0]).stem == "msprobe":  # the command that ulpscope-dropin installs
        try:
            refuse_beside("mindstudio-probe", "msprobe")
        except ImportError as error:
            sys.stderr.write(f"{error}; `python -m ulpscope.compat.msprobe` is this command under another name\n")
            return 2
    asked = _parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s (%(process)d) [%(levelname)s] %(message)s", level=logging.INFO)
    try:
        return asked.run(asked) or 0
    except UlpscopeError as error:
        # A name may hold what no terminal and no log file can be given.
        _log.error("%s", str(error).encode("utf-8", "backslashreplace").decode())
        return 2
    except OSError as error:
        _log.error("cannot use %s: %s; choose another place", error.filename, error.strerror or error)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        _log.error("%s", crash_text(error))
        return CRASHED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="msprobe", description="msprobe, answered by ulpscope.", allow_abbrev=False)
    parser.add_argument(
        "-f", "--framework", required=True, choices=["pytorch"], help="The framework of the dumps; stands first."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_compare(
        commands.add_parser("compare", allow_abbrev=False, help="Compare two dumps, or two steps of many ranks.")
    )
    _add_merge(
        commands.add_parser("merge_result", allow_abbrev=False, help="One workbook from the results of all ranks.")
    )
    add_commands(commands)
    add_overflow_command(commands)
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("-i", "--input_path", required=True, metavar="FILE", help="compare.json: npu_path, bench_path, stack_path.")
    here = "./output"  # also for a -o without a folder
    option(
        "-o",
        "--output_path",
        nargs="?",
        default=here,
        const=here,
        metavar="FOLDER",
        help=f"Where the result goes. [{here}]",
    )
    option("-s", "--stack_mode", action="store_true", help="With stack_path: show NPU_Stack_Info.")
    option("-c", "--compare_only", action="store_true", help="No advice.")
    option("-f", "--fuzzy_match", action="store_true", help="Match calls that differ in their number only.")
    option("-hl", "--highlight", action="store_true", help="Colour suspicious rows, and say why in Err_message.")
    option("-dm", "--data_mapping", metavar="FILE", help="A yaml file of `npu name: bench name`, one value a line.")
    option("-da", "--diff_analyze", action="store_true", help="Find the first call that differs.")
    parser.set_defaults(run=_compare)


def _add_merge(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("-i", "--input_dir", required=True, metavar="FOLDER", help="The results of all ranks.")
    option("-o", "--output_dir", required=True, metavar="FOLDER", help="Where the workbook goes.")
    option("-config", "--config-path", required=True, metavar="FILE", help="A yaml file with api and compare_index.")
    parser.set_defaults(run=_merge)


def _merge(asked: argparse.Namespace) -> None:
    merge_result(asked.input_dir, asked.output_dir, asked.config_path)


def _compare(asked: argparse.Namespace) -> int:
    npu, bench, stacks, print_log = read_input(_read_json(Path(asked.input_path)))
    if asked.data_mapping and asked.fuzzy_match:
        raise ConfigError(["-dm says which values belong together; it cannot be used with -f"])
    for path in (npu, bench):
        try:
            found = path.exists()
        except OSError as error:  # a name that no file system takes
            raise ConfigError([f"{str(path)[:80]!r}: {error.strerror}"], asked.input_path) from None
        if not found:
            raise ConfigError([f"{path} does not exist"], asked.input_path)
    if npu.is_dir() != bench.is_dir():
        raise ConfigError(["The npu_path and bench_path need to be of the same type."], asked.input_path)
    output = Path(asked.output_path)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"-o {output}: {error.strerror}"]) from None
    names = read_mapping(asked.data_mapping) if asked.data_mapping else Mapping()
    wanted = Wanted(output, asked.fuzzy_match, asked.highlight, not asked.compare_only, print_log, names)
    if asked.diff_analyze:
        compared = first_difference(npu, bench, wanted)
    elif not npu.is_dir():
        compared = compare_files(npu, bench, wanted, stacks=shows_stacks(npu, stacks, stack_mode=asked.stack_mode))
    elif names:
        raise ConfigError(
            ["-dm is for one card; give two files dump.json as npu_path and bench_path"], asked.input_path
        )
    else:
        compared = compare_folders(npu, bench, wanted)
    return 0 if compared else _NOTHING


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError([f"has {path.stat().st_size} bytes; that is no compare.json"], str(path))
        text = path.read_text(encoding="utf-8")
        try:
            return json.loads(text)
        except ValueError:
            return json.loads(_REMARK.sub("", text))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"cannot be read: {error}"], str(path)) from None


if __name__ == "__main__":
    sys.exit(main())
