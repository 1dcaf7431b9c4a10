"""Rows of a dump: what is made of their one description, and that dumps written before still say the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from ulpscope.model.names import call_text, slot_text
from ulpscope.native import schema
from ulpscope.native.schema import CALL, MEASURE, NONE64, PENDING, RING, ROWS, UNKNOWN, Rows
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden"


def test_the_header_of_c_is_made_of_the_rows() -> None:
    """Run `python -m ulpscope.native.schema` after a change, and build the C anew."""
    assert Path(schema.__file__).with_name("schema.h").read_text(encoding="utf-8") == schema.header()


def test_the_tables_of_the_page_are_made_of_the_rows() -> None:
    page = (TESTS.parent / "docs" / "dump-format.md").read_text(encoding="utf-8")
    assert page == schema.page_with_tables(page)
    assert "| 68 | `phase` | u8 |" in page


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows.name)
def test_numpy_struct_and_c_lay_a_row_out_alike(rows: Rows) -> None:
    fields = rows.dtype.fields
    assert fields is not None
    assert rows.dtype.itemsize == rows.size
    assert {name: int(about[1]) for name, about in fields.items()} == {
        each.name: rows.offset(each.name) for each in rows.fields
    }
    # C puts a field where its own size allows: only so the sum of all is the size that C asserts.
    assert all(rows.offset(each.name) % rows.dtype[each.name].base.itemsize == 0 for each in rows.fields)


def test_the_sizes_of_rows_are_those_of_the_format() -> None:
    assert [rows.size for rows in ROWS] == [72, 16, 112, 72, 32]
    assert (RING.offset("head"), RING.offset("taken")) == (16, 24)


def test_a_row_is_packed_and_picked_by_name() -> None:
    row = CALL.struct.unpack(CALL.pack(seq=7, phase=2, values=3))
    assert CALL.pick("values", "phase", "seq", "parent")(row) == (3, 2, 7, 0)
    with pytest.raises(TypeError, match="no field sek"):
        CALL.pack(sek=7)


def test_a_measure_that_is_not_known_has_no_payload() -> None:
    row = MEASURE.struct.unpack(UNKNOWN)
    assert MEASURE.pick("kind", "payload_offset", "numel")(row) == (PENDING, NONE64, 0)


@pytest.mark.parametrize("version", [2])
def test_a_dump_written_before_says_what_it_said(version: int) -> None:
    """Written, and read, by the code that had the rows in six places."""
    golden = json.loads((GOLDEN / f"format_{version}.json").read_text(encoding="utf-8"))
    assert _said(open_dump(GOLDEN / f"format_{version}")) == golden


def _said(dump: Dump) -> Any:
    found = []
    for call in dump.calls():
        values = [
            [
                slot_text(each.slot),
                each.type,
                each.dtype,
                each.shape,
                repr(each.stats),
                each.checksum,
                each.scalar,
                each.error,
            ]
            for each in call.values
        ]
        bits = [dump.load_bits(each).tobytes().hex() for each in call.values if each.payload is not None]
        about = [call_text(call.id), call.seq, call.parent, call.origin, call.module, call.thread, call.recomputed]
        found.append([*about, call.error, values, bits])
    return json.loads(json.dumps(found))
