"""Watching every nn.Module call, in every thread, without a hook on any module.

The code of `nn.Module.__call__` is exchanged while a capture is on. What is recorded is what the caller passed and what
the caller got, outside of all of the user's own hooks; an exception unwinds like any other.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from ulpscope.frameworks.base import Observer, OpenCall, ThreadState
from ulpscope.frameworks.interruption import in_our_code, is_left_over
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.backward import BackwardTap
from ulpscope.frameworks.torch.codeswap import Around, CodeSwap, bordered, caller_of
from ulpscope.frameworks.torch.graph_modules import GraphPath, path_of
from ulpscope.frameworks.torch.recursion import STRETCH, Room
from ulpscope.model.names import MODULE
from ulpscope.model.records import Phase, Role
from ulpscope.native import taps

if TYPE_CHECKING:
    from ulpscope.frameworks.torch.step_watch import StepWatch

_tracing = internals.jit_trace
_no_functions = internals.no_functions


class ModuleNames:
    """Paths of modules: those of the models that join, and of any other when it is first called. A path that was given stays."""

    def __init__(self) -> None:
        self._paths: dict[int, tuple[weakref.ref[Module], str]] = {}
        self._taken: dict[str, weakref.ref[Module]] = {}
        self._joined = 0

    def join(self, models: Sequence[Module]) -> None:
        """Enters models. One alone has no prefix and several have their numbers; who comes later has the next number that is
        nobody's path, so no child of an earlier one either."""
        alone = not self._taken and len(models) == 1
        self._joined = max(self._joined, 1 if self._taken else 0)
        for model in [model for model in models if not self._is_known(model)]:
            while str(self._joined) in self._taken:
                self._joined += 1
            self._enter(model, "" if alone else str(self._joined))
            self._joined += 1

    def of(self, module: Module, above: str) -> str:
        """`layers.0.mlp`; the empty text for the root. `above` is the path of the module that called it."""
        if self._is_known(module):
            return self._paths[id(module)][1]
        name = type(module).__name__
        prefix = f"{above}.{name}" if above else ("" if not self._taken else name)
        number = 1
        while prefix in self._taken:
            number += 1
            prefix = f"{above}.{name}_{number}" if above else f"{name}_{number}"
        self._enter(module, prefix)
        return self._paths[id(module)][1]

    def below(self, path: str) -> Iterator[tuple[str, Module]]:
        """The module that has a path and all below it, each as its calls are named."""
        root = self._taken[path]() if path in self._taken else None
        if root is None:
            return
        known = self._paths[id(root)][1]
        kinds = known.kinds() if isinstance(known, GraphPath) else {}
        todo, seen = [root], set()
        while todo:
            module = todo.pop()
            if id(module) not in seen:
                seen.add(id(module))
                own = self.of(module, path)
                kind = kinds.get(own, type(module).__name__)
                yield f"{own}.{kind}" if own else kind, module
                todo += [child for _, child in reversed(_children(module)) if child is not None]

    def _is_known(self, module: Module) -> bool:
        found = self._paths.get(id(module))
        return found is not None and found[0]() is module

    def _enter(self, model: Module, prefix: str) -> None:
        seen: set[int] = set()
        todo: list[tuple[str, Module, str | None]] = [(prefix, model, None)]
        while todo:
            path, module, base = todo.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            path, base = path_of(module, path, base)
            if not self._is_known(module):
                self._paths[id(module)] = (weakref.ref(module), path)
                self._taken[path] = self._paths[id(module)][0]
            # Not named_modules: it asks each module for its hash, and asks an override of the program's.
            below = [(name, child) for name, child in _children(module) if child is not None]
            todo += [(f"{path}.{name}" if path else str(name), child, base) for name, child in reversed(below)]


def parameters_of(models: Sequence[Module]) -> Iterator[Tensor]:
    """All parameters, without asking any module: it may have an answer of its own."""
    todo, seen = list(models), set()
    while todo:
        module = todo.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield from (value for _, value in _parameters(module) if isinstance(value, Tensor))
            todo += [child for _, child in _children(module) if child is not None]


def _children(module: Module) -> list[tuple[str, Any]]:
    return list(getattr(module, "_modules", {}).items())  # none where __init__ of nn.Module never ran


def _parameters(module: Module) -> list[tuple[str, Any]]:
    return list(getattr(module, "_parameters", {}).items())


class ModuleTap:
    """Opens and closes module calls. With `records` False it only tells other calls which module they are in."""

    def __init__(
        self,
        observer: Observer,
        backward: BackwardTap,
        *,
        names: ModuleNames,
        records: bool,
        new_thread: Callable[[ThreadState], None],
        tidy: Callable[[ThreadState, FrameType | None], None],
    ) -> None:
        self._new_thread = new_thread
        self._tidy = tidy
        self.steps: StepWatch | None = None
        # Called once, before the next module that no other calls.
        self.first_forward: Callable[[], None] | None = None
        self.alone: tuple[Module, str] | None = None
        self.observer = observer
        self.backward = backward
        self.names = names
        self._records = records
        self._parameters = ParameterGradients(observer) if records else None
        around: Around
        around = self._around = bordered(self._record, "torch.nn.Module.__call__", observer.trouble)
        if observer.fast is not None and taps.C is not None:  # which comes back to Python for what is unusual
            around = taps.C.Around(
                observer.fast,
                self,
                MODULE,
                Module,
                internals.fx_traces,
                self._parameters and self._parameters.hook,
                records,
            )
        self._swap = CodeSwap(Module.__call__, around)
        self._room = Room()

    def install(self) -> None:
        self._swap.install()

    def remove(self) -> None:
        self._swap.remove()
        if self._parameters is not None:
            self._parameters.remove()

    def pause(self) -> None:
        """Gives the code back for a while."""
        self._swap.remove()

    def unpause(self) -> None:
        self._swap.install()

    def release(self, value: Tensor) -> None:
        """Lets go of a parameter; it is watched again when its module is next called."""
        if self._parameters is not None:
            self._parameters.release(value)

    def watch(self, call: OpenCall, module: Module) -> None:
        """Looks out for the gradients of a module's own parameters."""
        if self._parameters is not None:
            self._parameters.watch(call, module)

    def watch_below(self, path: str) -> None:
        """Looks out for the gradients of a module's parameters and of those below it, which nobody will call one by one: what runs is
        code that was compiled of them, or written down as a graph."""
        if self._parameters is not None and path not in self._parameters.whole:
            self._parameters.whole.add(path)
            with _no_functions():
                for name, module in self.names.below(path):
                    self._parameters.watch_named(name, module)

    def finish_step(self) -> None:
        if self._parameters is not None:
            self._parameters.flush()

    def _record(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observer = self.observer
        if not observer.active or _tracing() is not None or internals.fx_traces():
            return original(*args, **kwargs)
        state = observer.state()
        if state.compiled or not args or not isinstance(args[0], Module):
            return original(*args, **kwargs)
        if state.busy and not is_left_over(state, caller_of(sys._getframe(1))):
            return original(*args, **kwargs)
        if state.mode is None:
            self._new_thread(state)
        elif not state.modules:
            self._tidy(state, caller_of(sys._getframe(1)))
        module = args[0]
        heard = None
        if self.steps is not None and not state.modules:
            heard = self.steps.outermost(module, args[1:], kwargs)
            if self.observer.active is False:  # that was the end of what is wanted
                return self.steps.tell_once(heard, args, kwargs)
        if self.first_forward is not None:
            told, self.first_forward = self.first_forward, None
            told()
        call: OpenCall | None = None
        edges = None
        follow = False
        frame = sys._getframe(1)
        depth = len(state.modules)
        sequence = 0
        if depth and depth % STRETCH == 0:
            self._room.make(depth)
        observer.enter(state)
        try:
            with _no_functions():
                path = self.names.of(module, state.modules[-1][0] if depth else "")
                name = type(module).__name__
                records = self._records if self.alone is None else module is self.alone[0]
                if self.alone is not None and records:
                    path = self.alone[1]
                call = observer.open_call(state, MODULE, f"{path}.{name}" if path else name, frame)
                call.wanted = call.wanted and records
                if call.wanted:
                    for at, value in enumerate(args[1:]):
                        observer.show(call, Role.INPUT, (at,), value)
                    for key, value in kwargs.items():
                        observer.show(call, Role.INPUT, (key,), value)
                    for key, value in _parameters(module):
                        if value is not None:
                            observer.show(call, Role.PARAMETERS, (key,), value)
                    self.watch(call, module)
                    if isinstance(path, GraphPath):
                        self.watch_below(path)
                follow = records and torch.is_grad_enabled() and observer.wants_backward(call)
                if follow:
                    edges = self.backward.edges(args[1:], kwargs, peek=True)
                state.modules.append((path, call if call.wanted else None, frame, call.stack))
                sequence = internals.sequence_now()
        except Exception as error:  # the hook border
            observer.trouble(f"{MODULE}.{type(module).__name__}", error)
        finally:
            observer.leave(state)
        if call is None:
            if depth == STRETCH:
                self._room.give_back()
            return original(*args, **kwargs)
        if call.wanted:
            state.calls.append(call)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            observer.close_raised(call, error)
            raise
        finally:
            del state.modules[depth:]
            if call.wanted:
                _unwind(state, call)
            if depth == STRETCH:
                self._room.give_back()
        if call.wanted or follow:
            observer.enter(state)
            try:
                with _no_functions():
                    if call.wanted:
                        observer.show(call, Role.OUTPUT, (), result)
                        observer.close_call(call)
                    if follow:
                        self.backward.arm(call, sequence, edges, args[1:], kwargs, result)
            except Exception as error:  # the hook border
                observer.trouble(f"{MODULE}.{type(module).__name__}", error)
            finally:
                observer.leave(state)
        if heard is not None:
            heard(result)
        return result


def _unwind(state: ThreadState, call: OpenCall) -> None:
    """Takes a call off the stack, and whatever was left above it by something that never ended."""
    if call in state.calls:
        del state.calls[state.calls.index(call) :]


def drop_ended(state: ThreadState, caller: FrameType | None) -> None:
    """Forgets modules and calls that are not under way any more: what a signal handler raised can have hit where they would have
    been taken off."""
    alive, frame = set(), caller
    while frame is not None:
        alive.add(frame)
        frame = frame.f_back
    over = (depth for depth, entry in enumerate(state.modules) if entry[2] is not None and entry[2] not in alive)
    ended = next(over, None)
    if ended is not None:
        for _, call, _, _ in state.modules[ended:]:
            if call is not None:
                _unwind(state, call)
        del state.modules[ended:]
    if state.modules or state.guard is not None or state.handling or internals.backward_pass() != -1:
        return
    if state.calls and not in_our_code(caller):
        state.calls.clear()


class ParameterGradients:
    """Gradients of parameters after they were accumulated, one record per module and backward pass."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        # Each parameter, and whether it had no hooks of the program's.
        self._watched: dict[int, tuple[Tensor, bool]] = {}
        self._owners: dict[int, list[tuple[str, str]]] = {}
        self._open: dict[str, tuple[OpenCall, set[str]]] = {}
        self._sizes: dict[str, int] = {}
        # Paths of modules that are watched with all below them.
        self.whole: set[str] = set()
        self.hook: Callable[[Tensor], None] = self._arrived
        if observer.fast is not None and taps.C is not None:
            tables = (self._watched, self._owners, self._open, self._sizes)
            self.hook = taps.C.Arrival(observer.fast, *tables, MODULE)

    def watch(self, call: OpenCall, module: Module) -> None:
        self.watch_named(call.name, module)

    def watch_named(self, owner: str, module: Module) -> None:
        for key, value in _parameters(module):
            if value is None or not value.requires_grad or not value.is_leaf:
                continue
            hooks = value._post_accumulate_grad_hooks
            self._watched.setdefault(id(value), (value, hooks is None))
            # Our hook is its own key. It is looked for, not remembered: what remembers can be interrupted.
            if hooks is None:
                value._post_accumulate_grad_hooks = OrderedDict({self.hook: self.hook})
            elif self.hook not in hooks:
                hooks[self.hook] = self.hook
            owners = self._owners.setdefault(id(value), [])
            if (owner, key) not in owners:
                owners.append((owner, key))
                self._sizes[owner] = self._sizes.get(owner, 0) + 1

    def remove(self) -> None:
        with _no_functions():  # a mode of the program's would hear each of them
            if taps.C is not None and isinstance(self.hook, taps.C.Arrival):
                self.hook.leave()
            for value, _ in list(self._watched.values()):
                self.release(value)
        self._owners.clear()
        self._sizes.clear()
        self.whole.clear()

    def release(self, value: Tensor) -> None:
        watched = self._watched.get(id(value))
        if watched is not None:
            hooks: Any = value._post_accumulate_grad_hooks
            if hooks is not None:
                hooks.pop(self.hook, None)
                if not hooks and watched[1]:
                    value._post_accumulate_grad_hooks = None  # type: ignore[assignment]
            for owner, _ in self._owners.pop(id(value), ()):
                self._sizes[owner] -= 1
            self._watched.pop(id(value), None)

    def flush(self) -> None:
        for opened, _ in self._open.values():
            self.observer.close_call(opened)
        self._open.clear()

    def _arrived(self, value: Tensor) -> None:
        observer = self.observer
        if not observer.active:
            return
        state = observer.state()
        if not observer.enter(state):
            return
        try:
            with _no_functions():
                for owner, key in self._owners.get(id(value), ()):
                    opened, seen = self._open.get(owner, (None, set()))
                    if opened is not None and key in seen:
                        observer.close_call(opened)
                        opened = None
                    if opened is None:
                        seen = set()
                        opened = observer.open_call(state, MODULE, owner, None, phase=Phase.PARAMETERS_GRAD)
                        self._open[owner] = (opened, seen)
                    seen.add(key)
                    if opened.wanted:
                        observer.show(opened, Role.PARAMETERS, (key,), value.grad)
                    if len(seen) >= self._sizes.get(owner, 0):
                        observer.close_call(opened)
                        del self._open[owner]
        except Exception as error:  # the hook border
            observer.trouble(f"{MODULE}.gradients", error)
        finally:
            observer.leave(state)
