"""Two folders of tensors, pair by pair: the metrics of `metrics`, and those that only the kernel comparison of CANN has.

What could not be compared is told with the reason; one damaged file leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.compare.metrics import Contrast, contrast_bits
from ulpscope.model.errors import DumpError
from ulpscope.store.tensor_file import StoredTensor
from ulpscope.store.tensor_folder import FoundTensor, Key, TensorFolder

Array = NDArray[Any]

_LEAST = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True)
class Measured:
    """How a pair differs. `spread` is mean and standard deviation of the reference, then of the target."""

    contrast: Contrast
    divergence: float
    spread: tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The tensor of one key in both folders; None where it is not. `reason` says why `measured` is None."""

    key: Key
    reference: FoundTensor | None
    target: FoundTensor | None
    dtypes: tuple[str, str] = ("", "")
    shape: tuple[int, ...] | None = None
    measured: Measured | None = None
    reason: str = ""


def compare_folders(reference: TensorFolder, target: TensorFolder) -> Iterator[TensorPair]:
    """Every pair in the order of the target, then what only the reference has."""
    for key in dict.fromkeys([*target.tensors, *reference.tensors]):
        yield _pair(key, reference, target)
    for name in dict.fromkeys([*target.problems, *reference.problems]):
        if not any(name == key[0] for key in (*target.tensors, *reference.tensors)):
            yield TensorPair((name, ""), None, None, reason=_problems(name, reference, target))


def _pair(key: Key, reference: TensorFolder, target: TensorFolder) -> TensorPair:
    ours, theirs = reference.tensors.get(key), target.tensors.get(key)
    if ours is None or theirs is None:
        lacking = reference if ours is None else target
        reason = _problems(key[0], reference, target) or f"{lacking.path} has no such tensor"
        return TensorPair(key, ours, theirs, reason=reason)
    try:
        r, t = ours.read(), theirs.read()
    except DumpError as error:
        return TensorPair(key, ours, theirs, reason=str(error))
    dtypes = (r.dtype.name, t.dtype.name)
    if r.shape != t.shape:
        return TensorPair(key, ours, theirs, dtypes, reason=f"the shapes are {r.shape} and {t.shape}")
    if not r.count:
        return TensorPair(key, ours, theirs, dtypes, r.shape, reason="there is no element to compare")
    return TensorPair(key, ours, theirs, dtypes, r.shape, measured(r, t))


def _problems(name: str, reference: TensorFolder, target: TensorFolder) -> str:
    return "; ".join(side.problems[name] for side in (reference, target) if name in side.problems)


def measured(reference: StoredTensor, target: StoredTensor) -> Measured:
    """How two tensors of one shape differ."""
    found = contrast_bits(reference.raw, reference.dtype, target.raw, target.dtype)
    r, t = (_flat(each) for each in (reference, target))
    with np.errstate(all="ignore"):
        spread = [(float(np.mean(side)), float(np.std(side))) for side in (r, t)]
        divergence = _divergence(t, r)
    return Measured(found, divergence, (spread[0], spread[1]))


def _flat(tensor: StoredTensor) -> Array:
    """As float64; of complex numbers the modulus."""
    values = tensor.values().reshape(-1)
    return (np.abs(values) if values.dtype.kind == "c" else values).astype(np.float64)


def _divergence(p: Array, q: Array) -> float:
    """Kullback-Leibler divergence of q from p, each taken to [0, 1] and to the sum 1, as CANN defines it; nan if any is nan."""
    p, q = _distribution(p), _distribution(q)
    found = float(np.sum(p * np.log(p / q)))
    return 0.0 if abs(found) < _LEAST else found


def _distribution(x: Array) -> Array:
    low, high = float(x.min()), float(x.max())
    scaled = (x - low) / (high - low) if high != low else x
    kept = np.maximum(scaled, _LEAST)
    found: Array = kept / kept.sum()
    return found
