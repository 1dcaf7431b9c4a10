"""Writing tensors in the safetensors format: eight bytes that say how long the header is, a JSON header, the raw bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ulpscope.model.errors import DumpError

# Names of ours -> names of the format.
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it goes into the file: row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Writes all tensors into one file. Raises DumpError for an element type that the format does not have."""
    header: dict[str, object] = {}
    start = 0
    for name, tensor in tensors.items():
        word = _NAMES.get(tensor.dtype)
        if word is None:
            raise DumpError(f"safetensors has no element type {tensor.dtype}; it has {', '.join(_NAMES)}")
        end = start + len(tensor.raw)
        header[name] = {"dtype": word, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.raw)
