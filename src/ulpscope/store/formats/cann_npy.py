"""Kernel dumps of CANN into .npy files, one for every input and output: `FILE.output.0.npy`.

Without a layout, elements stay as they lay on the device; with one they are put in it, padding is cut, and the name tells
the shape: `FILE.output.0.2x20x5x7.npy`. A file of that name is replaced: it was made from the same source.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ulpscope.model.dtypes import DType
from ulpscope.model.errors import DumpError
from ulpscope.store.files.npy import write_npy
from ulpscope.store.formats.cann import KernelTensor, kernel_files, nearest_kernels, read_kernel
from ulpscope.store.formats.cann_layouts import logical


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of one file: the arrays written, and a sentence for each tensor that could not be."""

    source: Path
    written: tuple[Path, ...]
    problems: tuple[str, ...]


def kernel_dumps_at(path: Path) -> list[Path]:
    """The file itself, or every kernel dump in a folder. Raises DumpError when there is none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DumpError(f"{path} does not exist; give a kernel dump or a folder of them")
    found = list(kernel_files(path))
    if not found:
        example = "their names look like Add.add_1.24.5.1636595794631347."
        raise DumpError(f"{path} holds no kernel dump; {example}{nearest_kernels(path)}")
    return found


def convert_kernel(path: Path, folder: Path, *, layout: str | None = None) -> Converted:
    """Writes the tensors of one file below `folder`. What cannot be read is told in `problems`, and the rest is written."""
    written, problems = [], []
    try:
        tensors = read_kernel(path).tensors
    except DumpError as error:
        return Converted(path, (), (str(error),))
    for tensor in tensors:
        try:
            written.append(_convert(tensor, folder, layout))
        except DumpError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path}: {tensor.slot} could not be written: {error.strerror}")
    return Converted(path, tuple(written), tuple(problems))


def _convert(tensor: KernelTensor, folder: Path, layout: str | None) -> Path:
    name = f"{tensor.path.name}.{tensor.slot}"
    if layout is None:
        dtype, shape, raw = tensor.raw()
    else:
        dtype, bits = logical(tensor, layout)
        shape, raw = bits.shape, bits.reshape(-1).view(np.uint8).data
        name += "." + "x".join(map(str, shape)) if shape else ""
    return _replace(folder / f"{name}.npy", dtype, shape, raw)


def _replace(path: Path, dtype: DType, shape: tuple[int, ...], raw: memoryview) -> Path:
    draft = path.with_name(f".{os.getpid()}.draft")
    draft.unlink(missing_ok=True)
    try:
        write_npy(draft, dtype, shape, raw)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path
