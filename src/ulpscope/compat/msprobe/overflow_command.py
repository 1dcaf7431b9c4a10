"""`msprobe -f pytorch run_overflow_check -api_info dump.json`: whether each recorded overflow is normal or abnormal."""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from ulpscope.analyze.first_nonfinite import First, first_nonfinite
from ulpscope.model.errors import ConfigError, DumpError
from ulpscope.model.names import call_text
from ulpscope.model.records import Role
from ulpscope.report.nonfinite import nonfinite_lines
from ulpscope.store.dump import Dump
from ulpscope.store.formats.msprobe_writer import MsprobeFiles
from ulpscope.store.registry import open_dump, open_run

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
    for name in ("nan_analyze", "overflow_check"):
        parser = commands.add_parser(
            name, allow_abbrev=False, help="Find the first nan or inf of a step, over its ranks."
        )
        option = parser.add_argument
        option(
            "-i", "--input_path", required=True, metavar="FOLDER", help="The folder of a step, with those of its ranks."
        )
        option("-o", "--output_path", default="./output", metavar="FOLDER", help="Where the result goes. [./output]")
        parser.set_defaults(run=_analyze)


def _analyze(asked: argparse.Namespace) -> None:
    source, output = Path(asked.input_path), Path(asked.output_path)
    if not source.is_dir():
        raise ConfigError([f"-i {source} is not a folder; give that of a step, which has rank0, rank1 and so on"])
    dumps = open_run(source)
    if not dumps:
        raise ConfigError([f"-i {source} has no dump; give the folder of a step, which has rank0, rank1 and so on"])
    found = first_nonfinite(dumps)
    for first in found:
        _log.warning("%s", "\n".join(nonfinite_lines(first, ranks=len(dumps))))
    if not found:
        _log.info("Cannot find any anomaly node, no need to generate analyze file.")
        return
    content: dict[str, list[Any]] = {}
    for first in found:
        dump = next(dump for dump in dumps if dump.manifest.rank == first.rank)
        content.setdefault(f"rank_{first.rank}", []).append(_node(dump, first))
    try:
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"anomaly_analyze_{time.time_ns()}.json"
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"-o {output}: {error.strerror}"]) from None
    _log.info("The analyze result is saved in: %s", path)


def _node(dump: Dump, first: First) -> dict[str, Any]:
    """One call in the words of the tool's file, and how it came by its numbers."""
    above: list[str] = []
    parent = dump.parent(first.call)
    while parent is not None and call_text(parent) not in above:
        above.insert(0, call_text(parent))
        try:
            parent = dump.parent(dump.call(parent))
        except DumpError:
            break
    writer = MsprobeFiles(dump, dump.folder, task="statistics", level="mix", summary_mode="statistics")
    reached = [f"rank {rank} by {call_text(call)}" for rank, call in first.reached]
    return {
        "op_name": call_text(first.call.id),
        "data_info": writer.entry(first.call),
        "construct_info": [*above, call_text(first.call.id)],
        "stack_info": [
            f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.text}"
            for frame in dump.stack(first.call)
        ],
        "how": first.how.value,
        "reached": reached,
    }


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
