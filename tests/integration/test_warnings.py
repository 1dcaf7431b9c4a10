"""Warnings name the lines that they name without us, and the program's filters know them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

# Each prints where its warnings come from, and whether a filter for the modules of the program finds them.
PROGRAM = """
import sys, warnings, torch, torch.nn as nn, torch.nn.functional as F
from library import in_library
KINDS = {}
x = torch.ones(4, 4)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

def kind(function):
    KINDS[function.__name__] = function

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        warnings.warn("forward of a function", stacklevel=2)
        return v * 2
    @staticmethod
    def backward(ctx, g):
        warnings.warn("backward of a function")
        warnings.warn("backward of a function, outside", stacklevel=2)
        return g * 2

class Module(nn.Module):
    def forward(self, v):
        warnings.warn("of a module")
        warnings.warn("of who called a module", stacklevel=2)
        return v.reshape(2, 2, 4).T

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        warnings.warn("of a step", stacklevel=2)
        return super().step(closure)

@kind
def of_python(): F.dropout2d(x)
@kind
def of_python_twice(): F.softmax(x); F.softmax(x)
@kind
def of_cpp(): torch.sparse_coo_tensor([[0], [1]], torch.ones(1), (2, 2)); x.reshape(2, 2, 4).T
@kind
def of_a_module(): Module()(x); nn.Sequential(Module())(x); nn.Softmax()(x)
@kind
def of_a_backward(): v = x.clone().requires_grad_(); Function.apply(v).sum().backward()
@kind
def of_cpp_in_a_backward(): v = x.clone().requires_grad_(); (v * v).sum().backward(create_graph=True)
@kind
def of_a_hook():
    v = x.clone().requires_grad_() * 2
    v.register_hook(lambda g: warnings.warn("hook", stacklevel=2))
    v.register_hook(lambda g: warnings.warn("hook"))
    v.sum().backward()
@kind
def of_an_attribute(): (x.clone().requires_grad_() * 2).grad
@kind
def of_an_optimizer(): o = Optimizer(net.parameters(), 0.1); net(x).sum().backward(); o.step()
@kind
def of_a_schedule(): o = torch.optim.SGD(net.parameters(), 0.1); torch.optim.lr_scheduler.StepLR(o, 1).step()
@kind
def of_a_library(): in_library(x)
@kind
def of_out(): torch.add(torch.ones(2, 2), 1, out=torch.ones(3))
@kind
def of_a_compiled_region(): torch.compile(lambda v: F.softmax(v * 2), backend="eager")(x)

for name, function in KINDS.items():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    for each in sorted({(w.filename.rpartition("/")[2], w.lineno, str(w.message)[:40]) for w in found}):
        print(name, *each)
    for module in ("__main__", "library"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module=module)
            try:
                function()
            except Warning as warning:
                print(name, module, "raised", str(warning)[:40])
            except RuntimeError as error:
                print(name, module, "ended", type(error).__name__)
"""
LIBRARY = """
import torch, torch.nn.functional as F
def in_library(x):
    F.softmax(x)
    return F.dropout2d(x)
"""
WAYS = {
    **{level: ["capture", "-o", "run", "--level", level] for level in ("module", "op", "mix", "kernel")},
    "blame": ["blame"],
    "overflow": ["check", "overflow", "-n", "-1"],
}


def said(folder: Path, *before: str) -> list[str]:
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "library.py").write_text(LIBRARY, encoding="utf-8")
    done = subprocess.run(
        [*before, sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
    )
    return [line for line in done.stdout.splitlines() if line.startswith("of_")]


@cache
def bare(folder: Path) -> list[str]:
    return said(folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_warning_names_the_line_that_it_names_without_us(
    way: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = bare(tmp_path_factory.getbasetemp())
    kinds = {line.split()[0] for line in expected}
    assert len(kinds) == 13
    assert any("raised" in line for line in expected)
    assert said(tmp_path, sys.executable, "-m", "ulpscope", *WAYS[way], "--") == expected
