"""One tensor in a file of `torch.save`, written and read without torch.

Such a file is a zip of stored members: `NAME/data.pkl`, a pickle that says how to build the tensor, and `NAME/data/0`, its
storage. The pickle is never executed: `_Machine` knows the two dozen opcodes a tensor needs and a few names, each as a
stand-in that does nothing, and refuses everything else.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from ulpscope.model.dtypes import DTYPES, DType
from ulpscope.model.errors import DumpError
from ulpscope.native import measuring
from ulpscope.store.files.stored_zip import Member, bytes_of, damaged, members_of
from ulpscope.store.mapped import StoredBits

_ALIGN = 64
_DATE = (1980, 1, 1, 0, 0, 0)
_DOS_DATE = 1 << 5 | 1
_SMALL = 1 << 16
_LARGE = 1 << 30
_LOCAL_HEADER = 30
_ZIP64_EXTRA = 20
_MAX_PICKLE = 1 << 16
_MAX_MEMBERS = 4096
_MAX_DIMS = 64
# Elements that share memory (expanded tensors) may take more room than their storage, up to this many bytes.
_MAX_EXPANDED = 64 << 20

_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_STORAGE_OF = {dtype: storage for storage, dtype in _STORAGES.items()}
_UNTYPED = ("torch.storage", "UntypedStorage")
_ORDERED_DICT = ("collections", "OrderedDict")
_BUILDERS = frozenset({"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"})


# --- writing ----------------------------------------------------------------------------------------------------


def write_pt(
    path: Path,
    raw: bytes | memoryview,
    dtype: DType,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> None:
    """Writes a new file that `torch.load` reads as this tensor, bit by bit. Raises FileExistsError when there is one.

    `raw` holds the elements in row-major order; with a `stride`, it is the storage that the strides walk through.
    """
    data = memoryview(raw).cast("B") if len(raw) else memoryview(b"")
    steps = _row_major(shape) if stride is None else stride
    if data.nbytes % dtype.itemsize or _extent(shape, steps) * dtype.itemsize > data.nbytes:
        raise ValueError(f"{data.nbytes} bytes do not hold a {dtype.name} of shape {shape}")
    members = {
        "archive/data.pkl": memoryview(_pickle(dtype, data.nbytes, shape, steps)),
        "archive/byteorder": memoryview(b"little"),
        "archive/data/0": data,
        "archive/version": memoryview(b"3\n"),
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o640)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o640)
        if data.nbytes < _LARGE:
            for part in _archive(members):
                file.write(part)
            return
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, content in members.items():
                _put(archive, file, name, content)


def _archive(members: dict[str, memoryview]) -> Iterator[bytes | memoryview]:
    """The bytes of a zip of stored members, in few pieces: zipfile takes ten times as long for a small tensor."""
    head, directory, size = b"", b"", 0
    for name, content in members.items():
        text, crc = name.encode(), measuring.crc32(content)
        padding = -(size + _LOCAL_HEADER + len(text) + 4) % _ALIGN
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        facts = struct.pack("<5H3I", 20, 0, 0, 0, _DOS_DATE, crc, content.nbytes, content.nbytes)
        lengths = struct.pack("<HH", len(text), len(extra))
        place = struct.pack("<HHHII", 0, 0, 0, 0o600 << 16, size)
        directory += (
            b"PK\1\2" + struct.pack("<H", 20 | 3 << 8) + facts + struct.pack("<HH", len(text), 0) + place + text
        )
        local = b"PK\3\4" + facts + lengths + text + extra
        size += len(local) + content.nbytes
        head += local
        if content.nbytes <= _SMALL:
            head += content
        else:
            yield head
            yield content
            head = b""
    count = len(members)
    yield head + directory + b"PK\5\6" + struct.pack("<4H2IH", 0, 0, count, count, len(directory), size, 0)


def _put(archive: zipfile.ZipFile, file: BinaryIO, name: str, data: memoryview) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    start = file.tell() + _LOCAL_HEADER + len(name) + 4
    if data.nbytes * 1.05 > zipfile.ZIP64_LIMIT:
        start += _ZIP64_EXTRA
    padding = -start % _ALIGN
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    info.file_size = data.nbytes
    with archive.open(info, "w") as member:
        member.write(data)


def _pickle(dtype: DType, nbytes: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    typed = _STORAGE_OF.get(dtype.name)
    storage = _global("torch", typed) if typed else _global(*_UNTYPED)
    count = nbytes // dtype.itemsize if typed else nbytes
    persistent = b"(" + _text("storage") + storage + _text("0") + _text("cpu") + _integer(count) + b"tQ"
    arguments = (
        persistent + _integer(0) + _integers(shape) + _integers(stride) + b"\x89" + _global(*_ORDERED_DICT) + b")R"
    )
    if typed:
        return b"\x80\x02" + _global("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR."
    element = _global("torch", dtype.name)
    return b"\x80\x02" + _global("torch._utils", "_rebuild_tensor_v3") + b"(" + arguments + element + b"tR."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _integers(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_integer, numbers)) + b"t" if numbers else b")"


def _integer(number: int) -> bytes:
    if 0 <= number < 256:
        return b"K" + bytes([number])
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


# --- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Name:
    """A global of the pickle. It is only ever compared."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: DType | None
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool
    extent: int
    """How many elements lie between the first and the last, both counted."""
    nbytes: int
    row_major: bool


def read_pt(path: Path | str) -> tuple[DType, tuple[int, ...], bytes | memoryview]:
    """The element type, shape and row-major bits of a tensor that `torch.save` wrote. Raises DumpError for all else."""
    found = map_pt(path)
    found.check()
    return found.dtype, found.shape, found.raw


def map_pt(path: Path | str) -> StoredBits:
    """As read_pt, but where the bits are a member of the file as a whole, they are not read: their CRC-32 is still to be found."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        try:
            mapping = _mapped(descriptor)
        finally:
            os.close(descriptor)
        view = memoryview(b"" if mapping is None else mapping)
        return _read(path, view, members_of(view))
    except zipfile.BadZipFile as error:
        _refuse(path, f"it is cut, damaged, or in torch's format from before 1.6 ({error})")
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, IndexError, struct.error, OverflowError, NotImplementedError, UnicodeDecodeError) as error:
        _refuse(path, str(error) or type(error).__name__, error)


def _mapped(descriptor: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except ValueError:
        return None  # an empty file


def _refuse(path: Path | str, why: str, cause: BaseException | None = None) -> NoReturn:
    raise DumpError(_unreadable(path, why)) from cause


def _unreadable(path: Path | str, why: str) -> str:
    return f"{path} is not a tensor that can be read: {why}"


def _read(path: Path | str, view: memoryview, members: dict[str, Member]) -> StoredBits:
    if len(members) > _MAX_MEMBERS:
        _refuse(path, f"it has {len(members)} members")
    roots = [name.removesuffix("/data.pkl") for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(roots) != 1:
        _refuse(path, "it is a zip, but not one of torch.save")
    (root,) = roots
    order = members.get(f"{root}/byteorder")
    if order is not None and bytes(bytes_of(view, order)) != b"little":
        _refuse(path, "it was written on a big-endian machine")
    info = members[f"{root}/data.pkl"]
    if info.size > _MAX_PICKLE:
        _refuse(path, f"its pickle has {info.size} bytes; a tensor needs a few hundred")
    tensor = _built_by(bytes(bytes_of(view, info)))
    if not isinstance(tensor, _Tensor):
        _refuse(path, "it holds something else than one tensor")
    stored = members.get(f"{root}/data/{tensor.storage.key}")
    if stored is None:
        _refuse(path, f"storage {tensor.storage.key!r} is missing")
    raw = bytes_of(view, stored, check=False)
    bits = memoryview(_elements(tensor, raw))
    if bits.nbytes == stored.size and bits.obj is raw.obj:
        return StoredBits(tensor.dtype, bits, tensor.shape, stored.crc, _unreadable(path, damaged(stored)))
    if measuring.crc32(raw) != stored.crc:
        raise ValueError(damaged(stored))
    return StoredBits(tensor.dtype, bits, tensor.shape)


@functools.lru_cache(256)
def _built_by(pickle: bytes) -> Any:
    """What a pickle builds. Tensors of one shape have the same one."""
    return _Machine(pickle).run()


def _elements(tensor: _Tensor, stored: memoryview) -> bytes | memoryview:
    dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride
    told = tensor.storage.count * (dtype.itemsize if tensor.storage.dtype is not None else 1)
    if told != len(stored):
        raise ValueError(f"the storage has {len(stored)} bytes, the pickle says {told}")
    first, last = tensor.offset * dtype.itemsize, (tensor.offset + tensor.extent) * dtype.itemsize
    if last > len(stored) or tensor.nbytes > max(len(stored), _MAX_EXPANDED):
        raise ValueError(f"a {dtype.name} of shape {shape} and stride {stride} does not fit its {len(stored)} bytes")
    if not tensor.nbytes:
        return b""
    plain = stored[first:last]
    if not tensor.row_major:
        flat = np.frombuffer(plain, dtype=f"V{dtype.itemsize}")
        steps = tuple(step * dtype.itemsize for step in stride)
        strided = np.lib.stride_tricks.as_strided(flat, shape=shape, strides=steps, writeable=False)
        plain = memoryview(strided.tobytes())
    if not tensor.conjugate and not tensor.negative:
        return plain
    if dtype.name not in ("float32", "float64", "complex64", "complex128"):
        raise ValueError(f"a conjugated or negated view of {dtype.name} is not supported")
    values = np.frombuffer(plain, dtype=dtype.bits)
    values = np.conj(values) if tensor.conjugate else values
    return (np.negative(values) if tensor.negative else values).tobytes()


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for length in reversed(shape):
        steps.append(step)
        step *= max(length, 1)
    return tuple(reversed(steps))


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements lie between the first and the last, both counted."""
    if len(shape) != len(stride) or len(shape) > _MAX_DIMS or any(number < 0 for number in (*shape, *stride)):
        raise ValueError(f"shape {shape} and stride {stride} make no tensor")
    return 0 if 0 in shape else 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


class _Machine:
    """Runs the pickle of one tensor. Nothing it builds does anything, and nothing it builds is larger than the pickle."""

    def __init__(self, code: bytes) -> None:
        self._code = code
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            opcode = self._take(1)
            if opcode == b".":
                return self._pop()
            self._step(opcode)

    def _step(self, opcode: bytes) -> None:
        push = self._stack.append
        match opcode:
            case b"\x80":
                if self._number("<B") > 5:
                    raise ValueError("the pickle has an unknown protocol")
            case b"\x95":
                self._number("<Q")
            case b"c":
                push(_known(self._line(), self._line()))
            case b"\x93":
                name, module = self._pop(), self._pop()
                push(_known(module, name))
            case b"q":
                self._memo[self._number("<B")] = self._top()
            case b"r":
                self._memo[self._number("<I")] = self._top()
            case b"\x94":
                self._memo[len(self._memo)] = self._top()
            case b"h":
                push(self._remembered(self._number("<B")))
            case b"j":
                push(self._remembered(self._number("<I")))
            case b"X":
                push(self._take(self._number("<I")).decode())
            case b"\x8c":
                push(self._take(self._number("<B")).decode())
            case b"K":
                push(self._number("<B"))
            case b"M":
                push(self._number("<H"))
            case b"J":
                push(self._number("<i"))
            case b"\x8a":
                push(int.from_bytes(self._take(self._number("<B")), "little", signed=True))
            case b"N" | b"\x88" | b"\x89":
                push({b"N": None, b"\x88": True, b"\x89": False}[opcode])
            case b"(":
                self._marks.append(len(self._stack))
            case b")" | b"}":
                push(() if opcode == b")" else {})
            case b"t":
                push(self._since_mark())
            case b"\x85" | b"\x86" | b"\x87":
                items = [self._pop() for _ in range(opcode[0] - 0x84)]
                push(tuple(reversed(items)))
            case b"s":
                value, key = self._pop(), self._pop()
                self._set((key, value))
            case b"u":
                self._set(self._since_mark())
            case b"Q":
                push(_storage(self._pop()))
            case b"R":
                arguments, builder = self._pop(), self._pop()
                push(_built(builder, arguments))
            case _:
                raise ValueError(f"its pickle has opcode {opcode!r}, which no tensor needs")

    def _take(self, size: int) -> bytes:
        data = self._code[self._at : self._at + size]
        if len(data) != size:
            raise ValueError("its pickle is cut")
        self._at += size
        return data

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _line(self) -> str:
        end = self._code.index(b"\n", self._at)
        line = self._take(end - self._at).decode()
        self._at += 1
        return line

    def _top(self) -> Any:
        return self._stack[-1]

    def _pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise ValueError("its pickle takes what is not there")
        return self._stack.pop()

    def _remembered(self, number: int) -> Any:
        if number not in self._memo:
            raise ValueError("its pickle recalls what it never kept")
        return self._memo[number]

    def _since_mark(self) -> tuple[Any, ...]:
        if not self._marks:
            raise ValueError("its pickle has no mark")
        start = self._marks.pop()
        items = tuple(self._stack[start:])
        del self._stack[start:]
        return items

    def _set(self, pairs: tuple[Any, ...]) -> None:
        target = self._top()
        if type(target) is not dict or len(pairs) % 2:
            raise ValueError("its pickle sets items of something that is no dictionary")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is not str:
                raise ValueError("its pickle has a key that is no text")
            target[key] = value


def _known(module: Any, name: Any) -> _Name:
    # Texts alone are looked at and shown: a tuple that holds itself many times over takes for ever to print.
    if type(module) is not str or type(name) is not str:
        raise ValueError("its pickle asks for a name that is no text")
    if (
        (module, name) in (_UNTYPED, _ORDERED_DICT)
        or (module == "torch._utils" and name in _BUILDERS)
        or (module == "torch" and (name in _STORAGES or name in DTYPES))
    ):
        return _Name(module, name)
    raise ValueError(f"its pickle asks for {module[:80]}.{name[:80]}, which no tensor needs; it was not called")


def _storage(identity: Any) -> _Storage:
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("its pickle refers to something that is no storage")
    _, kind, key, _, count = identity
    if type(kind) is not _Name or type(key) is not str or type(count) is not int or count < 0:
        raise ValueError("its pickle describes no storage")
    if (kind.module, kind.name) == _UNTYPED:
        return _Storage(None, key, count)
    if kind.name not in _STORAGES:
        raise ValueError(f"{kind.name} is no storage")
    return _Storage(DTYPES[_STORAGES[kind.name]], key, count)


def _built(builder: Any, arguments: Any) -> Any:
    if type(builder) is not _Name or type(arguments) is not tuple:
        raise ValueError("its pickle calls something that cannot be called")
    if (builder.module, builder.name) == _ORDERED_DICT and not arguments:
        return {}
    if builder.name == "_rebuild_parameter" and len(arguments) == 3 and type(arguments[0]) is _Tensor:
        return arguments[0]
    if builder.name == "_rebuild_tensor_v2" and 6 <= len(arguments) <= 7:
        return _tensor(arguments[:4], None, arguments[6:])
    if builder.name == "_rebuild_tensor_v3" and 7 <= len(arguments) <= 8:
        return _tensor(arguments[:4], arguments[6], arguments[7:])
    raise ValueError(f"its pickle calls {builder.name} with {len(arguments)} arguments")


def _tensor(layout: tuple[Any, ...], element: Any, more: tuple[Any, ...]) -> _Tensor:
    storage, offset, shape, stride = layout
    if type(storage) is not _Storage or type(offset) is not int or offset < 0:
        raise ValueError("its pickle builds a tensor from something that is no storage")
    if type(shape) is not tuple or type(stride) is not tuple or any(type(item) is not int for item in shape + stride):
        raise ValueError("its pickle gives a tensor a shape that is none")
    dtype = storage.dtype if element is None else DTYPES.get(element.name) if type(element) is _Name else None
    if dtype is None or (element is not None and storage.dtype is not None):
        raise ValueError("its pickle gives a tensor no element type")
    flags = more[0] if more and more[0] is not None else {}
    if type(flags) is not dict or not flags.keys() <= {"conj", "neg"}:
        raise ValueError("its tensor has properties of its own")
    extent, size = _extent(shape, stride), math.prod(shape)
    row_major = stride == _row_major(shape) or size == 1
    signs = flags.get("conj") is True, flags.get("neg") is True
    return _Tensor(storage, dtype, offset, shape, stride, *signs, extent, size * dtype.itemsize, row_major)
