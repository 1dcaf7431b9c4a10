"""Directories of zips: those of torch are read as zipfile reads them, others by zipfile."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from ulpscope.model.dtypes import DTYPES
from ulpscope.store.files.pt import write_pt
from ulpscope.store.files.stored_zip import Member, _usual, bytes_of, members_of


def by_zipfile(raw: bytes) -> dict[str, Member]:
    infos = zipfile.ZipFile(io.BytesIO(raw)).infolist()
    return {
        info.filename: Member(
            info.filename,
            info.compress_type,
            info.flag_bits,
            info.CRC,
            info.compress_size,
            info.file_size,
            info.header_offset,
        )
        for info in infos
    }


def of_torch(folder: Path) -> bytes:
    torch.save(torch.arange(6.0), folder / "a.pt")
    return (folder / "a.pt").read_bytes()


def of_ours(folder: Path) -> bytes:
    write_pt(folder / "b.pt", struct.pack("<2f", 1.5, 2.5), DTYPES["float32"], (2,))
    return (folder / "b.pt").read_bytes()


@pytest.mark.parametrize("make", [of_torch, of_ours])
def test_the_directory_is_the_one_that_zipfile_reads(tmp_path: Path, make: object) -> None:
    raw = make(tmp_path)  # type: ignore[operator]
    assert _usual(memoryview(raw)) == by_zipfile(raw)


def zipped(*, comment: bytes = b"", name: str = "a") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, b"bytes")
        archive.comment = comment
    return file.getvalue()


OTHERS = {
    "a comment": zipped(comment=b"hello"),
    "bytes before it": b"before" + zipped(),
}


@pytest.mark.parametrize("raw", OTHERS.values(), ids=OTHERS)
def test_other_zips_are_read_by_zipfile(raw: bytes) -> None:
    assert _usual(memoryview(raw)) is None
    found = members_of(memoryview(raw))
    assert found == by_zipfile(raw)
    assert bytes(bytes_of(memoryview(raw), found["a"])) == b"bytes"


def test_a_directory_with_any_byte_changed_or_cut_is_read_without_harm(tmp_path: Path) -> None:
    raw = of_torch(tmp_path)
    for place in range(len(raw) - 600, len(raw)):
        changed = raw[:place] + bytes([raw[place] ^ 0xFF]) + raw[place + 1 :]
        for text in (changed, raw[:place]):
            view = memoryview(text)
            try:
                for member in members_of(view).values():
                    bytes_of(view, member)
            except (zipfile.BadZipFile, ValueError, NotImplementedError):
                pass


@pytest.mark.parametrize("raw", [b"", b"PK\5\6", b"PK\5\6" + bytes(17)])
def test_what_is_no_zip_is_refused(raw: bytes) -> None:
    with pytest.raises(zipfile.BadZipFile):
        members_of(memoryview(raw))
