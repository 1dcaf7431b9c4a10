"""Plain tensors that stand for odd ones: sparse, nested, quantized, distributed, or larger than anybody can read."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals

_ENORMOUS = 1 << 32


def untouchable(value: Tensor) -> str | None:
    """Why a tensor must not be asked for a number, if so: its sizes may be symbols, of which each number that is asked for becomes
    a constant of the graph that is being traced."""
    if internals.is_transformed(value):
        return "inside a torch.func transform (vmap, grad): no memory of its own"
    if internals.is_functional(value):
        return "a functional tensor: being traced"
    name = type(value).__name__
    if name in ("FakeTensor", "FunctionalTensor"):
        return f"a {name}: traced, not computed"
    if internals.is_lazy(value):
        return "a parameter that has no shape yet"
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


# Tensors of indices by layout: the names of the attributes that give them.
_INDICES = {
    torch.sparse_coo: ("_indices",),
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@dataclasses.dataclass(slots=True)
class Dense:
    """What stands for an odd tensor: a plain one with its elements, what must be said of it, and other plain ones without which
    these elements mean nothing. `values` is the reason where there is none."""

    values: Tensor | str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def dense_form(value: Tensor) -> Dense:
    """Plain tensors that stand for an odd one. The tensor itself is left as it is: an uncoalesced one stays so."""
    reason = untouchable(value)
    if reason is not None:
        return _below_transforms(value, reason) if internals.is_transformed(value) else Dense(reason)
    name = type(value).__name__
    local = getattr(value, "_local_tensor", None)
    if name == "DTensor" and isinstance(local, Tensor):
        found = dense_form(local)
        found.facts["placements"] = [str(item) for item in value.placements]  # type: ignore[attr-defined]
        if not has_symbols(local):
            found.facts["local_shape"] = list(local.shape)
        return found
    if name == "MaskedTensor" and isinstance(value.__dict__.get("_masked_data"), Tensor):
        return _masked(value.__dict__["_masked_data"], value.__dict__["_masked_mask"])
    if value.is_nested:
        return _jagged(value) if value.layout is torch.jagged else _nested(value)
    if value.layout in _INDICES:
        stored = value._values() if value.layout is torch.sparse_coo else value.values()
        parts = {each.lstrip("_"): getattr(value, each)() for each in _INDICES[value.layout]}
        return _with_parts(stored, {"nnz": value._nnz()}, parts)
    if value.is_mkldnn:
        return Dense(value.to_dense())
    if value.is_quantized:
        return _quantized(value)
    if hasattr(value, "__tensor_flatten__"):
        return Dense(f"a wrapper without memory of its own ({name})")
    if value._is_zerotensor():  # without memory; what it holds is known all the same
        return Dense(torch.zeros(value.shape, dtype=value.dtype, device=value.device))
    plain = value.detach()
    if is_enormous(plain):
        plain = unexpanded(plain)
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.device.type not in ("cpu", "cuda"):
        plain = plain.to("cpu")
    return Dense(plain.as_subclass(Tensor))


def _below_transforms(value: Tensor, reason: str) -> Dense:
    """All that a transform of torch.func computes at once: with the dimensions that it added. No operator may run here: the transform
    would take it for the program's."""
    whole, dims = internals.below_transforms(value)
    if whole is None or type(whole) is not Tensor or untouchable(whole) is not None:
        return Dense(reason)
    odd = whole.is_conj() or whole.is_neg() or whole._is_zerotensor() or whole.is_quantized or is_enormous(whole)
    if odd or whole.layout is not torch.strided or whole.device.type not in ("cpu", "cuda"):
        return Dense(reason)
    return Dense(whole, {"batch_dims": dims} if dims else {})


def _with_parts(values: Tensor, facts: dict[str, Any], parts: dict[str, Tensor]) -> Dense:
    """Of tensors that may be odd themselves, or traced."""
    found = dense_form(values)
    if isinstance(found.values, Tensor):
        found.values = found.values.contiguous()
    found.facts |= facts
    for name, part in parts.items():
        plain = dense_form(part).values
        if isinstance(plain, str):
            found.values = plain
        else:
            found.parts[name] = plain
    return found


def _jagged(value: Any) -> Dense:
    parts = {"offsets": value._offsets} | ({} if value._lengths is None else {"lengths": value._lengths})
    return _with_parts(value._values, {"ragged": int(value._ragged_idx)}, parts)


def _nested(value: Tensor) -> Dense:
    rows = [row.reshape(-1) for row in value.unbind()]
    joined = torch.cat(rows) if rows else torch.empty(0, dtype=value.dtype)
    return _with_parts(joined, {}, {"sizes": value._nested_tensor_size()})


def _masked(data: Tensor, mask: Tensor) -> Dense:
    """What is masked has a value of no meaning: 0 stands for it."""
    if data.layout is not torch.strided:
        return Dense("a masked tensor of another layout")
    return _with_parts(
        torch.where(mask, data, torch.zeros((), dtype=data.dtype, device=data.device)), {"masked": True}, {"mask": mask}
    )


def _quantized(value: Tensor) -> Dense:
    facts: dict[str, Any] = {"quantized": str(value.qscheme())}
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        facts |= {"scale": value.q_scale(), "zero_point": value.q_zero_point()}
        return Dense(value.dequantize(), facts)
    facts["axis"] = value.q_per_channel_axis()
    parts = {"scales": value.q_per_channel_scales(), "zero_points": value.q_per_channel_zero_points()}
    return _with_parts(value.dequantize(), facts, parts)
