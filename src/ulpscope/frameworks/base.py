"""What a framework offers to a capture, and what a capture offers to a framework's taps.

A tap watches one kind of call. It asks the observer to open a call, shows it inputs and outputs, and closes it. The
observer decides what is wanted, measures and stores; it never raises into the program that is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.records import PathStep, Phase, Role


class PathOfCode(str):
    """The path of a module whose calls are made by code that was written of many modules: each belongs to its own."""

    __slots__ = ()

    def inside(self, frame: FrameType | None) -> str:
        """The path of the module to which what this frame calls belongs."""
        raise NotImplementedError


class OpenCall:
    """A call that has begun. Only numbers and texts: it must never keep a tensor alive."""

    __slots__ = (
        "again",
        "chosen",
        "epoch",
        "flags",
        "index",
        "kind",
        "module",
        "name",
        "note",
        "origin",
        "parent",
        "phase",
        "seq",
        "stack",
        "thread",
        "values",
        "wanted",
    )

    def __init__(self, kind: str, name: str, index: int, phase: Phase) -> None:
        self.kind = kind
        self.name = name
        self.index = index
        self.phase = phase
        self.seq = -1
        self.parent = -1
        self.origin = -1
        self.module = ""
        self.stack = -1
        self.thread = 0
        self.values: list[int] = []
        # Asked for by name; and recorded, which its phase must be too.
        self.chosen = self.wanted = True
        self.flags = 0
        self.note: str | None = None
        self.again = 0
        self.epoch = 0


# What a backward record needs of its forward call: kind, name, index, epoch, seq, parent, module, stack. A plain tuple of
# numbers and texts: the garbage collector lets go of such a tuple, and thousands of them wait for a backward pass.
Forward = tuple[str, str, int, int, int, int, str, int]


class ThreadState:
    """What one thread is doing: the calls it has open, and whether our own code is running on it."""

    __slots__ = ("busy", "calls", "compiled", "free", "guard", "mode", "modules", "number", "redispatched", "region")
    # Whether that code is C, of which no frame tells.
    in_c = False
    # Calls that the mode has been given, which is off meanwhile; only C counts them.
    handling = 0

    def __init__(self, number: int) -> None:
        self.number = number
        self.busy = False
        # Gives up what the thread holds of the observer's, where `busy` was left behind.
        self.free: Callable[[], None] | None = None
        self.calls: list[OpenCall] = []
        self.modules: list[tuple[str, OpenCall | None, FrameType | None, int]] = []
        self.mode: Any = None
        self.compiled = 0
        self.region: FrameType | None = None
        self.redispatched: Any = None
        # A call whose end nobody tells when it raises, and the frame it runs in.
        self.guard: tuple[OpenCall, FrameType] | None = None


T = TypeVar("T")
# What a frame is called that calls for the program from a line of its own: nobody's stack has it.
STAND_IN = "<ulpscope>"


class Shared(Generic[T]):
    """An attribute that C looks at with every call: it is kept there, where there is C."""

    def __init__(self, first: T) -> None:
        self._first = first

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name, self._own = name, f"_{name}"

    def __get__(self, owner: Any, kind: type[Any]) -> T:
        found: T = getattr(owner.fast, self._name) if owner.fast is not None else getattr(owner, self._own, self._first)
        return found

    def __set__(self, owner: Any, value: T) -> None:
        if owner.fast is not None:
            setattr(owner.fast, self._name, value)
        else:
            setattr(owner, self._own, value)


class Observer(Protocol):
    """The recorder, as a tap sees it."""

    @property
    def active(self) -> bool: ...

    # The C part of a capture, where it is there and fits.
    @property
    def fast(self) -> Any: ...

    def state(self) -> ThreadState: ...

    def enter(self, state: ThreadState) -> bool:
        """Begins a stretch of our own code on this thread; False when one is under way. No step ends inside it."""
        ...

    def leave(self, state: ThreadState) -> None: ...

    def open_call(
        self, state: ThreadState, kind: str, name: str, frame: FrameType | None, *, phase: Phase = Phase.FORWARD
    ) -> OpenCall: ...

    def open_backward(self, state: ThreadState, forward: Forward, again: int) -> OpenCall: ...

    def show(
        self,
        call: OpenCall,
        role: Role,
        path: tuple[PathStep, ...],
        value: Any,
        *,
        unread: str | None = None,
        produced: bool = False,
    ) -> None:
        """Adds a value to a call. `unread` says why its elements must not be looked at; `produced`, that an operator has
        just returned it."""
        ...

    def close_call(self, call: OpenCall) -> None: ...

    def close_raised(self, call: OpenCall, error: BaseException) -> None: ...

    def wants_backward(self, call: OpenCall) -> bool: ...

    def note(self, text: str) -> None: ...

    def missed(self, text: str) -> None:
        """Something ran here that was not seen."""
        ...

    def trouble(self, where: str, error: BaseException) -> None: ...


class Tap(Protocol):
    """Something that is on between `install` and `remove`, and leaves nothing behind."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


class Measurer(Protocol):
    """Turns one leaf value into the numbers of a value row: meta, measure, text. `leaf_types` are leaves for sure."""

    leaf_types: frozenset[type]
    note: Callable[[str], None]

    def use(self, fast: Any) -> None:
        """Lets C do what is done for each value."""
        ...

    def begin_step(self) -> None: ...

    def begin_window(self) -> None: ...

    def row(self, value: Any, produced: bool = False) -> tuple[int, int, int]: ...

    def unread(self, value: Any, reason: str) -> tuple[int, int, int]: ...

    def leaves(self, value: Any) -> Iterator[tuple[tuple[PathStep, ...], Any]]: ...

    def if_unwritten(self, value: Any) -> str | None: ...

    def forget(self, values: Iterable[Any]) -> None: ...

    def distrust(self, values: Iterable[Any]) -> None: ...

    def give_back(self) -> None:
        """Frees what it holds of devices' memory."""
        ...

    def finish_step(self) -> None:
        """Waits for what devices have still to say: afterwards every row is known."""
        ...


class Sink(Protocol):
    """Where strings, measures and payloads go: the dump writer."""

    def add_string(self, json_text: str) -> int: ...

    def add_measure(
        self,
        pointer: int,
        code: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...] | None,
        flags: int,
        payload: tuple[int, int] | None,
    ) -> int: ...

    # A row of which nothing is known yet.
    unknown_measure: bytes

    def reserve_measure(self) -> int: ...

    def complete_measures(
        self, numbers: NDArray[np.uint32], rows: NDArray[np.void], sketches: bytes | memoryview
    ) -> None:
        """Fills in reserved rows. The memory of all three is used again afterwards."""
        ...

    def add_payload(
        self, pointer: int, itemsize: int, shape: tuple[int, ...], stride: tuple[int, ...] | None, nbytes: int
    ) -> tuple[int, int] | None: ...


Cleanup = Callable[[], None]
