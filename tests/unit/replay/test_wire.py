"""The connection of the online pre-check under attack: one clear error, bounded memory, nothing of it on disk or executed."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.replay import wire
from ulpscope.replay.wire import KEPT, MOST_BYTES, Line, Message, WireError, _message

SECRET = b"both know it"
FILES = {"manifest.json": b"{}" * 40, "calls.bin": bytes(range(256)) * 3}
MESSAGE = Message(wire.DUMP, 7, 0, tuple((name, len(content)) for name, content in FILES.items()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("dump")
    assert FILES.keys() <= wire.FILES
    for name, content in FILES.items():
        (found / name).write_bytes(content)
    return found


@contextlib.contextmanager
def both_ends(timeout: float = 0.3) -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(timeout)
        there.settimeout(timeout)
        yield here, there


def receive(connection: socket.socket, scratch: Path) -> list[tuple[Message, dict[str, bytes]]]:
    """What arrives whole. Raises WireError or OSError, and nothing else."""
    found = []
    line = Line(connection, SECRET, sends=False)
    while (message := line.receive()) is not None:
        line.answer(KEPT)
        target = scratch / str(len(found))
        target.mkdir(exist_ok=True)
        for path in target.iterdir():
            path.unlink()
        line.keep(message, target)
        line.answer(KEPT)
        found.append((message, {path.name: path.read_bytes() for path in target.iterdir()}))
    return found


class Stream:
    """The sending end's connection, with somebody in between who changes what passes; `kept` is what was sent."""

    def __init__(self, connection: socket.socket, change: Callable[[int, bytes], bytes]) -> None:
        self._connection, self._change, self._at = connection, change, 0
        self.kept: list[bytes] = []
        self.recv = connection.recv

    def sendall(self, data: bytes) -> None:
        self.kept.append(data)
        self._connection.sendall(self._change(self._at, data))
        self._at += len(data)


def transfer(
    folder: Path, scratch: Path, change: Callable[[int, bytes], bytes], secret: bytes = SECRET, times: int = 1
) -> tuple[Any, list[bytes]]:
    """Sends a dump past somebody who changes it: what arrived, or the error; and what was sent."""
    with both_ends() as (here, there):
        stream = Stream(here, change)

        def send() -> None:
            with contextlib.suppress(OSError, WireError):
                line = Line(stream, secret, sends=True)  # type: ignore[arg-type]
                for _ in range(times):
                    line.send(MESSAGE, folder)
            here.close()

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            found: Any = receive(there, scratch)
        except (WireError, OSError) as error:
            found = error
            there.close()
        thread.join(5)
        return found, stream.kept


def unchanged(_: int, data: bytes) -> bytes:
    return data


def test_an_undisturbed_dump_arrives(folder: Path, tmp_path: Path) -> None:
    found, _ = transfer(folder, tmp_path, unchanged, times=2)
    assert found == [(MESSAGE, FILES)] * 2


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_is_changed_dropped_or_put_in_between_is_noticed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    scratch = tmp_path_factory.getbasetemp()
    whole = 64 + 4 + 130 + 32 + MESSAGE.size + 32  # about; what lies behind the end is not touched
    at = data.draw(st.integers(0, whole + 20))
    put = data.draw(st.one_of(st.binary(min_size=1, max_size=5), st.just(b"")))
    drop = data.draw(st.integers(0, 5))
    touched = []

    def change(start: int, part: bytes) -> bytes:
        place = at - start
        if not 0 <= place < len(part):
            return part
        made = part[:place] + put + part[place + drop :]
        touched.append(made != part)
        return made

    found, _ = transfer(folder, scratch, change)
    if any(touched):
        assert isinstance(found, WireError | OSError), found
    else:
        assert found == [(MESSAGE, FILES)]


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=400))
def test_any_bytes_at_the_door_are_one_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    with both_ends() as (here, there):
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            receive(there, tmp_path_factory.getbasetemp())


def test_another_secret_is_turned_away(folder: Path, tmp_path: Path) -> None:
    found, _ = transfer(folder, tmp_path, unchanged, secret=b"guessed")
    assert isinstance(found, WireError) and "secret" in str(found)


def test_what_was_overheard_is_worth_nothing_later(folder: Path, tmp_path: Path) -> None:
    """Neither in another connection, nor a second time in the same one."""
    _, overheard = transfer(folder, tmp_path, unchanged)
    with both_ends() as (here, there):
        here.sendall(b"".join(overheard))
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError, match="secret"):
            receive(there, tmp_path)
    passed: list[bytes] = []

    def repeat(_: int, part: bytes) -> bytes:
        passed.append(part)
        is_last = len(part) == 32  # the proof of the files
        return part + b"".join(passed[1:]) if is_last else part

    found, _ = transfer(folder, tmp_path, repeat)
    assert isinstance(found, WireError) and "changed on its way" in str(found)


# --- headers of one who knows the secret --------------------------------------------------------------------------

names = st.one_of(st.sampled_from(sorted(wire.FILES)), st.text(max_size=20), st.just("../../etc/passwd"), st.just("/x"))
sizes = st.one_of(st.integers(-5, 1 << 70), st.floats(), st.booleans(), st.none(), st.text(max_size=3))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=12,
)
headers = st.one_of(
    values,
    st.fixed_dictionaries(
        {
            "kind": st.one_of(st.sampled_from([wire.DUMP, wire.OVER]), values),
            "step": st.one_of(st.integers(-1, 1 << 33), values),
            "rank": st.one_of(st.integers(-1, 1 << 33), values),
            "files": st.one_of(st.lists(st.tuples(names, sizes), max_size=4), values),
        }
    ),
)


@settings(max_examples=400)
@given(content=headers)
def test_a_header_is_a_message_that_can_be_or_an_error(content: Any) -> None:
    try:
        found = _message(json.dumps(content).encode())
    except WireError:
        return
    assert found.kind in (wire.DUMP, wire.OVER)
    assert {name for name, _ in found.files} <= wire.FILES
    assert all(type(size) is int and size >= 0 for _, size in found.files)
    assert found.size <= MOST_BYTES


@settings(max_examples=200)
@given(content=st.binary(max_size=300))
def test_a_header_that_is_no_json_is_an_error(content: bytes) -> None:
    with contextlib.suppress(WireError):
        _message(content)


@pytest.mark.parametrize("header", [
    b"[" * 60000,
    b'{"files":' * 7000,
    b'{"kind":"dump","step":' + b"9" * 60000 + b',"rank":0,"files":[]}',
    b'{"kind":"dump","step":0,"rank":0,"files":[["calls.bin",NaN]]}',
    b'{"kind":"dump","step":0,"rank":0,"files":[["calls.bin",1e999]]}',
    b'{"kind":"dump","step":0,"rank":0,"files":[["calls.bin",1],["calls.bin",1]]}',
    b'{"kind":["dump"],"step":0,"rank":0,"files":[]}',
    b"\xff\xfe{\x00}\x00",
])  # fmt: skip
def test_a_hostile_header_is_an_error_and_costs_no_memory(header: bytes) -> None:
    assert len(header) <= wire._MOST_HEADER
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            _message(header)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claimed", [0, wire._MOST_HEADER + 1, 0xFFFFFFFF])
def test_a_length_is_refused_before_anything_is_read(claimed: int, tmp_path: Path) -> None:
    with both_ends() as (here, there):
        sender: list[Line] = []
        thread = threading.Thread(target=lambda: sender.append(Line(here, SECRET, sends=True)), daemon=True)
        thread.start()
        line = Line(there, SECRET, sends=False)
        thread.join(5)
        here.sendall(struct.pack(">I", claimed))
        tracemalloc.start()
        try:
            with pytest.raises(WireError, match=f"a header of {claimed} bytes"):
                line.receive()
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_dump_that_is_cut_holds_no_more_memory_than_a_piece_of_it(folder: Path, tmp_path: Path) -> None:
    """A terabyte is claimed and refused; so many bytes as are allowed are read piece by piece."""
    with pytest.raises(WireError):
        _message(json.dumps({"kind": "dump", "step": 0, "rank": 0, "files": [["payload.bin", 1 << 40]]}).encode())
    huge = Message(wire.DUMP, 0, 0, (("payload.bin", MOST_BYTES),))
    with both_ends() as (here, there):
        thread = threading.Thread(target=lambda: _send_part(here, huge), daemon=True)
        thread.start()
        tracemalloc.start()
        try:
            with pytest.raises(WireError, match="ended after"):
                receive(there, tmp_path)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()
            thread.join(5)


def _send_part(connection: socket.socket, message: Message) -> None:
    line = Line(connection, SECRET, sends=True)
    content = {"kind": message.kind, "step": message.step, "rank": message.rank, "files": message.files}
    header = json.dumps(content).encode()
    connection.sendall(struct.pack(">I", len(header)) + header + line._next_proof(header))
    connection.recv(1)
    for _ in range(40):
        connection.sendall(bytes(1 << 20))
    connection.close()


def test_bytes_that_trickle_in_are_not_waited_for(tmp_path: Path) -> None:
    with both_ends(timeout=2) as (here, there):
        stop = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not stop.is_set():
                    here.sendall(b"x")
                    time.sleep(0.02)

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(WireError, match=r"longer than 0\.2 seconds"):
            Line(there, SECRET, sends=False, patience=0.2)
        stop.set()
        thread.join(5)
        assert time.monotonic() - begun < 1.2  # 64 bytes take longer than that
