"""Runs chosen calls a second time with their arguments slightly changed, and shows both results to a judge.

The program is not disturbed: the second run gets copies taken before the first, generators are put back, no mode of the user
sees it, and whatever goes wrong in it is a note. Only with `fix` the second result takes the place of the first, in the memory
that autograd has saved too.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ulpscope.frameworks.base import Observer, OpenCall
from ulpscope.frameworks.threads import at_work
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.dense import untouchable
from ulpscope.frameworks.torch.names import UNINITIALISED, ApiNames
from ulpscope.frameworks.torch.perturb import PERTURBATIONS, WIDENING, Arguments, float_tensors
from ulpscope.frameworks.torch.tensors import leaves

Run = Callable[..., Any]
Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Twice:
    """A call and its second run. `results` and `again` are flat, by the paths of the leaves that are tensors."""

    call: OpenCall
    given: Arguments
    changed: Arguments
    paths: list[Path]
    results: list[Any]
    again: list[Any]
    run: Callable[[Arguments], list[Any]]
    backward: bool = False


class Judge(Protocol):
    """Who is told of both results."""

    def wants(self, call: OpenCall) -> bool: ...

    def judge(self, twice: Twice) -> None: ...


@dataclass(slots=True)
class _Waiting:
    """A forward call whose backward is to be run again."""

    func: Run
    copies: Arguments
    random: list[tuple[torch.Generator, Tensor]]
    call: OpenCall


class Perturber:
    """Stands where the vendor's kernel dump does: around the call itself."""

    def __init__(self, observer: Observer, judge: Judge, *, mode: str, fix: bool, backward: bool) -> None:
        self._observer = observer
        self._judge = judge
        self._mode = mode
        self._fix = fix
        self._backward = backward
        self._names = ApiNames()
        self._waiting: dict[tuple[str, str, int], _Waiting] = {}

    def run(self, call: OpenCall, func: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` returns, or raises."""
        if not self._judge.wants(call) or not self._can_repeat(func, args, kwargs):
            return func(*args, **kwargs)
        kept = self._tried(call, lambda: (_copies((args, kwargs)), _random_states((args, kwargs))))
        result = func(*args, **kwargs)
        if kept is None:
            return result
        copies, random = kept
        if self._backward:
            self._waiting[call.kind, call.name, call.index] = _Waiting(func, copies, random, call)
        else:
            self._tried(call, lambda: self._repeat(call, func, copies, random, args, result))
        return result

    def wants_backward(self, call: OpenCall) -> bool:
        return self._backward and self._judge.wants(call)

    def gradients(self, forward: tuple[str, str, int], given: dict[Path, Any], came: dict[Path, Any]) -> None:
        """A backward has run: `given` are the gradients of the results, `came` those of the arguments, by their places."""
        waiting = self._waiting.pop(forward, None)
        if waiting is not None:
            self._tried(waiting.call, lambda: self._repeat_backward(waiting, given, came))

    def begin_step(self) -> None:
        self._waiting.clear()

    # --- second runs --------------------------------------------------------------------------------------------

    def _repeat(
        self,
        call: OpenCall,
        func: Run,
        copies: Arguments,
        random: list[tuple[torch.Generator, Tensor]],
        args: tuple[Any, ...],
        result: Any,
    ) -> None:
        mutates = self._names.of(func).mutates

        def run(arguments: Arguments) -> list[Any]:
            fresh = _copies(arguments)
            with _drawing(random), torch.no_grad():
                made = func(*fresh[0], **fresh[1])
            return [leaf for _, leaf in _tensors(fresh[0][0] if made is None and mutates else made)]

        with _undisturbed(widening=self._mode in WIDENING):
            changed = PERTURBATIONS[self._mode](copies)
            if changed is None:
                return
            if self._mode in WIDENING and _have_drawn(random):
                return  # a wider dtype draws other numbers
            found = _tensors(args[0] if result is None and mutates else result)
            again = run(changed)
            if len(again) != len(found):
                return
            paths, results = [path for path, _ in found], [leaf for _, leaf in found]
            self._judge.judge(Twice(call, copies, changed, paths, results, again, run))
            if self._fix:
                _replace(results, again, args, mutates=mutates)

    def _repeat_backward(self, waiting: _Waiting, given: dict[Path, Any], came: dict[Path, Any]) -> None:
        paths = [path for path, grad in came.items() if isinstance(grad, Tensor)]
        grads = {path: grad for path, grad in given.items() if isinstance(grad, Tensor)}
        shares = _shares(waiting.copies, waiting.func, paths)
        wanted = [path for share in shares for path in share]

        def with_gradients(arguments: Arguments) -> Arguments:
            """The gradients that come in are arguments of a backward as well."""
            return (arguments[0], tuple(grads.values())), arguments[1]

        def run(arguments: Arguments) -> list[Any]:
            (args, incoming), kwargs = arguments
            copies, places = _with_leaves((args, kwargs), waiting.func, set(wanted))
            with _drawing(waiting.random), torch.enable_grad():
                # What a call overwrites must not be a leaf.
                passed: Arguments = internals.tree_map(
                    lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, copies
                )
                made = waiting.func(*passed[0], **passed[1])
                made = passed[0][0] if made is None and passed[0] else made
                outputs = {path or (0,): leaf for path, leaf in leaves(made) if isinstance(leaf, Tensor)}
                pairs = [
                    (outputs[path], grad.to(outputs[path].device, outputs[path].dtype))
                    for path, grad in zip(grads, incoming, strict=True)
                    if path in outputs and outputs[path].requires_grad
                ]
                inputs = [places[path] for path in wanted]
                found = iter(
                    torch.autograd.grad(
                        [output for output, _ in pairs], inputs, [grad for _, grad in pairs], allow_unused=True
                    )
                )
                return [_sum([next(found) for _ in share]) for share in shares]

        with _undisturbed(widening=self._mode in WIDENING):
            changed = PERTURBATIONS[self._mode](waiting.copies)
            if changed is None or not paths:
                return
            results = [came[path] for path in paths]
            before, after = with_gradients(waiting.copies), with_gradients(changed)
            self._judge.judge(Twice(waiting.call, before, after, paths, results, run(after), run, backward=True))

    def _can_repeat(self, func: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there is something to change, and running it twice has no effect of its own."""
        floats = float_tensors((args, kwargs))
        if self._names.of(func).treatment == UNINITIALISED or not floats or any(map(untouchable, floats)):
            return False
        plain = (Tensor, torch.dtype, torch.device, torch.Generator)
        return not any(callable(item) and not isinstance(item, plain) for item in (*args, *kwargs.values()))

    def _tried(self, call: OpenCall, action: Callable[[], Any]) -> Any:
        try:
            with at_work(self._observer.state()):
                return action()
        except Exception as error:  # the hook border: the program goes on
            self._observer.trouble(f"{call.kind}.{call.name}", error)
            return None


@contextlib.contextmanager
def _undisturbed(*, widening: bool) -> Iterator[None]:
    """No mode of the user sees what is done inside; where values are widened, autocast does not narrow them again."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(internals.no_functions())
        stack.enter_context(internals.no_dispatch_modes())
        stack.enter_context(torch.inference_mode(False))
        if widening:
            for kind in ("cpu", "cuda", internals.private_device()):
                if kind == "cpu" or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _shares(arguments: Arguments, func: Run, paths: list[Path]) -> list[list[Path]]:
    """For each place whose gradient was told, the places that have a share in it.

    One tensor given twice is told once, with the sum of both gradients, or twice, with one each."""
    places: dict[int, list[Path]] = {}
    owner: dict[Path, int] = {}
    for path, leaf in _placed(arguments, func):
        owner[path] = id(leaf)
        if len(path) == 1 and path[0] in (*range(len(arguments[0])), *arguments[1]):
            places.setdefault(id(leaf), []).append(path)
    told = Counter(owner[path] for path in paths)
    return [places.get(owner[path], [path]) if told[owner[path]] == 1 else [path] for path in paths]


def _with_leaves(arguments: Arguments, func: Run, wanted: set[Path]) -> tuple[Arguments, dict[Path, Tensor]]:
    """Copies whose gradients can be asked for at these places, and what stands at each place."""
    args, kwargs = _copies(arguments)
    args = tuple(_alone(value, (place,), wanted) for place, value in enumerate(args))
    kwargs = {key: _alone(value, (key,), wanted) for key, value in kwargs.items()}
    places = dict(_placed((args, kwargs), func))
    for path in wanted:
        places[path].requires_grad_()
    return (args, kwargs), places


def _alone(value: Any, path: Path, wanted: set[Path]) -> Any:
    return value.clone() if isinstance(value, Tensor) and path in wanted else value


def _sum(grads: list[Any]) -> Any:
    found = [grad for grad in grads if grad is not None]
    return sum(found[1:], found[0]) if found else None


def _copies(arguments: Arguments) -> Arguments:
    """Arguments with memory of their own; one tensor given twice is one copy."""
    made: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return leaf
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = leaf.detach().clone()
        return made[id(leaf)]

    with internals.no_functions(), internals.no_dispatch_modes(), torch.no_grad():
        done: Arguments = internals.tree_map(copy, arguments)
        return done


def _random_states(arguments: Arguments) -> list[tuple[torch.Generator, Tensor]]:
    """The generators a call may draw from, as they stand now."""
    found = [torch.default_generator]
    devices = {leaf.device for leaf in float_tensors(arguments) if leaf.is_cuda}
    found += [torch.cuda.default_generators[device.index or 0] for device in devices]
    found += [leaf for leaf in (*arguments[0], *arguments[1].values()) if isinstance(leaf, torch.Generator)]
    return [(generator, generator.get_state()) for generator in found]


def _have_drawn(states: list[tuple[torch.Generator, Tensor]]) -> bool:
    return any(not torch.equal(generator.get_state(), state) for generator, state in states)


@contextlib.contextmanager
def _drawing(states: list[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    """Inside, generators stand where they stood before the call; afterwards, where they stand now."""
    now = [generator.get_state() for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for (generator, _), state in zip(states, now, strict=True):
            generator.set_state(state)


def _tensors(value: Any) -> list[tuple[Path, Tensor]]:
    return [(path, leaf) for path, leaf in leaves(value) if isinstance(leaf, Tensor)]


def _placed(arguments: Arguments, func: Run) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its place, and with its position where torch has made a keyword of what the program passed by it."""
    args, kwargs = arguments
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        names = []
    for place, value in (*enumerate(args), *kwargs.items()):
        for path, leaf in leaves(value):
            yield (place, *path), leaf
            if place in names:
                yield (names.index(str(place)), *path), leaf


def _replace(results: list[Any], again: list[Any], args: tuple[Any, ...], *, mutates: bool) -> None:
    """Writes the second results over the first, unseen by autograd, so that what it saved is the same."""
    given = {leaf.untyped_storage().data_ptr() for _, leaf in _tensors(list(args))}
    with torch.no_grad():
        for old, new in zip(results, again, strict=True):
            is_view = not mutates and old.untyped_storage().data_ptr() in given
            if old.is_floating_point() and old.shape == new.shape and not is_view:
                old.data.copy_(new)
