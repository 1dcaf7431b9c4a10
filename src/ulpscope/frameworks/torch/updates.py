"""What updates parameters: optimizers, known from when they are constructed, and programs that do it by hand."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch import Tensor
from torch.nn import Module

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.forwards import Heard, leaves_of
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
    """Updates without an optimizer: a backward pass was made, and then a parameter was written or all gradients taken away. Where
    they are only being summed, everything stays."""

    def __init__(self) -> None:
        self._models: dict[int, weakref.ref[Module]] = {}
        self._versions: list[int] = []
        self._was_passed = False
        # Writes through `.data` raise no version; until an update was seen to be told, each backward pass counts for one.
        self._are_told = False

    def follow(self, model: Module, then: Heard | None) -> Heard:
        """What wants to hear of the result of a model that may be trained. A hook on its graph tells when a backward pass comes."""
        key = id(model)
        if key not in self._models:
            self._models[key] = weakref.ref(model, lambda _: self._models.pop(key, None))
            self._versions = self._look()[0]

        def hear(result: Any) -> None:
            with internals.no_functions():
                for leaf in leaves_of(result):
                    if isinstance(leaf, Tensor) and not internals.is_transformed(leaf) and leaf.grad_fn is not None:
                        leaf.grad_fn.register_prehook(self._passes)
            if then is not None:
                then(result)

        return hear

    def _passes(self, gradients: Any) -> None:
        self._was_passed = True

    def has_updated(self) -> bool:
        """Whether an update was made since this was last asked."""
        if not self._was_passed:
            return False
        versions, has_gradients = self._look()
        is_told = versions != self._versions or not has_gradients
        self._versions = versions
        self._are_told |= is_told
        self._was_passed = self._are_told and not is_told
        return not self._was_passed

    def _look(self) -> tuple[list[int], bool]:
        """The versions of all parameters, and whether any has a gradient."""
        models = [model for reference in [*self._models.values()] if (model := reference()) is not None]
        with internals.no_functions():
            own = [value for value in parameters_of(models) if value.is_leaf and not value.is_inference()]
            return [value._version for value in own], any(value.grad is not None for value in own)
