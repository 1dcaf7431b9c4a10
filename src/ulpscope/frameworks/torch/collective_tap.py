"""Watching torch.distributed. Its functions are plain Python; their code is exchanged, the functions stay.

An asynchronous call is complete when it is waited for: its outputs are read then.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.base import Observer, OpenCall
from ulpscope.frameworks.torch import internals, tensors
from ulpscope.frameworks.torch.codeswap import CodeSwap, watching
from ulpscope.frameworks.torch.summary import TorchMeasurer
from ulpscope.model.operators import ROLES_OF_COLLECTIVES
from ulpscope.model.records import PathStep, Role

KIND = "Distributed"


class CollectiveTap:
    """Opens and closes communication calls."""

    def __init__(self, observer: Observer, measurer: TorchMeasurer) -> None:
        self.observer = observer
        self.measurer = measurer
        self._swaps: list[CodeSwap] = []
        self._joining: CodeSwap | None = None
        # Those that are watched now: where no processes are joined yet, only the function that joins them.
        self._watched: list[CodeSwap] = []
        self._waiting: dict[int, tuple[OpenCall, list[tuple[tensors.Path, weakref.ref[Tensor]]]]] = {}
        self._wait: Any = None

    def install(self) -> None:
        if not torch.distributed.is_available():
            return
        joining = torch.distributed.init_process_group
        if torch.distributed.is_initialized() or not isinstance(joining, types.FunctionType):
            self._watch()
        else:
            self._joining = self._joining or CodeSwap(joining, self._join, self.observer.trouble)
            self._watched = [self._joining]
            self.unpause()

    def _join(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        if self._wait is None and self.observer.active:
            self._watch()
        return result

    def _watch(self) -> None:
        if not self._swaps:
            space = torch.distributed.distributed_c10d
            for name in ROLES_OF_COLLECTIVES:
                self._swaps += watching(space, name, self._around(name), self.observer.trouble)
        self._watched = [*self._watched, *self._swaps]
        self.unpause()
        work = torch.distributed.Work
        original = self._wait = vars(work)["wait"]
        tap = self

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            tap._complete(id(work))
            return result

        wait.__name__, wait.__doc__ = "wait", work.wait.__doc__
        work.wait = wait  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        self.pause()
        self._watched = []
        if self._wait is not None:
            torch.distributed.Work.wait = self._wait  # type: ignore[method-assign]
            self._wait = None

    def pause(self) -> None:
        """Gives the code back for a while."""
        for swap in self._watched:
            swap.remove()

    def unpause(self) -> None:
        for swap in self._watched:
            swap.install()

    def finish_step(self) -> None:
        """What nobody waited for is closed without its outputs, and says so."""
        for number in list(self._waiting):
            call, _ = self._waiting.pop(number)
            call.note = "asynchronous, never waited for within the step: its outputs are unknown"
            self.observer.close_call(call)

    def _around(self, name: str) -> Callable[..., Any]:
        def around(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            observer = self.observer
            if not observer.active:
                return original(*args, **kwargs)
            state = observer.state()
            if state.busy or state.compiled or any(call.kind == KIND for call in state.calls):
                return original(*args, **kwargs)
            call: OpenCall | None = None
            observer.enter(state)
            try:
                with internals.no_functions():
                    call = observer.open_call(state, KIND, name, sys._getframe(1))
                    if call.wanted:
                        places: list[tuple[PathStep, Any]] = [*enumerate(args), *kwargs.items()]
                        for at, value in places:
                            observer.show(call, Role.INPUT, (at,), _operands(value))
            except Exception as error:  # the hook border
                observer.trouble(f"{KIND}.{name}", error)
            finally:
                observer.leave(state)
            if call is None:
                return original(*args, **kwargs)
            state.calls.append(call)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                observer.close_raised(call, error)
                raise
            finally:
                state.calls.remove(call)
            observer.enter(state)
            try:
                with internals.no_functions():
                    self._finish(name, call, args, kwargs, result)
            except Exception as error:  # the hook border
                observer.trouble(f"{KIND}.{name}", error)
            finally:
                observer.leave(state)
            return result

        return around

    def _finish(self, name: str, call: OpenCall, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        place = ROLES_OF_COLLECTIVES[name].writes
        written: Any = None
        if place is not None:
            written = kwargs.get(place[1], args[place[0]] if len(args) > place[0] else None)
        if name == "batch_isend_irecv":
            written = [item.tensor for item in written or () if item.op is torch.distributed.irecv]
        found = [(path or (0,), leaf) for path, leaf in tensors.leaves(written) if isinstance(leaf, Tensor)]
        self.measurer.distrust(leaf for _, leaf in found)
        if not call.wanted:
            return
        works = result if isinstance(result, list) else [result]
        unfinished = [work for work in works if hasattr(work, "is_completed") and not work.is_completed()]
        if unfinished:
            self._complete(id(unfinished[-1]))
            self._waiting[id(unfinished[-1])] = (call, [(path, weakref.ref(leaf)) for path, leaf in found])
            return
        for path, leaf in found:
            self.observer.show(call, Role.OUTPUT, path, leaf)
        self.observer.close_call(call)

    def _complete(self, number: int) -> None:
        found = self._waiting.pop(number, None)
        if found is None:
            return
        observer, (call, outputs) = self.observer, found
        state = observer.state()
        entered = observer.enter(state)
        try:
            with internals.no_functions():
                for path, reference in outputs:
                    value = reference()
                    observer.show(
                        call,
                        Role.OUTPUT,
                        path,
                        tensors.Unrecordable("torch.Tensor", "freed") if value is None else value,
                    )
                observer.close_call(call)
        except Exception as error:  # the hook border
            observer.trouble(f"{KIND}.{call.name}", error)
        finally:
            if entered:
                observer.leave(state)


def _operands(value: Any) -> Any:
    """Point-to-point operations taken apart into what they move."""
    if isinstance(value, list) and value and isinstance(value[0], torch.distributed.P2POp):
        return [{"op": item.op.__name__, "tensor": item.tensor, "peer": item.peer, "tag": item.tag} for item in value]
    return value
