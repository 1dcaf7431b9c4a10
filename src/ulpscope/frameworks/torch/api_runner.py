"""One recorded call run again: on the device, and on CPU in higher precision; forward, and backward where it was recorded.

What comes out is numpy, for `replay.standards` to judge. Nothing is judged here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.api_arguments import (
    Arguments,
    Bits,
    Data,
    Path,
    UnrunnableError,
    arguments,
    function_of,
    reference_of,
)
from ulpscope.frameworks.torch.fused_references import is_stand_in
from ulpscope.frameworks.torch.tensors import leaves
from ulpscope.model.dtypes import Array, round_off
from ulpscope.model.names import call_text
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import CallRecord, PathStep, Role, Value

_ONE_UP = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
_WHOLE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_COMPLEX = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
# What an operator cannot do, or must not be asked.
_NOT_RUN = {Trait.RANDOM: "it draws random numbers", Trait.UNINITIALISED: "its memory is not initialised"}
# Change the dtype, or depend on it: in another precision they would be another operator.
_NOT_RAISED = Trait.CASTS | Trait.COUNTS | Trait.OF_ITS_DTYPE
_SIGNS = {"above": 1.0, "below": -1.0}
_MUTATES_ALONE = frozenset({"__setitem__"})
NO_GRADIENT = "Bench output is None, skip this test."


@dataclass(frozen=True, slots=True)
class Output:
    """One output or gradient of a call, of both sides. `rounded` is the reference in the target's dtype."""

    path: Path
    reference: Array | None
    rounded: Array | None
    target: Array | None
    reference_dtype: str
    dtype: str
    unit: float
    response: Callable[[], float]
    recorded: bool = False
    why: str = ""


@dataclass(slots=True)
class ApiRun:
    """Both phases of a call. A phase that could not be run says why; backward is None where none was recorded."""

    forward: list[Output] = field(default_factory=list)
    backward: list[Output] | None = None
    forward_trouble: str = ""
    backward_trouble: str = ""
    real: bool = True
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: FilePath, name: str) -> None:
        """Writes the inputs and outputs of the call, one file each."""
        folder.mkdir(parents=True, exist_ok=True)
        for slot, tensor in self.tensors.items():
            torch.save(tensor.detach().cpu().contiguous().clone(), folder / f"{name}.{slot}.pt")


@dataclass(frozen=True, slots=True)
class ApiRunner:
    """Runs calls again. `device` is under test; with `whole`, the reference is float64, else one precision up.

    With `recorded`, what the dump holds is the target where it holds it, and nothing runs on a device; with `only_recorded`
    as well, nothing else is: the calls of another machine's device say nothing about the device of this one. With
    `real_only`, inputs are never made up from statistics."""

    device: str = "cpu"
    seed: int = 1234
    whole: bool = True
    recorded: bool = False
    only_recorded: bool = False
    real_only: bool = False
    keep: bool = False

    def run(self, forward: CallRecord, backward: CallRecord | None, bits: Bits) -> ApiRun:
        """Both phases of a call. Raises nothing for a call that cannot be run: it says so."""
        found = ApiRun(backward=None if backward is None else [])
        try:
            again = _Call(self, forward, backward, bits)
            found.forward = list(again.outputs())
        except Exception as error:  # the border: a kernel may refuse made-up numbers, or not exist here
            found.forward_trouble = _told(error)
            found.backward_trouble = found.forward_trouble if backward is not None else ""
            return found
        if backward is not None:
            try:
                found.backward = list(again.gradients(backward))
            except Exception as error:  # the border, as above
                found.backward_trouble = _told(error)
        found.real = again.data.real
        if self.keep:
            found.tensors = again.tensors()
        return found


class _Call:
    """One call with its arguments; every way to run it is run at most once."""

    def __init__(self, runner: ApiRunner, forward: CallRecord, backward: CallRecord | None, bits: Bits) -> None:
        kind, self.name = forward.id.kind, forward.id.name
        plain = self.name.partition(".")[0]
        self.runner, self.record, self.backward = runner, forward, backward
        self.function, self.reference = function_of(kind, self.name), reference_of(kind, self.name)
        for trait, why in _NOT_RUN.items():
            if trait in traits(self.name):
                raise UnrunnableError(why)
        if forward.error is not None:
            raise UnrunnableError(f"it raised when it was recorded: {forward.error}")
        self.data = Data(call_text(forward.id), bits, runner.seed, real_only=runner.only_recorded or runner.real_only)
        self.bits = bits
        inputs = [value for value in forward.values if value.slot.role is Role.INPUT]
        self.recorded = {value.slot.path: value for value in forward.values if value.slot.role is Role.OUTPUT}
        self.choices = arguments(inputs, self.data, self.name)
        self.wanted = {value.slot.path for value in inputs if value.requires_grad and _is_float(value.dtype)}
        if _draws(self.choices[0]) or (plain == "scaled_dot_product_attention" and _dropped(self.choices[0])):
            raise UnrunnableError("it draws random numbers")
        raises = not traits(self.name) & _NOT_RAISED and not (plain == "view" and _has_dtype(self.choices[0]))
        self.raising = {**(_WHOLE if runner.whole else _ONE_UP), **_COMPLEX} if raises else {}
        self.unit = max((round_off(value.dtype) for value in forward.values), default=0.0)
        self.arguments = self._choose()
        self._runs: dict[str, tuple[list[tuple[Path, Tensor]], dict[Path, Tensor]]] = {}
        self._grads: dict[str, dict[Path, Tensor]] = {}
        self._gradient_tensors: dict[Path, Tensor] | None = None

    def _choose(self) -> Arguments:
        """Of several possible arguments those that give the recorded shapes."""
        if len(self.choices) == 1:
            return self.choices[0]
        shapes = {path: value.shape for path, value in self.recorded.items()}
        for choice in self.choices:
            try:
                found = _outputs(
                    self._called(choice, lambda tensor: tensor.clone(), torch.device("cpu")), choice, self.name
                )
            except (RuntimeError, IndexError, TypeError):
                continue
            if all(shapes.get(path, tensor.shape) == tuple(tensor.shape) for path, tensor in found):
                return choice
        return self.choices[0]

    def _called(self, given: Arguments, change: Callable[[Tensor], Tensor], device: torch.device) -> Any:
        args, kwargs = self._changed(given, change, device)
        return self.reference(*args, **kwargs)

    def _changed(self, given: Arguments, change: Callable[[Tensor], Tensor], device: torch.device) -> Arguments:
        def each(item: Any) -> Any:
            if isinstance(item, Tensor):
                return change(item)
            return device if isinstance(item, torch.device) else item

        args, kwargs = given
        return tuple(internals.tree_map(each, item) for item in args), {
            key: internals.tree_map(each, item) for key, item in kwargs.items()
        }

    # --- the ways to run it -------------------------------------------------------------------------------------

    def _change(self, way: str) -> tuple[Callable[[Tensor], Tensor], torch.device]:
        if way == "target":
            device = torch.device(self.runner.device)
            return (lambda tensor: tensor.to(device)), device
        if way == "reference":
            return self._raised, torch.device("cpu")
        generator = torch.Generator().manual_seed(self.runner.seed)

        def moved(tensor: Tensor) -> Tensor:
            wide = self._raised(tensor)
            return _moved(wide, _SIGNS[way] * round_off(str(tensor.dtype)), generator)

        return moved, torch.device("cpu")

    def _saving(self, way: str) -> contextlib.AbstractContextManager[Any]:
        """A device keeps the results that its backward needs in their own dtype, rounded; where inputs move, these do too."""
        if way not in _SIGNS or self.backward is None:
            return contextlib.nullcontext()
        generator = torch.Generator().manual_seed(self.runner.seed + 1)
        shapes = {value.shape for value in self.recorded.values()}

        def keep(tensor: Tensor) -> Tensor:
            if tuple(tensor.shape) not in shapes:
                return tensor
            return _moved(tensor.detach(), _SIGNS[way] * self.unit, generator)

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    def _raised(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.raising.get(tensor.dtype, tensor.dtype)).clone()

    def _raised_dtype(self, item: Any) -> Any:
        return self.raising.get(item, item) if isinstance(item, torch.dtype) else item

    def _run(self, way: str) -> tuple[list[tuple[Path, Tensor]], dict[Path, Tensor]]:
        """The outputs, and the tensors that gradients are asked for, by their place in the arguments."""
        if way in self._runs:
            return self._runs[way]
        change, device = self._change(way)
        given = self._changed(self.arguments, change, device)
        sources: dict[Path, Tensor] = {}
        args, kwargs = given
        if self.backward is not None:
            args = tuple(self._with_gradient(item, (at,), sources) for at, item in enumerate(args))
            kwargs = {key: self._with_gradient(item, (key,), sources) for key, item in kwargs.items()}
        if way != "target":
            args = tuple(self._raised_dtype(item) for item in args)
            kwargs = {key: self._raised_dtype(item) for key, item in kwargs.items()}
        torch.manual_seed(self.runner.seed)
        with torch.set_grad_enabled(self.backward is not None), self._saving(way):
            result = (self.function if way == "target" else self.reference)(*args, **kwargs)
        found = _outputs(result, (args, kwargs), self.name), sources
        self._runs[way] = found
        return found

    def _with_gradient(self, item: Any, path: Path, sources: dict[Path, Tensor]) -> Any:
        if isinstance(item, Tensor):
            if path not in self.wanted or not (item.is_floating_point() or item.is_complex()):
                return item
            source = sources[path] = item.detach().requires_grad_(True)
            return source.clone()  # an operator in place refuses a leaf
        if isinstance(item, list | tuple):
            made = [self._with_gradient(each, (*path, at), sources) for at, each in enumerate(item)]
            return type(item)(made) if type(item) in (list, tuple) else made
        return item

    # --- what comes out -----------------------------------------------------------------------------------------

    def outputs(self) -> Iterator[Output]:
        reference = dict(self._run("reference")[0])
        target = self._recorded_outputs(self.recorded) if self.runner.recorded else None
        recorded = target is not None
        if target is None:
            self._refuse_device()
            target = dict(self._run("target")[0])
        yield from self._pairs(reference, target, functools.partial(self._response, self._forward), recorded)

    def gradients(self, backward: CallRecord) -> Iterator[Output]:
        reference = self._backward("reference")
        target: dict[Path, Tensor] | None = None
        if self.runner.recorded:
            outputs = {value.slot.path: value for value in backward.values if value.slot.role is Role.OUTPUT}
            target = self._recorded_outputs(outputs)
            # Another tool lists gradients as autograd has them, not by argument.
            if target is not None and target.keys() != reference.keys():
                target = None
        recorded = target is not None
        if target is None:
            self._refuse_device()
            target = self._backward("target")
        response = functools.partial(self._response, self._backward)
        pairs = {output.path: output for output in self._pairs(reference, target, response, recorded)}
        for path in self._tensor_paths():
            yield pairs.get(path) or Output(path, None, None, None, "", "", 0.0, _nothing, why=NO_GRADIENT)

    def _tensor_paths(self) -> Iterator[Path]:
        args, kwargs = self.arguments
        named: list[tuple[PathStep, Any]] = [*enumerate(args), *kwargs.items()]
        for head, item in named:
            for path, leaf in leaves(item):
                if isinstance(leaf, Tensor):
                    yield (head, *path)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that took part, by slot."""
        args, kwargs = self.arguments
        named: dict[Path, Any] = {("input", at): item for at, item in enumerate(args)}
        named |= {("kwargs", key): item for key, item in kwargs.items()}
        found = {
            ".".join(map(str, ("forward", *head, *path))): leaf
            for head, item in named.items()
            for path, leaf in leaves(item)
            if isinstance(leaf, Tensor)
        }
        for way, word in (("target", "output"), ("reference", "bench_output")):
            for path, tensor in self._runs.get(way, ([], {}))[0]:
                found[".".join(map(str, ("forward", word, *path)))] = tensor
            for path, tensor in self._grads.get(way, {}).items():
                found[".".join(map(str, ("backward", word, *path)))] = tensor
        return found

    def _pairs(
        self,
        reference: dict[Path, Tensor],
        target: dict[Path, Tensor],
        response: Callable[[Path], float],
        recorded: bool,
    ) -> Iterator[Output]:
        for path, wide in reference.items():
            found = target.get(path)
            name = str(wide.dtype).removeprefix("torch.")
            if found is None:
                yield Output(path, None, None, None, name, "", 0.0, _nothing, why="the device gave no such output")
                continue
            dtype = str(found.dtype).removeprefix("torch.")
            unit = max(self.unit, round_off(dtype))
            arrays = _array(wide), _array(wide.to(found.dtype)), _array(found)
            yield Output(path, *arrays, name, dtype, unit, functools.partial(response, path), recorded)

    def _recorded_outputs(self, values: dict[Path, Value]) -> dict[Path, Tensor] | None:
        """What the dump holds; None where it does not hold all of it, or not what it came from."""
        tensors = [value for value in values.values() if value.is_tensor]
        lost = next((value for value in tensors if "missing" in value.extra), None)
        if lost is not None and "overwritten" not in lost.extra:
            raise UnrunnableError(f"{lost.extra['missing']} is missing")
        if not tensors or not self.data.real or any(value.payload is None or value.error for value in tensors):
            return None
        return {value.slot.path: Data("", self.bits, 0).tensor(value) for value in tensors}

    def _refuse_device(self) -> None:
        if self.runner.only_recorded:
            raise UnrunnableError("the dump does not hold what the run made of it")
        if self.runner.recorded and is_stand_in(self.function):
            raise UnrunnableError(f"there is no NPU here to run {self.name}; record it with its tensors")

    def _forward(self, way: str) -> dict[Path, Tensor]:
        return dict(self._run(way)[0])

    def _backward(self, way: str) -> dict[Path, Tensor]:
        if way in self._grads:
            return self._grads[way]
        outputs, sources = self._run(way)
        if not sources:
            raise UnrunnableError("no argument is recorded as requiring a gradient")
        if self._gradient_tensors is None:
            assert self.backward is not None
            given = [value for value in self.backward.values if value.slot.role is Role.INPUT and value.is_tensor]
            self._gradient_tensors = {value.slot.path: self.data.tensor(value) for value in given}
        change, _ = self._change(way)
        pairs = [
            (tensor, change(self._gradient_tensors[path]).to(tensor.dtype).reshape(tensor.shape))
            for path, tensor in outputs
            if tensor.requires_grad and path in self._gradient_tensors
        ]
        if not pairs:
            raise UnrunnableError("no gradient of an output was recorded")
        found = torch.autograd.grad(
            [tensor for tensor, _ in pairs], list(sources.values()), [grad for _, grad in pairs], allow_unused=True
        )
        self._grads[way] = {path: grad for path, grad in zip(sources, found, strict=True) if grad is not None}
        return self._grads[way]

    def _response(self, run: Callable[[str], dict[Path, Tensor]], path: Path) -> float:
        """The largest change of a result when every input moves by its unit round-off, to either side."""
        middle, largest = run("reference")[path].detach(), 0.0
        for way in ("above", "below"):
            change = (run(way)[path].detach() - middle).abs().double()
            change = change[torch.isfinite(change)]
            largest = max(largest, float(change.max()) if change.numel() else 0.0)
        return largest


def _moved(tensor: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """Every element moved by a unit, up or down by chance."""
    if not unit or not tensor.is_floating_point():
        return tensor
    steps = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).sub_(0.5).sign_()
    return (tensor.double() * (1 + unit * steps)).to(tensor.dtype)


def _outputs(result: Any, given: Arguments, name: str) -> list[tuple[Path, Tensor]]:
    if result is None and name in _MUTATES_ALONE:
        result = given[0][0]
    if isinstance(result, Tensor):
        return [((0,), result)]
    if isinstance(result, bool | int | float):
        return [((0,), torch.tensor(result))]
    return [(path, leaf) for path, leaf in leaves(result) if isinstance(leaf, Tensor)]


def default_device() -> str:
    """The device under test: an NPU or a GPU where there is one."""
    if hasattr(torch, "npu") and torch.npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_count(kind: str) -> int:
    """How many devices of a kind there are."""
    return 1 if kind == "cpu" else int(getattr(torch, kind).device_count())


def set_jit_compile(on: bool) -> bool:
    """Tells an NPU whether to compile operators while running, as the run that was recorded did; False without one."""
    if not hasattr(torch, "npu"):
        return False
    torch.npu.set_compile_mode(jit_compile=on)
    return True


def _nothing() -> float:
    return 0.0


def _draws(given: Arguments) -> bool:
    return given[1].get("generator") is not None


def _dropped(given: Arguments) -> bool:
    args, kwargs = given
    return bool(kwargs.get("dropout_p") or (len(args) > 4 and args[4]))


def _has_dtype(given: Arguments) -> bool:
    return any(isinstance(item, torch.dtype) for item in (*given[0], *given[1].values()))


def _is_float(dtype: str | None) -> bool:
    found = getattr(torch, (dtype or "").removeprefix("torch."), None)
    return isinstance(found, torch.dtype) and (found.is_floating_point or found.is_complex)


def _array(tensor: Tensor) -> Array:
    """The elements as numpy has them; bfloat16 and float8 exactly as float32."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype in (torch.bfloat16,) or str(plain.dtype).startswith("torch.float8"):
        plain = plain.float()
    elif plain.dtype is torch.complex32:
        plain = plain.to(torch.complex64)
    return np.asarray(plain.numpy())


def _told(error: Exception) -> str:
    text = str(error).strip().splitlines()
    said = text[0] if text else ""
    return said if isinstance(error, UnrunnableError) else f"{type(error).__name__}: {said}"[:300]
