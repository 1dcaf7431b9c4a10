"""Calls that other classes and modes hear of too, that torch refuses, that raise inside: they are what they were, and so are their records."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ulpscope
from integration.test_fast_is_the_same import recorded
from ulpscope.model.names import call_text
from ulpscope.native import taps

pytestmark = pytest.mark.skipif(taps.C is None, reason="the extension was not built")


def names(run: Path) -> list[str]:
    return [call_text(call) for call in ulpscope.open_dump(run).ids()]


def test_functions_are_found_in_tables_of_the_program(tmp_path: Path) -> None:
    asked: list[Any] = [torch.add, F.linear, torch.Tensor.mul, torch.ones(1).mul, torch.Tensor.shape, torch.linalg.inv]
    table = {function: number for number, function in enumerate(asked)}
    hashes = [hash(function) for function in asked]
    with ulpscope.capture(tmp_path / "run"):
        assert [hash(function) for function in asked] == hashes
        assert [table[function] for function in asked] == list(range(len(asked)))
        assert torch.add == torch._C._VariableFunctions.add


class Doubled(Tensor):
    """A class that has a say: what it is called with is doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, kinds, args, kwargs or {})
        return result * 2 if func in (torch.Tensor.add, torch.cat, torch.Tensor.sum) else result


class Elsewhere:
    """No tensor, and has a say all the same."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "elsewhere", func.__name__

    def __radd__(self, other: Any) -> str:
        return "added"


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Inside(TorchDispatchMode):
    """Computes with a class of its own where torch computes."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor:
            return (result.as_subclass(Doubled) + 0).as_subclass(Tensor)
        return result


def classes() -> list[Any]:
    x, y = torch.ones(2), torch.ones(2).as_subclass(Doubled)
    own = Elsewhere()
    return [
        x.add(y), y.add(x), x + y, torch.cat([x, y]), torch.cat((x, x)), torch.sum(y), torch.add(x, own), x.mul(own), x + own,
        torch.clamp(x, max=y), torch.stack(tensors=[x, x]), torch.add(x, x, alpha=3), x.sum(dtype=torch.float64), y.shape, y.grad,
    ]  # fmt: skip


def modes() -> list[Any]:
    x = torch.arange(3.0, requires_grad=True)
    with Counting() as counting:
        a = x.mul(2) + x
        shape = x.shape
    with Inside():
        b = x * x
    with torch._C.DisableTorchFunctionSubclass():
        c = x.mul(3)
    with torch._C.DisableTorchFunction():
        d = x.mul(4)
    with torch.device("meta"):
        e = torch.ones(2).mul(2).device
    return [a, b, c, d, e, counting.heard, shape]


def refused() -> list[Any]:
    x = torch.ones(2)
    errors: list[Any] = []
    attempts: list[Callable[[], Any]] = [
        lambda: x + "text", lambda: x.mul(), lambda: x.mul(1, 2, 3), lambda: x.view(), lambda: torch.add(x), lambda: x.neg(1),
        lambda: torch.Tensor.mul(1, x), lambda: torch.Tensor.mul(), lambda: torch.cat(x, wrong=1), lambda: x + torch.ones(3),
        lambda: x @ torch.ones(3), lambda: x.reshape(3), lambda: torch.cat([x, 1]), lambda: x.__add__("text"), lambda: x < "text",
    ]  # fmt: skip
    for attempt in attempts:
        try:
            errors.append(attempt())
        except Exception as error:
            errors.append((type(error), str(error).split("\n")[0]))
    return [*errors, x + x, x.mul(2), torch.add(x, x), x.neg(), torch.cat([x, x])]


class Raising(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.log.default):
            raise TypeError("mul(): of the program's own")
        return func(*args, **(kwargs or {}))


def raising() -> list[Any]:
    """A TypeError of the program's from inside of a call is none of torch's."""
    x, heard = torch.ones(2, requires_grad=True), []

    def refuse(value: Tensor) -> Any:
        raise TypeError("not to be kept")

    attempts: list[Callable[[], Any]] = [lambda: x.mul(x), lambda: x.exp(), lambda: torch.log(x)]
    for attempt in attempts:
        with Raising(), torch.autograd.graph.saved_tensors_hooks(refuse, lambda value: value):
            try:
                attempt()
            except TypeError as error:
                heard.append(str(error))
    return [*heard, x.mul(2), x.exp(), torch.log(x)]


def attributes() -> list[Any]:
    x = torch.ones(2, requires_grad=True)
    x.mul(2).sum().backward()
    grad = x.grad
    x.grad = None
    x.grad = torch.zeros(2)
    with contextlib.suppress(RuntimeError, TypeError):
        x.grad = 3  # type: ignore[assignment]
    del x.grad
    found = [
        grad,
        x.grad,
        x.shape,
        x.dtype,
        x.device,
        x.is_leaf,
        x.T,
        x.mT if x.dim() > 1 else None,
        x.data,
        x.requires_grad,
    ]
    x.requires_grad = False
    x.names = None  # type: ignore[assignment]
    return [*found, x.requires_grad, x.names, x.is_sparse, x.layout, x.real, x.itemsize, x.nbytes]


@pytest.mark.parametrize("program", [classes, modes, refused, raising, attributes])
@pytest.mark.filterwarnings("ignore")
def test_the_program_and_its_records_are_the_same(
    program: Callable[[], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []

    class Build:
        model = None

        def step(self) -> None:
            results.append(repr(program()))

    bare = repr(program())
    found = []
    for number, module in enumerate((taps.C, None)):
        monkeypatch.setattr(taps, "C", module)
        found.append(recorded(Build, tmp_path / str(number), "op"))  # type: ignore[arg-type]
    assert results == [bare] * 6
    assert [call[0] for call in found[0]] == [call[0] for call in found[1]]
    for one, other in zip(*found, strict=True):
        assert repr(one) == repr(other)


def test_a_call_that_torch_refuses_takes_no_number(tmp_path: Path) -> None:
    x = torch.ones(2)
    with ulpscope.capture(tmp_path / "run"):
        for _ in range(2):
            x.mul(2)
        for _ in range(3):
            with pytest.raises(TypeError):
                x.mul(1, 2, 3)
            with pytest.raises(TypeError):
                x * "text"  # type: ignore[operator]
        x.mul(3)
        x * 3
    assert names(tmp_path / "run") == [
        *(f"Tensor.mul.{number}.forward" for number in range(3)),
        "Tensor.__mul__.0.forward",
    ]


def test_an_operator_that_raises_inside_is_recorded(tmp_path: Path) -> None:
    x = torch.ones(2)
    with ulpscope.capture(tmp_path / "run"):
        for _ in range(3):
            with Raising(), pytest.raises(TypeError):
                x * x
        x * x
    assert names(tmp_path / "run") == [f"Tensor.__mul__.{number}.forward" for number in range(4)]
    assert [call.error is not None for call in ulpscope.open_dump(tmp_path / "run").calls()] == [
        True,
        True,
        True,
        False,
    ]


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Memory that was freed holds other bytes."""
    environment = {**os.environ, "MALLOC_PERTURB_": "165"}
    words = [sys.executable, "-X", "faulthandler", "-c", program, str(folder)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


def test_a_finalizer_may_stop_the_capture_while_a_call_is_told(tmp_path: Path) -> None:
    program = """
import gc, sys, torch, ulpscope
x = torch.ones(2)
cap = ulpscope.Capture(sys.argv[1] + "/run", level="op")
class Cycle:
    def __init__(self): self.me = self
    def __del__(self): print("stopping"); cap.stop()
cap.start()
x.add(x); x.add(x)
gc.collect(); gc.disable()
cycle = Cycle(); del cycle
gc.set_threshold(1, 1000, 1000); gc.enable()
for _ in range(3): torch.Tensor.add(x, x)
gc.set_threshold(700, 10, 10)
cap.close()
print(torch.Tensor.add(x, x).tolist())
"""
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["stopping", "[2.0, 2.0]", ""]


def test_functions_are_called_first_on_one_thread_while_others_record(tmp_path: Path) -> None:
    program = """
import sys, threading, torch, ulpscope
sys.setswitchinterval(1e-6)
names = "abs acos asin atan ceil cos cosh erf erfc exp floor log log2 neg relu round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
names += " square reciprocal expm1 log1p log10 frac digamma lgamma exp2 deg2rad rad2deg sgn signbit isnan isinf isfinite logit i0"
big, x = torch.full((300_000,), 0.5), torch.full((2,), 0.5)
for turn in range(3):
    with ulpscope.capture(f"{sys.argv[1]}/{turn}", level="op", stacks=False):
        go = True
        def work():
            while go: x.add(x)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        for name in 3 * names.split(): getattr(big, name)()
        go = False
        for thread in threads: thread.join()
print("well")
"""
    done = run(program, tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("well\n"), done.stderr


def test_a_sign_that_writes_is_named_by_what_stands_on_its_left(tmp_path: Path) -> None:
    with ulpscope.capture(tmp_path / "run"):
        for left in (torch.ones(2), 1, torch.ones(2), 2):
            left += torch.zeros(2)
    signs = [name for name in names(tmp_path / "run") if name.startswith("Tensor")]
    assert signs == [f"Tensor.__{sign}__.{number}.forward" for number in range(2) for sign in ("iadd", "radd")]
