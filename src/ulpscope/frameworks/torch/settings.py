"""The settings of a process and its thread that change numbers, as the manifest tells them: `environment.flags`.

Asking changes nothing, imports nothing and wakes no device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ulpscope.frameworks.interruption import is_meant_for_the_program
from ulpscope.frameworks.torch import internals

# Those of a `with` block: what holds when a step ends says nothing of what held in it.
OF_BLOCKS = frozenset({"autocast", "grad_enabled"})


def settings() -> dict[str, Any]:
    """Every setting as it is now; a text that begins with `unknown` where this version cannot say."""
    return {name: told(ask) for name, ask in _SETTINGS.items()}


def told(ask: Callable[[], Any]) -> Any:
    """An answer of torch; a text where this version cannot say."""
    try:
        return ask()
    except Exception as error:  # a border: each version says in its own way that it does not know
        if is_meant_for_the_program(error):
            raise
        return f"unknown ({type(error).__name__})"


def float32_products() -> dict[str, str]:
    """What factors of products of float32 are rounded to, by device and kind: `ieee` (not at all), `tf32` or `bf16`.

    The older switches raise where a program uses the newer ones, so they are asked only where there are no newer ones."""
    backends: Any = torch.backends
    kinds = {
        "cuda matmul": (backends.cuda, "matmul"),
        "cuda conv": (backends.cudnn, "conv"),
        "cuda rnn": (backends.cudnn, "rnn"),
        "cpu matmul": (backends.mkldnn, "matmul"),
        "cpu conv": (backends.mkldnn, "conv"),
        "cpu rnn": (backends.mkldnn, "rnn"),
    }
    found = {}
    for name, (backend, kind) in kinds.items():
        try:
            newer = getattr(getattr(backend, kind, None), "fp32_precision", None)
        except AssertionError:  # as older versions say that they have no such switch
            newer = None
        if newer is None:
            older = backends.cuda.matmul if name == "cuda matmul" else backends.cudnn if "cuda" in name else None
            newer = "tf32" if older is not None and older.allow_tf32 else "ieee"
        found[name] = "ieee" if newer == "none" else newer
    return found


def _flushes() -> bool:
    """Whether this thread takes numbers below the smallest normal one for zero. Torch can be told to, not asked."""
    return sys.float_info.min / 2 == 0.0


_cuda: Any = torch.backends.cuda
_more: Any = torch.backends
_utils: Any = torch.utils
_SETTINGS: dict[str, Callable[[], Any]] = {
    "float32_products": float32_products,
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "fp16_reduced_precision_reduction": lambda: str(_cuda.matmul.allow_fp16_reduced_precision_reduction),
    "bf16_reduced_precision_reduction": lambda: str(_cuda.matmul.allow_bf16_reduced_precision_reduction),
    "fp16_accumulation": lambda: bool(_cuda.matmul.allow_fp16_accumulation),
    "sdpa_reduced_precision_reduction": lambda: bool(_cuda.fp16_bf16_reduction_math_sdp_allowed()),
    "cpu_fp16_reduced_precision_reduction": internals.cpu_reduces_in_half,
    "flush_denormals": _flushes,
    "cudnn_enabled": lambda: bool(_more.cudnn.enabled),
    "cudnn_benchmark": lambda: bool(_more.cudnn.benchmark),
    "cudnn_deterministic": lambda: bool(_more.cudnn.deterministic),
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill_uninitialized_memory": lambda: bool(_utils.deterministic.fill_uninitialized_memory),
    "default_dtype": lambda: str(torch.get_default_dtype()),
    "autocast": internals.autocast,
    "sdpa": lambda: {
        "flash": told(lambda: _cuda.flash_sdp_enabled()),
        "memory_efficient": told(lambda: _cuda.mem_efficient_sdp_enabled()),
        "math": told(lambda: _cuda.math_sdp_enabled()),
        "cudnn": told(lambda: _cuda.cudnn_sdp_enabled()),
    },
    "attention_fastpath": lambda: bool(_more.mha.get_fastpath_enabled()),
    "blas": lambda: _name(_cuda.preferred_blas_library),
    "linalg": lambda: _name(_cuda.preferred_linalg_library),
    "mkldnn": lambda: bool(_more.mkldnn.enabled),
    "mkldnn_deterministic": lambda: bool(_more.mkldnn.deterministic),
    "nnpack": internals.nnpack_enabled,
    "opt_einsum": lambda: str(_more.opt_einsum.strategy) if _more.opt_einsum.enabled else "off",
    "quantized_engine": lambda: str(_more.quantized.engine),
    "cpu_capability": lambda: _more.cpu.get_cpu_capability(),
    "num_threads": torch.get_num_threads,
    "grad_enabled": torch.is_grad_enabled,
}


def _name(library: Callable[[], Any]) -> str:
    # ROCm's asks the device what it is.
    return "not asked" if torch.version.hip else str(library()).rpartition(".")[2].lower()


# Of a list of names, since what differs is told: one that only says where to log would be noise.
_VARIABLES = (
    "ASCEND_LAUNCH_BLOCKING",
    "ATEN_CPU_CAPABILITY",
    "CLOSE_MATMUL_K_SHIFT",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CUDNN_DETERMINISTIC",
    "DISABLE_ADDMM_CUDA_LT",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "FLASH_ATTENTION_DETERMINISTIC",
    "HCCL_DETERMINISTIC",
    "LCCL_DETERMINISTIC",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_JIT",
    "PYTORCH_NPU_ALLOC_CONF",
    "TASK_QUEUE_ENABLE",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
    "TORCHINDUCTOR_FALLBACK_RANDOM",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CUDNN_SDPA_ENABLED",
    "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_LINALG_PREFER_CUSOLVER",
    "XLA_FLAGS",
)


def variables() -> dict[str, str]:
    """The environment variables that change numbers, and are set."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}
