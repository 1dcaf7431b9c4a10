"""The entries of a large JSON file are found without reading it whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.model.errors import DumpError
from ulpscope.store.formats.json_entries import JsonEntries

_numbers = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-3, 9), st.floats())
_nodes = st.recursive(
    st.one_of(_numbers, st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
_indents = st.sampled_from([None, 0, 1])


@given(st.dictionaries(st.text(max_size=5), _nodes, max_size=8), _indents, st.booleans())
def test_a_file_has_the_entries_that_python_finds(
    tmp_path_factory: pytest.TempPathFactory, content: Any, indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("file") / "dump.json"
    text = json.dumps({"task": "x", "data": content, "more": 1}, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(text.encode("utf-8", "replace"))
    wanted = json.loads(path.read_bytes())["data"]
    found = JsonEntries(path, "data")
    assert len(found) == len(wanted)
    assert repr({name: found[number] for number, name in enumerate(found.names)}) == repr(wanted)


def test_a_file_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text('{"data": {"a": {}, "b": {"x": [1, 2')
    with pytest.raises(DumpError, match="cannot be read"):
        JsonEntries(path, "data")
