"""Rows about calls that were run twice: the seeds' free_benchmark.csv, and the same with our own columns as JSON lines."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ulpscope.model.errors import CaptureError, DumpError
from ulpscope.store.json_fields import read_fields

SEED_FILE = "free_benchmark.csv"
OWN_FILE = "noise.jsonl"
COLUMNS = ("rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index")


@dataclass(frozen=True, slots=True)
class NoiseRow:
    """One result that is not as it should be. `inconsistent` by the seeds' limit; `excess` above 1 by ours."""

    rank: int
    pert_mode: str
    stage: str
    step: int
    api_name: str
    max_rel: float | str
    dtype: str
    shape: str
    output_index: int | None
    inconsistent: bool
    excess: float | None
    reason: str
    source: str | None

    @property
    def is_unexplained(self) -> bool:
        return self.excess is not None and self.excess > 1.0


class NoiseFile:
    """Adds rows to a file that several processes share. A file of an earlier run is replaced by the first row of this one."""

    def __init__(self, path: Path, *, header: str = "") -> None:
        self.path = path
        self._header = header
        self._began = _now(path)
        self._is_mine = False

    def add(self, line: str) -> None:
        with _locked(self.path.parent):
            try:
                if not self._is_mine and self.path.exists() and self.path.stat().st_mtime_ns < self._began:
                    self.path.unlink()
                self._is_mine = True
                fresh = not self.path.exists()
                with self.path.open("a", encoding="utf-8", newline="") as file:
                    file.write((self._header if fresh else "") + line)
            except OSError as error:
                raise CaptureError(f"cannot write {self.path}: {error.strerror}; choose another folder") from error

    def finish(self) -> bool:
        """Leaves the file with its header alone where nobody added a row; whether it is so."""
        with _locked(self.path.parent):
            if self.path.exists() and self.path.stat().st_mtime_ns >= self._began:
                return False
        self.add("")
        return True


def seed_file(folder: Path) -> NoiseFile:
    return NoiseFile(folder / SEED_FILE, header=_csv_line(COLUMNS))


def seed_line(row: NoiseRow) -> str:
    """The row in the columns of the seeds."""
    cells = [getattr(row, name) for name in COLUMNS]
    return _csv_line("" if cell is None else cell for cell in cells)


def own_file(folder: Path) -> NoiseFile:
    return NoiseFile(folder / OWN_FILE)


def own_line(row: NoiseRow) -> str:
    plain = {key: str(value) if value in (float("inf"),) else value for key, value in dataclasses.asdict(row).items()}
    return json.dumps(plain) + "\n"


def read_rows(folder: Path) -> list[NoiseRow]:
    """The rows that a check has left. Raises DumpError where a line is not one."""
    path = folder / OWN_FILE
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            for key in ("max_rel", "excess"):
                found[key] = float("inf") if found[key] == "inf" else found[key]
            rows.append(read_fields(NoiseRow, found))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DumpError(f"{path}, line {number} is no row of a noise check") from None
    return rows


def _csv_line(cells: object) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)  # type: ignore[arg-type]
    return text.getvalue()


def _now(path: Path) -> int:
    """The clock of the file system: a file written from now on is not older."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = path.parent / f".{path.name}.{os.getpid()}"
        mark.touch()
        now = mark.stat().st_mtime_ns
        mark.unlink()
        return now
    except OSError as error:
        raise CaptureError(f"cannot write into {path.parent}: {error.strerror}; choose another folder") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # which not every system has where such rows are read

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
