from collections.abc import Callable
from mmap import mmap

from ulpscope.records import PathStep, Role, Slot, Stats, ToldStats, Value

Buffer = bytes | bytearray | memoryview | mmap

class Leaves:
    def __new__(
        cls,
        value: type[Value],
        slot: Callable[[Role, tuple[PathStep, ...]], Slot],
        told: type[ToldStats],
        empty: Stats,
        sections: tuple[tuple[str, Role], ...],
        /,
    ) -> Leaves: ...
    def read(self, buffer: Buffer, start: int, stop: int, backward: bool, /) -> tuple[Value, ...] | None: ...

def entries(buffer: Buffer, start: int, enough: int, names: list[str], /) -> tuple[bytes, int]: ...
