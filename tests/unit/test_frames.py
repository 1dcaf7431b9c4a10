"""Frames in C and in Python put the same bytes into a ring, and both file them."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.native import measuring
from ulpscope.store import frames
from ulpscope.store.frames import PlainFrames, plain_file_frames

_DATA = 4096
_CAPACITY = 3000
pytestmark = pytest.mark.skipif(frames.Frames is PlainFrames, reason="the extension was not built")

calls = st.lists(
    st.tuples(
        st.lists(st.text(max_size=20), max_size=3),
        st.lists(st.integers(0, 40), max_size=3),
        st.binary(max_size=3).map(lambda data: 16 * data),
        st.booleans(),
    ),
    max_size=12,
)


def patch(numbers: Iterable[int]) -> tuple[Any, Any]:
    """What became known of rows, which have four bytes of sketch each."""
    which = np.array(list(numbers), dtype=np.uint32)
    rows = np.zeros(len(which), dtype=measuring.ROW)
    rows["numel"] = which
    rows["sketch_offset"] = 4 * np.arange(len(which))
    return which, rows


class Side:
    """Frames over a small ring; what does not fit is kept."""

    def __init__(self, kind: Any) -> None:
        self.memory = bytearray(_DATA + _CAPACITY)
        self.late: list[bytes] = []
        self.woken = 0
        self.frames = kind(self._put, self._wake)
        self.frames.attach(memoryview(self.memory))

    def _put(self, frame: bytes) -> bool:
        self.late.append(frame)
        return True

    def _wake(self) -> None:
        self.woken += 1

    def play(self, program: list[Any]) -> list[int]:
        numbers = []
        for strings, sketches, values, is_call in program:
            numbers += [self.frames.add_string(text) for text in strings]
            numbers += [self.frames.add_measured(bytes(112) + bytes(4 * size)) for size in sketches]
            self.frames.commit(bytes(range(72)) if is_call else b"", values)
            if sketches:
                self.frames.patch(*patch(range(self.frames.measures % 2, self.frames.measures, 2)), b"y" * 8)
        return [*numbers, self.frames.calls, self.frames.measures, self.frames.sketch_size, self.frames.pending]


@settings(max_examples=60)
@given(calls)
def test_both_put_the_same(program: list[Any]) -> None:
    by_c, by_python = Side(frames.Frames), Side(PlainFrames)
    assert by_c.play(program) == by_python.play(program)
    assert by_c.memory == by_python.memory
    assert by_c.late == by_python.late
    assert bool(by_c.woken) == bool(by_python.woken)
    by_c.frames.attach(None)


@pytest.mark.parametrize("kind", [frames.Frames, PlainFrames])
def test_each_sixteenth_wakes_the_writer_once(kind: Any) -> None:
    one, other = Side(kind), Side(kind)
    for side in (one, other):
        side.memory = bytearray(_DATA + (1 << 16))
        side.frames.attach(memoryview(side.memory))
    for count in range(1, 40):
        one.frames.commit(bytes(72), bytes(1024 - 72 - 72))  # with its head and its row a sixty-fourth
        assert one.woken == count // 5, count
    # Two runs of rows are two frames: that the second is small must not let the first be forgotten.
    for _ in range(42):
        other.frames.add_measured(bytes(112))
    other.frames.patch(*patch([*range(40), 41]), b"")
    assert other.woken == 1
    for side in (one, other):
        side.frames.attach(None)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="None is not counted there")
def test_what_returns_none_has_counted_it() -> None:
    """Where headers of a later Python built us, a call that forgets it takes one from the rest of the program."""
    side = Side(frames.Frames)
    before = sys.getrefcount(None)
    for _ in range(1000):
        side.frames.attach(None)
    assert abs(sys.getrefcount(None) - before) < 100


def filed(how: Any, data: bytes | memoryview, already: int = 0) -> tuple[Any, list[bytes]]:
    """What a way of filing answers, and what is in the five files afterwards."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(5)]
        files[1].write(bytes(already))
        files[1].flush()
        answer = how(data, tuple(file.fileno() for file in files), already)
        contents = []
        for file in files:
            file.seek(0)
            contents.append(file.read())
        return answer, contents


@settings(max_examples=60)
@given(calls, st.integers(0, 80))
def test_both_file_what_was_put(program: list[Any], cut: int) -> None:
    side = Side(PlainFrames)
    side.play(program)
    end = int.from_bytes(side.memory[16:24], "little")
    data = bytes(side.memory[_DATA : _DATA + min(end, _CAPACITY)])
    data = data[: max(0, len(data) - cut)]
    assert filed(frames.file_frames, data) == filed(plain_file_frames, data)
    assert filed(frames.file_frames, memoryview(data), 224) == filed(plain_file_frames, memoryview(data), 224)


def test_thousands_of_pieces_are_filed() -> None:
    side = Side(PlainFrames)
    side.memory = bytearray(_DATA + (1 << 20))
    side.frames.attach(memoryview(side.memory))
    for number in range(3000):
        side.frames.add_string(str(number))
        side.frames.add_measured(bytes([number % 251]) * 116)
        side.frames.commit(bytes([number % 251]) * 72, b"")
    side.frames.patch(*patch([1, 2]), b"yyyy")
    data = memoryview(side.memory)[_DATA : _DATA + int.from_bytes(side.memory[16:24], "little")]
    answer, contents = filed(frames.file_frames, data)
    assert (answer, contents) == filed(plain_file_frames, data)
    assert answer == (len(data), 3000 * 112)
    assert contents[0].split() == [b"%d" % number for number in range(3000)]
    patched = np.frombuffer(contents[1], dtype=measuring.ROW)[1:3]
    assert list(patched["numel"]) == [1, 2]
    assert list(patched["sketch_offset"]) == [12_000, 12_004]
    assert contents[2].endswith(b"yyyy")


@pytest.mark.parametrize("how", [frames.file_frames, plain_file_frames])
def test_a_file_that_cannot_be_written_is_an_error(how: Any, tmp_path: Path) -> None:
    side = Side(PlainFrames)
    side.frames.add_string("x")
    side.frames.commit(bytes(72), b"")
    (tmp_path / "file").write_bytes(b"")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(OSError):
            how(bytes(side.memory[_DATA:]), (descriptor,) * 5, 0)
    finally:
        os.close(descriptor)


def test_a_broken_frame_is_refused() -> None:
    side = Side(PlainFrames)
    side.frames.add_string("x")
    side.frames.commit(bytes(72), b"")
    data = bytearray(side.memory[_DATA : _DATA + int.from_bytes(side.memory[16:24], "little")])
    data[48:52] = b"\xff\xff\xff\x7f"
    with pytest.raises(ValueError, match="broken"):
        filed(frames.file_frames, bytes(data))


def test_a_failed_writer_gets_nothing() -> None:
    for kind in (frames.Frames, PlainFrames):
        side = Side(kind)
        side.frames.failed = True
        side.frames.add_string("x")
        side.frames.commit(bytes(72), b"")
        assert side.frames.calls == 0 and not any(side.memory)
        side.frames.attach(None)


@pytest.mark.parametrize("how", [frames.file_frames, plain_file_frames])
def test_what_rows_point_to_is_written_before_them(how: Any, tmp_path: Path) -> None:
    """Of any number of frames: whoever reads meanwhile begins with the last table."""
    side = Side(PlainFrames)
    side.memory = bytearray(_DATA + (1 << 20))
    side.frames.attach(memoryview(side.memory))
    side.frames.add_string("x")
    for _ in range(1000):
        side.frames.commit(bytes(72), bytes(16))
    data = memoryview(side.memory)[_DATA : _DATA + int.from_bytes(side.memory[16:24], "little")]
    (tmp_path / "strings").write_bytes(b"")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(tmp_path / "strings", "rb"))]
        files += [stack.enter_context(open(tmp_path / str(number), "w+b")) for number in range(4)]
        with pytest.raises(OSError):
            how(data, tuple(file.fileno() for file in files), 0)
        assert not any(file.read() for file in files)


@pytest.mark.parametrize("kind", [frames.Frames, PlainFrames])
def test_an_interruption_while_rows_are_filled_in_shifts_no_sketch(kind: Any) -> None:
    class StopError(Exception):
        pass

    class Interrupted(Side):
        def _put(self, frame: bytes) -> bool:
            raise StopError

    side = Interrupted(kind)
    side.frames.add_measured(bytes(112))
    side.frames.commit(b"", b"")
    for _ in range(2):
        with pytest.raises(StopError):
            side.frames.patch(*patch([0]), b"y" * 2 * _CAPACITY)
    assert side.frames.sketch_size == 0
    side.frames.patch(*patch([0]), b"yyyy")
    assert side.frames.sketch_size == 4
    head = int.from_bytes(side.memory[16:24], "little")
    _, contents = filed(plain_file_frames, bytes(side.memory[_DATA : _DATA + head]))
    assert contents[2] == b"yyyy"
    assert np.frombuffer(contents[1], dtype=measuring.ROW)["sketch_offset"][0] == 0
    side.frames.attach(None)


@pytest.mark.parametrize("kind", [frames.Frames, PlainFrames])
def test_a_ring_that_is_taken_away_while_one_waits_for_it_ends_it(kind: Any) -> None:
    class Ended(Side):
        def _put(self, frame: bytes) -> bool:
            self.frames.attach(None)
            return False

    side = Ended(kind)
    for _ in range(3):
        side.frames.add_measured(bytes(112))
    side.frames.commit(b"", b"")
    side.frames.patch(*patch([0, 2]), b"y" * 2 * _CAPACITY)
    assert side.frames.measures == 0
