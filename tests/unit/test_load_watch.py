"""Hearing of the loading of a module: however it is asked for before, and whatever else finds modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ulpscope.capture.watch import LoadWatch, watch

NAME = "a_module_to_load"


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A word for each loading, and whether the module was ready then."""
    (tmp_path / f"{NAME}.py").write_text("import time\ntime.sleep(0.01)\nready = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    words: list[bool] = []
    monkeypatch.setattr(
        sys, "meta_path", [LoadWatch(NAME, lambda: words.append(sys.modules[NAME].ready)), *sys.meta_path]
    )
    yield words
    sys.modules.pop(NAME, None)


def test_any_number_of_questions_uses_nothing_up_and_gets_the_answer_of_everybody(heard: list[bool]) -> None:
    bare = PathFinder.find_spec(NAME)
    for _ in range(3):
        asked = importlib.util.find_spec(NAME)
        assert bare is not None and asked is not None
        assert (asked.origin, type(asked.loader)) == (bare.origin, SourceFileLoader)
    assert heard == []
    importlib.import_module(NAME)
    assert heard == [True]


def test_a_loaded_module_and_its_reload_are_as_without_us(heard: list[bool]) -> None:
    module = importlib.import_module(NAME)
    assert type(module.__loader__) is SourceFileLoader and "exec_module" not in vars(module.__loader__)
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
    assert importlib.reload(module) is module
    assert importlib.util.find_spec(NAME) is module.__spec__
    assert heard == [True]


def test_of_threads_that_import_and_ask_at_once_none_fails_and_one_loading_is_heard(heard: list[bool]) -> None:
    begin, errors = threading.Barrier(8), []

    def work(number: int) -> None:
        begin.wait()
        try:
            if number % 2:
                assert importlib.util.find_spec(NAME) is not None
            assert importlib.import_module(NAME).ready
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == [] and heard == [True]


def test_a_module_that_fails_to_load_is_heard_when_it_loads_later(heard: list[bool], tmp_path: Path) -> None:
    good = (tmp_path / f"{NAME}.py").read_text()
    (tmp_path / f"{NAME}.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    (tmp_path / f"{NAME}.py").write_text(good)
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert heard == [True]


def test_a_module_that_is_not_there_is_not_found(heard: list[bool]) -> None:
    sys.meta_path.insert(0, LoadWatch("no_such_module", lambda: None))
    assert importlib.util.find_spec("no_such_module") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")


class Chained(PathFinder):
    """As tools that wait for imports do it: ask everybody else, then put something around the loader."""

    asking = False

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != NAME or cls.asking:
            return None
        cls.asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            cls.asking = False
        if spec is not None:
            spec.loader = Wrapped(spec.loader)  # type: ignore[assignment]
        return spec


class Wrapped:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.seen = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", [0, 1])
def test_others_that_wait_for_the_same_module_hear_of_it_too(heard: list[bool], place: int) -> None:
    sys.meta_path.insert(place, Chained)
    assert importlib.import_module(NAME).seen
    assert heard == [True]


def test_a_lazy_module_is_heard_when_it_is_used(heard: list[bool]) -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert heard == []
    assert module.ready and heard == [True]


def test_no_finder_is_taken_out_while_others_walk_the_list(heard: list[bool]) -> None:
    before = list(sys.meta_path)
    importlib.import_module(NAME)
    assert sys.meta_path == before


def test_what_waits_for_torch_begins_at_once_where_it_is_there_already(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("A_TEST", '{"level": "op"}')
    begun: list[Any] = []
    before = list(sys.meta_path)
    watch({"A_TEST": begun.append, "NOT_SET": begun.append})
    assert begun == [{"level": "op"}] and sys.meta_path == before
    watch({"A_TEST": lambda options: 1 / 0})
    assert "not recording process" in capsys.readouterr().err
