"""All taps of PyTorch together: what a session switches on and off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ulpscope.frameworks.base import Observer, OpenCall, Sink, ThreadState
from ulpscope.frameworks.interruption import is_left_over
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.backward import BackwardTap
from ulpscope.frameworks.torch.codeswap import watching
from ulpscope.frameworks.torch.collective_tap import CollectiveTap
from ulpscope.frameworks.torch.compiled import CompiledTap
from ulpscope.frameworks.torch.custom_functions import CustomFunctionTap
from ulpscope.frameworks.torch.dispatch_tap import DispatchTap, KernelMode
from ulpscope.frameworks.torch.foreign import ForeignTap
from ulpscope.frameworks.torch.function_tap import FunctionTap
from ulpscope.frameworks.torch.module_tap import ModuleNames, ModuleTap, drop_ended, parameters_of
from ulpscope.frameworks.torch.npu import Around
from ulpscope.frameworks.torch.optimizer_tap import OptimizerTap
from ulpscope.frameworks.torch.summary import TorchMeasurer
from ulpscope.frameworks.torch.threads import ThreadTap
from ulpscope.frameworks.torch.warning_lines import WarningTap
from ulpscope.model.errors import CaptureError
from ulpscope.model.records import Level, Phase

NAME = "pytorch"


def models_of(model: Any) -> list[Module]:
    """One model, several, or none, as a list. Raises CaptureError for anything else."""
    items = [] if model is None else list(model) if isinstance(model, list | tuple) else [model]
    wrong = next((item for item in items if not isinstance(item, Module)), None)
    if wrong is not None:
        raise CaptureError(f"model must be a torch.nn.Module or a list of them, not {type(wrong).__name__}")
    return items


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return bool(internals.backward_pass() != -1)


def is_data_worker() -> bool:
    """Whether this process only loads data for another."""
    return torch.utils.data.get_worker_info() is not None


def _are_on_cuda(models: Sequence[Module]) -> bool:
    if not torch.cuda.is_initialized():
        return False
    with internals.no_functions():
        first = next(parameters_of(models), None)
        return first is None or first.is_cuda


def watch_gradient(value: Any, then: Callable[[Any], None]) -> bool:
    """Calls `then` with the gradient of a tensor when it arrives; False when it will have none."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return False

    def hook(grad: Tensor) -> None:
        with internals.no_functions():
            then(grad)

    value.register_hook(hook)
    return True


class TorchProbe:
    """Installs the taps that a level needs, in an order in which each can be removed again."""

    def __init__(
        self,
        observer: Observer,
        measurer: TorchMeasurer,
        *,
        level: Level,
        models: Sequence[Module],
        names: ModuleNames | None = None,
        below: Callable[[OpenCall, Phase], bool] | None = None,
        vendor: Around | None = None,
        as_msprobe: bool = False,
        kernel_mode: Callable[[ThreadState], Any] | None = None,
        released: Callable[[Any], None] | None = None,
    ) -> None:
        internals.check()
        kernels = level is Level.KERNEL and vendor is None
        if level is Level.MODULE and _are_on_cuda(models):
            measurer.measure_always()  # a kernel more is cheaper than a mode that torch tells of every call
        names = names or ModuleNames()
        names.join(models)
        self.backward = BackwardTap(observer, node_order=as_msprobe)
        self.modules = ModuleTap(
            observer,
            self.backward,
            names=names,
            records=level is not Level.OP,
            new_thread=lambda state: self._threads.enter(state),
            tidy=lambda state, caller: self._threads.tidy(state, caller),
        )
        self._functions = FunctionTap(
            observer,
            measurer,
            self.backward,
            records=level is not Level.MODULE,
            kernels=kernels,
            vendor=vendor,
            as_msprobe=as_msprobe,
        )
        dispatch = DispatchTap(observer, measurer, below)
        self._threads = ThreadTap(
            observer,
            self._functions.mode if level is not Level.MODULE or measurer.reuses else None,
            (kernel_mode or (lambda state: KernelMode(dispatch, state))) if kernels else None,
            self.backward.finish_pass,
        )
        self._custom = CustomFunctionTap(observer)
        self._compiled = CompiledTap(
            observer, self._suspend, self._resume, begins=self._region_begins, ended=self._custom.end_region
        )
        self._threads.compiled_backward = self._compiled.run_backward
        self._suspended = 0
        self._kernels = kernels
        self._collectives = CollectiveTap(observer, measurer)
        self._optimizers = OptimizerTap(observer)
        self._foreign = ForeignTap(observer, measurer)
        self._measurer = measurer
        self._released = released
        self._warnings = WarningTap()
        self._rewriting = [
            *watching(torch.utils, "swap_tensors", self._swap_tensors, observer.trouble),
            *watching(torch.cuda.CUDAGraph, "replay", self._replay_graph, observer.trouble),
        ]
        self._installed: list[Any] = []
        # What dynamo must not see.
        self._pausing: list[Any] = [
            self.modules,
            self._collectives,
            self._foreign,
            self._custom,
            self._threads,
            self._warnings,
        ]

    def install(self) -> None:
        self.remove()  # nothing, unless an exception of a signal handler came between
        try:
            taps: list[Any] = [
                self.modules,
                self._collectives,
                self._optimizers,
                self._foreign,
                self._custom,
                self._threads,
                self._compiled,
                *self._rewriting,
                self._warnings,
            ]
            for tap in taps:
                self._installed.append(tap)
                tap.install()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        while self._installed:
            self._installed[-1].remove()  # which may be interrupted, and is asked again then
            self._installed.pop()

    def _swap_tensors(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch exchanges two tensors only if nothing else refers to them."""
        for value in (*args, *kwargs.values()):
            self._measurer.release(value)
            self.modules.release(value)
            if self._released is not None:
                self._released(value)
        del value
        return original(*args, **kwargs)

    def _replay_graph(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A graph writes into its tensors without a trace: nothing that was measured is known any more."""
        if self._kernels:
            self.modules.observer.missed("a CUDA graph was replayed: its kernels are not seen")
        try:
            return original(*args, **kwargs)
        finally:
            self._trust_nothing()

    def _trust_nothing(self) -> None:
        observer = self.modules.observer
        state = observer.state()
        entered = observer.enter(state)
        try:
            self._measurer.begin_window()
        finally:
            if entered:
                observer.leave(state)

    def _region_begins(self, state: ThreadState) -> None:
        # Its modules are not called, as far as anybody sees: without this nobody would look out for their gradients.
        self.modules.watch_below(state.modules[-1][0] if state.modules else "")
        self._custom.begin_region(state)

    def _suspend(self, state: ThreadState) -> None:
        """A compiled region begins: this thread's modes go, and with the first region all exchanged code."""
        self._threads.suspend(state)
        self._suspended += 1
        if self._suspended == 1:
            for tap in self._pausing:
                tap.pause()
            self._compiled.pause()

    def _resume(self, state: ThreadState) -> None:
        self._suspended -= 1
        if self._suspended == 0:
            self._compiled.unpause()
            for tap in self._pausing:
                tap.unpause()
            if self._foreign.any:  # it may have been called in the region
                self._trust_nothing()
        self._threads.resume(state)

    def tidy(self, caller: FrameType | None) -> None:
        """Puts right what an exception of a signal handler may have left on this thread."""
        state = self.modules.observer.state()
        is_left_over(state, caller)
        drop_ended(state, caller)
        self._threads.tidy(state, caller)

    def rise(self) -> None:
        """The modes that are on play the device: kernels are what they make of them."""
        self._threads.rise(self.modules.observer.state())

    def watch_alone(self, module: Module | None, name: str) -> None:
        """Records one module as a whole and nothing else, or everything again."""
        self.modules.alone = None if module is None else (module, name)
        self._functions.quiet = module is not None

    def finish_step(self) -> None:
        """Closes everything that is still open, before a dump ends."""
        self.backward.finish_pass(all_threads=True)
        self.modules.finish_step()
        self._collectives.finish_step()
        self._optimizers.finish_step()
        self._custom.finish_step()


def make_measurer(sink: Sink, **options: bool) -> TorchMeasurer:
    return TorchMeasurer(sink, **options)
