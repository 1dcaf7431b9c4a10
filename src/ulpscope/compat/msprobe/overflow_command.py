"""`msprobe -f pytorch run_overflow_check -api_info dump.json`: whether each recorded overflow is normal or abnormal."""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path

from ulpscope.model.names import call_text
from ulpscope.model.records import Role
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)


def add_overflow_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "run_overflow_check", allow_abbrev=False, help="Say which overflows of a dump are normal."
    )
    option = parser.add_argument
    option("-api_info", "--api_info_file", required=True, metavar="FILE", help="dump.json of task overflow_check.")
    option("-j", "--jit_compile", action="store_true", help="Has no effect here.")
    option(
        "-d", "--device", dest="device_id", type=int, default=0, help="Has no effect here: float64 on the CPU decides."
    )
    parser.set_defaults(run=_run)


def _run(asked: argparse.Namespace) -> None:
    from ulpscope.replay.overflow import overflow_of  # brings torch

    dump = open_dump(Path(asked.api_info_file))
    for call in dump.calls():
        outputs = [value.stats for value in call.values if value.slot.role is Role.OUTPUT and value.stats is not None]
        if all(math.isfinite(stats.max or 0) and math.isfinite(stats.min or 0) for stats in outputs):
            continue
        judged = overflow_of(dump, call)
        told = f"{judged.nature.value} overflow" if not judged.reason else f"could not be run again: {judged.reason}"
        _log.warning("%s: %s", call_text(call.id), told)
