"""Dumps over a connection: plain bytes with their sizes, JSON about them, and proofs that both ends know the same secret.

    receiver  "ULPSCOPE1" nonce             32 bytes of chance
    sender    nonce proof                   HMAC-SHA256 of both, with the secret
    receiver  proof
    sender    size header proof files proof   as often as there are dumps; a header is JSON: kind, step, rank, files
    receiver  one letter: K kept, B busy, R refused

Nothing that is received is executed, unpickled or used as a path. Sizes are checked before a byte of them is read. Who takes
longer than a while for a greeting or a header is dropped, however steadily the bytes trickle in.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.model.errors import UlpscopeError
from ulpscope.store import run_folder

KEPT, BUSY, REFUSED = b"K", b"B", b"R"
DUMP, OVER = "dump", "over"
FILES = frozenset({run_folder.MANIFEST, *run_folder.TABLES, run_folder.PAYLOAD})
_GREETING = b"ULPSCOPE1"
_NONCE = _PROOF = 32
_MOST_HEADER = 1 << 16
MOST_BYTES = 64 << 30
_CHUNK = 1 << 20
_MOST_STEP = 1 << 32
_PATIENCE = 30.0


class WireError(UlpscopeError):
    """The other end is not what it should be, or did not do what it should."""


@dataclass(frozen=True, slots=True)
class Message:
    """A dump that comes, or that no more come from this rank."""

    kind: str
    step: int
    rank: int
    files: tuple[tuple[str, int], ...] = ()

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)


def about(folder: Path, step: int, rank: int) -> Message:
    """The message for the dump in a folder."""
    sizes = [(path.name, path.stat().st_size) for path in sorted(folder.iterdir()) if path.name in FILES]
    return Message(DUMP, step, rank, tuple(sizes))


class Line:
    """One end of a connection, from the greeting on."""

    def __init__(self, connection: socket.socket, secret: bytes, *, sends: bool, patience: float = _PATIENCE) -> None:
        self._connection = connection
        self._key = b""
        self._count = 0
        self._patience = patience
        self._until: float | None = time.monotonic() + patience
        if sends:
            self._greet_receiver(secret)
        else:
            self._greet_sender(secret)
        self._until = None

    def _greet_receiver(self, secret: bytes) -> None:
        if self._read(len(_GREETING)) != _GREETING:
            raise WireError("the other end is not an online check of ulpscope")
        theirs, mine = self._read(_NONCE), os.urandom(_NONCE)
        self._connection.sendall(mine + _proof(secret, b"sender", theirs + mine))
        if not hmac.compare_digest(self._read(_PROOF), _proof(secret, b"receiver", theirs + mine)):
            raise WireError("the other end does not know the secret")
        self._key = _proof(secret, b"key", theirs + mine)

    def _greet_sender(self, secret: bytes) -> None:
        mine = os.urandom(_NONCE)
        self._connection.sendall(_GREETING + mine)
        theirs = self._read(_NONCE)
        if not hmac.compare_digest(self._read(_PROOF), _proof(secret, b"sender", mine + theirs)):
            raise WireError("the other end does not know the secret")
        self._connection.sendall(_proof(secret, b"receiver", mine + theirs))
        self._key = _proof(secret, b"key", mine + theirs)

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self, message: Message, folder: Path | None = None) -> bytes:
        """Sends a message with the files it names; returns the letter of the answer."""
        content = {"kind": message.kind, "step": message.step, "rank": message.rank, "files": message.files}
        header = json.dumps(content).encode()
        self._connection.sendall(struct.pack(">I", len(header)) + header + self._next_proof(header))
        letter = self._read(1)
        if letter != KEPT:
            return letter
        digest = hashlib.sha256()
        for name, size in message.files:
            assert folder is not None
            for chunk in _chunks(folder / name, size):
                digest.update(chunk)
                self._connection.sendall(chunk)
        self._connection.sendall(self._next_proof(digest.digest()))
        return self._read(1)

    # --- receiving ----------------------------------------------------------------------------------------------

    def receive(self) -> Message | None:
        """The next header; None at the end of the connection. Raises WireError for anything else."""
        start = self._connection.recv(1)
        if not start:
            return None
        self._until = time.monotonic() + self._patience
        (length,) = struct.unpack(">I", start + self._read(3))
        if not 0 < length <= _MOST_HEADER:
            raise WireError(f"a header of {length} bytes")
        header = self._read(length)
        self._check(header)
        self._until = None
        return _message(header)

    def answer(self, letter: bytes) -> None:
        self._connection.sendall(letter)

    def keep(self, message: Message, folder: Path) -> None:
        """Reads the files of a message into an empty folder. Raises WireError where they are not what was sent."""
        digest = hashlib.sha256()
        for name, size in message.files:
            with (folder / name).open("xb") as file:
                left = size
                while left:
                    chunk = self._read(min(left, _CHUNK))
                    digest.update(chunk)
                    file.write(chunk)
                    left -= len(chunk)
        self._check(digest.digest())

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(count - len(parts))
            if not part:
                raise WireError(f"the connection ended after {len(parts)} of {count} bytes")
            parts += part
            if self._until is not None and time.monotonic() > self._until:
                raise WireError(
                    f"the other end takes longer than {self._patience:g} seconds to say who it is, or what comes"
                )
        return bytes(parts)

    def _next_proof(self, content: bytes) -> bytes:
        self._count += 1
        return _proof(self._key, struct.pack(">Q", self._count), content)

    def _check(self, content: bytes) -> None:
        if not hmac.compare_digest(self._read(_PROOF), self._next_proof(content)):
            raise WireError("a message was changed on its way")


def _proof(secret: bytes, purpose: bytes, content: bytes) -> bytes:
    return hmac.new(secret, purpose + content, hashlib.sha256).digest()


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while size:
            chunk = file.read(min(size, _CHUNK))
            if not chunk:
                raise WireError(f"{path} became shorter while it was sent")
            size -= len(chunk)
            yield chunk


def _message(header: bytes) -> Message:
    try:
        content: dict[str, Any] = json.loads(header)
        files = tuple((name, size) for name, size in content["files"])
        found = Message(content["kind"], content["step"], content["rank"], files)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"a header that is none: {type(error).__name__}") from None
    whole = (found.step, found.rank, *(size for _, size in files))
    names = [name for name, _ in files]
    if (
        found.kind not in (DUMP, OVER)
        or any(type(number) is not int or number < 0 for number in whole)
        or max(found.step, found.rank) >= _MOST_STEP
        or any(type(name) is not str or name not in FILES for name in names)
        or len(set(names)) != len(names)
        or found.size > MOST_BYTES
    ):
        raise WireError("a header with a name, a number or a size that cannot be")
    return found


# --- TLS ----------------------------------------------------------------------------------------------------------


def client_tls(folder: Path) -> ssl.SSLContext:
    """TLS for the sending end: it trusts ca.crt, or server.crt itself, and shows client.crt where there is one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # machines of one cluster have certificates of their own, not names
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    trusted = next((folder / name for name in ("ca.crt", "server.crt") if (folder / name).is_file()), None)
    if trusted is None:
        raise WireError(f"tls_path {folder} has neither ca.crt nor server.crt, so the other end cannot be trusted")
    context.load_verify_locations(trusted)
    if (folder / "client.crt").is_file():
        context.load_cert_chain(folder / "client.crt", folder / "client.key")
    return context


def server_tls(folder: Path) -> ssl.SSLContext:
    """TLS for the receiving end: server.crt and server.key; where ca.crt or client.crt lies, a sender must show its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for name in ("server.crt", "server.key"):
        if not (folder / name).is_file():
            raise WireError(f"tls_path {folder} does not contain {name}")
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    trusted = next((folder / name for name in ("ca.crt", "client.crt") if (folder / name).is_file()), None)
    if trusted is not None:
        context.load_verify_locations(trusted)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
