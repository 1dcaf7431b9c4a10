"""What a torch function is called in a dump, and how to treat it.

The seeds' spelling: kind and name, `Functional.conv2d`, `Torch.matmul`, `Tensor.__add__`, `VF.lstm`. A function mode is
told `Tensor.add` for `a + b`, `1 + a` and `a.add(b)` alike; the caller's bytecode tells them apart.
"""

from __future__ import annotations

import dis
import types
from typing import Any

import torch
import torch.nn.functional
import torch.nn.init

NORMAL, IGNORED, SHARING, UNINITIALISED = range(4)

# Never recorded, with the reason. Everything else that torch can call is seen.
NEVER: dict[str, frozenset[str]] = {
    "asks for a shape, a type or a flag and computes nothing": frozenset(
        [
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "stride",
            "storage_offset",
            "element_size",
            "is_contiguous",
            "is_floating_point",
            "is_complex",
            "is_signed",
            "is_inference",
            "is_conj",
            "is_neg",
            "is_pinned",
            "is_shared",
            "is_coalesced",
            "is_same_size",
            "is_set_to",
            "is_distributed",
            "get_device",
            "dense_dim",
            "sparse_dim",
            "_nnz",
            "dim_order",
            "sym_int",
            "sym_float",
            "sym_not",
            "sym_max",
            "sym_min",
            "sym_sum",
            "sym_ite",
            "result_type",
            "can_cast",
            "promote_types",
            "is_tensor",
            "is_storage",
            "is_nonzero_",
            "__len__",
            "__hash__",
            "__repr__",
            "__str__",
            "__format__",
            "__dir__",
            "_is_view",
            "_is_zerotensor",
            "_conj_physical_",
            "has_names",
            "q_scale",
            "q_zero_point",
            "q_per_channel_axis",
            "qscheme",
            "__index__",
            "is_autocast_enabled",
            "is_grad_enabled",
            "get_default_dtype",
            "_has_compatible_shallow_copy_type",
            "__get__",
            "__set__",
            "__delete__",
            "__dlpack_device__",
            "_typed_storage",
            "__torch_dispatch__",
            "is_cuda",
            "is_cpu",
        ]
    ),
    "keeps the books of autograd and changes no number": frozenset(
        [
            "backward",
            "grad",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "retain_grad",
            "requires_grad_",
            "_backward_hooks",
            "grad_fn",
            "is_leaf",
            "set_grad_enabled",
            "_enter_autocast",
            "_exit_autocast",
            "rename",
            "rename_",
            "refine_names",
            "align_to",
            "align_as",
            "__reduce_ex__",
            "__reduce__",
            "__setstate__",
            "__deepcopy__",
            "as_subclass",
            "_make_subclass",
            "_make_wrapper_subclass",
            "_assert",
            "_set_grad_enabled",
            "_enter_inference_mode",
            "_exit_inference_mode",
            "_enter_dual_level",
            "_exit_dual_level",
            "_saved_tensors_hooks",
        ]
    ),
}
# Give memory away that can then be written behind torch's back.
_SHARING = frozenset(
    [
        "numpy",
        "__array__",
        "data_ptr",
        "untyped_storage",
        "storage",
        "__dlpack__",
        "share_memory_",
        "from_numpy",
        "frombuffer",
        "from_dlpack",
        "as_tensor",
        "asarray",
        "set_",
        "data",
    ]
)
_UNINITIALISED = frozenset(
    [
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "empty_quantized",
        "_empty_affine_quantized",
        "resize_",
        "resize_as_",
    ]
)
_VF = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"])
# Calls that write tensors without raising their version: which arguments, by position and keyword; () for all of them.
_UNSEEN_WRITES: dict[str, tuple[int | str, ...]] = {
    "Functional.batch_norm": (1, 2, "running_mean", "running_var"),
    "Functional.instance_norm": (1, 2, "running_mean", "running_var"),
    "Torch.batch_norm": (3, 4, "running_mean", "running_var"),
    "Torch.instance_norm": (3, 4, "running_mean", "running_var"),
    "Torch.native_batch_norm": (3, 4, "running_mean", "running_var"),
    "Torch.fused_moving_avg_obs_fake_quant": (),
}
_UNSEEN_PREFIXES = ("_fused_", "_amp_", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
# Operators that return before their communication has ended; what came is the output of wait_tensor.
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_SILENT_SPACES = frozenset({"profiler", "prim"})
# Attributes of a tensor that compute; every other attribute is a query.
_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})

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
# Methods that an operator sign may stand for.
_SIGNED = frozenset(
    name + mark
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "true_divide",
        "floor_divide",
        "remainder",
        "pow",
        "matmul",
        "neg",
        "lt",
        "le",
        "eq",
        "ne",
        "gt",
        "ge",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_left_shift",
        "bitwise_right_shift",
        "positive",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "not_equal",
    ]
    for mark in ("", "_")
)
_TORCH_FILES = (torch._tensor.__file__, torch.overrides.__file__)


_TORCH_KINDS = frozenset({"Functional", "Init", "Torch", "Tensor", "VF", "Aten", *_SILENT_SPACES})


class Api:
    """One torch function: its kind and name in a dump and how it is treated."""

    __slots__ = ("kind", "mutates", "name", "pending_inputs", "pending_outputs", "signed", "treatment", "unseen")

    def __init__(self, kind: str, name: str, treatment: int) -> None:
        self.kind = kind
        self.name = name
        self.treatment = treatment
        self.signed = kind == "Tensor" and name in _SIGNED
        waits = name.startswith("wait_tensor")
        self.pending_outputs = kind in _COMMUNICATION and not waits
        self.pending_inputs = kind in _COMMUNICATION and (waits or name.startswith("_wrap_tensor"))
        self.unseen = _UNSEEN_WRITES.get(f"{kind}.{name}")
        if name.startswith(_UNSEEN_PREFIXES) or kind not in _TORCH_KINDS:
            self.unseen = ()  # a foreign operator may write what it likes
        self.mutates = (
            (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
        )


class ApiNames:
    """Finds the Api of a function object. One per capture; torch's own tables are never changed."""

    def __init__(self) -> None:
        self._apis: dict[Any, Api] = {}
        self._signs: dict[tuple[int, int], str] = {}
        self._codes: dict[int, types.CodeType] = {}
        for kind, space in (("Functional", torch.nn.functional), ("Init", torch.nn.init)):
            for name, function in vars(space).items():
                if callable(function) and not isinstance(function, type) and not name.startswith("__"):
                    self._apis.setdefault(function, self._made(kind, name))

    def of(self, function: Any) -> Api:
        try:
            found = self._apis.get(function)
        except TypeError:
            return self._find(function)
        if found is None:
            found = self._apis[function] = self._find(function)
        return found

    def spelling(self, api: Api, frame: types.FrameType | None, args: tuple[Any, ...]) -> str:
        """The name of a Tensor method as the caller wrote it: `__add__` for a plus sign, `add` for a method call."""
        while frame is not None and frame.f_code.co_filename in _TORCH_FILES:
            frame = frame.f_back
        if frame is None:
            return api.name
        code = frame.f_code
        if id(code) not in self._codes:
            self._read_code(code)
        sign = self._signs.get((id(code), frame.f_lasti))
        if sign is None:
            return api.name
        if sign.startswith("__r") and (len(args) < 2 or isinstance(args[1], torch.Tensor)):
            return "__" + sign[3:]
        return sign

    def _find(self, function: Any) -> Api:
        name = getattr(function, "__name__", type(function).__name__)
        if isinstance(function, torch._ops.OpOverload):
            space, _, rest = function.name().partition("::")
            return self._made("Aten" if space == "aten" else space, rest if "." in rest else rest + ".default")
        if isinstance(function, torch._ops.OpOverloadPacket):
            space, _, rest = function._qualified_op_name.partition("::")
            return self._made("Aten" if space == "aten" else space, rest)
        owner = getattr(function, "__self__", None)
        if name in ("__get__", "__set__", "__delete__") and owner is not None:
            attribute = getattr(owner, "__name__", "")
            if attribute == "data":
                return Api("Tensor", "data", SHARING)
            if name == "__get__" and attribute in _PROPERTIES:
                return Api("Tensor", attribute, NORMAL)
            return Api("Tensor", attribute, IGNORED)
        qualified = getattr(function, "__qualname__", "")
        if qualified.startswith(("TensorBase.", "Tensor.", "_TensorBase.")) or isinstance(
            function, types.MethodDescriptorType | types.WrapperDescriptorType
        ):
            return self._made("Tensor", name)
        if name in _VF:
            return self._made("VF", name)
        return self._made("Torch", name)

    def _made(self, kind: str, name: str) -> Api:
        plain = name.partition(".")[0]
        if kind in _SILENT_SPACES:
            return Api(kind, name, IGNORED)
        if any(plain in names for names in NEVER.values()):
            return Api(kind, name, IGNORED)
        if plain in _SHARING:
            return Api(kind, name, SHARING)
        return Api(kind, name, UNINITIALISED if plain in _UNINITIALISED else NORMAL)

    def _read_code(self, code: types.CodeType) -> None:
        """Notes every operator sign of a function, once."""
        self._codes[id(code)] = code
        before: list[dis.Instruction] = []
        for step in dis.get_instructions(code):
            sign = _sign_of(step)
            if sign in _REFLECTED and _left_is_constant(before):
                sign = _REFLECTED[sign]
            if sign is not None:
                self._signs[id(code), step.offset] = sign
            before.append(step)


def _sign_of(step: dis.Instruction) -> str | None:
    name = step.opname
    if name == "BINARY_OP" or name == "COMPARE_OP":
        symbol = step.argrepr.removeprefix("bool(").removesuffix(")")
        inplace = symbol.endswith("=") and symbol[:-1] in _SYMBOLS and symbol not in _SYMBOLS
        word = _SYMBOLS.get(symbol[:-1] if inplace else symbol)
        return None if word is None else f"__{'i' if inplace else ''}{word}__"
    family, _, rest = name.partition("_")
    if family in ("BINARY", "INPLACE", "UNARY") and rest in _OLD_OPCODES:
        return f"__{'i' if family == 'INPLACE' else ''}{_OLD_OPCODES[rest]}__"
    return None


def _left_is_constant(before: list[dis.Instruction]) -> bool:
    """Whether the left operand of a sign is a literal: walks back over the right operand until it nets one value."""
    total = 0
    for at in range(len(before) - 1, 0, -1):
        step = before[at]
        if step.is_jump_target or step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return False
        total += dis.stack_effect(step.opcode, step.arg, jump=False)
        if total == 1:
            return before[at - 1].opname in ("LOAD_CONST", "LOAD_SMALL_INT")
    return False
