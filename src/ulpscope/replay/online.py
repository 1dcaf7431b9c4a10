"""The online pre-check: one process runs the model and sends what it recorded, another one checks it.

The sending end never waits and never raises: a thread sends, a few dumps may be pending, and what could not be sent is
counted and said. The receiving end trusts nothing that comes. Dumps go over TCP (wire.py) or through a shared folder.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import queue
import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ulpscope.model.background import OwnThread
from ulpscope.model.errors import ConfigError, UlpscopeError
from ulpscope.replay.wire import BUSY, DUMP, FILES, KEPT, OVER, REFUSED, Line, Message, WireError, about

log = logging.getLogger(__name__)
SECRET_VARIABLE = "ULPSCOPE_SECRET"
_PENDING = 2
_TIMEOUT = 30.0
_POLL = 0.2
# Seconds for which a program that ends waits for a check that is not there yet.
_GRACE = 5.0
_MOST_CONNECTIONS = 64
_NAME = re.compile(r"step(\d{1,9})-rank(\d{1,9})\.dump")
_OVER = re.compile(r"rank(\d{1,9})\.over")


class Channel(Protocol):
    """A way to the checking process."""

    def deliver(self, message: Message, folder: Path | None) -> bool:
        """Sends; False when the other end is busy. Raises OSError or WireError."""


def secret_for(host: str, *, tls: bool) -> bytes:
    """The secret both ends share. Raises ConfigError where there is none and the host is another machine."""
    secret = os.environ.get(SECRET_VARIABLE, "").encode()
    if not secret and not tls and not is_loopback(host):
        raise ConfigError(
            [f"host = {host!r} is another machine: set {SECRET_VARIABLE} to the same text on both, or give tls_path"]
        )
    return secret


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- sending ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TcpChannel:
    """A connection for each dump: an end that was away for a while is found again."""

    host: str
    port: int
    secret: bytes
    tls: ssl.SSLContext | None = None
    timeout: float = _TIMEOUT

    def deliver(self, message: Message, folder: Path | None) -> bool:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((self.host, self.port), self.timeout))
            if self.tls is not None:
                connection = stack.enter_context(self.tls.wrap_socket(connection))
            answer = Line(connection, self.secret, sends=True, patience=self.timeout).send(message, folder)
        if answer == REFUSED:
            raise WireError("the other end refused it; its rank_list may not have this rank")
        return answer == KEPT


@dataclass(frozen=True, slots=True)
class FolderChannel:
    """A folder that both ends see. A dump is there whole or not at all."""

    path: Path
    pending: int = _PENDING

    def deliver(self, message: Message, folder: Path | None) -> bool:
        if message.kind == OVER:
            (self.path / f"rank{message.rank}.over").touch()
            return True
        assert folder is not None
        mine = [name for name in os.listdir(self.path) if name.endswith(f"-rank{message.rank}.dump")]
        if len(mine) >= self.pending:
            return False
        draft = self.path / f".{os.getpid()}-rank{message.rank}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            for name, _ in message.files:
                shutil.copyfile(folder / name, draft / name)
            draft.rename(self.path / f"step{message.step}-rank{message.rank}.dump")
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True


class Sender:
    """Sends dumps from a thread of its own. `lost` says what did not arrive, and why."""

    def __init__(self, channel: Channel, *, pending: int = _PENDING, timeout: float = _TIMEOUT) -> None:
        self.lost: list[str] = []
        self.sent = 0
        self._channel, self._timeout = channel, timeout
        self._waiting: queue.Queue[tuple[Message, Path | None] | None] = queue.Queue(pending)
        self._current: tuple[Message, Path | None] | None = None
        self._reachable, self._patient_until = True, float("inf")
        self._thread = OwnThread(self._run)
        self._thread.start()

    def send(self, folder: Path, step: int, rank: int) -> None:
        """Takes a finished dump, which is deleted when it is sent or lost. Returns at once."""
        try:
            self._waiting.put_nowait((about(folder, step, rank), folder))
        except (queue.Full, OSError) as error:
            why = "the check is too slow" if isinstance(error, queue.Full) else str(error)
            self._lose(Message(DUMP, step, rank), folder, why)

    def close(self, rank: int) -> None:
        """Tells the other end that this rank has ended, waits a while for what is pending, and says what was lost."""
        end = time.monotonic() + 2 * self._timeout
        self._patient_until = time.monotonic() + min(_GRACE, self._timeout)
        for last in ((Message(OVER, 0, rank), None), None):
            with contextlib.suppress(queue.Full):
                self._waiting.put(last, timeout=max(0.0, end - time.monotonic()))
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_working():
            self._lose_pending()
        if self.lost:
            log.warning("the online check did not get %d of %d dumps", len(self.lost), len(self.lost) + self.sent)

    def _lose_pending(self) -> None:
        pending = [self._current]
        with contextlib.suppress(queue.Empty):
            while True:
                pending.append(self._waiting.get_nowait())
        for item in pending:
            if item is not None:
                self._lose(*item, "it was not sent before the end")

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._current = item
            message, folder = item
            why = self._tried(message, folder)
            self._current = None
            if why is not None:
                self._lose(message, folder, why)
            elif folder is not None:
                self.sent += 1
                shutil.rmtree(folder, ignore_errors=True)

    def _tried(self, message: Message, folder: Path | None) -> str | None:
        """None when it arrived, else why not. An end that was never there is not waited for twice."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                if self._channel.deliver(message, folder):
                    self._reachable = True
                    return None
                why = "the check is too slow"
            except WireError as error:
                return str(error)
            except Exception as error:  # the border: whatever the other end or the disk does, training goes on
                why = f"{type(error).__name__}: {error}"
                if not self._reachable or time.monotonic() >= self._patient_until:
                    return why
            if time.monotonic() >= end:
                self._reachable = False
                return why
            time.sleep(_POLL)

    def _lose(self, message: Message, folder: Path | None, why: str) -> None:
        if folder is None:
            return
        text = f"step {message.step} of rank {message.rank}: {why}"
        self.lost.append(text)
        log.warning("lost for the online check: %s; training goes on", text)
        shutil.rmtree(folder, ignore_errors=True)


# --- receiving ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A dump that has come. Its folder is gone when the next one is asked for."""

    folder: Path
    step: int
    rank: int


class TcpReceiver:
    """Listens for dumps of some ranks, until each has said that it is over. A context manager."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        ranks: frozenset[int],
        scratch: Path,
        *,
        tls: ssl.SSLContext | None = None,
        pending: int = 4,
        timeout: float = _TIMEOUT,
    ) -> None:
        self._secret, self._ranks, self._scratch, self._tls, self._timeout = secret, ranks, scratch, tls, timeout
        self._waiting: queue.Queue[Received] = queue.Queue(pending)
        self._room = threading.BoundedSemaphore(pending)
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._over: set[int] = set()
        self._number = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, port))
        self.port = int(self._listener.getsockname()[1])
        self._thread = OwnThread(self._accept)

    def __enter__(self) -> TcpReceiver:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(self._timeout)

    def dumps(self) -> Iterator[Received]:
        """Dumps as they come; ends when all ranks are over."""
        while True:
            over = self._ranks <= self._over  # looked at first: a dump comes before the end of its rank
            try:
                found = self._waiting.get(timeout=_POLL)
            except queue.Empty:
                if over:
                    return
                continue
            yield found
            shutil.rmtree(found.folder, ignore_errors=True)
            self._room.release()

    def _accept(self) -> None:
        while True:
            try:
                connection, where = self._listener.accept()
            except OSError:
                return
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            OwnThread(self._serve, connection, where[0]).start()

    def _serve(self, connection: socket.socket, where: str) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(connection)
                connection.settimeout(self._timeout)
                if self._tls is not None:
                    connection = stack.enter_context(self._tls.wrap_socket(connection, server_side=True))
                line = Line(connection, self._secret, sends=False, patience=self._timeout)
                while (message := line.receive()) is not None:
                    self._take(line, message)
        except (UlpscopeError, OSError) as error:
            log.warning("a connection from %s was dropped: %s", where, error)
        finally:
            self._connections.release()

    def _take(self, line: Line, message: Message) -> None:
        if message.rank not in self._ranks:
            line.answer(REFUSED)
            raise WireError(f"rank {message.rank} is not in rank_list {sorted(self._ranks)}")
        if message.kind == OVER:
            line.answer(KEPT)
            line.keep(message, self._scratch)
            line.answer(KEPT)
            self._over.add(message.rank)
            return
        enough = shutil.disk_usage(self._scratch).free > message.size * 1.05
        if not enough or not self._room.acquire(blocking=False):
            line.answer(BUSY)
            return
        with self._lock:
            self._number += 1
            folder = self._scratch / f"received{self._number}"
        try:
            folder.mkdir()
            line.answer(KEPT)
            line.keep(message, folder)
        except BaseException:
            self._room.release()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._waiting.put(Received(folder, message.step, message.rank))
        line.answer(KEPT)


class FolderReceiver:
    """Takes dumps out of a shared folder, until each rank has said that it is over."""

    def __init__(self, path: Path, ranks: frozenset[int]) -> None:
        self._path, self._ranks = path, ranks

    def __enter__(self) -> FolderReceiver:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def dumps(self) -> Iterator[Received]:
        """Dumps as they come; ends when all ranks are over."""
        over: set[int] = set()
        while True:
            found, ended = self._look()
            for each in found:
                yield each
                shutil.rmtree(each.folder, ignore_errors=True)
            if not found:
                over |= ended
                if self._ranks <= over:
                    for rank in self._ranks:
                        (self._path / f"rank{rank}.over").unlink(missing_ok=True)
                    return
                time.sleep(_POLL)

    def _look(self) -> tuple[list[Received], set[int]]:
        names = sorted(os.listdir(self._path))
        ended = {int(match[1]) for name in names if (match := _OVER.fullmatch(name))}
        found = []
        for name in names:
            match = _NAME.fullmatch(name)
            folder = self._path / name
            if match is None or int(match[2]) not in self._ranks:
                continue
            plain = not folder.is_symlink() and folder.is_dir()
            if not plain or any(entry.is_symlink() or entry.name not in FILES for entry in folder.iterdir()):
                log.warning("%s is not a dump of ours and is left alone", folder)
                folder.rename(folder.with_suffix(".refused"))
                continue
            found.append(Received(folder, int(match[1]), int(match[2])))
        return sorted(found, key=lambda each: (each.step, each.rank)), ended
