"""Watching the loss and the output of every step, with all weights moved by one unit in the last place before the first.

A nudged run is as right as any other. Hooks are torch's own; the generators of the program are not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.codeswap import CodeSwap
from ulpscope.frameworks.torch.dense import untouchable
from ulpscope.frameworks.torch.devices import rank_and_world
from ulpscope.frameworks.torch.forwards import Heard
from ulpscope.frameworks.torch.replay_origins import sketch
from ulpscope.frameworks.torch.step_watch import StepWatch

log = logging.getLogger(__name__)
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_PARTS = 16
Emit = Callable[[int, int, float | None, tuple[float, ...]], None]


def nudged(value: Tensor, generator: torch.Generator) -> Tensor:
    """Every normal number moved to a neighbour, up or down by chance."""
    bits = value.detach().contiguous().view(_BITS[value.dtype])
    moves = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    moved = (bits + moves.to(bits.device, bits.dtype)).view(value.dtype)
    info = torch.finfo(value.dtype)
    keeps = (value.abs() <= info.smallest_normal) | ~(value.abs() < info.max)
    return torch.where(keeps, value.detach(), moved)


class DriftWatch:
    """Emits step, rank, loss and a sketch of the output of each step; nudges the weights with `seed`, if there is one."""

    def __init__(self, emit: Emit, seed: int | None) -> None:
        self._emit = emit
        self._seed = seed
        self._depth = 0
        self._step = 0
        self._loss: float | None = None
        self._output: tuple[float, ...] = ()
        self._started = self._broken = False
        self._heard: Heard | None = None
        self._hooks: list[RemovableHandle] = []
        self._steps = StepWatch(self.end_step, lambda: None, self._give_up)
        self._backward = CodeSwap(torch.autograd.backward, self._around_backward)

    def install(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]
        self._backward.install()

    def remove(self) -> None:
        """Ends the last step and leaves torch as it was."""
        self.end_step()
        for hook in self._hooks:
            hook.remove()
        self._backward.remove()
        self._steps.close()

    def end_step(self) -> None:
        """Emits the step that ends, if anything was seen of it."""
        if not self._broken and (self._loss is not None or self._output):
            self._emit(self._step, rank_and_world()[0], self._loss, self._output)
        self._step += 1
        self._loss, self._output = None, ()

    def _before(self, module: Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self._broken:
            return
        try:
            self._heard = self._steps.outermost(module, args, {})
            if not self._started and self._seed is not None:
                self._nudge(module, self._seed)
            self._started = True
        except Exception as error:  # the hook border
            self._give_up("a forward", error)

    def _give_up(self, where: str, error: BaseException) -> None:
        """A track that is not true is worse than none: the program goes on, nothing more is written."""
        self._broken = True
        log.warning("the drift of this run is not watched: %s: %s: %s", where, type(error).__name__, error)

    def _nudge(self, module: Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dtype in _BITS and parameter.numel():
                    parameter.copy_(nudged(parameter, generator))

    def _after(self, module: Module, args: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth or self._broken:
            return
        try:
            if self._heard is not None:
                self._heard(result)
            if self._output:
                return
            floats = [
                leaf for leaf in internals.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ]
            if floats and untouchable(floats[0]) is None and floats[0].numel():
                with torch.no_grad():
                    self._output = sketch(floats[0].detach().double().flatten(), min(_PARTS, floats[0].numel()))
        except Exception as error:  # the hook border
            self._give_up("a backward pass", error)

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0] if args else kwargs.get("tensors")
        first = tensors if isinstance(tensors, Tensor) else next(iter(tensors or ()), None)
        if isinstance(first, Tensor) and first.numel() == 1:
            self._loss = (self._loss or 0.0) + float(first.detach())
        return original(*args, **kwargs)
