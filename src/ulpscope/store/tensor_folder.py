"""A folder of tensors: kernel dumps of CANN, the .npy files made of them, or any .npy and .pt files.

Tensors of kernels are known by the kernel's name and the slot, so that two runs can be paired though the task numbers and
times in their file names differ; of several files of one kernel the latest counts. Other files are known by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ulpscope.model.errors import DumpError
from ulpscope.store.formats.cann import KernelDump, KernelName, kernel_files, kernel_name, nearest_kernels, read_kernel
from ulpscope.store.tensor_file import StoredTensor, kernel_tensor, read_tensor

_MADE_OF_KERNEL = re.compile(r"(?P<kernel>.+)\.(?P<slot>(?:input|output)\.\d{1,9})(?:\.\d+(?:x\d+)*)?\.npy")
_PLAIN = (".npy", ".pt")

Key = tuple[str, str]
"""The name of a kernel or file, and the slot, empty for a file that is one tensor."""


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """One tensor of the folder, still to be read."""

    op_type: str
    path: Path
    slot: str
    kernel: KernelDump | None = None

    @property
    def address(self) -> int | None:
        return None if self.kernel is None else self.kernel.tensor(self.slot).address

    def read(self) -> StoredTensor:
        """Raises DumpError naming the file."""
        if self.kernel is None:
            return read_tensor(str(self.path))
        return kernel_tensor(self.kernel, self.slot, f"{self.path}")


@dataclass(frozen=True, slots=True)
class TensorFolder:
    """What a folder holds, in the order of execution as far as the names tell it."""

    path: Path
    tensors: dict[Key, FoundTensor] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """For each kernel whose file could not be read, why."""


def holds_tensors(path: Path) -> bool:
    """Whether a path is a folder with tensors in it, and not the run of a capture."""
    if not path.is_dir():
        return False
    return bool(kernel_files(path)) or any(each.suffix in _PLAIN and each.is_file() for each in path.iterdir())


def read_folder(path: Path) -> TensorFolder:
    """The tensors of a folder. Raises DumpError when it is none or holds none."""
    if not path.is_dir():
        raise DumpError(f"{path} is no folder; give a folder of kernel dumps, .npy or .pt files")
    found = TensorFolder(path)
    for name, file in _latest(kernel_files(path)):
        try:
            kernel = read_kernel(file)
        except DumpError as error:
            found.problems[name.op_name] = str(error)
            continue
        for tensor in kernel.tensors:
            found.tensors[name.op_name, tensor.slot] = FoundTensor(name.op_type, file, tensor.slot, kernel)
    _add_plain(path, found)
    if not found.tensors and not found.problems:
        what = "a tensor is a kernel dump, a .npy or a .pt file."
        raise DumpError(f"{path} holds no tensor; {what}{nearest_kernels(path)}")
    return found


def _latest(files: dict[Path, KernelName]) -> Iterator[tuple[KernelName, Path]]:
    newest: dict[str, tuple[KernelName, Path]] = {}
    for path, name in files.items():
        if name.op_name not in newest or newest[name.op_name][0].moment < name.moment:
            newest[name.op_name] = (name, path)
    return iter(sorted(newest.values(), key=lambda each: (each[0].moment, each[0].op_name)))


def _add_plain(path: Path, found: TensorFolder) -> None:
    made: list[tuple[int, Key, FoundTensor]] = []
    for file in sorted(each for each in path.iterdir() if each.suffix in _PLAIN and each.is_file()):
        parts = _MADE_OF_KERNEL.fullmatch(file.name)
        name = None if parts is None else kernel_name(path / parts["kernel"])
        if parts is None or name is None:
            found.tensors[file.stem, ""] = FoundTensor("", file, "")
        elif (name.op_name, parts["slot"]) not in found.tensors:
            tensor = FoundTensor(name.op_type, file, parts["slot"])
            made.append((name.moment, (name.op_name, parts["slot"]), tensor))
    for _, key, tensor in sorted(made, key=lambda each: each[0]):
        found.tensors[key] = tensor
