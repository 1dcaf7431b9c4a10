"""How the caller wrote a call, read from his bytecode: which operator sign, which arguments by keyword.

torch tells a function mode `Tensor.add` for `a + b`, `1 + a` and `a.add(b)` alike, and hands on as keywords what the caller of
a Python function passed by position. Each code object is read once; only frames that are running are looked at.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Collection
from typing import Any

import torch

from ulpscope.frameworks.torch import internals

_SYMBOLS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift", "<": "lt", "<=": "le", "==": "eq", "!=": "ne",
    ">": "gt", ">=": "ge",
}  # fmt: skip
_OLD_OPCODES = {
    "ADD": "add", "SUBTRACT": "sub", "MULTIPLY": "mul", "TRUE_DIVIDE": "truediv", "FLOOR_DIVIDE": "floordiv",
    "MODULO": "mod", "POWER": "pow", "MATRIX_MULTIPLY": "matmul", "AND": "and", "OR": "or", "XOR": "xor",
    "LSHIFT": "lshift", "RSHIFT": "rshift", "NEGATIVE": "neg", "INVERT": "invert", "POSITIVE": "pos",
}  # fmt: skip
_REFLECTED = {"__add__": "__radd__", "__mul__": "__rmul__"}
_TORCH_FILES = (internals.TENSOR_FILE, torch.overrides.__file__)
_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")
_DOUBLE_LOADS = ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_NUMBER_MAKERS = frozenset({"math", "float", "int", "len"})
_UNKNOWN = object()
# What an operand is, as far as it can be told without running anything: a literal, or a name and an attribute of it.
Operand = tuple[str, ...]


class Spelling:
    """Reads code objects and remembers what it found. `bodies`: code of torch's own that counts as the caller's."""

    def __init__(self, bodies: Collection[types.CodeType] = ()) -> None:
        self._bodies = bodies
        self._codes: dict[int, types.CodeType] = {}
        self._signs: dict[tuple[int, int], tuple[str, Operand | None, Operand | None]] = {}
        self._calls: dict[tuple[int, int], tuple[int, tuple[str, ...]]] = {}

    def sign(self, frame: types.FrameType | None, args: tuple[Any, ...], *, in_place: bool) -> str | None:
        """`__add__`, `__radd__` or `__iadd__` when an operator sign called a Tensor method; None for a plain call."""
        while frame is not None and self.is_torch(frame.f_code):
            frame = frame.f_back
        if frame is None:
            return None
        self._read(frame.f_code)
        found = self._signs.get((id(frame.f_code), frame.f_lasti))
        if found is None:
            return None
        sign, left, right = found
        if sign.startswith("__i") and sign[3:] != "nvert__" and not in_place:
            return "__r" + sign[3:]  # `number += tensor`: the left side was no tensor
        plain = len(args) > 1 and not isinstance(args[1], torch.Tensor)
        if sign in _REFLECTED and plain and _is_reflected(frame, left, right, args[0]):
            return _REFLECTED[sign]
        return sign

    def is_torch(self, code: types.CodeType) -> bool:
        """Whether code only stands between the caller and torch."""
        return code.co_filename in _TORCH_FILES and code not in self._bodies

    def site_sign(self, frame: types.FrameType) -> str | tuple[str | None, ...] | bool | None:
        """What follows from the code alone of how a call was written: a sign, or None for a plain call. Where the other operand
        may be a number: the sign, what it is if the number stands on the left, the names of both operands, each None where it is
        no variable, and which of the two it is if the code tells. False where `sign` must look."""
        self._read(frame.f_code)
        found = self._signs.get((id(frame.f_code), frame.f_lasti))
        if found is None:
            return None
        sign, left, right = found
        if sign in _REFLECTED:
            names = [operand[0] if operand and len(operand) == 1 else None for operand in (left, right)]
            told = _REFLECTED[sign] if left == () else sign if right == () else None
            return sign, _REFLECTED[sign], *names, told
        return False if sign.startswith("__i") and sign != "__invert__" else sign

    def call_shape(self, frame: types.FrameType) -> tuple[int, tuple[str, ...]] | None:
        """How many arguments the call under way in a frame has by position, and which by keyword; None if unknown."""
        self._read(frame.f_code)
        return self._calls.get((id(frame.f_code), frame.f_lasti))

    def _read(self, code: types.CodeType) -> None:
        if id(code) in self._codes:
            return
        self._codes[id(code)] = code  # keeps the id from being used again
        before: list[dis.Instruction] = []
        keywords: tuple[str, ...] = ()
        for step in dis.get_instructions(code):
            sign = _sign_of(step)
            if sign is not None:
                self._signs[id(code), step.offset] = (sign, *_operands(before))
            elif step.opname == "KW_NAMES":
                keywords = code.co_consts[step.arg or 0]
            elif step.opname in ("CALL", "CALL_FUNCTION", "CALL_METHOD"):
                self._calls[id(code), step.offset] = ((step.arg or 0) - len(keywords), keywords)
                keywords = ()
            elif step.opname in ("CALL_KW", "CALL_FUNCTION_KW") and before and isinstance(before[-1].argval, tuple):
                names = before[-1].argval
                self._calls[id(code), step.offset] = ((step.arg or 0) - len(names), names)
            if before:
                self._cover(code, before[-1].offset, step.offset)
            before.append(step)

    def _cover(self, code: types.CodeType, start: int, end: int) -> None:
        """A frame that waits for a Python function stands on the cache entries behind its call."""
        for offset in range(start + 2, end, 2):
            if (id(code), start) in self._calls:
                self._calls[id(code), offset] = self._calls[id(code), start]


def _sign_of(step: dis.Instruction) -> str | None:
    name = step.opname
    if name == "BINARY_OP" or name == "COMPARE_OP":
        symbol = step.argrepr.removeprefix("bool(").removesuffix(")")
        inplace = symbol.endswith("=") and symbol[:-1] in _SYMBOLS and symbol not in _SYMBOLS
        word = _SYMBOLS.get(symbol[:-1] if inplace else symbol)
        return None if word is None else sys.intern(f"__{'i' if inplace else ''}{word}__")
    family, _, rest = name.partition("_")
    if family in ("BINARY", "INPLACE", "UNARY") and rest in _OLD_OPCODES:
        return sys.intern(f"__{'i' if family == 'INPLACE' else ''}{_OLD_OPCODES[rest]}__")
    return None


def _operands(before: list[dis.Instruction]) -> tuple[Operand | None, Operand | None]:
    """The left and the right operand of a sign. Walks back over the right one until it nets one value on the stack."""
    total = 0
    for at in range(len(before) - 1, 0, -1):
        step = before[at]
        if step.is_jump_target or step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            break
        total += dis.stack_effect(step.opcode, step.arg, jump=False)
        if total == 1:
            return _operand(before[:at]), _operand(before[at:])
        if total > 1:  # one instruction that loads two, since Python 3.13
            both: tuple[Any, ...] = step.argval if at == len(before) - 1 and step.opname in _DOUBLE_LOADS else ()
            return ((str(both[0]),), (str(both[1]),)) if len(both) == 2 else (None, None)
    return None, None


def _operand(steps: list[dis.Instruction]) -> Operand | None:
    """The value that the last of these instructions leaves, if it is a literal, a name, or an attribute of a name."""
    last = steps[-1]
    if last.opname in _CONSTANTS:
        return ()
    if last.opname in _LOADS:
        return (str(last.argval),)
    if last.opname == "LOAD_ATTR" and len(steps) > 1 and steps[-2].opname in _LOADS:
        return str(steps[-2].argval), str(last.argval)
    if last.opname == "CALL" and _first_of(steps) in _NUMBER_MAKERS:
        return ()
    return None


def _first_of(steps: list[dis.Instruction]) -> str | None:
    """The global name with which the expression that these instructions end in begins."""
    total = 0
    for step in reversed(steps):
        if step.is_jump_target or step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return None
        total += dis.stack_effect(step.opcode, step.arg, jump=False)
        if total == 1 and step.opname == "LOAD_GLOBAL":
            return str(step.argval)
        if total >= 1:
            return None
    return None


def _is_reflected(frame: types.FrameType, left: Operand | None, right: Operand | None, tensor: Any) -> bool:
    """Whether the tensor stood on the right of the sign and a plain number on its left."""
    if left == ():
        return True
    if right == ():
        return False
    found = _value(frame, right)
    if found is not _UNKNOWN:
        return found is tensor
    found = _value(frame, left)
    return found is not _UNKNOWN and not isinstance(found, torch.Tensor)


def _value(frame: types.FrameType, operand: Operand | None) -> Any:
    """What a name holds in a running frame. An attribute is looked up in the object's own dictionary: nothing is called."""
    if not operand:
        return _UNKNOWN
    found = frame.f_locals.get(operand[0], _UNKNOWN)
    if found is _UNKNOWN:
        found = frame.f_globals.get(operand[0], _UNKNOWN)
    for attribute in operand[1:]:
        try:
            found = object.__getattribute__(found, "__dict__").get(attribute, _UNKNOWN)
        except AttributeError:
            return _UNKNOWN
    return found
