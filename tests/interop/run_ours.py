"""The other side of run_peer.py: the same jobs, dumped by ulpscope through its msprobe facade.

    python run_ours.py [--native | --plain] jobs.json

With --native the capture behind the facade is used directly, and the dump has the native format; with --plain nothing is recorded,
and only the gradients are told.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jobs

_NATIVE_LEVELS = {"L0": "module", "L1": "op", "mix": "mix"}


def configuration(job: dict[str, Any]) -> dict[str, Any]:
    """config.json for a job, as a user of the peer writes it."""
    task: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"]}
    if job["task"] == "statistics":
        task["summary_mode"] = job["summary_mode"]
    return {
        "task": job["task"],
        "dump_path": str(Path(job["out"]).resolve()),
        "rank": [],
        "step": [],
        "level": job["level"],
        job["task"]: task,
    }


def dump(job: dict[str, Any]) -> None:
    """One step of one model into job["out"], written as a program for the peer is written."""
    from models import build, gradients

    from ulpscope.compat.msprobe import PrecisionDebugger, seed_all

    seed_all(1234)
    model, step = build(job["model"])
    out = Path(job["out"])
    out.mkdir(parents=True)
    config = out.with_name(out.name + ".config.json")
    config.write_text(json.dumps(configuration(job)))
    debugger = PrecisionDebugger(config_path=str(config))
    debugger.start(model=model)
    step()
    debugger.stop()
    debugger.step()
    Path(job["out"] + ".gradients.json").write_text(json.dumps(gradients(model)))


def dump_natively(job: dict[str, Any]) -> None:
    """The same without the facade."""
    import torch
    from models import build, gradients

    import ulpscope

    ulpscope.seed_all(1234)
    model, step = build(job["model"])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    capture = ulpscope.Capture(
        job["out"],
        model=model,
        level=_NATIVE_LEVELS[job["level"]],
        tensors=job["task"] == "tensor",
        checksum=job["summary_mode"] == "md5",
    )
    capture.start()
    step()
    capture.stop()
    capture.step()
    capture.close()
    Path(job["out"] + ".gradients.json").write_text(json.dumps(gradients(model)))


def run_plainly(job: dict[str, Any]) -> None:
    """The same without recording anything."""
    from models import build, gradients

    import ulpscope.compat.msprobe as facade

    facade.seed_all(1234)
    model, step = build(job["model"])
    step()
    Path(job["out"] + ".gradients.json").write_text(json.dumps(gradients(model)))


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[-1]).read_text())
    import torch
    import torch._dynamo  # heavy; a capture imports it, and every job would anew

    torch.set_num_threads(1)
    from models import NEEDS_TRANSFORMERS

    if any(job["model"] in NEEDS_TRANSFORMERS for job in wanted):
        import transformers  # noqa: F401
    import ulpscope  # noqa: F401

    work = {"--native": dump_natively, "--plain": run_plainly}.get(sys.argv[1], dump)
    sys.exit(1 if jobs.run(wanted, work) else 0)
