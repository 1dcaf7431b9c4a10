"""Arrays in .npy files: what numpy writes is read, what is no array of numbers is refused, and nothing is trusted."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.model.dtypes import DTYPES, bits_from, values_from
from ulpscope.model.errors import DumpError
from ulpscope.store.files.npy import as_bfloat16, narrowed, read_npy, write_npy

NUMPY_TYPES = [name for name, dtype in DTYPES.items() if dtype.exact is not None]


def header(text: str, version: int = 1) -> bytes:
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text.encode("latin-1")


def described(descr: str = "'<f4'", shape: str = "(2,)", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


@pytest.mark.parametrize("name", NUMPY_TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (1, 1, 2)])
def test_every_type_and_shape_that_numpy_writes_is_read_bit_by_bit(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    array = (np.arange(np.prod(shape)) % 2).astype(DTYPES[name].exact).reshape(shape)
    np.save(tmp_path / "a.npy", array)
    dtype, found, raw = read_npy(tmp_path / "a.npy")
    assert (dtype.name, found, raw.tobytes()) == (name, shape, array.tobytes())


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_what_is_written_is_the_same_file_that_numpy_writes(tmp_path: Path, name: str) -> None:
    array = np.arange(6).astype(DTYPES[name].exact).reshape(2, 3)
    np.save(tmp_path / "numpy.npy", array)
    write_npy(tmp_path / "ours.npy", DTYPES[name], (2, 3), array.tobytes())
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "numpy.npy").read_bytes()


@pytest.mark.parametrize("shape", [(), (4,), (0,)])
def test_shapes_of_any_length_are_written_as_numpy_reads_them(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype=np.float32)
    write_npy(tmp_path / "a.npy", DTYPES["float32"], shape, array.tobytes())
    assert np.array_equal(np.load(tmp_path / "a.npy"), array)


def test_bfloat16_is_written_as_float32_and_taken_back(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x7FC0, 0x0001, 0x8000], dtype="<u2")  # 1, -2, inf, nan, smallest, -0
    write_npy(tmp_path / "a.npy", DTYPES["bfloat16"], (2, 3), bits.tobytes())
    loaded = np.load(tmp_path / "a.npy")
    assert (loaded.dtype, loaded.shape, loaded[0, 0], loaded[0, 1]) == (np.float32, (2, 3), 1.0, -2.0)
    _, _, raw = read_npy(tmp_path / "a.npy")
    narrow = as_bfloat16(raw)
    assert narrow is not None and narrow.tobytes() == bits.tobytes()
    assert as_bfloat16(np.array([1.0, 0.1], dtype="<f4").tobytes()) is None


def test_types_that_numpy_lacks_are_written_in_the_next_wider_one(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", DTYPES["float8_e5m2"], (2,), bytes([0x3C, 0xC0]))
    assert np.load(tmp_path / "a.npy").tolist() == [1.0, -2.0]


def test_big_endian_and_column_major_arrays_come_in_the_usual_order(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for stored in (array.astype(">f4"), np.asfortranarray(array), np.asfortranarray(array.astype(">f4"))):
        np.save(tmp_path / "a.npy", stored)
        dtype, shape, raw = read_npy(tmp_path / "a.npy")
        assert np.array_equal(bits_from(raw, dtype, shape), array)


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_text("mine")
    with pytest.raises(FileExistsError):
        write_npy(tmp_path / "a.npy", DTYPES["float32"], (1,), b"\0\0\0\0")
    with pytest.raises(ValueError, match="4 bytes do not hold"):
        write_npy(tmp_path / "b.npy", DTYPES["float32"], (2,), b"\0\0\0\0")


def test_the_later_versions_of_the_header_are_read(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        (tmp_path / "a.npy").write_bytes(header(described(), version) + b"\0" * 8)
        assert read_npy(tmp_path / "a.npy")[1] == (2,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"\x80\x04K\x01.",
        header(described(), 9) + b"\0" * 8,
        header(described()) + b"\0" * 7,
        header(described()) + b"\0" * 9,
        header(described())[:40],
        header(described(descr="'|O'")) + b"\x80\x04K\x01.",
        header(described(descr="[('a', '<f4')]")) + b"\0" * 8,
        header(described(descr="'<U2'")) + b"\0" * 16,
        header(described(descr="'<M8[ns]'")) + b"\0" * 16,
        header(described(descr="'<f3'")) + b"\0" * 6,
        header(described(shape="(-2,)")) + b"\0" * 8,
        header(described(shape="(1.5,)")) + b"\0" * 8,
        header(described(shape="(2, , 1)")) + b"\0" * 8,
        header(described(shape="((2,),)")) + b"\0" * 8,
        header(described(shape=f"({2**62}, {2**62})")) + b"\0" * 8,
        header(described(shape=f"({10**18}, 0)")) + b"\0" * 8,
        header(described(shape="(" + "1, " * 100 + ")")) + b"\0" * 4,
        header(described(shape="(" + "9" * 4000 + ",)")) + b"\0" * 8,
        header("{'descr': __import__('os').system('true'), 'fortran_order': False, 'shape': (2,), }\n") + b"\0" * 8,
        header("{" * 5000) + b"\0" * 8,
        b"\x93NUMPY\x02\x00" + b"\xff" * 4,
    ],
)
def test_what_is_no_array_of_numbers_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DumpError, match=r"a\.npy") as caught:
        read_npy(tmp_path / "a.npy")
    assert len(str(caught.value)) < 1000


def test_links_pipes_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "real.npy", np.zeros(2, dtype=np.float32))
    (tmp_path / "link.npy").symlink_to(tmp_path / "real.npy")
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "folder.npy").mkdir()
    for name, why in (("link", "symbolic link"), ("pipe", "plain file"), ("folder", "plain file"), ("no", "No such")):
        with pytest.raises(DumpError, match=why):
            read_npy(tmp_path / f"{name}.npy")


@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_as_what_it_then_says(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = header(described(shape="(2, 3)")) + bytes(24)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + data.draw(st.binary(max_size=4)) + whole[data.draw(st.integers(at, len(whole))) :]
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    path.write_bytes(damaged)
    try:
        dtype, shape, raw = read_npy(path)
    except DumpError:
        return
    assert raw.nbytes == dtype.itemsize * int(np.prod(shape))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"])
def test_what_was_widened_is_narrowed_again(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    codes = np.arange(256, dtype=dtype.bits)
    if name == "bfloat16":
        codes = codes << 8
    write_npy(tmp_path / "a.npy", dtype, codes.shape, codes.tobytes())
    found, shape, raw = read_npy(tmp_path / "a.npy")
    assert (found.name, shape) == ("float32", (256,))
    narrow = narrowed(raw, dtype)
    assert narrow is not None
    again = values_from(narrow, dtype, shape)
    assert np.array_equal(again, values_from(codes.data, dtype, shape), equal_nan=True)
    assert np.array_equal(np.signbit(again)[again == 0], np.signbit(values_from(codes.data, dtype, shape))[again == 0])


def test_a_number_that_is_none_of_the_narrow_type_is_not_narrowed() -> None:
    assert narrowed(np.array([1.0, 1e-9], dtype="<f4").tobytes(), DTYPES["float8_e5m2"]) is None
