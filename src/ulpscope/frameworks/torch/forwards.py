"""What a forward is part of: training, evaluation or generation, and where it was called from."""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.module_tap import parameters_of
from ulpscope.model.records import Stretch

Heard = Callable[[Any], None]
_OURS = str(Path(__file__).parents[2]) + os.sep
_FRAMES = 32
_LEAVES = 64
_LISTS = (tuple, list)
_NO_STATE = (bool, int, float, complex, str, bytes, Module)


class Model:
    """What is known of a module that was called by no other."""

    __slots__ = ("generates", "has_grown", "is_trained", "number", "reference", "results", "shapes", "size")

    def __init__(self, reference: weakref.ref[Module], number: int) -> None:
        self.reference = reference
        self.number = number
        self.size = 0
        self.is_trained = self.generates = self.has_grown = False
        # Of its last forward outside of training.
        self.results: list[weakref.ref[Any]] = []
        self.shapes: list[tuple[int, ...]] = []

    def hear(self, result: Any) -> None:
        self.results = []
        for leaf in leaves_of(result):
            try:
                self.results.append(weakref.ref(leaf))
            except TypeError:  # nothing that anybody could come back with
                continue


class Forwards:
    """Models by what they were seen to do. A module without parameters is none."""

    def __init__(self) -> None:
        self._models: dict[int, Model] = {}
        self._numbers = itertools.count()

    def model(self, module: Module) -> Model:
        key = id(module)
        known = self._models.get(key)
        if known is None or known.reference() is not module:
            reference = weakref.ref(module, lambda ref: self._forget(key, ref))
            known = self._models[key] = Model(reference, next(self._numbers))
        if not known.size:  # it may get some when it is first called
            with internals.no_functions():
                known.size = sum(_count(parameter) for parameter in parameters_of([module]))
        return known

    def kind(
        self, module: Module, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], *, trains: bool
    ) -> tuple[Stretch, Heard | None]:
        """What a forward is, and who wants to hear of its result."""
        if torch.is_grad_enabled():
            if getattr(module, "training", False):
                model.is_trained = True
            if model.is_trained == getattr(module, "training", False) and (trains or model.is_trained):
                model.results, model.shapes = [], []
                return Stretch.TRAINING, None
        with internals.no_functions():
            kind = Stretch.GENERATION if _continues(model, args, kwargs) else Stretch.EVALUATION
        return kind, model.hear

    def _forget(self, key: int, reference: weakref.ref[Module]) -> None:
        known = self._models.get(key)
        if known is not None and known.reference is reference:
            del self._models[key]


def place_of_call(number: int) -> int:
    """A number for the model that is called and the places in the program from which the call comes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    place = number
    for _ in range(_FRAMES):
        if frame is None:
            break
        place = hash((place, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return place


def _continues(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a model goes on with something that it gave last (a cache, a hidden state), or with its own input and one token more."""
    leaves = list(leaves_of((args, kwargs)))
    before, model.shapes = model.shapes, [_shape(leaf) for leaf in leaves]
    given = {id(leaf) for reference in model.results if (leaf := reference()) is not None}
    if any(id(leaf) in given for leaf in leaves):
        return True
    # A window that is full grows no more.
    grows = len(before) == len(leaves) and any(map(_is_one_longer, before, model.shapes))
    model.has_grown = grows or (model.has_grown and before == model.shapes)
    return model.has_grown


def _is_one_longer(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    steps = [after - first for first, after in zip(before, now, strict=False)]
    return len(before) == len(now) and sorted(steps)[-1:] == [1] and sum(map(abs, steps)) == 1


def _shape(leaf: Any) -> tuple[int, ...]:
    """Of whole numbers, as tokens are; of anything else there is none."""
    if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.is_nested:
        return ()
    return tuple(leaf.shape)


def leaves_of(value: Any) -> Iterator[Any]:
    """The objects that a value holds, the first ones of many."""
    todo, count = [value], 0
    while todo and count < _LEAVES:
        count += 1
        thing = todo.pop()
        if isinstance(thing, _LISTS):
            todo += reversed(thing[:_LEAVES])
        elif isinstance(thing, dict):  # not by its own methods, which may be the program's
            todo += list(dict.values(thing))[:_LEAVES]
        elif thing is not None and not isinstance(thing, _NO_STATE):
            yield thing


def _count(parameter: Tensor) -> int:
    # One that is not made yet has no size.
    return 1 if type(parameter).__name__ in ("UninitializedParameter", "UninitializedBuffer") else parameter.numel()
