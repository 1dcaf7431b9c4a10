"""Kernels of an NPU, written by the vendor's own dump around one named call, or around those that overflow.

They run below everything that torch can show; CANN writes them into the folder that acl_config.json names. torch_npu is found
in the process and never imported. The program's own numbers do not change: a backward is dumped on copies.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ulpscope.frameworks.base import Observer, OpenCall
from ulpscope.frameworks.threads import at_work
from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.tensors import leaves
from ulpscope.model.dtypes import DType
from ulpscope.model.errors import CaptureError, ConfigError, did_you_mean
from ulpscope.model.options import read_config_file

_CHOICES = {"dump_mode": ("output", "input", "all"), "dump_op_switch": ("off", "on")}
_SEEDS_KEYS = ("dump_list", "dump_path", *_CHOICES)
# Keys of later CANN releases. They are the vendor's to judge.
_PASSED_ON = ("dump_step", "dump_data", "dump_level", "dump_debug", "dump_scene", "dump_kernel_data", "dump_stats")
_PLACE = re.compile(r"backward[._]input\.([\w.]+)\.(?:pt|npy)")
Run = Callable[..., Any]


class Npu(Protocol):
    """What is used of `torch_npu.npu`."""

    def init_dump(self) -> None: ...
    def set_dump(self, acl_config: str) -> None: ...
    def finalize_dump(self) -> None: ...
    def synchronize(self) -> None: ...
    def get_rng_state(self) -> Tensor: ...
    def set_rng_state(self, state: Tensor) -> None: ...


def npu_of_process() -> Npu | None:
    """`torch_npu.npu`, if the program has imported it and there is a device."""
    found = getattr(sys.modules.get("torch_npu"), "npu", None)
    return found if found is not None and found.is_available() else None


def acl_problems(content: Mapping[str, Any]) -> list[str]:
    """Everything wrong with the content of an acl_config.json. Relative paths count from the working directory."""
    dump = content.get("dump")
    if not isinstance(dump, dict):
        return ["dump: is missing, or is not a table; it holds dump_list, dump_path, dump_mode, dump_op_switch"]
    problems = []
    for key in dump:
        if key not in (*_SEEDS_KEYS, *_PASSED_ON):
            problems.append(f"dump: unknown key {key!r}.{did_you_mean(key, _SEEDS_KEYS)}")
    if not isinstance(dump.get("dump_list", []), list):
        problems.append(f"dump.dump_list = {dump['dump_list']!r}: must be a list; an empty one dumps every kernel")
    path = dump.get("dump_path")
    if not isinstance(path, str) or not path:
        problems.append("dump.dump_path: must name the folder for the kernels")
    elif not Path(path).is_dir():
        problems.append(f"dump.dump_path = {path!r}: is not an existing folder; make it first")
    for key, words in _CHOICES.items():
        if key in dump and dump[key] not in words:
            near = did_you_mean(str(dump[key]), words)
            problems.append(f"dump.{key} = {dump[key]!r}: must be one of {', '.join(words)}.{near}")
    return problems


class VendorKernelDump:
    """The vendor's dump as a context. It may be entered again while it is on: initialising it twice is an error there."""

    def __init__(self, acl_config: Path) -> None:
        content = read_config_file(acl_config)
        problems = acl_problems(content)
        if problems:
            raise ConfigError(problems, str(acl_config))
        npu = npu_of_process()
        if npu is None:
            raise CaptureError("a kernel dump by the vendor needs an NPU; import torch_npu before the capture starts")
        self.npu = npu
        self.folder = Path(content["dump"]["dump_path"])
        self._config = str(acl_config)
        self._depth = 0

    def __enter__(self) -> VendorKernelDump:
        self._depth += 1
        if self._depth == 1:
            try:
                self.npu.synchronize()  # what was started before does not belong to the call
                self.npu.init_dump()
                try:
                    self.npu.set_dump(self._config)
                except BaseException:
                    self.npu.finalize_dump()
                    raise
            except BaseException:
                self._depth = 0
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            try:
                self.npu.synchronize()
            finally:
                self.npu.finalize_dump()


class Around(Protocol):
    """Who runs a call of the program in its place."""

    def run(self, call: OpenCall, func: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class KernelsOfOverflows:
    """Runs a forward call that has overflowed again with the vendor's dump on, as it was: same arguments, same chance."""

    def __init__(self, dump: VendorKernelDump, observer: Observer) -> None:
        self._dump = dump
        self._observer = observer
        self._last: dict[int, tuple[OpenCall, Run, _Copies]] = {}

    def run(self, call: OpenCall, func: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` returns, or raises. What it was given is remembered until the next call of this thread."""
        copies = _Copies()
        try:
            copies.take(self._dump.npu, args, kwargs)
            self._last[call.thread] = (call, func, copies)
        except Exception as error:  # the hook border: the program goes on
            self._observer.trouble(f"the arguments of {call.kind}.{call.name}", error)
        return func(*args, **kwargs)

    def repeat(self, call: OpenCall, name: str) -> None:
        """The call of this thread that ended last, once more; nothing for another call, which has no kernels of its own."""
        last = self._last.pop(call.thread, None)
        if last is None or last[0] is not call:
            return
        _, func, copies = last
        try:
            with _chance(self._dump.npu, copies.random), _undisturbed(), torch.no_grad():
                args, kwargs = copies.given
                with self._dump:
                    func(*args, **kwargs)
        except Exception as error:  # the hook border
            self._observer.trouble(f"the kernels of {name}", error)
            return
        self._observer.note(f"the kernels of {name} are in {self._dump.folder}, written by the vendor's dump")


class KernelsBelow:
    """Runs the one named call with the vendor's dump on: itself, or its backward when gradients are given."""

    def __init__(
        self,
        dump: VendorKernelDump,
        observer: Observer,
        name: str,
        is_named: Callable[[OpenCall], bool],
        gradients: Mapping[str, tuple[DType, tuple[int, ...], bytes | memoryview]],
    ) -> None:
        problems = []
        if name.startswith("Module."):
            problems.append(f"below = {name!r}: the vendor's dump is for one function, not for a module")
        if name.endswith(".backward") and not gradients:
            problems.append("backward_input: give the recorded gradients of the call's outputs (.pt or .npy files)")
        if problems:
            raise ConfigError(problems, "capture")
        self._dump = dump
        self._observer = observer
        self._name = name
        self._is_named = is_named
        self._gradients = [_tensor(*stored) for stored in gradients.values()]
        self._places = [_place_in(path) for path in gradients]
        self._backward = name.endswith(".backward")

    def run(self, call: OpenCall, func: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` returns, or raises. Trouble with the dump is noted and changes nothing."""
        if not self._is_named(call):
            return func(*args, **kwargs)
        return (self._around_backward if self._backward else self._around_forward)(func, args, kwargs)

    def _around_forward(self, func: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on = self._tried(self._dump.__enter__)
        try:
            return func(*args, **kwargs)
        finally:
            if on and self._tried(self._dump.__exit__):
                self._tell()

    def _around_backward(self, func: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call may write its inputs and draw random numbers, so copies of both are taken before it."""
        copies = _Copies()
        taken = self._tried(lambda: copies.take(self._dump.npu, args, kwargs))
        result = func(*args, **kwargs)
        if taken:
            with at_work(self._observer.state()):
                if self._tried(lambda: self._repeat(func, copies)):
                    self._tell()
        return result

    def _repeat(self, func: Run, copies: _Copies) -> None:
        with _chance(self._dump.npu, copies.random), _undisturbed(), torch.enable_grad():
            args, kwargs, inputs = copies.arguments()
            result = func(*args, **kwargs)
            outputs, grads = self._paired(args[0] if result is None and args else result)
            with self._dump:
                # Not backward(): it would add kernels of its own, which sum the gradients up in the leaves.
                torch.autograd.grad(outputs, inputs, grads, allow_unused=True)

    def _paired(self, result: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs and their gradients: by the place in the file's name where it is one, else in order."""
        found = {".".join(map(str, path or (0,))): leaf for path, leaf in leaves(result) if isinstance(leaf, Tensor)}
        if not found:
            kind = type(result).__name__
            raise CaptureError(f"its result, a {kind}, is not of tensor type and cannot be automatically derived")
        outputs = {place: leaf for place, leaf in found.items() if leaf.requires_grad}
        if not outputs:
            raise CaptureError("it has no backward: none of its inputs requires a gradient")
        places = [place for place in self._places if place in outputs]
        if len(set(places)) < len(self._gradients):
            places = list(outputs)
        if len(places) != len(self._gradients):
            raise CaptureError(f"{len(self._gradients)} gradients were given for its {len(outputs)} outputs")
        chosen = [outputs[place] for place in places]
        return chosen, [grad.to(output.device) for grad, output in zip(self._gradients, chosen, strict=True)]

    def _tried(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # the hook border: the program goes on
            self._observer.trouble(f"the kernels of {self._name}", error)
            return False
        return True

    def _tell(self) -> None:
        self._observer.note(f"the kernels of {self._name} are in {self._dump.folder}, written by the vendor's dump")


class _Copies:
    """The arguments of a call and the random states as they were before it. One tensor given twice is one copy."""

    random: tuple[Tensor, Tensor]
    given: tuple[tuple[Any, ...], dict[str, Any]]

    def take(self, npu: Npu, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made: dict[int, tuple[Tensor, bool]] = {}
        self.random = _random_states(npu)
        with _undisturbed(), torch.no_grad():
            self.given = internals.tree_map(self._copy, (args, kwargs))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """The arguments for a second run, and those tensors among them whose gradients are asked for."""
        inputs = [made.requires_grad_() for made, follow in self._made.values() if follow]
        # A leaf must not be written to, so the call gets a copy of it; the gradient of a copy needs no kernel.
        passed = {id(leaf): leaf.clone() for leaf in inputs}
        args, kwargs = internals.tree_map(lambda value: passed.get(id(value), value), self.given)
        return args, kwargs, inputs

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value.detach().clone(), value.requires_grad
        return self._made[id(value)][0]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No mode of the user sees what is done inside, and tensors are ordinary ones."""
    with internals.no_functions(), internals.no_dispatch_modes(), torch.inference_mode(False):
        yield


@contextlib.contextmanager
def _chance(npu: Npu, states: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Random numbers are drawn from these states inside, and go on as before afterwards."""
    now = _random_states(npu)
    try:
        _set_random_states(npu, states)
        yield
    finally:
        _set_random_states(npu, now)


def _random_states(npu: Npu) -> tuple[Tensor, Tensor]:
    return torch.default_generator.get_state(), npu.get_rng_state()


def _set_random_states(npu: Npu, states: tuple[Tensor, Tensor]) -> None:
    torch.default_generator.set_state(states[0])
    npu.set_rng_state(states[1])


def _place_in(path: str) -> str:
    """The place of an output in the name of its gradient: `0` in `Tensor.mul.3.backward.input.0.pt`; else nothing."""
    found = _PLACE.search(Path(path).name)
    return "" if found is None else found[1]


def _tensor(dtype: DType, shape: tuple[int, ...], stored: bytes | memoryview) -> Tensor:
    kind = getattr(torch, dtype.name)
    content = bytearray(stored)
    return (torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)).reshape(shape)
