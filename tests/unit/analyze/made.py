"""Comparisons made by hand: calls whose values have the errors that a test gives them."""

from __future__ import annotations

from typing import Any

from ulpscope.compare.comparison import CallComparison, Code, Comparison, Evidence, How, Level, Match, Verdict
from ulpscope.compare.verdict import rounding_of, scalar_verdict, tensor_verdict
from ulpscope.model.records import CallId, CallRecord, Phase, Role, Slot, Stats, Value

NONE = Match(None, None, How.NAME)
FLOAT32 = 2.0**-24


def tensor(
    role: str,
    at: Any = 0,
    error: float | None = 0.0,
    *,
    measure: int | None = None,
    size: float = 1.0,
    numel: int = 100,
    nan: int = 0,
    evidence: Evidence = Evidence.ELEMENTS,
    requires_grad: bool = False,
    dtype: str = "torch.float32",
) -> Comparison:
    """A tensor of `numel` elements with the root mean square `size`; the target's has `nan` NaN among them."""
    slot = Slot(Role(role), at if isinstance(at, tuple) else (at,))
    norm = size * numel**0.5

    def side(wild: int) -> Value:
        stats = Stats(numel, size, -size, 0.0, norm, nan_count=wild)
        shape = (numel,)
        return Value(
            slot,
            "torch.Tensor",
            dtype,
            shape,
            stats=stats,
            measure=measure,
            requires_grad=requires_grad,
            checksum=wild + 1000 * (measure or 0),
        )

    left, right = side(0), side(nan)
    verdict = tensor_verdict(left, right, evidence, error)
    return Comparison(NONE, slot, left, right, evidence, verdict, error, rounding_of(left, right))


def argument(at: Any, left: Any, right: Any, kind: str = "float") -> Comparison:
    slot = Slot(Role.INPUT, at if isinstance(at, tuple) else (at,))
    one, two = Value(slot, kind, scalar=left), Value(slot, kind, scalar=right)
    return Comparison(NONE, slot, one, two, Evidence.SCALAR, scalar_verdict(one, two))


def unmeasured(role: str, at: Any = 0, why: str = "on a device that is gone") -> Comparison:
    slot = Slot(Role(role), (at,))
    value = Value(slot, "torch.Tensor", "torch.float32", (100,), error=why)
    verdict = Verdict(Level.UNKNOWN, (Code.NOT_MEASURED,), why)
    return Comparison(NONE, slot, value, value, Evidence.NOTHING, verdict)


def call(
    name: str,
    seq: int,
    *values: Comparison,
    kind: str = "Torch",
    index: int = 0,
    phase: Phase = Phase.FORWARD,
    parent: int | None = None,
    only: str = "",
) -> CallComparison:
    """A matched call, or one that is `only` in "reference" or "target"."""
    found = CallRecord(CallId(kind, name, index, phase), seq, parent, None, "", (), None, 0)
    left = None if only == "target" else found
    right = None if only == "reference" else found
    match = Match(left, right, How.ALONE if only else How.NAME, f"only in the {only}" if only else "")
    return CallComparison(match, values)
