"""The short way through a dump.json: it reads what the long way reads, or nothing."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_files import call, scalar, tensor
from ulpscope.errors import DumpError
from ulpscope.naming import parse_call
from ulpscope.records import CallId, Role, Slot, Stats, ToldStats, Value
from ulpscope.store.formats.json_entries import JsonEntries
from ulpscope.store.formats.leaves import HAVE_EXTENSION, Leaves, entries
from ulpscope.store.formats.msprobe_values import MsprobeValues

needs_extension = pytest.mark.skipif(not HAVE_EXTENSION, reason="the C extension was not built")
FORWARD, BACKWARD = parse_call("Functional.linear.0.forward"), parse_call("Functional.linear.0.backward")
SECTIONS = (
    ("input_args", Role.INPUT),
    ("input_kwargs", Role.INPUT),
    ("input", Role.INPUT),
    ("output", Role.OUTPUT),
    ("parameters", Role.PARAMETERS),
)


def short(text: str | bytes, *, backward: bool = False) -> tuple[Value, ...] | None:
    raw = text.encode() if isinstance(text, str) else text
    leaves = Leaves(Value, Slot, ToldStats, Stats(0, 0, 0, 0.0, 0.0), SECTIONS)
    # Something lies before and behind an entry in its file.
    return leaves.read(b"{" + raw + b"1}", 1, 1 + len(raw), backward)


def long(text: str | bytes, named: CallId = FORWARD) -> tuple[Value, ...]:
    raw = text.encode() if isinstance(text, str) else text
    entry = json.loads(raw.decode())
    return tuple(MsprobeValues(Path("dump"), {}).of("dump.json", "call", named, entry))


# --- what is usual is read --------------------------------------------------------------------------------------

USUAL = {
    "tensors": call([tensor(), tensor(shape=())], [tensor(norm=-2.5)]),
    "numbers that are whole": call(
        [tensor(7, 0, None, None, dtype="torch.int64")], [tensor(3, 1, 2.5, 4, dtype="int")]
    ),
    "truth": call([tensor(True, False, None, None, dtype="torch.bool")], [tensor(True, True, True, True, dtype="x")]),
    "not finite": call([tensor(float("nan"), float("-inf"), float("inf"), float("nan"))], []),
    "no statistics": call([{"type": "torch.Tensor", "dtype": "torch.half", "shape": [1], "md5": "00C0ffee"}], []),
    "some statistics": call([tensor(1.0, None, None, None)], []),
    "no elements": call([tensor(None, None, None, None, shape=(0, 3))], []),
    "no dtype": call([{"type": "torch.Tensor", "shape": [2], "dtype": None, "requires_grad": None, "md5": None}], []),
    "no file": call([tensor(data_name="-1"), tensor(data_name=None)], []),
    "scalars": call([scalar(1), scalar(0.5), scalar("naïve"), scalar(True), scalar(None), {"type": "object"}], []),
    "lists": call([{"type": "slice", "value": [None, 3, [1.5, "a", []]]}], []),
    "nested": call([[tensor(), [tensor(), None]], {"a": tensor(), "b": {"c": [tensor()]}}], [None, [], {}]),
    "keywords": call([], [tensor()], {"mask": tensor(), "dim": scalar(-1)}),
    "alone": {"input_args": tensor(), "input_kwargs": None, "output": tensor()},
    "in another order": {"parameters": {"weight": tensor(1.0)}, "output": [tensor(2.0)], "input_args": [tensor(3.0)]},
}


@needs_extension
@pytest.mark.parametrize("entry", USUAL.values(), ids=USUAL)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_usual_entry_is_read_as_the_long_way_reads_it(entry: Any, indent: int | None) -> None:
    text = json.dumps(entry, indent=indent, ensure_ascii=False)
    assert repr(short(text)) == repr(long(text))


@needs_extension
def test_what_a_backward_call_did_not_get_is_left_out() -> None:
    text = json.dumps({"input": [None, tensor()], "output": [scalar(None), [None], tensor()]})
    found = short(text, backward=True)
    assert found == long(text, BACKWARD)
    assert found is not None and [value.slot.path for value in found] == [(1,), (2,)]


# --- what is not, is left to the long way -----------------------------------------------------------------------

LEAF = '{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2]'
UNUSUAL = {
    "another key of the entry": '{"input_args": [], "is_recompute": true}',
    "a key twice": '{"input_args": [], "input_args": []}',
    "a key of a tensor twice": '{"output": [' + LEAF + ', "shape": [3]}]}',
    "a keyword twice": '{"input_kwargs": {"a": null, "b": null, "a": null}}',
    "an unknown key of a tensor": '{"output": [' + LEAF + ', "device": "cpu"}]}',
    "an escape": '{"output": [{"type": "str", "value": "a\\n"}]}',
    "the type at the end": '{"output": [{"value": 1, "type": "int"}]}',
    "a type that is no text": '{"output": [{"type": 1}]}',
    "a device": '{"output": [{"type": "torch.device", "value": "cpu:None"}]}',
    "a file": '{"output": [' + LEAF + ', "data_name": "a.pt"}]}',
    "a checksum that is none": '{"output": [' + LEAF + ', "md5": "xyz"}]}',
    "a whole number for a float": '{"output": [' + LEAF + ', "Max": 1}]}',
    "a number in words": '{"output": [' + LEAF + ', "Max": "nan"}]}',
    "a size that is not known": '{"output": [{"type": "torch.Tensor", "shape": [-1]}]}',
    "too many elements": '{"output": [{"type": "torch.Tensor", "shape": [4611686018427387904, 2]}]}',
    "a large number": '{"output": [{"type": "int", "value": 1234567890123456789}]}',
    "a number too large": '{"output": [{"type": "list", "value": [1e999]}]}',
    "nan as a value": '{"output": [{"type": "float", "value": NaN}]}',
    "a bare number": '{"output": [1]}',
    "deep nesting": '{"output": ' + "[" * 20 + "]" * 20 + "}",
    "bytes behind it": '{"output": []} ',
    "no object": "[]",
    "an entry without members": "{}",
}


@pytest.mark.parametrize("text", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_entry_is_not_read(text: str) -> None:
    assert short(text) is None


@needs_extension
@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_an_entry_that_is_cut_is_not_read(cut: int) -> None:
    assert short(json.dumps(USUAL["keywords"])[:-cut]) is None


# --- both ways agree on anything --------------------------------------------------------------------------------

_words = st.sampled_from(["type", "value", "shape", "a", "b", "ü", "0"])
_numbers = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-3, 9), st.floats())
_statistic = st.one_of(st.floats(), st.none(), st.integers(-5, 5), st.booleans(), st.just("nan"))
_tensors = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["torch.Tensor", "NoneType"]),
        "dtype": st.sampled_from(["torch.float32", "torch.int64", "torch.bool", "torch.bfloat16", None]),
        "shape": st.lists(st.integers(0, 5), max_size=3),
    },
    optional={
        **dict.fromkeys(("Max", "Min", "Mean", "Norm"), _statistic),
        "requires_grad": st.sampled_from([True, False, None]),
        "md5": st.sampled_from(["00000000", "DeadBeef", None]),
        "data_name": st.sampled_from([None, "-1", "a.pt"]),
        "device": st.just("cpu"),
    },
)
_scalars = st.builds(
    lambda kind, value: {"type": kind, "value": value},
    st.sampled_from(["int", "float", "NoneType", "torch.device"]),
    st.one_of(_numbers, st.text(max_size=4), st.lists(_numbers, max_size=3)),
)
_nodes = st.recursive(
    st.one_of(_tensors, _tensors, _scalars, st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_words, inner, max_size=3)),
    max_leaves=6,
)
_entries = st.dictionaries(st.sampled_from([name for name, _ in SECTIONS]), _nodes, min_size=1)
_indents = st.sampled_from([None, 0, 1])


def assert_agreeing(raw: bytes, *, backward: bool) -> None:
    found = short(raw, backward=backward)
    if found is not None:
        assert repr(found) == repr(long(raw, BACKWARD if backward else FORWARD))


@given(_entries, _indents, st.booleans(), st.booleans())
def test_the_short_way_reads_what_the_long_way_reads_or_nothing(
    entry: Any, indent: int | None, ascii_only: bool, backward: bool
) -> None:
    text = json.dumps(entry, indent=indent, ensure_ascii=ascii_only)
    assert_agreeing(text.encode("utf-8", "replace"), backward=backward)


@given(_entries, st.data())
def test_the_short_way_takes_nothing_that_is_no_json(entry: Any, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace"))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        other = data.draw(st.sampled_from(list(b'"{}[],:0.-eE \\n\xff\x01')))
        raw[place : place + data.draw(st.integers(0, 2))] = bytes([other])
    assert_agreeing(bytes(raw), backward=False)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_the_one_that_python_reads(number: float) -> None:
    found = short(json.dumps({"output": [{"type": "float", "value": number}]}))
    assert found is None or repr(found[0].scalar) == repr(number)


# --- entries ----------------------------------------------------------------------------------------------------


@needs_extension
def test_entries_are_found_up_to_the_last_one() -> None:
    text = b'"a": {"x": "]}"}, "b" :[1, "\\"]"] ,"c": {}}'
    names: list[str] = []
    spans, at = entries(text, 0, 1 << 20, names)
    places = array("Q", spans)
    assert names == ["a", "b"]
    assert [text[start:stop] for start, stop in zip(places[::2], places[1::2], strict=True)] == [
        b'{"x": "]}"}',
        b'[1, "\\"]"]',
    ]
    assert text[at:] == b'"c": {}}'


@given(st.dictionaries(st.text(max_size=5), st.one_of(_nodes, _numbers), max_size=8), _indents, st.booleans())
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
