"""What two values are to each other: identical, rounding, different, or not known. Numbers in, verdict out; reads nothing.

`error` is one number for all kinds of evidence, relative to the reference's size: the L2 norm of the difference, or a
sixteenth of the largest difference in units of the root mean square if that is more, so that one wrong element in a
million is seen. Statistics and sketches show at most as much as that. What has no scale is inf, what is not known None.
"""

from __future__ import annotations

import functools
import math

from ulpscope.compare.comparison import Code, Evidence, Level, Verdict
from ulpscope.compare.metrics import Contrast, relative_l2
from ulpscope.model.dtypes import round_off
from ulpscope.model.records import Summary, Value

# Two correctly rounded results of the same exact number differ by two units at most; four leave room for a second rounding.
ROUNDINGS = 4.0
_PEAK = 16.0
_DEVICE, _DTYPE = "torch.device", "torch.dtype"


def rounding_of(reference: Value, target: Value) -> float:
    """The unit round-off of the coarser of two dtypes; 0 for integers."""
    return _coarser(reference.dtype, target.dtype)


@functools.cache
def _coarser(reference: str | None, target: str | None) -> float:
    return max(round_off(reference), round_off(target))


def elements_error(contrast: Contrast) -> float:
    """The error that all elements show."""
    if not contrast.same_places:
        return math.inf
    if not contrast.differing:
        return 0.0
    error = relative_l2(contrast)
    size = contrast.reference_norm / math.sqrt(contrast.count)
    return max(error, contrast.max_abs / (_PEAK * size)) if size else math.inf


def statistics_error(reference: Summary, target: Summary) -> float | None:
    """The error that statistics show; None where either side says too little."""
    if reference.counted and target.counted:
        counts = [(each.nan_count, each.posinf_count, each.neginf_count) for each in (reference, target)]
        if counts[0] != counts[1]:
            return math.inf
    largest, smallest, mean, norm = reference.max, reference.min, reference.mean, reference.norm
    theirs = target.max, target.min, target.mean, target.norm
    if None not in theirs and (largest, smallest, mean, norm) == theirs:
        return 0.0
    try:
        # All eight known and finite, and none of the scales zero: the usual case, in one go.
        size = max(abs(largest), abs(smallest))  # type: ignore[arg-type]
        apart = max(abs(theirs[0] - largest), abs(theirs[1] - smallest)) / size  # type: ignore[operator]
        mean_apart = abs(theirs[2] - mean) * math.sqrt(reference.numel) / norm  # type: ignore[operator]
        found: float = max(apart, mean_apart, abs(theirs[3] - norm) / norm)  # type: ignore[operator]
        if found < math.inf and reference.numel:
            return found
    except (TypeError, ZeroDivisionError, OverflowError):
        pass
    return _statistics_error((largest, smallest, mean, norm), theirs, reference.numel)


_Number = float | int | None


def _statistics_error(
    ours: tuple[_Number, _Number, _Number, _Number], theirs: tuple[_Number, _Number, _Number, _Number], numel: int
) -> float | None:
    largest, smallest, _, norm = ours
    size = _size(largest, smallest)
    mean_square = size if norm is None or not numel else norm / math.sqrt(numel)
    worst = None
    for here, there, scale in zip(ours, theirs, (size, size, mean_square, norm), strict=True):
        error = _apart(here, there, scale)
        if error is not None and (worst is None or error > worst):
            worst = error
    return worst


# What an odd tensor is besides its elements, and what says that there is more to know of it.
_FORM = ("ragged", "nnz", "stored_shape", "quantized", "scale", "zero_point", "axis", "placements", "local_shape")
_MORE = frozenset(("ragged", "nnz", "quantized"))


def other_form(reference: Value, target: Value) -> str:
    """In what two odd tensors differ besides their elements, in words; empty where in nothing."""
    for name in _FORM:
        ours, theirs = reference.extra.get(name), target.extra.get(name)
        if ours != theirs and not _is_rounding(ours, theirs):
            return f"{name} {_short(ours)} in the reference, {_short(theirs)} in the target"
    names = [[name for name, _ in value.parts] for value in (reference, target)]
    return "" if names[0] == names[1] else f"stored by other parts: {_short(names[0])}, {_short(names[1])}"


def is_partly_known(value: Value) -> bool:
    """Whether a tensor was recorded without something that belongs to it, as older dumps did."""
    return not _MORE.isdisjoint(value.extra) and not value.parts and "scale" not in value.extra


def _is_rounding(reference: object, target: object) -> bool:
    """Of two scales."""
    if not isinstance(reference, float) or not isinstance(target, float):
        return False
    return abs(reference - target) <= ROUNDINGS * round_off("torch.float32") * abs(reference)


def scalar_verdict(reference: Value, target: Value) -> Verdict:
    """The verdict on two values that are no tensors."""
    if reference.type == target.type == _DEVICE:
        same = reference.scalar == target.scalar
        return Verdict(Level.PASS, (Code.IDENTICAL if same else Code.DEVICE,))
    if reference.type == target.type == _DTYPE and reference.scalar != target.scalar:
        return Verdict(Level.WARN, (Code.DTYPE,), f"{reference.scalar} in the reference, {target.scalar} in the target")
    if reference.type != target.type and not _numbers(reference, target):
        return Verdict(Level.FAIL, (Code.TYPE,), f"{reference.type} in the reference, {target.type} in the target")
    if (reference.scalar is None or target.scalar is None) and reference.type != "NoneType":
        return Verdict(Level.UNKNOWN, (Code.NOT_MEASURED,), f"a {reference.type} is not recorded")
    if reference.scalar == target.scalar:
        return _verdict(Code.IDENTICAL, ())
    shown = f"{_short(reference.scalar)} in the reference, {_short(target.scalar)} in the target"
    return Verdict(Level.FAIL, (Code.ARGUMENT,), shown)


def tensor_verdict(reference: Value, target: Value, evidence: Evidence, error: float | None) -> Verdict:
    """The verdict on two tensors of equal shape, of which `error` is known by `evidence`."""
    about: tuple[Code, ...] = ()
    if reference.dtype != target.dtype:
        about = (Code.DTYPE,)
    if reference.requires_grad != target.requires_grad and None not in (reference.requires_grad, target.requires_grad):
        about = (*about, Code.REQUIRES_GRAD)
    if error is None:
        if evidence is Evidence.CHECKSUM:
            return Verdict(Level.FAIL, (Code.DIFFERENT, *about), "the checksums differ")
        why = reference.error or target.error or "one side has no elements, statistics or checksum"
        return Verdict(Level.UNKNOWN, (Code.NOT_MEASURED, *about), why)
    if error == 0.0:
        # Equal statistics and sketches are no proof of equal elements.
        code = Code.IDENTICAL if evidence in (Evidence.ELEMENTS, Evidence.CHECKSUM) else Code.AGREES
    elif error <= ROUNDINGS * rounding_of(reference, target):
        code = Code.ROUNDING
    else:
        code = Code.DIFFERENT
    return _verdict(code, about)


@functools.cache
def _verdict(code: Code, about: tuple[Code, ...]) -> Verdict:
    """The same object for the same verdict: there are few, and they are given for every value."""
    level = Level.FAIL if code is Code.DIFFERENT else Level.WARN if about else Level.PASS
    return Verdict(level, (code, *about))


def _apart(reference: float | int | None, target: float | int | None, scale: float | None) -> float | None:
    """How far two numbers are apart in units of a scale; None where one is not known."""
    if reference is None or target is None:
        return None
    if reference == target or (reference != reference and target != target):
        return 0.0
    if not (math.isfinite(reference) and math.isfinite(target)):
        return math.inf
    if scale is None or not math.isfinite(scale):
        return None
    return abs(target - reference) / scale if scale else math.inf


def _size(*ends: float | int | None) -> float | None:
    known = [abs(number) for number in ends if number is not None and math.isfinite(number)]
    return max(known) if known else None


def _numbers(reference: Value, target: Value) -> bool:
    kinds = {"int", "float"}
    return reference.type in kinds and target.type in kinds


def _short(scalar: object) -> str:
    text = repr(scalar)
    return text if len(text) <= 60 else text[:57] + "..."
