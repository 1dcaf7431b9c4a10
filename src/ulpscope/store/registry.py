"""The formats of dumps: which one a path has, and the dump there.

Ours is asked first, then those of older tools, last those that others have registered: an entry point of the group `ulpscope.formats`
names a `Format`. Each is imported when it is asked.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ulpscope.model.errors import DumpError
from ulpscope.store.dump import Dump, Source
from ulpscope.store.run_folder import MANIFEST, DumpLocation

BUILT_IN = (
    "ulpscope.store.native_dump:FORMAT",
    "ulpscope.store.formats.msprobe_folder:FORMAT",
    "ulpscope.store.formats.pkl_folder:FORMAT",
)
GROUP = "ulpscope.formats"

_log = logging.getLogger(__name__)
# What lies beside a dump and is none, by its name: what it is, and the word in the name of the dump that stands there for its own.
_NO_DUMPS = {"stack": "the stacks of a dump", "construct": "what called what in a dump"}
_HEADER = 1 << 16


@dataclass(frozen=True, slots=True)
class Format:
    """A format of dumps. `find` gives those at or below a path that is there, by names and first bytes: a folder, or a file, which
    stands for itself. Where it finds none, the next format is asked."""

    name: str
    find: Callable[[Path], Sequence[DumpLocation]]
    open: Callable[[DumpLocation], Source]


def find_dumps(path: Path) -> list[DumpLocation]:
    """Every dump at or below a folder, or the dump that a named file is, by step and rank: those of the first format that knows any.

    Raises DumpError for a path that is not there, and for a file that is no dump."""
    return _found(path)[1]


def open_dump(path: str | Path, *, step: int | None = None, rank: int | None = None) -> Dump:
    """The dump at a path: a rank folder, a file in it, a step or a whole run (then the first step and rank, or the asked)."""
    form, found = _found(Path(path))
    for each in found:
        if step in (None, each.step) and rank in (None, each.rank):
            return _opened(form, each)
    asked = "".join(f", {word} {number}" for word, number in (("step", step), ("rank", rank)) if number is not None)
    raise DumpError(f"{path} holds no dump{asked}; a dump is a folder step0/rank0 with a {MANIFEST}")


def open_run(path: str | Path) -> list[Dump]:
    """Every dump of a run, by step and rank."""
    form, found = _found(Path(path))
    return [_opened(form, each) for each in found]


def find_folders(run: Path) -> list[DumpLocation]:
    """The dumps of a run that are folders of their own, ours and those of older tools: what a new recording may replace."""
    if not run.is_dir():
        raise DumpError(f"{run} does not exist; give the folder that a capture wrote")
    return sorted(each for form in _built_in() for each in form.find(run) if each.folder.is_dir())


def beginning(path: Path) -> bytes:
    """The first bytes of a file, by which a format knows its own. Raises DumpError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_HEADER)
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from error


def not_a_dump(path: Path, why: str) -> str:
    """What is said of a named file that is no dump: what it is, and what to name instead."""
    for word, what in _NO_DUMPS.items():
        if path.suffix == ".json" and word in path.stem:
            own = path.with_name(path.name.replace(word, "dump"))
            named = f"name {own}" if own.is_file() else "name the dump.json that it belongs to"
            return f"{path} is no dump, it is {what}; {named}"
    if path.suffix in (".pt", ".npy", ".bin"):
        return f"{path} is no dump, it is one tensor; name the dump, or look at the tensor with `ulpscope tensor`"
    return f"{path} is no dump: {why}; name a dump.json, the .pkl of an older tool, or the folder of a run"


def _found(path: Path) -> tuple[Format | None, list[DumpLocation]]:
    if not (path.is_file() or path.is_dir()):
        raise DumpError(f"{path} does not exist; give the folder that a capture wrote")
    for form in _formats():
        found = form.find(path)
        if found:
            return form, sorted(found)
    if path.is_file():
        is_json = beginning(path).lstrip().startswith(b"{")
        raise DumpError(not_a_dump(path, "it has no object 'data'" if is_json else "it holds no JSON"))
    return None, []


def _opened(form: Format | None, location: DumpLocation) -> Dump:
    assert form is not None  # who found it
    return Dump(location.folder, form.open(location))


def _formats() -> Iterator[Format]:
    yield from _built_in()
    from importlib.metadata import entry_points  # takes longer to import than a dump to open

    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            found = entry.load()
        except Exception as error:  # of others: the formats that can be loaded go on
            _log.warning("the format %s (%s) cannot be loaded: %s", entry.name, entry.value, error)
            continue
        yield found


def _built_in() -> Iterator[Format]:
    for text in BUILT_IN:
        module, _, name = text.partition(":")
        yield getattr(importlib.import_module(module), name)
