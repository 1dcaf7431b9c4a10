"""What a check of one call found: numbers and texts, so that results travel between processes and are written without torch."""

from __future__ import annotations

from dataclasses import dataclass

from ulpscope.replay.standards import Explained, Judgement, Status, worst


@dataclass(frozen=True, slots=True)
class OutputResult:
    """One output or gradient. `explained` is there under the rule of rounding."""

    name: str
    reference_dtype: str
    dtype: str
    shape: tuple[int, ...] | None
    judgement: Judgement
    explained: Explained | None = None
    recorded: bool = False

    @property
    def status(self) -> Status:
        return self.judgement.status if self.explained is None else self.explained.status


@dataclass(frozen=True, slots=True)
class CallResult:
    """One API call, `Functional.conv2d.0`: the worst of its outputs, and of its gradients where it had a backward."""

    name: str
    forward: Status
    backward: Status | None
    message: str
    outputs: tuple[OutputResult, ...] = ()
    real: bool = True

    @property
    def status(self) -> Status:
        return worst(status for status in (self.forward, self.backward) if status is not None)


@dataclass(frozen=True, slots=True)
class WrongCall:
    """A call that rounding does not explain."""

    step: int
    rank: int
    name: str
    message: str
    outputs: tuple[OutputResult, ...]


@dataclass(frozen=True, slots=True)
class OpsCheck:
    """How many recorded calls were judged against float64, which are wrong, worst first, and why others were not run."""

    run: str
    device: str
    calls: int
    judged: int
    recorded: int
    made_inputs: int
    wrong: tuple[WrongCall, ...]
    not_run: dict[str, int]
    missing: int

    @property
    def exit_code(self) -> int:
        return 1 if self.wrong else 3 if self.missing else 0 if self.judged else 4
