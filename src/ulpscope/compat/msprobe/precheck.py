"""msprobe's accuracy pre-check: `run_ut`, `multi_run_ut` (later `acc_check`, `multi_acc_check`) and `api_precision_compare`.

The same switches, the same files. The device is the machine's NPU or GPU, and the CPU itself where it has none.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ulpscope.compat.msprobe.config import read_options
from ulpscope.compat.msprobe.online import check_online
from ulpscope.compat.msprobe.precheck_files import COMPARED, RESULT, ResultFiles, compare_details, timestamp
from ulpscope.model.errors import ConfigError
from ulpscope.model.options import read_config_file
from ulpscope.report.table import stamped

_log = logging.getLogger(__name__)
_MOST_PROCESSES, _PROCESSES = 64, 8
_LAST_DEVICE = 7
_ONLINE = ("is_online", "nfs_path", "host", "port", "rank_list", "tls_path")


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands to a parser."""
    for name in ("run_ut", "acc_check"):
        parser = commands.add_parser(name, allow_abbrev=False, help="Run every recorded API again and judge it.")
        _add_run(parser)
        parser.add_argument("-d", "--device", dest="device_id", type=_device_id, default=0, help="The device. [0]")
        parser.set_defaults(run=_run)
    for name in ("multi_run_ut", "multi_acc_check"):
        parser = commands.add_parser(name, allow_abbrev=False, help="The same by many processes.")
        _add_run(parser)
        option = parser.add_argument
        option("-d", "--device", dest="device_id", type=_one_of_eight, nargs="+", default=[0], help="The devices. [0]")
        option("-n", "--num_splits", type=_processes, default=_PROCESSES, help="How many processes, 1 to 64. [8]")
        parser.set_defaults(run=_run)
    parser = commands.add_parser(
        "api_precision_compare", allow_abbrev=False, help="The details of two devices beside each other."
    )
    option = parser.add_argument
    option("-npu", "--npu_csv_path", required=True, metavar="FILE", help="accuracy_checking_details of the NPU.")
    option("-gpu", "--gpu_csv_path", required=True, metavar="FILE", help="accuracy_checking_details of the GPU.")
    option("-o", "--out_path", default="./", metavar="FOLDER", help="Where the result goes. [./]")
    parser.set_defaults(run=_compare)


def _add_run(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("-api_info", "--api_info_file", metavar="FILE", help="dump.json, or a folder with one.")
    option("-o", "--out_path", default="./", metavar="FOLDER", help="Where the results go. [./]")
    option("-save_error_data", action="store_true", help="Keep inputs and outputs of what does not pass.")
    option("-j", "--jit_compile", action="store_true", help="Compile operators on an NPU, as the recorded run did.")
    option("-csv_path", "--result_csv_path", metavar="FILE", help="Go on with the run that wrote this result.")
    option("-f", "--filter_api", action="store_true", help="Of calls with the same kinds of arguments, only the first.")
    option("-config", "--config_path", metavar="FILE", help="config.json: white_list, black_list, error_data_path.")


def _compare(asked: argparse.Namespace) -> None:
    out = Path(asked.out_path)
    with _stamped(out, COMPARED) as stamp:
        result, details = compare_details(Path(asked.npu_csv_path), Path(asked.gpu_csv_path), out, stamp)
    _log.info("The result is in %s", result)
    _log.info("The details are in %s", details)


def _run(asked: argparse.Namespace) -> None:
    # Brings torch, which the other commands do without.
    from ulpscope.frameworks.torch.api_arguments import function_of
    from ulpscope.frameworks.torch.api_runner import ApiRunner, default_device, set_jit_compile
    from ulpscope.frameworks.torch.fused_references import FUSED, is_stand_in
    from ulpscope.replay.precheck import Choice, Plan, Rule, check_dump, check_in_processes
    from ulpscope.store.registry import open_dump

    config = read_section(asked.config_path)
    white, black = (frozenset(config.get(key, ())) for key in ("white_list", "black_list"))
    check_names({"white_list": white, "black_list": black})
    if config.get("is_online"):
        choice, kind = Choice(white, black, asked.filter_api), default_device()
        plan = Plan(ApiRunner(whole=False, recorded=True, only_recorded=True), choice, Rule.MSPROBE)
        own = (
            None if kind == "cpu" else (kind, Plan(ApiRunner(kind, whole=False, real_only=True), choice, Rule.MSPROBE))
        )
        return check_online(config, plan, Path(asked.out_path), timestamp(), benchmark=own)
    if asked.api_info_file is None:
        raise ConfigError(["-api_info is missing: give dump.json, or is_online in the file of -config"])
    source = Path(asked.api_info_file)
    if not source.exists():
        raise ConfigError([f"-api_info {source} does not exist"])
    files = ResultFiles.resumed(Path(asked.result_csv_path)) if asked.result_csv_path else None
    error_data = _error_folder(config, timestamp()) if asked.save_error_data else None
    kind = default_device()
    if set_jit_compile(asked.jit_compile) is False and asked.jit_compile:
        _log.warning("-j has no effect: there is no NPU here")
    ids = asked.device_id if isinstance(asked.device_id, list) else [asked.device_id]
    _check_devices(kind, ids)
    devices = [kind if kind == "cpu" else f"{kind}:{number}" for number in ids]
    runner = ApiRunner(devices[0], whole=False)
    plan = Plan(runner, Choice(white, black, asked.filter_api), Rule.MSPROBE, error_data)
    dump = open_dump(source)
    fused = sum(
        call.kind == "NPU" and is_stand_in(function_of(call.kind, call.name))
        for call in set(dump.ids())
        if call.name in FUSED
    )
    if fused:
        _log.warning(
            "%d calls are of fused operators of an NPU, and there is none here: their definition is run in float32 instead. That they pass says nothing of a device",
            fused,
        )
    if files is None:
        with _stamped(Path(asked.out_path), RESULT) as stamp:
            files = ResultFiles.new(Path(asked.out_path), stamp)
    _log.info("UT task result will be saved in %s", files.result)
    _log.info("UT task details will be saved in %s", files.details)
    processes = getattr(asked, "num_splits", 1)
    found = (
        check_in_processes(dump.folder, plan, files.done, processes=processes, devices=devices)
        if processes > 1
        else check_dump(dump, plan, files.done)
    )
    for result in found:
        files.add(result)
    _log.info("%d calls were done before", len(files.done))
    _log.info("Successfully completed run_ut/multi_run_ut.")


@contextlib.contextmanager
def _stamped(folder: Path, begin: str) -> Iterator[str]:
    """The time in the names of results that begin so."""
    try:
        with stamped(folder, f"{begin}{{}}.csv") as stamp:
            yield stamp
    except OSError as error:
        raise ConfigError([f"-o {folder}: {error.strerror}"]) from None


def read_section(path: str | None) -> dict[str, Any]:
    """The section run_ut of a config.json; nothing without a file. Raises ConfigError."""
    if path is None:
        return {}
    content = read_config_file(path)
    found = read_options("run_ut", content.get("run_ut", content.get("acc_check")) or {}, path)
    if not found.get("is_online"):
        found = {key: value for key, value in found.items() if key not in _ONLINE}
    return found


def check_names(lists: dict[str, Iterable[str]]) -> None:
    """Raises ConfigError for operators that torch does not have."""
    from ulpscope.frameworks.torch.api_arguments import is_known

    problems = []
    for key, names in lists.items():
        wrong = sorted(name for name in names if not is_known(name))
        if wrong:
            problems.append(f"Invalid api in {key}: {wrong}; a name is that of the operator alone, such as conv2d")
    if problems:
        raise ConfigError(problems)


def _error_folder(config: dict[str, Any], stamp: str) -> Path:
    base = Path(config.get("error_data_path", "./"))
    if not base.is_dir():
        raise ConfigError([f"error_data_path: {base} does not exist"])
    return base / f"ut_error_data{stamp}"


def _check_devices(kind: str, ids: list[int]) -> None:
    """Raises ConfigError for a device that the machine does not have; says that a CPU has none to choose from."""
    from ulpscope.frameworks.torch.api_runner import device_count

    there = device_count(kind)
    if kind == "cpu" and any(ids):
        _log.warning("-d has no effect: there is neither NPU nor GPU here, calls run on the CPU")
    elif kind != "cpu" and max(ids) >= there:
        raise ConfigError([f"-d {max(ids)}: this machine has {there} of {kind}, counted from 0"])


def _one_of_eight(text: str) -> int:
    if not text.isdigit() or not 0 <= int(text) <= _LAST_DEVICE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device from 0 to {_LAST_DEVICE}")
    return int(text)


def _device_id(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a device")
    return int(text)


def _processes(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MOST_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_PROCESSES}")
    return int(text)
