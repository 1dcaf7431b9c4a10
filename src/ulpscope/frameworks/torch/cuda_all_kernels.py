"""All kernels, and what a launch needs to know of Triton. Importing it fails where there is no Triton."""

import triton
import triton.language as tl

from ulpscope.frameworks.torch.cuda_crc_kernels import LANES, combine_residues, residue
from ulpscope.frameworks.torch.cuda_kernels import PIECES, ROWS, combine
from ulpscope.frameworks.torch.cuda_launched_kernels import measure, measure_wide

__all__ = [
    "LANES",
    "LAUNCHES_DIRECTLY",
    "PIECES",
    "ROWS",
    "combine",
    "combine_residues",
    "dtype",
    "measure",
    "measure_wide",
    "residue",
]

# From this version on a compiled kernel is called with all arguments, constants included; that takes a few microseconds
# less than looking the kernel up each time.
LAUNCHES_DIRECTLY = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)
_DTYPES = {
    "float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16, "float64": tl.float64,
    "int8": tl.int8, "int16": tl.int16, "int32": tl.int32, "int64": tl.int64,
    "uint8": tl.uint8, "uint16": tl.uint16, "uint32": tl.uint32, "uint64": tl.uint64, "bool": tl.uint8,
}  # fmt: skip


def dtype(name: str) -> tl.dtype:
    """What Triton calls an element type."""
    return _DTYPES[name]
