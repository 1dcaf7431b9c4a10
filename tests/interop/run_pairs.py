"""Run by the Python of msprobe 8.2.1: models with something changed are dumped, and two dumps compared, by the peer itself.

    python run_pairs.py jobs.json

A job with "model" is one of run_peer.py, and says in "change" what is done to the model; one with "npu" and "bench", two files
dump.json, is a comparison with colours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jobs
import models
import run_peer
import torch
from msprobe.msprobe import main as msprobe

VERSION = (8, 2, 1)
_build = models.build


def _noise(parameters: list[torch.Tensor]) -> None:
    """A thousandth of its size on every weight."""
    generator = torch.Generator().manual_seed(7)
    for each in parameters:
        each += (torch.randn(each.shape, generator=generator) * 1e-3).to(each.dtype) * each.abs().mean()


def _fault(parameters: list[torch.Tensor]) -> None:
    """One weight of the model is twice what it should be."""
    parameters[len(parameters) // 2] *= 2


CHANGES = {"none": lambda parameters: None, "noise": _noise, "fault": _fault}


def work(job: jobs.Job) -> None:
    if "model" in job:
        models.build = lambda name: _changed(name, job["change"])
        run_peer.dump(job, VERSION)
        return
    out = Path(job["out"])
    out.mkdir(parents=True)
    config = out / "compare.json"
    config.write_text(json.dumps({"npu_path": job["npu"], "bench_path": job["bench"], "is_print_compare_log": False}))
    sys.argv = ["msprobe", "-f", "pytorch", "compare", "-i", str(config), "-o", str(out), "-hl", "-c"]
    msprobe()


def _changed(name: str, change: str) -> tuple[Any, Any]:
    model, step = _build(name)
    with torch.no_grad():
        CHANGES[change]([each for each in model.parameters() if each.is_floating_point()])
    return model, step


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(1 if jobs.run(json.loads(Path(sys.argv[1]).read_text()), work) else 0)
