from mmap import mmap
from typing import Any

Buffer = bytes | bytearray | memoryview | mmap

ISA: str

def contrast(
    reference: Buffer,
    reference_code: int,
    target: Buffer,
    target_code: int,
    state: bytearray,
    checksums: bytearray = ...,
    /,
) -> None: ...
def contrast_all(streams: list[tuple[Any, ...]], /) -> None: ...
def let_go(*views: memoryview) -> None: ...
def skip_json(buffer: Buffer, start: int, /) -> int: ...
def totals(state: bytearray, /) -> tuple[Any, ...]: ...
