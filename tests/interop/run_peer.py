"""Run by a peer's Python: dumps models with the peer's own PrecisionDebugger.

    python run_peer.py jobs.json

A job is {"model", "level", "task", "summary_mode", "out"}. Each job runs in a forked child, because the debugger is a singleton
that patches torch for good; torch, transformers and msprobe are imported once.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import jobs


def configuration(job: dict[str, Any], version: tuple[int, ...]) -> dict[str, Any]:
    """config.json of the peer for a job, with the keys its version knows."""
    task = {"scope": [], "list": [], "data_mode": ["all"]}
    if job["task"] == "statistics":
        task["summary_mode"] = job["summary_mode"]
    config = {
        "task": job["task"],
        "dump_path": str(Path(job["out"]).resolve()),
        "rank": [],
        "step": [],
        "level": job["level"],
        job["task"]: task,
    }
    if version >= (26,):
        config["risk_level"] = "ALL"
    if version < (8,):
        config |= {"enable_dataloader": False}
    return config


def dump(job: dict[str, Any], version: tuple[int, ...]) -> None:
    """One step of one model into job["out"]."""
    from models import build, gradients
    from msprobe.pytorch import PrecisionDebugger, seed_all

    if "rm_dropout" in inspect.signature(seed_all).parameters:
        seed_all(1234, rm_dropout=True)
    else:
        seed_all(1234)
    model, step = build(job["model"])
    out = Path(job["out"])
    out.mkdir(parents=True)
    config = out.with_name(out.name + ".config.json")
    config.write_text(json.dumps(configuration(job, version)))
    # 1.0.3 is told the model when it is made, later versions when it starts.
    in_constructor = "model" in inspect.signature(PrecisionDebugger.__init__).parameters and version < (8,)
    debugger = PrecisionDebugger(config_path=str(config), **({"model": model} if in_constructor else {}))
    debugger.start(**({} if in_constructor else {"model": model}))
    step()
    debugger.stop()
    debugger.step()
    Path(job["out"] + ".gradients.json").write_text(json.dumps(gradients(model)))


if __name__ == "__main__":
    from importlib import metadata

    wanted = json.loads(Path(sys.argv[1]).read_text())
    import torch

    torch.set_num_threads(1)
    from models import NEEDS_TRANSFORMERS

    if any(job["model"] in NEEDS_TRANSFORMERS for job in wanted):
        import transformers  # noqa: F401
    import msprobe.pytorch  # noqa: F401

    found = tuple(int(part) for part in metadata.version("mindstudio-probe").split(".")[:3])
    sys.exit(1 if jobs.run(wanted, lambda job: dump(job, found)) else 0)
