"""Memory that nobody has written: from `torch.empty` on, through every view and parameter of it, until calls have filled it.

What such memory holds is left from whoever had it before: it means nothing, and differs from run to run. Kept by memory, not by
tensor, and element by element, since programs fill a buffer a row or a column a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.names import UNINITIALISED, Api
from ulpscope.frameworks.torch.tensors import leaves
from ulpscope.model.names import INIT, KINDS
from ulpscope.model.operators import Trait, traits
from ulpscope.model.records import UNWRITTEN

# Said where writes came that we cannot follow: then there is something to know, and we do not.
UNSURE = "memory that was uninitialised, and was written in a way that is not followed; fill it by one call"
# More elements than this are filled by one call, or not followed.
_MOST = 1 << 26
_OURS = (Tensor, torch.nn.Parameter)
_GROWN = "resize"


class _Region:
    """The memory of one storage. `left`: how many elements nobody has written; `written`: which somebody has, once that is asked."""

    __slots__ = ("is_unsure", "itemsize", "left", "storage", "version", "written")

    def __init__(self, storage: Any, size: int, itemsize: int, version: int) -> None:
        self.storage = internals.weak_storage(storage)
        self.left = size // itemsize
        self.itemsize = itemsize
        self.version = version
        self.written: Tensor | None = None
        self.is_unsure = False

    def part(self, value: Tensor) -> Tensor | None:
        """The part of `written` that a tensor is; None where it cannot be told."""
        if value.element_size() != self.itemsize or self.is_unsure:
            return None
        if self.written is None:
            if self.left > _MOST:
                return None
            self.written = torch.zeros(self.left, dtype=torch.bool, device="cpu")
        return self.written.as_strided(value.size(), value.stride(), value.storage_offset())


class Unwritten:
    """`places` is by address: C looks there whether there is anything to ask."""

    def __init__(self) -> None:
        self.places: dict[int, _Region] = {}
        self._sweep_at = 64

    def why(self, value: Any) -> str | None:
        """The reason not to read a tensor of which something was never written."""
        region = self._region(value)
        if region is None:
            return None
        if region.is_unsure:
            return UNSURE
        with _plainly():
            part = region.part(value) if region.written is not None else None
            return UNWRITTEN if value.numel() and (part is None or not part.all().item()) else None

    def called(self, api: Api, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call of the program has returned: what it made, and what it wrote."""
        name = api.name.partition(".")[0]
        first = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if api.treatment == UNINITIALISED:
            if not name.startswith(_GROWN):
                self._begin(result)
            return
        if not self.places:
            return
        if kwargs.get("out") is not None:
            self.filled(leaf for _, leaf in leaves(kwargs["out"]))
        if (
            traits(name) & (Trait.COPIES | Trait.CASTS)
            and self.why(first) == UNWRITTEN
            and self._region(result) is None
        ):
            self._begin(result)
        elif api.mutates or api.kind == INIT:
            self._wrote(api.kind, name, first, args, kwargs)

    def filled(self, values: Iterable[Any]) -> None:
        """These tensors were written whole."""
        for value in values:
            region = self._region(value)
            if region is None:
                continue
            with _plainly():
                if value.numel() * value.element_size() == value.untyped_storage().nbytes():
                    self._end(value)
                else:
                    self._fill(value, region, region.part(value))

    def kernel_called(
        self, api: Api, written: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """The same of a kernel, whose schema tells what it writes; the versions of that rise later."""
        name, _, overload = api.name.partition(".")
        if not written:
            self.called(api, args, kwargs, result)
        elif "out" in overload:
            self.filled(written)
        elif args:
            self._wrote(api.kind, name, args[0], args, kwargs)
        for value in written:
            region = self._region(value, later=True)
            if region is not None:
                region.version = max(region.version, _version(value) + 1)

    def give_up(self, values: Iterable[Any]) -> None:
        """Whoever has these tensors may write them without torch, and will have had a reason to ask."""
        for value in values:
            if self._region(value) is not None:
                self._end(value)

    def forget(self) -> None:
        self.places.clear()

    # --- regions ------------------------------------------------------------------------------------------------

    def _begin(self, value: Any) -> None:
        if (
            type(value) not in _OURS
            or value.is_meta
            or value.layout is not torch.strided
            or internals.weak_storage is None
        ):
            return
        with _plainly():
            storage = value.untyped_storage()
            if storage.nbytes() and storage.data_ptr():
                self.places[_address(value)] = _Region(storage, storage.nbytes(), value.element_size(), _version(value))
        if len(self.places) > self._sweep_at:
            for address in [address for address, region in self.places.items() if region.storage.expired()]:
                del self.places[address]
            self._sweep_at = 2 * len(self.places) + 64

    def _end(self, value: Tensor) -> None:
        self.places.pop(_address(value), None)

    def _region(self, value: Any, *, later: bool = False) -> _Region | None:
        """That of a tensor, unless somebody has written it unseen. `later`: its version tells nothing yet."""
        if not self.places or type(value) not in _OURS:
            return None
        try:
            address = 0 if value.is_meta else _address(value)
        except (RuntimeError, NotImplementedError):
            return None  # it has no memory
        region = self.places.get(address)
        if region is None:
            return None
        with _plainly():
            gone = region.storage.expired() or value.untyped_storage()._cdata != region.storage.cdata
            if gone or (not later and _version(value) > region.version):
                del self.places[address]
                return None
            return region

    def _wrote(self, kind: str, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call has written its first argument: whole, in part, or by what was there."""
        region = self._region(target, later=True)
        if region is None:
            return
        region.version = max(region.version, _version(target))
        if kind not in KINDS or kind == INIT or Trait.FILLS in traits(name):
            source = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
            if name != "copy_" or self.why(source) is None:
                self.filled((target,))
            return
        places = _PLACES.get(name)
        if places is None:
            return
        with _plainly():
            part = region.part(target)
            if part is None or not all(
                leaf.is_cpu for value in args for _, leaf in leaves(value) if isinstance(leaf, Tensor)
            ):
                region.is_unsure = True
                return
            assert region.written is not None
            try:
                inside = places(part, *args[1:], **kwargs)
            except Exception:  # the hook border: whatever indexing by the program's own objects raises
                region.is_unsure = True
                return
            if inside is not None:
                self._fill(target, region, inside)
            else:
                region.left = int((~region.written).sum().item())
                if not region.left:
                    self._end(target)

    def _fill(self, value: Tensor, region: _Region, part: Tensor | None) -> None:
        if part is None:
            region.is_unsure = True
            return
        region.left -= int(part.numel() - part.sum().item())
        part.fill_(True)
        if region.left <= 0:
            self._end(value)


def _setitem(part: Tensor, index: Any, *rest: Any) -> Tensor | None:
    """What is written, where that is a view; else it is marked here."""
    found = part[index]
    if found.untyped_storage()._cdata == part.untyped_storage()._cdata:
        return found
    part[index] = True
    return None


def _at(part: Tensor, dim: int, index: Tensor, *rest: Any, **more: Any) -> None:
    part.index_fill_(dim, index, True)


def _scattered(part: Tensor, dim: int, index: Tensor, *rest: Any, **more: Any) -> None:
    part.scatter_(dim, index, True)


def _masked(part: Tensor, mask: Tensor, *rest: Any, **more: Any) -> None:
    part.logical_or_(mask)


def _put(part: Tensor, indices: Any, *rest: Any, **more: Any) -> None:
    part[tuple(slice(None) if each is None else each for each in indices)] = True


# Calls that write a part of their first argument: which. They mark it, or give it as a view.
_PLACES: dict[str, Any] = {
    "__setitem__": _setitem, "index_copy_": _at, "index_fill_": _at, "scatter_": _scattered, "masked_fill_": _masked,
    "masked_scatter_": _masked, "index_put_": _put,
}  # fmt: skip


def _plainly() -> ExitStack:
    """No mode hears of our own calls."""
    stack = ExitStack()
    for quiet in (internals.no_functions(), internals.no_dispatch(), torch.no_grad()):
        stack.enter_context(quiet)
    return stack


def _address(value: Tensor) -> int:
    """Where the memory of a tensor begins."""
    return int(value.data_ptr() - value.storage_offset() * value.element_size())


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version
