"""A stand-in for an NPU: a device `npu` in pure Python, and the parts of `torch_npu` that ulpscope touches.

    import fakenpu; fakenpu.install()         # before the first backward: the engine counts its devices once
    with fakenpu.fault("aten::mm", lambda kernel, *args: kernel(*args) * 1.01): ...

An `npu` tensor is a true PrivateUse1 tensor that aliases CPU memory: a DLPack capsule with another device number in it. One
boxed fallback runs the CPU kernel of every operator on the aliases; autograd is torch's own, above it. `install` changes the
process for good, so a test calls `run`, which does it in a process of its own. There is one device, no allocator
(`torch.UntypedStorage(n, device="npu")` crashes), no autocast lists and no fused LSTM. Made with private functions of torch 2.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
_DEVICES = {"cpu": 1, "npu": 12}  # as DLPack numbers them; 12 is "extension device", which torch takes for PrivateUse1
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_faults: dict[str, Callable[..., Any]] = {}
_kept: list[torch.library.Library] = []


def run(program: str, *arguments: object, **environment: str) -> Any:
    """Runs a program in a fresh process that has the device; returns what it printed last, read as JSON."""
    # A thread of torch's engine may still be letting go of hooks, for which it needs Python: it aborts if that ends first.
    settle = "import atexit, time; atexit.register(time.sleep, 0.05)"
    place = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    source = f"{settle}\n{place}\nimport fakenpu; fakenpu.install()\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def fault(operator: str, function: Callable[..., Any]) -> contextlib.ExitStack:
    """From now on the device computes `function(kernel, *args, **kwargs)` for this operator (`aten::mm`), on CPU tensors;
    `kernel` is the true one. Closing or leaving what is returned ends it."""
    _faults[operator] = function
    undo = contextlib.ExitStack()
    undo.callback(_faults.pop, operator, None)
    return undo


# --- memory -------------------------------------------------------------------------------------------------------


def alias(tensor: Tensor, device: str) -> Tensor:
    """The same memory as a tensor of another device."""
    capsule = torch._C._to_dlpack(tensor)
    # A DLManagedTensor begins with the data pointer, then the device: its kind and its number.
    kind = (ctypes.c_int32 * 2).from_address(_address(capsule, b"dltensor") + 8)
    kind[0], kind[1] = _DEVICES[device], 0
    made = torch._C._from_dlpack(capsule)
    made = aten._conj(made) if tensor.is_conj() else made
    return aten._neg_view(made) if tensor.is_neg() else made


class _Aliases:
    """The CPU side of one kernel's arguments, and the way back for its results."""

    def __init__(self, arguments: Any) -> None:
        self._given: dict[int, tuple[Tensor, Tensor]] = {}
        # By CPU tensor: what to give back for it. An argument that lives on the CPU comes back as it is.
        self._owners = {id(leaf): leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}

    def host(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor) or value.device.type != "npu":
            return value
        if id(value) not in self._given:
            # What a kernel may have to resize (an empty `out=`) cannot be borrowed memory.
            fresh = not value.numel()
            mine = aten.empty_strided(value.shape, value.stride(), dtype=value.dtype) if fresh else alias(value, "cpu")
            self._given[id(value)] = value, mine
            self._owners[id(mine)] = value
        return self._given[id(value)][1]

    def device(self, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        owner = self._owners.get(id(result))
        if owner is None:
            return alias(result, "npu")
        if owner.shape != result.shape:
            owner.data = alias(result, "npu")
        return owner


# --- kernels ------------------------------------------------------------------------------------------------------


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return aten.copy_(target, source)


# --- being late -----------------------------------------------------------------------------------------------------


class _Queue:
    """What the device has still to do for a host that does not wait: the copies that were asked for without waiting.

    `late` says how many more kernels must be queued before an event is reached; `waits` counts how often the host stood still.
    """

    def __init__(self) -> None:
        self.late = 0
        self.kernels = 0
        self.waits = 0
        self._copies: list[tuple[int, Tensor, Tensor]] = []

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._copies.append((self.kernels, aten.clone(source), target))

    def reach(self, kernels: int) -> None:
        """Everything that was asked for before is done now."""
        for asked, source, target in self._copies:
            if asked <= kernels:
                aten.copy_(target, source)
        self._copies = [copy for copy in self._copies if copy[0] > kernels]


_QUEUE = _Queue()


class Event:
    """`torch.npu.Event`."""

    def record(self) -> None:
        self._at = _QUEUE.kernels

    def query(self) -> bool:
        done = _QUEUE.kernels - self._at >= _QUEUE.late
        if done:
            _QUEUE.reach(self._at)
        return done

    def synchronize(self) -> None:
        _QUEUE.waits += 1
        _QUEUE.reach(self._at)


def late(kernels: int) -> None:
    """From now on the device is so many kernels behind the host, and `waits()` counts from 0."""
    _QUEUE.late, _QUEUE.waits = kernels, 0


def waits() -> int:
    """How often the host has waited for the device: for an event, a number, or a copy."""
    return _QUEUE.waits


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    transposed, groups = rest[3], rest[5]
    bias = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return aten.convolution_backward(grad, x, weight, bias, *rest)


# Operators that torch asks of a device only, in terms of the CPU's.
_OWN: dict[str, Callable[..., Any]] = {
    "aten::_copy_from": _copy_from,
    "aten::convolution_overrideable": aten.convolution,
    "aten::convolution_backward_overrideable": _convolution_backward,
}
_NO_KERNEL = ("aten::empty", "aten::_copy_from", "aten::_local_scalar_dense", "aten::set_")


def _kernel(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Every operator of the device. Runs with function modes off: the inside of a device is nobody's call."""
    schema = operator._schema
    with torch._C.DisableTorchFunction():
        if schema.name == "aten::set_" or _makes_view(schema):
            # The CPU's kernel looks at sizes alone; it keeps storage and offset, which autograd needs for writes to views.
            return operator.redispatch(_ON_CPU, *args, **kwargs)
        back = schema.name == "aten::_copy_from" and args[1].device.type == "cpu"
        if back and kwargs.get("non_blocking", len(args) > 2 and args[2]) and _QUEUE.late:
            _QUEUE.copy(alias(args[0], "cpu"), args[1])
            return args[1]
        if back or schema.name == "aten::_local_scalar_dense":
            _QUEUE.waits += 1
        _QUEUE.kernels += 1
        aliases = _Aliases((args, kwargs))
        args, kwargs = tree_map(aliases.host, (args, kwargs))
        kwargs.pop("pin_memory", None)
        true = _OWN.get(schema.name, operator)
        wrong = _faults.get(schema.name)
        before = _DUMP.bytes_of((args, kwargs)) if _DUMP.wants("input") else b""
        result = true(*args, **kwargs) if wrong is None else _wrong(schema, wrong, true, args, kwargs)
        if _saturation and not schema.name.startswith(_NO_KERNEL):
            _saturate(result)
        if not schema.name.startswith(_NO_KERNEL):
            _DUMP.write(schema.name, before, result)
        return tree_map(aliases.device, result)


def _makes_view(schema: Any) -> bool:
    returned = [item.alias_info for item in schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _wrong(schema: Any, wrong: Callable[..., Any], true: Any, args: Any, kwargs: Any) -> Any:
    """The faulty result, also where the operator writes into an argument. The fault is not told of `out=`."""
    given = {**{item.name: value for item, value in zip(schema.arguments, args, strict=False)}, **kwargs}
    writes = [item.name for item in schema.arguments if item.alias_info is not None and item.alias_info.is_write]
    outs = {name: aten.empty_like(kwargs[name]) for name in writes if name in kwargs}
    kept = {name: value for name, value in kwargs.items() if name not in outs}
    result = wrong(functools.partial(true, **outs), *args, **kept)
    if not writes:
        return result
    for name, value in zip(writes, result if isinstance(result, tuple) else (result,), strict=True):
        if given[name] is not value:
            aten.copy_(given[name], value)
    return given[writes[0]] if len(writes) == 1 else tuple(given[name] for name in writes)


# --- the overflow flag ----------------------------------------------------------------------------------------------

_saturation: list[bool] = []  # empty on a chip in inf/nan mode; else the flag, and that of debuggers


def saturate() -> None:
    """From now on the device has no inf and no nan: an overflow leaves the largest number and raises the flag."""
    _saturation[:] = [False, False]


def _saturate(result: Any) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(aten.all(aten.isfinite(leaf))):
            largest = torch.finfo(leaf.dtype).max
            aten.copy_(leaf, aten.nan_to_num(leaf, 0.0, largest, -largest))
            _saturation[:] = [True, True]


def _flag_module() -> types.ModuleType:
    module = types.ModuleType("torch_npu.npu.utils")
    module.is_support_inf_nan = lambda: not _saturation
    module.get_npu_overflow_flag = lambda: bool(_saturation and _saturation[0])
    module.clear_npu_overflow_flag = lambda: _saturation.__setitem__(0, False) if _saturation else None
    return module


def _status(words: Tensor, mode: int = 0) -> Tensor:
    return aten.fill(words, float(bool(_saturation) and _saturation[mode]))


def _clear_status(words: Tensor, mode: int = 0) -> Tensor:
    if _saturation:
        _saturation[mode] = False
    return aten.clone(words)


# --- the vendor's kernel dump -------------------------------------------------------------------------------------


class _Dump:
    """init_dump, set_dump, finalize_dump. `calls` is the log; a file holds the raw bytes of what was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._ready = False
        self._settings: dict[str, Any] = {}
        self._folder = Path()
        self._task = 0

    def init_dump(self) -> None:
        self.calls.append("init_dump")
        if self._ready:
            raise RuntimeError("aclmdlInitDump: repeated initialisation (100002)")
        self._ready = True

    def set_dump(self, path: str) -> None:
        self.calls.append(f"set_dump {path}")
        if not self._ready:
            raise RuntimeError("aclmdlSetDump: dump is not initialised (100001)")
        self._settings = json.loads(Path(path).read_text())["dump"]
        self._folder = Path(self._settings["dump_path"]) / time.strftime("%Y%m%d%H%M%S") / "0" / "0"

    def finalize_dump(self) -> None:
        self.calls.append("finalize_dump")
        self._ready, self._settings = False, {}

    def wants(self, side: str) -> bool:
        settings = self._settings
        return settings.get("dump_op_switch") == "on" and settings.get("dump_mode", "output") in (side, "all")

    def bytes_of(self, values: Any) -> bytes:
        found = [leaf.contiguous().view(-1) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return b"".join(leaf.view(torch.uint8).numpy().tobytes() for leaf in found)

    def write(self, operator: str, before: bytes, result: Any) -> None:
        if not self.wants("input") and not self.wants("output"):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._task += 1
        name = "".join(word.capitalize() for word in operator.partition("::")[2].split("_"))
        after = self.bytes_of(result) if self.wants("output") else b""
        (self._folder / f"{name}.{name}.{self._task}.0.{time.time_ns() // 1000}").write_bytes(before + after)


_DUMP = _Dump()


# --- torch_npu ----------------------------------------------------------------------------------------------------


def _masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    return aten.softmax(aten.masked_fill(aten.mul(x, scale), mask, -10000.0), -1)


def _masked_softmax_backward(grad: Tensor, y: Tensor, mask: Tensor, scale: float) -> Tensor:
    flows = aten._softmax_backward_data(grad, y, -1, y.dtype)
    return aten.masked_fill(aten.mul(flows, scale), mask, 0.0)


def _attention(query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, scale: float = 1.0) -> Any:
    weights = aten.softmax(aten.mul(aten.matmul(query, aten.transpose(key, -2, -1)), scale), -1)
    return aten.matmul(weights, value), weights


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    on_weights = aten.matmul(grad, aten.transpose(value, -2, -1))
    on_scores = aten.mul(aten._softmax_backward_data(on_weights, weights, -1, weights.dtype), scale)
    on_key = aten.matmul(aten.transpose(on_scores, -2, -1), query)
    return aten.matmul(on_scores, key), on_key, aten.matmul(aten.transpose(weights, -2, -1), grad)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, float scale=1.0) -> Tensor": _masked_softmax,
    "npu_scaled_masked_softmax_backward(Tensor grad, Tensor y, Tensor mask, float scale) -> Tensor": _masked_softmax_backward,
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, float scale=1.0)"
    " -> (Tensor, Tensor)": _attention,
    "npu_fusion_attention_grad(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor weights, float scale)"
    " -> (Tensor, Tensor, Tensor)": _attention_backward,
    "fast_gelu(Tensor self) -> Tensor": lambda x: aten.mul(x, aten.sigmoid(aten.mul(x, 1.702))),
    "npu_get_float_status(Tensor self, int mode=0) -> Tensor": _status,
    "npu_clear_float_status(Tensor self, int mode=0) -> Tensor": _clear_status,
    "npu_dtype_cast(Tensor self, ScalarType dtype) -> Tensor": lambda x, dtype: aten._to_copy(x, dtype=dtype),
}


def _register_operators(package: types.ModuleType) -> torch.library.Library:
    library = torch.library.Library("npu", "DEF")
    for schema, function in _OPERATORS.items():
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CPU")  # the device gets it by its fallback, as any other
        setattr(package, name, getattr(torch.ops.npu, name))
    operators = torch.ops.npu

    def softmax_grad(context: Any, grad: Tensor) -> Any:
        y, mask = context.saved_tensors
        return operators.npu_scaled_masked_softmax_backward(grad, y, mask, context.scale), None, None

    def keep_softmax(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.scale = inputs[2]

    def attention_grad(context: Any, grad: Tensor, _: Any) -> Any:
        return (*operators.npu_fusion_attention_grad(grad, *context.saved_tensors, context.scale), None, None, None)

    def keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3], output[1])
        ctx.scale = inputs[5]

    register = torch.library.register_autograd
    register("npu::npu_scaled_masked_softmax", softmax_grad, setup_context=keep_softmax, lib=library)
    register("npu::npu_fusion_attention", attention_grad, setup_context=keep_attention, lib=library)
    return library


def _device_module() -> types.ModuleType:
    """`torch.npu` and `torch_npu.npu`. Kernels run on the CPU, so its random numbers are the device's."""
    module = types.ModuleType("torch_npu.npu")

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)

    for name, function in {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "init_dump": _DUMP.init_dump,
        "set_dump": _DUMP.set_dump,
        "finalize_dump": _DUMP.finalize_dump,
        "device": lambda device: contextlib.nullcontext(),
        "Event": Event,
    }.items():
        setattr(module, name, function)
    module.dump_calls = _DUMP.calls
    module.utils = _flag_module()
    return module


def install() -> None:
    """Gives this process the device, `torch.npu` and `torch_npu`. A second call changes nothing."""
    if _kept:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = _device_module()
    _setup_privateuseone_for_python_backend("npu", backend_module=module)
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_kernel, "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for name in _OWN:  # torch has kernels for these that only complain, and they would come before the fallback
        operator = getattr(aten, name.removeprefix("aten::")).default
        own.impl(operator, functools.partial(_kernel, operator), "PrivateUse1")
    for key in ("Conjugate", "Negative"):  # a copy resolves both; torch would resolve them before it, by a copy
        own.impl("_copy_from", torch.library.fallthrough_kernel, key)
    # A parameter cannot change its device in place, and a new one for each module would untie shared weights.
    torch.__future__.set_swap_module_params_on_conversion(True)
    package = types.ModuleType("torch_npu")
    package.npu, package.__version__ = module, "0.0+fakenpu"
    _kept.extend([fallback, own, _register_operators(package)])
    sys.modules |= {"torch_npu": package, "torch_npu.npu": module}
