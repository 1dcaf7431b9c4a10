"""The rows of a dump, said once: numpy's dtypes, the C structs of `schema.h` and the tables of `docs/dump-format.md` come of
the texts here. `python -m ulpscope.native.schema` writes those two anew; a test makes them again and compares.

Whoever changes a row says so in HISTORY, raises FORMAT_VERSION, and goes on reading what was. It lies below `store`, because
the C, its stand-in in numpy and the framework fill in measures as well.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.model.records import Phase, Role

HISTORY = {
    1: "first version. Its sketch took turns and signs from splitmix64, 288 bits for each block; such sketches are compared "
    "with each other alone.",
    2: "turns by arithmetic, signs by turn, so that a device needs no tables that grow and reads at the speed of its memory.",
}
FORMAT_VERSION = max(HISTORY)

NONE32 = 0xFFFFFFFF
NONE64 = 0xFFFFFFFFFFFFFFFF
PHASES = tuple(Phase)
PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
ROLES = tuple(Role)
# In the order in which they are written: whoever reads meanwhile begins with the last, and finds what it points to.
TABLES = ("strings", "measures", "sketches", "values", "calls")

# Of each type: numpy's letters, struct's, C's, and its size.
_TYPES = {
    "u8": ("u1", "B", "uint8_t", 1),
    "u16": ("<u2", "H", "uint16_t", 2),
    "u32": ("<u4", "I", "uint32_t", 4),
    "u64": ("<u8", "Q", "uint64_t", 8),
    "f64": ("<f8", "d", "double", 8),
    "char": ("S1", "s", "char", 1),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a row; `count` is not 1 in an array."""

    name: str
    type: str
    count: int
    about: str

    @property
    def array(self) -> str:
        return f"[{self.count}]" if self.count > 1 else ""


@dataclass(frozen=True)
class Rows:
    """What the rows of a file are. Little-endian; no gaps, which C asserts."""

    name: str
    about: str
    fields: tuple[Field, ...]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        one: list[Any] = [(each.name, _TYPES[each.type][0], each.count) for each in self.fields]
        return np.dtype([part[: 2 + (part[2] > 1)] for part in one])

    @cached_property
    def struct(self) -> struct.Struct:
        return struct.Struct("<" + "".join(f"{each.count}{_TYPES[each.type][1]}" for each in self.fields))

    @property
    def size(self) -> int:
        return self.struct.size

    def pack(self, **given: int) -> bytes:
        """A row of plain fields by their names; what is not given is 0."""
        numbers = [given.pop(each.name, 0) for each in self.fields]
        if given:
            raise TypeError(f"a row of {self.name} has no field {next(iter(given))}")
        return self.struct.pack(*numbers)

    def offset(self, name: str) -> int:
        """Where a field begins."""
        return sum(_TYPES[each.type][3] * each.count for each in self.fields[: self._place(name)])

    def _place(self, name: str) -> int:
        return [each.name for each in self.fields].index(name)

    def pick(self, *names: str) -> Callable[[tuple[Any, ...]], Any]:
        """Takes fields out of a row that is a tuple."""
        return itemgetter(*map(self._place, names))

    def in_c(self) -> str:
        """Its struct. As no field may stand off its own size, a size that is the sum of all shows that there is no gap."""
        fields = [(f"{_TYPES[each.type][2]} {each.name}{each.array};", each.about) for each in self.fields]
        lines = [f"    {field:25} /* {about} */" for field, about in fields]
        check = f'_Static_assert(sizeof({self.name}) == {self.size}, "no gaps");'
        return "\n".join([f"/* {self.about}. */", "typedef struct {", *lines, f"}} {self.name};", check])

    def in_words(self) -> str:
        """Its table for people."""
        rows = ((self.offset(each.name), f"`{each.name}`", each.type + each.array, each.about) for each in self.fields)
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        return "\n".join(
            [f"{self.about}: {self.size} bytes.\n", "| at | field | type | |", "|---|---|---|---|", *lines]
        )


def _rows(name: str, about: str, text: str) -> Rows:
    fields = []
    for line in text.strip().splitlines():
        field, type_, words = line.split(maxsplit=2)
        type_, _, count = type_.rstrip("]").partition("[")
        fields.append(Field(field, type_, int(count or 1), words))
    return Rows(name, about, tuple(fields))


def _bits(text: str) -> dict[str, tuple[int, str]]:
    found = {}
    for line in text.strip().splitlines():
        name, number, words = line.split(maxsplit=2)
        found[name] = int(number), words
    return found


CALL = _rows(
    "CallRow",
    "`calls.bin`, a row for each finished call",
    """
    seq            u64  when it began: the number of the call within its step
    parent         u64  seq of the call around it; of a backward call, seq of the parent of its forward call
    origin         u64  of a backward call, seq of its forward call
    first_value    u64  where its values begin in values.bin, in rows
    kind           u32  string: Torch, Functional, Module, ...
    name           u32  string
    index          u32  how many calls of that kind, name and phase began before it in the step
    again          u32  of a backward call that ran more than once: which time, from 0
    values         u32  how many values it has
    stack          u32  string: its Python stack
    note           u32  string: the exception, where it raised one
    module         u32  string: the module it ran in
    thread         u32  of the program, in the order they were seen
    phase          u8   see below
    flags          u8   see below
    unused         u16  0
    """,
)
VALUE = _rows(
    "ValueRow",
    "`values.bin`, a row for each argument and result; those of a call follow each other",
    """
    slot           u32  string: role, then positions and keys
    meta           u32  string: type, dtype, shape, stride, device, ...
    measure        u32  row of measures.bin
    text           u32  string: the value of a scalar, or why there is no measure
    """,
)
MEASURE = _rows(
    "MeasureRow",
    "`measures.bin`, a row for each distinct tensor value",
    """
    max_bits       u64  the largest finite element: bits of an f64, an i64 or a u64, as `kind` says
    min_bits       u64  the smallest
    sum            f64  of the finite elements
    norm           f64  of the finite elements: the root of the sum of their squares
    numel          u64  how many elements
    nan            u64  how many of them are nan
    posinf         u64  inf
    neginf         u64  -inf
    zero           u64  0.0 or -0.0
    crc            u32  CRC-32 of the elements in row-major order
    kind           u32  bits, see below
    payload_offset u64  where its elements begin in payload.bin, in bytes
    payload_nbytes u64  how many bytes
    sketch_offset  u64  where its sketch begins in sketches.bin, in bytes
    sketch_len     u32  how many floats
    known          u32  of another tool's numbers, bits 0 to 3: which of max, min, mean and norm there are; else what follows the sketch
    """,
)
FRAME = _rows(
    "FrameHead",
    "A frame of `journal.ring`, before its bytes. Its arrays: of strings, measures, sketches, values, calls",
    """
    magic          char[4]  ulpF
    body           u32      how many bytes follow
    places         u64[5]   where they belong in each table
    sizes          u32[5]   how many are of each
    unused         u32      0
    """,
)
RING = _rows(
    "RingHead",
    "The head of a ring, whose bytes begin at 4096",
    """
    magic          char[8]  ulpring1
    capacity       u64      how many bytes it holds
    head           u64      bytes put since the start
    taken          u64      bytes that have reached their file
    """,
)
ROWS = (CALL, VALUE, MEASURE, FRAME, RING)
FRAME_MAGIC, RING_MAGIC = b"ulpF", b"ulpring1"
RING_DATA = 4096  # where the bytes of a ring begin

CALL_FLAGS = _bits(
    """
    RECOMPUTED 1 made again within a backward, by a checkpoint
    RAISED 2 ended with an exception
    """
)
RECOMPUTED, RAISED = (number for number, _ in CALL_FLAGS.values())

MEASURE_KINDS = _bits(
    """
    STATS 1 max, min, sum, norm and counts are known
    CRC 2 the CRC-32 is known
    SKETCH 4 a sketch was asked for
    KIND_SIGNED 8 max and min are i64
    KIND_UNSIGNED 16 max and min are u64
    TOLD 32 the numbers are another tool's: `sum` is the mean, `known` says which there are
    PENDING 64 reserved for a tensor on a device and not yet filled in: nothing is known
    """
)
STATS, CRC, SKETCH, KIND_SIGNED, KIND_UNSIGNED, TOLD, PENDING = (number for number, _ in MEASURE_KINDS.values())
# A measure that is not known yet.
UNKNOWN = MEASURE.pack(kind=PENDING, payload_offset=NONE64)


# --- what is made of it -------------------------------------------------------------------------------------------------

_MADE = "python -m ulpscope.native.schema"


def header() -> str:
    """schema.h."""
    bits = {**CALL_FLAGS, **MEASURE_KINDS}.items()
    return "\n\n".join(
        [
            f"/* The rows of a dump. Made by `{_MADE}`, of the texts in schema.py. */",
            "#ifndef ULPSCOPE_SCHEMA_H\n#define ULPSCOPE_SCHEMA_H\n#include <stdint.h>",
            f'#define NONE32 {NONE32:#x}u\n#define NONE64 {NONE64:#x}u\n#define FRAME_MAGIC "{FRAME_MAGIC.decode()}"',
            *(rows.in_c() for rows in ROWS),
            "\n".join(["enum {", *(f"    {name} = {number}, /* {about} */" for name, (number, about) in bits), "};"]),
            "enum { " + ", ".join(f"AT_{name.upper()}" for name in TABLES) + ", TABLES };",
            "enum { " + ", ".join(role.name for role in ROLES) + ", ROLES };",
            "enum { " + ", ".join(f"{phase.name}_PHASE" for phase in PHASES) + ", PHASES };",
            "#endif\n",
        ]
    )


def _tables() -> str:
    def bits(title: str, found: dict[str, tuple[int, str]]) -> str:
        return f"{title}: " + "; ".join(f"{number} {about}" for number, about in found.values()) + "."

    phases = ", ".join(f"{number} {phase.value}" for number, phase in enumerate(PHASES))
    words = [f"Phases: {phases}.", bits("Flags", CALL_FLAGS), bits("Bits of `kind`", MEASURE_KINDS)]
    return "\n\n".join([CALL.in_words(), *words[:2], VALUE.in_words(), MEASURE.in_words(), words[2]])


def page_with_tables(page: str) -> str:
    """docs/dump-format.md with what stands between its marks made anew."""
    made = {
        "rows": _tables(),
        "journal": "\n\n".join(rows.in_words() for rows in (RING, FRAME)),
        "history": "\n".join(f"{version}: {about}" for version, about in HISTORY.items()),
    }
    for part, text in made.items():
        begin, end = f"<!-- {part}: made by {_MADE} -->", f"<!-- end of {part} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def _main() -> None:
    here = Path(__file__).resolve()
    page = here.parents[3] / "docs" / "dump-format.md"
    here.with_name("schema.h").write_text(header(), encoding="utf-8")
    page.write_text(page_with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    _main()
