"""The end of a JSON value is where Python's parser finds it; pages that are let go, and the fields of a state: by the extension and by the fallback."""

import json
import mmap
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.native import pairs, pairs_fallback

try:
    from ulpscope.native import _pairs

    MODULES = [_pairs, pairs_fallback]
except ImportError:
    MODULES = [pairs_fallback]

each_module = pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rpartition(".")[2])

# Characters that mean something to a scanner, more often than others.
TEXT = st.text(st.sampled_from('\\"{}[],:ab \n\u00e9') | st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=12,
)


@each_module
@settings(max_examples=150, deadline=None)
@given(
    value=VALUES,
    before=st.text(st.sampled_from('[{" \\'), max_size=130),
    after=st.sampled_from(["", ",", "}", "]", " ", '\n"x"']),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_a_value_ends_where_python_finds_its_end(module, value, before, after, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    start = len(before)
    assert module.skip_json(before.encode() + text + after.encode(), start) == start + len(text)


@each_module
@settings(max_examples=80, deadline=None)
@given(value=st.lists(VALUES, max_size=3) | st.dictionaries(TEXT, VALUES, max_size=3) | TEXT, data=st.data())
def test_a_value_that_is_cut_is_refused(module, value, data):
    text = json.dumps(value).encode()
    stop = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ValueError, match="no whole JSON value begins at byte 0"):
        module.skip_json(text[:stop], 0)


@each_module
@pytest.mark.parametrize("slashes", range(0, 140))
def test_backslashes_escape_each_other_across_the_blocks_of_a_scan(module, slashes):
    for lead in (0, 50, 63):
        text = json.dumps(["x" * lead + "\\" * slashes + '"]']).encode()
        assert module.skip_json(text + b"]]", 0) == len(text)


@each_module
@pytest.mark.parametrize("text", ["12", "-0.5e+10", "true", "false", "null", "NaN", "Infinity", "-Infinity", '""', "7"])
def test_a_scalar_may_end_the_buffer_or_be_followed(module, text):
    for after in ("", ",1", "]", "}", " 1", "\n"):
        assert module.skip_json((text + after).encode(), 0) == len(text)


@each_module
@pytest.mark.parametrize("text", ["", "tru", "nul", "-", "1.", "1e", "x", "]", ",", " 1", '"', '"\\"', "Inf", "truely"])
def test_what_is_no_whole_value_is_refused(module, text):
    with pytest.raises(ValueError, match="no whole JSON value"):
        module.skip_json(text.encode(), 0)


@each_module
def test_a_start_outside_the_buffer_is_refused(module):
    for start in (-1, 2, 100):
        with pytest.raises(ValueError, match="no whole JSON value"):
            module.skip_json(b"12", start)


def values_in(module: ModuleType, buffer, start: int) -> list[object]:
    """The members of an array, found one after the other without parsing what lies before them."""
    found = []
    at = start + 1
    while buffer[at] != ord("]"):
        end = module.skip_json(buffer, at)
        found.append(json.loads(bytes(buffer[at:end])))
        at = end + (buffer[end] == ord(","))
    return found


@each_module
def test_a_mapped_file_and_a_view_of_it_are_read_in_place(module, tmp_path):
    values = [{"a": [1, {"b": "]}"}]}, 5, "x\\", None, [[]] * 100]
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(values, separators=(",", ":")))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert values_in(module, mapped, 0) == values
        with memoryview(mapped) as view:
            assert values_in(module, view, 0) == values


@each_module
def test_pages_that_were_let_go_come_from_the_file_again(module, tmp_path):
    content = bytes(range(256)) * 4096
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        assert bytes(view) == content
        module.let_go()
        module.let_go(view[100:200])
        module.let_go(view[: 1 << 18], view[1 << 18 : 1 << 19], view[700_001:], view[5000:600_000])
        assert bytes(view) == content
        view.release()


@each_module
def test_a_state_is_told_field_by_field_with_its_lanes_added_up(module):
    state = np.zeros(1, pairs.STATE)
    for number, name in enumerate(("count", "differing", "below_thousandth", "below_five_thousandths"), 1):
        state[name] = number
    for number, name in enumerate(state["special"].dtype.names, 5):
        state["special"][name] = number
    state["place"] = 13
    for number, name in enumerate(("max_absolute", "max_relative", "max_ulp"), 14):
        state[name] = number
    for number, name in enumerate(state["sums"].dtype.names, 17):
        state["sums"][name][0, 2] = number - 0.5
        state["sums"][name][0, 7] = 0.5
    assert module.totals(bytearray(state.tobytes())) == tuple(range(1, 24))
