"""What we ask of torch beyond its public interface: asked once, here, with what takes its place where a version lacks it.

No other file looks for such a name. Some are needed for anything to be recorded: without one of them `check` refuses, before
the program has begun. Without any other the run is recorded with less, which is said in the log and in each manifest.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ulpscope.model.errors import CaptureError
from ulpscope.native import taps

log = logging.getLogger(__name__)
# The versions that every change is tried on; the newest are (minor, minor).
OLDEST, NEWEST = (2, 1), (2, 15)
# What is not done on this torch, each as a sentence.
LACKING: list[str] = []
_refused: list[str] = []


def version() -> tuple[int, int]:
    """Major and minor number of torch."""
    numbers = torch.__version__.split(".")
    return int(numbers[0]), int(numbers[1])


def _found(path: str) -> Any:
    """What a dotted name stands for, or None."""
    words = path.split(".")
    for count in range(len(words) - 1, 0, -1):
        try:
            space: Any = importlib.import_module(".".join(words[:count]))
            for word in words[count:]:
                space = getattr(space, word)
        except (ImportError, AttributeError):
            continue
        return space
    return None


def _needed(path: str) -> Any:
    """What no capture can do without."""
    found = _found(path)
    if found is None:
        _refused.append(path)
    return found


def _ask(path: str, instead: Any, without: str = "") -> Any:
    """A name of torch, or what takes its place, and what that cannot do."""
    found = _found(path)
    if found is None and without:
        LACKING.append(f"this torch has no {path}: {without}")
    return instead if found is None else found


def is_known() -> bool:
    """Whether this is a torch that every change is tried on."""
    return OLDEST <= version() <= NEWEST


def native() -> str:
    """How far the C part may go; see `taps`."""
    return taps.ASKED or ("full" if is_known() else "safe")


def check() -> None:
    """Raises CaptureError where nothing can be recorded with this torch; says once what cannot."""
    if taps.ASKED and taps.ASKED not in taps.MODES:
        raise CaptureError(f"ULPSCOPE_NATIVE is {taps.ASKED!r}; it must be one of {', '.join(taps.MODES)}")
    supported = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if _refused:
        names = ", ".join(_refused)
        raise CaptureError(f"torch {torch.__version__} has no {names}, so nothing can be recorded; use {supported}")
    said = list(LACKING)
    if not is_known():
        how = (
            "its library is asked through Python alone (ULPSCOPE_NATIVE=safe)"
            if native() == "safe"
            else "as asked, anyway"
        )
        said.insert(0, f"torch {torch.__version__} is not one that this ulpscope is tested with ({supported}): {how}")
    for text in said:
        if text not in _said:
            _said.add(text)
            log.warning("%s", text)


_said: set[str] = set()

# --- classes and modes of this thread that hear of calls ----------------------------------------------------------------

no_functions = _needed("torch._C.DisableTorchFunction")
no_dispatch = _needed("torch._C._DisableTorchDispatch")
count_function_modes = _needed("torch._C._len_torch_function_stack")
function_mode_at = _needed("torch._C._get_function_stack_at")
pop_function_mode = _needed("torch._C._pop_torch_function_stack")
push_function_mode = _needed("torch._C._push_on_torch_function_stack")
no_dispatch_modes = _needed("torch.utils._python_dispatch._disable_current_modes")
count_dispatch_modes = _needed("torch._C._len_torch_dispatch_stack")
dispatch_mode_at = _needed("torch._C._get_dispatch_stack_at")
push_dispatch_mode = _needed("torch._C._push_on_torch_dispatch_stack")
_pop_dispatch = _needed("torch._C._pop_torch_dispatch_stack")


# Since 2.2 it wants to know for which key, None for any.
_ANY_KEY = (None,) if version() >= (2, 2) else ()


def pop_dispatch_mode() -> Any:
    return _pop_dispatch(*_ANY_KEY)


DispatchMode: Any = _needed("torch.utils._python_dispatch.TorchDispatchMode") or object

# --- what a thread is doing ----------------------------------------------------------------------------------------------

sequence_now = _needed("torch._C._autograd._get_sequence_nr")
# The number of the backward pass that this thread is in, -1 for none.
backward_pass = _ask(
    "torch._C._current_graph_task_id",
    lambda: -1,
    "calls inside a backward pass are not told from those of the forward",
)
current_node = _ask("torch._C._current_autograd_node", lambda: None, "kernels of a backward pass are not told apart")
# None unless torch.jit.trace writes down what is called.
_jit: Any = torch.jit
jit_trace = _ask("torch._C._get_tracing_state", lambda: True if _jit.is_tracing() else None)
set_grad_enabled = _ask("torch._C._set_grad_enabled", torch.set_grad_enabled)
AUTOGRAD = _ask("torch._C.DispatchKey.AutogradFunctionality", None)
is_excluded = _ask(
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    lambda key: False,
    "calls inside a dispatch mode are taken for the program's",
)


# Whether a kernel runs: autograd has had its turn.
below_autograd: Callable[[], bool] = functools.partial(
    is_excluded if AUTOGRAD is not None else lambda key: False, AUTOGRAD
)


core: Any = _found("torch._C")
_KEYS = (
    "DispatchKey",
    "DispatchKeySet",
    "_ForceDispatchKeyGuard",
    "_RestorePythonTLSSnapshot",
    "_dispatch_has_kernel_for_dispatch_key",
    "_dispatch_tls_local_exclude_set",
    "_dispatch_tls_local_include_set",
)
# Whether a kernel can be run with keys of our choice.
chooses_keys = all(hasattr(core, name) for name in _KEYS)


def dispatch_key(name: str) -> Any:
    """None where this torch has none of that name."""
    return getattr(getattr(core, "DispatchKey", None), name, None)


def _fx_traces() -> Callable[[], bool]:
    """Whether torch.fx writes down what is called: older versions keep a flag of the process, newer ones one of each thread. Their
    own function says a warning each time."""
    space = _found("torch.fx._symbolic_trace")
    flags, local = vars(space) if space is not None else {}, getattr(space, "_is_fx_tracing_tls", None)
    if "_is_fx_tracing_flag" in flags:
        return lambda: bool(flags.get("_is_fx_tracing_flag"))
    if local is not None:
        return lambda: bool(getattr(local, "flag", False))
    return getattr(space, "is_fx_symbolic_tracing", None) or (lambda: False)  # the tracers themselves are watched too


fx_traces = _fx_traces()

# --- tensors --------------------------------------------------------------------------------------------------------------

_transformed = [
    found
    for name in ("is_batchedtensor", "is_gradtrackingtensor", "is_functionaltensor")
    if (found := _found(f"torch._C._functorch.{name}")) is not None
]
# Whether a tensor belongs to a transform of torch.func: it must not be read.
is_transformed = _found("torch._C._functorch.is_functorch_wrapped_tensor")
if is_transformed is None and len(_transformed) == 3:

    def is_transformed(value: torch.Tensor) -> bool:
        return any(is_one(value) for is_one in _transformed)


if is_transformed is None:
    _refused.append("torch._C._functorch.is_functorch_wrapped_tensor")
_transform_stack = _found("torch._C._functorch.peek_interpreter_stack")
# The level of the transform that is under way; None for none. Without an answer each tensor is asked.
_transform_level = _ask("torch._C._functorch.maybe_current_level", _transform_stack or (lambda: 0))
# What a transform is made of: whether a tensor has one dimension more than the program sees, which, and the tensor below.
_unwrapped = _found("torch._C._functorch.get_unwrapped")
_batch_dim = _found("torch._C._functorch.maybe_get_bdim")
_is_batched, _is_tracking = (_found(f"torch._C._functorch.is_{kind}tensor") for kind in ("batched", "gradtracking"))


def below_transforms(value: torch.Tensor) -> tuple[torch.Tensor | None, list[int]]:
    """The tensor that transforms of torch.func compute with, whole, and which of its dimensions they added, outermost first. None
    where it is not known, or not computed."""
    dims: list[int] = []
    known = None not in (_unwrapped, _batch_dim, _is_batched, _is_tracking)
    while known and is_transformed(value):
        if _is_batched(value):
            dims = [_batch_dim(value), *dims]
        elif not _is_tracking(value):
            return None, []
        value = _unwrapped(value)
    return (value if known else None), dims


is_functional = _ask("torch._is_functional_tensor", lambda value: False)
_thread_has = _ask("torch._C._dispatch_tls_is_dispatch_key_included", lambda key: False)
_FUNCTIONAL = getattr(_ask("torch._C.DispatchKey", None), "Functionalize", None)


def transform_level() -> int | None:
    """The level of the transform that is under way, functionalization counts as one; None for none."""
    level: int | None = _transform_level()
    return 0 if level is None and _FUNCTIONAL is not None and _thread_has(_FUNCTIONAL) else level


def is_wrapped(value: torch.Tensor) -> bool:
    """Whether a tensor stands for others: nobody may ask it for its sizes."""
    return bool(is_transformed(value) or is_functional(value))


has_overlap = _ask("torch._debug_has_internal_overlap", lambda value: 2)  # too hard to tell
as_negative = _ask("torch._neg_view", None)
dispatch_keys = _ask("torch._C._dispatch_keys", None)

# Whether torch may resize a memory: what numpy shares it may not. Without an answer no memory is trusted.
is_resizable = _ask("torch.UntypedStorage.resizable", lambda storage: False)

is_lazy = _ask("torch.nn.parameter.is_lazy", lambda value: False)  # a parameter that has no shape yet
weak_storage: Any = _ask(
    "torch.multiprocessing.reductions.StorageWeakRef", None, "uninitialised memory is told only where it is made"
)

# --- devices --------------------------------------------------------------------------------------------------------------

cuda_stream = _ask("torch._C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
is_cuda_capturing = _ask("torch._C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
private_device = _ask("torch._C._get_privateuse1_backend_name", lambda: "privateuseone")

# --- functions, operators and files ---------------------------------------------------------------------------------------

Overload = _needed("torch._ops.OpOverload")
OverloadPacket = _needed("torch._ops.OpOverloadPacket")
variable_functions = _ask("torch._C._VariableFunctions", torch)
decompositions: dict[Any, Any] = _ask(
    "torch._decomp.decomposition_table", {}, "the judge does not know kernels that it has no definition of its own for"
)
# Of Python's part of torch, which stands between a call and whoever wrote it.
TENSOR_FILE, DISPATCHER_FILE = (
    getattr(_found(path), "__file__", None) or torch.overrides.__file__
    for path in ("torch._tensor", "torch._jit_internal")
)
VF = _ask("torch._VF", torch)
# Older versions have it for CUDA alone.
GradScaler = _ask("torch.amp.GradScaler", _found("torch.cuda.amp.GradScaler"))
next_batch = _ask("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", None, "batches are not counted")
optimizer_hooks = [_needed(f"torch.optim.optimizer._global_optimizer_{when}_hooks") for when in ("pre", "post")]
# What begins each backward pass; the oldest versions have no function of Python's there, but an object that anyone may exchange.
run_engine = _found("torch.autograd.graph._engine_run_backward")


# Puts a hook into the table of a node, and makes a handle of it.
enter_hook = _found("torch.autograd.function._HookMixin._register_hook")


# What TorchScript knows by the identity of a function of Python's.
_scripted = _ask("torch.jit._builtins._get_builtin_table", dict)


def know_as_warning(function: Any) -> None:
    _scripted()[id(function)] = "aten::warn"


def tree_leaves(tree: Any) -> list[Any]:
    return list(_flatten(tree)[0])


_flatten = _needed("torch.utils._pytree.tree_flatten")
tree_map = _needed("torch.utils._pytree.tree_map")


def _autocasts(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # a kind of device that this version does not autocast
        return False


def autocast() -> dict[str, str]:
    """The dtype of each kind of device for which autocast is on; older versions have functions of their own for each."""
    kinds = ("cpu", "cuda", "xpu", private_device())
    try:
        return {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds if _autocasts(kind)}
    except (AttributeError, TypeError):
        asked: Any = torch
        on = {"cpu": asked.is_autocast_cpu_enabled(), "cuda": asked.is_autocast_enabled()}
        told = {"cpu": asked.get_autocast_cpu_dtype, "cuda": asked.get_autocast_gpu_dtype}
        return {kind: str(told[kind]()) for kind, is_on in on.items() if is_on}


def _untold() -> bool:
    raise NotImplementedError("this torch does not say")


cpu_reduces_in_half = _ask("torch._C._get_cpu_allow_fp16_reduced_precision_reduction", _untold)
nnpack_enabled = _ask("torch._C._get_nnpack_enabled", _untold)


def with_autograd() -> contextlib.AbstractContextManager[Any]:
    """Autograd is on below here, also inside a kernel. Raises NotImplementedError where torch has no way to say so."""
    names = ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView")
    if not chooses_keys or None in map(dispatch_key, names):
        raise NotImplementedError("this torch does not let anybody choose the keys of a kernel")
    keys = core._dispatch_tls_local_exclude_set()
    for name in names:
        keys = keys.remove(dispatch_key(name))
    guard: contextlib.AbstractContextManager[Any] = core._ForceDispatchKeyGuard(
        core._dispatch_tls_local_include_set(), keys
    )
    return guard


class Dynamo(NamedTuple):
    """`space` holds the functions by which torch.compile switches itself on."""

    space: ModuleType
    set_eval_frame: Any
    skip_code: Any


def dynamo() -> Dynamo | None:
    """What there is of torch.compile, if it is loaded: it is heavy, and whoever imports it for us would change the program."""
    space: Any = sys.modules.get("torch._dynamo.eval_frame")
    frames = _found("torch._C._dynamo.eval_frame") if space is not None else None
    found = Dynamo(
        space, getattr(frames, "set_eval_frame", None), getattr(space, "skip_code", getattr(frames, "skip_code", None))
    )
    return None if None in found else found


def compiles_backward() -> bool:
    """Whether a backward pass of this thread would be compiled first."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


def compile_callbacks() -> Any:
    """What tells of the begin and the end of compiling; None where nothing does."""
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
