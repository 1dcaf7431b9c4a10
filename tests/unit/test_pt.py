"""Tensor files: what torch writes is read without torch, what we write torch reads, and a pickle never runs."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ulpscope.model.dtypes import DTYPES
from ulpscope.model.errors import DumpError
from ulpscope.store.files.pt import read_pt, write_pt

SHAPES = ((), (0,), (3, 5), (2, 0, 3), (300,))
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


def raw_bytes(name: str, count: int) -> bytes:
    size = count * DTYPES[name].itemsize
    return bytes(number % 2 for number in range(size)) if name == "bool" else bytes(7 * n % 251 for n in range(size))


def archive(pickled: bytes, storage: bytes = bytes(16), *, root: str = "x", **more: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(f"{root}/data.pkl", pickled)
        file.writestr(f"{root}/data/0", storage)
        for name, content in more.items():
            file.writestr(f"{root}/{name}", content)
    return buffer.getvalue()


def tensor_pickle(shape: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85", offset: bytes = b"K\x00") -> bytes:
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    return head + STORAGE + offset + shape + stride + b"\x89ccollections\nOrderedDict\n)RtR."


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_reads_what_is_written_and_the_other_way_round(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    raw = raw_bytes(name, int(np.prod(shape)))
    write_pt(tmp_path / "ours.pt", raw, DTYPES[name], shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental in torch
        tensor = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert tensor.dtype is getattr(torch, name)
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
    assert bytes(tensor.untyped_storage()) == raw
    torch.save(tensor, tmp_path / "theirs.pt")
    for file in ("ours.pt", "theirs.pt"):
        dtype, found, bits = read_pt(tmp_path / file)
        assert (dtype.name, found, bytes(bits)) == (name, shape, raw)


@pytest.mark.parametrize("protocol", [2, 4])
def test_views_parameters_and_lazy_signs_are_read_as_torch_shows_them(tmp_path: Path, protocol: int) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6) * (1 + 2j)
    views = [
        base.t(),
        base[1:, 2:5],
        base.conj(),
        base.conj().imag,
        base.real.expand(3, 4, 6),
        torch.nn.Parameter(base.real.contiguous()),
        base.real.contiguous().requires_grad_(),
    ]
    for view in views:
        torch.save(view, tmp_path / "view.pt", pickle_protocol=protocol)
        dtype, shape, bits = read_pt(tmp_path / "view.pt")
        expected = view.detach().resolve_conj().resolve_neg().numpy()
        assert np.array_equal(np.frombuffer(bits, dtype.bits).reshape(shape), expected)


def test_a_stride_is_kept_and_the_same_tensor_is_the_same_file(tmp_path: Path) -> None:
    raw = np.arange(6, dtype=np.float32).tobytes()
    for name in ("a.pt", "b.pt"):
        write_pt(tmp_path / name, raw, DTYPES["float32"], (2, 3), (1, 2))
    assert torch.load(tmp_path / "a.pt", weights_only=True).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    with pytest.raises(FileExistsError):
        write_pt(tmp_path / "a.pt", raw, DTYPES["float32"], (6,))
    with pytest.raises(ValueError, match="do not hold"):
        write_pt(tmp_path / "c.pt", raw, DTYPES["float32"], (7,))


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 1 << 20])
@pytest.mark.parametrize("large", [1, 1 << 30])
def test_files_of_every_size_are_whole_zips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, large: int
) -> None:
    monkeypatch.setattr("ulpscope.store.files.pt._LARGE", large)  # from here on zipfile writes them
    raw = raw_bytes("uint8", size)
    write_pt(tmp_path / "x.pt", raw, DTYPES["uint8"], (size,))
    assert bytes(torch.load(tmp_path / "x.pt", weights_only=True).untyped_storage()) == raw
    assert bytes(read_pt(tmp_path / "x.pt")[2]) == raw
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        assert all(info.date_time == (1980, 1, 1, 0, 0, 0) for info in archive.infolist())
    assert (tmp_path / "x.pt").read_bytes().index(raw) % 64 == 0


def test_the_elements_lie_at_a_multiple_of_64_bytes(tmp_path: Path) -> None:
    write_pt(tmp_path / "x.pt", b"0123456789abcdef" * 4, DTYPES["uint8"], (64,))
    assert (tmp_path / "x.pt").read_bytes().index(b"0123456789abcdef") % 64 == 0


class Calls:
    """Pickles as a call of something with an effect."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def evil_pickles(witness: Path) -> dict[str, bytes]:
    command = f"touch {witness}"
    text = b"X" + struct.pack("<I", len(command)) + command.encode()
    nested = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
    return {
        "os.system": pickle.dumps(Calls(os.system, command), protocol=2),
        "os.system, protocol 4": pickle.dumps(Calls(os.system, command), protocol=4),
        "eval": b"\x80\x02cbuiltins\neval\n" + text + b"\x85R.",
        "inst": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\n" + text + b"o.",
        "newobj": b"\x80\x02cos\nsystem\n" + text + b"\x85\x81.",
        "build": tensor_pickle()[:-1] + b"}" + text + b"K\x01sb.",
        "extension": b"\x80\x02\x82\x01.",
        "a storage as a function": b"\x80\x02ctorch\nFloatStorage\n" + text + b"\x85R.",
        "a name inside torch": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
        "a name made of tuples": b"\x80\x04" + nested + nested + b"\x93.",
        "tuples in tuples": b"\x80\x02" + b")" * 10 + b"\x85" * 40000 + b".",
        "no persistent storage": b"\x80\x02" + text + b"Q.",
        "far memo": b"\x80\x02)r\xff\xff\xff\xff.",
        "unknown memo": b"\x80\x02h\x05.",
        "huge text": b"\x80\x02X\xff\xff\xff\xff.",
        "stack underflow": b"\x80\x02R.",
        "no mark": b"\x80\x02t.",
        "past a mark": b"\x80\x02)(R.",
        "never ends": b"\x80\x02K\x01",
        "empty": b"",
    }


@pytest.mark.parametrize("kind", evil_pickles(Path("x")))
def test_a_pickle_that_wants_more_than_a_tensor_is_refused_and_nothing_runs(tmp_path: Path, kind: str) -> None:
    witness = tmp_path / "witness"
    (tmp_path / "evil.pt").write_bytes(archive(evil_pickles(witness)[kind]))
    with pytest.raises(DumpError, match=r"evil\.pt is not a tensor that can be read"):
        read_pt(tmp_path / "evil.pt")
    assert not witness.exists()


def test_shapes_that_leave_the_storage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(archive(tensor_pickle()))
    assert read_pt(path)[1] == (4,)
    huge = b"\x8a\x08" + struct.pack("<q", 1 << 60)
    for pickled in (
        tensor_pickle(shape=b"K\x05\x85"),
        tensor_pickle(offset=b"K\x01"),
        tensor_pickle(offset=b"J\xff\xff\xff\xff"),
        tensor_pickle(stride=b"J\xff\xff\xff\xff\x85"),
        tensor_pickle(shape=huge + b"\x85", stride=b"K\x00\x85"),
        tensor_pickle(shape=b"(" + huge * 60 + b"t", stride=b"(" + b"K\x00" * 60 + b"t"),
        tensor_pickle(shape=b"(" + b"K\x01" * 100 + b"t", stride=b"(" + b"K\x01" * 100 + b"t"),
        tensor_pickle(shape=b"\x89\x85"),
        tensor_pickle(stride=b")"),
    ):
        path.write_bytes(archive(pickled))
        with pytest.raises(DumpError, match=r"x\.pt is not a tensor"):
            read_pt(path)


def test_a_cut_or_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write_pt(path, bytes(range(64)), DTYPES["uint8"], (64,))
    whole = path.read_bytes()
    for keep in range(0, len(whole), 7):
        path.write_bytes(whole[:keep])
        with pytest.raises(DumpError, match=r"x\.pt"):
            read_pt(path)
    at = whole.index(bytes(range(64)))
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with pytest.raises(DumpError, match="damaged"):
        read_pt(path)
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            read_pt(path)
        except DumpError:
            continue


def test_other_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.ones(2), path, _use_new_zipfile_serialization=False)
    with pytest.raises(DumpError, match=r"format from before 1\.6"):
        read_pt(path)
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(DumpError, match="something else than one tensor"):
        read_pt(path)
    path.write_bytes(archive(tensor_pickle(), root="../../x"))
    with pytest.raises(DumpError, match=r"not one of torch\.save"):
        read_pt(path)
    path.write_bytes(archive(tensor_pickle().replace(b"X\x01\x00\x00\x000", b"X\x05\x00\x00\x00../.."), bytes(16)))
    with pytest.raises(DumpError, match=r"storage '\.\./\.\.' is missing"):
        read_pt(path)
    path.write_bytes(archive(tensor_pickle(), byteorder=b"big"))
    with pytest.raises(DumpError, match="big-endian"):
        read_pt(path)
    with pytest.raises(DumpError, match="cannot read"):
        read_pt(tmp_path / "none.pt")
    (tmp_path / "link.pt").symlink_to(path)
    with pytest.raises(DumpError, match="cannot read"):
        read_pt(tmp_path / "link.pt")
