"""Makes src/ulpscope/analyze/kernels.tsv: how far right kernels of the CPU round, from torch's own samples and random ones.

    python tools/measure_kernels.py --out src/ulpscope/analyze/kernels.tsv [--samples 8] [--dtypes float32,bfloat16,float16]

Every sample of torch's database of operators is run forward and backward, as it is and with its numbers several times as
large, and then the programs of `ulpscope calibrate`; each with AVX512, AVX2 and neither (ATEN_CPU_CAPABILITY), with random
numbers of its own. An error above the bound of a habit is not taken: it is printed, and either the reference is wrong or the
kernel. Needs expecttest, and about five minutes for a dtype and a capability.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from ulpscope.analyze.calibrate import kept, table_of
from ulpscope.analyze.limits import LOW
from ulpscope.analyze.measured import Kernel, Key, read_table, write_table
from ulpscope.frameworks.torch.kernel_programs import programs, run_program
from ulpscope.replay.calibrate import where
from ulpscope.replay.session import Ledger
from ulpscope.store.ledger_file import Row, find_ledgers, read_ledger

CAPABILITIES = ("avx512", "avx2", "default")
SCALES = (1.0, 8.0)
TURNS = 6
# Wrong in low precision (torch 2.13 on a CPU): what they return has nothing to do with the right answer. No limit fits.
_BROKEN = ("matrix_exp",)
WRONG = frozenset({"_fused_sgd"})
# Looked at: the kernel is as far off as this, and the reference right. Their limits are as wide as that.
# `glu_backward` rounds between its steps, where a product in float16 may fall below the normal numbers.
ROUGH = frozenset(
    {
        "igamma",
        "igammac",
        "polygamma",
        "ldexp",
        "special_airy_ai",
        "special_laguerre_polynomial_l",
        "special_chebyshev_polynomial_t",
        "glu_backward",
    }
)
_NUMBERS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def database(dtype: torch.dtype, samples: int, seed: int) -> Iterator[None]:
    """Runs all samples; a pause after every operator."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if dtype not in op.supported_dtypes("cpu") or op.name.startswith(
            ("empty", "new_empty", "_refs", "jiterator", *_BROKEN)
        ):
            continue
        torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        try:
            found = list(op.sample_inputs("cpu", dtype, requires_grad=grad))[:samples]
        except Exception:
            continue
        for sample in found:
            for scale in SCALES:
                _sample(op, sample, scale)
        yield


def _sample(op: Any, sample: Any, scale: float) -> None:
    def larger(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _NUMBERS and value.layout is torch.strided:
            return (value.detach() * scale).requires_grad_(value.requires_grad)
        return value

    try:
        given = sample.transform(larger) if scale != 1 else sample
        result = op(given.input, *given.args, **given.kwargs)
        made = [result] if isinstance(result, torch.Tensor) else [x for x in result if isinstance(x, torch.Tensor)]
        wanted = [x for x in made if x.requires_grad and x.layout is torch.strided]
        if wanted:
            torch.autograd.backward(wanted, [torch.randn_like(x) for x in wanted])
    except Exception:
        return


def measure(dtype: str, samples: int, seed: int) -> dict[Key, Kernel]:
    table: dict[Key, Kernel] = {}
    work = database(getattr(torch, dtype), samples, seed)
    left = True
    while left:
        with tempfile.TemporaryDirectory() as scratch:
            with Ledger(scratch):
                left = sum(1 for _, _ in zip(range(24), work, strict=False)) == 24
            _add(table, scratch)
    with tempfile.TemporaryDirectory() as scratch:
        with Ledger(scratch):
            for turn in range(TURNS):
                for program in programs():
                    run_program(program, dtype, "cpu", seed * TURNS + turn)
        _add(table, scratch)
    return table


def _add(table: dict[Key, Kernel], folder: str) -> None:
    rows: list[Row] = [row for path in find_ledgers(Path(folder)) for row in read_ledger(path)[1]]
    for key, kernel in table_of(rows).items():
        table[key] = kernel.beside(table.get(key, Kernel()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ulpscope-kernels")
    parser.add_argument("--worker", nargs=2)
    told = parser.parse_args()
    warnings.simplefilter("ignore")
    if told.worker:
        dtype, seed = told.worker
        write_table(told.out, measure(dtype, told.samples, int(seed)), where("cpu"))
        return
    told.work.mkdir(parents=True, exist_ok=True)
    total: dict[Key, Kernel] = {}
    for seed, capability in enumerate(CAPABILITIES):
        for dtype in told.dtypes.split(","):
            part = told.work / f"{capability}-{dtype}.tsv"
            if not part.exists():
                environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
                words = ["--out", str(part), "--samples", str(told.samples), "--worker", dtype, str(seed)]
                subprocess.run([sys.executable, __file__, *words], env=environment, check=False)
            for key, kernel in (read_table(part) if part.exists() else {}).items():
                total[key] = kernel.beside(total.get(key, Kernel()))
    total = {key: kernel for key, kernel in total.items() if key[0] not in WRONG or key[1] not in LOW}
    table = {key: kernel if key[0] in ROUGH else kept({key: kernel})[key] for key, kernel in total.items()}
    print(
        json.dumps(
            {" ".join(map(str, key)): str(kernel) for key, kernel in total.items() if table[key] != kernel}, indent=1
        )
    )
    about = [
        f"made by tools/measure_kernels.py: {', '.join(CAPABILITIES)}; {told.samples} samples, each {SCALES} times as large",
        *where("cpu"),
    ]
    write_table(told.out, table, about)


if __name__ == "__main__":
    main()
