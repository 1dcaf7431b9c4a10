"""Layouts of Ascend devices into the ones a program knows: axes put back in order, padding cut.

    NC1HWC0        (N, C1, H, W, C0)         channel c of NCHW lies at [c // C0] and [c % C0]
    NDC1HWC0       (N, D, C1, H, W, C0)
    FRACTAL_Z      (C1*H*W, N1, N0, C0)      of NCHW; with groups (G*C1*H*W, N1, N0, C0), E groups side by side in each of G
    FRACTAL_NZ     (..., C1, N1, N0, C0)     of (..., N, C)

C0 and N0 are read from the shape. A file does not tell the order of its original shape, so the orders are tried and the
first one that fits the shape on the device is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.model.dtypes import DType, bits_from
from ulpscope.model.errors import DumpError
from ulpscope.store.formats.cann import KernelTensor

Array = NDArray[Any]
Shape = tuple[int, ...]
Unfold = Callable[[Array, Shape], "Array | None"]

ND = "ND"
_FLAT = ("NCHW", "NHWC", "HWCN", "CHWN")
_DEEP = ("NCDHW", "NDHWC", "DHWCN", "DHWNC")
TARGETS = (ND, *_FLAT, *_DEEP)


def logical(tensor: KernelTensor, layout: str | None = None) -> tuple[DType, Array]:
    """The bits of a tensor in the shape the program knows, or in `layout`, one of TARGETS.

    Raises DumpError where the layout is not known, the shapes do not fit each other, or an axis is not to be had.
    """
    dtype, shape, raw = tensor.raw()
    try:
        straight = _logical(bits_from(raw, dtype, shape), tensor, layout)
        return dtype, np.ascontiguousarray(straight).reshape(straight.shape)
    except ValueError as error:
        raise DumpError(
            f"{tensor.path}: {tensor.slot} of layout {tensor.layout}, shape {tensor.shape} and original shape "
            f"{tensor.origin_shape} cannot be converted{f' to {layout}' if layout else ''}: {error}"
        ) from error


def _logical(bits: Array, tensor: KernelTensor, layout: str | None) -> Array:
    origin = tensor.origin_shape
    if tensor.layout == "FRACTAL_NZ":
        return _from_nz(bits, origin)
    if tensor.layout in _UNFOLD:
        unfold = _UNFOLD[tensor.layout]
        if tensor.groups > 1 and tensor.layout == "FRACTAL_Z":
            unfold = functools.partial(_from_grouped_z, groups=tensor.groups)
        return _from_blocks(bits, unfold, _DEEP if tensor.layout == "NDC1HWC0" else _FLAT, origin, layout)
    if tensor.layout in _FLAT + _DEEP:
        if layout in (None, ND, tensor.layout):
            return bits
        return _reordered(bits, tensor.layout, layout)
    if tensor.layout in ("ND", "NC", "CN", "NCL", "MD"):
        if layout in (None, ND):
            return bits
        raise ValueError("it has no axes that could be put in another order")
    raise ValueError("this layout is not supported")


def _from_nz(bits: Array, origin: Shape) -> Array:
    """As the original shape has it: the layout says nothing about axes other than the last two."""
    if bits.ndim < 4:
        raise ValueError("the shape on the device needs four dimensions or more")
    *lead, c1, n1, n0, c0 = bits.shape
    rows, columns = (1, *origin)[-2:] if origin else (1, 1)
    if not _covers(rows, n1, n0) or not _covers(columns, c1, c0) or math.prod(lead) != math.prod(origin[:-2]):
        raise ValueError("the shapes do not fit each other")
    lead_size = math.prod(lead)
    flat = bits.reshape(lead_size, c1, n1, n0, c0).transpose(0, 2, 3, 1, 4).reshape(lead_size, n1 * n0, c1 * c0)
    return flat[:, :rows, :columns].reshape(origin)


def _from_blocks(bits: Array, unfold: Unfold, orders: tuple[str, ...], origin: Shape, layout: str | None) -> Array:
    if len(origin) != len(orders[0]):
        raise ValueError(f"the original shape needs {len(orders[0])} dimensions")
    axes = orders[0]
    for order in orders:
        sizes = tuple(origin[order.index(axis)] for axis in axes)
        whole = unfold(bits, sizes)
        if whole is not None:
            cut = whole[tuple(slice(size) for size in sizes)]
            return _reordered(cut, axes, order if layout in (None, ND) else layout)
    raise ValueError("the shapes do not fit each other")


def _reordered(array: Array, axes: str, layout: str | None) -> Array:
    if layout is None or sorted(layout) != sorted(axes):
        raise ValueError(f"its axes are {axes}")
    return array.transpose([axes.index(axis) for axis in layout])


def _covers(size: int, blocks: int, width: int) -> bool:
    """Whether so many blocks hold so many elements, none of them in vain."""
    return blocks == max(-(-size // width), 0) if width else size == 0


def _from_nc1hwc0(bits: Array, sizes: Shape) -> Array | None:
    """NCHW with padded channels; None where the sizes are not of this tensor."""
    if bits.ndim != 5:
        return None
    n, c1, h, w, c0 = bits.shape
    if (n, h, w) != (sizes[0], *sizes[2:]) or not _covers(sizes[1], c1, c0):
        return None
    return bits.transpose(0, 1, 4, 2, 3).reshape(n, c1 * c0, h, w)


def _from_ndc1hwc0(bits: Array, sizes: Shape) -> Array | None:
    if bits.ndim != 6:
        return None
    n, d, c1, h, w, c0 = bits.shape
    if (n, d, h, w) != (sizes[0], *sizes[2:]) or not _covers(sizes[1], c1, c0):
        return None
    return bits.transpose(0, 2, 5, 1, 3, 4).reshape(n, c1 * c0, d, h, w)


def _from_z(bits: Array, sizes: Shape) -> Array | None:
    if bits.ndim != 4:
        return None
    blocks, n1, n0, c0 = bits.shape
    n, c, h, w = sizes
    if not c0 or not _covers(n, n1, n0) or blocks != -(-c // c0) * h * w:
        return None
    return (
        bits.reshape(-(-c // c0), h, w, n1, n0, c0).transpose(3, 4, 0, 5, 1, 2).reshape(n1 * n0, -(-c // c0) * c0, h, w)
    )


def _from_grouped_z(bits: Array, sizes: Shape, *, groups: int) -> Array | None:
    """As many groups as fill whole blocks lie side by side, each in rows and columns of its own; `sizes` are of one group's
    channels and of all groups' rows."""
    if bits.ndim != 4:
        return None
    blocks, n1, n0, c0 = bits.shape
    rows, c, h, w = sizes
    if not c0 or not n0 or not c or rows % groups or not rows:
        return None
    n = rows // groups
    side = min(math.lcm(math.lcm(c, c0) // c, math.lcm(n, n0) // n), groups)
    c1 = -(-side * c // c0)
    if not _covers(side * n, n1, n0) or blocks != -(-groups // side) * c1 * h * w:
        return None
    flat = bits.reshape(-1, c1, h, w, n1, n0, c0).transpose(0, 4, 5, 1, 6, 2, 3).reshape(-1, n1 * n0, c1 * c0, h, w)
    places = [(at // side, at % side) for at in range(groups)]
    return np.concatenate([flat[big, e * n : (e + 1) * n, e * c : (e + 1) * c] for big, e in places])


_UNFOLD: dict[str, Unfold] = {
    "NC1HWC0": _from_nc1hwc0,
    "NC1HWC0_C04": _from_nc1hwc0,
    "NDC1HWC0": _from_ndc1hwc0,
    "FRACTAL_Z": _from_z,
}
