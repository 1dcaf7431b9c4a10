"""The members of a zip that are stored as they are, as memory: their directory, and their bytes, checked against their CRC-32.

Knows zips as torch writes them by itself; the directory of every other is read by zipfile, at five times the cost.
"""

from __future__ import annotations

import io
import mmap
import zipfile
from struct import Struct
from typing import BinaryIO, NamedTuple, cast

from ulpscope.native import measuring

# The end of a zip, what zip64 puts before it, and an entry of the directory: the fields that matter.
_END = Struct("<4s4H2IH")
_END_64 = 56 + 20
_ENTRY = Struct("<4s4x2H4x3I3HH6xI")
_LOCAL = Struct("<4s22xHH")
_UTF_8 = 1 << 11
_IN_EXTRA = 0xFFFFFFFF


class Member(NamedTuple):
    """An entry of the directory."""

    name: str
    method: int
    flags: int
    crc: int
    stored: int
    size: int
    offset: int


def members_of(view: memoryview) -> dict[str, Member]:
    """The directory of a zip, given as its bytes. Raises BadZipFile, as zipfile does."""
    found = _usual(view)
    if found is not None:
        return found
    with zipfile.ZipFile(_file_of(view)) as archive:
        return {info.filename: _member(info) for info in archive.infolist()}


def damaged(member: Member) -> str:
    """What is wrong where the bytes of a member have another CRC-32 than its directory says."""
    return f"the bytes of member {member.name} are damaged (their CRC-32 is another)"


def bytes_of(view: memoryview, member: Member, *, check: bool = True) -> memoryview:
    """The bytes of a member. Raises ValueError where it is compressed, encrypted, not there, cut or damaged.

    Without `check`, whether they are damaged is left to the caller."""
    if member.method != zipfile.ZIP_STORED or member.flags & 1 or member.stored != member.size:
        raise ValueError(f"member {member.name} is compressed or encrypted; torch.save does neither")
    at = member.offset
    if at < 0 or at + _LOCAL.size > len(view) or bytes(view[at : at + 4]) != b"PK\x03\x04":
        raise ValueError(f"member {member.name} is not where the directory says")
    _, name, extra = _LOCAL.unpack_from(view, at)
    start = at + _LOCAL.size + name + extra
    data = view[start : start + member.size]
    if len(data) != member.size:
        raise ValueError(f"member {member.name} is cut")
    if check and measuring.crc32(data) != member.crc:
        raise ValueError(damaged(member))
    return data


def _file_of(view: memoryview) -> BinaryIO:
    """The same bytes to read and seek in; those of a mapped file are not copied."""
    mapping = view.obj
    return cast(BinaryIO, mapping) if isinstance(mapping, mmap.mmap) else io.BytesIO(view)


def _usual(view: memoryview) -> dict[str, Member] | None:
    """The directory of a zip as torch writes it; None for all others."""
    end = len(view) - _END.size
    if end < 0:
        return None
    mark, disk, first_disk, here, count, size, at, comment = _END.unpack_from(view, end)
    stop = at + size
    if mark != b"PK\5\6" or disk or first_disk or here != count or comment or stop not in (end, end - _END_64):
        return None
    members: dict[str, Member] = {}
    for _ in range(count):
        start = at + _ENTRY.size
        if start > stop:
            return None
        mark, flags, method, crc, stored, length, name_size, extra, remark, disk, offset = _ENTRY.unpack_from(view, at)
        at = start + name_size + extra + remark
        if mark != b"PK\1\2" or disk or at > stop or _IN_EXTRA in (stored, length, offset):
            return None
        raw = bytes(view[start : start + name_size])
        if not (flags & _UTF_8 or raw.isascii()) or b"\0" in raw:
            return None
        name = raw.decode()
        members[name] = Member(name, method, flags, crc, stored, length, offset)
    return members if at == stop else None


def _member(info: zipfile.ZipInfo) -> Member:
    return Member(
        info.filename,
        info.compress_type,
        info.flag_bits,
        info.CRC,
        info.compress_size,
        info.file_size,
        info.header_offset,
    )
