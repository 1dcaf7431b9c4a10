from typing import Any

from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview | NDArray[Any]

VERSION: int
ISA: str
MEASURE_FOR_C: object

def measure(
    ptr: int,
    code: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    flags: int,
    payload_offset: int,
    payload_nbytes: int,
    sketch_offset: int,
    /,
) -> bytes: ...
def gather(
    ptr: int,
    itemsize: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    start: int,
    nbytes: int,
    dest: Buffer,
    /,
) -> None: ...
def crc32(data: Buffer, value: int = 0, /) -> int: ...
def fingerprint(ptr: int, itemsize: int, shape: tuple[int, ...], stride: tuple[int, ...] | None, /) -> bytes: ...
