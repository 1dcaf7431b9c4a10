"""One step of one rank, whichever tool recorded it: `Dump` is what everything reads, a `Source` is what a format gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import Array, DType, bits_from, values_from
from ulpscope.model.errors import DumpError, did_you_mean
from ulpscope.model.names import call_text, parse_call
from ulpscope.model.records import CallId, CallRecord, Frame, Manifest, Stats, Value
from ulpscope.store.mapped import StoredBits


@dataclass(frozen=True, slots=True)
class Unmasked:
    """Statistics, and the sketch, of those elements of a tensor that no mask is made of (`measuring.mask_limit`). In the sketch the
    others are 0."""

    stats: Stats
    sketch: NDArray[np.float32] | None


class Source(Protocol):
    """What a format makes of its files. A position is a place in execution order, from 0.

    `manifest.state` is "complete", or the last of `manifest.notes` says why not. A call's `seq` is its position.
    """

    @property
    def format(self) -> str:
        """The name of the format its files have."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def missing(self) -> Collection[str]:
        """The files with elements that should be there and are missing or cut, of the values that were read so far."""

    def ids(self) -> Sequence[CallId]:
        """The names of all calls. Its length is asked more often than its items."""

    def modules(self) -> Sequence[str]:
        """For each call the module it ran in; empty where that is not known."""

    def record(self, position: int) -> CallRecord: ...

    def stack(self, call: CallRecord) -> list[Frame]:
        """The Python stack of a call, innermost frame first."""

    def parent(self, call: CallRecord) -> CallId | None:
        """Who called it: for a backward call, the backward of the forward call's parent."""

    def spelled(self, call: CallRecord) -> str:
        """The name of a call as its files spell it."""

    def stored(self, value: Value) -> StoredBits:
        """The elements of a tensor. Raises DumpError where there are none."""


@runtime_checkable
class Recording(Source, Protocol):
    """What only a source that saw the program run knows besides. Its calls have execution numbers of their own."""

    @property
    def ending(self) -> str: ...

    def threads(self) -> Sequence[int]: ...

    def position(self, seq: int) -> int | None: ...

    def sketch(self, value: Value) -> NDArray[np.float32] | None: ...

    def unmasked(self, value: Value) -> Unmasked | None: ...

    def rows(self, value: Value) -> NDArray[np.float32] | None: ...

    def follow(self) -> bool: ...


@runtime_checkable
class Sampling(Source, Protocol):
    """A source that keeps some elements of a tensor."""

    def sample(self, value: Value) -> Array | None: ...


class Dump:
    """One step of one rank, as it lies on disk. Open it with `open_dump`.

    `folder` is the file itself where a format has one file for a dump."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self.source = source
        self._recording = source if isinstance(source, Recording) else None

    def __len__(self) -> int:
        return len(self.source.ids())

    def __repr__(self) -> str:
        return f"Dump({str(self.folder)!r}, {len(self)} calls, {self.ending})"

    @property
    def manifest(self) -> Manifest:
        """What is known about the recording as a whole."""
        return self.source.manifest

    @property
    def recorded_by(self) -> str:
        """The format that the recorder wrote: that of the original, where this is a copy in another format."""
        return str(self.manifest.config.get("source") or self.source.format)

    @property
    def ending(self) -> str:
        """How the dump ends: "complete", or why not."""
        if self._recording is not None:
            return self._recording.ending
        told = self.manifest
        return "complete" if told.state == "complete" else [told.state, *told.notes][-1]

    @property
    def missing(self) -> Collection[str]:
        """The files with elements that should be there and are missing or cut, of the values that were read so far."""
        return self.source.missing

    def calls(self) -> Iterator[CallRecord]:
        """Every call in execution order."""
        return map(self.source.record, range(len(self)))

    def ids(self) -> list[CallId]:
        """The names of all calls in execution order."""
        return list(self.source.ids())

    def modules(self) -> list[str]:
        """For each call in execution order the module it ran in; empty where that is not known."""
        return list(self.source.modules())

    def threads(self) -> list[int]:
        """For each call in execution order the number of the thread, or of a pool's task, that made it."""
        return [0] * len(self) if self._recording is None else list(self._recording.threads())

    def nth(self, position: int) -> CallRecord:
        """The call at a position in execution order; a negative one counts from the end."""
        return self.source.record(position if position >= 0 else range(len(self))[position])

    @cached_property
    def value_count(self) -> int:
        """How many values all calls have together."""
        told = self.manifest.counts.get("values")
        return told if isinstance(told, int) else sum(len(call.values) for call in self.calls())

    def call(self, which: CallId | str) -> CallRecord:
        """One call by its name. Raises DumpError naming the nearest one when there is no such call."""
        name = which if isinstance(which, CallId) else _parsed_name(which)
        position = self._positions.get(name)
        if position is None:
            near = did_you_mean(call_text(name), map(call_text, self._positions))
            raise DumpError(f"{self.folder} has no call {call_text(name)}.{near}")
        return self.source.record(position)

    def by_seq(self, seq: int) -> CallRecord | None:
        """The call with this execution number, if it was recorded."""
        if self._recording is not None:
            position = self._recording.position(seq)
        else:
            position = seq if 0 <= seq < len(self) else None
        return None if position is None else self.source.record(position)

    def parent(self, call: CallRecord) -> CallId | None:
        """Who called it: for a backward call, the backward of the forward call's parent."""
        return self.source.parent(call)

    def name_of(self, call: CallRecord) -> str:
        """The name of a call as its files spell it."""
        return self.source.spelled(call)

    def stack(self, call: CallRecord) -> list[Frame]:
        """The Python stack of a call, innermost frame first."""
        return self.source.stack(call)

    def load(self, value: Value) -> Array:
        """The elements of a recorded tensor; bfloat16 and float8 come exactly as float32."""
        dtype, raw, shape = self.raw(value)
        return values_from(raw, dtype, shape)

    def load_bits(self, value: Value) -> Array:
        """The exact bits of a recorded tensor."""
        dtype, raw, shape = self.raw(value)
        return bits_from(raw, dtype, shape)

    def raw(self, value: Value) -> tuple[DType, memoryview, tuple[int, ...]]:
        """The element type, the row-major bits as they lie in the file, and the shape of a recorded tensor."""
        found = self.source.stored(value)
        found.check()
        return found.dtype, found.raw, found.shape

    def stored(self, value: Value) -> StoredBits:
        """As `raw`; where a file has a checksum of the bits, finding it may be left to the one who reads them."""
        return self.source.stored(value)

    def sketch(self, value: Value) -> NDArray[np.float32] | None:
        """The sketch of a recorded tensor, for `measuring.sketch_relative_l2`; None when there is none. DumpError if it is gone."""
        return None if self._recording is None else self._recording.sketch(value)

    def unmasked(self, value: Value) -> Unmasked | None:
        """What the elements of a tensor are apart from those of a mask: of most tensors, all. None where that is not known."""
        return None if self._recording is None else self._recording.unmasked(value)

    def rows(self, value: Value) -> NDArray[np.float32] | None:
        """Two numbers for each row of the last dimension, in row-major order: the sum with signs, and the norm. The sum of the
        squares of the differences of the first is about the square of the norm of the difference. None where there are none."""
        return None if self._recording is None else self._recording.rows(value)

    def sample(self, value: Value) -> Array | None:
        """The numbers that stand for a tensor where its format keeps some elements of it; None in all others."""
        return self.source.sample(value) if isinstance(self.source, Sampling) else None

    def follow(self) -> bool:
        """Reads what was added since, in the time that takes. Both times the writer must have flushed the dump. False where it
        is not only added, or cannot be known: open it anew then."""
        if self._recording is None or not self._recording.follow():
            return False
        for name in ("_positions", "value_count"):
            self.__dict__.pop(name, None)
        return True

    @cached_property
    def _positions(self) -> dict[CallId, int]:
        found: dict[CallId, int] = {}
        for position, call in enumerate(self.source.ids()):
            found.setdefault(call, position)
        return found


def _parsed_name(text: str) -> CallId:
    try:
        return parse_call(text)
    except ValueError as error:
        raise DumpError(str(error)) from None
