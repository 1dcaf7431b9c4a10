"""The header of a kernel dump of nano devices: tags and lengths instead of protobuf. All numbers are little-endian.

    u32 0x5A5A5A5A | u32 version | tag 4: inputs | tag 5: outputs          a tag: u32 number, u32 bytes, content
    inputs, outputs: u32 count, and for each
        i32 type, layout, kind of address | of outputs: i32 index, type, layout before fusion | u64 address, offset, size
        u32 bytes of what follows: tag 0 the shape, tag 1 the shape in the program, both u64; tag 2 a name

The elements follow as in any other kernel dump.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x5a\x5a\x5a\x5a"
_INPUTS, _OUTPUTS = 4, 5
_SHAPE, _ORIGIN = 0, 1
_HEAD = struct.Struct("<II")
_COUNT = struct.Struct("<I")
_INPUT, _OUTPUT = struct.Struct("<3i3QI"), struct.Struct("<6i3QI")
_SIZE = 8
_MOST = 4096
# Types have the numbers of the graph engine here, which are not those of the other header.
_NUMBERED = {
    0: "FLOAT", 1: "FLOAT16", 2: "INT8", 3: "INT32", 4: "UINT8", 6: "INT16", 7: "UINT16", 8: "UINT32", 9: "INT64",
    10: "UINT64", 11: "DOUBLE", 12: "BOOL", 13: "STRING", 14: "DUAL_SUB_INT8", 15: "DUAL_SUB_UINT8", 16: "COMPLEX64",
    17: "COMPLEX128", 18: "QINT8", 19: "QINT16", 20: "QINT32", 21: "QUINT8", 22: "QUINT16", 23: "RESOURCE",
    24: "STRING_REF", 25: "DUAL", 26: "VARIANT", 27: "BF16", 28: "UNDEFINED", 29: "INT4", 30: "UINT1", 31: "INT2",
    32: "UINT2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NanoTensor:
    """What the header says of one input or output."""

    type_name: str
    layout: int
    shape: tuple[int, ...]
    origin_shape: tuple[int, ...]
    address: int
    size: int


def read_header(header: memoryview) -> tuple[str, list[NanoTensor], list[NanoTensor]]:
    """Version, inputs and outputs. Raises ValueError for a header that is cut or has something else in it."""
    _, version = _HEAD.unpack(_cut(header, _HEAD.size))
    found: dict[int, list[NanoTensor]] = {_INPUTS: [], _OUTPUTS: []}
    for tag, content in _tags(header[_HEAD.size :]):
        if tag not in found:
            raise ValueError(f"its header has the unknown tag {tag}")
        found[tag] = list(_tensors(content, _INPUT if tag == _INPUTS else _OUTPUT))
    return str(version), found[_INPUTS], found[_OUTPUTS]


def _tensors(content: memoryview, fields: struct.Struct) -> Iterator[NanoTensor]:
    (count,) = _COUNT.unpack(_cut(content, _COUNT.size))
    if count > _MOST:
        raise ValueError(f"it has more than {_MOST} inputs or outputs")
    content = content[_COUNT.size :]
    for _ in range(count):
        kind, layout, *rest = fields.unpack(_cut(content, fields.size))
        address, _, size, length = rest[-4:]
        shapes = {_SHAPE: (), _ORIGIN: ()} | {
            tag: _sizes(part) for tag, part in _tags(_cut(content[fields.size :], length)) if tag in (_SHAPE, _ORIGIN)
        }
        content = content[fields.size + length :]
        name = _NUMBERED.get(kind, f"number {kind}")
        yield NanoTensor(name, layout, shapes[_SHAPE], shapes[_ORIGIN] or shapes[_SHAPE], address, size)


def _tags(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    while content:
        tag, length = _HEAD.unpack(_cut(content, _HEAD.size))
        yield tag, _cut(content[_HEAD.size :], length)
        content = content[_HEAD.size + length :]


def _sizes(part: memoryview) -> tuple[int, ...]:
    if len(part) % _SIZE:
        raise ValueError("a shape of its header has no whole sizes")
    return struct.unpack(f"<{len(part) // _SIZE}Q", part)


def _cut(content: memoryview, length: int) -> memoryview:
    if length > len(content):
        raise ValueError(f"its header is cut: {length} bytes should follow, {len(content)} do")
    return content[:length]
