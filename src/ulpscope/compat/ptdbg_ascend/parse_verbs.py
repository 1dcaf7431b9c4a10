"""The five commands of the parse shell as functions on paths: vc, dc, pt, pk, cn.

Each says its lines to `say` and returns whether everything could be read; what could not is named, and the rest is done.
Raises UlpscopeError when nothing can be done.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ulpscope.compare.elements import Elements, elements_at, survey
from ulpscope.compare.kernels import TensorPair, compare_folders
from ulpscope.compare.metrics import contrast_bits
from ulpscope.model.errors import ConfigError, DumpError, did_you_mean
from ulpscope.report.csv import write_csv
from ulpscope.report.kernels import COLUMNS, kernel_rows
from ulpscope.report.parse_text import array_lines, converted_lines, pair_lines, text_file_of
from ulpscope.report.pkl_rows import call_lines
from ulpscope.report.table import stamped
from ulpscope.report.tensor import save_text
from ulpscope.store.formats.cann_layouts import TARGETS
from ulpscope.store.formats.cann_npy import convert_kernel, kernel_dumps_at
from ulpscope.store.registry import open_dump
from ulpscope.store.tensor_file import StoredTensor, read_tensor
from ulpscope.store.tensor_folder import read_folder

Say = Callable[[str], None]

COMPARED = "./parse_data/compare_result"
CONVERTED = "./parse_data/convert_result"


def compare_kernels(say: Say, mine: str, golden: str, out: str | None) -> bool:
    """vc: two folders of kernel dumps or arrays, into `result_{time}.csv`."""
    started = time.monotonic()
    target, reference = read_folder(Path(mine)), read_folder(Path(golden))
    folder = _out_folder(out, COMPARED)
    failed: list[TensorPair] = []

    def pairs() -> Iterator[TensorPair]:
        for pair in compare_folders(reference, target):
            if pair.measured is None:
                failed.append(pair)
            yield pair

    with stamped(Path(folder), "result_{}.csv") as stamp:
        path = os.path.join(folder, f"result_{stamp}.csv")
        write_csv(Path(path), COLUMNS, kernel_rows(pairs()))
    for pair in failed:
        name = ":".join(filter(None, pair.key))
        say(f"[WARNING] {name} was not compared: {pair.reason}")
    say(f'[INFO] The comparison result have been written to "{path}".')
    say(f"[INFO] The command was completed and took {time.monotonic() - started:.0f} seconds.")
    say("[INFO] Compare finished!!")
    return not (reference.problems or target.problems or failed)


def convert_kernels(say: Say, source: str, layout: str | None, out: str | None) -> bool:
    """dc: a kernel dump, or a folder of them, into .npy files."""
    wanted = None if layout is None else layout.upper()
    if wanted not in (None, *TARGETS):
        problem = f"-f {layout} is no format to convert to; known are {', '.join(TARGETS)}."
        raise ConfigError([problem + did_you_mean(str(wanted), TARGETS)])
    files = kernel_dumps_at(Path(source))
    folder = _out_folder(out, CONVERTED)
    converted = [convert_kernel(path, Path(folder), layout=wanted) for path in files]
    problems = [problem for each in converted for problem in each.problems]
    for problem in problems:
        say(f"[WARNING] skipped: {problem}")
    for line in converted_lines(source, converted):
        say(line)
    say(f'[INFO] The converted data have been written to "{folder}".')
    return not problems


def show_array(say: Say, name: str) -> bool:
    """pt: the statistics of an array, which is also saved as text."""
    tensor = read_tensor(_one(name))
    text_file = text_file_of(tensor.source)
    save_text(tensor, text_file)
    for line in array_lines(tensor, text_file):
        say(line)
    return True


def show_api(say: Say, pkl: str, name: str) -> bool:
    """pk: the statistics and the stack of an API."""
    path = _one(pkl)
    if not Path(path).is_file():
        raise DumpError(f"{path} is not a file; give the .pkl of a dump")
    lines = list(call_lines(open_dump(path), name))
    if not lines:
        raise DumpError(f"{path} has no API {name!r}; a name looks like Functional_conv2d_0_forward")
    say("\n".join(lines))
    return True


def compare_arrays(say: Say, mine: str, golden: str, *, count: int, atol: float, rtol: float) -> bool:
    """cn: two arrays element by element, both saved as text."""
    left, right = read_tensor(_one(mine)), read_tensor(_one(golden))
    if left.count != right.count:
        raise DumpError(
            f"{left.source} has {left.count} elements, {right.source} has {right.count} "
            f"(shapes {left.shape} and {right.shape}); give two arrays of one shape"
        )
    reference, target = _elements(right), _elements(left)
    found = survey(reference, target, atol=atol, rtol=rtol, worst=count)
    text_files = (text_file_of(left.source), text_file_of(right.source))
    for tensor, path in zip((left, right), text_files, strict=True):
        save_text(tensor, path)
    if left.shape != right.shape:
        say(f"[WARNING] the shapes are {left.shape} and {right.shape}; elements are paired in row-major order")
    for line in pair_lines(
        left,
        right,
        text_files=text_files,
        contrast=contrast_bits(right.raw, right.dtype, left.raw, left.dtype),
        found=found,
        top=elements_at(reference, target, range(min(count, right.count))),
        limits=(atol, rtol),
    ):
        say(line)
    return True


def _elements(tensor: StoredTensor) -> Elements:
    return Elements(tensor.raw, tensor.dtype, tensor.shape)


def _out_folder(out: str | None, default: str) -> str:
    if out is None:
        os.makedirs(default, exist_ok=True)
    elif not os.path.isdir(out):
        raise ConfigError([f"-out {out} is no folder; it must be there already"])
    return default if out is None else out


def _one(name: str) -> str:
    """The path, or the one file that a pattern such as `my_data*.npy` stands for."""
    if not glob.has_magic(name) or Path(name).exists():
        return name
    found = sorted(glob.glob(name))
    if len(found) != 1:
        raise DumpError(f"{name} stands for {len(found)} files; one is needed")
    return found[0]
