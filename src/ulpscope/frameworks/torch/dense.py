"""Plain tensors that stand for odd ones: sparse, nested, quantized, distributed, or larger than anybody can read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ENORMOUS = 1 << 32


def untouchable(value: Tensor) -> str | None:
    """Why a tensor must not be asked for a number, if so: its sizes may be symbols, of which each number that is asked for becomes
    a constant of the graph that is being traced."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "inside a torch.func transform (vmap, grad): no memory of its own"
    if torch._is_functional_tensor(value):
        return "a functional tensor: being traced"
    name = type(value).__name__
    if name in ("FakeTensor", "FunctionalTensor"):
        return f"a {name}: traced, not computed"
    if value.is_meta:
        return "a meta tensor: it has no data"
    if not value.is_nested and has_symbols(value):
        return "its sizes are symbols: traced, not computed"
    return None


def has_symbols(value: Tensor) -> bool:
    """Whether a size of a tensor that is not nested is no number."""
    return any(type(size) is not int for size in value.shape)


def is_enormous(value: Tensor) -> bool:
    """Whether a view has more elements than anybody can read: one number expanded to a trillion costs nothing to make."""
    return value.numel() > _ENORMOUS and value.layout is torch.strided and 0 in value.stride()


def unexpanded(value: Tensor) -> Tensor:
    """A view without the repetitions that `expand` made."""
    stride = value.stride()
    if 0 not in stride:
        return value
    return value.as_strided([1 if not step else size for size, step in zip(value.shape, stride, strict=True)], stride)


def dense_form(value: Tensor) -> tuple[Tensor | str, dict[str, Any]]:
    """A plain tensor that stands for an odd one and what must be said of it; or a reason instead of the tensor."""
    reason = untouchable(value)
    if reason is not None:
        return reason, {}
    name = type(value).__name__
    local = getattr(value, "_local_tensor", None)
    if name == "DTensor" and isinstance(local, Tensor):
        extra = {"placements": [str(item) for item in value.placements], "local_shape": list(local.shape)}  # type: ignore[attr-defined]
        return local.detach(), extra
    if value.is_nested and value.layout is torch.jagged:
        return value._values.detach(), {}  # type: ignore[attr-defined]
    if value.is_nested:
        parts = [part.reshape(-1) for part in value.unbind()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=value.dtype), {}
    if value.layout in (torch.sparse_coo,):
        return value._values().detach().contiguous(), {"nnz": int(value._nnz())}
    if value.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        stored = value.values().detach().contiguous()
        return stored, {"nnz": int(stored.shape[0])}
    if value.is_mkldnn:
        return value.to_dense(), {}
    if value.is_quantized:
        return value.dequantize(), {"quantized": str(value.qscheme())}
    if hasattr(value, "__tensor_flatten__"):
        return f"a wrapper without memory of its own ({name})", {}
    plain = value.detach()
    if is_enormous(plain):
        plain = unexpanded(plain)
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.device.type not in ("cpu", "cuda"):
        plain = plain.to("cpu")
    return plain.as_subclass(Tensor), {}
