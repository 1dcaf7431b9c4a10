"""Writing a dump. The training thread only copies into rings; one thread of ours moves them into the files.

A finished call is one frame in the journal ring: its new strings, measures, sketches, values and its row, with the
place of each in its table. The writer thread puts them there. After a kill the reader replays the frames that are
left in the ring; doing a frame twice changes nothing.

That thread also opens and finishes dumps: a handler of a signal can raise at any moment, but only on the main thread. Whoever
is interrupted while it waits leaves work behind that is done all the same, and is waited for by the next that asks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.background import Job, NoThreadError, OwnThread, here
from ulpscope.model.errors import CaptureError, FolderTakenError, cannot
from ulpscope.native import measuring
from ulpscope.native.schema import NONE64, UNKNOWN
from ulpscope.store import run_folder
from ulpscope.store.frames import Frames, file_frames, write_all
from ulpscope.store.ring import DATA, Ring, beside_streams, largest_ring

log = logging.getLogger(__name__)

JOURNAL_BYTES = 8 << 20
ALIGN = 64
_BLOCK = 4096
_CHUNK = 4 << 20


class DumpWriter:
    """Writes the dumps of one process, one step after the other. `failure` is set once when it must give up."""

    unknown_measure = UNKNOWN

    def __init__(self, *, payload_bytes: int = 0) -> None:
        self.failure: str | None = None
        self.journal: Ring | None = None
        self.payloads: Ring | None = None
        self.on_failure: Callable[[str], None] = log.warning
        self._payload_bytes = payload_bytes
        self._lock = threading.Lock()
        self._drain_lock = threading.Lock()
        self._closed = False
        self._thread: OwnThread | None = None
        # None wakes the thread.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._last_job: Job | None = None
        self._files: list[int] = []
        self._payload_file = self._direct_file = -1
        self._folder: Path | None = None
        # That folder until its files are made, wherever it may be moved to; None where it cannot be held.
        self._place: int | None = None
        # One thread at a time is inside: all of them hold the gate of the recorder.
        self.frames = Frames(self._put_frame, self._wake)
        self._reset()

    def _reset(self) -> None:
        self.frames.attach(None)
        self._payload_size = 0
        self._measures_filed = 0
        # What the manifest on the disk says, but for when it was written.
        self._said: dict[str, Any] = {}

    # --- one step -----------------------------------------------------------------------------------------------

    def open(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Starts a dump in a new folder. Raises CaptureError with what to do when that cannot be."""
        first = not self._has_thread()
        if first:
            self._thread = OwnThread(self._run)
            try:
                self._thread.start()
            except NoThreadError:  # the rings are emptied when they are full, and at the end of a step
                self._thread = None
        try:
            self._do(self._open, folder, manifest)
        except CaptureError:
            if first:
                self._end_thread()
                self._closed = False
            raise
        self._wake()  # to make the files, which nobody need wait for

    def _open(self, folder: Path, manifest: dict[str, Any]) -> None:
        self._reset()
        is_made = False
        try:
            with beside_streams():
                folder.mkdir(parents=True)
                is_made = True
                self._leave_place()
                with contextlib.suppress(OSError, AttributeError):
                    self._place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                self._say(folder, manifest)
                self.journal = self._ring(self.journal, folder / run_folder.JOURNAL, JOURNAL_BYTES)
                self.frames.attach(self.journal.view)
                if self._payload_bytes:
                    self.payloads = self._ring(self.payloads, folder / run_folder.PAYLOAD_JOURNAL, self._payload_bytes)
        except FileExistsError as error:
            self._leave_place()
            raise FolderTakenError(
                f"{error.filename} exists already: an earlier capture lies there and is never mixed with a new one; "
                "choose another folder, or ask for it to be replaced (overwrite=True, --overwrite)"
            ) from None
        except OSError as error:
            self._leave_place()
            if is_made:  # what is half made would read as a dump of a program that is still running
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()
            raise cannot(f"write into {folder}", error) from error
        self._folder = folder

    def _make_files(self, folder: Path) -> None:
        """Before the first bytes go into them; until then all is in the rings."""
        names = (*run_folder.TABLES, *((run_folder.PAYLOAD,) if self._payload_bytes else ()))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        place = self._place
        try:
            if place is not None:
                os.fstat(place)
        except OSError:  # the program has closed it
            place = self._place = None
        paths = [name if place is not None else os.fspath(folder / name) for name in names]
        files: list[int] = []
        try:
            with beside_streams():
                for path in paths:
                    files.append(os.open(path, flags, 0o640, dir_fd=place))
                if self._payload_bytes:
                    with contextlib.suppress(OSError, AttributeError):
                        self._direct_file = os.open(paths[-1], os.O_WRONLY | os.O_DIRECT, dir_fd=place)
        except BaseException:  # without a thread of ours this is the program's, where a signal handler may raise
            for descriptor, path in zip(files, paths, strict=False):
                os.close(descriptor)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path, dir_fd=place)
            raise
        if self._payload_bytes:
            self._payload_file = files.pop()
        self._files = files
        self._leave_place()

    def _leave_place(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            with contextlib.suppress(OSError):  # the program may have closed it
                os.close(place)

    def close(self, manifest: dict[str, Any]) -> None:
        """Ends the dump: everything in its files, the manifest last."""
        if self.is_open:
            if self.frames.pending or self.frames.pending_strings:
                self.frames.commit(b"", b"")
            self._do(self._close, manifest)

    def _close(self, manifest: dict[str, Any]) -> None:
        folder = self._folder
        if folder is None:
            return
        self._drain(everything=True)
        self._folder = None
        with self._drain_lock:
            try:
                if not self.failure and self._payload_file >= 0:
                    os.ftruncate(self._payload_file, self._payload_size)
            except OSError as error:
                self._fail(_what_to_do(error, folder))
            # A file system over a network may tell only now that it had no room.
            late = self._close_files()
        if late is not None:
            self._fail(_what_to_do(late, folder))
        if self.failure:
            manifest = {**manifest, "state": "incomplete", "notes": [*manifest.get("notes", []), self.failure]}
        for ring in (self.journal, self.payloads):
            if ring is not None and not ring.waiting():
                # Between two steps the empty ring waits in the run folder: a finished dump holds no journal.
                ring.park(folder.parent.parent / f".{folder.name}.{os.getpid()}.{ring.path.name}")
        try:
            self._say(folder, manifest)
        except OSError as error:
            self._fail(f"could not finish {folder / run_folder.MANIFEST}: {error.strerror}")

    def _say(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Writes the manifest, and when, where it says anything new."""
        if manifest != self._said:
            written = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            run_folder.write_json(folder / run_folder.MANIFEST, {**manifest, "written": written})
            self._said = manifest

    def _close_files(self) -> OSError | None:
        """Closes every file; the first error, if any."""
        self._leave_place()
        first = None
        for descriptor in (*self._files, self._payload_file, self._direct_file):
            if descriptor >= 0:
                try:
                    os.close(descriptor)
                except OSError as error:
                    first = first or error
        self._files, self._payload_file, self._direct_file = [], -1, -1
        return first

    def flush(self, manifest: dict[str, Any]) -> None:
        """Brings the dump into a state that reads as complete; more calls may follow."""
        self._do(self._flush, manifest)

    def _flush(self, manifest: dict[str, Any]) -> None:
        folder = self._folder
        if folder is None:
            return
        self._drain(everything=True)
        try:
            self._say(folder, manifest if not self.failure else {**manifest, "state": "incomplete"})
        except OSError as error:
            self._fail(f"could not write {folder / run_folder.MANIFEST}: {error.strerror}")

    def leave_to_parent(self) -> None:
        """In a forked child: files, rings and jobs are those of its parent. What still comes of a call that was under way at the
        fork goes nowhere, and no lock is waited for, which a thread of the parent may have held."""
        self.frames.attach(None)
        self.journal = self.payloads = self._folder = self._last_job = None
        self._lock = threading.Lock()
        self._close_files()

    @property
    def capacities(self) -> list[int]:
        """Of its queues, where there is room for them."""
        return [JOURNAL_BYTES, *([self._payload_bytes] if self._payload_bytes else [])]

    @property
    def is_open(self) -> bool:
        if self._last_job is not None:
            self._finish(self._last_job)  # whoever asked for it may have been interrupted
        return self._folder is not None

    def shutdown(self) -> None:
        """Gives back the rings and the thread. The writer is of no use afterwards."""
        self._end_thread()
        self._leave_place()
        self.frames.attach(None)  # a daemon thread of the program may be in the middle of a call
        with self._lock:
            rings = (self.journal, self.payloads)
            self.journal = self.payloads = None
        for ring in rings:
            if ring is not None:
                ring.close(keep=ring.waiting() > 0)

    def _end_thread(self) -> None:
        self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join(5)
        self._thread = None

    @property
    def counts(self) -> dict[str, int]:
        return {"calls": self.frames.calls, "measures": self.frames.measures, "payload_bytes": self._payload_size}

    # --- what the recorder calls --------------------------------------------------------------------------------

    def add_string(self, json_text: str) -> int:
        """Stores one JSON text and returns its number. The caller interns: the same text twice is two entries."""
        return int(self.frames.add_string(json_text))

    def add_measure(
        self,
        pointer: int,
        code: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...] | None,
        flags: int,
        payload: tuple[int, int] | None,
    ) -> int:
        """Measures memory and stores the row; returns its number."""
        offset, nbytes = payload or (NONE64, 0)
        frames = self.frames
        row = measuring.measure(pointer, code, shape, stride, flags, offset, nbytes, frames.sketch_size)
        return int(frames.add_measured(row))

    def add_measured(self, row: bytes) -> int:
        """Stores a row that was measured elsewhere, without a sketch; returns its number."""
        return int(self.frames.add_measured(row))

    def reserve_measure(self) -> int:
        """Stores a row of which nothing is known yet; returns its number, for `complete_measures`."""
        return int(self.frames.add_measured(UNKNOWN))

    def complete_measures(
        self, numbers: NDArray[np.uint32], rows: NDArray[np.void], sketches: bytes | memoryview
    ) -> None:
        """Fills in reserved rows. Places of sketches are counted from the first of `sketches`."""
        if self.frames.pending:
            self.frames.commit(b"", b"")
        self.frames.patch(numbers, rows, sketches)
        self._wake()

    def add_payload(
        self, pointer: int, itemsize: int, shape: tuple[int, ...], stride: tuple[int, ...] | None, nbytes: int
    ) -> tuple[int, int] | None:
        """Copies the exact bits of a tensor into the payload ring; returns their place, or None after a failure."""
        with self._lock:
            ring = self.payloads
            if ring is None or self.failure:
                return None
            padding = -ring.head % ALIGN
            offset = ring.head + padding
            if padding and not self._put(ring, bytes(padding)):
                return None
            done = 0
            while done < nbytes:
                space = ring.space(min(nbytes - done, _CHUNK))
                size = len(space)
                if not size:
                    space.release()
                    if not self._wait_for_space(ring, 1):
                        return None
                    continue
                measuring.gather(pointer, itemsize, shape, stride, done, size, space)
                space.release()
                ring.advance(size)
                done += size
            self._payload_size = offset + nbytes
            if ring.waiting() > ring.capacity // 4:
                self._wake()
        return offset, nbytes

    def commit(self, row: bytes, values: bytes) -> None:
        """Stores one finished call: its row of calls.bin, whose `first_value` is filled in, and those of its values."""
        self.frames.commit(row, values)

    def _put_frame(self, frame: bytes) -> bool:
        return self.journal is not None and self._put(self.journal, frame)

    def _put(self, ring: Ring, data: bytes) -> bool:
        if len(data) <= ring.free():
            ring.put(data)
            return True
        rest = memoryview(data)
        while rest:
            if not self._wait_for_space(ring, min(len(rest), ring.capacity // 2)):
                return False
            size = min(len(rest), ring.free())
            ring.put(rest[:size])
            rest = rest[size:]
        return True

    def _wait_for_space(self, ring: Ring, size: int) -> bool:
        self._wake()
        while ring.free() < size:
            if self.failure:
                return False
            if not self._has_thread():
                self._drain(everything=False)
            else:
                time.sleep(0.0005)
        return True

    # --- the writer thread --------------------------------------------------------------------------------------

    def _do(self, work: Callable[..., None], *args: Any) -> None:
        """Has the thread do something, and waits for it."""
        job = self._last_job = Job(work, *args)
        self._jobs.put(job)
        self._finish(job)
        if job.error is not None:
            raise job.error

    def _finish(self, job: Job) -> None:
        while not job.is_done:
            if not self._has_thread():
                job.run()
                continue
            job.wait()
            if not job.is_done and self._jobs.empty():
                self._jobs.put(job)  # whoever asked may have been interrupted before; doing it again does nothing

    def _has_thread(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_working() and thread is not here()

    def _wake(self) -> None:
        if self._jobs.empty():
            self._jobs.put(None)

    def _run(self) -> None:
        while not self._closed or not self._jobs.empty():
            try:
                job = self._jobs.get(timeout=0.2)
            except Empty:
                job = None
            if job is not None:
                job.run()
            elif self._folder is not None:
                self._drain(everything=False)

    def _drain(self, *, everything: bool) -> None:
        with self._drain_lock:
            if self.failure or self._folder is None:
                return
            try:
                if not self._files:
                    self._make_files(self._folder)
                if self.payloads is not None:
                    self._drain_payloads(self.payloads, everything)
                if self.journal is not None:
                    self._drain_frames(self.journal)
            except OSError as error:
                self._fail(_what_to_do(error, self._folder))
            except Exception as error:
                self._fail(f"the writer stopped: {type(error).__name__}: {error}")

    def _drain_frames(self, ring: Ring) -> None:
        oversize = b""
        while True:
            waiting = ring.waiting()
            data: bytes | memoryview = ring.stretch(waiting)
            if oversize or len(data) < waiting:
                data = oversize + bytes(data) + bytes(ring.view[DATA:][: waiting - len(data)])
            at, self._measures_filed = file_frames(data, tuple(self._files), self._measures_filed)
            if at < len(data) and (oversize or not ring.free()):
                # A frame longer than the ring: its bytes must leave before the rest can come.
                oversize = bytes(data[at:])
                ring.take(waiting)
                while not ring.waiting() and not self._closed:
                    time.sleep(0.0005)
                continue
            ring.take(at - len(oversize))
            return

    def _drain_payloads(self, ring: Ring, everything: bool) -> None:
        while ring.waiting() and not self.failure:
            data = ring.stretch(_CHUNK)
            try:
                aligned = len(data) // _BLOCK * _BLOCK
                if self._direct_file >= 0 and aligned and ring.taken % _BLOCK == 0:
                    size = self._write_direct(data[:aligned], ring.taken)
                elif everything or self._direct_file < 0:
                    write_all(self._payload_file, data, ring.taken)
                    size = len(data)
                else:
                    return
            finally:
                data.release()
            ring.take(size)
            if not everything and ring.waiting() < _CHUNK:
                return

    def _write_direct(self, data: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._direct_file, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(self._direct_file)  # this file system has no direct writing after all
            self._direct_file = -1
            return 0
        finally:
            data.release()

    def _ring(self, ring: Ring | None, path: Path, capacity: int) -> Ring:
        if ring is not None:
            try:
                ring.restart(path)
                return ring
            except OSError:
                ring.close(keep=False)  # its file was deleted under us; the mapping alone would not survive a kill
        return largest_ring(path, capacity)

    def _fail(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
            self.frames.failed = True
            self.on_failure(why)


def _what_to_do(error: OSError, folder: Path | None) -> str:
    advice = {
        errno.ENOSPC: "free some space or choose another folder",
        errno.EDQUOT: "your quota is used up; free some space or choose another folder",
        errno.EIO: "the disk reports an error",
    }.get(error.errno or 0, "check the folder")
    return f"recording ended in {folder}: {error.strerror}; the program goes on, {advice}"
