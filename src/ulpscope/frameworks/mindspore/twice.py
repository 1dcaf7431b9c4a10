"""Functions of MindSpore's dynamic graphs run twice, the second time with their arguments slightly changed.

Statistics are made with numpy: many of MindSpore's own functions have no kernel on a CPU. A function is exchanged while the
check is on and put back afterwards; one that is called by another is part of it.
"""

from __future__ import annotations

import logging
import math
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.frameworks.mindspore.process import mindspore
from ulpscope.model.errors import ConfigError, did_you_mean

_log = logging.getLogger(__name__)
Array = NDArray[Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
FLIPPED = "symbol_flipping"
_KINDS = {"ops": "Functional", "mint": "Mint", "mint.nn.functional": "MintFunctional", "Tensor": "Tensor"}
_OPERATORS = ("__add__", "__sub__", "__mul__", "__truediv__", "__matmul__", "__pow__", "__neg__")
# By dtype: the largest ratio that counts as consistent, and the smallest number that is compared.
_LIMITS = {"Float16": (1.002, 1e-6), "BFloat16": (1.004, 1e-4), "Float32": (1.0002, 1e-8), "Float64": (1.0002, 1e-16)}
_INTEGERS = {"float16": "<u2", "float32": "<u4", "float64": "<u8"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A result that changed by more than it should."""

    name: str
    ratio: float | str
    dtype: str
    shape: str
    output: int | None


class Twice:
    """The check of some functions, all by default. `tell` is told of differences."""

    def __init__(self, names: Sequence[str], mode: str, *, fix: bool, tell: Callable[[Difference], None]) -> None:
        self._names, self._mode, self._fix, self._tell = names, mode, fix, tell
        self._exchanged: list[tuple[Any, str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._local = threading.local()

    def start(self) -> None:
        """Exchanges the functions. ConfigError for a name that there is not."""
        if self._exchanged:
            return
        module = mindspore()
        for owner, attribute, kind in self._targets(module):
            original = getattr(owner, attribute)
            around = self._around(module, original, f"{kind}.{attribute}")
            setattr(owner, attribute, around)
            self._exchanged.append((owner, attribute, original))

    def stop(self) -> None:
        while self._exchanged:
            owner, attribute, original = self._exchanged.pop()
            setattr(owner, attribute, original)

    def step(self) -> None:
        self._counts.clear()

    def _targets(self, module: Any) -> Iterator[tuple[Any, str, str]]:
        known = {path: (_owner(module, path), kind) for path, kind in _KINDS.items()}
        if not self._names:
            for path, (owner, kind) in known.items():
                for name in _OPERATORS if path == "Tensor" else sorted(vars(owner)):
                    if path == "Tensor" or (name[0] != "_" and isinstance(vars(owner)[name], types.FunctionType)):
                        yield owner, name, kind
        for text in self._names:
            path, _, name = text.removeprefix("mindspore.").rpartition(".")
            if path not in known or not callable(getattr(known[path][0], name, None)):
                near = did_you_mean(name, dir(known[path][0])) if path in known else ""
                places = ", ".join(f"mindspore.{place}" for place in known)
                raise ConfigError([f"free_benchmark.list: {text!r} is no function of {places}.{near}"])
            yield known[path][0], name, known[path][1]

    def _around(self, module: Any, original: Any, name: str) -> Any:
        def around(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._local, "inside", False):
                return original(*args, **kwargs)
            self._local.inside = True
            try:
                result = original(*args, **kwargs)
                return self._compare(module, original, name, (args, kwargs), result)
            finally:
                self._local.inside = False

        return around

    def _compare(self, module: Any, original: Any, name: str, given: Arguments, result: Any) -> Any:
        number = self._counts[name]
        self._counts[name] += 1
        try:
            changed = PERTURBATIONS[self._mode](module, given)
            if changed is None:
                return result
            again = original(*changed[0], **changed[1])
            several = isinstance(result, tuple | list)
            pairs = list(zip(result, again, strict=True)) if several else [(result, again)]
            for at, (found, other) in enumerate(pairs):
                self._judge(module, f"{name}.{number}.forward", given, found, other, at if several else None)
            if not self._fix:
                return result
            fixed = [_like(module, found, other) for found, other in pairs]
            return type(result)(fixed) if several else fixed[0]
        except Exception as error:  # the hook border: MindSpore has not every function in every dtype
            _log.info("%s is not run twice: %s: %s", name, type(error).__name__, str(error)[:200])
            return result

    def _judge(self, module: Any, name: str, given: Arguments, found: Any, other: Any, at: int | None) -> None:
        if not isinstance(found, module.Tensor) or str(found.dtype) not in _LIMITS:
            return
        limit, small = _LIMITS[str(found.dtype)]
        quotient = ratio(_numbers(module, found), _numbers(module, _like(module, found, other)), math.sqrt(small))
        if quotient == FLIPPED or not float(quotient) <= (1.0 if self._mode == "no_change" else limit):
            first = _floats(module, given)[0]
            self._tell(Difference(name, quotient, str(first.dtype), str(tuple(first.shape)), at))


def ratio(found: Array, again: Array, bound: float) -> float | str:
    """The largest quotient of two elements above the bound, at least 1; inf where one of them is not finite."""
    left, right = found.astype(np.float64), again.astype(np.float64)
    if not left.size:
        return 1.0
    finite = np.isfinite(left)
    if not np.array_equal(finite, np.isfinite(right)):
        return math.inf
    left, right = np.where(finite, left, 0.0), np.where(finite, right, 0.0)
    if np.any((left * right < 0) & (np.abs(left) > bound) & (np.abs(right) > bound)):
        return FLIPPED
    above, below = np.maximum(np.abs(left), bound), np.maximum(np.abs(right), bound)
    return float(np.max(np.maximum(above / below, below / above)))


# --- perturbations ------------------------------------------------------------------------------------------------


def improve_precision(module: Any, given: Arguments) -> Arguments | None:
    """float16 and bfloat16 as float32; where there is none, float32 as float64."""
    kinds = {str(leaf.dtype) for leaf in _floats(module, given)}
    wide = module.float32 if kinds & {"Float16", "BFloat16"} else module.float64
    narrow = ("Float16", "BFloat16") if wide == module.float32 else ("Float32",)
    if not kinds & {*narrow}:
        return None
    done: Arguments = _mapped(module, given, lambda leaf: leaf.astype(wide) if str(leaf.dtype) in narrow else leaf)
    return done


def add_noise(module: Any, given: Arguments) -> Arguments | None:
    """Every element of the first tensor moved by one unit in the last place, up or down by chance."""

    def move(numbers: Array) -> Array:
        signs = np.random.default_rng(0).integers(0, 2, numbers.shape) * 2 - 1
        return np.asarray(numbers * (1 + np.finfo(numbers.dtype).eps * signs), dtype=numbers.dtype)

    return _first(module, given, move)


def bit_noise(module: Any, given: Arguments) -> Arguments | None:
    """The last bit of every normal number of the first tensor turned over."""

    def turn(numbers: Array) -> Array:
        turned = (np.ascontiguousarray(numbers).view(_INTEGERS[numbers.dtype.name]) ^ 1).view(numbers.dtype)
        return np.where(np.abs(numbers) > np.finfo(numbers.dtype).smallest_normal, turned, numbers)

    return _first(module, given, turn)


def no_change(module: Any, given: Arguments) -> Arguments | None:
    """The same again."""
    return given if _floats(module, given) else None


PERTURBATIONS: dict[str, Callable[[Any, Arguments], Arguments | None]] = {
    "improve_precision": improve_precision,
    "add_noise": add_noise,
    "bit_noise": bit_noise,
    "no_change": no_change,
}


def _first(module: Any, given: Arguments, change: Callable[[Array], Array]) -> Arguments | None:
    """Changes the first tensor whose numbers numpy has."""
    chosen = next((leaf for leaf in _floats(module, given) if leaf.size and str(leaf.dtype) != "BFloat16"), None)
    if chosen is None:
        return None
    changed = module.Tensor(change(chosen.asnumpy()))
    done: Arguments = _mapped(module, given, lambda leaf: changed if leaf is chosen else leaf)
    return done


def _mapped(module: Any, value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, module.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(module, each, change) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(module, each, change) for key, each in value.items()}
    return value


def _floats(module: Any, given: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(module, given, lambda leaf: found.append(leaf) if str(leaf.dtype) in _LIMITS else None)
    return found


def _numbers(module: Any, tensor: Any) -> Array:
    plain = tensor.astype(module.float32) if str(tensor.dtype) == "BFloat16" else tensor
    return np.asarray(plain.asnumpy())


def _like(module: Any, found: Any, other: Any) -> Any:
    is_tensor = isinstance(found, module.Tensor) and isinstance(other, module.Tensor)
    return other.astype(found.dtype) if is_tensor and other.dtype != found.dtype else other


def _owner(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module
