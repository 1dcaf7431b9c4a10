"""What torch computes otherwise while any dispatch mode is on, and how it is run without ours: as one call, without its kernels.

torch's formulas ask whether a mode is on (`isTensorSubclassLike`) and then leave out what a tensor without memory could not do:
reading a number, writing in place, choosing by a mask. That rounds otherwise, keeps another dtype, or leaves out a check. And kernels
that a mode has called run without autocast and without lazy conjugation, on which some of them count.
The lists are of those who call `c10::impl::dispatch_mode_enabled` in torch's library, less those that get the same bits in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.mode_stacks import DISPATCH
from ulpscope.frameworks.torch.nodes import graph_behind
from ulpscope.frameworks.torch.warning_lines import call_from, program_frame

Asks = Callable[[tuple[Any, ...], dict[str, Any]], bool]

# Nodes of autograd, by the name of their class.
NODES = frozenset(
    [
        "ProdBackward0",
        "ProdBackward1",
        "CumprodBackward0",
        "MaskedFillBackward1",
        "MaxBackward1",
        "MinBackward1",
        "MedianBackward0",
        "NanmedianBackward0",
        "ForeachMaxBackward1",
        "LinalgDetBackward0",
        "LinalgEigBackward0",
        "LinalgEighBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
    ]
)


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _broadcasts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A batch of one beside a batch of many is folded into one product."""
    batches = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)][:3]
    if any(item.dim() != 3 for item in batches):
        return False
    sizes = [item.shape[0] for item in batches]
    return all(type(size) is int for size in sizes) and len(set(sizes)) > 1  # a symbol is not asked


def _autocasts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not all(internals.is_excluded(key) for key in _AUTOCAST)


def _mixes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A bias of another dtype is added in place."""
    found = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
    return len(found) == 3 and found[2].dtype is not found[0].dtype and not _autocasts(args, kwargs)


def _smooths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The weights of smoothed targets are summed without those that are ignored."""
    weighted = isinstance(kwargs.get("weight", args[2] if len(args) > 2 else None), Tensor)
    return weighted and bool(kwargs.get("label_smoothing", len(args) > 5))


def _of_singular_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    kind = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else None))
    return kind == "nuc" or kind in (2, -2)


def _nuclear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("p", args[1] if len(args) > 1 else None) == "nuc"


def _without_vectors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("compute_uv", args[2] if len(args) > 2 else True) is False


_DEVICES = [
    device
    for device in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1")
    if internals.dispatch_key(f"Autocast{device}") is not None
]
_AUTOCAST = [internals.dispatch_key(f"Autocast{device}") for device in _DEVICES]
# Calls of the program, by their name in a dump, and for which arguments.
CALLS: dict[str, Asks] = {
    # Without a mode and a gradient, torch asks its library for the values alone: another algorithm.
    **dict.fromkeys(
        ["linalg_svdvals", "linalg_eigvals", "linalg_eigvalsh", "linalg_cond", "linalg_matrix_rank"], _always
    ),
    **dict.fromkeys(["linalg_norm", "linalg_matrix_norm"], _of_singular_values),
    "nuclear_norm": _always,
    "norm": _nuclear,
    "svd": _without_vectors,
    # Kernels that count on lazy conjugation and on autocast.
    **dict.fromkeys(["linalg_pinv", "pinverse"], _always),
    "bilinear": _autocasts,
    **dict.fromkeys(
        ["matmul", "__matmul__", "__rmatmul__", "linalg_matmul", "scaled_dot_product_attention"], _broadcasts
    ),
    **dict.fromkeys(["cross_entropy", "cross_entropy_loss"], _smooths),
    "linear": _mixes,
    **dict.fromkeys(["quantile", "nanquantile"], _always),
    "ctc_loss": _always,
}


_OF_TORCH = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "quantized"})
# Keys that a mode finds excluded although it was the way to the mode that excluded them, or nobody.
_ABOVE = [
    internals.dispatch_key(name)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
    if internals.dispatch_key(name) is not None
]


@cache
def _keeps(func: Any) -> Any:
    """For an operator that is none of torch's: which keys stay excluded in its kernel, None where that is left to torch."""
    name = func._schema.name
    if name.partition("::")[0] in _OF_TORCH or not internals.chooses_keys:
        return None
    kept = internals.core.DispatchKeySet(internals.dispatch_key("Undefined"))
    name = func.name()
    ways = [f"Autograd{device}" for device in ("", *_DEVICES)]
    if any(internals.core._dispatch_has_kernel_for_dispatch_key(name, way) for way in ways):
        for key in _ABOVE:
            kept = kept.add(key)
    for device, key in zip(_DEVICES, _AUTOCAST, strict=True):
        if internals.core._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{device}"):
            kept = kept.add(key)
    return kept


def run_as_called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a kernel from a mode. One that is not of torch may be made of any calls of torch: they find autograd, autocast and lazy
    conjugation as they were when the program called it."""
    kept = _keeps(func)
    if kept is None:
        kernel = func._op if type(func) is internals.Overload else func  # no line of torch's between
        return call_from(program_frame(), kernel, args, kwargs)
    with internals.core._RestorePythonTLSSnapshot():
        excluded = internals.core._dispatch_tls_local_exclude_set() | kept
    with internals.core._ForceDispatchKeyGuard(internals.core._dispatch_tls_local_include_set(), excluded):
        return func(*args, **kwargs)


WHY = "torch computes it otherwise while they are watched"


class _Absence:
    """Takes a mode off its thread while a node runs. The engine gives each node the state of the thread that started the pass: where
    a node raises, the mode is there again."""

    __slots__ = ("left", "mode")

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.left = False

    def begin(self, _: Any) -> None:
        if DISPATCH.holds_only(self.mode):
            self.mode.away += 1
            DISPATCH.pop()
            self.left = True

    def end(self, _in: Any, _out: Any) -> None:
        if self.left and not DISPATCH.count(self.mode):
            DISPATCH.insert(self.mode, 0)
        self.forget()

    def forget(self) -> None:
        if self.left:
            self.left = False
            self.mode.away -= 1


@contextmanager
def nodes_run_without(mode: Any, roots: Any) -> Iterator[None]:
    """Within, the nodes in `NODES` of the graph behind some tensors run without this dispatch mode."""
    handles = []
    absences = []
    with internals.no_functions():
        # Asked of the whole graph, as late as when it runs: nodes come also of what nobody has watched, and of other nodes.
        for node in (node for node in graph_behind(roots) if type(node).__name__ in NODES):
            absence = _Absence(mode)
            absences.append(absence)
            handles += [node.register_prehook(absence.begin), node.register_hook(absence.end)]
            mode.tap.unwatched(mode.state, type(node).__name__, WHY, node)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for absence in absences:
            absence.forget()
