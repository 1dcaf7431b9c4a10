"""A bounded queue of bytes in a shared file mapping: what was put survives the process, even SIGKILL.

The training thread copies bytes in and makes no system call; the writer thread takes them out to their files.
After a kill the file still holds every byte that was put and not yet taken. One process only: a forked child
shares the mapping and must not touch it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from ulpscope.model.errors import RUN_OUT, cannot
from ulpscope.native.schema import RING, RING_DATA, RING_MAGIC

MAGIC, HEADER, DATA = RING_MAGIC, RING.struct, RING_DATA
_SMALLEST = 64 << 10
_COUNTS = slice(RING.offset("head"), RING.size)  # `head` and `taken`


class Ring:
    """`head` counts bytes put since the start, `taken` bytes that have reached their file; both live in the file, where C
    reads and writes them too."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(path, flags, 0o640)
        try:
            _reserve(descriptor, DATA + capacity)
            self._map = mmap.mmap(descriptor, DATA + capacity)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.view = memoryview(self._map)
        # Each is one store. `struct` would fill its place with zeros first: a kill between the two lost all that was put.
        self._counts = self.view[_COUNTS].cast("Q")
        self._write_header()

    @property
    def head(self) -> int:
        return self._counts[0]

    @property
    def taken(self) -> int:
        return self._counts[1]

    def free(self) -> int:
        return self.capacity - (self.head - self.taken)

    def waiting(self) -> int:
        return self.head - self.taken

    def put(self, data: bytes | memoryview) -> None:
        """Appends bytes; the caller has checked that they fit."""
        size = len(data)
        at = self.head % self.capacity
        if at + size <= self.capacity:
            self._map[DATA + at : DATA + at + size] = data
        else:
            first = self.capacity - at
            self._map[DATA + at : DATA + self.capacity] = data[:first]
            self._map[DATA : DATA + size - first] = data[first:]
        self.advance(size)

    def space(self, limit: int) -> memoryview:
        """The next writable stretch, at most `limit` bytes and not across the end of the ring."""
        at = self.head % self.capacity
        size = min(limit, self.capacity - at, self.free())
        return self.view[DATA + at : DATA + at + size]

    def advance(self, size: int) -> None:
        """Publishes `size` bytes written through `space`."""
        self._counts[0] += size

    def stretch(self, limit: int) -> memoryview:
        """The oldest bytes not yet taken, at most `limit` and not across the end of the ring."""
        at = self.taken % self.capacity
        size = min(limit, self.capacity - at, self.waiting())
        return self.view[DATA + at : DATA + at + size]

    def take(self, size: int) -> None:
        """Marks `size` bytes as safe in their file."""
        self._counts[1] += size

    def restart(self, path: Path) -> None:
        """Moves the empty ring beside the next dump."""
        self.path.replace(path)
        self.path = path
        self._write_header()

    def park(self, path: Path) -> None:
        """Moves the empty ring out of a finished dump."""
        with contextlib.suppress(OSError):
            self.path.replace(path)
            self.path = path

    def close(self, *, keep: bool) -> None:
        """Unmaps; the file stays only when it still holds what did not reach its place."""
        self._counts.release()
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        if not keep:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _write_header(self) -> None:
        HEADER.pack_into(self._map, 0, MAGIC, self.capacity, 0, 0)


@contextlib.contextmanager
def beside_streams() -> Iterator[None]:
    """Files that are opened here never take the place of a standard stream: a daemon has closed those, and what the program
    then writes to them would end in ours. A mapping holds a descriptor too."""
    taken = []
    try:
        while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
            taken.append(descriptor)
        taken.append(descriptor)
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Takes the blocks now: a mapping over a hole would meet a full disk with a signal instead of an error."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    block = bytes(1 << 20)
    for start in range(0, size, len(block)):
        os.pwrite(descriptor, block[: min(len(block), size - start)], start)


def largest_ring(path: Path, capacity: int) -> Ring:
    """A ring of that capacity, or of what there is room for: the program waits more often, and what fits is recorded."""
    while True:
        try:
            return Ring(path, capacity)
        except OSError as error:
            if error.errno not in RUN_OUT or capacity < 4 * _SMALLEST:
                raise
            capacity //= 4


def require_room(folder: Path, *capacities: int) -> None:
    """Raises CaptureError where a folder has no room for rings of such capacities, all at once."""
    try:
        with contextlib.ExitStack() as rings:
            for number, capacity in enumerate(capacities):
                ring = Ring(folder / f".ulpscope.{os.getpid()}.{number}", capacity)
                rings.callback(ring.close, keep=False)
    except OSError as error:
        raise cannot(f"reserve {sum(capacities) >> 20} MB in {folder} for the queues of a process", error) from error


def left_in(path: Path) -> tuple[int, bytes]:
    """What a ring file still holds: the stream position of its first byte, and the bytes.

    Nothing, where its process moved it away, or never held still while it was read."""
    for _ in range(8):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            break
        with file:
            before = file.read(HEADER.size)
            if len(before) < HEADER.size or before[:8] != MAGIC:
                break
            _, capacity, head, taken = HEADER.unpack(before)
            if not 0 < capacity <= os.fstat(file.fileno()).st_size - DATA or not 0 <= head - taken <= capacity:
                break
            at, size = taken % capacity, head - taken
            file.seek(DATA + at)
            data = file.read(min(size, capacity - at))
            if len(data) < size:
                file.seek(DATA)
                data += file.read(size - len(data))
            file.seek(0)
            now = HEADER.unpack(file.read(HEADER.size))
        if now[3] == taken:
            return taken, data
    return 0, b""
