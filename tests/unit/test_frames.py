"""Frames in C and in Python put the same bytes into a ring, and both take them apart."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.store import frames
from ulpscope.store.frames import PlainFrames, plain_split

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
                self.frames.patch(0, b"x" * 112, b"y" * 8)
        return [*numbers, self.frames.calls, self.frames.measures, self.frames.sketch_size, self.frames.pending]


@settings(max_examples=60)
@given(calls)
def test_both_put_the_same(program: list[Any]) -> None:
    by_c, by_python = Side(frames.Frames), Side(PlainFrames)
    assert by_c.play(program) == by_python.play(program)
    assert by_c.memory == by_python.memory
    assert by_c.late == by_python.late
    assert by_c.woken == by_python.woken
    by_c.frames.attach(None)


@settings(max_examples=60)
@given(calls, st.integers(0, 80))
def test_both_take_apart_what_was_put(program: list[Any], cut: int) -> None:
    side = Side(PlainFrames)
    side.play(program)
    end = int.from_bytes(side.memory[16:24], "little")
    data = bytes(side.memory[_DATA : _DATA + min(end, _CAPACITY)])
    data = data[: max(0, len(data) - cut)]
    assert frames.split(data, 0) == plain_split(data, 0)


def test_a_failed_writer_gets_nothing() -> None:
    for kind in (frames.Frames, PlainFrames):
        side = Side(kind)
        side.frames.failed = True
        side.frames.add_string("x")
        side.frames.commit(bytes(72), b"")
        assert side.frames.calls == 0 and not any(side.memory)
        side.frames.attach(None)
