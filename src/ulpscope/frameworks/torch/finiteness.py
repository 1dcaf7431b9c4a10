"""Whether a tensor holds inf or nan, told as cheaply as possible: no call may cost more than reading its result once.

On the CPU a sum is finite only if every element is, and torch sums faster than anything else reads; a sum that is not
finite proves nothing, as it may have overflowed itself, so the elements are counted then. Other devices are asked, and answer
later.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.api_arguments import UnrunnableError, function_of
from ulpscope.frameworks.torch.cuda_gauge import is_capturing
from ulpscope.frameworks.torch.dense import dense_form, is_enormous, unexpanded, untouchable
from ulpscope.frameworks.torch.overflow_answers import FINITE, HAS_INF, HAS_NAN, Answer, DeviceAnswers
from ulpscope.frameworks.torch.overflow_replay import has_pole, slope_has_pole
from ulpscope.frameworks.torch.replay_recorded import arguments_at
from ulpscope.frameworks.torch.summary import is_wrapped
from ulpscope.frameworks.torch.tensors import Unrecordable
from ulpscope.model.dtypes import DTYPES
from ulpscope.model.records import PathStep
from ulpscope.native import measuring
from ulpscope.native.schema import MEASURE

_CODES = {getattr(torch, name): dtype.code for name, dtype in DTYPES.items() if hasattr(torch, name)}
_SMALL, _LARGE = 1 << 14, 1 << 26
_COUNTS = struct.Struct("<3Q")
_AT_COUNTS = MEASURE.offset("nan")
_ZEROS = bytes(_COUNTS.size)
_SHARE = 16
_ROOM = 1 << 30


class TorchFiniteness:
    """The question of one capture. Answers are bits: HAS_INF, HAS_NAN; what cannot be read counts as finite."""

    def __init__(self) -> None:
        self._devices = DeviceAnswers()
        self.room = 0  # bytes of a device that may be kept alive until its answers are back

    def ask(self, value: Any) -> int | Answer:
        """What a leaf holds that is not finite: at once on the CPU, later from another device."""
        if isinstance(value, Tensor):
            if not (value.dtype.is_floating_point or value.dtype.is_complex):
                return FINITE
            with internals.no_functions(), internals.no_dispatch():
                try:
                    return self._in_tensor(value)
                except (RuntimeError, NotImplementedError, TypeError, AttributeError):
                    return FINITE
        return _in_scalar(value)

    def of(self, value: Any) -> int:
        """The same, waited for."""
        found = self.ask(value)
        return found if isinstance(found, int) else found.bits(wait=True) or FINITE

    def has_pole(
        self, kind: str, name: str, given: Iterable[tuple[tuple[PathStep, ...], Any]], made: Iterable[Any]
    ) -> bool:
        """Whether what a call made is infinite only where its function is. Computed on the CPU; the generator there is left as it was."""
        state = torch.get_rng_state()
        with internals.no_functions(), internals.no_dispatch():
            try:
                leaves = [(path, _here(value)) for path, value in given]
                return has_pole(
                    function_of(kind, name), arguments_at(leaves), [getattr(each, "dtype", None) for each in made]
                )
            except UnrunnableError:
                return False
            finally:
                torch.set_rng_state(state)

    def slope_has_pole(self, name: str, gradients: Iterable[Any]) -> bool:
        with internals.no_functions(), internals.no_dispatch():
            return slope_has_pole(name, gradients)

    def place(self, value: Any) -> tuple[int, int] | None:
        """The memory of a tensor on a device that answers later: where it begins and how long it is. None for any other."""
        if not isinstance(value, Tensor) or value.is_cpu or value.layout is not torch.strided:
            return None
        with internals.no_functions():
            try:
                if untouchable(value) is not None:
                    return None
                storage = value.untyped_storage()
                return storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):
                return None

    def same(self, value: Any, other: Any) -> bool:
        """Whether two tensors have the same elements by having the same memory, in the same layout."""
        with internals.no_functions():
            return (value.data_ptr(), value.dtype, value.shape, value.stride()) == (
                other.data_ptr(),
                other.dtype,
                other.shape,
                other.stride(),
            )

    def _in_tensor(self, value: Tensor) -> int | Answer:
        if type(value) is not Tensor or value.layout is not torch.strided or not value.is_cpu or is_wrapped(value):
            dense = _dense(value)
            if dense is None:
                return FINITE
            value = dense
        if not value.numel() or not value.data_ptr():  # freed memory, zeros that have none
            return FINITE
        if value.is_cpu:
            return _on_cpu(unexpanded(value))
        if value.is_cuda and is_capturing():
            return FINITE  # computed at each replay, which nobody sees
        if not self.room:
            self.room = _room(value.device)
        with torch.no_grad():
            return self._devices.ask(value)

    def copy(self, value: Any) -> Any:
        """The same leaf with memory of its own."""
        if not isinstance(value, Tensor):
            return value
        if type(value) not in (Tensor, Parameter) and hasattr(value, "__tensor_flatten__"):
            return Unrecordable("torch.Tensor", "overwritten by the call: a wrapper without memory of its own")
        with internals.no_functions(), internals.no_dispatch(), torch.no_grad():
            try:
                reason = untouchable(value)
                if reason is not None:
                    return Unrecordable("torch.Tensor", f"overwritten by the call: {reason}")
                plain = value.detach()
                return unexpanded(plain).clone().expand(plain.shape) if is_enormous(plain) else plain.clone()
            except (RuntimeError, NotImplementedError, TypeError) as error:
                return Unrecordable("torch.Tensor", f"overwritten by the call: {error}"[:200])

    def alias(self, value: Any) -> Any:
        """Another tensor with the same memory."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        with internals.no_functions(), internals.no_dispatch():
            try:
                return value.detach()
            except RuntimeError:
                return value  # inside a transform, which has no rule for it

    def version(self, value: Any) -> int | None:
        """Rises when somebody writes to a tensor; None where torch does not count."""
        return value._version if isinstance(value, Tensor) and not value.is_inference() else None

    def is_on_cpu(self, value: Any) -> bool:
        return type(value) is Tensor and value.is_cpu

    def is_always_finite(self, value: Any) -> bool:
        """Whether a leaf can hold neither inf nor nan: whole numbers, truth values, texts."""
        if isinstance(value, Tensor):
            return not (value.dtype.is_floating_point or value.dtype.is_complex)
        return _in_scalar(value) == FINITE

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def shares(self, value: Any, others: Iterable[Any]) -> bool:
        """Whether a tensor lies in the memory of one of the others."""
        with internals.no_functions():
            try:
                place = value.untyped_storage().data_ptr()
                return any(
                    isinstance(other, Tensor) and other.untyped_storage().data_ptr() == place for other in others
                )
            except (RuntimeError, NotImplementedError):
                return False


def _here(value: Any) -> Any:
    if not isinstance(value, Tensor):
        if isinstance(value, Unrecordable):
            raise UnrunnableError("it was overwritten")
        return value
    if type(value) not in (Tensor, Parameter) or value.layout is not torch.strided or value.numel() > _LARGE:
        raise UnrunnableError("no plain tensor, or a very large one")
    return value.detach().cpu()


def _on_cpu(value: Tensor) -> int:
    value = value.detach()
    if value.numel() > _SMALL:
        total = value.sum().item()
        if math.isfinite(total.real) and math.isfinite(total.imag):
            return FINITE
    code = _CODES.get(value.dtype)
    if code is None or value.is_neg() or value.is_conj():
        return (HAS_NAN if bool(value.isnan().any()) else 0) | (HAS_INF if bool(value.isinf().any()) else 0)
    stride = None if value.is_contiguous() else tuple(value.stride())
    row = measuring.measure(value.data_ptr(), code, tuple(value.shape), stride, measuring.STATS, 0, 0, 0)
    counts = row[_AT_COUNTS : _AT_COUNTS + _COUNTS.size]
    if counts == _ZEROS:
        return FINITE
    nan, above, below = _COUNTS.unpack(counts)
    return (HAS_NAN if nan else 0) | (HAS_INF if above or below else 0)


def _room(device: torch.device) -> int:
    try:
        return int(getattr(torch, device.type).get_device_properties(device).total_memory) // _SHARE
    except (AttributeError, RuntimeError):
        return _ROOM


def _dense(value: Tensor) -> Tensor | None:
    """Memory that torch can sum: of a device it is left where it is, of an odd tensor a plain one stands for it."""
    plain = type(value) is torch.nn.Parameter or type(value) is Tensor
    if plain and value.layout is torch.strided:
        return value.detach() if untouchable(value) is None else None
    dense = dense_form(value).values
    return dense if isinstance(dense, Tensor) else None


def _in_scalar(value: Any) -> int:
    kind = type(value)
    if kind is float:
        return HAS_NAN if value != value else HAS_INF if math.isinf(value) else FINITE
    if kind is complex:
        return _in_scalar(value.real) | _in_scalar(value.imag)
    if kind is list or kind is tuple:
        found = FINITE
        for item in value:
            found |= _in_scalar(item)
        return found
    return FINITE
