"""What the errors of two recorded runs do to the loss: the data for `analyze.attribution`, one call at a time.

Needs dumps with tensors at a level that has calls of the API, forward and backward: kernel, op or mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.frameworks.torch.api_arguments import KINDS
from ulpscope.frameworks.torch.replay_again import introduced
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text
from ulpscope.model.records import CallId, CallRecord, Payload, Phase, Role, Value
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_run

_APIS = KINDS - {"Aten"}
Parts = dict[tuple[Any, ...], tuple[Any, Any]]  # path -> error or value, gradient


@dataclass(frozen=True, slots=True)
class Effect:
    """One call in both runs: for every result or weight the arrays of reference and target; None where one is unknown."""

    call: str
    module: str
    what: str
    pairs: list[tuple[tuple[Any, Any], tuple[Any, Any]]] | None


@dataclass(frozen=True, slots=True)
class Gap:
    """The first step whose losses differ."""

    step: int
    rank: int
    reference: float
    target: float
    effects: Iterator[Effect]


def loss_gap(reference: Path, target: Path) -> Gap | None:
    """The first step in which both runs have a loss, and not the same; None where there is none."""
    sides = [
        {
            (dump.manifest.rank, dump.manifest.step): dump
            for dump in open_run(run)
            if dump.manifest.config.get("tensors")
        }
        for run in (reference, target)
    ]
    for rank, step in sorted(sides[0].keys() & sides[1].keys()):
        steps = [_Step(side[rank, step]) for side in sides]
        losses = [each.loss() for each in steps]
        if losses[0] is not None and losses[1] is not None and losses[0] != losses[1]:
            return Gap(step, rank, losses[0], losses[1], _effects(*steps))
    return None


class _Step:
    """One dump: its forward calls of the API, and the backward of each."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.made: set[Payload] = set()
        self.forward: dict[CallId, CallRecord] = {}
        self.backward: dict[CallId, CallRecord] = {}
        for call in dump.calls():
            if call.id.kind not in _APIS or call.error is not None:
                continue
            # What runs after a backward pass began has not made its loss: the optimizer, the next part of a batch.
            if call.id.phase is Phase.FORWARD and not self.backward:
                self.forward[call.id] = call
                self.made |= {value.payload for value in _tensors(call, Role.OUTPUT) if value.payload is not None}
            elif call.id.phase is Phase.BACKWARD and not call.id.again:
                self.backward[CallId(call.id.kind, call.id.name, call.id.index, Phase.FORWARD)] = call

    def loss(self) -> float | None:
        """The result of the call where the backward pass began: its gradient is one."""
        for name, call in self.backward.items():
            given = _tensors(call, Role.INPUT)
            forward = self.forward.get(name)
            if forward is None or len(given) != 1 or given[0].payload is None or given[0].shape not in ((), (1,)):
                continue
            results = [value for value in _tensors(forward, Role.OUTPUT) if value.payload is not None]
            if len(results) == 1 and float(self.dump.load(given[0]).ravel()[0]) == 1:
                return float(self.dump.load(results[0]).ravel()[0])
        return None

    def errors(self, name: CallId) -> Parts:
        """Errors that a call introduced, with their gradients. Raises DumpError."""
        found = introduced(self.forward[name], self.dump.load_bits)
        return self._with_gradients(name, Role.INPUT, lambda path: found.get(path))

    def weights(self, name: CallId) -> Parts:
        """What a call read and no call has made, with its gradients."""
        read = {
            value.slot.path: value
            for value in _tensors(self.forward[name], Role.INPUT)
            if value.requires_grad and value.payload is not None and value.payload not in self.made
        }
        return self._with_gradients(name, Role.OUTPUT, lambda path: self._wide(read[path]) if path in read else None)

    def _with_gradients(self, name: CallId, role: Role, item: Callable[[Any], Any]) -> Parts:
        found = {}
        for value in _tensors(self.backward[name], role):
            if value.payload is None or "complex" in (value.dtype or ""):
                continue
            at = item(value.slot.path)
            if at is not None:
                found[value.slot.path] = (at, self._wide(value))
        return found

    def _wide(self, value: Value) -> Any:
        return np.asarray(self.dump.load(value), dtype=np.float64)


def _effects(reference: _Step, target: _Step) -> Iterator[Effect]:
    for name, call in target.forward.items():
        if not any(value.requires_grad for value in _tensors(call, Role.OUTPUT)):
            continue
        text = call_text(name)
        sides = (reference, target)
        if not all(name in side.forward and name in side.backward for side in sides):
            yield Effect(text, call.module, "introduced", None)
            continue
        weights = [side.weights(name) for side in sides]
        if weights[0] and weights[0].keys() == weights[1].keys():
            yield Effect(text, call.module, "weights", [(weights[0][path], weights[1][path]) for path in weights[0]])
        try:
            errors = [side.errors(name) for side in sides]
        except DumpError:
            yield Effect(text, call.module, "introduced", None)
            continue
        common = [path for path in errors[0] if path in errors[1]]
        yield Effect(text, call.module, "introduced", [(errors[0][path], errors[1][path]) for path in common])


def _tensors(call: CallRecord, role: Role) -> list[Value]:
    return [value for value in call.values if value.slot.role is role and value.is_tensor]
