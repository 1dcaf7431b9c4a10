"""What a torch function is called in a dump, and how to treat it.

The seeds' spelling: kind and name, `Functional.conv2d`, `Torch.matmul`, `Tensor.__add__`, `VF.lstm`.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
import torch.nn.functional
import torch.nn.init

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.mode_dependent import CALLS
from ulpscope.frameworks.torch.spelling import Spelling
from ulpscope.model.operators import UNSEEN_WRITES, Trait, traits

NORMAL, IGNORED, SHARING, UNINITIALISED, WRITTEN_OUT = range(5)

# Of functions of the program: the kind and the name under which it wants them.
NAMED = "_ulpscope_name"
# Never recorded. Everything else that torch can call is seen.
_NEVER = Trait.ASKS | Trait.KEEPS_BOOKS
# Operators that return before their communication has ended; what came is the output of wait_tensor.
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
# Namespaces of operators that have a name of their own in a dump.
_SPACES = {"aten": "Aten", "npu": "NPU"}
_SILENT_SPACES = frozenset({"profiler", "prim"})


# Operators whose body in torch is Python. msprobe never sees these, but what they call: a product and a quotient of
# numbers and tensors count together there.
_BODIES = {name: getattr(torch.Tensor, name) for name in ("__rdiv__", "__rfloordiv__")}
_LINALG = "linalg_"


_TORCH_KINDS = frozenset({"Functional", "Init", "Torch", "Tensor", "VF", "Aten", *_SILENT_SPACES})


FUNCTIONALS = torch.nn.functional.__file__
_DISPATCHER = internals.DISPATCHER_FILE  # stands between a functional with a flag for indices and its caller


# Puts together what a file, or a worker that loads data, holds. Whose batch the program finds ready first, and on which thread
# it is pinned, is a race.
_APART = tuple(
    f"torch{os.sep}{os.path.join(*path)}"
    for path in (("multiprocessing", "reductions.py"), ("utils", "data", "_utils", "pin_memory.py"))
)
_REBUILDS = os.path.join("torch", "_utils.py")


def is_apart(code: types.CodeType) -> bool:
    """Whether what this code calls is no call of the program: tensors are put together from elsewhere, and nothing is computed."""
    file = code.co_filename
    return file.endswith(_APART) or (file.endswith(_REBUILDS) and code.co_name.startswith("_rebuild"))


class Api:
    """One torch function: its kind and name in a dump and how it is treated."""

    __slots__ = (
        "dependent",
        "fast",
        "kind",
        "mutates",
        "name",
        "pending_inputs",
        "pending_outputs",
        "signed",
        "treatment",
        "unseen",
    )

    def __init__(self, kind: str, name: str, treatment: int) -> None:
        self.kind = kind
        self.name = sys.intern(name)  # the C finds a name by its address, before it looks for its text
        self.treatment = treatment
        # Whether torch computes it otherwise while a dispatch mode is on, asked with its arguments.
        self.dependent = CALLS.get(name.partition(".")[0])
        known = traits(name)
        self.signed = kind == "Tensor" and Trait.HAS_SIGN in known and not name.startswith("__")
        waits = name.startswith("wait_tensor")
        self.pending_outputs = kind in _COMMUNICATION and not waits
        self.pending_inputs = kind in _COMMUNICATION and (waits or name.startswith("_wrap_tensor"))
        self.unseen = UNSEEN_WRITES.get(f"{kind}.{name}")
        if Trait.WRITES_ANYTHING in known or kind not in _TORCH_KINDS:
            self.unseen = ()  # a foreign operator may write what it likes
        self.mutates = (
            (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
        )
        # For calls.c: what it can do by itself, and what it must look at.
        unusual = self.pending_inputs or self.pending_outputs or self.unseen is not None
        quick = treatment == NORMAL and kind != "Aten" and not unusual
        flags = (treatment == IGNORED, quick, self.signed, kind == "Functional", self.mutates)
        self.fast = sum(flag << place for place, flag in enumerate(flags))


class ApiNames:
    """Finds the Api of a function object. One per capture; torch's own tables are never changed.

    With `as_msprobe`, calls have the names, and so the numbers, that msprobe gives them where it differs: `torch.linalg.norm`
    is `Torch.norm` like `torch.norm`, and `2 / x` is what torch's Python makes of it, `reciprocal` and `__mul__`."""

    def __init__(self, *, as_msprobe: bool = False) -> None:
        self._as_msprobe = as_msprobe
        self.written = Spelling(frozenset(body.__wrapped__.__code__ for body in _BODIES.values()) if as_msprobe else ())
        # What was found so far.
        self.known: dict[Any, Api] = {}
        for kind, space in (("Functional", torch.nn.functional), ("Init", torch.nn.init)):
            for name, function in vars(space).items():
                if callable(function) and not isinstance(function, type) and not name.startswith("__"):
                    self.known.setdefault(function, self._made(kind, name))

    def of(self, function: Any) -> Api:
        try:
            found = self.known.get(function)
        except TypeError:
            return self._find(function)
        if found is None:
            found = self.known[function] = self._find(function)
        return found

    def spelling(self, api: Api, frame: types.FrameType | None, args: tuple[Any, ...]) -> str:
        """The name of a Tensor method as the caller wrote it: `__add__` for a plus sign, `add` for a method call."""
        return self.written.sign(frame, args, in_place=api.name.endswith("_")) or api.name

    def site_sign(self, frame: types.FrameType) -> str | tuple[str | None, ...] | bool | None:
        """The sign that a running frame stands on, as far as its code tells (`Spelling.site_sign`)."""
        return self.written.site_sign(frame)

    def call_shape(self, frame: types.FrameType) -> tuple[int, tuple[str, ...]] | None:
        return self.written.call_shape(frame)

    def code_class(self, code: types.CodeType) -> int:
        """For calls.c: whose code it is."""
        file = code.co_filename
        return (
            (file == torch.overrides.__file__)
            | (file == FUNCTIONALS) << 1
            | self.written.is_torch(code) << 2
            | (file == _DISPATCHER) << 3
            | is_apart(code) << 4
        )

    def positions(
        self, frame: types.FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the functional that runs in a frame as its caller passed them; torch tells some as keywords."""
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename == _DISPATCHER:
            caller = caller.f_back
        shape = None if caller is None else self.written.call_shape(caller)
        if shape is None or len(args) >= shape[0]:
            return args, kwargs
        parameters = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        moved = parameters[len(args) : shape[0]]
        if not all(name in kwargs and name not in shape[1] for name in moved):
            return args, kwargs
        rest = {name: value for name, value in kwargs.items() if name not in moved}
        return (*args, *(kwargs[name] for name in moved)), rest

    def _find(self, function: Any) -> Api:
        told = getattr(function, NAMED, None)
        if told is not None:
            return self._made(*told)
        name = getattr(function, "__name__", type(function).__name__)
        if isinstance(function, internals.Overload):
            space, _, rest = function.name().partition("::")
            return self._made(_SPACES.get(space, space), rest if "." in rest else rest + ".default")
        if isinstance(function, internals.OverloadPacket):
            space, _, rest = function._qualified_op_name.partition("::")
            return self._made(_SPACES.get(space, space), rest)
        owner = getattr(function, "__self__", None)
        # Bindings in C++ are methods of torch_npu._C._VariableFunctionsClass.
        origin = getattr(owner if isinstance(owner, type) else function, "__module__", None) or ""
        if origin.partition(".")[0] == "torch_npu":
            return self._made("NPU", name)
        if name in ("__get__", "__set__", "__delete__") and owner is not None:
            attribute = getattr(owner, "__name__", "")
            if attribute == "data":
                return Api("Tensor", "data", SHARING)
            if name == "__get__" and Trait.COMPUTED_ATTRIBUTE in traits(attribute):
                return Api("Tensor", attribute, NORMAL)
            return Api("Tensor", attribute, IGNORED)
        qualified = getattr(function, "__qualname__", "")
        if qualified.startswith(("TensorBase.", "Tensor.", "_TensorBase.")) or isinstance(
            function, types.MethodDescriptorType | types.WrapperDescriptorType
        ):
            return self._made("Tensor", name)
        if Trait.IN_VF in traits(name):
            return self._made("VF", name)
        return self._made("Torch", name)

    def _made(self, kind: str, name: str) -> Api:
        known = traits(name)
        if self._as_msprobe and kind == "Tensor" and name in _BODIES:
            return Api(kind, name, WRITTEN_OUT)
        if self._as_msprobe and kind == "Torch" and Trait.LONG_LINALG not in traits(name):
            name = name.removeprefix(_LINALG)  # never at the level of kernels: `dependent` is not asked
        if kind in _SILENT_SPACES or known & _NEVER:
            return Api(kind, name, IGNORED)
        if Trait.SHARES_MEMORY in known:
            return Api(kind, name, SHARING)
        return Api(kind, name, UNINITIALISED if Trait.UNINITIALISED in known else NORMAL)
