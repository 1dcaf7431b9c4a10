"""Kernel dumps of CANN: every type and layout comes back element by element, and no file is trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cann_files import (
    MOMENT,
    TYPES,
    Stored,
    field,
    file_name,
    kernel_bytes,
    nano_bytes,
    shape_field,
    to_fractal_nz,
    to_fractal_z,
    to_grouped_fractal_z,
    to_nc1hwc0,
    to_ndc1hwc0,
    varint,
    write_kernel,
)
from ulpscope.model.dtypes import bits_from, values_from
from ulpscope.model.errors import DumpError
from ulpscope.store.formats.cann import KernelName, kernel_files, kernel_name, read_kernel
from ulpscope.store.formats.cann_layouts import logical


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    """1, 2, 3 ... so that every element is known by its value, and none is the zero of the padding."""
    return (np.arange(math.prod(shape)) + 1).astype(dtype).reshape(shape)


def one(tmp_path: Path, stored: Stored) -> Any:
    return read_kernel(write_kernel(tmp_path, [], [stored])).outputs[0]


def test_inputs_outputs_and_what_the_header_says_are_read(tmp_path: Path) -> None:
    path = tmp_path / file_name()
    a, b, c = numbers(2, 3), numbers(4, dtype=np.int64), numbers(2, 2, dtype=np.float16)
    path.write_bytes(kernel_bytes([Stored(a), Stored(b)], [Stored(c, address=77)], buffers=(b"12345",)))
    found = read_kernel(path)
    assert (found.version, found.op_name, found.time) == ("2.0", "add_1", MOMENT)
    assert [each.slot for each in found.tensors] == ["input.0", "input.1", "output.0"]
    for tensor, array in zip(found.tensors, (a, b, c), strict=True):
        dtype, shape, raw = tensor.raw()
        assert (dtype.name, shape, raw.tobytes()) == (array.dtype.name, array.shape, array.tobytes())
    assert found.tensor("output.0").address == 77
    with pytest.raises(DumpError, match=r"has no 'output.1'; it has input.0, input.1, output.0"):
        found.tensor("output.1")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_every_type_that_numpy_has_is_read_bit_by_bit(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)) % 2).astype(name).reshape(shape)
    dtype, found, raw = one(tmp_path, Stored(array)).raw()
    assert (dtype.name, found, raw.tobytes()) == (name, shape, array.tobytes())


def test_types_that_numpy_lacks_come_exactly(tmp_path: Path) -> None:
    bf16 = Stored(np.array([0x3F80, 0xC000], dtype="<u2"), type_code=27)
    dtype, shape, raw = one(tmp_path, bf16).raw()
    assert (dtype.name, values_from(raw, dtype, shape).tolist()) == ("bfloat16", [1.0, -2.0])
    bits = Stored(np.array([0b10110000], dtype=np.uint8), type_code=29, shape=(4,))
    dtype, shape, raw = one(tmp_path, bits).raw()
    assert bits_from(raw, dtype, shape).tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(("code", "raw", "values"), [
    (28, 0b1000_0111, [7, -8]),                      # INT4
    (30, 0b10_01_11_00, [0, -1, 1, -2]),             # INT2
    (31, 0b10_01_11_00, [0, 3, 1, 2]),               # UINT2
    (39, 0b1111_0010, [1.0, -6.0]),                  # FLOAT4_E2M1
    (40, 0b1111_0010, [0.5, -1.75]),                 # FLOAT4_E1M2
])  # fmt: skip
def test_elements_smaller_than_a_byte_are_told_apart(tmp_path: Path, code: int, raw: int, values: list[float]) -> None:
    stored = Stored(np.array([raw], dtype=np.uint8), type_code=code, shape=(len(values),))
    dtype, shape, data = one(tmp_path, stored).raw()
    assert values_from(data, dtype, shape).tolist() == values


def test_hifloat8_has_the_values_of_its_format(tmp_path: Path) -> None:
    codes = [0x00, 0x80, 0x01, 0x07, 0x08, 0x88, 0x10, 0x18, 0x20, 0x30, 0x6E, 0x6F, 0xEF, 0x7E]
    stored = Stored(np.array(codes, dtype=np.uint8), type_code=33)
    dtype, shape, raw = one(tmp_path, stored).raw()
    found = values_from(raw, dtype, shape)
    expected = [0.0, np.nan, 2**-22, 2**-16, 1.0, -1.0, 2.0, 0.5, 4.0, 0.25, 2.0**15, np.inf, -np.inf, 2.0**-15]
    assert np.array_equal(found, np.array(expected, np.float32), equal_nan=True)


def test_a_type_whose_packing_nobody_has_told_is_refused_alone(tmp_path: Path) -> None:
    path = write_kernel(tmp_path, [Stored(numbers(3, dtype=np.uint8), type_code=37)], [Stored(numbers(2))])
    packed, plain = read_kernel(path).tensors
    with pytest.raises(DumpError, match=r"Add.*input.0 is of type FLOAT6_E3M2"):
        packed.raw()
    assert plain.raw()[1] == (2,)


def test_a_file_of_a_nano_device_is_read_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / file_name()
    x = numbers(2, 20, 5, 7)
    stored = [Stored(numbers(3, dtype=np.int32), address=77)], [Stored(to_nc1hwc0(x), "NC1HWC0", origin=x.shape)]
    path.write_bytes(nano_bytes(*stored))
    found = read_kernel(path)
    assert (found.version, found.op_name, found.time) == ("1", "add_1", MOMENT)
    assert [(each.slot, each.type_name, each.address) for each in found.tensors] == [
        ("input.0", "INT32", 77),
        ("output.0", "FLOAT", 4096),
    ]
    assert found.inputs[0].raw()[2].tobytes() == numbers(3, dtype=np.int32).tobytes()
    assert np.array_equal(logical(found.outputs[0])[1], x)


def test_a_tensor_without_a_shape_is_a_number_or_flat(tmp_path: Path) -> None:
    assert one(tmp_path, Stored(numbers(1), shape=())).raw()[1] == ()
    assert one(tmp_path, Stored(numbers(5), shape=())).raw()[1] == (5,)


def test_elements_behind_the_last_one_are_padding_and_missing_ones_are_told(tmp_path: Path) -> None:
    assert one(tmp_path, Stored(numbers(8), shape=(5,))).raw()[2].tobytes() == numbers(5).tobytes()
    with pytest.raises(DumpError, match=r"output.0 has 32 bytes; a float32 of shape \(9,\) has 36"):
        one(tmp_path, Stored(numbers(8), shape=(9,))).raw()


Fold = Callable[..., Any]


@pytest.mark.parametrize(
    ("layout", "fold", "shape", "axes"),
    [
        ("NC1HWC0", to_nc1hwc0, (2, 20, 5, 7), "NCHW"),
        ("NC1HWC0", to_nc1hwc0, (1, 16, 3, 2), "NCHW"),
        ("NC1HWC0", to_nc1hwc0, (3, 1, 1, 1), "NCHW"),
        ("FRACTAL_Z", to_fractal_z, (33, 20, 3, 2), "NCHW"),
        ("FRACTAL_Z", to_fractal_z, (16, 16, 1, 1), "NCHW"),
        ("NDC1HWC0", to_ndc1hwc0, (2, 17, 3, 4, 5), "NCDHW"),
    ],
)
def test_blocks_of_channels_go_back_to_the_original_shape_and_to_any_order(
    tmp_path: Path, layout: str, fold: Fold, shape: tuple[int, ...], axes: str
) -> None:
    x = numbers(*shape)
    tensor = one(tmp_path, Stored(fold(x), layout, origin=shape))
    assert np.array_equal(logical(tensor)[1], x)
    order = axes[0] + axes[2:] + axes[1]
    turned = x.transpose([axes.index(axis) for axis in order])
    assert np.array_equal(logical(tensor, order)[1], turned)
    assert np.array_equal(logical(tensor, axes)[1], x)
    # The original shape may itself have the channels last.
    last = one(tmp_path, Stored(fold(x), layout, origin=turned.shape))
    if turned.shape != shape:
        assert np.array_equal(logical(last)[1], turned)
        assert np.array_equal(logical(last, axes)[1], x)


@pytest.mark.parametrize("shape", [(37, 50), (3, 37, 50), (2, 3, 16, 1), (5,), (1, 1), (16, 32)])
@pytest.mark.parametrize(("c0", "dtype"), [(16, np.float16), (32, np.int8)])
def test_fractal_nz_goes_back_to_its_rows_and_columns(
    tmp_path: Path, shape: tuple[int, ...], c0: int, dtype: Any
) -> None:
    x = numbers(*shape, dtype=dtype)
    tensor = one(tmp_path, Stored(to_fractal_nz(x if x.ndim > 1 else x[None], c0), "FRACTAL_NZ", origin=shape))
    for layout in (None, "ND", "NCHW"):
        dtype_found, bits = logical(tensor, layout)
        assert dtype_found.name == x.dtype.name
        assert np.array_equal(bits, x)


def test_plain_layouts_are_put_in_another_order_and_nd_is_left_alone(tmp_path: Path) -> None:
    x = numbers(2, 3, 4, 5)
    assert np.array_equal(logical(one(tmp_path, Stored(x, "NCHW")), "NHWC")[1], x.transpose(0, 2, 3, 1))
    assert np.array_equal(logical(one(tmp_path, Stored(x, "HWCN")), "NCHW")[1], x.transpose(3, 2, 0, 1))
    assert np.array_equal(logical(one(tmp_path, Stored(x)))[1], x)
    with pytest.raises(DumpError, match=r"output.0 of layout ND.*to NCHW: it has no axes"):
        logical(one(tmp_path, Stored(x)), "NCHW")


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (Stored(to_nc1hwc0(numbers(2, 20, 5, 7)), "NC1HWC0", origin=(2, 20, 5, 8)), "do not fit"),
        (Stored(to_nc1hwc0(numbers(2, 20, 5, 7)), "NC1HWC0", origin=(2, 33, 5, 7)), "do not fit"),
        (Stored(to_nc1hwc0(numbers(2, 20, 5, 7)), "NC1HWC0", origin=(1400,)), "needs 4 dimensions"),
        (Stored(numbers(4, 4), "NC1HWC0", origin=(2, 20, 5, 7)), "do not fit"),
        (Stored(to_fractal_nz(numbers(37, 50)), "FRACTAL_NZ", origin=(2, 37, 50)), "do not fit"),
        (Stored(numbers(4, 4), "FRACTAL_NZ"), "four dimensions"),
        (Stored(to_fractal_z(numbers(8, 4, 3, 3)), "FRACTAL_Z", origin=(8, 4, 3, 3), groups=3), "do not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_both(tmp_path: Path, stored: Stored, why: str) -> None:
    with pytest.raises(DumpError, match=why) as caught:
        logical(one(tmp_path, stored))
    assert "original shape" in str(caught.value)


def test_the_kernel_of_a_file_is_in_its_name(tmp_path: Path) -> None:
    assert kernel_name(Path("Add.fp32_vars_add_1.24.5.1636595794631347")) == KernelName(
        "Add", "fp32_vars_add_1", 24, 1636595794631347
    )
    assert kernel_name(Path("Conv2D.a-b.7.1636595794631347")) == KernelName("Conv2D", "a-b", 7, 1636595794631347)
    fused = kernel_name(Path("Add.a_lxslice0.24.5.1636595794631347.4.1.0.0"))
    assert fused is not None and fused.op_name == "a_lxslice0"
    for name in ("Add.a.24.5.1636595794631347.output.0.npy", "dump.json", "Add", "12345678901234567890"):
        assert kernel_name(tmp_path / name) is None


def test_a_name_too_long_for_a_file_is_in_the_table_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mapping.csv").write_text(f"12345678901234567890,Add.{'x' * 300}.24.5.1636595794631347\n")
    (tmp_path / "12345678901234567890").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    (tmp_path / file_name()).write_bytes(b"")
    assert [name.op_name for name in kernel_files(tmp_path).values()] == ["x" * 300, "add_1"]
    found = kernel_name(tmp_path / "12345678901234567890")
    assert found is not None and found.op_name == "x" * 300


@pytest.mark.parametrize("groups", [2, 3, 4, 8, 32])
@pytest.mark.parametrize(("n", "c"), [(1, 1), (2, 4), (16, 16), (5, 3), (20, 18)])
def test_weights_in_groups_go_back_to_the_original_shape(tmp_path: Path, groups: int, n: int, c: int) -> None:
    x = numbers(groups * n, c, 3, 2)
    tensor = one(tmp_path, Stored(to_grouped_fractal_z(x, groups), "FRACTAL_Z", origin=x.shape, groups=groups))
    assert np.array_equal(logical(tensor)[1], x)
    assert np.array_equal(logical(tensor, "HWCN")[1], x.transpose(2, 3, 1, 0))


NANO = nano_bytes([Stored(numbers(2, 3))], [Stored(to_nc1hwc0(numbers(1, 3, 2, 2)), "NC1HWC0", origin=(1, 3, 2, 2))])
WHOLE = kernel_bytes([Stored(numbers(2, 3))], [Stored(to_nc1hwc0(numbers(1, 3, 2, 2)), "NC1HWC0", origin=(1, 3, 2, 2))])


def framed(header: bytes, elements: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + elements


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01" * 8,
        b"\x93NUMPY" + b"\0" * 60,
        (1 << 63).to_bytes(8, "little") + b"x" * 50,
        framed(b"\x5a" * 12),
        framed(b"\xff" * 20),
        framed(NANO[8:20]),
        framed(NANO[8:16] + (9).to_bytes(4, "little") + (0).to_bytes(4, "little")),
        framed(NANO[8:16] + b"\x04\0\0\0\x04\0\0\0\xff\xff\xff\x7f"),
        NANO[:-1],
        framed(varint(3 << 3 | 2) + varint(1 << 62)),
        framed(field(3, field(6, 1 << 40))),
        framed(field(4, field(5, 1)) + field(3, field(6, (1 << 64) - 1)), b"x"),
        framed(field(5, field(3, 100)), b"x" * 99),
        framed(field(3, shape_field(3, (1 << 62, 1 << 62)))),
        framed(field(3, shape_field(3, (0, 1 << 62)))),
        framed(field(3, shape_field(3, (1,) * 65))),
        framed(field(3, field(3, 5))),
        framed(field(3, field(1, b"text"))),
        framed(field(3, 7)),
        framed(field(1, 7)),
        framed(b"\x0b"),
        framed(field(3, b"") * 5000),
        framed(field(5, b"") * 5000),
        WHOLE[:-1],
    ],
)
def test_what_is_no_kernel_dump_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / file_name()
    path.write_bytes(content)
    with pytest.raises(DumpError, match=r"Add\.add_1") as caught:
        read_kernel(path)
    assert len(str(caught.value)) < 1000


def test_links_and_folders_are_refused(tmp_path: Path) -> None:
    real = write_kernel(tmp_path, [], [Stored(numbers(2))])
    (tmp_path / "link").symlink_to(real)
    for path, why in ((tmp_path / "link", "symbolic link"), (tmp_path, "plain file"), (tmp_path / "no", "No such")):
        with pytest.raises(DumpError, match=why):
            read_kernel(path)


def look(path: Path) -> None:
    for tensor in read_kernel(path).tensors:
        dtype, shape, raw = tensor.raw()
        assert raw.nbytes == dtype.itemsize * math.prod(shape)
        logical(tensor)


@given(data=st.data(), whole=st.sampled_from([WHOLE, NANO]))
def test_a_damaged_file_is_refused_or_read_as_what_it_then_says(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + data.draw(st.binary(max_size=4)) + whole[data.draw(st.integers(at, len(whole))) :]
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(damaged)
    try:
        look(path)
    except DumpError as error:
        assert "damaged" in str(error)


@given(header=st.binary(max_size=200), elements=st.binary(max_size=50), start=st.sampled_from([b"", NANO[8:24]]))
def test_any_bytes_are_refused_or_read(
    header: bytes, elements: bytes, start: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything"
    path.write_bytes(framed(start + header, elements))
    try:
        look(path)
    except DumpError as error:
        assert "anything" in str(error)


sizes = st.integers(1, 40)


@given(n=sizes, c=sizes, h=st.integers(1, 3), w=st.integers(1, 3), c0=st.sampled_from([8, 16, 32]))
def test_any_shape_survives_the_layouts_of_the_device(
    n: int, c: int, h: int, w: int, c0: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    x = numbers(n, c, h, w)
    path = tmp_path_factory.getbasetemp() / "round"
    folded = [
        Stored(to_nc1hwc0(x, c0), "NC1HWC0", origin=x.shape),
        Stored(to_fractal_z(x, c0), "FRACTAL_Z", origin=x.shape),
        Stored(to_fractal_nz(x, c0), "FRACTAL_NZ", origin=x.shape),
    ]
    path.write_bytes(kernel_bytes([], folded))
    for tensor in read_kernel(path).outputs:
        assert np.array_equal(logical(tensor, None if tensor.layout == "FRACTAL_NZ" else "NCHW")[1], x)
