"""Finding the steps of a program that was not written for us; docs/guide.md says what a step is.

A step has had its turn when an update of parameters was made in it, and ends with the forward that begins the next round of the loop.
A loop is told by where it calls from: whoever calls from a place of this step that came before the update has gone round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.codeswap import CodeSwap, Trouble, watching
from ulpscope.frameworks.torch.forwards import Forwards, Heard, place_of_call
from ulpscope.frameworks.torch.updates import ByHand, Optimizers
from ulpscope.model.errors import OverflowStop
from ulpscope.model.records import Stretch

# So many forwards of an inference are a step each; from then on so many are one.
_INFERENCES = 100


class _Thread(threading.local):
    is_inside = told = False
    heard: Heard | None = None


class StepWatch:
    """Calls `next_step` between two steps, `first_forward` when the first module runs, and `first_model` when one with parameters does.

    While a capture records, its module tap tells `outermost`; while it does not, `install` makes us see for ourselves.
    """

    def __init__(
        self,
        next_step: Callable[[], None],
        first_forward: Callable[[], None] | None,
        trouble: Trouble,
        *,
        first_model: Callable[[], None] | None = None,
    ) -> None:
        self._next_step = next_step
        self._first_forward = first_forward
        self._first_model = first_model
        self._local = _Thread()
        self._trouble = trouble
        self._forwards = Forwards()
        self._optimizers = Optimizers()
        self._by_hand = ByHand()
        self._largest = 0
        self._number = 0
        self._has_updated = False
        self._begin()
        self._installed = False
        self._swap = CodeSwap(Module.__call__, self._around)
        self._swaps = [
            *watching(Optimizer, "__init__", self._around_optimizer, trouble),
            *watching(internals.GradScaler, "step", self._around_scaler, trouble),
        ]
        for swap in self._swaps:
            swap.install()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def install(self) -> None:
        if not self._installed:
            self._installed = True
            self._swap.install()

    def remove(self) -> None:
        if self._installed:
            self._installed = False
            self._swap.remove()

    def close(self) -> None:
        """Gives everything back."""
        self.remove()
        for hook in self._hooks:
            hook.remove()
        for swap in self._swaps:
            swap.remove()

    def _begin(self) -> None:
        # Of the step that is under way: how many forwards there were of each kind, how many updates and on which thread the last,
        # and how many had been made when a forward first came from a place.
        self._counts: dict[str, int] = {}
        self._prepared = 0
        self._updates = self._thread = 0
        self._places: dict[int, int] = {}
        self._trained = self._inferred = 0
        self._prepares = True

    def _end(self) -> None:
        self._number += 1
        try:
            self._next_step()
        finally:
            self._begin()

    @property
    def stretches(self) -> dict[str, int]:
        """How many forwards of each kind there were in this step so far."""
        return {**({Stretch.PREPARATION.value: self._prepared} if self._prepared else {}), **self._counts}

    # --- forwards -----------------------------------------------------------------------------------------------

    def outermost(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Heard | None:
        """A module begins its forward, called by no other. What is returned wants to hear of the result."""
        local = self._local
        if local.told:
            local.told = False
            return local.heard
        if self._first_forward is not None:
            first, self._first_forward = self._first_forward, None
            first()
        own = module.__dict__
        if not own.get("_parameters") and not own.get("_modules"):  # the usual case of many small calls
            self._prepared += self._prepares
            return None
        if internals.backward_pass() != -1:  # it is computed again
            return None
        heard = None
        model = self._forwards.model(module)
        if model.size:
            if self._first_model is not None:
                begin, self._first_model = self._first_model, None
                begin()
            if not self._optimizers and self._by_hand.has_updated():
                self._updated()
            trains = self._has_updated or bool(self._optimizers)
            kind, heard = self._forwards.kind(module, model, args, kwargs, trains=trains)
            if trains or kind is not Stretch.GENERATION:
                self._end_before(model.size, place_of_call(model.number), kind, trains=trains)
            self._prepares = False
            if kind is Stretch.GENERATION and not model.generates and self._counts.get(Stretch.EVALUATION.value):
                self._count(Stretch.EVALUATION, -1)  # the last one was the first of these
                self._count(Stretch.GENERATION)
            model.generates = kind is Stretch.GENERATION
            self._count(kind)
            if kind is Stretch.TRAINING:
                self._trained += 1
            if not self._optimizers and torch.is_grad_enabled():
                heard = self._by_hand.follow(module, heard)
        else:
            self._prepared += self._prepares
        return heard

    def _end_before(self, size: int, place: int, kind: Stretch, *, trains: bool) -> None:
        """Ends the step, if this forward begins another."""
        if trains or kind is Stretch.TRAINING:
            if self._updates and self._is_over(place, kind):
                self._end()
        elif size >= self._largest:
            is_full = self._number < _INFERENCES or self._inferred >= _INFERENCES
            if self._inferred and is_full and size == self._largest:
                self._end()
            self._largest = size
            self._inferred += 1
        self._places.setdefault(place, self._updates)

    def _is_over(self, place: int, kind: Stretch) -> bool:
        if threading.get_ident() != self._thread:
            return False
        if self._places.get(place, self._updates) < self._updates:
            return True
        return kind is Stretch.TRAINING and self._optimizers.had_their_turn()

    def _count(self, kind: Stretch, more: int = 1) -> None:
        count = self._counts.get(kind.value, 0) + more
        if count:
            self._counts[kind.value] = count
        else:
            del self._counts[kind.value]

    def _around(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local = self._local
        if local.is_inside:
            return original(*args, **kwargs)
        heard = self._guarded(self.outermost, args[0], args[1:], kwargs)
        if not self._installed:
            # The new step is recorded: the call goes through the module tap, which need not tell us again.
            return self.tell_once(heard, args, kwargs)
        local.is_inside = True
        try:
            result = original(*args, **kwargs)
        finally:
            local.is_inside = False
        if heard is not None:
            self._guarded(heard, result)
        return result

    def _guarded(self, then: Callable[..., Any], *told: Any) -> Any:
        try:
            return then(*told)
        except OverflowStop:
            raise
        except Exception as error:  # the hook border
            self._trouble("torch.nn.Module.__call__", error)  # raises what is meant for the program

    def tell_once(self, heard: Heard | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module by whoever watches modules now, which need not tell of it again."""
        local = self._local
        local.told, local.heard = True, heard
        try:
            return Module.__call__(*args, **kwargs)
        finally:
            local.told, local.heard = False, None

    # --- updates ------------------------------------------------------------------------------------------------

    def _updated(self) -> None:
        self._updates += 1
        self._thread = threading.get_ident()
        self._has_updated = self._prepares = True

    def _had_turn(self, optimizer: Any) -> None:
        self._optimizers.take_turn(optimizer, is_first=not self._updates, step=self._number)
        self._updated()
        if not self._trained and self._optimizers.had_their_turn():
            self._end()  # no model will tell of the next round

    def _around_optimizer(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        self._optimizers.add(args[0], self._number)
        return result

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._updates and self._optimizers.has_had_turn(optimizer):
            self._end()

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._had_turn(optimizer)

    def _around_scaler(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gradients that overflowed are left out: the optimizer had its turn."""
        before = self._number, self._updates
        result = original(*args, **kwargs)
        if (self._number, self._updates) == before:
            self._had_turn(args[1] if len(args) > 1 else kwargs["optimizer"])
        return result
