"""What the parse shell of ptdbg_ascend prints: a line about an array, tables of elements, and panels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.compare.elements import Element, Survey
from ulpscope.compare.metrics import Contrast, cosine
from ulpscope.report.boxes import beside, boxed_table, panel
from ulpscope.store.formats.cann_npy import Converted
from ulpscope.store.tensor_file import BETWEEN, StoredTensor

_ITEMS = ("Index", "Left", "Right", "Diff")


def spec(tensor: StoredTensor) -> str:
    """`[Shape: (2, 3)] [Dtype: float32] [Max: 1.5] [Min: 0.0] [Mean: 0.75]`; numbers with the digits of the type."""
    stats = tensor.stats()
    kind = np.dtype(tensor.dtype.exact or "<f4")
    # The digits of the type; only floats have a type for their mean.
    own = kind.type if kind.kind == "f" else None
    numbers = {"Max": stats.max, "Min": stats.min, "Mean": stats.mean}
    texts = [f"[{name}: {_number(value, own)}]" for name, value in numbers.items()]
    return f"[Shape: {tensor.shape}] [Dtype: {tensor.dtype.name}] " + " ".join(texts)


def _number(value: float | int | None, own: Callable[[Any], Any] | None) -> str:
    if value is None:
        return "-"
    return str(value) if own is None else str(own(value))


def text_file_of(source: str) -> Path:
    """The text file beside a tensor's own: `a.npy.txt`."""
    return Path(f"{source.replace(BETWEEN, '.')}.txt")


# --- pt, dc -----------------------------------------------------------------------------------------------------


def array_lines(tensor: StoredTensor, text_file: Path) -> list[str]:
    return [spec(tensor), f"Path: {tensor.source}", f"TextFile:{text_file}"]


def converted_lines(source: str, converted: Sequence[Converted]) -> list[str]:
    names = [path.name for each in converted for path in each.written]
    return panel([f"SrcFile: {source}", *(f" - {name}" for name in names)])


# --- cn ---------------------------------------------------------------------------------------------------------


def pair_lines(
    left: StoredTensor,
    right: StoredTensor,
    *,
    text_files: tuple[Path, Path],
    contrast: Contrast,
    found: Survey,
    top: Sequence[Element],
    limits: tuple[float, float],
) -> Iterator[str]:
    """Two tables of elements, those that are off and those at the beginning, and a panel. `limits` are atol and rtol."""
    yield from beside(_items("Error Item Table", found.first_off), _items("Top Item Table", top))
    atol, rtol = limits
    lines = []
    for title, tensor, text in (("Left", left, text_files[0]), ("DstFile", right, text_files[1])):
        lines += [f"{title}:", f" |- NpyFile: {tensor.source}", f" |- TxtFile: {text}", f" |- NpySpec: {spec(tensor)}"]
    share = found.off / contrast.count if contrast.count else 0.0
    yield from panel(
        [
            *lines,
            f"NumCnt:   {contrast.count}",
            f"AllClose: {found.off == 0}",
            f"CosSim:   {cosine(contrast):.9g}",
            f"ErrorPer: {share}  (rl= {rtol}, al= {atol})",
        ]
    )


def _items(title: str, elements: Sequence[Element]) -> list[str]:
    rows = []
    for each in elements:
        # The difference in the type of the elements, where they have one in common.
        kind = each.target.dtype if each.target.dtype == each.reference.dtype else np.dtype(np.float64)
        diff: Any = kind.type(each.error) if kind.kind == "f" else each.error
        rows.append([str(each.place), str(each.target), str(each.reference), str(diff)])
    return boxed_table(title, _ITEMS, rows)
