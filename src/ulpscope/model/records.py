"""The words of ulpscope: plain frozen data that every stage shares. No tensors, no framework, no behaviour."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

PathStep = str | int
# Why a value has no measure that nobody has written.
UNWRITTEN = "uninitialised memory: its content means nothing"


# Phase and Role are texts as well because they are keys on the hot path: a text hashes in C, an enum in Python.
class Phase(str, enum.Enum):
    """Which part of a training step a call belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    PARAMETERS_GRAD = "parameters_grad"
    STEP = "step"
    DEBUG = "debug"


class Stretch(str, enum.Enum):
    """What a step does where nobody marked it."""

    PREPARATION = "preparation"
    TRAINING = "training"
    EVALUATION = "evaluation"
    GENERATION = "generation"


class Role(str, enum.Enum):
    """What a value is to its call."""

    INPUT = "input"
    OUTPUT = "output"
    PARAMETERS = "parameters"


class Level(enum.Enum):
    """How deep a capture looks: modules, outermost API calls, both, or every kernel."""

    MODULE = "module"
    OP = "op"
    MIX = "mix"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class CallId:
    """One call by name: "the 3rd forward of Functional.conv2d". `again` counts repeats of the same backward."""

    kind: str
    name: str
    index: int
    phase: Phase
    again: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """Where in a call a value sits: input 0, keyword mask, element 1 of output 0, parameter weight."""

    role: Role
    path: tuple[PathStep, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """Summary of one tensor. `finite_*` look at finite elements alone; the others follow torch: NaN wins, then inf."""

    numel: int
    finite_max: float | int
    finite_min: float | int
    finite_sum: float
    finite_norm: float
    nan_count: int = 0
    posinf_count: int = 0
    neginf_count: int = 0
    zero_count: int = 0

    counted: ClassVar[bool] = True
    """Whether the counts are known; they are not where another tool gave the numbers."""

    @property
    def finite_count(self) -> int:
        return self.numel - self.nan_count - self.posinf_count - self.neginf_count

    @property
    def max(self) -> float | int | None:
        """Largest element; nan if any is nan; None for an empty tensor."""
        if not self.numel:
            return None
        if self.nan_count:
            return math.nan
        if self.posinf_count:
            return math.inf
        return self.finite_max if self.finite_count else -math.inf

    @property
    def min(self) -> float | int | None:
        """Smallest element; nan if any is nan; None for an empty tensor."""
        if not self.numel:
            return None
        if self.nan_count:
            return math.nan
        if self.neginf_count:
            return -math.inf
        return self.finite_min if self.finite_count else math.inf

    @property
    def mean(self) -> float | None:
        """Arithmetic mean of all elements; None for an empty tensor."""
        if not self.numel:
            return None
        if self.nan_count or (self.posinf_count and self.neginf_count):
            return math.nan
        if self.posinf_count:
            return math.inf
        if self.neginf_count:
            return -math.inf
        return self.finite_sum / self.numel

    @property
    def norm(self) -> float | None:
        """L2 norm of all elements; None for an empty tensor."""
        if not self.numel:
            return None
        if self.nan_count:
            return math.nan
        if self.posinf_count or self.neginf_count:
            return math.inf
        return self.finite_norm


@dataclass(frozen=True, slots=True)
class ToldStats:
    """What another tool said of a tensor. A number it did not give is None, and so is not known; counts never are.

    What the finite elements alone have stands in for the numbers that are finite, nan for those that are not."""

    numel: int
    max: float | int | None
    min: float | int | None
    mean: float | int | None
    norm: float | int | None

    counted: ClassVar[bool] = False

    @property
    def finite_max(self) -> float | int:
        return _finite(self.max)

    @property
    def finite_min(self) -> float | int:
        return _finite(self.min)

    @property
    def finite_sum(self) -> float:
        return _finite(self.mean) * self.numel

    @property
    def finite_norm(self) -> float:
        return _finite(self.norm)

    @property
    def nan_count(self) -> int:
        return 0

    posinf_count = neginf_count = zero_count = nan_count


Summary = Stats | ToldStats


def _finite(number: float | int | None) -> float | int:
    return number if number is not None and math.isfinite(number) else math.nan


@dataclass(frozen=True, slots=True)
class Payload:
    """Key of a tensor's exact bits in its dump."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Value:
    """One argument or result without its elements. `error` says why something could not be measured. `parts` are other tensors
    without which its elements mean nothing, by name: the indices of a sparse one, the offsets of a ragged one. The checksum covers
    them."""

    slot: Slot
    type: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    device: str | None = None
    requires_grad: bool | None = None
    stats: Summary | None = None
    checksum: int | None = None
    scalar: Any = None
    payload: Payload | None = None
    measure: int | None = None
    error: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    parts: tuple[tuple[str, Value], ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a Python stack; `library` is True for frames inside installed packages."""

    file: str
    line: int
    function: str
    text: str
    library: bool


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One finished call. `seq` is execution order within the step; `error` is set when the call raised."""

    id: CallId
    seq: int
    parent: int | None
    origin: int | None
    module: str
    values: tuple[Value, ...]
    stack: int | None
    thread: int
    recomputed: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """About one step of one rank. `notes` tell what was seen but not recorded, and why."""

    format: int
    framework: str
    level: str
    step: int
    rank: int
    world_size: int
    state: str
    config: dict[str, Any]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    # Forwards of each kind of stretch; empty where steps were marked by hand.
    stretches: dict[str, int] = field(default_factory=dict)
