"""The gate in C is a recursive lock as threading.RLock is."""

import re
import signal
import threading
import time
from typing import Any

import pytest

from ulpscope.native import taps

pytestmark = pytest.mark.skipif(taps.C is None, reason="the extension was not built")


@pytest.fixture(params=["ours", "threading"])
def gate(request: pytest.FixtureRequest) -> Any:
    assert taps.C is not None
    return taps.C.Gate() if request.param == "ours" else threading.RLock()


def elsewhere(work: Any) -> Any:
    """What a call gives on another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_takes_it_as_often_as_it_likes(gate: Any) -> None:
    assert gate.acquire()
    assert gate.acquire(False)
    with gate:
        assert not elsewhere(lambda: gate.acquire(False))
    gate.release()
    assert not elsewhere(lambda: gate.acquire(False))
    gate.release()
    assert elsewhere(lambda: gate.acquire(False))


def test_who_does_not_hold_it_cannot_give_it_up(gate: Any) -> None:
    with pytest.raises(RuntimeError):
        gate.release()
    gate.acquire()

    def give_up() -> str:
        try:
            gate.release()
        except RuntimeError:
            return "no"
        return "yes"

    assert elsewhere(give_up) == "no"
    gate.release()


def test_it_tells_who_holds_it(gate: Any) -> None:
    with gate:
        assert re.search(r"owner=(\d+)", repr(gate))[1] == str(threading.get_ident())  # type: ignore[index]
    assert "owner=0" in repr(gate)


def test_one_waits_no_longer_than_asked(gate: Any) -> None:
    with gate:
        start = time.monotonic()
        assert not elsewhere(lambda: gate.acquire(True, 0.1))
        assert time.monotonic() - start >= 0.09


def test_many_threads_take_turns(gate: Any) -> None:
    inside, most, turns = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, turns
        for number in range(200):
            with gate:
                inside += 1
                most = max(most, inside)
                if number % 20 == 0:
                    time.sleep(0.0005)
                inside -= 1
                turns += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, turns) == (1, 1600)


def test_a_signal_handler_can_end_the_waiting(gate: Any) -> None:
    class EnoughError(Exception):
        pass

    def handler(*_: Any) -> None:
        raise EnoughError

    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with gate:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(EnoughError):
            gate.acquire()
    finally:
        signal.signal(signal.SIGALRM, before)
        over.set()
        thread.join()
    assert gate.acquire(True, 10)
    gate.release()
