"""Gradients of one call, taken from the autograd nodes that the call itself created.

No tensor is wrapped and no node inserted: hooks on the call's own nodes read what flows in (the gradient of each output)
and what flows out over the edges that leave the call (the gradient of each input that *this* call produced). A node's
sequence number tells whether the call created it. A hook must never refer to its own node: that would be a cycle which
nobody can collect. Gradients are shown as `produced`: asking for their storage would make a Python object of it, and the
engine adds to a gradient in place only while nobody else has its storage.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ulpscope.frameworks.base import Forward, Observer, OpenCall, ThreadState
from ulpscope.frameworks.torch import internals, tensors
from ulpscope.frameworks.torch.nodes import (
    Edges,
    Leaving,
    Parts,
    Roots,
    accumulator,
    all_older,
    edge_of,
    in_node_order,
    key_of,
    made_since,
    nodes_of,
    numbered,
)
from ulpscope.frameworks.torch.tensors import Path
from ulpscope.model.names import MODULE
from ulpscope.model.records import PathStep, Role

_SEGMENT, _WITNESSES = 997, 8
_LATE = "a backward pass ran after stop() and was not recorded; stop after it"
_SCALARS = frozenset({int, float, bool, str, type(None)})
_ONE: dict[int, Path] = {0: (0,)}
_PLACES: list[Path] = [(place,) for place in range(32)]
_no_functions = internals.no_functions


class _Hooks(dict[Any, Any]):
    """The hooks of a node, as torch wants them: the program's handles refer to it weakly."""

    __slots__ = ("__weakref__",)


class _Gradients:
    """What has arrived of one backward of one call made of several nodes."""

    __slots__ = (
        "__weakref__", "again", "expected", "forward", "gaps", "left", "open", "parts", "sums", "thread", "waiting",
    )  # fmt: skip

    def __init__(self, forward: Forward, expected: int, parts: dict[Path, int], *, gaps: bool = False) -> None:
        self.forward = forward
        self.gaps = gaps
        self.expected = self.left = expected
        self.parts = parts
        self.waiting = dict(parts)
        self.sums: dict[Path, Tensor] = {}
        self.open: OpenCall | None = None
        self.thread = 0
        self.again = 0

    def reset(self) -> None:
        self.left = self.expected
        self.waiting = dict(self.parts)
        self.sums = {}
        self.open = None


class _AfterNode:
    """Hook of a call made of one node. A class with slots, not a closure: thousands of them wait for a backward pass, and
    every object that waits makes the garbage collector walk further."""

    __slots__ = ("__weakref__", "again", "forward", "observer", "outputs", "slots")
    gaps = False

    def __init__(
        self, observer: Observer, forward: Forward, outputs: dict[int, Path], slots: tuple[Path | None, ...]
    ) -> None:
        self.observer = observer
        self.forward = forward
        self.outputs = outputs
        self.slots = slots
        self.again = 0

    def __call__(self, grads_in: tuple[Any, ...], grads_out: tuple[Any, ...]) -> None:
        observer = self.observer
        if not observer.active:
            observer.note(_LATE)
            return
        state = observer.state()
        if not observer.enter(state):
            return
        try:
            with _no_functions():
                opened = observer.open_backward(state, self.forward, self.again)
                self.again += 1
                for number, path in self.outputs.items():
                    if number < len(grads_out) and (grads_out[number] is not None or self.gaps):
                        observer.show(opened, Role.INPUT, path, grads_out[number], produced=True)
                for slot, grad in zip(self.slots, grads_in, strict=False):
                    if slot is not None and (grad is not None or self.gaps):
                        observer.show(opened, Role.OUTPUT, slot, grad, produced=True)
                observer.close_call(opened)
        except Exception as error:  # the hook border
            observer.trouble(f"backward of {self.forward[0]}.{self.forward[1]}", error)
        finally:
            observer.leave(state)


class _AfterNodeWithGaps(_AfterNode):
    """Shows gradients that are not there as None."""

    __slots__ = ()
    gaps = True


class BackwardTap:
    """Arms finished forward calls.

    With `node_order`, the gradients of a call that is no module are those around the node of its first result, in the
    order of the node, as msprobe has them."""

    def __init__(self, observer: Observer, *, node_order: bool = False) -> None:
        self.observer = observer
        self._fast = observer.fast
        if self._fast is not None:
            self._fast.give(
                added=_sum,
                modes=internals.count_dispatch_modes,
                accumulator=accumulator(),
                table=_Hooks,
                untracked=not gc.is_tracked({}),
            )
        self._node_order = node_order
        self._unfinished: dict[int, _Gradients] = {}
        self._armed = 0
        self._anchors: list[tuple[Any, list[weakref.ref[Any]]]] = []

    def edges(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, peek: bool = False) -> Any:
        """Which autograd edge each argument is, for `arm`. With `peek`, views whose node torch would have to rebuild are left
        out."""
        return self._edges(args, kwargs, peek=peek) if self._fast is None else self._fast.edges(args, kwargs, peek)

    def _edges(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, peek: bool = False) -> Edges:
        found: Edges = {}
        places: list[tuple[PathStep, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in places:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                if value.requires_grad and not (peek and value._is_view() and value._version):
                    slot = _PLACES[place] if type(place) is int and place < 32 else (place,)
                    found.setdefault(edge_of(value), []).append(slot)
            elif kind not in _SCALARS:
                for path, leaf in tensors.leaves(value):
                    if (
                        isinstance(leaf, Tensor)
                        and leaf.requires_grad
                        and not (peek and leaf._is_view() and leaf._version)
                    ):
                        found.setdefault(edge_of(leaf), []).append((place, *path))
        return found

    def arm(
        self,
        call: OpenCall,
        sequence: int,
        edges: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        *,
        watch: bool = False,
    ) -> None:
        """Hooks the nodes that a finished call created, if it created any. With `watch`, kernels that run inside them
        are told which call they belong to."""
        if edges is not None and type(edges) is not dict:
            if not watch:
                self._fast.arm(call, sequence, edges, args, kwargs, result)
                return
            edges = edges.table()
        self.arm_slowly(call, sequence, edges, args, kwargs, result, watch)

    def arm_slowly(
        self,
        call: OpenCall,
        sequence: int,
        edges: Edges | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        watch: bool = False,
    ) -> None:
        """As `arm`, without the C extension."""
        if self._node_order and call.kind != MODULE:
            self._arm_in_node_order(call, sequence, edges, args, kwargs, result, watch)
            return
        if type(result) is Tensor:
            node = result.grad_fn
            if node is None:
                return
            if node._sequence_nr() >= sequence:
                children = node.next_functions
                if all_older(children, sequence):
                    one: dict[int, Path] = _ONE if not result.output_nr else {result.output_nr: (0,)}
                    self._arm_single(call, node, children, one, edges or self._edges(args, kwargs), watch)
                    return
        roots, passed = nodes_of(result, sequence)
        if not roots:
            for node, outputs in passed.items():
                self._arm_passed(call, node, outputs)
            return
        if edges is None:
            edges = self._edges(args, kwargs)
        if len(roots) == 1:
            ((node, outputs),) = roots.items()
            children = node.next_functions
            if all_older(children, sequence):
                self._arm_single(call, node, children, outputs, edges, watch)
                return
        self._arm_several(call, sequence, roots, edges, watch)

    def finish_pass(self, *, all_threads: bool = False) -> None:
        """Closes what is still open once the outermost backward pass of a thread is over: some edges never carry a
        gradient. With `all_threads`, what any thread has open: the step ends."""
        if internals.backward_pass() != -1 or not self.observer.active:
            return
        state = self.observer.state()
        entered = self.observer.enter(state)
        try:
            if self._fast is not None:
                with _no_functions():
                    self._fast.finish_pass(None if all_threads else state)
            for gradients in list(self._unfinished.values()):
                if all_threads or gradients.thread == state.number:
                    self._finish(gradients)
        except Exception as error:  # the hook border
            self.observer.trouble("the end of a backward pass", error)
        finally:
            if entered:
                self.observer.leave(state)

    def _anchor(self, node: Any, hook: Any) -> None:
        """Holds every so-manieth node until what was built on it is gone.

        torch frees a graph node by node; once Python has seen a node, freeing it goes through Python, and freeing a chain
        of 50,000 recurses through all of it and overflows the stack. A held node ends the recursion; it is let go when the
        nodes armed right after it have died, at the next call.
        """
        self._armed += 1
        anchors = self._anchors
        if anchors:
            above = anchors[-1][1]
            if len(above) < _WITNESSES:
                above.append(weakref.ref(hook))
            else:
                while anchors and len(anchors[-1][1]) == _WITNESSES and all(seen() is None for seen in anchors[-1][1]):
                    anchors.pop()
        if self._armed % _SEGMENT == 0:
            anchors.append((node, []))

    # --- one node: the usual case -------------------------------------------------------------------------------

    def _arm_single(
        self, call: OpenCall, node: Any, children: Any, outputs: dict[int, Path], edges: Edges, watch: bool
    ) -> None:
        used: dict[Any, int] = {}
        slots: list[Path | None] = []
        for child, number in children:
            key = key_of(child, number)
            paths = edges.get(key)
            turn = used.get(key, 0)
            used[key] = turn + 1
            slots.append(paths[min(turn, len(paths) - 1)] if paths else None)
        hook = self._hook(call, outputs, tuple(slots))
        node.register_hook(hook)
        self._anchor(node, hook)
        if watch:
            self._watch(call, node)

    def _hook(
        self, call: OpenCall, outputs: dict[int, Path], slots: tuple[Path | None, ...], *, gaps: bool = False
    ) -> Any:
        if self._fast is not None:
            return self._fast.hook(call, outputs, slots, gaps)
        return (_AfterNodeWithGaps if gaps else _AfterNode)(self.observer, _forward(call), outputs, slots)

    # --- several nodes ------------------------------------------------------------------------------------------

    def _arm_several(
        self, call: OpenCall, sequence: int, roots: Roots, edges: Edges, watch: bool, first: Any = None
    ) -> None:
        """Roots give the gradients of the outputs, the edges that leave the call those of the inputs. With `first`, the
        gradients around that node come before."""
        leaving: Leaving = {}
        parts: Parts = {}
        if edges or watch:
            seen = set(roots)
            todo = list(roots)
            while todo:
                node = todo.pop()
                if watch:
                    self._watch(call, node)
                for place, (child, number) in enumerate(node.next_functions):
                    if child is None:
                        continue
                    paths = edges.get(key_of(child, number))
                    if paths:
                        leaving.setdefault(node, []).append((place, paths[0]))
                        parts[paths[0]] = parts.get(paths[0], 0) + 1
                    elif child not in seen and made_since(child, sequence):
                        seen.add(child)
                        todo.append(child)
        if first is not None:
            roots, leaving, parts = in_node_order(first, roots, leaving, parts)
        gradients = _Gradients(_forward(call), len(roots) + len(leaving), parts, gaps=first is not None)
        for node, outputs in roots.items():
            node.register_prehook(self._on_root(gradients, outputs))
            self._anchor(node, gradients)
        for node, places in leaving.items():
            node.register_hook(self._on_leaving(gradients, places))

    def _on_root(self, gradients: _Gradients, outputs: dict[int, Path]) -> Callable[[tuple[Any, ...]], None]:
        def before(grads: tuple[Any, ...]) -> None:
            def show(opened: OpenCall) -> None:
                for number, path in outputs.items():
                    if number < len(grads) and (grads[number] is not None or gradients.gaps):
                        self.observer.show(opened, Role.INPUT, path, grads[number], produced=True)

            self._arrived(gradients, show)

        return before

    def _on_leaving(self, gradients: _Gradients, places: list[tuple[int, Path]]) -> Callable[..., None]:
        def after(grads_in: tuple[Any, ...], grads_out: tuple[Any, ...]) -> None:
            def show(opened: OpenCall) -> None:
                for place, path in places:
                    grad = grads_in[place] if place < len(grads_in) else None
                    self._add(gradients, opened, path, grad)

            self._arrived(gradients, show)

        return after

    def _add(self, gradients: _Gradients, opened: OpenCall, path: Path, grad: Tensor | None) -> None:
        """An input used twice inside the call gets the sum of both gradients; it is shown when the last has come."""
        gradients.waiting[path] = left = gradients.waiting[path] - 1
        if grad is not None:
            before = gradients.sums.pop(path, None)
            if before is not None:
                grad = _sum(before, grad)
            if left > 0:
                gradients.sums[path] = grad
                return
        else:
            grad = gradients.sums.pop(path, None)
        if grad is not None or gradients.gaps:
            self.observer.show(opened, Role.OUTPUT, path, grad, produced=True)

    def _arrived(self, gradients: _Gradients, show: Callable[[OpenCall], None]) -> None:
        observer = self.observer
        if not observer.active:
            observer.note(_LATE)
            return
        state = observer.state()
        if not observer.enter(state):
            return
        try:
            with _no_functions():
                if gradients.open is None:
                    gradients.open = observer.open_backward(state, gradients.forward, gradients.again)
                    gradients.again += 1
                    gradients.thread = state.number
                    self._unfinished[id(gradients)] = gradients
                show(gradients.open)
                gradients.left -= 1
                if gradients.left <= 0:
                    self._finish(gradients)
        except Exception as error:  # the hook border
            observer.trouble(f"backward of {gradients.forward[0]}.{gradients.forward[1]}", error)
        finally:
            observer.leave(state)

    def _finish(self, gradients: _Gradients) -> None:
        self._unfinished.pop(id(gradients), None)
        opened = gradients.open
        if opened is not None:
            with _no_functions():
                for path, grad in gradients.sums.items():
                    self.observer.show(opened, Role.OUTPUT, path, grad, produced=True)
                self.observer.close_call(opened)
        gradients.reset()

    def _arm_passed(self, call: OpenCall, node: Any, outputs: dict[int, Path]) -> None:
        """A call that returned its input: the gradient of both is what arrives at the node that made it."""
        gradients = _Gradients(_forward(call), 1, {})

        def before(grads: tuple[Any, ...]) -> None:
            def show(opened: OpenCall) -> None:
                for number, path in outputs.items():
                    if number < len(grads) and grads[number] is not None:
                        self.observer.show(opened, Role.INPUT, path, grads[number], produced=True)
                        self.observer.show(opened, Role.OUTPUT, path, grads[number], produced=True)

            self._arrived(gradients, show)

        node.register_prehook(before)

    def _arm_in_node_order(
        self,
        call: OpenCall,
        sequence: int,
        edges: Edges | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        watch: bool,
    ) -> None:
        roots, passed = nodes_of(result, sequence)
        first = next(iter(roots or passed), None)
        if first is None:
            return
        children = first.next_functions
        if len(roots) > 1 or (roots and not all_older(children, sequence)):
            edges = self._edges(args, kwargs) if edges is None else edges
            self._arm_several(call, sequence, roots, edges, watch, first)
            return
        places = tuple((place,) for place in range(len(children)))
        hook = self._hook(call, numbered(first, (roots or passed)[first]), places, gaps=True)
        first.register_hook(hook)
        self._anchor(first, hook)
        if watch and roots:
            self._watch(call, first)

    def _watch(self, call: OpenCall, node: Any) -> None:
        """While this node runs, the kernels below it belong to the backward of `call`."""
        observer = self.observer

        def before(_: Any) -> None:
            if observer.active:
                _push(observer.state(), call)

        def after(_in: Any, _out: Any) -> None:
            if observer.active:
                _pop(observer.state(), call)

        node.register_prehook(before)
        node.register_hook(after)


def _sum(one: Tensor, two: Tensor) -> Tensor:
    """Both together, unheard by modes of the program. A class without memory of its own (a ragged batch) adds by its own
    dispatch; torch crashes without it."""
    plain = type(one) in (Tensor, Parameter) and type(two) in (Tensor, Parameter)
    with torch.no_grad(), internals.no_dispatch() if plain else internals.no_dispatch_modes():
        return one + two


def _forward(call: OpenCall) -> Forward:
    return (call.kind, call.name, call.index, call.epoch, call.seq, call.parent, call.module, call.stack)


def _push(state: ThreadState, call: OpenCall) -> None:
    state.calls.append(call)


def _pop(state: ThreadState, call: OpenCall) -> None:
    if state.calls and state.calls[-1] is call:
        state.calls.pop()
