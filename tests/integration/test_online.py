"""The two ends of the online pre-check: dumps arrive whole, and nothing that the other end does disturbs the sending one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import DumpBuilder
from ulpscope.compat.msprobe.online import check_online
from ulpscope.frameworks.torch.api_runner import ApiRunner
from ulpscope.model.errors import ConfigError
from ulpscope.replay import wire
from ulpscope.replay.online import (
    FolderChannel,
    FolderReceiver,
    Received,
    Sender,
    TcpChannel,
    TcpReceiver,
    secret_for,
)
from ulpscope.replay.precheck import Choice, Plan, Rule
from ulpscope.replay.wire import Line, Message, WireError
from ulpscope.store.registry import open_dump

SECRET = b"both know it"


def dump(folder: Path, step: int = 0, rank: int = 0) -> Path:
    builder = DumpBuilder(folder, step=step, rank=rank)
    builder.call("Torch", "neg", values={("input", 0): np.ones(5, np.float32), ("output", 0): -np.ones(5, np.float32)})
    return builder.close()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[TcpReceiver]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with TcpReceiver("127.0.0.1", 0, SECRET, frozenset({0}), scratch, timeout=2) as found:
        yield found


def received(receiver: Any) -> list[Received]:
    """All that comes, read and let go."""
    return [(open_dump(each.folder).nth(0).id.name, each.step) for each in receiver.dumps()]  # type: ignore[misc]


def channel(receiver: TcpReceiver, secret: bytes = SECRET, **more: Any) -> TcpChannel:
    return TcpChannel("127.0.0.1", receiver.port, secret, timeout=2, **more)


def test_dumps_arrive_whole_in_order_and_are_gone_where_they_were(tmp_path: Path, receiver: TcpReceiver) -> None:
    sender = Sender(channel(receiver), pending=4)
    folders = [dump(tmp_path / "run", step) for step in range(3)]
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
    assert min(sizes) > 0
    for step, folder in enumerate(folders):
        sender.send(folder, step, 0)
    sender.close(0)
    assert received(receiver) == [("neg", 0), ("neg", 1), ("neg", 2)]
    assert (sender.sent, sender.lost) == (3, [])
    assert not any(folder.exists() for folder in folders)


def test_through_a_shared_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    sender = Sender(FolderChannel(shared, pending=2), timeout=5)
    for step in range(2):
        sender.send(dump(tmp_path / "run", step), step, 0)
    sender.close(0)
    assert received(FolderReceiver(shared, frozenset({0}))) == [("neg", 0), ("neg", 1)]
    assert [path.name for path in shared.iterdir() if path.suffix != ".dump"] == []


def test_an_end_that_is_not_there_costs_no_time_and_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    sender = Sender(TcpChannel("127.0.0.1", port, SECRET, timeout=1), timeout=0.3)
    begun = time.monotonic()
    folders = [dump(tmp_path / "run", step) for step in range(6)]
    for step, folder in enumerate(folders):
        sender.send(folder, step, 0)
    sender.close(0)
    assert time.monotonic() - begun < 20
    assert len(sender.lost) == 6
    assert sender.sent == 0
    assert not any(folder.exists() for folder in folders)


def test_a_program_that_ends_waits_a_while_for_a_check_that_begins(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    sender = Sender(TcpChannel("127.0.0.1", port, SECRET, timeout=2), timeout=10)
    sender.send(dump(tmp_path / "run", 0), 0, 0)
    ending = threading.Thread(target=sender.close, args=(0,))
    ending.start()
    time.sleep(0.6)
    (tmp_path / "scratch").mkdir()
    with TcpReceiver("127.0.0.1", port, SECRET, frozenset({0}), tmp_path / "scratch") as late:
        assert received(late) == [("neg", 0)]
        ending.join()
    assert (sender.sent, sender.lost) == (1, [])


def test_a_reader_that_does_not_read_loses_dumps_and_does_not_stop_the_sender(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        sender = Sender(TcpChannel("127.0.0.1", deaf.getsockname()[1], SECRET, timeout=0.3), timeout=0.3)
        for step in range(4):
            sender.send(dump(tmp_path / "run", step), step, 0)
        sender.close(0)
    assert len(sender.lost) >= 4


def test_a_reader_that_is_slow_loses_dumps_and_says_so(tmp_path: Path, receiver: TcpReceiver) -> None:
    sender = Sender(channel(receiver), pending=1, timeout=0.3)
    for step in range(9):
        sender.send(dump(tmp_path / "run", step), step, 0)
        time.sleep(0.05)
    sender.close(0)
    assert sender.lost
    assert "too slow" in sender.lost[0]
    assert len(received(receiver)) == sender.sent


def test_who_does_not_know_the_secret_is_turned_away_on_both_ends(
    tmp_path: Path, receiver: TcpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WireError):
        channel(receiver, b"guessed").deliver(Message(wire.DUMP, 0, 0), None)
    # A false receiver that repeats what it was sent does not learn a thing, and gets nothing.
    with socket.create_server(("127.0.0.1", 0)) as false:

        def serve() -> None:
            connection, _ = false.accept()
            with connection:
                connection.sendall(b"ULPSCOPE1" + bytes(32))
                connection.sendall(connection.recv(64)[32:])

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(WireError, match="does not know the secret"):
            TcpChannel("127.0.0.1", false.getsockname()[1], SECRET, timeout=2).deliver(Message(wire.DUMP, 0, 0), None)


def raw(receiver: TcpReceiver) -> tuple[socket.socket, Line]:
    connection = socket.create_connection(("127.0.0.1", receiver.port), 2)
    return connection, Line(connection, SECRET, sends=True)


def sent_header(connection: socket.socket, line: Line, header: bytes) -> bytes:
    connection.sendall(struct.pack(">I", len(header)) + header + line._next_proof(header))
    return connection.recv(1)


HOSTILE = [
    b"no json",
    b"[]",
    b"[" * 5000,
    json.dumps({"kind": "dump", "step": 0, "rank": 0, "files": [["../../x", 1]]}).encode(),
    json.dumps({"kind": "dump", "step": 0, "rank": 0, "files": [["calls.bin", -1]]}).encode(),
    json.dumps({"kind": "dump", "step": 0, "rank": 0, "files": [["calls.bin", 1 << 62]]}).encode(),
    json.dumps({"kind": "dump", "step": 0, "rank": 0, "files": [["calls.bin", 1], ["calls.bin", 1]]}).encode(),
    json.dumps({"kind": "dump", "step": "0", "rank": 0, "files": []}).encode(),
    json.dumps({"kind": "dump", "step": 0, "rank": True, "files": []}).encode(),
    json.dumps({"kind": "dump", "step": 0, "rank": 7, "files": []}).encode(),
    json.dumps({"kind": "exec", "step": 0, "rank": 0, "files": []}).encode(),
]


@pytest.mark.parametrize("header", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_header_ends_its_connection_and_nothing_else(
    tmp_path: Path, receiver: TcpReceiver, header: bytes
) -> None:
    connection, line = raw(receiver)
    with connection:
        assert sent_header(connection, line, header) in (b"", wire.REFUSED)
    assert list((tmp_path / "scratch").iterdir()) == []
    sender = Sender(channel(receiver))
    sender.send(dump(tmp_path / "run"), 0, 0)
    sender.close(0)
    assert received(receiver) == [("neg", 0)]


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\xff" * 4096])
def test_noise_at_the_door_is_dropped(tmp_path: Path, receiver: TcpReceiver, start: bytes) -> None:
    with socket.create_connection(("127.0.0.1", receiver.port), 2) as connection:
        connection.sendall(start)
    sender = Sender(channel(receiver))
    sender.send(dump(tmp_path / "run"), 0, 0)
    sender.close(0)
    assert received(receiver) == [("neg", 0)]


def test_a_dump_that_is_cut_or_changed_on_its_way_leaves_nothing(tmp_path: Path, receiver: TcpReceiver) -> None:
    header = json.dumps({"kind": "dump", "step": 0, "rank": 0, "files": [["calls.bin", 100]]}).encode()
    for rest in (b"x" * 40, b"x" * 100 + bytes(32)):
        connection, line = raw(receiver)
        with connection:
            assert sent_header(connection, line, header) == wire.KEPT
            connection.sendall(rest)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    sender = Sender(channel(receiver))
    sender.close(0)
    assert received(receiver) == []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_in_a_shared_folder_links_and_strange_files_are_left_alone(tmp_path: Path) -> None:
    shared, outside = tmp_path / "shared", dump(tmp_path / "run")
    shared.mkdir()
    (shared / "step0-rank0.dump").symlink_to(outside)
    (shared / "step1-rank0.dump").mkdir()
    (shared / "step1-rank0.dump" / "evil.pkl").touch()
    (shared / "rank0.over").touch()
    assert received(FolderReceiver(shared, frozenset({0}))) == []
    assert outside.exists()


def test_another_machine_needs_a_secret_or_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ULPSCOPE_SECRET", raising=False)
    assert secret_for("127.0.0.1", tls=False) == b""
    with pytest.raises(ConfigError, match="ULPSCOPE_SECRET"):
        secret_for("192.168.0.7", tls=False)
    assert secret_for("192.168.0.7", tls=True) == b""
    monkeypatch.setenv("ULPSCOPE_SECRET", "x")
    assert secret_for("192.168.0.7", tls=False) == b"x"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client"):
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        try:
            subprocess.run([*command, *files], check=True, capture_output=True, env={**os.environ})
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("openssl is not here to make certificates")
    return folder


def test_with_tls_both_ends_show_certificates(tmp_path: Path, certificates: Path) -> None:
    server, client = wire.server_tls(certificates), wire.client_tls(certificates)
    with TcpReceiver("127.0.0.1", 0, b"", frozenset({0}), tmp_path, tls=server, timeout=2) as receiver:
        sender = Sender(channel(receiver, b"", tls=client))
        sender.send(dump(tmp_path / "run"), 0, 0)
        sender.close(0)
        assert received(receiver) == [("neg", 0)]
        with pytest.raises((WireError, OSError)):
            channel(receiver, b"").deliver(Message(wire.DUMP, 0, 0), None)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_dump_with_anything_in_it_is_checked_or_said_and_the_check_goes_on(
    tmp_path: Path, data: st.DataObject, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shutil.rmtree(shared, ignore_errors=True)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    shared.mkdir()
    sent = dump(tmp_path / "run")
    file = data.draw(st.sampled_from(sorted(path.name for path in sent.iterdir() if path.name in wire.FILES)))
    whole = (sent / file).read_bytes()
    at = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(at, len(whole)))
    (sent / file).write_bytes(whole[:at] + data.draw(st.binary(max_size=12)) + whole[end:])
    FolderChannel(shared).deliver(wire.about(sent, 0, 0), sent)
    good = dump(tmp_path / "run", step=1)
    FolderChannel(shared).deliver(wire.about(good, 1, 0), good)
    FolderChannel(shared).deliver(Message(wire.OVER, 0, 0), None)
    plan = Plan(ApiRunner(recorded=True, only_recorded=True), Choice(), Rule.MSPROBE)
    check_online({"nfs_path": str(shared)}, plan, tmp_path / "out", str(data.draw(st.integers(0, 1 << 40))))
    newest = max((tmp_path / "out").glob("accuracy_checking_result_*.csv"), key=lambda path: path.stat().st_mtime_ns)
    assert newest.read_text(encoding="utf-8-sig").splitlines()[-1].startswith("Torch.neg.0,pass")
