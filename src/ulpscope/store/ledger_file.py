"""The ledger on disk: one small line of JSON for every kernel call of one rank, append-only, no tensors.

A ledger says how far each call was from what it should have computed on its own inputs, and what it was told that it did
not compute. Two ledgers, reference and target, are judged together by `analyze.ledger`. The fields are documented in
docs/judge.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ulpscope.model.errors import DumpError
from ulpscope.store.json_fields import read_fields
from ulpscope.store.run_folder import find_own

FORMAT = 3  # 3: device, poles, passes, ends
PREFIX = "ledger.rank"
# What a process writes that has no rank to judge for: it has run no model yet, or its rank has a ledger of another process.
PROCESS = "ledger.process"
SUFFIX = ".jsonl"
_LONGEST_HEADER = 1 << 20


@dataclass(frozen=True, slots=True)
class Measure:
    """One tensor that a call wrote, against the same operation in higher precision.

    Errors are in units of round-off of `dtype` times the condition of the operation at each element. `toward` is the mean
    of the relative error in the direction of the value (truncation is negative), `up` the same in the direction of plus
    infinity; `misrounded` is the share of elements that are not the nearest number of a low precision; `spread` is how far either may be from zero by chance (one standard error). `leans` is how far all may be off together because plain arguments were rounded. `undefined` and `infinite` count what
    is NaN or Inf in the higher precision too, made from numbers. `total` and `size` are the sum and the norm of the
    elements: they tell whether another run got the same.
    """

    place: int
    dtype: str
    shape: tuple[int, ...]
    terms: int
    rms: float
    worst: float
    wrong: int = 0
    lost: int = 0
    overflowed: int = 0
    undefined: int = 0
    infinite: int = 0
    toward: float = 0.0
    up: float = 0.0
    spread: float = 0.0
    misrounded: float = 0.0
    leans: float = 0.0
    total: float = 0.0
    size: float = 0.0
    profile: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that a call read and that no call of this run computed: a weight, a mask, an input."""

    place: str
    dtype: str
    shape: tuple[int, ...]
    crc: int
    norm: float
    sketch: tuple[float, ...]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank gave to a collective and what it got, as linear sketches: sums over ranks can be checked."""

    how: str
    group: tuple[int, ...]
    number: int
    given: tuple[float, ...]
    got: tuple[float, ...]
    norm: float


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel call. `call` is its name in the dump that the row was made from.

    `poles`: the calls (kernel, dtypes, index) whose values that are infinite or not a number by definition it read; None where
    nothing was followed. `passes`: its own results hold such values. `ends`: what they have reached with it: loss, gradient or
    weight.
    """

    seq: int
    step: int
    rank: int
    phase: str
    op: str
    dtypes: str
    index: int
    kind: str
    api: str = ""
    module: str = ""
    param: str | None = None
    source: tuple[str, int, str] | None = None
    measures: tuple[Measure, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    leaves: tuple[Leaf, ...] = ()
    exchange: Exchange | None = None
    decides: bool = False
    seed: int | None = None
    call: str = ""
    unknown: str | None = None
    device: str = "cpu"
    poles: tuple[tuple[str, str, int], ...] | None = None
    passes: bool = False
    ends: str = ""

    @property
    def name(self) -> str:
        """The kernel alone: `mm` for `aten.mm.default`."""
        return self.op.split(".")[1]


_dumps = json.JSONEncoder(separators=(",", ":")).encode


class LedgerWriter:
    """Appends rows, each at once: what was added before a crash can be read. Raises FileExistsError unless it may replace a file."""

    def __init__(self, path: Path, about: dict[str, Any], *, replace: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        how = os.O_TRUNC if replace else os.O_EXCL
        # Not as Python opens it: a file that is left behind when a signal handler raises here asks for signals when it is collected,
        # and drops what the handler raises then.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | getattr(os, "O_BINARY", 0), 0o666)
        self._file: TextIO = os.fdopen(self._descriptor, "w", buffering=1, encoding="utf-8", closefd=False)
        self._file.write(json.dumps({"format": FORMAT, **about}, sort_keys=True) + "\n")

    def add(self, fields: dict[str, Any]) -> None:
        """One row, as the fields of Row; a field that has its default may be left out."""
        self._file.write(_dumps(fields) + "\n")

    def add_unseen(self, text: str, count: int) -> None:
        """What ran and was not judged, and how often until now."""
        self._file.write(_dumps({"unseen": text, "count": count}) + "\n")

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            os.close(self._descriptor)


def ledger_path(run: Path, rank: int) -> Path:
    return run / f"{PREFIX}{rank}{SUFFIX}"


def process_path(run: Path, process: int) -> Path:
    return run / f"{PROCESS}{process}{SUFFIX}"


def settle(run: Path) -> None:
    """Once the processes of a run have ended: those that ran no model are the ones to judge where none did, and else they are not."""
    early = [path for path in sorted(run.glob(f"{PROCESS}*{SUFFIX}")) if _about(path).get("early") is True]
    taken = bool(find_ledgers(run))
    longest_first = sorted(early, key=lambda path: -path.stat().st_size)
    for path in () if taken else longest_first:
        _adopt(run, path)
    for path in early:
        path.unlink()


def _adopt(run: Path, path: Path) -> None:
    """Gives an early ledger the rank that its process came to have."""
    about, rows = read_ledger(path)
    rank = max((row.rank for row in rows), default=about.get("rank", 0))
    own = ledger_path(run, rank)
    if own.exists():
        more = LedgerWriter(
            process_path(run, int(path.name[len(PROCESS) : -len(SUFFIX)])).with_suffix(".more.jsonl"), {}
        )
        more.add_unseen(f"calls of one more process of rank {rank}", len(rows))
        more.close()
        return
    unseen = about.pop("unseen")
    adopted = LedgerWriter(own, {**about, "rank": rank, "early": False})
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        next(file)
        for line in file:
            if line.endswith("\n") and "unseen" not in (fields := json.loads(line)):
                adopted.add({**fields, "rank": rank})
    for text, count in unseen.items():
        adopted.add_unseen(text, count)
    adopted.close()


def unseen_beside(run: Path) -> dict[str, int]:
    """What processes without a ledger of their own ran, which was not judged."""
    found: dict[str, int] = {}
    for path in sorted(run.glob(f"{PROCESS}*{SUFFIX}")) if run.is_dir() else ():
        found.update(read_ledger(path)[0]["unseen"])
    return found


def is_begun(run: Path) -> bool:
    """Whether a folder holds what any process of a run wrote."""
    return any(run.glob(f"{PREFIX}*{SUFFIX}")) or any(run.glob(f"{PROCESS}*{SUFFIX}"))


def find_ledgers(run: Path) -> list[Path]:
    """The ledgers of a run, by rank; `run` is a folder, or a file that may be one."""
    if run.is_file():
        return [run] if _is_ledger(run) else []
    found = [path for path in run.glob(f"{PREFIX}*{SUFFIX}") if _rank_of(path).isdecimal()]
    return sorted(found, key=lambda path: int(_rank_of(path)))


def _rank_of(path: Path) -> str:
    return path.name.removeprefix(PREFIX).removesuffix(SUFFIX)


def _is_ledger(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            _header(path, file.readline(_LONGEST_HEADER))
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from None
    except DumpError:
        return path.suffix == SUFFIX and not find_own(path)  # one that says what is wrong with it when it is read
    return True


def read_ledger(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What the ledger says about its run, and its rows. A line cut short by a crash ends it. Raises DumpError.

    `unseen` of the first is what ran and was not judged, with how often."""
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            about = _header(path, file.readline(_LONGEST_HEADER))
            about["unseen"] = {}
            about["before"] = about["before"] if type(about.get("before")) is int else 0
            return about, list(_rows(path, file, about["unseen"]))
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from None


def _about(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        return _header(path, file.readline(_LONGEST_HEADER))


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        about = json.loads(line)
        found = about["format"]
        if type(about) is not dict or type(found) is not int:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DumpError(f"{path} is not a ledger; `ulpscope blame -- CMD` writes one") from None
    if found > FORMAT:
        raise DumpError(f"{path} has format {found}, this ulpscope reads up to {FORMAT}; upgrade ulpscope to read it")
    return dict(about)


def _rows(path: Path, file: TextIO, unseen: dict[str, int]) -> Iterator[Row]:
    for number, line in enumerate(file, 2):
        try:
            plain = json.loads(line)
            if type(plain) is dict and "unseen" in plain:
                text, count = plain["unseen"], plain.get("count")
                if type(text) is not str or type(count) is not int:
                    raise ValueError("what was not seen is a text and a number")
                unseen[text] = count
                continue
            yield row_of(plain)
        except (ValueError, RecursionError) as error:
            if not line.endswith("\n"):
                return  # a crash cut it short
            raise DumpError(f"{path}, line {number} is no row of a ledger: {error}"[:500]) from None


def row_of(plain: Any) -> Row:
    """A row from its fields as they stand in a line. Raises ValueError where it is none."""
    if type(plain) is not dict:
        raise ValueError(f"{type(plain).__name__} is no table")
    made: dict[str, Any] = {}
    if "measures" in plain:
        made["measures"] = tuple(read_fields(Measure, item) for item in _items(plain["measures"]))
    if "leaves" in plain:
        made["leaves"] = tuple(read_fields(Leaf, item) for item in _items(plain["leaves"]))
    if "exchange" in plain:
        made["exchange"] = None if plain["exchange"] is None else read_fields(Exchange, plain["exchange"])
    if plain.get("poles") is not None:
        made["poles"] = tuple(_call_name(item) for item in _items(plain["poles"]))
    row: Row = read_fields(Row, plain, made)
    if "." not in row.op:
        raise ValueError(f"{row.op!r:.80} is no kernel")
    return row


def _call_name(plain: Any) -> tuple[str, str, int]:
    op, dtypes, index = _items(plain)
    if type(op) is not str or type(dtypes) is not str or type(index) is not int:
        raise ValueError(f"{plain!r:.80} is no call")
    return op, dtypes, index


def _items(plain: Any) -> list[Any]:
    if not isinstance(plain, list | tuple):
        raise ValueError(f"{type(plain).__name__} is no list")
    return list(plain)
