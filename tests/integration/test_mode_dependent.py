"""What torch computes otherwise while a dispatch mode is on is computed as ever, at level kernel and below the judge."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

import ulpscope
from integration.runs import assert_same, frozen
from ulpscope.frameworks.torch.mode_dependent import NODES
from ulpscope.store.ledger_file import find_ledgers, read_ledger

WATCHED = ("kernel", "judge")
Case = Callable[[], list[Any]]
LIBRARY = torch.library.Library("ulpscope_modes", "DEF")
for name, body in {
    "composed": lambda x: (x * x).sin(),
    "multiplied": lambda x: x @ x,
    "conjugated": lambda x: (x.mH * x) @ x.mH,
}.items():
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, body, "CPU")
OURS = torch.ops.ulpscope_modes


@contextmanager
def watched(how: str, path: Path) -> Iterator[Any]:
    with ulpscope.capture(path, level="kernel") if how == "kernel" else ulpscope.ledger(path) as watch:
        yield watch


def bare_and_watched(case: Case, how: str, path: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    bare = frozen(case())
    torch.manual_seed(0)
    with watched(how, path):
        found = frozen(case())
    return bare, found


def backward(function: Callable[[Tensor], Tensor], *sizes: int, dtype: torch.dtype = torch.float32) -> Case:
    def case() -> list[Any]:
        x = torch.randn(*sizes, dtype=dtype, requires_grad=True)
        y = function(x)
        y.backward(torch.randn_like(y))
        return [y.detach().clone(), x.grad.clone()]  # their versions say how the engine added

    return case


def negated(function: Callable[[Tensor], Tensor]) -> Case:
    """Where a gradient is not passed on there is a zero, and it has a sign."""

    def case() -> list[Any]:
        x = torch.randn(5, requires_grad=True)
        (-function(x)).backward()
        return [x.grad]

    return case


def filled() -> list[Any]:
    value = torch.randn((), requires_grad=True)
    y = torch.randn(999).masked_fill(torch.rand(999) < 0.5, value)
    y.backward(torch.randn(999))
    return [value.grad]


def twice() -> list[Any]:
    x = torch.randn(6, requires_grad=True)
    (grad,) = torch.autograd.grad(x.prod(0), x, create_graph=True)
    grad.backward(torch.randn(6))
    return [grad.detach().clone(), x.grad.clone()]


def determinant_twice() -> list[Any]:
    x = torch.randn(4, 5, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.linalg.det(x).sum(), x, create_graph=True)
    grad.backward(torch.randn_like(grad))
    return [grad.detach().clone(), x.grad.clone()]


def logits() -> list[Any]:
    x = torch.randn(64, requires_grad=True)
    F.binary_cross_entropy_with_logits(x, torch.rand(64, dtype=torch.float64)).backward()
    return [x.grad]


def smoothed() -> list[Any]:
    target = torch.where(torch.rand(999) < 0.3, -100, torch.randint(0, 7, (999,)))
    return [F.cross_entropy(torch.randn(999, 7), target, weight=torch.rand(7), label_smoothing=0.1)]


def in_autocast(function: Callable[[Tensor], Tensor]) -> Case:
    def case() -> list[Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [function(torch.randn(9, 9))]

    return case


def bilinear(x: Tensor) -> Tensor:
    return F.bilinear(x, x, torch.ones(3, 9, 9) / 3)


CASES: dict[str, Case] = {
    "prod": backward(lambda x: x.prod(0), 9, 9),
    "prod of all": backward(torch.prod, 9),
    "prod in bfloat16": backward(lambda x: x.prod(0), 9, 9, dtype=torch.bfloat16),
    "prod with zeros": backward(lambda x: (x * (x > 0)).prod(), 9, 9),
    "cumprod": backward(lambda x: x.cumprod(0), 9, 9),
    "vander": backward(lambda x: torch.linalg.vander(x), 9),
    "twice": twice,
    "det twice": determinant_twice,
    "max": negated(torch.max),
    "median": negated(torch.median),
    "masked_fill": filled,
    "bce": logits,
    "cross_entropy": smoothed,
    "svdvals": lambda: [torch.linalg.svdvals(torch.randn(9, 7))],
    "eigvalsh": lambda: [torch.linalg.eigvalsh(torch.randn(9, 9))],
    "cond": lambda: [torch.linalg.cond(torch.randn(9, 9))],
    "nuclear": lambda: [torch.norm(torch.randn(9, 7), "nuc"), torch.linalg.norm(torch.randn(9, 7), 2)],
    "svd": lambda: [torch.svd(torch.randn(9, 7), compute_uv=False)[1]],
    "rank": lambda: [torch.linalg.matrix_rank(torch.randn(9, 7))],
    "pinv": lambda: [torch.linalg.pinv(torch.randn(9, 9, dtype=torch.complex64))],
    "pinv in autocast": in_autocast(torch.linalg.pinv),
    "bilinear in autocast": in_autocast(bilinear),
    "matmul": lambda: [torch.randn(1, 33, 64) @ torch.randn(7, 64, 33)],
    "bias": lambda: [F.linear(torch.randn(2, 3, 4, 5).transpose(1, 2), torch.randn(6, 5), torch.randn(6).double())],
    "a foreign kernel without autograd": backward(OURS.composed, 6),
    "a foreign kernel in autocast": in_autocast(OURS.multiplied),
    "a foreign kernel and conjugation": lambda: [OURS.conjugated(torch.randn(9, 9, dtype=torch.complex64))],
}


@pytest.mark.parametrize("how", WATCHED)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_same_bits_are_computed(name: str, how: str, tmp_path: Path) -> None:
    assert_same(*bare_and_watched(CASES[name], how, tmp_path))


@pytest.mark.parametrize("how", WATCHED)
@pytest.mark.filterwarnings("ignore")
def test_what_torch_refuses_is_refused_and_the_mode_is_back(how: str, tmp_path: Path) -> None:
    def rotated() -> None:
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        vectors = torch.linalg.eig(x)[1]
        vectors.backward(torch.randn_like(vectors))

    def beyond() -> None:
        torch.quantile(torch.ones(5), torch.tensor([1.5]))

    for case in (rotated, beyond):
        with pytest.raises(RuntimeError) as bare:
            case()
        with watched(how, tmp_path / case.__name__):
            with pytest.raises(RuntimeError) as found:
                case()
            assert torch._C._len_torch_dispatch_stack() == 1
        assert str(found.value) == str(bare.value)
        assert torch._C._len_torch_dispatch_stack() == 0


def test_such_a_node_is_one_call_and_its_neighbours_keep_their_kernels(tmp_path: Path) -> None:
    with watched("kernel", tmp_path) as cap:
        x = torch.randn(9, 9, requires_grad=True)
        (x.prod(0) * 2).sum().backward()
        cap.step()
    dump = ulpscope.open_dump(tmp_path)
    names = [ulpscope.call_text(call) for call in dump.ids()]
    assert "Torch.prod.0.backward" in names or "Tensor.prod.0.backward" in names
    assert "Aten.mul.Tensor.0.backward" in names
    assert not [name for name in names if "cumprod" in name]
    assert [note for note in dump.manifest.notes if note.startswith("ProdBackward1 is recorded without its kernels")]


def test_a_graph_made_before_the_capture_is_computed_as_ever(tmp_path: Path) -> None:
    def graph() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(9, 9, requires_grad=True)
        return x, x.prod(0).exp().sum()

    x, y = graph()
    y.backward()
    again, y = graph()
    with watched("kernel", tmp_path):
        y.backward()
    assert_same(frozen(x.grad), frozen(again.grad))


def test_a_hook_of_the_program_on_such_a_node_sees_the_mode_again_after_it(tmp_path: Path) -> None:
    lengths = []
    with watched("kernel", tmp_path):
        x = torch.randn(9, requires_grad=True)
        y = x.prod(0)
        x.register_hook(lambda grad: lengths.append(torch._C._len_torch_dispatch_stack()))
        y.backward()
    assert lengths == [1]


class Through(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", WATCHED)
def test_beside_a_mode_of_the_program_torch_computes_as_with_that(how: str, tmp_path: Path) -> None:
    def case() -> list[Any]:
        with Through():
            return backward(lambda x: x.prod(0), 9, 9)()

    assert_same(*bare_and_watched(case, how, tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_no_gradient_of_torchs_own_samples_depends_on_a_mode_unless_its_node_is_named() -> None:
    """A mode that passes everything on, without us: tells when another torch has such formulas."""
    from torch.testing._internal.common_methods_invocations import op_db

    wanted = {"prod", "cumprod", "max", "min", "median", "masked_fill", "index_put", "gather", "take", "clamp", "atan2", "logsumexp", "var", "norm", "cummax", "amax", "sort", "where"}  # fmt: skip
    differing: set[str] = set()
    for op in (op for op in op_db if op.name in wanted):
        for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=True))[:6]:
            found = []
            for mode in (nullcontext(), Through()):
                leaves = [x for x in (sample.input, *sample.args) if isinstance(x, Tensor) and x.requires_grad]
                for leaf in leaves:
                    leaf.grad = None
                torch.manual_seed(0)
                with mode:
                    results = op(sample.input, *sample.args, **sample.kwargs)
                    first = results if isinstance(results, Tensor) else results[0]
                    first.backward(-torch.rand_like(first))  # a zero of a gradient has a sign
                found.append([None if leaf.grad is None else leaf.grad.numpy().tobytes() for leaf in leaves])
                node = type(first.grad_fn).__name__
            if found[0] != found[1]:
                differing.add(node)
    assert {"ProdBackward1", "MaxBackward1"} <= differing <= NODES


def judged(path: Path, program: Callable[[], None]) -> list[Any]:
    shutil.rmtree(path, ignore_errors=True)
    with ulpscope.ledger(path):
        program()
    return [row for ledger in find_ledgers(path) for row in read_ledger(ledger)[1]]


def test_zeros_without_memory_are_unknown_to_the_judge(tmp_path: Path) -> None:
    x = torch.randn(5, requires_grad=True)
    rows = judged(tmp_path, lambda: x.sgn().sum().backward())
    assert x.grad is not None
    assert (x.grad + 0).tolist() == [0.0] * 5
    assert "zeros without memory" in (next(row for row in rows if "zerotensor" in row.op).unknown or "")


# The kernel asserts this on CUDA, where it ends the program.
@pytest.mark.parametrize("values", [[0.0, 1.0, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0]])
def test_no_kernel_is_run_again_on_what_is_no_probability(values: list[float], tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def checked(x: Tensor, y: Tensor) -> Tensor:
        seen.append(x)
        assert bool(((x >= 0) & (x <= 1)).all()), x
        return (x - y).abs().log1p()

    ulpscope.reference("ulpscope_modes::probability")(checked)
    x = torch.tensor(values)
    with ulpscope.ledger(tmp_path):
        OURS.probability(x, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert len(seen) > 2
    rows = [row for ledger in find_ledgers(tmp_path) for row in read_ledger(ledger)[1]]
    assert [row.unknown for row in rows if "probability" in row.op] == [None]


LIBRARY.define("probability(Tensor x, Tensor y) -> Tensor")
LIBRARY.impl("probability", lambda x, y: (x - y).abs().log1p(), "CPU")


@pytest.mark.parametrize("how", WATCHED)
def test_torch_believes_no_mode_to_be_on_while_and_after_it_is_watched(how: str, tmp_path: Path) -> None:
    with watched(how, tmp_path):
        torch.ones(2) + 1
        assert not is_in_torch_dispatch_mode()
    assert not is_in_torch_dispatch_mode()
