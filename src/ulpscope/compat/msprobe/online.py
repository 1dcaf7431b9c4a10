"""msprobe's online pre-check: `task: tensor` with `online_run_ut` sends, `run_ut` with `is_online` checks.

Both ends are given the same nfs_path, or the same host and port; nfs_path wins. What was recorded on the device is judged
beside higher precision on the CPU of the checking machine. Where that machine has a device of its own, every call is run on
it too, and both are put beside each other as `api_precision_compare` does: an error counts by its ratio to the benchmark's.
"""

from __future__ import annotations

import atexit
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ulpscope.compat.msprobe.precheck_files import ResultFiles, compare_details
from ulpscope.model.errors import ConfigError, UlpscopeError
from ulpscope.replay import wire
from ulpscope.replay.online import (
    Channel,
    FolderChannel,
    FolderReceiver,
    Received,
    Sender,
    TcpChannel,
    TcpReceiver,
    secret_for,
)
from ulpscope.store.registry import open_dump

_log = logging.getLogger(__name__)


class OnlineCheck:
    """The sending end, from the section `tensor`: dumps go to the check instead of to disk. Raises ConfigError.

    Gradients stay by argument, as the check needs them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.sender = Sender(_channel(options))
        self._rank = 0
        # Registered before the capture is, so it ends after it.
        atexit.register(self._end)

    def send(self, folder: Path, finished: bool) -> None:
        """Takes a dump that a capture has finished."""
        if finished:
            about = open_dump(folder).manifest
            self._rank = about.rank
            self.sender.send(folder, about.step, about.rank)

    def _end(self) -> None:
        self.sender.close(self._rank)


def _channel(options: Mapping[str, Any]) -> Channel:
    folder = _shared(options)
    if folder is not None:
        return FolderChannel(folder)
    host, port, tls = _address(options, "online_run_ut")
    context = None if tls is None else wire.client_tls(tls)
    return TcpChannel(host, port, secret_for(host, tls=tls is not None), context)


def check_online(
    config: Mapping[str, Any], plan: Any, out: Path, stamp: str, *, benchmark: tuple[str, Any] | None = None
) -> None:
    """The checking end, from the section `run_ut`: results of each rank in files of their own, until all ranks are over.

    `benchmark` is the kind of this machine's device and the plan for it."""
    ranks = frozenset(config.get("rank_list") or (0,))
    files = {rank: ResultFiles.new(out, f"{stamp}_rank{rank}") for rank in sorted(ranks)}
    beside: dict[int, ResultFiles] = {}
    if benchmark is not None:
        beside = {rank: ResultFiles.new(out, f"{stamp}_rank{rank}_{benchmark[0]}") for rank in sorted(ranks)}
    with (
        tempfile.TemporaryDirectory(prefix="ulpscope-online-") as scratch,
        _receiver(config, ranks, scratch) as receiver,
    ):
        for received in receiver.dumps():
            try:
                _check(received, plan, files[received.rank])
                if benchmark is not None:
                    _check(received, benchmark[1], beside[received.rank])
            except Exception as error:  # the border: what comes from elsewhere may be anything
                told = str(error) if isinstance(error, UlpscopeError) else f"{type(error).__name__}: {error}"
                _log.error("step %d of rank %d is not checked: %s", received.step, received.rank, told[:500])
    for rank, other in beside.items():
        result, _ = compare_details(files[rank].details, other.details, out, f"{stamp}_rank{rank}")
        _log.info("Both devices beside each other are in %s", result)


def _check(received: Received, plan: Any, files: ResultFiles) -> None:
    from ulpscope.replay.precheck import check_dump  # brings torch

    count = 0
    for result in check_dump(open_dump(received.folder), plan):
        files.add(result)
        count += 1
    _log.info("step %d of rank %d: %d calls checked", received.step, received.rank, count)


def _receiver(config: Mapping[str, Any], ranks: frozenset[int], scratch: str) -> TcpReceiver | FolderReceiver:
    folder = _shared(config)
    if folder is not None:
        return FolderReceiver(folder, ranks)
    host, port, tls = _address(config, "is_online")
    context = None if tls is None else wire.server_tls(tls)
    secret = secret_for(host, tls=tls is not None)
    try:
        found = TcpReceiver(host, port, secret, ranks, Path(scratch), tls=context)
    except OSError as error:
        raise ConfigError([f"cannot listen at {host}:{port}: {error.strerror}"]) from None
    _log.info("listening at %s:%d for ranks %s", host, found.port, sorted(ranks))
    return found


def _shared(options: Mapping[str, Any]) -> Path | None:
    if not options.get("nfs_path"):
        return None
    folder = Path(options["nfs_path"])
    if not folder.is_dir():
        raise ConfigError([f"nfs_path: {folder} does not exist"])
    return folder


def _address(options: Mapping[str, Any], switch: str) -> tuple[str, int, Path | None]:
    host, port = options.get("host"), options.get("port", -1)
    if not host or port < 0:
        raise ConfigError([f"{switch} needs nfs_path, or host and port"])
    tls = Path(options["tls_path"]) if options.get("tls_path") else None
    if tls is not None and not tls.is_dir():
        raise ConfigError([f"tls_path: {tls} does not exist"])
    return str(host), int(port), tls
