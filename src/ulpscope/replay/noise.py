"""Calls run twice with a small change between: which results change more than they should.

A `Noise` stands between start and stop like a capture, and gives `rows` of what was found. The seeds' rule, a ratio of the two
results, and ours, what float64 and rounding explain, stand side by side in every row.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ulpscope.frameworks.base import Forward, OpenCall, ThreadState
from ulpscope.frameworks.torch import devices
from ulpscope.frameworks.torch.perturb import float_tensors
from ulpscope.frameworks.torch.perturb_probe import perturb_probe
from ulpscope.frameworks.torch.perturb_run import Perturber, Twice
from ulpscope.frameworks.torch.perturb_score import (
    FLIPPED,
    Excess,
    agrees_with_cpu,
    excesses,
    ratio,
    threshold,
)
from ulpscope.frameworks.torch.replay_probe import in_torch, models_of
from ulpscope.frameworks.torch.step_watch import StepWatch
from ulpscope.model.names import call_text
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import CallId, PathStep, Phase, Role
from ulpscope.replay.calls import CallNames
from ulpscope.store.noise import NoiseRow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NoiseConfig:
    """What is run twice, and how.

    mode              improve_precision, add_noise, no_change, bit_noise, change_value, to_cpu
    exact, parts      names of calls with their numbers; parts of names; empty: all
    fix               the second result takes the place of the first
    backward          gradients are compared, not results
    explain           judge every call by float64, at several runs each, and not only those that the ratio finds
    preheat_steps     steps in which limits adapt to each function; 0: none
    max_samples       calls of one function that are looked at in such a step
    """

    mode: str = "improve_precision"
    exact: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    fix: bool = False
    backward: bool = False
    explain: bool = True
    preheat_steps: int = 0
    max_samples: int = 20
    steps: Callable[[int], bool] = lambda step: True
    ranks: Callable[[int], bool] = lambda rank: True


class Noise:
    """Runs the calls of this process twice; `emit` gets a row for each result that is not as it should be, and `first` is
    told of the first call that is judged."""

    def __init__(
        self,
        config: NoiseConfig,
        emit: Callable[[NoiseRow], None],
        *,
        model: Any = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.current_step = 0
        self.started = False
        self._emit = emit
        self._first = first
        self._models = models_of(model)
        self._pid = os.getpid()
        self._calls = _Calls()
        self._perturber = Perturber(
            self._calls,
            self,
            mode=config.mode,
            fix=config.fix,
            backward=config.backward,
        )
        self._calls.perturber = self._perturber
        self._probe: Any = None
        self._steps: StepWatch | None = None
        # By name of a function: the limit that what is explained has shown to be needed, and how often it was seen.
        self._limits: defaultdict[str, float] = defaultdict(float)
        self._samples: Counter[str] = Counter()

    def start(self, model: Any = None) -> None:
        """Begins, or goes on. A second start changes nothing."""
        rank, _ = devices.rank_and_world()
        if self.started or not self.config.steps(self.current_step) or not self.config.ranks(rank):
            return
        if self._probe is None:
            self._models += [item for item in models_of(model) if not any(item is known for known in self._models)]
            self._probe = perturb_probe(
                self._calls,
                self._perturber,
                self._models,
                backward=self.config.backward,
            )
            if self._steps is not None:
                self._probe.modules.steps = self._steps
        self._calls.active = self.started = True
        self._probe.install()
        atexit.register(self.close)

    def stop(self) -> None:
        """Ends, and leaves torch as it was; start may follow."""
        if self.started and os.getpid() == self._pid:
            self._calls.active = self.started = False
            self._probe.remove()

    def step(self, number: int | None = None) -> None:
        """Ends a step: calls are counted anew. The next has this number, or the one that follows."""
        with self._calls.gate:
            self.current_step = self.current_step + 1 if number is None else number
            self._calls.begin_step()
            self._perturber.begin_step()
            self._samples.clear()
        if self.started and not self.config.steps(self.current_step):
            self.stop()

    def close(self) -> None:
        """Stops for good. Called at exit too."""
        self.stop()
        atexit.unregister(self.close)

    def wait_for_forward(self) -> None:
        """Begins with the first forward of any module, and finds the steps by itself."""
        self._steps = StepWatch(self.step, self._first_forward, self._calls.trouble)
        self._steps.install()

    def _first_forward(self) -> None:
        assert self._steps is not None
        self._steps.remove()
        self.start()

    # --- judging ------------------------------------------------------------------------------------------------

    @property
    def _is_preheating(self) -> bool:
        return self.current_step < self.config.preheat_steps

    def wants(self, call: OpenCall) -> bool:
        config = self.config
        name = f"{call.kind}.{call.name}"
        if config.exact and not {f"{name}.{call.index}", f"{name}.{call.index}.{self._phase.value}"} & {*config.exact}:
            return False
        if config.parts and not any(part in f"{name}.{call.index}" for part in config.parts):
            return False
        if self._is_preheating:
            self._samples[name] += 1
            return self._samples[name] <= config.max_samples
        return True

    @property
    def _phase(self) -> Phase:
        return Phase.BACKWARD if self.config.backward else Phase.FORWARD

    def judge(self, twice: Twice) -> None:
        if self._first is not None:
            self._first()
            self._first = None
        function = f"{twice.call.kind}.{twice.call.name}"
        ratios = [
            1.0 if again is None else ratio(found, again, backward=twice.backward)
            for found, again in zip(twice.results, twice.again, strict=True)
        ]
        wrong = [self._is_wrong(function, *each) for each in zip(twice.results, twice.again, ratios, strict=True)]
        explained: list[Excess] = [Excess(None, "not asked for")] * len(wrong)
        if self.config.explain or any(wrong):
            explained = excesses(
                twice.run, twice.given, twice.changed, twice.results, twice.again, inside=_inside(twice)
            )
        for at, (is_wrong, excess) in enumerate(zip(wrong, explained, strict=True)):
            if self._is_preheating and is_wrong and excess.value is not None and excess.is_explained:
                self._learn(function, ratios[at])
            elif is_wrong or not excess.is_explained:
                self._emit(self._row(twice, at, ratios[at], is_wrong, excess))

    def _is_wrong(self, function: str, found: Any, again: Any, quotient: float | str) -> bool:
        if again is None:
            return False
        if self.config.mode == "to_cpu":
            return not agrees_with_cpu(found, again)
        limit = max(threshold(found.dtype, self.config.mode), self._limits[function])
        return quotient == FLIPPED or not float(quotient) <= limit

    def _learn(self, function: str, quotient: float | str) -> None:
        if not isinstance(quotient, str):
            self._limits[function] = max(self._limits[function], quotient)

    def _row(self, twice: Twice, at: int, quotient: float | str, is_wrong: bool, excess: Excess) -> NoiseRow:
        call = twice.call
        dtype, shape = _first_float(twice.given)
        source = self._calls.names.source(call.stack)
        return NoiseRow(
            rank=devices.rank_and_world()[0],
            pert_mode=self.config.mode,
            stage=self._phase.value,
            step=self.current_step,
            api_name=call_text(CallId(call.kind, call.name, call.index, self._phase)),
            max_rel=quotient if isinstance(quotient, str) else quotient - 1.0,
            dtype=dtype,
            shape=shape,
            output_index=at if len(twice.results) > 1 else None,
            inconsistent=is_wrong,
            excess=excess.value,
            reason=excess.reason,
            source=None if source is None else f"{source[0]}:{source[1]} in {source[2]}",
        )


def _inside(twice: Twice) -> Any:
    """What the call works with before it may cancel: gradients that came in, times what it was given, or the arguments of a
    call known for it. Attention takes inner products of both first, over the last axis."""
    if not twice.backward:
        return twice.given if Trait.CANCELS_INSIDE in traits(twice.call.name) else ()
    (args, gradients), kwargs = twice.given
    given = [leaf for leaf in float_tensors((args, kwargs)) if leaf.numel()]
    scale = max((float(leaf.detach().abs().max()) for leaf in given), default=1.0)
    if twice.call.name == "scaled_dot_product_attention" and given:
        scale *= max(1.0, math.sqrt(given[0].shape[-1]) / 4)
    return [gradient * scale if 1 < scale < math.inf else gradient for gradient in gradients]


def _first_float(given: Any) -> tuple[str, str]:
    first = float_tensors(given)[0]
    return str(first.dtype), str(tuple(first.shape))


class _Calls:
    """The observer: names of calls, and the gradients of those whose backward is run again."""

    def __init__(self) -> None:
        self.fast = None
        self.names = CallNames(in_torch)
        self.perturber: Perturber | None = None
        self.state = self.names.state
        self.enter = self.names.enter
        self.leave = self.names.leave
        self.note = self.names.note
        self.missed = self.names.missed
        self.trouble = self.names.trouble
        self.close_raised = self.names.close_raised
        self.begin_step = self.names.begin_step
        self._gradients: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}

    @property
    def active(self) -> bool:
        return self.names.active

    @active.setter
    def active(self, on: bool) -> None:
        self.names.active = on

    @property
    def gate(self) -> Any:
        return self.names.gate

    def open_call(
        self, state: ThreadState, kind: str, name: str, frame: FrameType | None, *, phase: Phase = Phase.FORWARD
    ) -> OpenCall:
        return self.names.open_call(state, kind, name, frame, phase=phase)

    def open_backward(self, state: ThreadState, forward: Forward, again: int) -> OpenCall:
        call = self.names.open_backward(state, forward, again)
        self._gradients[id(call)] = {}, {}
        return call

    def show(
        self,
        call: OpenCall,
        role: Role,
        path: tuple[PathStep, ...],
        value: Any,
        *,
        unread: str | None = None,
        produced: bool = False,
    ) -> None:
        held = self._gradients.get(id(call))
        if held is not None:
            held[role is Role.OUTPUT][path or (0,)] = value

    def close_call(self, call: OpenCall) -> None:
        held = self._gradients.pop(id(call), None)
        if held is not None and self.perturber is not None:
            self.perturber.gradients((call.kind, call.name, call.index), *held)

    def wants_backward(self, call: OpenCall) -> bool:
        return self.perturber is not None and self.perturber.wants_backward(call)
