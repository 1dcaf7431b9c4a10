"""What updates parameters: optimizers, known from when they are constructed, and programs that do it by hand."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch import Tensor
from torch.nn import Module

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.module_tap import parameters_of

# An optimizer that made no update in so many steps is not waited for.
_IDLE = 16


class Optimizers:
    """Those that are alive, and which of them a step still waits for."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._numbers = itertools.count()
        # Of this step.
        self._waited: frozenset[int] = frozenset()
        self._turns: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, optimizer: Any, step: int) -> _Known:
        key = id(optimizer)
        known = self._known.get(key)
        if known is None or known.reference() is not optimizer:
            known = self._known[key] = _Known(weakref.ref(optimizer, lambda ref: self._forget(key, ref)))
            known.number, known.last = next(self._numbers), step
        return known

    def take_turn(self, optimizer: Any, *, is_first: bool, step: int) -> None:
        """An optimizer made its update; the first of a step says who else is waited for."""
        known = self.add(optimizer, step)
        known.last = step
        if is_first:
            self._turns = set()
            self._waited = frozenset(each.number for each in [*self._known.values()] if step - each.last <= _IDLE)
        self._turns.add(known.number)

    def has_had_turn(self, optimizer: Any) -> bool:
        known = self._known.get(id(optimizer))
        return known is not None and known.reference() is optimizer and known.number in self._turns

    def had_their_turn(self) -> bool:
        """Whether nobody is left that this step waits for."""
        left = self._waited - self._turns
        return not left or not left.intersection(each.number for each in [*self._known.values()])

    def _forget(self, key: int, reference: weakref.ref[Any]) -> None:
        known = self._known.get(key)
        if known is not None and known.reference is reference:
            del self._known[key]


class _Known:
    __slots__ = ("last", "number", "reference")

    def __init__(self, reference: weakref.ref[Any]) -> None:
        self.reference = reference
        self.number = self.last = 0


class ByHand:
    """Updates without an optimizer, told from gradients that are being accumulated: these leave everything as backward left it."""

    def __init__(self) -> None:
        self._models: dict[int, weakref.ref[Module]] = {}
        self._marks: list[Any] = []
        # Writes through `.data` raise no version; where none was ever seen to be told, each backward counts.
        self._are_told = False

    def add(self, model: Module) -> None:
        """A model that is being trained."""
        key = id(model)
        if key not in self._models:
            self._models[key] = weakref.ref(model, lambda _: self._models.pop(key, None))

    def after_backward(self) -> None:
        self._marks = self._look()

    def has_written(self) -> bool:
        """Whether anybody wrote to a parameter, or took its gradient away, since the last backward pass."""
        is_written = self._look() != self._marks
        self._are_told |= is_written
        return is_written or not self._are_told

    def _look(self) -> list[Any]:
        models = [model for reference in [*self._models.values()] if (model := reference()) is not None]
        with internals.no_functions():
            return [_mark(parameter) for parameter in parameters_of(models)]


def _mark(parameter: Tensor) -> Any:
    if parameter.is_inference() or not parameter.is_leaf:
        return None
    gradient = parameter.grad
    return parameter._version, gradient is None, 0 if gradient is None else gradient._version
